"""What a step through a projection exchanges of sharded weights.

All processes take the same collectives. First the processes exchange which gradients there are, and
whether the gradients are finite; the other collectives follow from the weights with a gradient.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fusedstep._matrix.low_rank_bases import Bases, Projection
from fusedstep._matrix.projection import sides_of
from fusedstep._matrix.scratch import Scratch
from fusedstep._matrix.sharded_projections import is_summed, made_by_owners
from fusedstep._sharding.dtensor import local
from fusedstep._sharding.exchange import Cut, cut_of
from fusedstep._state.checks import name_of
from fusedstep._step.nonfinite import not_finite
from fusedstep._step.plan import Work
from fusedstep._step.sums import Place, SpreadWeights, of_each, place_of


def name_in(item: Work, weight: Tensor) -> str:
    """Names a weight of work in an error."""
    place = next(i for i, p in enumerate(item.group["params"]) if p is weight)
    return name_of(item.group, item.number, place)


def not_finite_error(item: Work, weight: Tensor) -> RuntimeError:
    return RuntimeError(
        f"the gradient of {name_in(item, weight)} has elements that are NaN or infinite: no weight "
        "or state has been changed"
    )


def sums_over(group: dict[str, Any], weight: Tensor) -> Cut | None:
    """The cut of the shards of a weight whose low-rank gradient is a sum over the processes."""
    cut = cut_of(weight)
    return cut if cut is not None and is_summed(cut, sides_of(group, weight.shape)) else None


def make_bases_of_shards(
    found: list[tuple[Work, Scratch | None]],
    spread: SpreadWeights,
    projection: Projection,
    bases: Bases,
) -> None:
    """Makes new bases of whole gradients, each in one process.

    Raises in all processes if one has gradients of others, or not finite ones.
    """
    rows: list[tuple[Work, Tensor, Tensor, bool]] = []
    flags = []
    for item, scratch in found:
        for is_due, pair in zip(bases.due(item.group, item.weights), item.pairs(), strict=True):
            weight, own = pair[0], local(pair[1])
            if place_of(weight):
                needs_whole = (
                    is_due
                    and cut_of(weight) is not None
                    and bool(projection.shapes_from_gradients(item.group, weight))
                )
                # A NaN in other gradients shows in their low-rank gradients.
                is_bad = (scratch is None or needs_whole) and not_finite(own)
                flags.append([float(is_bad), float(needs_whole and own.any())])
                rows.append((item, *pair, needs_whole))
    due = []
    sums = spread.sums_of_rows(of_each(2), [weight for _, weight, *_ in rows], flags)
    for (item, weight, grad, needs_whole), (bad, has_any) in zip(rows, sums, strict=True):
        if bad:
            raise not_finite_error(item, weight)
        if needs_whole:
            bases.is_zero[weight] = not has_any
            if has_any:
                due.append((item, weight, grad))
            else:
                bases.make_zero(item.group, weight)

    def make(place: int, matrix: Tensor) -> dict[str, Tensor]:
        item, weight, _ = due[place]
        return bases.new(item.group, weight, matrix, True)

    def raise_failed(place: int) -> None:
        item, weight, _ = due[place]
        raise RuntimeError(f"another process could not make the bases of {name_in(item, weight)}")

    made = made_by_owners(
        [grad for *_, grad in due],
        [projection.shapes_from_gradients(item.group, weight) for item, weight, _ in due],
        [bases.states[weight]["exp_avg"].dtype for _, weight, _ in due],
        make,
        raise_failed,
    )
    for (_, weight, _), fresh in zip(due, made, strict=True):
        bases.fresh[weight] = fresh


def is_anywhere(found: bool, spread: SpreadWeights, weights: list[Tensor]) -> bool:
    """Returns True in all processes that share the weights, if ``found`` is true in any."""
    here: dict[Place, list[Tensor]] = {}
    for weight in weights:
        if place := place_of(weight):
            here.setdefault(place, []).append(weight)
    totals = spread.totals(here, lambda _, own: own.fill_(float(found)))
    return found or any(map(Tensor.item, totals))
