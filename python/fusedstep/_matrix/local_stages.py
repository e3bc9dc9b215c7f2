"""The stages of weights, of whose matrices this process has all, in operations of torch."""

from __future__ import annotations

from torch import Tensor

from fusedstep._matrix.moves import Move
from fusedstep._matrix.muon_step import Stages
from fusedstep._matrix.newton_schulz import Scratch
from fusedstep._matrix.operands import Moving, operands_of, with_grads, write_operands
from fusedstep._matrix.passes import are_taken
from fusedstep._matrix.rows import AllRows, ChosenRows
from fusedstep._matrix.step_options import StepOptions
from fusedstep._matrix.together import Together, keep_moments, moments_of
from fusedstep._state.storage import way_of
from fusedstep._step.owner import Owner
from fusedstep._step.program import Pass


class LocalStages(Stages):
    """The stages of a batch. On a GPU the first and the last are native passes if these take it."""

    def __init__(
        self,
        optimizer: Owner,
        options: StepOptions,
        scratch: Scratch,
        batch: Together,
        grads: list[Tensor],
    ) -> None:
        """``grads``: of the weights of the batch."""
        self._optimizer, self._options, self._scratch = optimizer, options, scratch
        self._batch, self._grads = batch, grads

    def begin(self) -> list[Moving]:
        batch, options = self._batch, self._options
        grads = options.ascending(self._grads)
        if batch.moving:
            self._moving = with_grads(batch.moving, grads)
        else:
            self._moving = operands_of(self._optimizer, options.group, batch.weights, grads)
        return self._moving

    def average(self) -> None:
        batch, options, scratch = self._batch, self._options, self._scratch
        parts = self._parts = batch.parts_of(self._moving)
        self._is_native = not batch.is_padded and are_taken(*parts)
        rows = ChosenRows if options.has_choice else AllRows
        self._rows = rows(options, scratch, batch, self._is_native)
        self._rows.average(self._moving, parts)

    def orthogonalize(self) -> Pass:
        batch, options, scratch = self._batch, self._options, self._scratch
        self._moments = moments_of(options.group, batch.shares, self._moving)
        self._directions = batch.parts_in(self._rows.directions(self._moments))
        self._move = Move(options, scratch, self._parts.values, self._is_native)
        yield from ()

    def move(self) -> None:
        batch, options = self._batch, self._options
        self._rows.write()
        keep_moments(batch.shares, self._moving, self._moments)
        self._move.take(self._directions, options.factors(batch.shapes))

    def finish(self) -> None:
        if not self._batch.moving:  # as it is, weights and states are the operands
            write_operands(self._optimizer, self._options.group, self._moving)

    def kept_by_finish(self) -> list[Tensor]:
        if self._batch.moving:
            return []  # ``move`` allocates nothing
        group, kind_of = self._options.group, self._optimizer._store.kind_of
        pairs = [(each.weight, each.kept) for each in self._moving]
        copied = [pair for pair in pairs if way_of(group, pair[0]) or kind_of(group, pair[0])]
        return [each for p, kept in copied for each in (p, *kept.values())]
