"""Options that torch's classes lack: a group has such a key only where it was set."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

#: Each with its value where a group has no such key. torch's distributed checkpoints, and the flat
#: ones of torchtitan, ask a checkpoint for every key that a group has: those of torch's optimizers
#: could not be loaded if these keys were always there.
OWN: dict[str, Any] = {
    "fused": None,
    "state_dtype": None,
    "master_weights": False,
    "rounding": None,
    "seed": 0,
    "max_grad_norm": None,
    "skip_nonfinite": False,
}


def own_option(group: Mapping[str, Any], name: str) -> Any:
    """The value of such an option in a group."""
    return group.get(name, OWN[name])


def without_unset(
    options: dict[str, Any], torch_fuses: bool, own: dict[str, Any]
) -> dict[str, Any]:
    """The options that become defaults: a class's ``own`` only where they were set."""
    names = own.keys() - ({"fused"} if torch_fuses else {})
    return {
        name: value for name, value in options.items() if name not in names or value != own[name]
    }


def fill_own(group: dict[str, Any], defaults: dict[str, Any], own: dict[str, Any]) -> None:
    """Completes a group that was loaded: what it does not say is as the optimizer was made."""
    for name, unset in own.items():
        if name in defaults:
            group.setdefault(name, defaults[name])
        elif (
            name in group and group[name] == unset
        ):  # in a dictionary of fusedstep 0.1.0, or a newer option
            del group[name]
