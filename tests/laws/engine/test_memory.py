"""Law: a step allocates nothing of weight size."""

import json
import subprocess
import sys

import pytest
import torch

from support.allocations import LAYOUTS, SHAPE, SMALL, allocated_bytes, optimizer_with_gradients
from support.cases import COMPOSITES_OF_ROWS, KINDS, PLAIN


@pytest.mark.parametrize("case", KINDS, ids=str)
def test_a_step_allocates_nothing_of_weight_size(case, tmp_path):
    optimizer = optimizer_with_gradients(case, LAYOUTS)
    assert allocated_bytes(optimizer, tmp_path / "trace.json") < SMALL


@pytest.mark.parametrize(
    "cls",
    [*(case.optimizer for case in PLAIN if case.sparse), *COMPOSITES_OF_ROWS],
    ids=lambda cls: cls.__name__,
)
def test_a_sparse_step_in_torch_operations_allocates_for_its_rows(cls, tmp_path):
    """It keeps what it may have to undo, of rows that have entries alone."""
    rows, columns, entries = 20_000, 32, 50
    table = torch.nn.Parameter(torch.zeros(rows, columns))
    index = torch.arange(entries).mul(7)[None]
    table.grad = torch.sparse_coo_tensor(index, torch.ones(entries, columns), table.shape)
    optimizer = cls([table], lr=0.1, fused=False)
    optimizer.step()
    # Temporaries of the size of the entries, and lists of indices.
    assert allocated_bytes(optimizer, tmp_path / "trace.json") < table.nbytes / 10


@pytest.mark.parametrize("case", PLAIN, ids=str)
def test_an_expanded_gradient_allocates_nothing_of_weight_size(case, tmp_path):
    optimizer = optimizer_with_gradients(case, LAYOUTS)
    for group in optimizer.param_groups:
        for param in group["params"]:
            param.grad = torch.ones(1).expand(param.shape)
    assert allocated_bytes(optimizer, tmp_path / "trace.json") < SMALL


@pytest.mark.parametrize("case", [case for case in PLAIN if case.sparse], ids=str)
def test_a_sparse_gradient_allocates_nothing_of_weight_size(case, tmp_path):
    optimizer = optimizer_with_gradients(case, LAYOUTS)
    index = torch.tensor([[3, 400, 3]])
    for param in optimizer.param_groups[0]["params"]:
        values = torch.ones(3, SHAPE[1])
        param.grad = torch.sparse_coo_tensor(index, values, SHAPE, check_invariants=True)
    assert allocated_bytes(optimizer, tmp_path / "trace.json") < SMALL


@pytest.mark.parametrize("case", PLAIN, ids=str)
def test_the_count_sees_what_the_imperative_twin_allocates(case, tmp_path):
    """The control: at least one temporary of each weight's size, if only for weight decay."""
    decay = {"weight_decay": 0.1} if case.has("weight_decay") else {}
    optimizer = optimizer_with_gradients(case, LAYOUTS, fused=False, **decay)
    weight_bytes = 4 * SHAPE[0] * SHAPE[1]
    assert allocated_bytes(optimizer, tmp_path / "trace.json") >= len(LAYOUTS) * weight_bytes


PEAK_PROGRAM = r"""
import gc, json, re
import torch
from support.cases import COMPOSITES_OF_ROWS, PLAIN

SHAPE = (1000, 1500)
ballast = []

# Not getrusage, whose peak is at first that of the process which started this one.
def status(name):
    with open("/proc/self/status") as file:
        return 1024 * int(re.search(rf"^{name}:\s*(\d+) kB", file.read(), re.MULTILINE)[1])

def peak():
    return status("VmHWM")

def present():
    return status("VmRSS")

def growth(case, fused):
    param = torch.nn.Parameter(torch.ones(SHAPE))
    param.grad = torch.ones_like(param)
    # The twin has a temporary for weight decay, if for nothing else.
    decay = {"weight_decay": 0.1} if case.has("weight_decay") else {}
    optimizer = case.build([param], fused=fused, **decay)
    optimizer.step()
    gc.collect()  # the last case's tensors: they would make room in the middle of a step
    # The peak shows a growth only from the highest level so far: fill up to there first, and stay.
    ballast.append(torch.ones(max(peak() - present(), 0) // 4))
    before = peak()
    for _ in range(2):
        optimizer.step()
    return peak() - before

growth(PLAIN[0], fused=True)  # imports torch's compiler
gc.freeze()  # what is imported: to collect among it takes longer than the steps
found = {case.name: [growth(case, fused=True), growth(case, fused=False)] for case in PLAIN}
print(json.dumps({"weight": 4 * SHAPE[0] * SHAPE[1], "growth": found}))
"""


@pytest.fixture(scope="module")
def growths(subprocess_environment):
    """Growth of a process's peak memory by fused and by imperative steps, in weights."""
    result = subprocess.run(
        [sys.executable, "-c", PEAK_PROGRAM],
        # Freed memory goes back at once. glibc keeps blocks smaller than one it has freed before.
        env=subprocess_environment | {"MALLOC_MMAP_THRESHOLD_": "65536"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    return {
        name: [each / found["weight"] for each in growths]
        for name, growths in found["growth"].items()
    }


@pytest.mark.parametrize("case", PLAIN, ids=str)
def test_no_allocator_at_all_hands_out_a_weight(case, growths):
    """With the imperative twin as the control."""
    fused, imperative = growths[case.name]
    assert fused < 1 / 4
    assert imperative > 1 / 2
