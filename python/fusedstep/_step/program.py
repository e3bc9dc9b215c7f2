"""A step as a program of passes, and the scheduler of what these exchange with other processes.

A pass is a generator: it computes, yields an exchange, and goes on with the result. An exchange is
``Sums`` of numbers of weights, ``Terms`` of tensors, or a transfer that is under way.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from fusedstep._sharding.dtensor import is_dtensor
from fusedstep._sharding.exchange import Cut, transfer_device
from fusedstep._step.factors import Factors, is_one
from fusedstep._step.gradients import multiplied
from fusedstep._step.plan import Work
from fusedstep._step.sums import Part
from fusedstep._step.undo import NO_RESERVE, Reserve

#: Copies of a weight and temporaries of its size that a step in torch operations has at once, with
#: what puts back weight and states: test_out_of_memory.py has no more for all optimizers.
MOST_COPIES = 12


class Exchange(Protocol):
    """What a pass yields."""

    def wait(self) -> Any:
        """Waits for the result, and returns what the pass goes on with."""


Pass = Generator[Exchange, Any, None]


class StepsWork(Protocol):
    """An optimizer, as a program knows it."""

    def _imperative_steps(
        self, group: dict[str, Any], weights: list[Tensor], grads: list[Tensor]
    ) -> None: ...


class Program:
    """The part of a step that native plans do not take: operations of torch, and passes.

    A step calls the methods in this order, in the context of the program. Nothing is changed before
    ``run``.
    """

    def __init__(self, optimizer: StepsWork, work: list[Work], factors: Factors) -> None:
        """``work``: that without a plan."""
        self.optimizer, self.work, self.factors = optimizer, work, factors

    def prepare(self) -> None:
        """Makes what the step needs in memory of its own; all options have been checked."""

    def reserve(self) -> Reserve:
        """Returns memory that is kept for parts of the step."""
        options = ("differentiable", "capturable")
        if (
            not self.work
            or torch._C._len_torch_dispatch_stack()
            or any(item.group.get(name) for item in self.work for name in options)
            or any(not p.is_cpu or is_dtensor(p) for item in self.work for p in item.weights)
        ):
            return NO_RESERVE
        return Reserve(max(map(self.part_size, self.work)))

    def part_size(self, item: Work) -> int:
        """The most bytes that a part of the step of a group may allocate."""
        return MOST_COPIES * max(map(size_of, item.weights, item.grads))

    def check(self) -> None:
        """Raises an error of what the step needs, when native steps have been prepared."""

    def multiplied(self, work: list[Work]) -> list[Work]:
        """Work with gradients times the factor of the step, in memory of their own."""
        there = self.factors.on_device
        factor = self.factors.on_host if there is None else there
        if not work or is_one(factor):
            return work
        return [item._replace(grads=multiplied(item.grads, factor)) for item in work]

    def run(self, work: list[Work]) -> list[Pass]:
        """Steps work that has been multiplied: all, or groups of it in turn.

        Returns passes of weights that are spread over processes. They go together with the phases
        of native steps.
        """
        for group, weights, grads, *_ in work:
            self.step(group, weights, grads)
        return []

    def step(self, group: dict[str, Any], weights: list[Tensor], grads: list[Tensor]) -> None:
        """Steps weights of a group; ``maximize`` has not negated the gradients."""
        self.optimizer._imperative_steps(group, weights, grads)

    def __enter__(self) -> Program:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        """Lets go of what the step has held; ``error``: None if it has been taken."""


def size_of(weight: Tensor, grad: Tensor) -> int:
    """The bytes of a weight, or of the entries of its gradient, in the type of the maths."""
    entries = grad._values() if grad.is_sparse else grad
    return max(weight.numel(), entries.numel()) * max(weight.itemsize, 4)


class Sums:
    """Numbers of weights, to be added up over the processes that have parts of the weights."""

    def __init__(self, parts: list[Part]) -> None:
        self.parts = parts
        self.result: list[Tensor] = []
        """A tensor of sums for each part."""

    def wait(self) -> list[Tensor]:
        return self.result


class Terms(NamedTuple):
    """Tensors of which the processes that share a cut weight have terms: they get the sums."""

    parts: list[tuple[Cut, Tensor]]

    def wait(self) -> None:
        """The sums are where the terms have been."""


#: Adds up numbers of weights over the processes: what ``SpreadWeights.sums`` does.
AddUp = Callable[[list[Part]], list[Tensor]]


def run(passes: Iterable[Pass], sums: Sequence[AddUp] = ()) -> None:
    """Runs passes: each to its next exchange, then all further.

    Sums of all passes go together, and so do terms. A pass that begins with a transfer has the next
    pass begin when it goes on, so that transfers are under way beside the computation of another
    pass.

    Args:
        passes: in an order that all processes have. Each yields the same in all processes
        sums: those that each pass yields, in their order. A process without a pass takes part.
    """
    later, left = deque(passes), deque(sums)
    under_way: list[tuple[Pass, Exchange]] = []
    while later or under_way or left:
        yielded: list[tuple[Pass, Exchange]] = []
        while later and (not yielded or isinstance(yielded[-1][1], (Sums, Terms))):
            _advance(later.popleft(), None, yielded)
        for each, exchange in under_way:
            _advance(each, exchange.wait(), yielded)
        under_way = yielded
        _add_up([part for _, each in yielded if isinstance(each, Terms) for part in each.parts])
        if left:
            together = [exchange for _, exchange in yielded if isinstance(exchange, Sums)]
            found = iter(left.popleft()([part for own in together for part in own.parts]))
            for own in together:
                own.result = [next(found) for _ in own.parts]


def _advance(each: Pass, result: Any, yielded: list[tuple[Pass, Exchange]]) -> None:
    try:
        yielded.append((each, each.send(result)))
    except StopIteration:
        return


def _add_up(parts: list[tuple[Cut, Tensor]]) -> None:
    """Adds up terms: by one collective for all that go over the same processes.

    Sums of 16-bit terms are float32.
    """
    alike: dict[Any, list[Tensor]] = {}
    for cut, term in parts:
        wide = torch.float32 if term.itemsize == 2 else term.dtype
        key = cut.mesh, cut.axis, transfer_device(cut, term.device), wide
        alike.setdefault(key, []).append(term)
    for (mesh, axis, there, wide), terms in alike.items():
        flat = torch.cat([term.reshape(-1).to(there, wide) for term in terms])
        torch.distributed.all_reduce(flat, group=mesh.get_group(axis))
        for term, sums in zip(terms, flat.split([t.numel() for t in terms]), strict=True):
            term.copy_(sums.view(term.shape))


def add_up(parts: list[tuple[Cut, Tensor]]) -> Pass:
    """A pass of terms alone."""
    yield Terms(parts)
