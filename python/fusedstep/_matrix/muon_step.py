"""Muon's step of some weights: the one order of its stages.

The average of the gradients gives an update, Newton–Schulz iterations a direction; the weights
decay and move along it. Stages are native passes over batches (``native_batches.py``), or
operations of torch, on whole matrices (``local_stages.py``) or on shards, which are gathered for
the products (``gathered_stages.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from fusedstep._matrix.operands import Moving
from fusedstep._step.program import Pass
from fusedstep._step.undo import undone_on_error


class Stages:
    """The stages of a step, in their order.

    On a CPU nothing is written before ``move``, for products may lack memory; averages of shards
    and those on a GPU are written by ``average``.
    """

    def begin(self) -> list[Moving]:
        """Finds the operands, with their gradients."""
        raise NotImplementedError

    def average(self) -> None:
        """Writes the updates: averages of gradients, of all rows or of those that are chosen."""
        raise NotImplementedError

    def orthogonalize(self) -> Pass:
        """Makes directions of the updates, and finds the memory of the move."""
        raise NotImplementedError

    def move(self) -> None:
        """Decays weights, moves them and writes averages that are not written yet."""
        raise NotImplementedError

    def finish(self) -> None:
        """Puts values and states that are copies where weights and states keep them."""

    def kept_by_finish(self) -> Sequence[Tensor]:
        """What ``finish`` writes and is given back, should its memory run out."""
        return ()


#: Prepares what steps weights once more when they have moved, and returns what takes it. Nothing is
#: written before, and nothing can fail on a CPU from then on.
SecondStep = Callable[[list[Moving]], Callable[[], None]]


def step(stages: Stages, second: SecondStep) -> Pass:
    """Steps some weights; ``second``: a class's own step of them, after Muon's."""
    moving = stages.begin()
    stages.average()
    yield from stages.orthogonalize()
    take_second = second(moving)
    with undone_on_error(stages.kept_by_finish()):
        stages.move()
        take_second()
        stages.finish()
