"""A second step of weights that have just moved: a native rule over their values.

It is prepared before the first step writes anything, and taken after it. The plan is kept for as
long as weights and states are the same tensors.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from fusedstep._matrix.newton_schulz import Scratch
from fusedstep._native import ops
from fusedstep._step.plan import GradUse, Plan, PlansAside, same


class Operands(NamedTuple):
    """The operands of the second step of some values."""

    values: list[Tensor]
    grads: list[Tensor]
    states: list[Tensor]
    """The states of the values; empty where the rule has none."""
    written: list[Tensor]
    """States that the first step writes."""
    are_kept: bool
    """True if values and states are the same tensors at the next step."""


class SecondSteps:
    """The plans of second steps, and memory for what a failing one puts back."""

    def __init__(self, rule: str, state: str) -> None:
        """``state``: the name of the rule's state, if it has one."""
        self.plans: PlansAside[_Plan] = PlansAside()
        self._rule, self._state = rule, state

    def prepare(
        self, of: Operands, numbers: tuple[Any, ...], scratch: Scratch
    ) -> Callable[[], None]:
        """Does what may fail, and returns what takes the step.

        ``numbers``: the rule's hyper-parameters and, last, whether to maximize.
        """
        plan, grads = self.plans.take(of.values), of.grads
        if not (plan and same(plan.states, of.states) and plan.bind(of.values, grads, False)):
            plan = _Plan(of.values, of.states, (self._state,) if of.states else ())
            if not plan.bind(of.values, grads, False):  # one is a negated view or a zero tensor
                grads = [grad.clone() for grad in grads]
                plan.bind(of.values, grads, False)
        ops.prepare_step(self._rule, plan.handle, numbers, 1.0, GradUse.LEAVE)
        before = list(_copied([*of.values, *of.written], scratch)) if of.values[0].is_cpu else []
        return functools.partial(self._take, plan, of, grads, before)

    def _take(
        self, plan: _Plan, of: Operands, grads: list[Tensor], before: list[tuple[Tensor, Tensor]]
    ) -> None:
        """Takes a step that has been prepared.

        ``grads``: those of the plan, which has their addresses alone. ``before``: tensors and their
        values before the first step. The call itself may find no memory, before it writes anything.
        """
        try:
            ops.take_steps([plan.handle])
        except (MemoryError, RuntimeError):
            for tensor, values in before:
                tensor.copy_(values)
            raise
        increment_version(of.states)
        if of.are_kept:
            self.plans.put(plan)


class _Plan(Plan):
    """A plan with its states. Its step counts are its own: the weights count their first steps."""

    __slots__ = ("states",)

    def __init__(self, values: list[Tensor], states: list[Tensor], names: tuple[str, ...]) -> None:
        counts = [{"step": torch.zeros((), dtype=torch.float32, device="cpu")} for _ in values]
        super().__init__(values, states, counts, names, ("step",), False, False)
        self.states = states


def _copied(tensors: list[Tensor], scratch: Scratch) -> Iterator[tuple[Tensor, Tensor]]:
    """Tensors of one dtype with copies in memory that is kept."""
    sizes = [tensor.numel() for tensor in tensors]
    memory = scratch.take("before", (sum(sizes),), tensors[0].dtype, tensors[0].device)
    for tensor, copy in zip(tensors, memory.split(sizes), strict=True):
        yield tensor, copy.view(tensor.shape).copy_(tensor)
