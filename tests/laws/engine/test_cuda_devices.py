"""Several CUDA devices: in one optimizer, and one for each of two processes."""

import functools

import pytest
import torch

from fusedstep import optim
from fusedstep._native import ops
from support import (
    codes_of_shards,
    factors_of_shards,
    four_processes,
    matrices_of_shards,
    projections_of_shards,
    training_of_two,
    two_processes,
)
from support.cases import CASES, PLAIN
from support.cuda_device import SHAPES, assert_same, set_gradients
from support.stepping import (
    as_parameters,
    assert_counts,
    assert_same_bits,
    make_gradients,
    make_weights,
)

if torch.cuda.device_count() < 2 or ops.missing_on("cuda") is not None:
    pytest.skip("needs two CUDA devices and libfusedstep_cuda.so", allow_module_level=True)


def by_turns(params):
    """One group, its weights on one device and the other by turns."""
    devices = [index % 2 for index in range(len(params))]
    return devices, lambda twins: twins


def by_groups(params):
    """Two groups, each on a device."""
    half = len(params) // 2
    devices = [int(index >= half) for index in range(len(params))]
    return devices, lambda twins: [{"params": twins[:half]}, {"params": twins[half:]}]


def subjects(case, spread, **options):
    """An optimizer on the CPU, its parameters, and both on two devices."""
    params = as_parameters(make_weights(SHAPES, torch.float32))
    devices, grouped = spread(params)
    twins = [
        torch.nn.Parameter(param.detach().to(f"cuda:{device}"))
        for param, device in zip(params, devices, strict=True)
    ]
    optimizer, twin_optimizer = case.build(grouped(params)), case.build(grouped(twins), **options)
    return optimizer, params, twin_optimizer, twins


@pytest.mark.parametrize("current", [0, 1])
@pytest.mark.parametrize("spread", [by_turns, by_groups])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_weights_on_two_devices(case, spread, current):
    optimizer, params, twin_optimizer, twins = subjects(case, spread)
    with torch.cuda.device(current):
        for step in (1, 2, 3):
            set_gradients(params, twins, step)
            optimizer.step(zero_grad=step == 2)
            twin_optimizer.step(zero_grad=step == 2)
            assert torch.cuda.current_device() == current
            assert_same(optimizer, params, twin_optimizer, twins, f"step {step}")
            if step == 2:
                assert not any(twin.grad.any() for twin in twins)
    assert {plan.device.index for plan in twin_optimizer._plans.values()} == {0, 1}


@pytest.mark.parametrize("current", [0, 1])
@pytest.mark.parametrize("spread", [by_turns, by_groups])
@pytest.mark.parametrize("case", PLAIN, ids=str)
def test_a_norm_is_that_of_both_devices(case, spread, current):
    optimizer, params, twin_optimizer, twins = subjects(case, spread)
    set_gradients(params, twins, 1)
    with torch.cuda.device(current):
        norm, twin_norm = optimizer.step(max_norm=0.5), twin_optimizer.step(max_norm=0.5)
    torch.testing.assert_close(twin_norm.cpu(), norm, rtol=1e-12, atol=0)
    for param, twin in zip(params, twins, strict=True):
        torch.testing.assert_close(twin.detach().cpu(), param.detach())


@pytest.mark.parametrize("bad", [None, 0, 1])
@pytest.mark.parametrize("case", PLAIN, ids=str)
def test_what_is_bad_on_one_device_leaves_the_step_out_on_both(case, bad):
    optimizer, params, twin_optimizer, twins = subjects(case, by_turns)
    scaler = torch.amp.GradScaler("cuda", init_scale=4.0)
    scaler.scale(torch.ones((), device="cuda:0"))
    set_gradients(params, twins, 1, scale=4.0)
    before = [twin.detach().clone() for twin in twins]
    for index, twin in enumerate(twins):
        if index % 2 == bad and twin.numel():
            twin.grad.view(-1)[0] = torch.inf
    scaler.step(twin_optimizer)
    scaler.update()
    set_gradients(params, twins, 1)
    optimizer.step()
    for param, twin, kept in zip(params, twins, before, strict=True):
        expected = param.detach() if bad is None else kept.cpu()
        torch.testing.assert_close(twin.detach().cpu(), expected, rtol=1e-6, atol=1e-7)
    assert_counts(case, twin_optimizer, twins, [bad is None] * len(twins))


@pytest.mark.parametrize("case", PLAIN, ids=str)
def test_states_move_from_device_to_device(case):
    optimizer, params, first, twins = subjects(case, by_turns)
    others = [
        torch.nn.Parameter(twin.detach().to(f"cuda:{1 - twin.get_device()}")) for twin in twins
    ]
    second = case.build(others)
    set_gradients(params, twins, 1)
    optimizer.step()
    first.step()
    second.load_state_dict(first.state_dict())
    with torch.no_grad():
        for twin, other in zip(twins, others, strict=True):
            other.copy_(twin)
    for param, other, grad in zip(
        params, others, make_gradients(SHAPES, torch.float32, 2), strict=True
    ):
        param.grad, other.grad = grad, grad.to(other.device)
    optimizer.step()
    second.step()
    assert_same(optimizer, params, second, others, "after the states were moved")


def test_the_current_stream_of_each_device_is_used():
    weights = [torch.nn.Parameter(torch.zeros(1 << 20, device=f"cuda:{i}")) for i in range(2)]
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    optimizer = optim.Adam(weights, lr=1.0)
    optimizer.step()
    torch.cuda.synchronize(1)
    stream = torch.cuda.Stream(device=1)
    with torch.cuda.stream(stream):
        torch.cuda._sleep(10_000_000)
        weights[1].grad.fill_(-1)
        with torch.cuda.device(0):
            optimizer.step()
    stream.synchronize()
    assert (weights[1] > -1).all()  # the second gradient was seen
    assert (weights[0] < -1).all()


def test_gradients_on_another_device_are_refused():
    weights = [torch.nn.Parameter(torch.ones(5, device=f"cuda:{i}")) for i in range(2)]
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    optimizer = optim.Adam(weights)
    optimizer.step()
    before = weights[1].detach().clone()
    (plan,) = (plan for plan in optimizer._plans.values() if plan.device.index == 1)
    text = "the gradient is on cuda:0 but the weight is on cuda:1"
    with torch.no_grad(), pytest.raises(RuntimeError, match=text):
        torch.ops.fusedstep.plan_bind(plan.handle, [weights[1]], [weights[0].grad])
    assert_same_bits(weights[1].detach(), before, "weight")


#: Works by module; not the one that a device's assertion ends, which no process survives.
WORKS = {
    module: [
        work
        for work in module.WORKS
        if work is not factors_of_shards.nothing_has_changed_where_one_process_lacks_a_gradient
    ]
    for module in (
        two_processes,
        matrices_of_shards,
        factors_of_shards,
        projections_of_shards,
        codes_of_shards,
        training_of_two,
    )
}


@functools.cache
def failures_of(module):
    return two_processes.failures_by_name("nccl", WORKS[module])


@pytest.mark.parametrize(
    ("module", "name"),
    [
        pytest.param(module, work.__name__, id=f"{module.__name__}-{work.__name__}")
        for module in WORKS
        for work in WORKS[module]
    ],
)
def test_two_processes(module, name):
    if name in failures_of(module):
        pytest.fail(failures_of(module)[name], pytrace=False)


@pytest.mark.skipif(torch.cuda.device_count() < 4, reason="needs four CUDA devices")
def test_four_processes():
    failures = two_processes.failures_by_name(
        "nccl", four_processes.WORKS, processes=four_processes.PROCESSES
    )
    assert not failures, "\n".join(failures.values())
