"""The program of a step of low-rank gradients: project, moments, the way back.

Everything that may fail comes before the first change: new bases, low-rank gradients, and the
preparation of the native step, whose plan lies over scratch memory in place of weights. Where no
scratch memory is, as with ``fused=False``, a step takes the formula of a class weight by weight.
"""

from __future__ import annotations

import functools
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from fusedstep._matrix.low_rank_bases import (
    Bases,
    KnownBases,
    Projection,
    commit,
    moves_late,
)
from fusedstep._matrix.low_rank_shards import (
    is_anywhere,
    make_bases_of_shards,
    name_in,
    not_finite_error,
    sums_over,
)
from fusedstep._matrix.low_rank_states import has_rank
from fusedstep._matrix.products import as_matrix
from fusedstep._matrix.projection import sides_of
from fusedstep._matrix.scratch import Scratch, step_all
from fusedstep._sharding.dtensor import is_dtensor, local
from fusedstep._sharding.exchange import cut_of
from fusedstep._state.codes import absmax_of
from fusedstep._state.storage import way_of
from fusedstep._step.binding import spread_weights
from fusedstep._step.factors import Factors
from fusedstep._step.nonfinite import not_finite
from fusedstep._step.owner import Owner
from fusedstep._step.plan import Work
from fusedstep._step.program import Pass, Program, add_up, run
from fusedstep._step.sums import SpreadWeights
from fusedstep._step.undo import Reserve, Saved, is_out_of_memory, undone_on_error
from fusedstep._torch_ops.imperative import widened, write_back

#: Work with a native plan over its scratch memory.
_Pair = tuple[Work, Scratch]


class LowRankProgram(Program):
    """Steps groups with a rank through a projection."""

    optimizer: Owner

    def __init__(
        self,
        optimizer: Owner,
        work: list[Work],
        factors: Factors,
        others: Program,
        projection: Projection,
        known: KnownBases,
        scratches: dict[Tensor, Scratch],
    ) -> None:
        """``work``: that of groups with a rank. ``others``: the program of all other groups.

        ``scratches``: by the first weight of work.
        """
        super().__init__(optimizer, work, factors)
        self._others, self._projection, self._scratches = others, projection, scratches
        self.bases = Bases(projection, optimizer._state, known)
        self._found = [(item, self._scratch_of(item)) for item in work]
        self._native = [(item, scratch) for item, scratch in self._found if scratch]
        self._spread = self._spread_projected()

    def _scratch_of(self, item: Work) -> Scratch | None:
        return self._scratches.get(item.weights[0]) if has_rank(item.group) else None

    # Before the first change

    def prepare(self) -> None:
        """Makes new bases and low-rank gradients, beside what there is."""
        self._others.prepare()
        with torch._C._DisableAutocast():  # it would round the products of bases
            self._prepare()

    def _prepare(self) -> None:
        if self.work:
            self.bases.look()
        spread = self._spread
        if spread is not None:
            make_bases_of_shards(self._found, spread, self._projection, self.bases)
        factor = self.factors.on_host
        failed: list[RuntimeError] = []
        for item, scratch in self._found:
            if factor != 1 or scratch is None or not scratch.has_products:
                try:
                    self._project(item, scratch)
                except RuntimeError as error:
                    if spread is None:
                        raise
                    # Other processes are already in the collective that comes first.
                    failed.append(error)
        if spread is not None:
            run([self._sums()])
        for _, scratch in self._native:
            scratch.had_no_factor = factor == 1
            scratch.look()  # which a device does while the host goes on
        if spread is not None:
            self._check_low_rank(failed)
        for item, scratch in self._native:
            # The step updates zeros with a learning rate of 1. Moves multiply, and decay weights.
            options = self.optimizer._options(item.group | {"weight_decay": 0.0}, 1.0)
            scratch.prepare(self.optimizer._rule, options)
        self._projection.prepare_moves(self._native, self.bases.states, factor)

    def _sums(self) -> Pass:
        """Adds up low-rank gradients that are sums over the processes."""
        return add_up(
            [
                (cut, scratch.low(index))
                for item, scratch in self._native
                for index, weight in enumerate(item.weights)
                if (cut := sums_over(item.group, weight)) is not None
            ]
        )

    def _spread_projected(self) -> SpreadWeights | None:
        """The weights that are spread over processes, if some of them are projected."""
        cut = (
            cut_of(p) is not None
            for group in self.optimizer._groups
            if has_rank(group)
            for p in group["params"]
        )
        return spread_weights(self.optimizer) if any(cut) else None

    def _project(self, item: Work, scratch: Scratch | None) -> None:
        """Makes the bases of a group that are due, and its low-rank gradients."""
        due = self.bases.due(item.group, item.weights)
        for index, (weight, grad) in enumerate(item.pairs()):
            if due[index] or scratch is None or not scratch.bases(index):
                self._make_bases(item, weight, as_matrix(local(grad)), due[index], scratch is None)
                if scratch:
                    scratch.set_bases(index, self.bases.of(item.group, weight))
        if scratch:
            scratch.project(dict(enumerate(map(local, item.grads))), self.factors.on_host)

    def _make_bases(
        self, item: Work, weight: Tensor, matrix: Tensor, is_due: bool, is_read: bool
    ) -> None:
        """``is_read``: whether nothing else looks for NaN in the gradient."""
        if (is_due or is_read) and cut_of(weight) is None and not_finite(matrix):
            raise not_finite_error(item, weight)
        if weight not in self.bases.fresh:
            self.bases.make(item.group, weight, matrix, is_due)

    def check(self) -> None:
        if self._spread is None:  # else they have been looked at
            self._check_low_rank([])
        self._others.check()

    def _check_low_rank(self, failed: list[RuntimeError]) -> None:
        """Raises if a low-rank gradient is not finite, or if one could not be made."""
        spread = self._spread
        is_bad = bool(failed) or not all(scratch.is_finite() for _, scratch in self._native)
        weights = [weight for item, _ in self._native for weight in item.weights]
        if spread is not None:  # all processes stop together
            is_bad |= is_anywhere(is_bad, spread, weights)
        if not is_bad:
            return
        flags, of_shards = [], []  # of all, before an error: other processes wait for those
        for item, scratch in self._native:
            for index, (weight, grad) in enumerate(item.pairs()):
                own = [not_finite(local(grad)), not_finite(scratch.low(index))]
                flag = torch.tensor(own, dtype=torch.float64, device="cpu")
                flags.append((item, weight, flag))
                if (cut := cut_of(weight)) is not None:
                    of_shards.append((cut, flags[-1][-1]))
        run([add_up(of_shards)])
        wrong = list(failed)
        for item, weight, flag in flags:
            grad_is_bad, low_is_bad = flag.tolist()
            if low_is_bad and grad_is_bad:
                wrong.append(not_finite_error(item, weight))
            elif low_is_bad:
                text = f"the low-rank gradient of {name_in(item, weight)} overflows {weight.dtype}"
                wrong.append(RuntimeError(text))
        if spread is not None and is_anywhere(bool(wrong), spread, weights):
            wrong.append(
                RuntimeError(
                    "another process could not project its gradient of a weight that is no shard: "
                    "no weight or state has been changed"
                )
            )
        if wrong:
            raise wrong[0]

    def reserve(self) -> Reserve:
        # Moves of other work allocate nothing.
        late = [item for item, scratch in self._found if not scratch or moves_late(item)]
        return Program(self.optimizer, [*self._others.work, *late], self.factors).reserve()

    def multiplied(self, work: list[Work]) -> list[Work]:
        found = []
        for item in work:
            if not has_rank(item.group):
                found += self._others.multiplied([item])
            elif self._scratch_of(item):  # its low-rank gradients have been multiplied
                found.append(item)
            else:
                found += super().multiplied([item])
        return found

    # Moments, and the way back

    def run(self, work: list[Work]) -> list[Pass]:
        found = [(item, self._scratch_of(item)) for item in work]
        with torch._C._DisableAutocast():
            self._run_native([(item, scratch) for item, scratch in found if scratch])
            others = [item for item, scratch in found if not scratch]
            for item in others:
                if has_rank(item.group):
                    self.step(item.group, item.weights, item.grads)
            return self._others.run([item for item in others if not has_rank(item.group)])

    def _run_native(self, found: list[_Pair]) -> None:
        # Weights whose moves allocate nothing come first. For others the moments are kept.
        first = [pair for pair in found if not moves_late(pair[0])]
        last = [pair for pair in found if moves_late(pair[0])]
        saved = {
            weight: Saved(self._written_states(item.group, weight))
            for item, _ in last
            for weight in item.weights
            if weight.is_cpu
        }
        step_all([scratch for _, scratch in found])
        try:
            self._projection.before_moves(found, self.factors.on_host)
            for item, scratch in first + last:
                if saved or self.bases.fresh:
                    self._move_one_by_one(item, scratch, saved)
                else:
                    self._move_all(item, scratch)
                increment_version([p for p in item.weights if is_dtensor(p)])  # by their shards
                increment_version(self.optimizer._accessed_states(item.weights))
        except (MemoryError, RuntimeError) as error:
            for each in saved.values() if is_out_of_memory(error) else ():
                each.put_back()
            raise

    def _written_states(self, group: dict[str, Any], weight: Tensor) -> list[Tensor]:
        """The states of a weight, but for bases that a step leaves alone and what is beside it."""
        bases = () if weight in self.bases.fresh else sides_of(group, weight.shape)
        slots = self.optimizer._store.slots_of(group, weight)
        names = {"step", *(slot.name for slot in slots if slot.record)}.difference(bases)
        names |= set(map(absmax_of, names))
        return [value for name, value in self.bases.states[weight].items() if name in names]

    def _move_all(self, item: Work, scratch: Scratch) -> None:
        if not moves_late(item) and self._projection.move_all(item, scratch):
            self.optimizer._progress.stepped += item.weights
            return
        for index, weight in enumerate(item.weights):
            self._move(item, scratch, index)
            self.optimizer._progress.stepped.append(weight)

    def _move_one_by_one(self, item: Work, scratch: Scratch, saved: dict[Tensor, Saved]) -> None:
        """Moves the weights of a group, and writes their new bases.

        ``saved``: moments of weights that have not been moved. Those that have been are taken off.
        """
        for index, weight in enumerate(item.weights):
            state = self.bases.states[weight]
            written = [weight, *state.values()] if weight in saved else []
            move = functools.partial(self._move_or_undo, item, scratch, index, written)
            self.optimizer._progress.take([weight], move)
            if weight in self.bases.fresh:
                for name in self.bases.fresh[weight].keys() & state.keys():
                    del self.bases.fresh[weight][name]  # the state has it
                scratch.keep_bases(index, self.bases.of(item.group, weight))
            saved.pop(weight, None)

    def _move_or_undo(
        self, item: Work, scratch: Scratch, index: int, written: list[Tensor]
    ) -> None:
        """Moves a weight, or changes nothing of what may be written if memory runs out."""
        weight = item.weights[index]
        with undone_on_error(written):
            commit(self.bases.fresh.get(weight, {}), self.bases.states[weight])
            self._move(item, scratch, index)

    def _move(self, item: Work, scratch: Scratch, index: int) -> None:
        group, weight, bases = item.group, item.weights[index], None
        wide, state = weight, self.bases.states[weight]
        if way_of(group, weight) is not None:
            wide = widened(self.optimizer, group, weight, state)
            bases = functools.partial(self.bases.of, group, weight)
        target = local(wide)
        matrix = as_matrix(target)
        self._projection.move(item, scratch, index, matrix, bases)
        if matrix is not target and matrix.data_ptr() != target.data_ptr():  # no matrix's strides
            target.copy_(matrix.view(target.shape))
        if wide is not weight:
            write_back(self.optimizer, group, weight, wide, state)

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self.bases.end(is_taken=error is None)
        for scratch in self._scratches.values():
            scratch.forget_step()
        self._others.__exit__(kind, error, trace)


def project_early(item: Work, scratch: Scratch, bases: Bases) -> None:
    """Takes products of a step that makes no bases, for a device to be busy with meanwhile."""
    indices = range(len(item.weights))
    if not all(map(scratch.bases, indices)) or any(bases.due(item.group, item.weights)):
        return
    # An error is raised by the step, where all processes arrive.
    with torch._C._DisableAutocast(), suppress(RuntimeError):
        scratch.project(dict(zip(indices, map(local, item.grads), strict=True)), 1.0)
        scratch.has_products = True
