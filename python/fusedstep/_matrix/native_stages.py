"""The stages of batches that the native engine steps together."""

from __future__ import annotations

import itertools
from typing import Protocol

from torch import Tensor

from fusedstep._matrix.newton_schulz import Scratch
from fusedstep._matrix.operands import Moving, StepsMatrices, with_grads
from fusedstep._matrix.passes import in_order
from fusedstep._matrix.step_options import StepOptions
from fusedstep._matrix.together import Together, parts_of_batches
from fusedstep._step.program import Pass


class NativeBatches(Protocol):
    """Batches with their operands and memory: of all rows, or of those that are chosen."""

    subtracts: bool
    """Whether passes subtract gradients where a step maximizes; others take them negated."""

    def fits(self, options: StepOptions, grads: list[Tensor]) -> bool:
        """Returns whether passes take gradients, and the engine the matrices."""

    def take(self, options: StepOptions, scratch: Scratch) -> None:
        """Takes all memory of a step."""

    def average(self, options: StepOptions, grads: list[Tensor]) -> None: ...

    def orthogonalize(self, options: StepOptions) -> list[Tensor]:
        """Returns the direction of each part."""

    def move(
        self,
        options: StepOptions,
        grads: list[Tensor],
        directions: list[Tensor],
        factors: list[float],
    ) -> None: ...


class NativeStages:
    """The stages of batches in native passes."""

    def __init__(
        self,
        optimizer: StepsMatrices,
        options: StepOptions,
        batches: list[Together],
        native: NativeBatches,
        grads: list[Tensor],
    ) -> None:
        """``grads``: of the weights of the batches."""
        self._optimizer, self._options, self._grads = optimizer, options, grads
        self._batches, self._native = batches, native

    def begin(self) -> list[Moving]:
        options, batches, grads = self._options, self._batches, in_order(self._grads)
        if not self._native.subtracts:
            grads = options.ascending(grads)
        known = [each for batch in batches for each in batch.moving]
        self._parts = parts_of_batches(batches, grads)
        self._native.take(options, self._optimizer._scratch)
        return with_grads(known, grads)

    def average(self) -> None:
        self._native.average(self._options, self._parts)

    def orthogonalize(self) -> Pass:
        self._directions = self._native.orthogonalize(self._options)
        shapes = itertools.chain.from_iterable(batch.shapes for batch in self._batches)
        self._factors = self._options.factors(self._optimizer._ratio, shapes)
        yield from ()

    def move(self) -> None:
        self._native.move(self._options, self._parts, self._directions, self._factors)

    def finish(self) -> None:
        """Passes have written weights and states themselves."""
