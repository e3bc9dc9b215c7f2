"""Adafactor on a CUDA device: the CPU's bits, without waiting for the device."""

import pytest
import torch

from fusedstep import optim
from support.cuda_device import assert_same, assert_states_move, needs_cuda, on_cuda, set_gradients
from support.factored import ADAFACTOR as CASES
from support.layouts import GRADIENT_LAYOUTS, WEIGHT_LAYOUTS, Placed
from support.stepping import WAYS, as_parameters, make_gradients, make_weights

pytestmark = needs_cuda

#: Within and around tiles; more of these side by side, and below one another, than one group sums.
SHAPES = (
    (7, 5),
    (65, 257),
    (300, 2100),
    (3, 4500),
    (1100, 9),
    (4, 5, 6, 7),
    (2, 33, 18),
    (700,),
    (),
)
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def subjects(options, dtype=torch.float32, shapes=SHAPES):
    """An optimizer on the CPU, its parameters, and both on the device."""
    params = as_parameters(make_weights(shapes, dtype))
    twins = on_cuda(params)
    return (
        optim.Adafactor(params, fused=True, **options),
        params,
        optim.Adafactor(twins, fused=True, **options),
        twins,
    )


def compare(options, dtype=torch.float32, steps=4, **of_step):
    optimizer, params, twin, twins = subjects(options, dtype)
    for step in range(steps):
        set_gradients(params, twins, step)
        optimizer.step(**of_step)
        twin.step(**of_step)
        assert_same(optimizer, params, twin, twins, f"step {step}")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_the_bits_of_the_cpu(name, dtype):
    compare(CASES[name][0], dtype)


@pytest.mark.parametrize("way", WAYS)
def test_the_bits_of_the_cpu_with_float32_values(way):
    compare({"variant": "transformers"} | WAYS[way], torch.bfloat16)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_plan_knows_the_operands_from_step_to_step(dtype):
    _, params, optimizer, twins = subjects({}, dtype)
    set_gradients(params, twins, 1)
    optimizer.step()
    assert [plan.device.type for plan in optimizer._plans.values()] == ["cuda"]


def test_cleared_gradients():
    compare({}, zero_grad=True)


@pytest.mark.parametrize("zero_grad", [False, True])
def test_clipped_gradients(zero_grad):
    compare({"beta1": 0.9}, max_norm=0.5, zero_grad=zero_grad)


@pytest.mark.parametrize("gradient", GRADIENT_LAYOUTS)
@pytest.mark.parametrize(
    "layout", [each for each in WEIGHT_LAYOUTS if 0 not in each.shape], ids=str
)
def test_the_bits_of_the_cpu_in_every_layout_and_around_it(layout, gradient):
    values = torch.randn(layout.shape, generator=torch.Generator().manual_seed(1))
    grads = torch.randn((), generator=torch.Generator().manual_seed(2)).expand(layout.shape)
    placed = layout.place(values)
    placed_grad = Placed(grads, GRADIENT_LAYOUTS[gradient](layout))
    there, grad_there = placed.to("cuda"), placed_grad.to("cuda")
    weight, twin = torch.nn.Parameter(placed.view), torch.nn.Parameter(there.view)
    weight.grad, twin.grad = placed_grad.view, grad_there.view
    optimizers = [optim.Adafactor([each], fused=True, beta1=0.9) for each in (weight, twin)]
    for step in (1, 2):
        for optimizer in optimizers:
            optimizer.step()
        assert torch.equal(there._buffer.cpu(), placed._buffer), f"step {step}"
        assert torch.equal(grad_there._buffer.cpu(), placed_grad._buffer), f"step {step}"


def test_a_step_neither_waits_nor_keeps_memory():
    _, params, optimizer, twins = subjects({})
    for step in (1, 2):
        set_gradients(params, twins, step)
        optimizer.step()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.set_sync_debug_mode("error")
    try:
        optimizer.step()
        optimizer._forget_plans()  # the next step checks everything
        optimizer.step()
        optimizer.step(zero_grad=True)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_allocated() <= before


def test_a_scalers_steps():
    _, params, optimizer, twins = subjects({})
    scaler = torch.amp.GradScaler("cuda", init_scale=4.0)
    for step, is_bad in ((1, False), (2, True), (3, False)):
        set_gradients(params, twins, step, scale=4.0)
        scaler.scale(torch.ones((), device="cuda"))
        before = [twin.detach().clone() for twin in twins]
        if is_bad:
            twins[0].grad[0, 0] = torch.inf
        scaler.step(optimizer)
        scaler.update(4.0)
        unchanged = [torch.equal(twin, kept) for twin, kept in zip(twins, before, strict=True)]
        assert unchanged == [is_bad] * len(twins)
    assert {optimizer.state[twin]["step"].item() for twin in twins} == {2}


def test_one_group_may_be_on_several_devices():
    _, params, _, twins = subjects({})
    mixed = [p if i % 2 else twin for i, (p, twin) in enumerate(zip(params, twins, strict=True))]
    alone = as_parameters([p.detach().clone() for p in params])
    optimizers = optim.Adafactor(mixed, fused=True), optim.Adafactor(alone, fused=True)
    for step in range(2):
        for one, other, grad in zip(
            mixed, alone, make_gradients(SHAPES, torch.float32, step), strict=True
        ):
            one.grad, other.grad = grad.to(one.device), grad
        for optimizer in optimizers:
            optimizer.step()
    assert all(torch.equal(a.cpu(), b) for a, b in zip(mixed, alone, strict=True))


def test_states_move_between_devices():
    assert_states_move(*subjects({"beta1": 0.9}))


def test_the_current_stream_is_used():
    weight = torch.nn.Parameter(torch.zeros(1 << 10, 1 << 10, device="cuda"))
    weight.grad = torch.ones_like(weight)
    optimizer = optim.Adafactor([weight], lr=1.0)
    optimizer.step()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    before = weight.detach().clone()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(10_000_000)
        weight.grad.fill_(-1)
        optimizer.step()
    stream.synchronize()
    assert (weight > before).all()  # the second gradient was seen


def test_a_capture_is_refused():
    _, params, optimizer, twins = subjects({})
    set_gradients(params, twins, 1)
    optimizer.step()
    before = [twin.detach().clone() for twin in twins]
    with (
        pytest.raises(RuntimeError, match="captur"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        optimizer.step()
    assert all(map(torch.equal, twins, before))


def test_a_matrix_of_more_than_two_to_the_31_elements():
    weight = torch.nn.Parameter(torch.zeros(65537, 32769, device="cuda", dtype=torch.bfloat16))
    weight.grad = torch.ones_like(weight)
    optim.Adafactor([weight], variant="transformers", fused=True).step()
    assert weight.min() == weight.max() == torch.tensor(-1e-5, dtype=torch.bfloat16)


def test_twenty_thousand_tensors():
    weights = [torch.nn.Parameter(torch.ones(3, 5, device="cuda")) for _ in range(20_000)]
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    optimizer = optim.Adafactor(weights, fused=True)
    optimizer.step()
    optimizer.step()
    assert all(torch.equal(weight, weights[0]) for weight in weights[::999])
    assert (weights[0] < 1).all()
