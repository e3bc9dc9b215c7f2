from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from fusedstep._api.base import FusedOptimizer
from fusedstep._matrix.galore import BESIDE_MOMENTS, GALORE, GaLore
from fusedstep._matrix.low_rank import LowRankOptimizer
from fusedstep._matrix.low_rank_states import low_rank
from fusedstep._matrix.low_rank_strategy import LowRankSteps
from fusedstep._matrix.products import as_matrix, project
from fusedstep._matrix.projection import LEFT, RIGHT
from fusedstep._matrix.transformers_adamw import advance, move
from fusedstep._options.kinds import Flag, Options
from fusedstep._options.shared import OF_ADAM, OF_TORCH
from fusedstep._state.kinds import COUNT, States, plain

__all__ = ["GaLoreAdamW"]


class GaLoreAdamW(LowRankOptimizer, FusedOptimizer):
    """Implements the GaLoreAdamW algorithm, in groups and formula galore_torch's.

    For a weight ``w`` [M, N] of a group with a ``rank`` r, with gradient ``G``, at step ``t`` = 1,
    2, …; here of the type that projects from the right, by a basis ``B`` [r, N]::

        B = the first r right singular vectors of G      at steps 1, 1 + gap, 1 + 2 * gap, …
        R = G @ B.T                                      [M, r]
        m = beta1 * m + (1 - beta1) * R
        v = beta2 * v + (1 - beta2) * R**2
        u = m / (sqrt(v) + eps)
        w = w - lr * sqrt(1 - beta2**t) / (1 - beta1**t) * scale * u @ B
        w = w - lr * weight_decay * w

    From the left, ``R = A.T @ G`` [r, N] and the update is ``A @ u`` with the left singular vectors
    ``A`` [M, r]; ``"full"`` does both, with ``R = A.T @ G @ B.T`` [r, r]. This is algorithm 2 of
    `GaLore`_, as its authors' code has it. Groups without a rank have the same formula with ``R =
    G`` and no scale: eps stands beside the root of v before the bias is corrected, and the decay
    comes after the update.

    A weight of more than two dimensions is the matrix of its first one and all others together. The
    states ``exp_avg`` and ``exp_avg_sq`` have the shape of ``R``; ``projector_left`` [M, r] and
    ``projector_right`` [r, N] are the bases; with ``svd="lazy"`` there is the number
    ``gap_doublings`` too. All are float32 beside 16-bit weights.

    The state ``place`` has the index of a weight's group and the weight's place there when it got
    its states; ``svd="exact"`` needs none. With ``stagger`` the state ``turn`` has that place and
    the number of weights there. So bases belong to their weight when groups are edited, and over a
    resume.

    With ``fused=None`` or True a group with a rank takes one library product for each weight into
    memory that the optimizer holds, one native step over all low-rank gradients, and one product
    that adds the update to the weight. Products of 16-bit weights have their dtype.

    Args:
        params (iterable): iterable of parameters or named_parameters to optimize
            or iterable of dicts defining parameter groups
        lr (float, Tensor, optional): learning rate (default: 1e-3)
        betas (tuple[float | Tensor, float | Tensor], optional): coefficients of the
            running averages of the gradient and its square (default: (0.9, 0.999))
        eps (float, optional): term added to the root of the second moment (default: 1e-6)
        weight_decay (float, optional): decoupled weight decay (default: 0)
        correct_bias (bool, optional): correct the biases of the averages (default: True)
        rank (int, optional): rank of the projected gradients of a group; None projects
            nothing (default: None)
        update_proj_gap (int, optional): steps from one basis to the next (default: 200)
        scale (float, optional): factor of projected updates (default: 0.25)
        proj_type (str, optional): the side that is projected: ``"std"`` the shorter one,
            ``"reverse_std"`` the longer one, ``"left"``, ``"right"``, or both with ``"full"``
            (default: "std")
        svd (str, optional): how a basis is made. ``"exact"``: by a full decomposition.
            ``"randomized"``: by a random product with 8 columns more than the rank, and two
            power steps. ``"power"``: by one power step from the last basis.
            ``"lazy"``: randomized, and the gap of a weight doubles, up to 16 times the group's,
            while the mean squared cosine between a basis and the next is at least 0.4
            (default: "exact")
        stagger (bool, optional): spread the refreshes of a group over the gap, so that no
            step but the first one has them all (default: False)
        seed (int, optional): of the random numbers of ``svd`` and of ``rounding="stochastic"``.
            They follow from the seed, the step count and the state ``place``, and are the same
            on every device (default: 0)

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

        >>> groups = optim.groups(model, for_="galoreadamw", rank=128)
        >>> optimizer = optim.GaLoreAdamW(groups, lr=1e-2)

    .. _GaLore:
        https://arxiv.org/abs/2403.03507
    """

    _strategy_class = LowRankSteps
    _projection = GaLore()
    _state_kinds: ClassVar[States] = {
        **low_rank(plain("exp_avg", "exp_avg_sq")),
        **BESIDE_MOMENTS,
        **COUNT,
    }
    _option_kinds: ClassVar[Options] = {
        **OF_TORCH,
        **OF_ADAM,
        "correct_bias": Flag(before=True),
        **GALORE,
    }

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        correct_bias: bool = True,
        *,
        rank: int | None = None,
        update_proj_gap: int = 200,
        scale: float = 0.25,
        proj_type: str = "std",
        svd: str = "exact",
        stagger: bool = False,
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
        update, length = advance(group, project(as_matrix(grad), bases), state)
        for side in bases:
            update = bases[side] @ update if side == LEFT else update @ bases[side]
        return move(group, weight, update * group["scale"], length)
