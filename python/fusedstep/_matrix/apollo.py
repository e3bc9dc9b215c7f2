"""APOLLO: weights move along their gradients, by factors from norms in a low rank."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from fusedstep._matrix.channel_moves import ChannelMoves, Channels
from fusedstep._matrix.low_rank_bases import (
    Projection,
    WideBases,
    count_of,
    key_of,
    moves_late,
)
from fusedstep._matrix.low_rank_states import PLACE, bases, beside, place_of, whole_pair
from fusedstep._matrix.products import as_matrix
from fusedstep._matrix.projection import RIGHT, basis_shapes_of, check_one_of, sides_of
from fusedstep._matrix.scratch import Scratch
from fusedstep._matrix.sharded_projections import is_summed
from fusedstep._matrix.subspace import bases_of, gaussian
from fusedstep._matrix.transformers_adamw import bias_correction
from fusedstep._sharding.dtensor import local
from fusedstep._sharding.exchange import Cut, cut_of
from fusedstep._state.checks import with_name
from fusedstep._state.kinds import States
from fusedstep._step.plan import Work
from fusedstep._step.program import Pass, Terms, run

#: The largest growth of an update's norm from one step to the next.
_GROWTH = 1.01

#: Added to norms that are divided by.
_EPSILON = 1e-8

#: The state that is the norm of the last scaled gradient.
_NORM = "scaled_grad"

#: The states that groups with a rank have beside their moments.
BESIDE_MOMENTS: States = {
    _NORM: beside(),
    **bases(when=lambda group: group["proj"] == "svd"),
    PLACE: whole_pair(place_of, needs=lambda group: group["proj"] == "random"),
}


class Apollo(Projection):
    """Bases that are random, or singular vectors of gradients; moves along gradients."""

    def check(self, options: dict[str, Any]) -> None:
        check_one_of("proj", options["proj"], ("random", "svd"))
        check_one_of("scale_type", options["scale_type"], ("channel", "tensor"))
        check_one_of("proj_type", options["proj_type"], ("std", "reverse_std", "right", "left"))

    def shapes_from_gradients(self, group: dict[str, Any], weight: Tensor) -> dict[str, torch.Size]:
        return basis_shapes_of(group, weight) if group["proj"] == "svd" else {}

    def new_bases(
        self,
        group: dict[str, Any],
        weight: Tensor,
        state: dict[str, Any],
        grad: Tensor,
        count: int,
        is_due: bool,
        is_first: bool,
    ) -> dict[str, Tensor]:
        wide = torch.float64 if weight.dtype is torch.float64 else torch.float32
        if group["proj"] == "svd":
            if not is_due:
                return {}
            sides = sides_of(group, weight.shape)
            return bases_of(grad.to(wide), group["rank"], sides, "exact", None, 0)
        key = key_of(group, state, count // group["update_proj_gap"])
        like = torch.empty(0, dtype=wide, device=weight.device)
        ((side, shape),) = basis_shapes_of(group, weight).items()
        return {side: gaussian(shape, key, like).div_(math.sqrt(group["rank"]))}

    def begin(self, scratch: Scratch, group: dict[str, Any]) -> None:
        channels = [channels_of(group, sides_of(group, p.shape)) for p in scratch.weights]
        low = scratch.plan.handle, scratch.grads, scratch.updates
        scratch.moves = ChannelMoves(*low, channels)

    def prepare_moves(
        self,
        found: list[tuple[Work, Scratch]],
        states: Mapping[Tensor, dict[str, Any]],
        factor: float,
    ) -> None:
        run(_prepared(item, _moves(scratch), states) for item, scratch in found)

    def before_moves(self, found: list[tuple[Work, Scratch]], factor: float) -> None:
        run(_limited(item, _moves(scratch), factor) for item, scratch in found)

    def move_all(self, item: Work, scratch: Scratch) -> bool:
        _moves(scratch).move(0, list(map(local, item.weights)), _kept(item.group))
        return True

    def move(
        self,
        item: Work,
        scratch: Scratch,
        index: int,
        target: Tensor,
        wide_bases: WideBases | None,
    ) -> None:
        moves, keep = _moves(scratch), _kept(item.group)
        if moves_late(item):
            moves.move_onto(index, target, keep)
        else:
            moves.move(index, [target], keep)


def _prepared(item: Work, moves: ChannelMoves, states: Mapping[Tensor, dict[str, Any]]) -> Pass:
    """Takes the norms of low-rank gradients and of gradients."""
    group, weights = item.group, item.weights
    try:
        moves.bind(
            None if moves_late(item) else [as_matrix(local(p)) for p in weights],
            [as_matrix(local(grad)).resolve_neg() for grad in item.grads],
            [states[p][_NORM] for p in weights],
            [bias_correction(group, count_of(states[p]) + 1) for p in weights],
        )
    except RuntimeError as error:
        raise with_name(error, item.number, group, weights) from None
    moves.sum_gradients()
    is_whole, terms = group["scale_type"] == "tensor", []
    for index, weight in enumerate(weights):
        cut, parts = cut_of(weight), _parts_of(group, weight)
        if parts is not None and is_whole:  # each process has its own channels
            terms.append((parts, moves.low_squares(index)))
        if cut is not None and (is_whole or parts is None):
            terms.append((cut, moves.squares(index)))
    if terms:
        yield Terms(terms)


def _limited(item: Work, moves: ChannelMoves, factor: float) -> Pass:
    """Makes factors of channels of the norms of updates, and limits the growth of the norm."""
    group = item.group
    is_whole = group["scale_type"] == "tensor"
    parts = [(i, _parts_of(group, p)) for i, p in enumerate(item.weights)]
    cuts = [(cut, index) for index, cut in parts if cut is not None]
    moves.sum_updates()
    if cuts and is_whole:
        yield Terms([(cut, moves.update_squares(index)) for cut, index in cuts])
    moves.scale(factor, _EPSILON)
    if cuts and not is_whole:
        yield Terms([(cut, moves.norm_squares(index)) for cut, index in cuts])
    root, lr = math.sqrt(group["scale"]), float(group["lr"])
    times = lr * _kept(group) * (1 if group["maximize"] else -1)
    limits, in_front = not group["disable_nl"], group["scale_front"]
    moves.limit(limits, in_front, root, _GROWTH, _EPSILON, times)


def _parts_of(group: dict[str, Any], weight: Tensor) -> Cut | None:
    """The cut of a weight, if processes have parts of its low-rank gradient."""
    cut = cut_of(weight)
    return None if cut is None or is_summed(cut, sides_of(group, weight.shape)) else cut


def scaled(
    group: dict[str, Any],
    matrix: Tensor,
    low: Tensor,
    direction: Tensor,
    sides: Iterable[str],
    state: dict[str, Tensor],
) -> Tensor:
    """A gradient with the norms of the channels of the direction in the low rank."""
    dim = channels_of(group, sides).reduced
    found = matrix * (_norm(direction, dim) / (_norm(low, dim) + _EPSILON))
    found *= _limit(group, _norm(found, None), state)
    return found


def _limit(group: dict[str, Any], norm: Tensor, state: dict[str, Tensor]) -> Tensor | float:
    """The factor of a scaled gradient of this norm, by ``scale`` and by the limit of its growth.

    A last norm of 0 limits nothing. The norm that the gradient then has is noted in the state.
    """
    root, last = math.sqrt(group["scale"]), state[_NORM]
    if group["disable_nl"]:
        return root
    if group["scale_front"]:
        norm = norm * root
    limit = (norm / (last + _EPSILON)).clamp(min=_GROWTH) / _GROWTH
    limit = torch.where(last > 0, limit, 1.0)
    last.copy_(norm / limit)
    return root / limit


def channels_of(group: dict[str, Any], sides: Iterable[str]) -> Channels:
    """The channels of a gradient, along the dimension that is not projected."""
    if group["scale_type"] == "tensor":
        return Channels.WHOLE
    return Channels.ROWS if RIGHT in sides else Channels.COLUMNS


def _moves(scratch: Scratch) -> ChannelMoves:
    assert scratch.moves is not None
    return scratch.moves


def _kept(group: dict[str, Any]) -> float:
    """The part of a weight that decay leaves."""
    return 1 - float(group["lr"]) * group["weight_decay"]


def _norm(tensor: Tensor, dim: int | None) -> Tensor:
    return torch.linalg.vector_norm(tensor, dim=dim, keepdim=dim is not None)
