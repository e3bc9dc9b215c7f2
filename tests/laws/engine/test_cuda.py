"""The CUDA backend: the CPU's bits, for every row and layout, without waiting for the device."""

import gc

import pytest
import torch

from fusedstep import optim
from support.cases import CASES, PLAIN, WITH_COUNTS
from support.cuda_device import (
    SHAPES,
    assert_reported,
    assert_same,
    assert_states_move,
    needs_cuda,
    on_cuda,
    set_gradients,
    subjects,
)
from support.layouts import GRADIENT_LAYOUTS, WEIGHT_LAYOUTS, Placed
from support.stepping import (
    as_parameters,
    assert_counts,
    assert_same_bits,
    make_gradients,
    make_weights,
)

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


@needs_cuda
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_same_bits_as_on_the_cpu_over_100_steps(case, dtype):
    optimizer, params, twin_optimizer, twins = subjects(case, dtype)
    for step in range(1, 101):
        set_gradients(params, twins, step)
        optimizer.step()
        twin_optimizer.step()
        if step in (1, 2, 10, 100):
            assert_same(optimizer, params, twin_optimizer, twins, f"step {step}")
    assert {plan.device.type for plan in twin_optimizer._plans.values()} == {"cuda"}


@needs_cuda
@pytest.mark.parametrize("options", [{"state_dtype": torch.float32}, {"master_weights": True}])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_same_bits_with_states_of_another_dtype(case, options):
    optimizer, params, twin_optimizer, twins = subjects(case, torch.bfloat16, **options)
    for step in range(1, 4):
        set_gradients(params, twins, step)
        optimizer.step()
        twin_optimizer.step()
    assert_same(optimizer, params, twin_optimizer, twins, "bfloat16 with float32 states")


@needs_cuda
@pytest.mark.parametrize("gradient", GRADIENT_LAYOUTS)
@pytest.mark.parametrize("layout", WEIGHT_LAYOUTS, ids=str)
@pytest.mark.parametrize("case", PLAIN, ids=str)
def test_same_bits_in_every_layout_and_around_it(case, layout, gradient):
    values = torch.randn(layout.shape, generator=torch.Generator().manual_seed(1))
    grads = torch.randn((), generator=torch.Generator().manual_seed(2)).expand(layout.shape)
    placed = layout.place(values)
    placed_grad = Placed(grads, GRADIENT_LAYOUTS[gradient](layout))
    there, grad_there = placed.to("cuda"), placed_grad.to("cuda")
    weight, twin = torch.nn.Parameter(placed.view), torch.nn.Parameter(there.view)
    weight.grad, twin.grad = placed_grad.view, grad_there.view
    optimizer, twin_optimizer = case.build([weight]), case.build([twin])
    for step in (1, 2, 3):
        optimizer.step()
        twin_optimizer.step()
        assert torch.equal(there._buffer.cpu(), placed._buffer), f"step {step}"
        assert torch.equal(grad_there._buffer.cpu(), placed_grad._buffer), f"step {step}"


@needs_cuda
@pytest.mark.parametrize("case", CASES, ids=str)
def test_clipping_scaling_and_clearing_as_on_the_cpu(case):
    for options in ({"max_norm": 0.5}, {"zero_grad": True}, {"max_norm": 0.1, "zero_grad": True}):
        optimizer, params, twin_optimizer, twins = subjects(case, torch.float32)
        for step in (1, 2):
            set_gradients(params, twins, step)
            norm, twin_norm = optimizer.step(**options), twin_optimizer.step(**options)
            if norm is not None:
                assert twin_norm.is_cuda
                assert twin_norm.cpu() == norm
        assert_same(optimizer, params, twin_optimizer, twins, str(options))
        keeps = optimizer._keeps_grads_by
        if not options.get("zero_grad") and keeps and not optimizer.param_groups[0][keeps]:
            continue  # the step may leave anything in them
        for param, twin in zip(params, twins, strict=True):
            assert_same_bits(twin.grad.cpu(), param.grad, str(options))


@needs_cuda
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_scalers_step_divides_by_the_scale_or_is_left_out(case):
    optimizer, params, twin_optimizer, twins = subjects(case, torch.float32)
    scaler, taken = torch.amp.GradScaler("cuda", init_scale=4.0), 0
    for step, is_bad in ((1, False), (2, True), (3, False)):
        set_gradients(params, twins, step, scale=4.0)
        scale = scaler.scale(torch.ones((), device="cuda")).item()
        before = [twin.detach().clone() for twin in twins]
        if is_bad:
            twins[2].grad[0, 0] = torch.inf
        scaler.step(twin_optimizer)
        scaler.update(4.0)
        if is_bad:
            for twin, kept in zip(twins, before, strict=True):
                assert_same_bits(twin.detach(), kept, "a weight of a step that was left out")
            assert_counts(case, twin_optimizer, twins, [taken] * len(twins))
            continue
        taken += 1
        for param in params:
            param.grad /= scale
        optimizer.step()
        for param, twin in zip(params, twins, strict=True):
            torch.testing.assert_close(twin.detach().cpu(), param.detach(), rtol=1e-6, atol=1e-7)
        assert_counts(case, optimizer, params, [taken] * len(params))
        assert_counts(case, twin_optimizer, twins, [taken] * len(twins))


@needs_cuda
@pytest.mark.parametrize("case", PLAIN, ids=str)
def test_a_step_with_gradients_that_are_not_finite_is_left_out_without_a_wait(case):
    _, params, optimizer, twins = subjects(case, torch.float32)
    for group in optimizer.param_groups:
        group["skip_nonfinite"] = True
    for step, value in ((1, 1.0), (2, torch.nan), (3, torch.inf), (4, 1.0)):
        set_gradients(params, twins, step)
        twins[2].grad[0, 0] = value
        before = [twin.detach().clone() for twin in twins]
        torch.cuda.set_sync_debug_mode("error" if step > 1 else "default")
        try:
            optimizer.step(max_norm=1.0)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        for twin, kept in zip(twins, before, strict=True):
            if value != 1:
                assert_same_bits(twin.detach(), kept, "a weight of a step that was left out")
            assert twin.isfinite().all()
    assert optimizer.skipped_steps == 2
    assert_counts(case, optimizer, twins, [2] * len(twins))


@needs_cuda
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_step_neither_waits_nor_allocates(case):
    _, params, optimizer, twins = subjects(case, torch.float32)
    for step in (1, 2):
        set_gradients(params, twins, step)
        optimizer.step()
    torch.cuda.synchronize()
    gc.collect()  # of what other tests have left, nothing is to be freed by chance below
    before = torch.cuda.memory_allocated()
    torch.cuda.set_sync_debug_mode("error")
    try:
        optimizer.step()
        optimizer.step(zero_grad=True)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_allocated() == before
    torch.cuda.set_sync_debug_mode("error")
    try:
        optimizer.step(max_norm=1.0)
    finally:
        torch.cuda.set_sync_debug_mode("default")


CAPTURABLE = [case for case in PLAIN if case.has("capturable")]


@needs_cuda
@pytest.mark.parametrize("with_tensor_lr", [False, True])
@pytest.mark.parametrize("case", CAPTURABLE, ids=str)
def test_a_captured_step_is_replayed(case, with_tensor_lr):
    options = {"capturable": True}
    if with_tensor_lr:
        options["lr"] = torch.tensor(1e-2, device="cuda")
    twins = on_cuda(as_parameters(make_weights(SHAPES, torch.float32)))
    eager_twins = [torch.nn.Parameter(twin.detach().clone()) for twin in twins]
    own = {"lr": options["lr"].clone()} if with_tensor_lr else {}
    eager = case.build(eager_twins, **(options | own))
    captured = case.build(twins, **options)
    gradients = [g.cuda() for g in make_gradients(SHAPES, torch.float32, 1)]
    for twin, other, grad in zip(twins, eager_twins, gradients, strict=True):
        twin.grad, other.grad = grad.clone(), grad.clone()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        captured.step()
    torch.cuda.current_stream().wait_stream(stream)
    eager.step()
    graph = torch.cuda.CUDAGraph()
    for twin, grad in zip(twins, gradients, strict=True):
        twin.grad.copy_(grad)
    with torch.cuda.graph(graph):
        captured.step()
    for step in (2, 3, 4):
        if with_tensor_lr:
            captured.param_groups[0]["lr"].fill_(1e-2 / step)
            eager.param_groups[0]["lr"].fill_(1e-2 / step)
        for twin, other, grad in zip(twins, eager_twins, gradients, strict=True):
            twin.grad.copy_(grad * step)
            other.grad = (grad * step).clone()
        graph.replay()
        eager.step()
        for twin, other in zip(twins, eager_twins, strict=True):
            assert_same_bits(twin.detach(), other.detach(), f"step {step}")
        assert_counts(case, captured, twins, [step] * len(twins))


@needs_cuda
@pytest.mark.parametrize("case", CAPTURABLE, ids=str)
def test_counts_on_the_device_are_two_ulp_a_step_from_those_on_the_host(case):
    _, params, on_host, twins = subjects(case, torch.float32)
    others = [torch.nn.Parameter(twin.detach().clone()) for twin in twins]
    on_device = case.build(others, capturable=True)
    for step in range(1, 11):
        set_gradients(params, twins, step)
        for twin, other in zip(twins, others, strict=True):
            other.grad = twin.grad.clone()
        on_host.step()
        on_device.step()
        for twin, other in zip(twins, others, strict=True):
            ulp = torch.finfo(torch.float32).eps * twin.detach().abs()
            assert ((twin - other).abs() <= 2 * step * ulp + 1e-9).all()


@needs_cuda
@pytest.mark.parametrize("case", WITH_COUNTS, ids=str)
def test_a_capture_without_a_count_on_the_device_is_refused(case):
    _, params, optimizer, twins = subjects(case, torch.float32)
    set_gradients(params, twins, 1)
    optimizer.step()
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match="capturable"), torch.cuda.graph(graph):
        optimizer.step()


@needs_cuda
@pytest.mark.parametrize("case", CASES, ids=str)
def test_states_move_between_devices(case):
    assert_states_move(*subjects(case, torch.float32))


@needs_cuda
def test_weights_may_move_between_steps():
    param = torch.nn.Parameter(torch.ones(1000))
    twin = torch.nn.Parameter(torch.ones(1000))
    moving, staying = optim.Adam([param]), optim.Adam([twin])
    for step in range(1, 5):
        if step % 2 == 0:
            param.data = param.data.cuda()
        else:
            param.data = param.data.cpu()
        for name, value in moving.state[param].items():
            if name != "step":
                moving.state[param][name] = value.to(param.device)
        (grad,) = make_gradients([(1000,)], torch.float32, step)
        param.grad, twin.grad = grad.to(param.device), grad
        moving.step()
        staying.step()
        assert_same_bits(param.detach().cpu(), twin.detach(), f"step {step}")


@needs_cuda
@pytest.mark.parametrize("case", CASES, ids=str)
def test_one_group_may_be_on_several_devices(case):
    params = as_parameters(make_weights(SHAPES, torch.float32))
    mixed = [
        twin if index % 2 else torch.nn.Parameter(param.detach().clone())
        for index, (param, twin) in enumerate(zip(params, on_cuda(params), strict=True))
    ]
    optimizer, mixed_optimizer = case.build(params), case.build(mixed)
    for step in (1, 2):
        for param, other in zip(params, mixed, strict=True):
            (param.grad,) = make_gradients([param.shape], torch.float32, step)
            other.grad = param.grad.clone().to(other.device)
        optimizer.step()
        mixed_optimizer.step()
        for param, other in zip(params, mixed, strict=True):
            assert_same_bits(other.detach().cpu(), param.detach(), f"step {step}")


@needs_cuda
def test_the_current_stream_is_used():
    weight = torch.nn.Parameter(torch.zeros(1 << 20, device="cuda"))
    weight.grad = torch.ones_like(weight)
    optimizer = optim.Adam([weight], lr=1.0)
    optimizer.step()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(10_000_000)
        weight.grad.fill_(-1)
        optimizer.step()
    stream.synchronize()
    assert (weight > -1).all()  # the second gradient was seen


@needs_cuda
def test_tensors_of_more_than_two_to_the_31_elements():
    elements = 2**31 + 5
    weight = torch.nn.Parameter(torch.zeros(elements, device="cuda", dtype=torch.bfloat16))
    weight.grad = torch.zeros_like(weight)
    weight.grad[-1], weight.grad[0], weight.grad[elements // 2] = 1, 2, 3
    optim.Adagrad([weight], lr=0.5).step()
    assert weight.nonzero().flatten().tolist() == [0, elements // 2, elements - 1]
    assert weight[[0, elements // 2, -1]].tolist() == [-0.5] * 3


@needs_cuda
def test_gradients_elsewhere_are_refused():
    weight = torch.nn.Parameter(torch.ones(5, device="cuda"))
    weight.grad = torch.ones_like(weight)
    optimizer = optim.Adam([weight])
    optimizer.step()
    before = weight.detach().clone()
    plan = next(iter(optimizer._plans.values()))
    text = "the gradient is on the CPU but the weight is on cuda:0"
    with torch.no_grad(), pytest.raises(RuntimeError, match=text):
        torch.ops.fusedstep.plan_bind(plan.handle, [weight], [torch.ones(5)])
    assert_same_bits(weight.detach(), before, "weight")


@needs_cuda
def test_an_error_of_an_earlier_kernel_is_reported(subprocess_environment):
    code = """
import torch
from fusedstep import optim
weight = torch.nn.Parameter(torch.ones(100, device="cuda"))
weight.grad = torch.ones_like(weight)
optimizer = optim.Adam([weight])
optimizer.step()
torch.ones(10, device="cuda")[torch.tensor([20], device="cuda")]
try:
    for _ in range(100_000):
        optimizer.step()
except RuntimeError as error:
    print("reported:", error)
"""
    assert_reported(code, subprocess_environment)
