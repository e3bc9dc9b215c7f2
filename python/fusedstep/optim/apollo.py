from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from fusedstep._api.base import FusedOptimizer
from fusedstep._matrix.channel_moves import ChannelMoves, Channels
from fusedstep._matrix.low_rank import LowRankSteps
from fusedstep._matrix.low_rank_states import PLACE, bases, beside, low_rank, place_of
from fusedstep._matrix.products import as_matrix, project
from fusedstep._matrix.projection import LEFT, RIGHT, basis_shapes, check_one_of, matrix_shape
from fusedstep._matrix.scratch import Scratch
from fusedstep._matrix.sharded_projections import is_summed
from fusedstep._matrix.subspace import bases_of, gaussian
from fusedstep._matrix.transformers_adamw import advance, bias_correction, move
from fusedstep._options.kinds import Flag, Option, Options
from fusedstep._options.shared import OF_ADAM, OF_TORCH, PROJECTION
from fusedstep._sharding.dtensor import local
from fusedstep._sharding.exchange import Cut, cut_of
from fusedstep._state.checks import with_name
from fusedstep._state.kinds import COUNT, States, plain
from fusedstep._step.plan import Work
from fusedstep._step.program import Pass, Terms, run

__all__ = ["APOLLOAdamW"]

#: The largest growth of an update's norm from one step to the next.
_GROWTH = 1.01

#: Added to norms that are divided by.
_EPSILON = 1e-8

#: The state that is the norm of the last scaled gradient.
_NORM = "scaled_grad"


class APOLLOAdamW(LowRankSteps, FusedOptimizer):
    """Implements the APOLLOAdamW algorithm, in groups and formula apollo_torch's.

    For a weight ``w`` [M, N] of a group with a ``rank`` r, with gradient ``G``, at step ``t`` = 1,
    2, …; here of the type that projects from the right::

        B = random [r, N], normal with variance 1 / r    at steps 1, 1 + gap, 1 + 2 * gap, …
        R = G @ B.T                                      [M, r]
        m = beta1 * m + (1 - beta1) * R
        v = beta2 * v + (1 - beta2) * R**2
        u = m / (sqrt(v) + eps)
        s = norm(u) / (norm(R) + 1e-8)                   of each row, or of all
        S = s * G
        if norm(S) > 1.01 * norm of the last S:
            S = S * 1.01 * norm of the last S / norm(S)
        w = w - lr * sqrt(1 - beta2**t) / (1 - beta1**t) * sqrt(scale) * S
        w = w - lr * weight_decay * w

    From the left, ``R = A.T @ G`` [r, N] and the factors ``s`` are those of columns. This is
    algorithm 1 of `APOLLO`_, as its authors' code has it; its APOLLO-Mini is ``rank=1``,
    ``scale_type="tensor"`` and ``scale=128``. Groups without a rank are AdamW, as in
    :class:`GaLoreAdamW`.

    A random basis follows from ``seed``, the step count, and the state ``place``: the index of the
    weight's group and the weight's place there when it got its states. A weight keeps its basis
    when groups are edited. The basis is the same on every device, and no part of the state.

    The states ``exp_avg`` and ``exp_avg_sq`` have the shape of ``R``, and ``scaled_grad`` is the
    norm of the last ``S``. With ``proj="svd"`` there are, in place of ``place``,
    ``projector_left`` [M, r] or ``projector_right`` [r, N]. All are float32 beside 16-bit weights.
    A weight of more than two dimensions is the matrix of its first one and all others together.

    Args:
        params (iterable): iterable of parameters or named_parameters to optimize
            or iterable of dicts defining parameter groups
        lr (float, Tensor, optional): learning rate (default: 1e-3)
        betas (tuple[float | Tensor, float | Tensor], optional): coefficients of the
            running averages of the gradient and its square (default: (0.9, 0.999))
        eps (float, optional): term added to the root of the second moment (default: 1e-6)
        weight_decay (float, optional): decoupled weight decay (default: 0)
        correct_bias (bool, optional): correct the biases of the averages (default: True)
        scale_front (bool, optional): multiply by the root of ``scale`` before the growth of
            the norm is limited (default: False)
        disable_nl (bool, optional): leave out the limit of the norm's growth (default: False)
        rank (int, optional): rank of the projected gradients of a group; None projects
            nothing (default: None)
        proj (str, optional): ``"random"``, or ``"svd"`` for the gradient's singular vectors
            (default: "random")
        scale_type (str, optional): a factor for each ``"channel"``, or for the ``"tensor"``
            (default: "channel")
        update_proj_gap (int, optional): steps from one basis to the next (default: 200)
        scale (float, optional): its root is a factor of projected updates (default: 1.0)
        proj_type (str, optional): the side that is projected: ``"std"`` the shorter one,
            ``"reverse_std"`` the longer one, ``"left"`` or ``"right"`` (default: "std")
        seed (int, optional): of the bases and of ``rounding="stochastic"`` (default: 0)

    Raises:
        ValueError: if an option is out of range or unknown, ``params`` is empty, or a weight of a
            group with a rank has fewer than two dimensions, a side shorter than the rank, is
            complex, or is a DTensor that is cut along two dimensions of a mesh, or with more than
            two dimensions along another than the first, or whose states would be in codes; the
            error names the parameter.
        RuntimeError: if ``fused=True`` meets ``foreach``, weights that native kernels do not
            update, or a missing native library; at :meth:`step`, before anything is changed, for
            sparse gradients, for NaN and infinite elements in gradients of a group with a rank, and
            for shards there with a gradient in some processes only.

    Example::

        >>> groups = optim.groups(model, for_="apolloadamw", rank=256)
        >>> optimizer = optim.APOLLOAdamW(groups, lr=1e-2)

    .. _APOLLO:
        https://arxiv.org/abs/2412.05270
    """

    _state_kinds: ClassVar[States] = {
        **low_rank(plain("exp_avg", "exp_avg_sq")),
        _NORM: beside(),
        **bases(when=lambda group: group["proj"] == "svd"),
        PLACE: beside(
            2, needs=lambda group: group["proj"] == "random", start=place_of, is_later=True
        ),
        **COUNT,
    }
    _option_kinds: ClassVar[Options] = {
        **OF_TORCH,
        **OF_ADAM,
        "correct_bias": Flag(before=True),
        "scale_front": Flag(before=False),
        "disable_nl": Flag(before=False),
        "proj": Option(before="random"),
        "scale_type": Option(before="channel"),
        **PROJECTION,
    }

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        correct_bias: bool = True,
        scale_front: bool = False,
        disable_nl: bool = False,
        *,
        rank: int | None = None,
        proj: str = "random",
        scale_type: str = "channel",
        update_proj_gap: int = 200,
        scale: float = 1.0,
        proj_type: str = "std",
        maximize: bool = False,
        foreach: bool | None = None,
        fused: bool | None = None,
        state_dtype: torch.dtype | str | None = None,
        master_weights: bool | str = False,
        rounding: str | None = None,
        seed: int = 0,
        max_grad_norm: float | None = None,
        skip_nonfinite: bool = False,
    ) -> None:
        super().__init__(params, locals() | {"differentiable": False})

    @classmethod
    def _check_projection(cls, options: dict[str, Any]) -> None:
        super()._check_projection(options)
        check_one_of("proj", options["proj"], ("random", "svd"))
        check_one_of("scale_type", options["scale_type"], ("channel", "tensor"))
        check_one_of("proj_type", options["proj_type"], ("std", "reverse_std", "right", "left"))

    @classmethod
    def _basis_shapes(cls, group: dict[str, Any], weight: Tensor) -> dict[str, torch.Size]:
        return basis_shapes(group["rank"], cls._sides(group, weight), *matrix_shape(weight))

    def _shapes_from_gradients(
        self, group: dict[str, Any], weight: Tensor
    ) -> dict[str, torch.Size]:
        return self._basis_shapes(group, weight) if group["proj"] == "svd" else {}

    def _new_bases(
        self, group: dict[str, Any], weight: Tensor, grad: Tensor, count: int, is_due: bool
    ) -> dict[str, Tensor]:
        gap, sides = group["update_proj_gap"], self._sides(group, weight)
        wide = torch.float64 if weight.dtype is torch.float64 else torch.float32
        if group["proj"] == "svd":
            if not is_due:
                return {}
            return bases_of(grad.to(wide), group["rank"], sides, "exact", None, 0)
        key = self._key(group, weight, count // gap)
        like = torch.empty(0, dtype=wide, device=weight.device)
        (side,) = sides
        shape = self._basis_shapes(group, weight)[side]
        return {side: gaussian(shape, key, like).div_(math.sqrt(group["rank"]))}

    def _new_scratch(self, group: dict[str, Any], weights: list[Tensor]) -> Scratch:
        scratch = super()._new_scratch(group, weights)
        channels = [_channels(group, self._sides(group, p)) for p in weights]
        low = scratch.plan.handle, scratch.grads, scratch.updates
        scratch.moves = ChannelMoves(*low, channels)
        return scratch

    def _prepare_moves(self, projected: list[tuple[Work, Scratch]], factor: float) -> None:
        run(self._prepared(item, _moves(scratch)) for item, scratch in projected)
        self._factor = factor

    def _prepared(self, item: Work, moves: ChannelMoves) -> Pass:
        """Takes the norms of low-rank gradients and of gradients."""
        group, weights = item.group, item.weights
        try:
            moves.bind(
                None if self._moves_late(item) else [as_matrix(local(p)) for p in weights],
                [as_matrix(local(grad)).resolve_neg() for grad in item.grads],
                [self._state[p][_NORM] for p in weights],
                [bias_correction(group, self._count(p) + 1) for p in weights],
            )
        except RuntimeError as error:
            raise with_name(error, item.number, group, weights) from None
        moves.sum_gradients()
        is_whole, terms = group["scale_type"] == "tensor", []
        for index, weight in enumerate(weights):
            cut, parts = cut_of(weight), self._parts_of(group, weight)
            if parts is not None and is_whole:  # each process has its own channels
                terms.append((parts, moves.low_squares(index)))
            if cut is not None and (is_whole or parts is None):
                terms.append((cut, moves.squares(index)))
        if terms:
            yield Terms(terms)

    def _parts_of(self, group: dict[str, Any], weight: Tensor) -> Cut | None:
        """The cut of a weight, if processes have parts of its low-rank gradient."""
        cut = cut_of(weight)
        return None if cut is None or is_summed(cut, self._sides(group, weight)) else cut

    def _before_moves(self, projected: list[tuple[Work, Scratch]]) -> None:
        run(self._limited(item, _moves(scratch)) for item, scratch in projected)

    def _limited(self, item: Work, moves: ChannelMoves) -> Pass:
        """Makes factors of channels of the norms of updates, and limits the growth of the norm."""
        group = item.group
        is_whole = group["scale_type"] == "tensor"
        parts = [(i, self._parts_of(group, p)) for i, p in enumerate(item.weights)]
        cuts = [(cut, index) for index, cut in parts if cut is not None]
        moves.sum_updates()
        if cuts and is_whole:
            yield Terms([(cut, moves.update_squares(index)) for cut, index in cuts])
        moves.scale(self._factor, _EPSILON)
        if cuts and not is_whole:
            yield Terms([(cut, moves.norm_squares(index)) for cut, index in cuts])
        root, lr = math.sqrt(group["scale"]), float(group["lr"])
        times = lr * _kept(group) * (1 if group["maximize"] else -1)
        limits, in_front = not group["disable_nl"], group["scale_front"]
        moves.limit(limits, in_front, root, _GROWTH, _EPSILON, times)

    def _move(
        self,
        item: Work,
        scratch: Scratch,
        index: int,
        target: Tensor,
        state: dict[str, Tensor],
    ) -> None:
        moves, keep = _moves(scratch), _kept(item.group)
        if self._moves_late(item):
            moves.move_onto(index, target, keep)
        else:
            moves.move(index, [target], keep)

    def _move_all(self, item: Work, scratch: Scratch) -> None:
        if self._moves_late(item):
            super()._move_all(item, scratch)
            return
        _moves(scratch).move(0, list(map(local, item.weights)), _kept(item.group))
        self._progress.stepped += item.weights

    def _formula(
        self, group: dict[str, Any], weight: Tensor, grad: Tensor, state: dict[str, Tensor]
    ) -> Tensor:
        bases = {side: state[side] for side in (LEFT, RIGHT) if side in state}
        if not bases:
            return move(group, weight, *advance(group, grad, state))
        matrix, dim = as_matrix(grad), _channels(group, bases).reduced
        low = project(matrix, bases)
        direction, length = advance(group, low, state)
        scaled = matrix * (_norm(direction, dim) / (_norm(low, dim) + _EPSILON))
        scaled *= _limit(group, _norm(scaled, None), state)
        return move(group, weight, scaled, length)


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


def _channels(group: dict[str, Any], sides: Iterable[str]) -> Channels:
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
