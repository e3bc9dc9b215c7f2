"""Times steps beside those of torch's class, and tells what a training gains."""

from __future__ import annotations

import gc
import inspect
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from fusedstep._api.buckets import check_ours
from fusedstep._state.storage import ASKED, way_of
from fusedstep._torch_ops import twin
from fusedstep.doctor.optimizer import groups_by_torch

#: Names of the ways in which optimizers step.
OURS, FUSED, FOREACH, LOOP, FORMULA = "fusedstep", "fused", "foreach", "for-loop", "formula"

#: The options of torch's classes that choose a way.
_OPTIONS = {
    FUSED: {"fused": True},
    FOREACH: {"foreach": True},
    LOOP: {"foreach": False},
}


@dataclass(frozen=True, repr=False)
class Gain:
    """Milliseconds of a step, and of an iteration."""

    optimizer: str
    """The name of the class."""
    ms: dict[str, float]
    """The median of a step by what took it: ``"fusedstep"``; ``"fused"``, ``"foreach"`` and
    ``"for-loop"`` of torch's class; or ``"formula"`` in torch operations where torch has none."""
    iteration_ms: float | None = None
    """Of an iteration with the step of :attr:`other`."""
    notes: tuple[str, ...] = ()
    """Sentences on what makes the times no comparison of like with like."""

    @property
    def other(self) -> str:
        """The fastest of the other ways."""
        return min((name for name in self.ms if name != OURS), key=self.ms.__getitem__)

    @property
    def saved_ms(self) -> float:
        """What a step of ours takes less than that of :attr:`other`."""
        return self.ms[self.other] - self.ms[OURS]

    @property
    def share(self) -> float | None:
        """The part of an iteration that is saved, below 1."""
        return None if self.iteration_ms is None else self.saved_ms / self.iteration_ms

    def __repr__(self) -> str:
        """One line: a notebook shows it below the table that compare() has printed."""
        times = ", ".join(f"{name} {ms:.3g} ms" for name, ms in self.ms.items())
        return f"<Gain of {self.optimizer}: {times}>"

    def __str__(self) -> str:
        width = max(map(len, self.ms))
        lines = [f"{self.optimizer}, milliseconds a step"]
        lines += [
            f"  {name:<{width}}  {ms:9.3f}  {ms / self.ms[OURS]:6.2f} x"
            for name, ms in self.ms.items()
        ]
        return "\n".join([*lines, self.sentence(), *self.notes])

    def sentence(self) -> str:
        """What a training gains, in a sentence."""
        other = "the formula in torch operations" if FORMULA in self.ms else f"torch's {self.other}"
        if self.share is None:
            word = "less" if self.saved_ms >= 0 else "more"
            return f"A step takes {abs(self.saved_ms):.3f} ms {word} than by {other}."
        percent = 100 * self.share
        if percent <= -0.05:
            return (
                f"A training becomes {-percent:.1f} % slower than by {other}: you come for memory."
            )
        if percent < 0.05:
            return f"A training becomes no faster than by {other}: you come for memory."
        end = ": you come for memory" if percent < 2 else ""
        return f"A training becomes {percent:.1f} % faster than by {other}{end}."


def compare(optimizer: Optimizer, *, rounds: int = 5, iteration_ms: float | None = None) -> Gain:
    """Times steps of an optimizer beside those of torch's class, prints what was found, returns it.

    Copies of the weights are stepped: by a new optimizer of the same class and options, and by
    torch's class with ``fused=True``, or ``foreach=True`` where it has no fused way or that does
    not take the weights, or its only way, with those of the options that it has. Where torch has no
    such class, or it does not take the weights, the formula in torch operations is timed. They take
    turns, a step each in every round. Weights, gradients, states, hooks and the random generators
    of the run are not touched. Until it returns, the copies take twice the memory of weights,
    gradients and states.

    Sentences below the times say what makes them no comparison of like with like: groups that
    torch operations step, with the reason, and states in codes beside those of torch's class.

    A weight without a gradient is stepped with one of 1e-3 if no weight has one, and else not.

    Args:
        optimizer (Optimizer): one of :mod:`fusedstep.optim`
        rounds (int, optional): steps that are timed; of their times the median counts (default: 5)
        iteration_ms (float, optional): what an iteration of the training takes with torch's step,
            in milliseconds: the share of it that is saved is told then

    Raises:
        TypeError: if the optimizer is not one of :mod:`fusedstep.optim`.
        ValueError: if ``rounds`` or ``iteration_ms`` is not above 0.

    >>> fusedstep.compare(optimizer, iteration_ms=217)
    """
    ours = check_ours(optimizer)
    if rounds < 1:
        raise ValueError(f"Invalid rounds value: {rounds}")
    if iteration_ms is not None and not iteration_ms > 0:
        raise ValueError(f"Invalid iteration_ms value: {iteration_ms}")
    groups = optimizer.param_groups
    has_gradients = any(p.grad is not None for group in groups for p in group["params"])

    def copies() -> list[dict[str, Any]]:
        return [
            group | {"params": [_copy_of(p, has_gradients) for p in group["params"]]}
            for group in groups
        ]

    timed: dict[str, Optimizer] = {OURS: twin.like(ours, copies(), {})}
    for name, way in _ways_of_torch(type(optimizer)):
        if other := _of_torch(type(optimizer), copies(), optimizer.defaults, way):
            timed[name] = other
            break
    else:
        weights = [group["params"] for group in copies()]
        timed[FORMULA] = twin.imperative_twin(ours, weights)
    ms = time_steps(timed, rounds)
    found = Gain(type(optimizer).__name__, ms, iteration_ms, notes_of(timed))
    print(found)
    return found


def notes_of(timed: dict[str, Optimizer]) -> tuple[str, ...]:
    """Sentences that say how our step differs from the steps that are timed beside it."""
    ours = timed[OURS]
    notes = dict.fromkeys(groups_by_torch(ours))
    for name, other in timed.items():
        for group, own in zip(other.param_groups, ours.param_groups, strict=True):
            kept, here = _kept(group), _kept(own)
            if kept != here:
                whose = "the formula" if name == FORMULA else f"torch's {name}"
                text = f"fusedstep has {here}, {whose} {kept}: the steps move unequal memory."
                notes.setdefault(text)
    theirs = torch_class(type(ours))
    if FORMULA in timed and theirs is not None:
        notes.setdefault(f"torch.optim.{theirs.__name__} does not take these weights or options.")
    return tuple(notes)


def _kept(group: dict[str, Any]) -> str:
    """What a group has beside its weights, in words."""
    kind = group.get("state_dtype")
    states = (
        f"states in {str(kind).removeprefix('torch.')}" if kind else "states in the weights' dtype"
    )
    ways = dict.fromkeys(way_of(group, weight) for weight in group["params"])
    return " and ".join([states, *(ASKED[way] for way in ways if way)])


def torch_class(cls: type[Optimizer]) -> type[Optimizer] | None:
    """Returns the class of torch.optim whose formula a class has, or None.

    ``AdamW8bit`` has that of ``AdamW``.
    """
    names = [each.__name__ for each in cls.__mro__ if each.__module__.startswith("fusedstep.optim")]
    return next((getattr(torch.optim, name) for name in names if hasattr(torch.optim, name)), None)


def ways_of(
    cls: type[Optimizer], weights: Callable[[], list[Any]], options: dict[str, Any]
) -> dict[str, Optimizer]:
    """Returns optimizers of a class of ours and of torch's, each with weights of its own."""
    found: dict[str, Optimizer] = {OURS: cls(weights(), **options)}
    for name, way in _ways_of_torch(cls):
        if other := _of_torch(cls, weights(), options, way):
            found[name] = other
    if len(found) == 1:
        found[FORMULA] = cls(weights(), **options | {"fused": False})
    return found


def _ways_of_torch(cls: type[Optimizer]) -> Iterator[tuple[str, dict[str, bool]]]:
    """The ways that torch's class has, from the fastest, with the options that choose them."""
    other: Any = torch_class(cls)
    if other is None:
        return iter(())
    known = inspect.signature(other).parameters.keys()
    if "foreach" not in known:  # Muon, SparseAdam
        return iter([(LOOP, {})])
    return ((name, way) for name, way in _OPTIONS.items() if way.keys() <= known)


def _of_torch(
    cls: type[Optimizer], params: list[Any], defaults: dict[str, Any], way: dict[str, bool]
) -> Optimizer | None:
    """Torch's optimizer of these groups or weights, or None if its class does not take them."""
    other: Any = torch_class(cls)
    known = inspect.signature(other).parameters.keys() - {"fused", "foreach", "differentiable"}
    groups = [
        {k: v for k, v in each.items() if k in known} if isinstance(each, dict) else each
        for each in params
    ]
    options = {k: v for k, v in defaults.items() if k in known}
    if any(isinstance(each, dict) and each.get("use_muon") is False for each in params):
        return None  # torch's Muon steps matrices alone
    try:
        made = other(groups, **options | way)
        twin.step(made)  # fused classes look at dtypes there
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, TypeError, ValueError):
        return None
    return made


def _copy_of(weight: Tensor, has_gradients: bool) -> Tensor:
    copy = torch.nn.Parameter(weight.detach().clone(), weight.requires_grad)
    if weight.grad is not None:
        copy.grad = weight.grad.detach().clone()
    elif not has_gradients and weight.requires_grad:
        copy.grad = torch.full_like(copy, 1e-3, requires_grad=False)
    return copy


def time_steps(
    optimizers: dict[str, Optimizer],
    rounds: int,
    tell: Callable[[int, int], object] = lambda done, of: None,
    seconds: float = math.inf,
) -> dict[str, float]:
    """Returns the median milliseconds of a step of each optimizer; they take turns.

    Two rounds come before those that are timed. ``tell`` is called with the rounds that are done,
    and with those that there are. After so many seconds no round begins but the first timed one.
    """
    begun = time.perf_counter()
    devices = {
        p.device
        for each in optimizers.values()
        for group in each.param_groups
        for p in group["params"]
        if p.is_cuda
    }
    times: dict[str, list[float]] = defaultdict(list)
    names = list(optimizers)
    was_collecting = gc.isenabled()
    gc.disable()
    try:
        for index in range(rounds + 2):
            for name in names if index % 2 else names[::-1]:
                _wait(devices)
                started = time.perf_counter()
                twin.step(optimizers[name])
                _wait(devices)
                if index >= 2:
                    times[name].append(1000 * (time.perf_counter() - started))
            tell(index + 1, rounds + 2)
            if index >= 2 and time.perf_counter() - begun > seconds:
                break
    finally:
        if was_collecting:
            gc.enable()
    return {name: sorted(times[name])[len(times[name]) // 2] for name in names}


def _wait(devices: set[torch.device]) -> None:
    for device in devices:
        torch.cuda.synchronize(device)
