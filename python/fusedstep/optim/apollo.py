from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from fusedstep._api.base import FusedOptimizer
from fusedstep._matrix.low_rank import LowRankSteps
from fusedstep._matrix.low_rank_bases import PLACE
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
from fusedstep._step.plan import Work
from fusedstep._step.program import Pass, add_up_norms, run
from fusedstep._step.undo import numbers_first

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

    @classmethod
    def _more_shapes(cls, group: dict[str, Any], weight: Tensor) -> dict[str, torch.Size]:
        norm = {_NORM: torch.Size(())}
        return norm if group["proj"] == "random" else norm | cls._basis_shapes(group, weight)

    @classmethod
    def _kept_places(cls, group: dict[str, Any]) -> tuple[str, ...]:
        return (PLACE,) if group["proj"] == "random" else ()

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

    def _prepare_moves(self, projected: list[tuple[Work, Scratch]], factor: float) -> None:
        run(
            self._prepared(item, scratch, index, factor)
            for item, scratch in projected
            for index in range(len(item.weights))
        )

    def _prepared(self, item: Work, scratch: Scratch, index: int, factor: float) -> Pass:
        """Takes the norms of the low-rank gradient and of the gradient of a weight."""
        group, weight = item.group, item.weights[index]
        dim = _reduced(group, self._sides(group, weight))
        low = _norm(scratch.grads[index], dim)
        own = _norm(as_matrix(local(item.grads[index])), dim, low.dtype)
        cut = cut_of(weight)
        parts = None if cut is None or is_summed(cut, self._sides(group, weight)) else cut
        if dim is None:
            yield from add_up_norms([(parts, low), (cut, own)])
        else:  # of channels that are cut, each process has its own
            yield from add_up_norms([(None if parts else cut, own)])
        self._ready[weight] = self._rooms(group, weight, parts, low, own, factor)

    def _rooms(
        self,
        group: dict[str, Any],
        weight: Tensor,
        parts: Cut | None,
        low: Tensor,
        own: Tensor,
        factor: float,
    ) -> _Rooms:
        """``low``, ``own``: norms of the low-rank gradient and of the gradient, as a whole."""
        dim = _reduced(group, self._sides(group, weight))
        low.add_(_EPSILON)
        lr, length = float(group["lr"]), bias_correction(group, self._count(weight) + 1)
        keep = 1 - lr * group["weight_decay"]
        scales, norm = torch.empty_like(low), low.new_empty(())
        narrow = torch.empty_like(low, dtype=weight.dtype) if weight.itemsize == 2 else scales
        limit = _Limit(group, norm, length * lr * keep)
        numbers = numbers_first(low, length, factor, keep)
        products = torch.empty_like(low)
        return _Rooms(dim, parts, low, own, scales, products, narrow, norm, limit, *numbers)

    def _before_moves(self, projected: list[tuple[Work, Scratch]]) -> None:
        run(
            self._ready[weight].scaled(update)
            for item, scratch in projected
            for weight, update in zip(item.weights, scratch.updates, strict=True)
        )

    def _move(
        self,
        item: Work,
        scratch: Scratch,
        index: int,
        target: Tensor,
        state: dict[str, Tensor],
    ) -> None:
        """Scales the gradient by norms in the scratch memory, without waiting for a device."""
        group, weight = item.group, item.weights[index]
        grad, room = as_matrix(local(item.grads[index])), self._ready[weight]
        # Elsewhere than the scales, which a move that is taken again reads once more.
        scales = torch.mul(room.scales, room.limit.factor(room.norm, state), out=room.products)
        if group["weight_decay"] != 0:
            target.mul_(room.keep)
        if target.dtype is not scales.dtype:
            # A gradient near zero may put them over the largest number of float16.
            most = torch.finfo(target.dtype).max
            scales = room.narrow.copy_(scales.clamp_(max=most))
        target.addcmul_(grad.to(target.dtype), scales, value=1.0 if group["maximize"] else -1.0)

    def _formula(
        self, group: dict[str, Any], weight: Tensor, grad: Tensor, state: dict[str, Tensor]
    ) -> Tensor:
        bases = {side: state[side] for side in (LEFT, RIGHT) if side in state}
        if not bases:
            return move(group, weight, *advance(group, grad, state))
        matrix, dim = as_matrix(grad), _reduced(group, bases)
        low = project(matrix, bases)
        direction, length = advance(group, low, state)
        scaled = matrix * (_norm(direction, dim) / (_norm(low, dim) + _EPSILON))
        norm = _norm(scaled, None)
        scaled *= _Limit(group, norm).factor(norm, state)
        return move(group, weight, scaled, length)


class _Rooms(NamedTuple):
    """Memory for the move of a weight, and what is known before the step of its moments."""

    dim: int | None
    parts: Cut | None
    """The cut of the weight, if processes have parts of its low-rank gradient."""
    low: Tensor
    """The norms of the low-rank gradient, and a little."""
    own: Tensor
    """The norms of the gradient."""
    scales: Tensor
    products: Tensor
    narrow: Tensor
    """Scales in the dtype of the weight."""
    norm: Tensor
    limit: _Limit
    length: Tensor
    factor: Tensor
    keep: Tensor

    def scaled(self, update: Tensor) -> Pass:
        """Makes the norms of an update scales of the gradient, and takes the norm of that."""
        # The update is the direction times the length.
        _norm(update, self.dim, out=self.scales)
        if self.dim is None:
            yield from add_up_norms([(self.parts, self.scales)])
        self.scales.div_(self.length).mul_(self.factor).div_(self.low)
        _norm(torch.mul(self.scales, self.own, out=self.products), None, out=self.norm)
        if self.dim is not None:
            yield from add_up_norms([(self.parts, self.norm)])


class _Limit:
    """The factor of a scaled gradient, by ``scale`` and by the limit of the growth of its norm.

    It is made before the norm is known, and then allocates nothing. A last norm of 0 limits
    nothing.
    """

    def __init__(self, group: dict[str, Any], like: Tensor, times: float = 1.0) -> None:
        """``times``: a factor of the factor."""
        root = math.sqrt(group["scale"])
        self._limits, self._in_front = not group["disable_nl"], group["scale_front"]
        numbers = root * times, root, times, _EPSILON, _GROWTH, 0.0, 1.0
        self._both, self._root, self._times, *self._others = numbers_first(like, *numbers)
        self._limit, self._norm = torch.empty_like(like), torch.empty_like(like)
        self._is_above = torch.empty_like(like, dtype=torch.bool)

    def factor(self, norm: Tensor, state: dict[str, Tensor]) -> Tensor:
        """Notes the norm that a gradient of this one then has in the state."""
        if not self._limits:
            return self._both
        last, limit, (epsilon, growth, zero, one) = state[_NORM], self._limit, self._others
        if self._in_front:
            norm = torch.mul(norm, self._root, out=self._norm)
        torch.div(norm, torch.add(last, epsilon, out=limit), out=limit)
        limit.clamp_(min=_GROWTH).div_(growth)
        torch.where(torch.gt(last, zero, out=self._is_above), limit, one, out=limit)
        torch.div(norm, limit, out=last)
        return torch.div(self._root, limit, out=limit).mul_(self._times)


def _reduced(group: dict[str, Any], sides: Iterable[str]) -> int | None:
    """The dimension that norms are taken along, which is the projected one; None for all."""
    return None if group["scale_type"] == "tensor" else int(RIGHT in sides)


def _norm(
    tensor: Tensor, dim: int | None, dtype: torch.dtype | None = None, out: Tensor | None = None
) -> Tensor:
    keepdim = dim is not None
    return torch.linalg.vector_norm(tensor, dim=dim, keepdim=keepdim, dtype=dtype, out=out)
