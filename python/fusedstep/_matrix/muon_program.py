"""The program of a step of matrices: which stages step which weights."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from fusedstep._matrix.arrangement import arrange, last_arrangement, takes_native
from fusedstep._matrix.gathered_stages import stages_of_shards
from fusedstep._matrix.local_stages import LocalStages
from fusedstep._matrix.muon_groups import uses_muon
from fusedstep._matrix.muon_step import Stages, step
from fusedstep._matrix.native_stages import NativeStages
from fusedstep._matrix.operands import StepsMatrices
from fusedstep._matrix.step_options import StepOptions
from fusedstep._matrix.together import Together
from fusedstep._sharding.dtensor import local
from fusedstep._state.storage import way_of
from fusedstep._step.plan import Work
from fusedstep._step.program import Pass, Program, run
from fusedstep._step.sums import of_each
from fusedstep._step.undo import undone_on_error


class MuonProgram(Program):
    """Steps the matrices of groups batch by batch, and all other weights one by one."""

    optimizer: StepsMatrices

    def run(self, work: list[Work]) -> list[Pass]:
        # Before anything is changed: transfers that some processes take no part in would not end.
        weights = [p for item in work if uses_muon(item.group) for p in item.weights]
        self.optimizer._spread_weights().sums_of_rows(of_each(0), weights, [[] for _ in weights])
        for group, some, grads, *_ in work:
            if not self._step(group, some, grads):
                self.optimizer._imperative_steps(group, some, grads)
        return []

    def _step(self, own: dict[str, Any], weights: list[Tensor], grads: list[Tensor]) -> bool:
        """Steps the weights of a group, or returns False if batches do not take them."""
        optimizer = self.optimizer
        if not optimizer._is_composite(own):
            return False
        grads = list(map(local, grads))
        if not optimizer._takes_batches(own, weights, grads):
            return False
        group = optimizer._as_muon(own)
        arranged = last_arrangement(optimizer, group, weights)
        if arranged is None:
            if len(set(weights)) < len(weights):  # one of them moves twice
                return False
            arranged = arrange(optimizer, group, weights)
        for batches, native in arranged.native:
            first, some = batches[0].weights[0], [grads[i] for b in batches for i in b.places]
            options = StepOptions(group, first.device)
            if takes_native(group, first) and native.fits(options, some):
                stages = functools.partial(NativeStages, optimizer, options, batches, native, some)
                self._take([p for batch in batches for p in batch.weights], group, stages)
            else:
                self._take_batches(group, batches, grads)
        self._take_batches(group, arranged.batches, grads)
        for (cut, *_), places in arranged.cut_alike.items():
            operands = ([each[i] for i in places] for each in (weights, grads))
            run(map(self._pass_of(group), stages_of_shards(optimizer, group, cut, *operands)))
        return True

    def _take_batches(
        self, group: dict[str, Any], batches: list[Together], grads: list[Tensor]
    ) -> None:
        """Steps one batch after another; ``grads``: of all weights of the step."""
        for batch in batches:
            options = StepOptions(group, batch.weights[0].device)
            some = [grads[i] for i in batch.places]
            stages = functools.partial(LocalStages, self.optimizer, options, batch, some)
            self._take(batch.weights, group, stages, self._written_late(group, batch))

    def _take(
        self,
        weights: list[Tensor],
        group: dict[str, Any],
        stages: Callable[[], Stages],
        written: Sequence[Tensor] = (),
    ) -> None:
        """Steps some weights, or changes nothing if memory runs out.

        ``written``: what ``finish`` writes, and may fail to.
        """

        def part() -> None:
            with undone_on_error(written):
                run([self._pass_of(group)(stages())])

        self.optimizer._progress.take(weights, part)

    def _pass_of(self, group: dict[str, Any]) -> Callable[[Stages], Pass]:
        second = functools.partial(self.optimizer._second_step, group)
        return functools.partial(step, second=second)

    def _written_late(self, group: dict[str, Any], batch: Together) -> list[Tensor]:
        """Weights and states that are not the operands of a step: they are written after it."""
        if batch.moving:
            return []
        store = self.optimizer._store
        late = [p for p in batch.weights if way_of(group, p) or store.kind_of(group, p)]
        kept = [store.with_count(group, p).values() for p in late]
        return [*late, *itertools.chain.from_iterable(kept)]
