from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from fusedstep._api.base import FusedOptimizer
from fusedstep._matrix.apollo import BESIDE_MOMENTS, Apollo, scaled
from fusedstep._matrix.low_rank import LowRankOptimizer
from fusedstep._matrix.low_rank_states import low_rank
from fusedstep._matrix.low_rank_strategy import LowRankSteps
from fusedstep._matrix.products import as_matrix, project
from fusedstep._matrix.projection import LEFT, RIGHT
from fusedstep._matrix.transformers_adamw import advance, move
from fusedstep._options.kinds import Flag, Option, Options
from fusedstep._options.shared import OF_ADAM, OF_TORCH, PROJECTION
from fusedstep._state.kinds import COUNT, States, plain

__all__ = ["APOLLOAdamW"]


class APOLLOAdamW(LowRankOptimizer, FusedOptimizer):
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
            sparse gradients, for NaN and infinite elements in gradients of a group with a rank, for
            weights there on the meta device, and for shards there with a gradient in some processes
            only.

    Example::

        >>> groups = optim.groups(model, for_="apolloadamw", rank=256)
        >>> optimizer = optim.APOLLOAdamW(groups, lr=1e-2)

    .. _APOLLO:
        https://arxiv.org/abs/2412.05270
    """

    _strategy_class = LowRankSteps
    _projection = Apollo()
    _state_kinds: ClassVar[States] = {
        **low_rank(plain("exp_avg", "exp_avg_sq")),
        **BESIDE_MOMENTS,
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

    def _formula(
        self, group: dict[str, Any], weight: Tensor, grad: Tensor, state: dict[str, Tensor]
    ) -> Tensor:
        bases = {side: state[side] for side in (LEFT, RIGHT) if side in state}
        if not bases:
            return move(group, weight, *advance(group, grad, state))
        matrix = as_matrix(grad)
        low = project(matrix, bases)
        direction, length = advance(group, low, state)
        return move(group, weight, scaled(group, matrix, low, direction, bases, state), length)
