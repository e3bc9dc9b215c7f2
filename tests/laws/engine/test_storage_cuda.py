"""Laws on a CUDA device of all ways that states and weights are stored: the bits of the CPU."""

import copy
import itertools

import pytest
import torch

from support.cases import KINDS, PLAIN
from support.cuda_device import assert_same, needs_cuda, set_gradients, subjects
from support.stepping import assert_same_bits
from support.weight_storages import WAYS

pytestmark = needs_cuda

BF16 = torch.bfloat16
CODES = ("int8", "int4", "fp8")

#: The dtype of weights and the options.
CODED = [(torch.float32, {"state_dtype": code}) for code in CODES]
KEPT = [(BF16, dict(way)) for way in WAYS]
KEPT_AND_CODED = [(BF16, {"state_dtype": "int8", **way}) for way in WAYS]
MASTERS_AND_CODED = [(BF16, {"state_dtype": code, "master_weights": True}) for code in CODES]

#: Smaller than a word; without states in codes and with; ends within a block, a part and a chunk.
SHAPES = ((1,), (129,), (0, 4), (4096,), (65, 67), (4097,), (300, 500), (3, 5, 7))


def each_of(*storages):
    found = list(itertools.chain(*storages))
    names = ["-".join(map(str, options.values())) for _, options in found]
    return pytest.mark.parametrize(("dtype", "options"), found, ids=names)


def each_case(cases):
    return pytest.mark.parametrize("case", list(cases), ids=str)


@each_of(KEPT, KEPT_AND_CODED, MASTERS_AND_CODED)
@each_case(KINDS)
def test_clipping_and_cleared_gradients(case, dtype, options):
    optimizer, params, twin, twins = subjects(case, dtype, SHAPES, **options)
    for step in range(1, 4):
        set_gradients(params, twins, step)
        optimizer.step(max_norm=0.5, zero_grad=step > 1)
        twin.step(max_norm=0.5, zero_grad=step > 1)
        assert_same(optimizer, params, twin, twins, f"step {step}")
        for param, other in zip(params, twins, strict=True):
            assert_same_bits(other.grad.cpu(), param.grad, "gradient")


@each_of(CODED, KEPT, KEPT_AND_CODED)
@each_case(case for case in PLAIN if case.elementwise)
def test_unaligned_operands(case, dtype, options):
    optimizer, params, twin, twins = subjects(case, dtype, ((4099,),), **options)
    memory = torch.zeros(5000, dtype=dtype, device="cuda")
    twins[0].data = memory[3 : 3 + 4099].copy_(twins[0].detach())
    for step in range(1, 4):
        set_gradients(params, twins, step)
        twins[0].grad = torch.zeros_like(memory)[1 : 1 + 4099].copy_(twins[0].grad)
        optimizer.step()
        twin.step()
        assert_same(optimizer, params, twin, twins, f"step {step}")
    assert torch.all(memory[:3] == 0)
    assert torch.all(memory[3 + 4099 :] == 0)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@each_of(CODED, KEPT)
@each_case(case for case in PLAIN if case.elementwise)
def test_a_number_that_is_none(case, dtype, options, bad):
    optimizer, params, twin, twins = subjects(case, dtype, ((8192,),), **options)
    for step in range(1, 4):
        set_gradients(params, twins, step)
        if step == 2:
            params[0].grad[5000] = twins[0].grad[5000] = bad
        optimizer.step()
        twin.step()
    weight, other = params[0].detach(), twins[0].detach().cpu()
    assert torch.equal(weight.isnan(), other.isnan())
    finite = ~weight.isnan()
    assert_same_bits(other[finite], weight[finite], "weight")


@each_of(CODED, KEPT, KEPT_AND_CODED)
@each_case(case for case in PLAIN if case.counts)
def test_a_skipped_step_changes_nothing(case, dtype, options):
    _, params, twin, twins = subjects(case, dtype, SHAPES, **options)
    set_gradients(params, twins, 1)
    twin.step()
    before = copy.deepcopy(twin.state_dict()["state"]), [p.detach().clone() for p in twins]
    twin.found_inf = torch.ones((), device="cuda")
    twin.step()
    for index, param in enumerate(twins):
        assert_same_bits(param, before[1][index], "weight")
        for name, value in before[0][index].items():
            assert_same_bits(twin.state[param][name].cpu(), value.cpu(), name)


@each_of(CODED, KEPT, KEPT_AND_CODED)
@each_case(case for case in PLAIN if case.has("capturable"))
def test_a_captured_graph(case, dtype, options):
    _, params, twin, twins = subjects(case, dtype, SHAPES, capturable=True, **options)
    *_, eager, others = subjects(case, dtype, SHAPES, capturable=True, **options)
    for each in (twins, others):
        set_gradients(params, each, 1)
    twin.step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        twin.step()
    graph.replay()
    graph.replay()
    for _ in range(3):
        eager.step()
    for param, other in zip(twins, others, strict=True):
        assert_same_bits(param, other, "weight")
