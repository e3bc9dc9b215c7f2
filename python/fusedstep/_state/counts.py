"""Step counts: float32 numbers, as torch has them, that go on past 2**24.

float32 has every integer up to 2**24. From there on a count is the largest float32 number that is
not above it, and the rest lies behind that number in its memory: dictionaries have the number.
``read_count`` and ``write_count`` in src/ops/native_plan.cpp do the same.
"""

from __future__ import annotations

import math
from typing import Any, TypeGuard

import torch
from torch import Tensor

#: The last count for which a float32 number does.
LAST = 2.0**24

#: The memory behind a count has -1 minus the rest: no other number of an optimizer is below 0.
_NO_REST = -1.0

#: A tensor: torch would make one of a number, and memory may have run out.
_ONE = torch.ones((), dtype=torch.float32, device="cpu")


def new_count(value: float, device: torch.device | str) -> Tensor:
    """A number of no dimensions, with memory for a rest behind it."""
    if torch._C._len_torch_dispatch_stack():  # it knows the numbers of tensors made of numbers
        return torch.tensor(value, dtype=torch.float32, device=device)
    memory = torch.tensor([0.0, _NO_REST], dtype=torch.float32, device=device)
    count = memory.resize_(())  # a view would keep the other one alive
    write_count(count, value)
    return count


def new_number(weight: Tensor, group: dict[str, Any], value: float = 0.0) -> Tensor:
    """A number beside a weight, on the host unless a device graph counts the steps."""
    device = weight.device if group.get("capturable") else "cpu"
    return new_count(value, device)


def is_like(value: Any, number: Tensor) -> TypeGuard[Tensor]:
    """Returns whether a value is a number as new_number() makes them."""
    return isinstance(value, Tensor) and (value.dtype, value.shape, value.device) == (
        number.dtype,
        number.shape,
        number.device,
    )


def read_count(step: Tensor) -> float:
    """The value of a step count."""
    count = step.item()
    if not LAST <= count < math.inf or (both := _with_rest(step)) is None:
        return count
    return count - (both[1].item() - _NO_REST)


def write_count(step: Tensor, count: float) -> None:
    """Sets a step count, of which float32 need not have the value."""
    if not LAST <= count < math.inf or (both := _with_rest(step)) is None:
        step.fill_(count)
        return
    rest = count % 2.0 ** (math.frexp(count)[1] - 24)
    step.fill_(count - rest)
    both[1].fill_(_NO_REST - rest)


def count_steps(steps: list[Tensor]) -> None:
    """Adds one to each of some counts that are about the same."""
    if steps[0].is_cpu and steps[0].item() >= LAST - 1:
        for step in steps:
            write_count(step, read_count(step) + 1)
    elif all(map(Tensor.is_floating_point, steps)):
        torch._foreach_add_(steps, [_ONE] * len(steps))
    else:  # integers, which only a user puts there, take no float
        torch._foreach_add_(steps, 1)


def is_long(step: Any) -> bool:
    """Returns whether a count on the CPU is past what float32 has.

    False for fake tensors, and for all tensors under a mode, which may have no numbers.
    """
    if type(step) is not Tensor or not step.is_cpu or torch._C._len_torch_dispatch_stack():
        return False
    return step.numel() == 1 and not step.is_complex() and step.item() >= LAST


def with_memory(step: Any) -> Any:
    """A count with memory for a rest, if it needs that and is not shared; else the count itself."""
    if (
        not is_long(step)
        or not (step.dtype is torch.float32 and step.item() < math.inf)
        or step.is_shared()
        or _with_rest(step) is not None
    ):
        return step
    return new_count(step.item(), "cpu")


def _with_rest(step: Tensor) -> Tensor | None:
    """A view of a count and of the rest behind it; None if it has no such memory."""
    if not step.is_cpu or step.storage_offset() or step.untyped_storage().nbytes() != 8:
        return None
    both = step.detach().as_strided((2,), (1,))
    return both if both[1].item() <= _NO_REST else None
