"""Steps of sharded weights through a low-rank projection.

All processes take the same collectives. First the processes exchange which gradients there are, and
whether the gradients are finite; the other collectives follow from the weights with a gradient.
"""

from __future__ import annotations

import functools
from typing import Any, ClassVar

from torch import Tensor

from fusedstep._matrix.low_rank_bases import LowRankBases
from fusedstep._matrix.projection import why_not_projected
from fusedstep._matrix.scratch import Scratch
from fusedstep._matrix.sharded_projections import is_summed, made_by_owners
from fusedstep._sharding.dtensor import is_dtensor, local
from fusedstep._sharding.exchange import Cut, cut_of, step_whole
from fusedstep._step.nonfinite import not_finite
from fusedstep._step.plan import Work
from fusedstep._step.sums import Place, SpreadWeights, of_each, place_of


class LowRankShards(LowRankBases):
    """The part of steps through a projection that shards need."""

    #: False if weights of groups with a rank cannot be DTensors.
    _takes_shards: ClassVar[bool] = True
    #: Memory for low-rank gradients, by the first weight of a launch.
    _scratch: dict[Tensor, Scratch]
    #: Bases made for the step under way.
    _fresh: dict[Tensor, dict[str, Tensor]]

    def _scratch_of(self, item: Work) -> Scratch | None:
        return self._scratch.get(item.weights[0])

    @classmethod
    def _why_not_projected(cls, group: dict[str, Any], weight: Tensor) -> str | None:
        if weight.is_nested:
            return f"is a nested tensor, which {cls.__name__} does not project"
        if is_dtensor(weight) and not cls._takes_shards:
            return (
                f"is a DTensor: {cls.__name__} does not project shards. Put it into a group "
                "without a rank"
            )
        return why_not_projected(group, weight)

    def _exchanges(self, group: dict[str, Any]) -> bool:
        return super()._exchanges(group) or self._is_projected(group)

    def _spread_projected(self) -> SpreadWeights | None:
        """The weights that are spread over processes, if some of them are projected."""
        cut = (
            cut_of(p) is not None
            for group in self._groups
            if self._is_projected(group)
            for p in group["params"]
        )
        return self._spread_weights() if any(cut) else None

    def _summed_over(self, group: dict[str, Any], weight: Tensor) -> Cut | None:
        """The cut of the shards of a weight whose low-rank gradient is a sum over the processes."""
        cut = cut_of(weight)
        return cut if cut is not None and is_summed(cut, self._sides(group, weight)) else None

    def _needs_gradient(self, item: Work, weight: Tensor) -> bool:
        """Returns whether a step makes bases of a shard's whole gradient."""
        return (
            cut_of(weight) is not None
            and bool(self._shapes_from_gradients(item.group, weight))
            and self._is_due(item.group, weight, self._count(weight))
        )

    def _check_shards(self, work: list[Work], spread: SpreadWeights) -> None:
        """Raises in all processes if one has gradients of others, or not finite ones.

        Finds gradients of zeros that bases are due of.
        """
        found: list[tuple[Work, Tensor, bool]] = []
        flags = []
        for item in work:
            scratch = self._scratch_of(item)
            for weight, grad in item.pairs():
                if place_of(weight):
                    own, is_due = local(grad), self._needs_gradient(item, weight)
                    # A NaN in other gradients shows in their low-rank gradients.
                    is_bad = (scratch is None or is_due) and not_finite(own)
                    flags.append([float(is_bad), float(is_due and own.any())])
                    found.append((item, weight, is_due))
        sums = spread.sums_of_rows(of_each(2), [weight for _, weight, _ in found], flags)
        for (item, weight, is_due), (bad, has_any) in zip(found, sums, strict=True):
            if bad:
                raise self._not_finite_error(item.group, weight)
            if is_due:
                self._is_zero[weight] = not has_any

    def _make_bases_of_shards(self, work: list[Work]) -> None:
        """Makes new bases of whole gradients, each in one process."""
        due = []
        for item in work:
            for weight, grad in item.pairs():
                if not self._needs_gradient(item, weight):
                    continue
                if self._is_zero[weight]:
                    self._fresh[weight] = self._zero_bases(item.group, weight)
                else:
                    due.append((item.group, weight, grad))

        def make(place: int, matrix: Tensor) -> dict[str, Tensor]:
            group, weight, _ = due[place]
            return self._new_bases(group, weight, matrix, self._count(weight), True)

        def raise_failed(place: int) -> None:
            group, weight, _ = due[place]
            raise RuntimeError(
                f"another process could not make the bases of {self._name_of(group, weight)}"
            )

        found = made_by_owners(
            [grad for *_, grad in due],
            [self._shapes_from_gradients(group, weight) for group, weight, _ in due],
            [self._state[weight]["exp_avg"].dtype for _, weight, _ in due],
            make,
            raise_failed,
        )
        for (_, weight, _), fresh in zip(due, found, strict=True):
            self._fresh[weight] = fresh

    def _not_finite_error(self, group: dict[str, Any], weight: Tensor) -> RuntimeError:
        return RuntimeError(
            f"the gradient of {self._name_of(group, weight)} has elements that are NaN or "
            "infinite: no weight or state has been changed"
        )

    def _imperative(
        self, group: dict[str, Any], weight: Tensor, grad: Tensor, state: dict[str, Tensor]
    ) -> None:
        """Steps a weight by the formula: of shards all processes take the whole."""
        if not (self._is_projected(group) and is_dtensor(weight)):
            super()._imperative(group, weight, grad, state)
            return
        step_whole(functools.partial(self._formula, group), weight, grad, state)


def is_anywhere(found: bool, spread: SpreadWeights, weights: list[Tensor]) -> bool:
    """Returns True in all processes that share the weights, if ``found`` is true in any."""
    here: dict[Place, list[Tensor]] = {}
    for weight in weights:
        if place := place_of(weight):
            here.setdefault(place, []).append(weight)
    totals = spread.totals(here, lambda _, own: own.fill_(float(found)))
    return found or any(map(Tensor.item, totals))
