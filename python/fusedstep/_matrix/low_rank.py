"""AdamW on low-rank gradients: the part that GaLore and APOLLO share.

Groups with a ``rank`` are projected; all others are AdamW in the same step, by a native plan. The
formula of both is that of ``_matrix/transformers_adamw.py``. The native step of low-rank gradients
has a plan over scratch memory in place of weights.
"""

from __future__ import annotations

import functools
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from fusedstep._matrix.low_rank_groups import LowRankGroups
from fusedstep._matrix.low_rank_shards import is_anywhere
from fusedstep._matrix.products import as_matrix
from fusedstep._matrix.projection import basis_shapes, low_shape, matrix_shape
from fusedstep._matrix.scratch import Scratch, step_all
from fusedstep._matrix.sharded_projections import basis_part
from fusedstep._sharding.dtensor import is_dtensor, local
from fusedstep._sharding.exchange import cut_of
from fusedstep._state.checks import with_name
from fusedstep._state.storage import way_of
from fusedstep._step.factors import Factors
from fusedstep._step.nonfinite import not_finite
from fusedstep._step.plan import Plan, Work, same
from fusedstep._step.program import Pass, add_up, run
from fusedstep._step.sums import SpreadWeights
from fusedstep._step.undo import Reserve, Saved, is_out_of_memory, undone_on_error


class LowRankSteps(LowRankGroups):
    """Steps groups with a rank through a projection, and all others by the native plan."""

    def _prepare_moves(self, projected: list[tuple[Work, Scratch]], factor: float) -> None:
        """Makes what moves of weights need. ``factor``: of the low-rank gradients."""

    def _before_moves(self, projected: list[tuple[Work, Scratch]]) -> None:
        """Does what moves of weights need of other processes, when the moments are stepped."""

    def _move(
        self,
        item: Work,
        scratch: Scratch,
        index: int,
        target: Tensor,
        state: dict[str, Tensor],
    ) -> None:
        """Moves a weight, as a matrix, by the update in the scratch memory.

        ``target``: the weight, or the float32 value of one of 16 bits.
        """
        raise NotImplementedError

    def _move_all(self, item: Work, scratch: Scratch) -> None:
        """Moves the weights of a group."""
        for index, weight in enumerate(item.weights):
            self._move_weight(item, scratch, index, self._state[weight])
            self._progress.stepped.append(weight)

    # The step: all that may fail comes before the first change

    def _forget_plans(self) -> None:
        super()._forget_plans()
        self._scratch: dict[Tensor, Scratch] = {}  # by the first weight of a launch
        self._fresh: dict[Tensor, dict[str, Tensor]] = {}  # bases made for the step under way
        self._early: set[Scratch] = set()  # which have products of the step under way
        self._had_no_factor = False  # the last step
        self._looks: list[tuple[Work, Scratch]] = []  # that have not been waited for

    def _new_plan(
        self, group: dict[str, Any], weights: list[Tensor], grads: list[Tensor]
    ) -> Plan | None:
        if self._is_projected(group):  # before bases of other sides are made beside those states
            self._check_states(group, weights)
        return super()._new_plan(group, weights, grads)

    def _bind(
        self,
        place: tuple[int, ...],
        group: dict[str, Any],
        weights: list[Tensor],
        grads: list[Tensor],
    ) -> Work:
        if not self._is_projected(group):
            return super()._bind(place, group, weights, grads)
        scratch = self._scratch.get(weights[0])
        if (
            scratch is not None
            and self._plans.get(place) is scratch.plan
            and self._wants_native(group)
            and same(weights, scratch.weights)
        ):
            is_known = self._is_known(group, weights, grads)
            if is_known or scratch.kind == self._kind(group, weights):
                try:
                    if not is_known:
                        self._has_sparse(group, grads)  # raises them
                    self._check_composite(group, weights, grads, is_known)
                except RuntimeError as error:
                    raise with_name(error, place[0], group, weights) from None
                work = Work(group, weights, grads, None, place[0])
                if is_known and self._had_no_factor:
                    self._project_early(work, scratch)
                return work
        work = super()._bind(place, group, weights, grads)
        if self._takes_scratch(group, weights, grads):
            scratch = self._new_scratch(group, weights)
            self._plans[place], self._seen = scratch.plan, None
            # A weight has one scratch memory, which has its last bases.
            mine = set(map(id, weights))
            others = self._scratch.items()
            kept = {p: each for p, each in others if mine.isdisjoint(map(id, each.weights))}
            self._scratch = kept | {weights[0]: scratch}
        return work

    def _kind(self, group: dict[str, Any], weights: list[Tensor]) -> tuple[Any, ...]:
        """All that scratch memory is made for."""
        names = ("rank", "proj_type", "proj", "svd", "stagger", "scale_type", "state_dtype")
        options = [group.get(name) for name in names]
        shapes = [(p.shape, p.dtype, p.device) for p in weights]
        return *options, way_of(group, weights[0]), *shapes

    def _new_scratch(self, group: dict[str, Any], weights: list[Tensor]) -> Scratch:
        states = [self._store.with_count(group, p) for p in weights]
        # The shapes are of this process's part: the sides are those of the whole weight.
        sides = [(self._sides(group, p), *matrix_shape(local(p))) for p in weights]
        shapes = [low_shape(group["rank"], *each) for each in sides]
        bases = [basis_shapes(group["rank"], *each) for each in sides]
        return Scratch(weights, states, shapes, bases, self._kind(group, weights))

    def _update_all(
        self,
        max_norm: float | None,
        zero_grad: bool | Literal["none"],
        error_if_nonfinite: bool = False,
    ) -> Tensor | None:
        with torch._C._DisableAutocast():  # it would round the products of bases
            return super()._update_all(max_norm, zero_grad, error_if_nonfinite)

    def _begin_step(self) -> None:
        super()._begin_step()
        self._early = set()  # the last step may have stopped before it took them

    def _update_groups(
        self, work: list[Work], factors: Factors, zero_grad: bool | Literal["none"]
    ) -> list[tuple[Tensor, Tensor]]:
        try:
            untreated = super()._update_groups(work, factors, zero_grad)
            self._follow_waiting()
            return untreated
        except BaseException:
            self._waiting = None  # some new bases may have been written
            raise
        finally:
            self._looks = []
            self._fresh, self._is_zero = {}, {}
            for scratch in self._scratch.values():
                scratch.forget_step()

    def _make_ready(self, work: list[Work], factors: Factors) -> None:
        """Makes new bases and low-rank gradients of groups with a rank, beside what there is."""
        work = [item for item in work if self._is_projected(item.group)]
        if work:
            self._find_waiting()
        spread = self._spread_projected()
        if spread is not None:
            self._check_shards(work, spread)
            self._make_bases_of_shards(work)
        factor = factors.on_host
        failed: list[RuntimeError] = []
        for item in work:
            if factor != 1 or self._scratch_of(item) not in self._early:
                self._project(item, factor, failed)
        if failed and spread is None:
            raise failed[0]
        self._had_no_factor = factor == 1
        found = [(item, scratch) for item in work if (scratch := self._scratch_of(item))]
        if spread is not None:
            terms = [
                (cut, scratch.low(index))
                for item, scratch in found
                for index, weight in enumerate(item.weights)
                if (cut := self._summed_over(item.group, weight)) is not None
            ]
            run([add_up(terms)])
        for _, scratch in found:
            scratch.look()
        if spread is None:
            self._looks = found  # a device goes on meanwhile
        else:
            self._check_low_rank(found, spread, failed)
        for item, scratch in found:
            # The step updates zeros with a learning rate of 1. Moves multiply, and decay weights.
            options = self._options(item.group | {"weight_decay": 0.0}, 1.0)
            scratch.prepare(self._rule, options)
        self._prepare_moves(found, factor)

    def _project_early(self, item: Work, scratch: Scratch) -> None:
        """Takes products of a step that makes no bases, for a device to be busy with meanwhile."""
        if self._waiting is None:
            return
        if any(self._is_due(item.group, p, self._count(p)) for p in item.weights):
            return
        if all(map(scratch.bases, range(len(item.weights)))):
            failed: list[RuntimeError] = []
            self._project(item, 1.0, failed)
            if not failed:  # a failure is raised later, where all processes arrive
                self._early.add(scratch)

    def _check_ready(self) -> None:
        self._check_low_rank(self._looks, None, [])

    def _project(self, item: Work, factor: float, failed: list[RuntimeError]) -> None:
        """Makes the low-rank gradients of a group, but for weights where that has ``failed``."""
        scratch = self._scratch_of(item)
        together: dict[int, Tensor] = {}
        for index, (weight, grad) in enumerate(item.pairs()):
            try:
                bases = self._bases_of_step(item.group, weight, grad, scratch, index)
                if scratch:
                    scratch.set_bases(index, bases)
                    matrix = as_matrix(local(grad))
                    if matrix.data_ptr() == local(grad).data_ptr():
                        together[index] = matrix
                    else:  # a copy, of which there is one at a time
                        scratch.project({index: matrix}, factor)
            except RuntimeError as error:
                # Raised later: other processes are already in the collective that comes first.
                failed.append(error)
        if scratch and together:
            try:
                scratch.project(together, factor)
            except RuntimeError as error:
                failed.append(error)

    def _bases_of_step(
        self,
        group: dict[str, Any],
        weight: Tensor,
        grad: Tensor,
        scratch: Scratch | None,
        index: int,
    ) -> dict[str, Tensor]:
        """The bases that a weight's gradient is projected on, made now if they are due."""
        count = self._count(weight)
        matrix, due = as_matrix(local(grad)), self._is_due(group, weight, count)
        bases = scratch.bases(index) if scratch else {}
        if bases and not due:
            return bases
        if (due or scratch is None) and cut_of(weight) is None:
            self._check_finite(group, weight, matrix)
        if weight not in self._fresh:
            self._fresh[weight] = self._made_bases(group, weight, matrix, count, due)
        return self._bases_of(group, weight)

    def _check_low_rank(
        self,
        found: list[tuple[Work, Scratch]],
        spread: SpreadWeights | None,
        failed: list[RuntimeError],
    ) -> None:
        """Raises if a low-rank gradient is not finite, or if one could not be made."""
        is_bad = bool(failed) or not all(scratch.is_finite() for _, scratch in found)
        weights = [weight for item, _ in found for weight in item.weights]
        if spread is not None:  # all processes stop together
            is_bad |= is_anywhere(is_bad, spread, weights)
        if not is_bad:
            return
        flags, of_shards = [], []  # of all, before an error: other processes wait for those
        for item, scratch in found:
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
                wrong.append(self._not_finite_error(item.group, weight))
            elif low_is_bad:
                name = self._name_of(item.group, weight)
                text = f"the low-rank gradient of {name} overflows {weight.dtype}"
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

    def _check_finite(self, group: dict[str, Any], weight: Tensor, grad: Tensor) -> None:
        if not_finite(grad):
            raise self._not_finite_error(group, weight)

    def _has_scratch(self, item: Work) -> bool:
        return self._is_projected(item.group) and self._scratch_of(item) is not None

    def _with_factor(self, work: list[Work], factors: Factors) -> list[Work]:
        # Low-rank gradients in scratch memory have been multiplied.
        others = [item for item in work if not self._has_scratch(item)]
        multiplied = iter(super()._with_factor(others, factors))
        return [item if self._has_scratch(item) else next(multiplied) for item in work]

    def _imperative_update(self, work: list[Work]) -> list[Pass]:
        found = [self._scratch_of(item) if self._has_scratch(item) else None for item in work]
        projected = [(item, scratch) for item, scratch in zip(work, found, strict=True) if scratch]
        # Weights whose moves allocate nothing come first. For others the moments are kept.
        first = [pair for pair in projected if not self._moves_late(pair[0])]
        last = [pair for pair in projected if self._moves_late(pair[0])]
        saved = {
            weight: Saved(self._low_rank_states(item.group, weight))
            for item, _ in last
            for weight in item.weights
            if weight.is_cpu
        }
        step_all([scratch for _, scratch in projected])
        try:
            self._before_moves(projected)
            for item, scratch in first + last:
                if saved or self._fresh:
                    self._move_one_by_one(item, scratch, saved)
                else:
                    self._move_all(item, scratch)
                increment_version([p for p in item.weights if is_dtensor(p)])  # by their shards
                increment_version(self._accessed_states(item.weights))
        except (MemoryError, RuntimeError) as error:
            for each in saved.values() if is_out_of_memory(error) else ():
                each.put_back()
            raise
        return super()._imperative_update(
            [item for item, own in zip(work, found, strict=True) if own is None]
        )

    def _move_one_by_one(self, item: Work, scratch: Scratch, saved: dict[Tensor, Saved]) -> None:
        """Moves the weights of a group, and writes their new bases.

        ``saved``: moments of weights that have not been moved. Those that have been are taken off.
        """
        for index, weight in enumerate(item.weights):
            state = self._state[weight]
            written = [weight, *state.values()] if weight in saved else []
            move = functools.partial(self._move_or_undo, item, scratch, index, state, written)
            self._progress.take([weight], move)
            if weight in self._fresh:
                for name in self._fresh[weight].keys() & state.keys():
                    del self._fresh[weight][name]  # the state has it
                scratch.keep_bases(index, self._bases_of(item.group, weight))
            saved.pop(weight, None)

    def _move_or_undo(
        self,
        item: Work,
        scratch: Scratch,
        index: int,
        state: dict[str, Tensor],
        written: list[Tensor],
    ) -> None:
        """Moves a weight, or changes nothing of what may be written if memory runs out."""
        weight = item.weights[index]
        with undone_on_error(written):
            if weight in self._fresh:
                self._commit(weight)
            self._move_weight(item, scratch, index, state)

    def _reserved(self, work: list[Work]) -> Reserve:
        # Others than these allocate nothing as they move.
        return super()._reserved(
            [item for item in work if not self._has_scratch(item) or self._moves_late(item)]
        )

    @staticmethod
    def _moves_late(item: Work) -> bool:
        """Returns whether torch allocates something as weights move along their updates."""
        return any(way_of(item.group, p) is not None or p.dim() > 2 for p in item.weights)

    def _move_weight(
        self, item: Work, scratch: Scratch, index: int, state: dict[str, Tensor]
    ) -> None:
        weight = item.weights[index]
        is_wide = way_of(item.group, weight) is not None
        wide = self._widened(item.group, weight, state) if is_wide else weight
        target = local(wide)
        matrix = as_matrix(target)
        self._move(item, scratch, index, matrix, state)
        if matrix is not target and matrix.data_ptr() != target.data_ptr():  # no matrix's strides
            target.copy_(matrix.view(target.shape))
        if is_wide:
            self._write_back(item.group, weight, wide, state)

    def _bases_of(self, group: dict[str, Any], weight: Tensor) -> dict[str, Tensor]:
        """The bases of a weight by side, or what belongs to this process's part of it.

        They are those of its state, where they are part of it.
        """
        known, cut = self._state[weight] | self._fresh.get(weight, {}), cut_of(weight)
        return {
            side: basis_part(local(known[side]), side, cut) for side in self._sides(group, weight)
        }

    def _commit(self, weight: Tensor) -> None:
        """Writes new bases into the state where they are part of it."""
        fresh, state = self._fresh[weight], self._state[weight]
        for name in fresh.keys() & state.keys():
            local(state[name]).copy_(fresh[name])

    def _composite_steps(
        self, group: dict[str, Any], weights: list[Tensor], grads: list[Tensor]
    ) -> None:
        """Steps weights one by one by the formula."""
        self._imperative_steps(group, weights, grads)

    def _step_on_numbers(
        self, group: dict[str, Any], weight: Tensor, grad: Tensor, state: dict[str, Tensor]
    ) -> None:
        if self._is_projected(group):
            self._commit(weight)
            state = self._fresh[weight] | state
        super()._step_on_numbers(group, weight, grad, state)
