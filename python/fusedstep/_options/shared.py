"""The options that optimizers share, and those that a group has only where they were set."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any

from fusedstep._options.kinds import (
    Betas,
    Choice,
    Count,
    Flag,
    LearningRate,
    Number,
    Option,
    Options,
    named_values,
)

#: Options of every optimizer.
SHARED: Options = {
    "lr": LearningRate(),
    "maximize": Flag(before=False),
    "fused": Flag(unset=None, moot_elsewhere=True),
    "state_dtype": Choice(unset=None),
    "master_weights": Choice(unset=False),
    "rounding": Choice(unset=None),
    "seed": Choice(unset=0),
    "max_grad_norm": Number(unset=None, above=True, may_be_none=True, is_limit=True),
    "skip_nonfinite": Flag(unset=False),
}

#: Options of optimizers with the interface of a class of torch. A dictionary that lacks one of the
#: last three options means the value given here, as torch's class does.
OF_TORCH: Options = {
    **SHARED,
    "fused": Flag(before=None, unset=None, moot_elsewhere=True),
    "foreach": Flag(before=None, moot_elsewhere=True),
    "differentiable": Flag(before=False, moot_elsewhere=True),
}

CAPTURABLE: Options = {"capturable": Flag(before=False, moot_elsewhere=True)}

EPSILON = Number(label="epsilon")

#: Of the optimizers with two running averages, as Adam.
OF_ADAM: Options = {"betas": Betas(), "eps": EPSILON, "weight_decay": Number()}

#: Of low-rank projections.
PROJECTION: Options = {
    "rank": Count(before=None, least=1, may_be_none=True, fills_sides=True),
    "update_proj_gap": Count(before=200, least=1),
    "scale": Number(before=1.0),
    "proj_type": Option(before="std"),
}

#: The options that torch's classes lack, each with its value where a group has no such key.
OWN: dict[str, Any] = named_values(SHARED, "unset")


def own_option(group: Mapping[str, Any], name: str) -> Any:
    """Returns the value of an option that a group may lack."""
    return group.get(name, OWN[name])


def without_unset(
    options: dict[str, Any], torch_fuses: bool, own: dict[str, Any]
) -> dict[str, Any]:
    """Returns the options that become defaults: options of ``own`` only if they were set."""
    names = own.keys() - ({"fused"} if torch_fuses else {})
    return {
        name: value for name, value in options.items() if name not in names or value != own[name]
    }


def fill_own(
    group: dict[str, Any], defaults: dict[str, Any], own: dict[str, Any], kept: Container[str]
) -> None:
    """Completes a loaded group by the options that the optimizer was made with.

    ``kept``: the options that the group had before, which it keeps: a distributed checkpoint is
    read by the keys of a group, so that those must not depend on whether it has been loaded.
    """
    for name, unset in own.items():
        if name in defaults:
            group.setdefault(name, defaults[name])
        elif name in group and name not in kept and group[name] == unset:  # a newer option
            del group[name]
