"""Hooks and the profiler's event surround a step when somebody asks for them."""

import pytest
import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from fusedstep import optim
from fusedstep._native import ops
from support.cases import PLAIN


@pytest.fixture(params=PLAIN, ids=str)
def optimizer(request):
    param = torch.nn.Parameter(torch.ones(3))
    param.grad = torch.ones(3)
    optimizer = request.param.build([param])
    optimizer.step()  # without any
    return optimizer


@pytest.mark.parametrize(
    "register",
    [
        lambda optimizer, hook: optimizer.register_step_pre_hook(hook),
        lambda optimizer, hook: optimizer.register_step_post_hook(hook),
        lambda optimizer, hook: register_optimizer_step_pre_hook(hook),
        lambda optimizer, hook: register_optimizer_step_post_hook(hook),
    ],
    ids=["pre", "post", "global pre", "global post"],
)
def test_a_hook_is_called_from_its_registration_to_its_removal(optimizer, register):
    calls = []
    handle = register(optimizer, lambda owner, args, kwargs: calls.append(owner))
    optimizer.step()
    handle.remove()
    optimizer.step()
    assert calls == [optimizer]


def test_a_hook_may_change_the_arguments(optimizer):
    with_closure = optimizer.register_step_pre_hook(
        lambda owner, args, kwargs: (args, {"closure": lambda: 5.0})
    )
    assert optimizer.step() == 5.0
    with_closure.remove()
    assert optimizer.step() is None


def test_the_profiler_sees_the_step(optimizer):
    with torch.profiler.profile() as profile:
        optimizer.step()
    name = f"Optimizer.step#{type(optimizer).__name__}.step"
    assert [event.count for event in profile.key_averages() if event.key == name] == [1]


def test_a_step_between_hooks_repeats_the_last_one():
    """As engines step that have an optimizer for each weight: with what hooks have changed."""
    param = torch.nn.Parameter(torch.ones(3))
    optimizer = optim.SGD([param], lr=0.5)
    lrs, found = iter((0.5, 0.5, 0.25, 0.25)), []

    def before(owner, args, kwargs):
        param.grad = torch.ones(3)
        owner.param_groups[0]["lr"] = next(lrs)

    optimizer.register_step_pre_hook(before)
    optimizer.register_step_post_hook(lambda owner, args, kwargs: found.append(param[0].item()))
    optimizer.step()
    record = optimizer._last_step
    for _ in range(3):
        optimizer.step()
    assert found == [0.5, 0.0, -0.25, -0.5]
    if ops.direct():
        assert optimizer._last_step is record is not None
    optimizer.register_step_pre_hook(lambda *_: optimizer.param_groups[0].update(momentum=0.5))
    lrs = iter((1.0,))
    optimizer.step()
    assert found[-1] == -1.5
    assert "momentum_buffer" in optimizer.state[param]
