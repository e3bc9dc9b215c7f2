"""Steps on the CPU for a model elsewhere: without a GPU that is there too, and has no streams."""

import importlib
import math
import threading

import pytest
import torch
from torch import nn

import fusedstep
from fusedstep import optim
from support.buckets import (
    PAIRS,
    Net,
    accumulated,
    assert_same,
    batches,
    by_closures,
    of_class,
    two_groups,
)
from support.cases import COMPOSITES, PLAIN
from support.stepping import threads

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a GPU"))]  # fmt: skip
BF16 = torch.bfloat16
MASTERS = {"master_weights": "float32"}
SMALL = {"bucket_cap_mb": PAIRS}


def gradients(model, batch):
    """Gradients of a model, which the same weights have on every device."""
    for p in model.parameters():
        if p is not model.unused:
            (p.double().cos().sum() * batch.sum().item()).backward()


def trained(make, dtype=torch.float32, device="cpu", offloaded=None, steps=3, **options):
    """The weights after some steps, and the optimizer. ``offloaded``: arguments of offload()."""
    model = Net(dtype, device)
    optimizer = make(model)
    if offloaded is not None:
        optimizer = fusedstep.offload(optimizer, **offloaded)
    for batch in batches(steps):
        gradients(model, batch)
        optimizer.step(**options)
        optimizer.zero_grad()
    return [p.detach().cpu() for p in model.parameters()], optimizer


@pytest.mark.parametrize("case", PLAIN, ids=str)
def test_steps_are_those_of_the_optimizer(case):
    expected, _ = trained(lambda model: case.build(two_groups(model)))
    for offloaded in (SMALL, {"overlap": False}):
        found, _ = trained(lambda model: case.build(two_groups(model)), offloaded=offloaded)
        assert_same(found, expected)


@pytest.mark.parametrize(
    "cls", [each for each in COMPOSITES if each is not optim.SparseAdam], ids=lambda c: c.__name__
)
def test_of_optimizers_of_matrices(cls):
    def make(model):
        return of_class(cls, model)

    expected, _ = trained(make)
    found, _ = trained(make, offloaded=SMALL)
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_weights_of_a_class_without_master_weights(dtype):
    def make(model):
        return optim.RowWiseAdagrad(model.parameters(), lr=0.01)

    expected, _ = trained(make, dtype=dtype)
    found, _ = trained(make, dtype=dtype, offloaded=SMALL)
    assert_same(found, expected)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "options",
    [{}, MASTERS, {"master_weights": "split"}, {"rounding": "kahan"},
     {"rounding": "stochastic", "seed": 2}, MASTERS | {"state_dtype": "int8"}],
    ids=str,
)  # fmt: skip
def test_of_16_bit_weights(options, device):
    """Without another way they are kept in float32."""
    expected, _ = trained(
        lambda model: optim.AdamW(two_groups(model), lr=1e-2, **(options or MASTERS)), BF16
    )
    found, optimizer = trained(
        lambda model: optim.AdamW(two_groups(model), lr=1e-2, fused=False, **options),
        BF16,
        device,
        SMALL,
    )
    assert_same(found, expected)
    assert all(value.is_cpu for state in optimizer.state.values() for value in state.values())


@pytest.mark.parametrize("device", DEVICES)
def test_clipping(device):
    def make(model):
        return optim.AdamW(two_groups(model), lr=1e-2)

    expected, _ = trained(make, max_norm=0.5)
    unclipped, _ = trained(make)
    assert not any(map(torch.equal, expected[1:], unclipped[1:]))  # the first is unused
    found, _ = trained(make, device=device, offloaded={"overlap": False}, max_norm=0.5)
    assert_same(found, expected)
    found, _ = trained(
        lambda model: optim.AdamW(two_groups(model), lr=1e-2, max_grad_norm=0.5),
        device=device,
        offloaded={"overlap": False},
    )
    assert_same(found, expected)


@pytest.mark.parametrize("device", DEVICES)
def test_clipping_by_the_norm_of_the_iteration_before(device):
    def make(model):
        return optim.SGD(two_groups(model), lr=1e-2, momentum=0.9)

    model = Net()
    optimizer = make(model)
    fusedstep.step_in_backward(optimizer, max_previous_norm=0.5, **SMALL)
    for batch in batches(3):
        gradients(model, batch)
        optimizer.step()
    found, _ = trained(make, device=device, offloaded=SMALL | {"max_previous_norm": 0.5})
    assert_same(found, [p.detach() for p in model.parameters()])


def noted_at_steps(optimizer, look):
    """A list that each step of a bucket adds what ``look()`` returns there to."""
    found, step = [], optimizer._inner._update_bucket
    optimizer._inner._update_bucket = lambda *args: found.append(look()) or step(*args)
    return found


def test_steps_are_taken_by_another_thread_during_the_backward_pass():
    model = Net()
    optimizer = fusedstep.offload(optim.AdamW(model.parameters()), bucket_cap_mb=0)
    found = noted_at_steps(optimizer, threading.current_thread)
    gradients(model, batches(1)[0])
    assert all(p.grad is None for p in model.parameters())
    optimizer._finish()
    assert len(found) == 8
    assert threading.current_thread() not in found


def test_steps_take_a_thread_less_than_torch():
    """The one that feeds the device. From the step on that follows a change of torch's number."""
    model = Net()
    optimizer = fusedstep.offload(optim.AdamW(model.parameters()), bucket_cap_mb=0)
    found = noted_at_steps(optimizer, torch.get_num_threads)
    for count in (3, 4, 1):
        with threads(count):
            optimizer.step()
            gradients(model, batches(1)[0])
            optimizer.step()
    assert found == 8 * [2] + 8 * [3] + 8 * [1]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_device_keeps_gradients_of_two_buckets():
    """Though the host runs ahead of it."""
    layers = [nn.Linear(1024, 1024, bias=False, device="cuda") for _ in range(16)]
    optimizer = fusedstep.offload(
        optim.SGD([layer.weight for layer in layers], lr=1e-2), bucket_cap_mb=4
    )
    for _ in range(2):  # the first has cuBLAS take memory of its own
        x = torch.ones(1, 1024, device="cuda", requires_grad=True)
        for layer in layers:
            x = layer(x)
        torch.cuda.synchronize()
        before = torch.cuda.memory_stats()["active_bytes.all.current"]
        torch.cuda.reset_peak_memory_stats()
        torch.cuda._sleep(100_000_000)
        x.sum().backward()
        peak = torch.cuda.memory_stats()["active_bytes.all.peak"]
        optimizer.step()
    assert peak - before < 2.1 * layers[0].weight.nbytes


def test_accumulation():
    model, twin = Net(), Net()
    optimizer = optim.AdamW(model.parameters(), lr=1e-2)
    found = accumulated(model, fusedstep.offload(optimizer, accumulation_steps=2, **SMALL), 2)
    assert_same(found, accumulated(twin, optim.AdamW(twin.parameters(), lr=1e-2), 2))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("overlap", [True, False])
def test_gradients_that_stay_are_scaled_and_clipped_by_others(overlap, device):
    """A GradScaler finds them: it unscales them, and leaves a step out whose gradients are not
    finite."""

    def run(offloaded):
        model = Net(device=device)
        optimizer = optim.AdamW(two_groups(model), lr=1e-2)
        if offloaded:
            kept = {"accumulation_steps": None, "overlap": overlap}
            optimizer = fusedstep.offload(optimizer, **SMALL, **kept)
        scaler = torch.amp.GradScaler(device, init_scale=2.0**10, growth_interval=2)
        norms, scales = [], []
        for index, batch in enumerate(batches(4)):
            for _ in range(2):  # passes that are added up
                gradients(model, batch * scaler.scale(torch.ones((), device=device)).cpu())
            assert all(p.grad is not None for p in model.parameters() if p is not model.unused)
            if index == 2:
                model.layers[0].weight.grad[0, 0] = math.inf
            scaler.unscale_(optimizer)
            norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5).cpu())
            before = [p.detach().clone() for p in model.parameters()]
            scaler.step(optimizer)
            scaler.update()
            is_same = all(map(torch.equal, before, model.parameters()))
            assert is_same == (index == 2)
            scales.append(scaler.get_scale())
            optimizer.zero_grad()
        return [p.detach().cpu() for p in model.parameters()], norms, scales

    (found, norms, scales), (expected, *others) = run(offloaded=True), run(offloaded=False)
    assert scales == [2.0**10, 2.0**11, 2.0**10, 2.0**10]
    assert [norms, scales] == others
    assert_same(found, expected)


def test_schedulers_and_closures():
    model, twin = Net(), Net()
    optimizer = fusedstep.offload(optim.AdamW(model.parameters(), lr=1e-2), **SMALL)
    found = by_closures(model, optimizer)
    assert_same(found, by_closures(twin, optim.AdamW(twin.parameters(), lr=1e-2)))


@pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=str)
def test_dictionaries_are_those_of_the_optimizer(dtype):
    """A run goes on with or without offloading, from a dictionary of either."""
    options = {"lr": 1e-2} | (MASTERS if dtype is BF16 else {})

    def go_on(model, dictionary, offloaded):
        optimizer = optim.AdamW(two_groups(model), **options)
        if offloaded:
            optimizer = fusedstep.offload(optimizer, **SMALL)
        if dictionary:
            optimizer.load_state_dict(dictionary)
        for batch in batches(2):
            gradients(model, batch)
            optimizer.step()
            optimizer.zero_grad()
        dictionary = optimizer.state_dict()
        if offloaded:
            optimizer.remove()
        return dictionary

    ends = []
    for ways in ((False, False), (False, True), (True, False), (True, True)):
        model, dictionary = Net(dtype), None
        for offloaded in ways:
            dictionary = go_on(model, dictionary, offloaded)
        assert dictionary["param_groups"][1]["lr"] == 1e-3
        states = [v for _, state in sorted(dictionary["state"].items()) for v in state.values()]
        ends.append([*(p.detach() for p in model.parameters()), *states])
    for end in ends[1:]:
        assert_same(end, ends[0])


def test_states_are_taken_over():
    def make(model):
        return optim.AdamW(two_groups(model), lr=1e-2)

    expected, _ = trained(make, steps=4)
    model = Net()
    optimizer = make(model)
    for n, batch in enumerate(batches(4)):
        if n == 2:
            optimizer = fusedstep.offload(optimizer, **SMALL)
        gradients(model, batch)
        optimizer.step()
        optimizer.zero_grad()
    assert_same([p.detach() for p in model.parameters()], expected)


def test_changes_of_weights_are_taken_over():
    def train(offloaded):
        model = Net()
        optimizer = optim.AdamW(model.parameters(), lr=1e-2)
        if offloaded:
            optimizer = fusedstep.offload(optimizer, **SMALL)
        for batch in batches(2):
            with torch.no_grad():
                for p in model.parameters():
                    p.mul_(0.5)
            gradients(model, batch)
            optimizer.step()
            optimizer.zero_grad()
        return [p.detach() for p in model.parameters()]

    assert_same(train(True), train(False))


def test_an_error_of_a_step_comes_out_of_step():
    model = Net()
    optimizer = fusedstep.offload(optim.AdamW(two_groups(model)), **SMALL)
    optimizer.param_groups[0]["lr"] = "much"
    gradients(model, batches(1)[0])
    with pytest.raises((TypeError, ValueError), match="lr"):
        optimizer.step()


@pytest.mark.parametrize("device", DEVICES)
def test_what_does_not_fit_is_refused(device, monkeypatch):
    model, module = Net(BF16, device), importlib.import_module("fusedstep.offload")
    monkeypatch.setattr(module, "_available", lambda: 2**10)
    optimizer = optim.AdamW(model.parameters())
    with pytest.raises(MemoryError, match=r"of the host's memory.*int8"):
        fusedstep.offload(optimizer)
    assert "master_weights" not in optimizer.param_groups[0]
    sizes = [p.numel() for p in model.parameters()]
    copies = [2 * size for size in sizes]
    if device == "cuda":  # pinned memory has a power of two of bytes
        copies = [2 ** math.ceil(math.log2(size)) for size in copies]
    needed = 2 * sum(copies) + sum(12 * size + 4 for size in sizes)  # 4 + 4 + 4, and a count
    monkeypatch.setattr(module, "_available", lambda: needed - 1)
    with pytest.raises(MemoryError):
        fusedstep.offload(optimizer)
    monkeypatch.setattr(module, "_available", lambda: needed)
    fusedstep.offload(optimizer)
    with pytest.raises(RuntimeError, match="parameter 0 of group 0 is stepped in the backward"):
        fusedstep.offload(optimizer)


@pytest.mark.parametrize(
    ("options", "arguments", "error", "text"),
    [
        ({}, {"device": "meta"}, ValueError, "device must be 'cpu', not 'meta'"),
        ({}, {"bucket_cap_mb": math.nan}, ValueError, "bucket_cap_mb value: nan"),
        ({}, {"accumulation_steps": 0}, ValueError, "accumulation_steps value: 0"),
        ({}, {"max_previous_norm": -1.0}, ValueError, "max_previous_norm value: -1"),
        ({}, {"overlap": False, "max_previous_norm": 1.0}, ValueError, "max_previous_norm is for"),
        ({"max_grad_norm": 1.0}, {}, RuntimeError, "max_grad_norm.*overlap=False"),
        ({"skip_nonfinite": True}, {}, RuntimeError, "skip_nonfinite.*overlap=False"),
        ({"differentiable": True}, {}, RuntimeError, "`differentiable`"),
        ({"capturable": True}, {}, RuntimeError, "`capturable`"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else None,
)
def test_what_is_refused(options, arguments, error, text):
    with pytest.raises(error, match=text):
        fusedstep.offload(optim.AdamW(Net().parameters(), **options), **arguments)


def test_others_are_refused():
    with pytest.raises(
        TypeError,
        match=r"must be one of fusedstep.optim, not torch.*AdamW: fusedstep.con",
    ):
        fusedstep.offload(torch.optim.AdamW(Net().parameters()))
    with pytest.raises(ValueError, match="parameter 0 of group 0 is complex"):
        fusedstep.offload(optim.AdamW([nn.Parameter(torch.ones(2, dtype=torch.complex64))]))
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    with pytest.raises(ValueError, match="parameter 0 of group 0 is a nested tensor"):
        fusedstep.offload(optim.AdamW([nn.Parameter(nested)]))
    with pytest.raises(ValueError, match="parameter 1 of group 0 is on meta, and others on"):
        fusedstep.offload(
            optim.AdamW([nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2, device="meta"))])
        )
    optimizer = fusedstep.offload(optim.AdamW(Net().parameters()))
    with pytest.raises(RuntimeError, match="before it is offloaded"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    with pytest.raises(RuntimeError, match=r"step\(max_norm=…\)"):
        optimizer.step(max_norm=1.0)
