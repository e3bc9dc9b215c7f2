"""Tells how an optimizer steps its groups, and what it loses by that."""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fusedstep._api.base import FusedOptimizer
from fusedstep._api.buckets import check_ours
from fusedstep._api.state import is_state_held
from fusedstep._options.shared import OWN
from fusedstep._sharding.dtensor import local
from fusedstep._state.storage import way_of
from fusedstep._step.kernels import wants_native
from fusedstep._step.strategy import strategy_of
from fusedstep.offload import OffloadedOptimizer


class Finding(NamedTuple):
    """One line of the report."""

    topic: str
    finding: str
    advice: str | None = None


def count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def findings_of(optimizer: Any) -> list[Finding]:
    """Returns a line for each group, and lines for what a group loses, or brought along.

    Raises:
        TypeError: if the optimizer is not one of ours.
    """
    if isinstance(optimizer, OffloadedOptimizer):
        optimizer = optimizer._inner
    check_ours(optimizer)
    found = []
    for index, group in enumerate(optimizer.param_groups):
        topic = f"group {index}"
        found.append(Finding(topic, *_of_steps(optimizer, group)))
        found += [Finding(topic, *each) for each in _from_elsewhere(optimizer, group)]
        if lost := _of_rounding(group):
            found.append(Finding(topic, *lost))
    if optimizer._store.was_read and is_state_held(optimizer):
        advice = "every step looks at all of them: delete what holds them, or keep a deepcopy"
        found.append(Finding("state", "a state_dict() or another variable holds states", advice))
    if skipped := optimizer.skipped_steps:
        advice = "step(error_if_nonfinite=True) names the weight"
        text = f"{count(skipped, 'step')} by skip_nonfinite"
        found.append(Finding("skipped", text, advice))
    return found


def _of_steps(optimizer: FusedOptimizer, group: dict[str, Any]) -> tuple[str, str | None]:
    """How the weights of a group are stepped, and what to do about it."""
    weights = group["params"]
    kinds = dict.fromkeys(
        f"{str(p.dtype).removeprefix('torch.')} on {p.device.type}" for p in weights
    )
    elements = sum(p.numel() for p in weights)
    name = optimizer._store.optimizer.__name__
    subject = f"{name}, {count(len(weights), 'weight')}, {elements:,} elements, {', '.join(kinds)}"
    reason = why_torch_operations(optimizer, group)
    if reason is None:
        kernels = "native, where the class has kernels" if optimizer._composite else "native"
        return f"{subject}: {kernels}", None
    text = f"{subject}: torch operations: {reason}"
    if _asks_for_torch(optimizer, group) and not group.get("differentiable"):
        option = reason.partition("=")[0]
        return text, f"set {option} to None in this group"
    return text, None


def why_torch_operations(optimizer: Any, group: dict[str, Any]) -> str | None:
    """Why torch operations step the weights of a group; None if native kernels do."""
    return _asks_for_torch(optimizer, group) or _why_not_native(optimizer, group)


def groups_by_torch(optimizer: Any) -> list[str]:
    """A sentence for each group that torch operations step, with the reason."""
    reasons = (why_torch_operations(optimizer, group) for group in optimizer.param_groups)
    return [
        f"Torch operations step group {index}: {reason.rstrip('.')}."
        for index, reason in enumerate(reasons)
        if reason is not None
    ]


def _asks_for_torch(optimizer: FusedOptimizer, group: dict[str, Any]) -> str | None:
    """The option of a group for which no native kernel steps the group; None without one."""
    if wants_native(optimizer, group):
        return None
    if group.get("differentiable"):
        return "differentiable=True"
    return "fused=False" if group.get("fused") is False else "foreach=True"


def _why_not_native(optimizer: FusedOptimizer, group: dict[str, Any]) -> str | None:
    """What the step would say if native kernels were asked for; None if they step the group."""
    try:
        strategy_of(optimizer).is_native(optimizer, group | {"fused": True}, group["params"])
    except RuntimeError as error:
        return str(error)
    return None


def _from_elsewhere(
    optimizer: FusedOptimizer, group: dict[str, Any]
) -> list[tuple[str, str | None]]:
    """Options that choose how to step, and have another value than the constructor gave them."""
    found: list[tuple[str, str | None]] = []
    for name in ("foreach", "fused"):
        given = optimizer.defaults.get(name, OWN.get(name))
        value = group.get(name, given)
        if value != given and value is not None:
            found.append(
                (
                    f"{name}={value}, while the optimizer was made with {name}={given}: the group, "
                    "or a loaded checkpoint, brought it",
                    f"set {name} to {given} in this group after loading",
                )
            )
    return found


#: So many elements of a weight are looked at, and of so many weights.
_ELEMENTS, _WEIGHTS = 4096, 64


def _of_rounding(group: dict[str, Any]) -> tuple[str, str | None] | None:
    """What is lost of moves of 16-bit weights that keep no value beside them."""
    plain = [
        p
        for p in group["params"]
        if p.dtype in (torch.bfloat16, torch.float16) and way_of(group, p) is None and not p.is_meta
    ]
    if not plain:
        return None
    dtype = plain[0].dtype
    # Neighbours are eps / 2 to eps of a number apart: half of the least distance rounds back.
    parts = round(4 / torch.finfo(dtype).eps)
    name = str(dtype).removeprefix("torch.")
    text = (
        f"{count(len(plain), 'weight')} in {name} alone: a move of less than 1/{parts} of an "
        "element rounds away"
    )
    if (lr := group.get("lr")) is not None and float(lr) > 0:
        share = _lost_share(plain, float(lr))
        text += f", and {share:.0%} of the elements are too large to move by lr={float(lr):g}"
    ways = 'master_weights="split" or rounding="stochastic"'
    if dtype is torch.float16:
        ways = "master_weights=True"
    return text, f"{ways} keeps it"


def _lost_share(weights: list[Tensor], move: float) -> float:
    """The share of elements that are the same after such a move: of the first of each weight."""
    lost = looked_at = 0
    for weight in itertools.islice(weights, _WEIGHTS):
        some = local(weight).detach().flatten()[:_ELEMENTS].float().abs()
        lost += int(((some + move).to(weight.dtype) == some.to(weight.dtype)).sum())
        looked_at += some.numel()
    return lost / max(looked_at, 1)
