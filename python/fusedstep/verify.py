"""Runs a training's steps beside the imperative reference, and tells how far they are apart."""

from __future__ import annotations

import copy
import inspect
import math
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from fusedstep._api.base import FusedOptimizer
from fusedstep._api.buckets import check_free, check_ours
from fusedstep._sharding import dtensor
from fusedstep._state.codes import is_codes
from fusedstep._state.storage import BESIDE, MASTER, value_of, way_of
from fusedstep._step.strategy import strategy_of
from fusedstep._torch_ops import twin as _twin
from fusedstep.doctor.optimizer import groups_by_torch


def verify(
    optimizer: Optimizer,
    closure: Callable[[], Any] | None = None,
    *,
    steps: int = 3,
    tolerance: float = 16,
) -> Report:
    """Compares steps with the imperative reference, prints what was found and returns it.

    With a closure, which clears the gradients, computes them anew and returns the loss, the steps
    are taken at once. Without one the next ``steps`` steps of your own loop are compared as it
    takes them; what is returned is filled then, and printed after the last of them.

    Before each step, copies of weights, states and gradients take the same step with
    ``fused=False``: in the weights' dtype for its time, and in double precision for what the result
    should be. They are freed after the step; until then they take about four times the memory that
    weights, states and gradients have in float32. Training is not affected: weights, states and
    ``.grad`` are afterwards as if nobody had looked.

    An error is given in units in the last place of the weight's or state's own dtype. A unit is the
    largest of: the distance of neighbouring numbers at the right value; that at the largest change
    in the tensor, for values near zero have errors of the numbers they are differences of; and what
    one unit of the gradient makes of difference, for the sum of gradient and decay may cancel.
    Rounding alone errs by half a unit. Of states in codes the numbers are taken that they stand
    for; the new ones are rounded to codes, and not compared.

    A weight that moves by matrix products (Muon, GaLore, APOLLO) is judged as a whole, and its
    states are not. The error is the norm of the difference to the right weight, less the rounding
    of the weight; a unit is the norm of the move times the precision of the products, or the
    effect of an error of that precision in each element of the gradient, if that is more.

    Args:
        optimizer (Optimizer): one of :mod:`fusedstep.optim`
        closure (Callable, optional): computes the gradients of a step
        steps (int, optional): how many steps are compared (default: 3)
        tolerance (float, optional): what is allowed besides the half unit of the last rounding, in
            units of the precision of the maths, which is float32 but for weights of float64. With
            these the reference is no more precise, and the root of the number of elements is added.
            With states that are means over rows and columns, as Adafactor's and CAME's, the root of
            the number of elements of a mean is added (default: 16)

    Returns:
        :class:`~fusedstep.verify.Report`: ``ok``, ``worst``, ``speedup``, and ``rows``, one for
        each parameter. A difference raises nothing; ``assert report.ok, report`` does.

    Raises:
        TypeError: if ``optimizer`` is not of this package.
        ValueError: if ``steps`` is less than 1.
        RuntimeError: if the backward pass steps a weight, now or at a step that is to be compared:
            ``optimizer.step()`` does nothing then. Compare before ``step_in_backward()``.

    Example::

        >>> optimizer = fusedstep.convert(optimizer)
        >>> fusedstep.verify(optimizer)
        >>> ...  # train on; after three steps:
        Adam, 3 of 3 steps, largest errors in ulp:
        ...
    """
    check_ours(optimizer)
    if steps < 1:
        raise ValueError(f"steps must be at least 1, not {steps}")
    check_free(optimizer.param_groups)
    watch = _Watch(optimizer, steps, tolerance)
    if closure is not None:
        try:
            for _ in range(steps):
                optimizer.step(closure)
        finally:
            watch.end()
    return watch.report


@dataclass
class Difference:
    """The distance of one parameter's native steps from the reference."""

    name: str
    """Its name if the optimizer was given names, else its group and its place there."""
    shape: tuple[int, ...]
    ulp: dict[str, float] = field(default_factory=dict)
    """The largest error of ``'weight'`` and of each state, in units in the last place."""
    allowed: dict[str, float] = field(default_factory=dict)
    """The largest errors that are taken for rounding."""

    @property
    def ok(self) -> bool:
        return self.excess <= 1

    @property
    def largest(self) -> str:
        """The farthest from the reference, by what is allowed: ``'weight'`` or a state's name."""
        return max(self.ulp, key=lambda what: self.ulp[what] / self.allowed[what])

    @property
    def excess(self) -> float:
        """Its error, as a multiple of what is allowed."""
        return self.ulp[self.largest] / self.allowed[self.largest]

    def __str__(self) -> str:
        what = self.largest
        return f"{self.ulp[what]:.3g} ulp in {what} of {self.name}"


@dataclass(repr=False)
class Report:
    """The findings of :func:`verify` so far."""

    optimizer: str
    wanted: int
    """The number of steps to compare."""
    steps: int = 0
    """The number of steps compared so far."""
    isa: str | None = None
    """The instruction set of the last of them; None if it was the reference's own code."""
    native_ms: float = math.inf
    """The fastest native step."""
    reference_ms: float = math.inf
    """The fastest step of the same formula in torch operations, in the weights' dtype."""
    rows: list[Difference] = field(default_factory=list)
    """One for each parameter, in the optimizer's order."""
    by_torch: list[str] = field(default_factory=list)
    """A sentence for each group that torch operations stepped, with the reason."""

    @property
    def ok(self) -> bool:
        """True if all steps were compared, ran native kernels, and differ by rounding alone."""
        return self.steps == self.wanted and self.isa is not None and not self.differing

    @property
    def differing(self) -> list[Difference]:
        """The parameters that differ by more than is allowed."""
        return [row for row in self.rows if not row.ok]

    @property
    def worst(self) -> Difference:
        """The parameter that is farthest from the reference, by what is allowed."""
        return max(self.rows, key=lambda row: row.excess)

    @property
    def speedup(self) -> float:
        """The time of a reference step over that of a native step."""
        return self.reference_ms / self.native_ms

    def __repr__(self) -> str:
        """One line: a notebook shows it below the table that verify() has printed."""
        steps = f"{self.steps} of {self.wanted} steps"
        return f"<Report of {self.optimizer}: {steps}, ok={self.ok}>"

    def __str__(self) -> str:
        title = f"{self.optimizer}, {self.steps} of {self.wanted} steps"
        if not self.steps:
            return title
        return "\n".join([f"{title}, largest errors in ulp:", *self._table(), *self._summary()])

    def _table(self, most: int = 10) -> list[str]:
        rows = sorted(self.rows, key=lambda row: -row.excess)
        columns = list(dict.fromkeys(what for row in rows for what in row.ulp))
        table = [["parameter", "shape", *columns, ""]]
        for row in rows[:most]:
            errors = [f"{row.ulp[what]:.3g}" if what in row.ulp else "" for what in columns]
            table.append([row.name, str(list(row.shape)), *errors, "" if row.ok else "differs"])
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = ["  ".join(map(str.ljust, cells, widths)).rstrip() for cells in table]
        return [*lines, f"and {len(rows) - most} more"] if len(rows) > most else lines

    def _summary(self) -> list[str]:
        if self.isa is None:
            return [*self.by_torch, "No native kernels ran: the reference is compared with itself."]
        agree = f"All {len(self.rows)} parameters agree"
        differ = (
            f"{len(self.differing)} of {len(self.rows)} parameters differ by more than rounding"
        )
        return [
            *self.by_torch,
            f"{differ if self.differing else agree}: at most {self.worst}.",
            f"A native step ({self.isa}) takes {self.native_ms:.3g} ms; with fused=False, in torch "
            f"operations, {self.reference_ms:.3g} ms: {self.speedup:.1f} times as long.",
        ]


class _Expected:
    """The value that a step should give a weight or state, in double precision."""

    def __init__(self, before: Tensor | None, after: Tensor) -> None:
        self.value = _elements(after)
        self.sensitivity = torch.zeros_like(self.value, dtype=torch.float32)
        """The difference that one unit of the gradient makes."""
        change = (self.value if before is None else self.value - _elements(before)).abs()
        finite = change[change.isfinite()]
        self.largest_change = finite.max().item() if finite.numel() else 0.0
        self.norm_of_change = finite.norm().item()

    def note(self, other: Tensor) -> None:
        """Takes what the step makes of it with gradients of a unit more or less."""
        difference = (_elements(other) - self.value).abs().nan_to_num_()
        torch.maximum(self.sensitivity, difference.float(), out=self.sensitivity)


class _Call(dict[str, Any]):
    """The keyword arguments of a step that is compared: they live as long as it runs."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        super().__init__(arguments)
        self.expected: dict[Tensor, dict[str, _Expected]] = {}
        self.started = 0.0


class _Watch:
    """Compares the next steps of an optimizer by hooks around them."""

    def __init__(self, optimizer: Optimizer, steps: int, tolerance: float) -> None:
        self.report = Report(type(optimizer).__name__, steps)
        self._tolerance = tolerance
        self._rows: dict[Tensor, Difference] = {}
        self._call: Callable[[], _Call | None] = lambda: None  # the step that is running
        # After the other hooks before a step, and before those after it: what they do to gradients
        # and weights is no part of the step.
        before = optimizer.register_step_pre_hook(self._before)
        after = optimizer.register_step_post_hook(self._after)
        if (hooks := after.hooks_dict_ref()) is not None:
            hooks.move_to_end(after.id, last=False)
        self._handles = [before, after]

    def end(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _before(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if self.report.steps == self.report.wanted:
            return None
        if self._call() is not None:  # torch runs hooks for a subclass's step, and for ours in it
            return None
        check_free(optimizer.param_groups)
        bound = inspect.signature(type(optimizer).step).bind(*args, **kwargs)
        closure = bound.arguments.pop("closure", None)
        (_, *others), options = bound.args, bound.kwargs

        def watched() -> Any:
            loss = closure()
            self._foresee(check_ours(optimizer), others, options)
            return loss

        if closure is not None:
            bound.arguments["closure"] = watched
        call = _Call(bound.kwargs)
        self._call = weakref.ref(call)
        if closure is None:
            self._foresee(check_ours(optimizer), others, options)
        return bound.args, call

    @torch.no_grad()
    def _foresee(self, optimizer: FusedOptimizer, args: list[Any], kwargs: dict[str, Any]) -> None:
        """Takes the step that is to come on copies."""
        call = self._call()
        if call is None:  # a closure is called when its step has ended
            return
        twin, _ = _copy_of(optimizer, torch.clone)
        started = time.perf_counter()
        _twin.step(twin, *args, **kwargs)
        self.report.reference_ms = min(self.report.reference_ms, _ms_since(started))

        ways, owners = _ways_of(optimizer), _groups_of(optimizer)
        for units in (0, 1, -1):
            twin, copies = _copy_of(optimizer, _in_double, units)
            for group, own in zip(twin.param_groups, optimizer.param_groups, strict=True):
                group.update(strategy_of(optimizer).exact_options(optimizer, own))
            _twin.step(twin, *args, **kwargs)
            for p, weight in copies.items():
                found = {"weight": weight}
                if strategy_of(optimizer).products_dtype(optimizer, owners[p], p) is None:
                    found |= twin.state.get(weight, {})
                before = optimizer._store.decoded(owners[p], p, optimizer.state.get(p, {}))
                before["weight"] = _value(ways[p], p, optimizer)
                if MASTER in before:  # in double nothing is rounded from it
                    found[MASTER] = weight
                expected = call.expected.setdefault(p, {})
                for what, value in found.items():
                    # A count for random numbers alone: in double there are none.
                    is_count = what == "step" and what not in optimizer._numbers
                    if is_count or not _is_inexact(value):
                        continue
                    if units == 0:
                        expected[what] = _Expected(before.get(what), value)
                    else:
                        expected[what].note(value)
        call.started = time.perf_counter()

    @torch.no_grad()
    def _after(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        call = self._call()
        if call is None or kwargs is not call or not call.expected:
            return
        report, ours = self.report, check_ours(optimizer)
        report.native_ms = min(report.native_ms, _ms_since(call.started))
        try:
            report.isa = ours._isa()
        except RuntimeError:
            report.isa = None
        report.by_torch = groups_by_torch(ours)
        self._compare(ours, call.expected)
        report.steps += 1
        if report.steps == report.wanted:
            print(report)

    def _compare(
        self, optimizer: FusedOptimizer, expected: dict[Tensor, dict[str, _Expected]]
    ) -> None:
        elements, ways = sum(p.numel() for p in expected), _ways_of(optimizer)
        owners = _groups_of(optimizer)
        for name, p in _named_parameters(optimizer):
            if p not in self._rows:
                self._rows[p] = Difference(name, tuple(p.shape))
                self.report.rows.append(self._rows[p])
            row, maths = self._rows[p], _maths(p)
            # Sums over n numbers of the reference's own precision err by about the root of n.
            tolerance = self._tolerance + (elements**0.5 if maths is torch.float64 else 0)
            # So do means over rows and columns.
            averaged = _averaged(optimizer, owners[p], p)
            found = {"weight": p, **optimizer.state.get(p, {})}
            if ways[p] == "split":
                found["weight"] = _value(ways[p], p, optimizer)
            for what, right in expected[p].items():
                actual = found.get(what, torch.empty(0, dtype=maths, device="cpu"))
                if is_codes(actual):  # are rounded to codes
                    continue
                # One that is rounded at random is one of the two around the value.
                is_random = what == "weight" and ways[p] == "stochastic"
                rounding = 1.0 if is_random else 0.5
                products = strategy_of(optimizer).products_dtype(optimizer, owners[p], p)
                if products is None:
                    units = torch.finfo(maths).eps / torch.finfo(actual.dtype).eps
                    error = _largest_error(actual, right, maths)
                    row.allowed[what] = rounding + (tolerance + averaged**0.5) * units
                else:
                    error = _error_of_whole(actual, right, products, rounding)
                    row.allowed[what] = tolerance
                row.ulp[what] = max(error, row.ulp.get(what, 0.0))


def _copy_of(
    optimizer: FusedOptimizer, copied: Callable[[Tensor], Tensor], units: int = 0
) -> tuple[Optimizer, dict[Tensor, Tensor]]:
    """An imperative twin over copies of weights, gradients and states; the copies by weight.

    Gradients are so many units in the last place larger, and every second one smaller: clipping
    would undo a common factor. Gradients of matrix products differ in each element by up to so many
    units of the products: a common factor changes no basis and no direction.
    """
    copies, states, ways = {}, {}, _ways_of(optimizer)
    groups = [group["params"] for group in optimizer.param_groups]
    for p, group in _groups_of(optimizer).items():
        state = optimizer._store.decoded(group, p, optimizer.state.get(p, {}))
        in_double = copied is _in_double
        twin = copies[p] = copied(_value(ways[p], p, optimizer) if in_double else p.detach())
        if p.grad is not None:
            twin.grad = p.grad.detach().to(twin.dtype, copy=True)
            products = strategy_of(optimizer).products_dtype(optimizer, group, p)
            if products is None:
                twin.grad *= 1 + units * torch.finfo(p.dtype).eps
            elif units and p.numel():
                twin.grad *= 1 + units * torch.finfo(products).eps * _noise(twin.grad)
        units = -units
        states[twin] = {
            name: copied(value) if _is_rounded(optimizer, name, value) else copy.deepcopy(value)
            for name, value in state.items()
            if not in_double or name == MASTER or name not in BESIDE.values()
        }
    groups = [[copies[p] for p in params] for params in groups]
    return _twin.imperative_twin(optimizer, groups, states), copies


def _noise(values: Tensor) -> Tensor:
    """Numbers between -1 and 1 that look random, and follow from the values alone."""
    largest = values.abs().max()
    return (values * (1e6 / torch.where(largest > 0, largest, 1))).sin()


def _averaged(optimizer: FusedOptimizer, group: dict[str, Any], weight: Tensor) -> int:
    """The most elements that a number of a weight's states is the mean of; 0 if none is a mean."""
    shapes = [slot.shape for slot in optimizer._store.slots_of(group, weight)]
    least = min((shape.numel() for shape in shapes if shape.numel()), default=weight.numel())
    return weight.numel() // least if least < weight.numel() else 0


def _groups_of(optimizer: Optimizer) -> dict[Tensor, dict[str, Any]]:
    return {p: group for group in optimizer.param_groups for p in group["params"]}


def _ways_of(optimizer: Optimizer) -> dict[Tensor, str | None]:
    """The ways in which weights keep their values."""
    return {p: way_of(group, p) for p, group in _groups_of(optimizer).items()}


def _value(way: str | None, weight: Tensor, optimizer: Optimizer) -> Tensor:
    """The value of a weight, which has as many bits as the way that it is kept in allows."""
    state, weight = optimizer.state.get(weight, {}), weight.detach()
    if way in BESIDE and BESIDE[way] in state:
        return value_of(way, weight, state)
    return weight


def _named_parameters(optimizer: Optimizer) -> list[tuple[str, Tensor]]:
    named: list[tuple[str, Tensor]] = []
    for index, group in enumerate(optimizer.param_groups):
        places = [f"group {index}, {place}" for place in range(len(group["params"]))]
        named += zip(group.get("param_names", places), group["params"], strict=True)
    return named


def _largest_error(actual: Tensor, expected: _Expected, maths: torch.dtype) -> float:
    """The largest error of a tensor, in units in the last place of its dtype."""
    actual = _elements(actual)
    if actual.shape != expected.value.shape:
        return math.inf
    info, tiny = torch.finfo(actual.dtype), torch.finfo(maths).tiny
    largest = 0.0
    pieces = zip(
        _pieces(actual), _pieces(expected.value), _pieces(expected.sensitivity), strict=True
    )
    for found, right, sensitivity in pieces:
        unit = _units(right, info, expected.largest_change).maximum(sensitivity)
        error = (found.double() - right).abs()
        # Allows for results that flush-to-zero makes zero.
        error = torch.where(error < tiny, 0.0, error) / unit
        rounded = right.to(found.dtype)
        same = (found == rounded) | (found.isnan() & rounded.isnan())
        error = torch.where(same & ~found.isfinite(), 0.0, error).nan_to_num_(nan=math.inf)
        largest = max(largest, error.max().item())
    return largest


def _error_of_whole(
    actual: Tensor, expected: _Expected, products: torch.dtype, rounding: float
) -> float:
    """The norm of a tensor's error beyond rounding, in units of the products that it came from.

    ``rounding``: of the tensor's own dtype, in units in the last place.
    """
    actual = _elements(actual)
    if actual.shape != expected.value.shape:
        return math.inf
    error, units, sensitivity = 0.0, 0.0, 0.0
    pieces = zip(
        _pieces(actual), _pieces(expected.value), _pieces(expected.sensitivity), strict=True
    )
    for found, right, effect in pieces:
        unit = _units(right, torch.finfo(actual.dtype), expected.largest_change)
        same = (found == right.to(found.dtype)) | (found.isnan() & right.isnan())
        error += torch.where(same, 0.0, found.double() - right).square().sum().item()
        units += unit.square().sum().item()
        sensitivity += effect.double().square().sum().item()
    excess = max(0.0, math.sqrt(error) - rounding * math.sqrt(units))
    if not excess > 0:  # which NaN is not
        return math.inf if math.isnan(error) else 0.0
    unit = max(torch.finfo(products).eps * expected.norm_of_change, math.sqrt(sensitivity))
    return excess / unit if unit else math.inf


def _units(right: Tensor, info: torch.finfo, largest_change: float) -> Tensor:
    """Units in the last place of right values, and of the largest change for values near zero."""
    scale = right.abs().clamp_(min=max(largest_change, info.tiny), max=info.max)
    return info.eps * (scale / (2 * scale.frexp().mantissa))


def _pieces(tensor: Tensor) -> tuple[Tensor, ...]:
    """The elements in pieces, so that what is computed from them stays small."""
    flat = tensor.reshape(-1)
    return flat.split(1 << 20) if flat.numel() else ()


def _elements(tensor: Tensor) -> Tensor:
    """The numbers that this process has of a tensor: parts of complex ones, a DTensor's shard."""
    shard = dtensor.local(tensor.detach())
    return torch.view_as_real(shard) if shard.is_complex() else shard


def _is_rounded(optimizer: FusedOptimizer, name: str, value: Any) -> bool:
    """A number beside the states, such as a step count, has a dtype of its own."""
    return name not in optimizer._numbers and _is_inexact(value)


def _is_inexact(value: Any) -> bool:
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())


def _in_double(tensor: Tensor) -> Tensor:
    dtype = torch.complex128 if tensor.is_complex() else torch.float64
    return tensor.to(dtype, copy=True)


def _maths(weight: Tensor) -> torch.dtype:
    """The precision in which a step of this weight is computed."""
    wide = weight.dtype in (torch.float64, torch.complex128)
    return torch.float64 if wide else torch.float32


def _ms_since(started: float) -> float:
    return 1000 * (time.perf_counter() - started)
