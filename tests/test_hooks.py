"""Hooks and the profiler's event surround a step when somebody asks for them."""

import pytest
import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from cases import PLAIN


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
