"""Steps that differ from the last one in nothing but numbers: they are taken past Python."""

from __future__ import annotations

import array
from collections import namedtuple
from collections.abc import Callable
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.autograd import _profiler_enabled
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from fusedstep._native import ops
from fusedstep._step.hooks import frame_callback
from fusedstep._step.options import is_fixed
from fusedstep._step.owner import StepRecord
from fusedstep._step.plan import GradUse, Work


def _record(kind: str) -> type[Any]:
    """A named tuple whose fields are those that ``_bind.repeat`` reads."""
    fields = getattr(ops.bind, f"{kind.upper()}_FIELDS") if ops.bind else ()
    return namedtuple(kind, fields)


#: A record of what the last step did for a group: ``items``, the names and values of the group, one
#: behind another; ``weights``, those that had a gradient; their ``states``, or None if nobody has
#: had them; the ``plan``; ``options``, what the rule takes, as numbers in double of which the first
#: is the learning rate; ``use``, of gradients.
Part = _record("Part")

#: A record of the last step, for ``_bind.repeat`` to compare with: the ``rule``; ``empty``, the
#: dictionaries of hooks, which were; ``silent``, functions that have to return None, False or 0;
#: ``values`` of the optimizer's state; ``parts``, one for each group; ``bump_versions``.
Repeat = _record("Repeat")


def last_step(
    rule: str,
    groups: list[dict[str, Any]],
    work: list[Work],
    hooks: tuple[dict[int, Any], ...],
    values: list[Any],
    accessed: Callable[[list[Tensor]], list[Tensor] | None],
) -> StepRecord | None:
    """Records a step that had neither scaler nor norm; None if it cannot be repeated so.

    ``values``: of the optimizer's state. ``accessed`` returns the states of weights, or None if
    nobody has had them.
    """
    parts = []
    plans = [item.plan for item in work if item.plan]
    if len(plans) < len(work):
        return None
    for number, group in enumerate(groups):
        mine = [pair for pair in zip(work, plans, strict=True) if pair[0].number == number]
        if len(mine) > 1 or not is_fixed(group):
            return None
        items = list(chain.from_iterable(group.items()))
        if not mine:
            parts.append(
                Part(
                    items=items,
                    weights=[],
                    states=[],
                    plan=0,
                    options=bytearray(),
                    use=GradUse.LEAVE,
                )
            )
            continue
        ((item, plan),) = mine
        if plan.had_sparse or not plan.counts_on_host:
            return None
        # The place of a weight tells its random numbers. A weight without a gradient, which is not
        # compared, may leave its place to another weight.
        if plan.places is not None and len(plan.weights) < len(group["params"]):
            return None
        parts.append(
            Part(
                items=items,
                weights=plan.weights,
                states=accessed(plan.weights),
                plan=plan.handle,
                options=bytearray(array.array("d", item.options)),
                use=item.use,
            )
        )
    silent: tuple[Callable[[], object], ...]
    silent = (frame_callback, _profiler_enabled, torch._C._len_torch_dispatch_stack)
    if any(plan.is_on_device for plan in plans):
        silent += (torch._C._cuda_isCurrentStreamCapturing,)
    record: StepRecord = Repeat(
        rule=rule,
        empty=(*hooks, _global_optimizer_pre_hooks, _global_optimizer_post_hooks),
        silent=silent,
        values=values,
        parts=tuple(parts),
        bump_versions=torch._C._increment_version,
    )
    return record
