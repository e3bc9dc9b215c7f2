"""Events between the steps of a training: steps in the backward pass, and offloaded ones, follow.

A case is a training of a few weights. Between iterations, and between the backward passes of one,
weights are frozen, edited and exchanged, groups are reordered and shortened, and states are reset.
The plain optimizer takes the same events, and each step leaves the same bits. More passes than were
announced may be refused where buckets are stepped in them.
"""

from __future__ import annotations

import random
import traceback
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

import fusedstep
from fuzz.choices import ROWS
from fuzz.memory import DTYPES
from fuzz.run import Case, CaseError

SHARE = 10
"""One seed in so many has a case of these, none of which `composites` takes."""

CAPS = (0, 0.0002, 25)
"""Sizes of buckets in MiB: of a weight, of a few, and of a group."""

BFLOAT16_WAYS = (
    {"master_weights": "float32"},
    {"master_weights": "split"},
    {"rounding": "kahan"},
    {"rounding": "stochastic", "seed": 2},
)


def check(case: Case, *, may_refuse: bool = True) -> None:
    """Raises `CaseError` unless weights and states are those of the plain optimizer.

    A case ends where more passes than were announced are refused, if they may be.
    """
    if not any(group["weights"] for group in case["groups"]):
        return
    threads = torch.get_num_threads()
    torch.set_num_threads(case["settings"][0][1])
    step = {"n": 0}
    try:
        plain, other = Training(case, None), Training(case, case["mode"])
        for step in case["steps"]:
            plain.take(step)
            other.take(step)
            if other.refusal:
                if not may_refuse:
                    raise CaseError("refused", step["n"], other.refusal)
                return
            _compare(plain, other, step["n"])
        other.end()
    except CaseError:
        raise
    except Exception as error:
        raise CaseError(type(error).__name__, step["n"], traceback.format_exc()) from error
    finally:
        torch.set_num_threads(threads)


def _compare(plain: Training, other: Training, n: int) -> None:
    for identity, p in plain.weights.items():
        its = other.weights[identity]
        if not torch.equal(_comparable(p.detach()), _comparable(its.detach())):
            text = f"weight {identity} is {its.tolist()!r:.200} instead of {p.tolist()!r:.200}"
            raise CaseError("value", n, text)
        mine, theirs = (t.optimizer.state.get(w, {}) for t, w in ((plain, p), (other, its)))
        if mine.keys() != theirs.keys():
            raise CaseError("value", n, f"weight {identity}: states {[*theirs]}, not {[*mine]}")
        for name, value in mine.items():
            if not torch.equal(_comparable(value), _comparable(theirs[name])):
                raise CaseError("value", n, f"weight {identity}: another {name}")


def _comparable(value: Tensor) -> Tensor:
    return value.view(torch.uint8) if value.itemsize == 1 else value.nan_to_num(7.0)


class Training:
    """The weights of a case and their optimizer, as a mode asks for it, or plain."""

    def __init__(self, case: Case, mode: dict[str, Any] | None):
        self.case, self.mode = case, mode
        self.weights: dict[int, Parameter] = {}
        self.refusal = ""
        self.groups_out: list[dict[str, Any]] = []
        groups = [self.group(group) for group in case["groups"] if group["weights"]]
        row, kept = ROWS[case["row"]], case["mode"]["kept"]
        self.optimizer = row.optimizer(groups, **(row.options | case["options"] | kept))
        self._handle = None
        if mode is not None:
            arguments = {"bucket_cap_mb": mode["cap"], "accumulation_steps": mode["passes"]}
            if mode["offload"]:
                self.optimizer = fusedstep.offload(
                    self.optimizer, overlap=mode["overlap"], **arguments
                )
                self._handle = self.optimizer
            else:
                self._handle = fusedstep.step_in_backward(self.optimizer, **arguments)

    def end(self) -> None:
        if self._handle is not None:
            self._handle.remove()

    def group(self, group: dict[str, Any]) -> dict[str, Any]:
        for weight in group["weights"]:
            generator = torch.Generator().manual_seed(self.case["seed"] + weight["id"])
            values = torch.rand(weight["shape"], generator=generator) - 0.5
            p = Parameter(values.to(DTYPES[weight["dtype"]]))
            self.weights[weight["id"]] = p.requires_grad_(not weight.get("frozen", False))
        params = [self.weights[weight["id"]] for weight in group["weights"]]
        return {"params": params} | group["options"]

    def take(self, step: dict[str, Any]) -> None:
        self.change(step["changes"])
        for number, each in enumerate(step["passes"]):
            self.change(each["changes"])
            loss = self._loss(each["weights"], 100 * step["n"] + number)
            try:
                if loss is not None:
                    loss.backward()
            except RuntimeError as error:
                if "accumulation_steps" not in str(error) or not self._may_refuse(number):
                    raise
                self.refusal = str(error)
                return
        self.change(step["before_step"])
        self.optimizer.step()
        self.optimizer.zero_grad()

    def _may_refuse(self, number: int) -> bool:
        if self.mode is None or self.mode["passes"] is None:
            return False
        return self.mode["overlap"] and number >= self.mode["passes"]

    def _loss(self, identities: list[int], n: int) -> Tensor | None:
        loss = None
        for identity in identities:
            p = self.weights.get(identity)
            if p is not None and p.requires_grad:
                generator = torch.Generator().manual_seed(self.case["seed"] + 1000 * n + identity)
                factor = (torch.rand(p.shape, generator=generator) - 0.5).to(p.dtype)
                part = (p * factor + 0.1 * p * p).sum()
                loss = part if loss is None else loss + part
        return loss

    def change(self, changes: list[dict[str, Any]]) -> None:
        for change in changes:
            CHANGES[change["do"]](self, change)


# Changes. What a smaller case lacks is passed over.


def _of_weight(function: Callable[..., None]) -> Callable[[Training, dict[str, Any]], None]:
    def change_weight(training: Training, change: dict[str, Any]) -> None:
        if change["weight"] in training.weights:
            function(training, training.weights[change["weight"]], change)

    return change_weight


def _is_frozen(training: Training, p: Parameter, change: dict[str, Any]) -> None:
    p.requires_grad_(not p.requires_grad)


def _is_scaled(training: Training, p: Parameter, change: dict[str, Any]) -> None:
    with torch.no_grad():
        p.mul_(change["factor"])


def _data_are_scaled(training: Training, p: Parameter, change: dict[str, Any]) -> None:
    p.data.mul_(change["factor"])


def _data_are_exchanged(training: Training, p: Parameter, change: dict[str, Any]) -> None:
    p.data = p.data * change["factor"]


def _group_of(training: Training, p: Parameter) -> int | None:
    groups = enumerate(training.optimizer.param_groups)
    return next((i for i, group in groups if any(p is each for each in group["params"])), None)


def _goes(training: Training, p: Parameter, change: dict[str, Any]) -> None:
    """To another group, or out of all and later back."""
    groups = training.optimizer.param_groups
    if any(p is each for group in training.groups_out for each in group["params"]):
        return
    index = _group_of(training, p)
    if index is not None:
        group = groups[index]
        group["params"] = [each for each in group["params"] if each is not p]
    if index is None or change["to"] is not None:
        groups[(change["to"] or 0) % len(groups)]["params"].append(p)


def _weights_are_reversed(training: Training, change: dict[str, Any]) -> None:
    groups = training.optimizer.param_groups
    if groups:
        groups[change["group"] % len(groups)]["params"].reverse()


def _groups_are_reversed(training: Training, change: dict[str, Any]) -> None:
    training.optimizer.param_groups.reverse()


def _group_goes(training: Training, change: dict[str, Any]) -> None:
    """A group is removed, and with the next such change it is back."""
    groups = training.optimizer.param_groups
    if training.groups_out:
        groups.append(training.groups_out.pop())
    elif len(groups) > 1:
        training.groups_out.append(groups.pop(change["group"] % len(groups)))


def _rate_changes(training: Training, change: dict[str, Any]) -> None:
    groups = training.optimizer.param_groups
    if groups:
        groups[change["group"] % len(groups)]["lr"] *= abs(change["factor"])


def _is_loaded(training: Training, change: dict[str, Any]) -> None:
    # torch's dictionary names no weight that is in no group.
    if not any(_group_of(training, p) is None for p in training.weights.values()):
        training.optimizer.load_state_dict(training.optimizer.state_dict())


def _grads_are_cleared(training: Training, change: dict[str, Any]) -> None:
    training.optimizer.zero_grad()


def _states_are_reset(training: Training, change: dict[str, Any]) -> None:
    if change["replaced"]:
        training.optimizer.state = defaultdict(dict)
    else:
        training.optimizer.state.clear()


def _state_is_dropped(training: Training, p: Parameter, change: dict[str, Any]) -> None:
    training.optimizer.state.pop(p, None)


def _state_is_scaled(training: Training, p: Parameter, change: dict[str, Any]) -> None:
    for name, value in training.optimizer.state.get(p, {}).items():
        if name != "step" and value.is_floating_point():
            value.mul_(abs(change["factor"]))


CHANGES: dict[str, Callable[[Training, dict[str, Any]], None]] = {
    "freeze": _of_weight(_is_frozen),
    "scale": _of_weight(_is_scaled),
    "data": _of_weight(_data_are_scaled),
    "exchange": _of_weight(_data_are_exchanged),
    "go": _of_weight(_goes),
    "order": _weights_are_reversed,
    "groups": _groups_are_reversed,
    "out": _group_goes,
    "lr": _rate_changes,
    "load": _is_loaded,
    "zero_grad": _grads_are_cleared,
    "reset": _states_are_reset,
    "drop": _of_weight(_state_is_dropped),
    "scale_state": _of_weight(_state_is_scaled),
}


def has(seed: int) -> bool:
    """Returns whether the case of a seed is one of these."""
    return seed % SHARE == SHARE - 3


def draw(seed: int) -> Case:
    """The case of a seed: the same each time."""
    chooser = random.Random(f"events {seed}")
    row = chooser.choice(list(ROWS))
    dtype = chooser.choice(["float32", "float32", "bfloat16"])
    groups, identity = [], 0
    for _ in range(chooser.randint(1, 3)):
        weights = []
        for _ in range(chooser.randint(1, 3)):
            identity += 1
            shape = [chooser.randint(1, 6) for _ in range(chooser.randint(1, 2))]
            frozen = chooser.random() < 0.2
            weights.append({"id": identity, "dtype": dtype, "shape": shape, "frozen": frozen})
        groups.append({"options": {"lr": chooser.choice([0.01, 0.1])}, "weights": weights})
    passes = chooser.choice([1, 1, 1, 2, 3])
    offload = chooser.random() < 0.6
    mode = {
        "offload": offload,
        "overlap": not offload or chooser.random() < 0.5,
        "cap": chooser.choice(CAPS),
        "passes": None if offload and chooser.random() < 0.2 else passes,
        "kept": chooser.choice(BFLOAT16_WAYS) if dtype == "bfloat16" else {},
    }
    steps = [
        _step(chooser, n, identity, len(groups), passes, mode)
        for n in range(1, 1 + chooser.randint(2, 7))
    ]
    return {
        "seed": seed,
        "row": row,
        "mode": mode,
        "options": {},
        "groups": groups,
        "steps": steps,
        "settings": [[0, chooser.randint(1, 3)]],
    }


def _step(
    chooser: random.Random, n: int, weights: int, groups: int, passes: int, mode: dict[str, Any]
) -> dict[str, Any]:
    # A bucket may have been stepped in the last pass that was announced.
    keeps = not mode["overlap"] or mode["passes"] is None
    taken = [
        {
            "weights": [i for i in range(1, weights + 1) if chooser.random() < 0.85],
            "changes": _changes(chooser, weights, groups, 0.5 if keeps or 0 < i < passes else 0.0),
        }
        for i in range(max(1, passes + chooser.choice([0, 0, 0, 0, -1, 1])))
    ]
    return {
        "n": n,
        "changes": _changes(chooser, weights, groups, 0.8),
        "passes": taken,
        "before_step": _changes(chooser, weights, groups, 0.5 if keeps else 0.0),
        "grads": {},
        "call": {},
    }


def _changes(
    chooser: random.Random, weights: int, groups: int, chance: float
) -> list[dict[str, Any]]:
    found = []
    while chooser.random() < chance and len(found) < 4:
        found.append(
            {
                "do": chooser.choice(list(CHANGES)),
                "weight": chooser.randint(1, weights),
                "group": chooser.randrange(groups),
                "to": chooser.choice([None, *range(groups)]),
                "factor": chooser.choice([0.5, 0.9, 2.0, -1.0]),
                "replaced": chooser.random() < 0.5,
            }
        )
    return found
