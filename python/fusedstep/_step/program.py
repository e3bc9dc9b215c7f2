"""A step as a program of passes, and the scheduler of what these exchange with other processes.

A pass is a generator: it computes, yields an exchange, and goes on with the result. An exchange is
``Sums`` of numbers, or a transfer that is under way. All processes run alike programs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import suppress
from typing import Any, Protocol

from torch import Tensor

from fusedstep._step.sums import Part


class Exchange(Protocol):
    """What a pass yields."""

    def wait(self) -> Any:
        """Waits for the result, and returns what the pass goes on with."""


Pass = Generator[Exchange, Any, None]


class Sums:
    """Numbers of weights, to be added up over the processes that have parts of the weights."""

    def __init__(self, parts: list[Part]) -> None:
        self.parts = parts
        self.result: list[Tensor] = []
        """A tensor of sums for each part."""

    def wait(self) -> list[Tensor]:
        return self.result


#: Adds up numbers of weights over the processes: what ``SpreadWeights.sums`` does.
AddUp = Callable[[list[Part]], list[Tensor]]


def run(passes: Iterable[Pass], sums: Sequence[AddUp] = ()) -> None:
    """Runs passes: each to its next exchange, then all further.

    A pass that begins with a transfer has the next pass begin when it goes on, so that transfers
    are under way beside the computation of another pass.

    Args:
        passes: in an order that all processes have
        sums: those that each pass yields, in their order. Sums of all passes go together; a process
            without a pass takes part.
    """
    later, left = deque(passes), deque(sums)
    under_way: list[tuple[Pass, Exchange]] = []
    while later or under_way or left:
        yielded: list[tuple[Pass, Exchange]] = []
        while later and (not yielded or isinstance(yielded[-1][1], Sums)):
            _advance(later.popleft(), None, yielded)
        for each, exchange in under_way:
            _advance(each, exchange.wait(), yielded)
        under_way = yielded
        if left:
            together = [exchange for _, exchange in yielded if isinstance(exchange, Sums)]
            found = iter(left.popleft()([part for own in together for part in own.parts]))
            for own in together:
                own.result = [next(found) for _ in own.parts]


def _advance(each: Pass, result: Any, yielded: list[tuple[Pass, Exchange]]) -> None:
    with suppress(StopIteration):
        yielded.append((each, each.send(result)))
