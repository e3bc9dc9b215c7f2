"""The program of a step with factored second moments, of weights that no plan takes.

Native operations step weights together where they can, and torch operations others. Where weights
are spread, each process decides so alone: both ways have the same collectives.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from fusedstep._factored.formula import first_eps, moment_names, numbers_at
from fusedstep._factored.options import averages
from fusedstep._factored.steps import Call, native_parts, part_by_torch, step_parts
from fusedstep._sharding.dtensor import local
from fusedstep._state.counts import count_steps
from fusedstep._state.storage import way_of
from fusedstep._step.binding import spread_weights
from fusedstep._step.kernels import wants_native
from fusedstep._step.owner import Owner
from fusedstep._step.plan import Work
from fusedstep._step.program import Pass, Program
from fusedstep._step.sums import place_of
from fusedstep._step.support import why_not_native
from fusedstep._step.undo import undone_on_error
from fusedstep._torch_ops.imperative import imperative_step, widened, write_back


def fuses(optimizer: Owner, group: dict[str, Any]) -> bool:
    """Returns whether native operations step weights of a group, but for those they cannot."""
    is_seen = torch._C._len_torch_dispatch_stack() > 0  # by a mode, operator by operator
    return wants_native(optimizer, group) and not is_seen


def operands_of(
    optimizer: Owner, group: dict[str, Any], weights: list[Tensor], states: list[dict[str, Tensor]]
) -> list[list[Tensor]]:
    """Moments of rows and of columns, and first moments: a list of each that there are."""
    rows, columns = [], []
    for weight, state in zip(weights, states, strict=True):
        *of_rows, of_columns = moment_names(group, weight.dim())
        # A vector is one row, with a column for each element.
        columns.append(local(state[of_columns]))
        rows.append(local(state[of_rows[0]]) if of_rows else columns[-1].new_empty(0))
    if not averages(group):
        return [rows, columns]
    return [rows, columns, [local(state["exp_avg"]) for state in states]]


class _Parts(NamedTuple):
    """How a step takes the weights of a group that have no plan."""

    calls: list[Call]
    """Native operations over several weights."""
    alone: list[int]
    """The places of weights that torch operations step, one by one."""
    are_native: bool
    """Whether native operations can step all weights: they multiply gradients as they read."""


class FactoredProgram(Program):
    """Steps groups of Adafactor that have no plan."""

    optimizer: Owner

    def prepare(self) -> None:
        for group, weights, grads, *_ in self.work:
            self._parts_of(group, weights, grads)

    def multiplied(self, work: list[Work]) -> list[Work]:
        """Multiplies gradients that torch operations take; native ones do so as they read."""
        if self.factors.on_host == 1:
            return work
        multiplied = []
        for item in work:
            parts = self._parts_of(item.group, item.weights, item.grads)
            multiplied += [item] if parts.are_native else super().multiplied([item])
        return multiplied

    def run(self, work: list[Work]) -> list[Pass]:
        """Steps weights spread over processes phase by phase, those of all groups together."""
        spread = spread_weights(self.optimizer)
        if spread.places:
            are_spread = [place_of(item.weights[0]) is not None for item in work]
            passes = map(self._passes, itertools.compress(work, are_spread))
            step_parts(list(itertools.chain.from_iterable(passes)), spread)
            work = list(itertools.compress(work, map(operator.not_, are_spread)))
        for item in work:
            self._step(item)
        return []

    def _parts_of(
        self, group: dict[str, Any], weights: list[Tensor], grads: list[Tensor]
    ) -> _Parts:
        """The parts of the step of a group, which are those of the last one if nothing changed."""
        if not fuses(self.optimizer, group):
            return _Parts([], list(range(len(weights))), False)
        operands = self.optimizer._memory.get(weights[0])
        parts: _Parts | None = operands.derived if operands else None
        if parts is None:
            parts = self._new_parts(group, weights, grads)
            if operands:
                operands.derived = parts
        return parts

    def _new_parts(
        self, group: dict[str, Any], weights: list[Tensor], grads: list[Tensor]
    ) -> _Parts:
        are_native, times = why_not_native(weights, grads) is None, Counter(map(id, weights))
        together: dict[tuple[float, float, bool], list[int]] = {}
        alone = []
        for place, (weight, grad) in enumerate(zip(weights, grads, strict=True)):
            is_once = times[id(weight)] == 1  # else steps of the weight follow one another
            is_native = are_native or (is_once and why_not_native([weight], [grad]) is None)
            if is_native and local(weight).numel() > 0:
                step = self.optimizer._state[weight]["step"].item()
                key = step, first_eps(group, weight), weight.dtype is torch.float64
                together.setdefault(key, []).append(place)
            else:
                alone.append(place)
        calls = []
        for (_, eps, _), places in together.items():
            some = [weights[place] for place in places]
            states = [self.optimizer._state[weight] for weight in some]
            rows, columns, *moments = operands_of(self.optimizer, group, some, states)
            counts = [state["step"] for state in states]
            call = Call(places, eps, some, rows, columns, moments[0] if moments else [], counts)
            call.read_counts()
            calls.append(call)
        return _Parts(calls, alone, are_native)

    def _account_for(self, weights: list[Tensor], counts: list[Tensor]) -> None:
        """Counts a step that has been taken. On a device it may still be at work."""
        count_steps(counts)
        increment_version(weights)
        increment_version(self.optimizer._accessed_states(weights))

    def _passes(self, item: Work) -> list[Pass]:
        """Passes of weights of which other processes have other parts."""
        group, weights, grads, *_ = item
        parts = self._parts_of(group, weights, grads)
        passes = [self._part(group, weights[place], grads[place]) for place in parts.alone]
        for call in parts.calls:
            values, found = self._values(group, call), [local(grads[i]) for i in call.places]
            put = functools.partial(self._put_part, group, call, values)
            numbers = self._numbers_at(group, parts, call)
            passes.append(native_parts(call, list(map(local, values)), found, numbers, put))
        return passes

    def _part(self, group: dict[str, Any], weight: Tensor, grad: Tensor) -> Pass:
        of = self.optimizer
        state = of._state[weight]
        moments = [state[name] for name in moment_names(group, weight.dim())]
        average = state["exp_avg"] if averages(group) else None
        numbers = numbers_at(group, state["step"].item() + 1, first_eps(group, weight))

        def put(wide: Tensor) -> None:
            self._account_for([weight], [state["step"]])
            write_back(of, group, weight, wide, state)

        value = functools.partial(widened, of, group, weight, state)
        return part_by_torch(weight, value, put, grad, moments, average, numbers)

    def _numbers_at(self, group: dict[str, Any], parts: _Parts, call: Call) -> dict[str, Any]:
        numbers = numbers_at(group, call.step, call.eps)
        numbers["grad_factor"] *= self.factors.on_host if parts.are_native else 1.0
        return numbers

    def _step(self, item: Work) -> None:
        group, weights, grads, *_ = item
        parts, progress = self._parts_of(group, weights, grads), self.optimizer._progress
        for place in parts.alone:
            weight, grad = weights[place], grads[place]
            step = functools.partial(imperative_step, self.optimizer, group, weight, grad)
            progress.take([weight], step)
        for call in parts.calls:
            found = [local(grads[i]) for i in call.places]
            numbers = self._numbers_at(group, parts, call)
            step = functools.partial(self._take_call, group, call, found, numbers)
            progress.take(call.weights, step)

    def _take_call(
        self, group: dict[str, Any], call: Call, grads: list[Tensor], numbers: dict[str, Any]
    ) -> None:
        values = self._values(group, call)
        take = functools.partial(call.take, list(map(local, values)), grads, numbers)
        self._put_call(group, call, values, take)

    def _put_part(
        self, group: dict[str, Any], call: Call, values: list[Tensor], take: Callable[[], None]
    ) -> None:
        self._put_call(group, call, values, take)
        self.optimizer._progress.stepped += call.weights

    def _put_call(
        self, group: dict[str, Any], call: Call, values: list[Tensor], take: Callable[[], None]
    ) -> None:
        """Takes the step of a call, and puts the new values of its weights where they are kept.

        Changes nothing if memory runs out.
        """
        if values is call.weights:  # all is one operation
            take()
            self._account_for(call.weights, call.counts)
            return
        states = [self.optimizer._state[weight].values() for weight in call.weights]
        with undone_on_error([*call.weights, *itertools.chain(*states)]):
            take()
            self._account_for(call.weights, call.counts)
            for weight, value in zip(call.weights, values, strict=True):
                write_back(self.optimizer, group, weight, value, self.optimizer._state[weight])

    def _values(self, group: dict[str, Any], call: Call) -> list[Tensor]:
        """The tensors that a call moves: the weights, or their values in float32."""
        if way_of(group, call.weights[0]) is None:
            return call.weights
        of = self.optimizer
        return [widened(of, group, weight, of._state[weight]) for weight in call.weights]
