"""Lists that torch's optimizers fill before a step, for code that asks for them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fusedstep._step.gradients import with_gradients
from fusedstep._step.owner import Owner
from fusedstep._step.strategy import strategy_of


def init_group(
    self: Owner,
    group: dict[str, Any],
    params_with_grad: list[Tensor],
    grads: list[Tensor],
    *states: list[Tensor],
) -> bool:
    """Makes the states that a group lacks, and adds to the lists what a step of it works on.

    As ``_init_group`` of :class:`torch.optim.Adam`. No step here needs it: plans have the lists.

    Args:
        group (dict): one of ``param_groups``.
        params_with_grad (list): gets the weights that have a gradient.
        grads (list): gets these.
        *states (list): one for each state, which stays empty if the group has no such state, and
            the last for the step counts.

    Returns:
        Whether there is a complex weight.

    Raises:
        RuntimeError: for a sparse gradient that the optimizer does not take.
    """
    strategy = strategy_of(self)
    weights, found = with_gradients(group["params"])
    sparse = any(grad.layout is not torch.strided for grad in found)
    if sparse and (error := strategy.sparse_error(self, group)):
        raise RuntimeError(error)
    self._store.create(group, weights, strategy.is_native(self, group, weights), self._groups)
    params_with_grad.extend(weights)
    grads.extend(found)
    *others, steps = states
    numbers = [name for name in self._numbers if name != "step"]
    for name, of_name in zip((*self._states, *numbers), others, strict=False):
        kind = self._state_kinds[name]
        of_name.extend(self.state[p][name] for p in weights if kind.is_of(group, p.shape))
    steps.extend(self.state[p]["step"] for p in weights if "step" in self._numbers)
    return any(p.is_complex() for p in weights)
