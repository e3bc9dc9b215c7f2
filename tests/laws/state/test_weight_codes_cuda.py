"""16-bit weights that keep their float32 value, on a CUDA device: the bits of the CPU."""

import pytest
import torch

from fusedstep import optim
from support.cases import CASES, PLAIN
from support.cuda_device import assert_same, needs_cuda, set_gradients, subjects
from support.stepping import make_gradients, make_weights
from support.weight_storages import (
    EACH_WAY,
    KAHAN,
    KNOWN,
    LAYOUTS,
    STOCHASTIC,
    WAYS,
    errors_of_steps,
)

pytestmark = needs_cuda

BF16 = torch.bfloat16

#: Smaller than a word; without states in codes and with; ends within a block, a part and a chunk.
SHAPES = ((1,), (129,), (0, 4), (4096,), (65, 67), (4097,), (300, 500), (3, 5, 7))

STATES = pytest.mark.parametrize("state_dtype", [None, "int8", "int4", "fp8"])
CODED = pytest.mark.parametrize("state_dtype", [None, "int8"])


@STATES
@EACH_WAY
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_bits_of_the_cpu(case, way, state_dtype):
    optimizer, params, twin, twins = subjects(case, BF16, SHAPES, state_dtype=state_dtype, **way)
    for step in range(1, 5):
        set_gradients(params, twins, step)
        if step == 3:  # it has another count of steps from here on
            params[4].grad = twins[4].grad = None
        optimizer.step()
        twin.step()
        assert_same(optimizer, params, twin, twins, f"step {step}")
    assert {plan.device.type for plan in twin._plans.values()} == {"cuda"}


@CODED
@pytest.mark.parametrize("case", CASES, ids=str)
def test_compensated_float16(case, state_dtype):
    options = {"state_dtype": state_dtype, **KAHAN}
    optimizer, params, twin, twins = subjects(case, torch.float16, SHAPES, **options)
    for step in range(1, 4):
        set_gradients(params, twins, step)
        optimizer.step()
        twin.step()
        assert_same(optimizer, params, twin, twins, f"step {step}")


@CODED
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@EACH_WAY
@pytest.mark.parametrize("case", PLAIN, ids=str)
def test_any_layout_and_no_byte_around_it(case, way, layout, state_dtype):
    placed = layout.place(make_weights([layout.shape], BF16)[0])
    rows = make_weights([layout.shape[:1]], BF16)[0]
    spread = rows.reshape(-1, *[1] * (len(layout.shape) - 1)).expand(layout.shape)
    there = placed.to("cuda")
    params = torch.nn.Parameter(placed.view), torch.nn.Parameter(there.view)
    optimizers = [case.build([param], state_dtype=state_dtype, **way) for param in params]
    for step in (1, 2, 3):
        grad = spread if step == 2 else make_gradients([layout.shape], BF16, step)[0]
        for param, optimizer in zip(params, optimizers, strict=True):
            param.grad = grad.to(param.device)
            optimizer.step()
        assert torch.equal(there._buffer.cpu(), placed._buffer), f"step {step}"


def test_random_numbers_are_known():
    """They are the same on every process and rank, and on the CPU, wherever the count is."""
    (up,) = errors_of_steps(1, count=64, device="cuda")
    assert "".join(str(int(each)) for each in up) == KNOWN
    params = [torch.ones(64, dtype=BF16, device=device) for device in ("cpu", "cuda")]
    for param in params:
        param.grad = torch.full_like(param, 0.3 * 2**-7)
        optimizer = optim.SGD([param], lr=1.0, maximize=True, **STOCHASTIC)
        if param.is_cuda:
            optimizer.found_inf = torch.zeros((), device="cuda")
        optimizer.step()
        optimizer.step()
    assert torch.equal(params[0], params[1].cpu())


@pytest.mark.parametrize("options", [{"master_weights": "float32"}, *WAYS], ids=str)
def test_small_steps_add_up(options):
    """A weight of 1 that moves by 1e-3 a step is at 0.8 after 200."""
    param = torch.nn.Parameter(torch.ones(8192, dtype=BF16, device="cuda"))
    optimizer = optim.AdamW([param], lr=1e-3, weight_decay=0, **options)
    for _ in range(200):
        param.grad = torch.ones_like(param)
        optimizer.step()
    assert abs(param.double().mean().item() - 0.8) < 0.004


@EACH_WAY
def test_a_dictionary_moves_between_devices(way):
    optimizer, params, twin, twins = subjects(PLAIN[0], BF16, SHAPES, **way)
    set_gradients(params, twins, 1)
    optimizer.step()
    with torch.no_grad():
        for param, other in zip(params, twins, strict=True):
            other.copy_(param)
    twin.load_state_dict(optimizer.state_dict())
    set_gradients(params, twins, 2)
    optimizer.step()
    twin.step()
    assert_same(optimizer, params, twin, twins, "step 2")


@EACH_WAY
def test_the_host_waits_for_nothing(way):
    *_, twin, twins = subjects(PLAIN[0], BF16, SHAPES, **way)
    for number in (1, 2):
        gradients = [g.cuda() for g in make_gradients(SHAPES, BF16, number)]
        for param, grad in zip(twins, gradients, strict=True):
            param.grad = grad
        if number == 2:
            torch.cuda.set_sync_debug_mode("error")
        try:
            twin.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
