"""Steps that differ from the last one in nothing but numbers: they are taken past Python."""

from __future__ import annotations

import array
from collections.abc import Callable
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import _profiler_enabled
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from fusedstep.optim._hooks import frame_callback
from fusedstep.optim._plan import GradUse

if TYPE_CHECKING:
    from fusedstep.optim._base import FusedOptimizer
    from fusedstep.optim._work import Work

#: Options of these types cannot change while they are the same object; nor can tuples of them.
_IMMUTABLE = (bool, int, float, str, torch.dtype, type(None))


class Part(NamedTuple):
    """What the last step did for a group."""

    items: list[Any]
    """Names and values of the group, one behind another."""
    weights: list[Tensor]
    """Those that had a gradient."""
    states: list[Tensor] | None
    """Theirs; None if nobody has had them."""
    plan: int
    options: bytearray
    """What the operator takes as options, as numbers in double. The first is the learning rate."""
    use: int


class Repeat(NamedTuple):
    """What the last step went by, for ``_bind.repeat`` to compare with."""

    rule: str
    empty: tuple[dict[int, Any], ...]
    """Hooks: none."""
    silent: tuple[Callable[[], Any], ...]
    """What has to return None, False or 0."""
    values: list[Any]
    """Of the optimizer's state."""
    parts: tuple[Part, ...]
    bump_versions: Callable[[list[Tensor]], None]


def last_step(optimizer: FusedOptimizer, work: list[Work], uses: list[GradUse]) -> Repeat | None:
    """What a step went by that had neither scaler nor norm; None if it cannot be repeated so."""
    if optimizer._seen is None:
        return None
    parts = []
    rest = list(zip(work, uses, strict=True))
    for group in optimizer._groups:
        mine = [pair for pair in rest if pair[0].group is group]
        if len(mine) > 1 or not _is_fixed(group):
            return None
        items = list(chain.from_iterable(group.items()))
        if not mine:
            parts.append(Part(items, [], [], 0, bytearray(), GradUse.LEAVE))
            continue
        ((_, _, _, plan), use) = mine[0]
        if plan is None or plan.is_distributed or plan.had_sparse or not plan.counts_on_host:
            return None
        options = bytearray(array.array("d", optimizer._options(group)))
        accessed = optimizer._state_was_accessed
        states = optimizer._accessed_states(plan.weights) if accessed else None
        parts.append(Part(items, plan.weights, states, plan.handle, options, use))
    silent = (frame_callback, _profiler_enabled, torch._C._len_torch_dispatch_stack)
    if not optimizer._is_on_host():
        silent += (torch._C._cuda_isCurrentStreamCapturing,)
    return Repeat(
        optimizer._rule,
        (
            optimizer._optimizer_step_pre_hooks,
            optimizer._optimizer_step_post_hooks,
            _global_optimizer_pre_hooks,
            _global_optimizer_post_hooks,
        ),
        silent,
        optimizer._seen.values,
        tuple(parts),
        torch._C._increment_version,
    )


def _is_fixed(group: dict[str, Any]) -> bool:
    """Whether no option of a group can change in place."""
    return isinstance(group["params"], list) and all(
        name == "params"
        or isinstance(value, _IMMUTABLE)
        or (isinstance(value, tuple) and all(isinstance(part, _IMMUTABLE) for part in value))
        for name, value in group.items()
    )
