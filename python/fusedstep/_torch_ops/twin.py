"""Optimizers of a given one's class and options, over other weights, in plain torch operations."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from fusedstep._step.owner import Owner

#: Options that make a step the plain formula, where a class has them.
_IMPERATIVE: dict[str, Any] = {
    "fused": False,
    "foreach": None,
    "capturable": False,
    "differentiable": False,
}

#: Attributes by which a GradScaler tells an optimizer about one step.
_SCALER = ("grad_scale", "found_inf")


def imperative_twin(
    optimizer: Owner,
    groups: list[list[Tensor]],
    state: dict[Tensor, dict[str, Any]] | None = None,
) -> Owner:
    """Returns an optimizer like the given one, with these weights in its groups."""
    param_groups = []
    for group, weights in zip(optimizer.param_groups, groups, strict=True):
        changed = {name: value for name, value in _IMPERATIVE.items() if name in group}
        if isinstance(group.get("state_dtype"), str):  # its states are numbers
            changed["state_dtype"] = torch.float32
        param_groups.append(group | changed | {"params": weights})
    twin = like(optimizer, param_groups, state)
    vars(twin).update({name: vars(optimizer)[name] for name in _SCALER if name in vars(optimizer)})
    return twin


def like(
    optimizer: Owner,
    param_groups: list[dict[str, Any]],
    state: dict[Tensor, dict[str, Any]] | None = None,
) -> Owner:
    """Returns an optimizer of the class and defaults of the given one, with these groups.

    It is made as unpickling makes one: constructors of subclasses may take anything.
    """
    cls: type[Owner] = optimizer._store.optimizer  # a wrapper of it may have another class
    twin = cls.__new__(cls)
    twin.__setstate__(
        {
            "defaults": dict(optimizer.defaults),  # to which torch adds
            "state": defaultdict(dict, state or {}),
            "param_groups": param_groups,
        }
    )
    return twin


def step(twin: Optimizer, *args: Any, **kwargs: Any) -> None:
    """Steps a twin without the hooks that torch runs for every optimizer of the process."""
    with_hooks: Any = type(twin).step
    with_hooks.__wrapped__(twin, *args, **kwargs)
