"""Steps in the backward pass: they are those of ordinary steps, and gradients are freed."""

import math

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import fusedstep
from fusedstep import optim
from support.buckets import (
    ALONE,
    PAIRS,
    WHOLE,
    Net,
    accumulated,
    assert_same,
    backward,
    batches,
    by_closures,
    of_class,
    two_groups,
)
from support.cases import COMPOSITES, PLAIN


def trained(make, cap=None, dtype=torch.float32, steps=4, **options):
    """The weights and states after some steps; in the backward pass if a size is given."""
    model = Net(dtype)
    optimizer = make(model)
    if cap is not None:
        fusedstep.step_in_backward(optimizer, bucket_cap_mb=cap, **options)
    for batch in batches(steps):
        backward(model, batch)
        if cap == ALONE:
            assert not model.grads()
        optimizer.step()
        assert cap is None or not model.grads()
        optimizer.zero_grad()
    states = [value for p in model.parameters() for value in optimizer.state[p].values()]
    return [*model.parameters(), *states]


@pytest.mark.parametrize("case", PLAIN, ids=str)
def test_steps_are_the_ordinary_ones(case):
    def make(model):
        return case.build(two_groups(model))

    expected = trained(make)
    for cap in (ALONE, PAIRS, WHOLE):
        assert_same(trained(make, cap), expected)


@pytest.mark.parametrize(
    "cls", [each for each in COMPOSITES if each is not optim.SparseAdam], ids=lambda c: c.__name__
)
def test_of_optimizers_of_matrices(cls):
    expected = trained(lambda model: of_class(cls, model))
    for cap in (ALONE, WHOLE):
        found = trained(lambda model: of_class(cls, model), cap)
        if cls in (optim.Muon, optim.MuSGD):  # products of a batch may add in another order
            torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-4)
        else:
            assert_same(found, expected)


def test_of_sparse_gradients():
    def embeddings(cap):
        torch.manual_seed(0)
        tables = [nn.Embedding(20, 4, sparse=True) for _ in range(2)]
        optimizer = optim.SparseAdam([table.weight for table in tables])
        if cap is not None:
            fusedstep.step_in_backward(optimizer, bucket_cap_mb=cap)
        for n in range(3):
            sum(table(torch.tensor([n, 3, 3])).square().sum() for table in tables).backward()
            optimizer.step()
            optimizer.zero_grad()
        return [table.weight for table in tables]

    assert_same(embeddings(ALONE), embeddings(None))


@pytest.mark.parametrize(
    "options",
    [{"rounding": "stochastic", "seed": 3}, {"rounding": "kahan"}, {"master_weights": "split"},
     {"state_dtype": "int8"}, {"fused": False}],
    ids=str,
)  # fmt: skip
def test_of_16_bit_weights(options):
    def make(model):
        return optim.AdamW(two_groups(model), lr=1e-2, **options)

    assert_same(trained(make, PAIRS, torch.bfloat16), trained(make, None, torch.bfloat16))


def test_gradients_live_as_long_as_their_bucket():
    model = Net()
    optimizer = optim.AdamW(model.parameters())
    alive = []
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda _: alive.append(len(model.grads())))
    fusedstep.step_in_backward(optimizer, bucket_cap_mb=ALONE)
    backward(model, batches(1)[0])
    assert alive == [1] * 8
    assert not model.grads()


def test_plans_are_found_again():
    model = Net()
    optimizer = optim.AdamW(two_groups(model))
    fusedstep.step_in_backward(optimizer, bucket_cap_mb=PAIRS)
    found = []
    for batch in batches(3):
        backward(model, batch)
        optimizer.step()
        found.append([plan.handle for plan in optimizer._plans.values()])
    assert len(found[0]) > 2
    assert found[0] == found[1] == found[2]


def test_a_bucket_waits_for_all_its_gradients():
    """The bucket of a weight without a gradient is stepped by step()."""
    model = Net()
    optimizer = optim.AdamW(model.parameters())
    fusedstep.step_in_backward(optimizer)
    backward(model, batches(1)[0])
    assert len(model.grads()) == 8
    optimizer.step()
    assert not model.grads()
    assert all(optimizer.state[p]["step"] == 1 for p in model.layers.parameters())
    assert model.unused not in optimizer.state


@pytest.mark.parametrize("passes", [3, 2], ids=["complete", "with a rest"])
def test_accumulation(passes):
    model, twin = Net(), Net()
    optimizer = optim.AdamW(model.parameters(), lr=1e-2)
    alive = []
    optimizer.register_step_pre_hook(lambda *_: alive.append(bool(model.grads())))
    fusedstep.step_in_backward(optimizer, bucket_cap_mb=ALONE, accumulation_steps=3)
    found = accumulated(model, optimizer, passes)
    assert_same(found, accumulated(twin, optim.AdamW(twin.parameters(), lr=1e-2), passes))
    assert alive == 2 * [passes < 3]


@pytest.mark.parametrize("fused", [True, False])
def test_clipping_by_the_norm_of_the_iteration_before(fused):
    limit, norms = 0.5, [math.inf]
    model, twin = Net(), Net()
    optimizer, ordinary = (
        optim.SGD(each.parameters(), lr=1e-2, momentum=0.9, fused=fused) for each in (model, twin)
    )
    fusedstep.step_in_backward(optimizer, bucket_cap_mb=PAIRS, max_previous_norm=limit)
    for batch in batches(4):
        backward(model, batch)
        optimizer.step()
        backward(twin, batch)
        grads = [p.grad for p in twin.parameters() if p.grad is not None]
        factor = 1.0 if norms[-1] == math.inf else min(1.0, limit / (norms[-1] + 1e-6))
        norms.append(math.sqrt(sum(grad.double().square().sum().item() for grad in grads)))
        for grad in grads:
            grad.mul_(factor)
        ordinary.step()
        ordinary.zero_grad()
    assert min(norms) > 2 * limit
    torch.testing.assert_close(list(model.parameters()), list(twin.parameters()))


def test_closures_and_schedulers():
    model, twin = Net(), Net()
    optimizer = optim.AdamW(model.parameters(), lr=1e-2)
    fusedstep.step_in_backward(optimizer, bucket_cap_mb=PAIRS)
    found = by_closures(model, optimizer)
    assert not model.grads()
    assert_same(found, by_closures(twin, optim.AdamW(twin.parameters(), lr=1e-2)))


def test_activations_that_are_computed_again():
    def train(in_backward):
        model = Net()
        optimizer = optim.AdamW(model.parameters(), lr=1e-2)
        if in_backward:
            fusedstep.step_in_backward(optimizer, bucket_cap_mb=ALONE)
        for batch in batches(2):
            checkpoint(model, batch.requires_grad_(), use_reentrant=False).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return list(model.parameters())

    assert_same(train(True), train(False))


def test_states_are_saved_and_loaded():
    def make(model):
        return optim.AdamW(two_groups(model), lr=1e-2)

    expected = trained(make)
    model, again = Net(), Net()
    optimizer, other = make(model), make(again)
    fusedstep.step_in_backward(optimizer, bucket_cap_mb=PAIRS)
    for batch in batches(4)[:2]:
        backward(model, batch)
        optimizer.step()
    again.load_state_dict(model.state_dict())
    fusedstep.step_in_backward(other, bucket_cap_mb=ALONE)
    other.load_state_dict(optimizer.state_dict())
    for batch in batches(4)[2:]:
        backward(again, batch)
        other.step()
    assert_same(list(again.parameters()), expected[: len(list(again.parameters()))])


def test_it_ends():
    model = Net()
    optimizer = optim.AdamW(model.parameters())
    with fusedstep.step_in_backward(optimizer, bucket_cap_mb=ALONE) as handle:
        with pytest.raises(
            RuntimeError, match="parameter 0 of group 0 is stepped in the backward pass"
        ):
            fusedstep.step_in_backward(optimizer)
        backward(model, batches(1)[0])
        assert not model.grads()
    handle.remove()
    backward(model, batches(1)[0])
    assert len(model.grads()) == 8
    assert optimizer.step(max_norm=1.0) > 0
    fusedstep.step_in_backward(optimizer)


def test_frozen_weights_are_not_waited_for():
    model = Net()
    for p in (model.unused, model.layers[1].weight):
        p.requires_grad_(False)
    optimizer = optim.AdamW(model.parameters())
    fusedstep.step_in_backward(optimizer)
    for batch in batches(2):
        backward(model, batch)
        assert not model.grads()
        optimizer.step()


def test_an_error_of_a_step_comes_out_of_the_backward_pass():
    model = Net()
    optimizer = of_class(optim.GaLoreAdamW, model)
    fusedstep.step_in_backward(optimizer, bucket_cap_mb=ALONE)
    with pytest.raises(RuntimeError, match=r"parameter 4 of group 0.* NaN or infinite"):
        backward(model, torch.full((8, 16), math.nan))


@pytest.mark.parametrize(
    ("options", "arguments", "error", "text"),
    [
        ({}, {"accumulation_steps": 0}, ValueError, "accumulation_steps value: 0"),
        ({}, {"accumulation_steps": 1.0}, TypeError, "accumulation_steps must be an int"),
        ({}, {"bucket_cap_mb": -1}, ValueError, "bucket_cap_mb value: -1"),
        ({}, {"bucket_cap_mb": math.nan}, ValueError, "bucket_cap_mb value: nan"),
        ({}, {"max_previous_norm": -1.0}, ValueError, "max_previous_norm value: -1"),
        ({"max_grad_norm": 1.0}, {}, RuntimeError, "max_previous_norm=…"),
        ({"skip_nonfinite": True}, {}, RuntimeError, "skip_nonfinite needs all gradients"),
        ({"differentiable": True}, {}, RuntimeError, "`differentiable`"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else None,
)
def test_what_is_refused(options, arguments, error, text):
    model = Net()
    optimizer = optim.AdamW(model.parameters(), **options)
    with pytest.raises(error, match=text):
        fusedstep.step_in_backward(optimizer, **arguments)
    backward(model, batches(1)[0])
    assert len(model.grads()) == 8


def test_other_optimizers_are_refused():
    with pytest.raises(
        TypeError,
        match=r"must be one of fusedstep.optim, not torch.*AdamW: fusedstep.con",
    ):
        fusedstep.step_in_backward(torch.optim.AdamW(Net().parameters()))


def test_weights_of_several_processes_are_refused(monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    with pytest.raises(RuntimeError, match=r"parameter 0 of group 0 is not sharded"):
        fusedstep.step_in_backward(optim.AdamW(Net().parameters()))


def test_limits_that_come_later_are_refused():
    model = Net()
    optimizer = optim.AdamW(model.parameters(), fused=True)
    fusedstep.step_in_backward(optimizer, bucket_cap_mb=ALONE)
    with pytest.raises(RuntimeError, match=r"step\(max_norm=…\)"):
        optimizer.step(max_norm=1.0)
    before = [p.clone() for p in model.parameters()]
    for name, value in (("max_grad_norm", 1.0), ("skip_nonfinite", True)):
        optimizer.param_groups[0][name] = value
        with pytest.raises(RuntimeError, match=f"{name} needs the gradients of all weights"):
            backward(model, batches(1)[0])
        assert_same(list(model.parameters()), before)
        del optimizer.param_groups[0][name]
        optimizer.zero_grad()


@pytest.mark.parametrize("fused", [True, None])
def test_a_scaler_is_refused(fused):
    model = Net()
    optimizer = optim.AdamW(model.parameters(), fused=fused)
    fusedstep.step_in_backward(optimizer, bucket_cap_mb=ALONE)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model(batches(1)[0]).sum()).backward()
    error, text = (RuntimeError, "GradScaler") if fused else (AssertionError, "No inf checks")
    with pytest.raises(error, match=text):
        scaler.step(optimizer)
