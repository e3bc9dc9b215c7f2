from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from torch import Tensor
from torch.optim.optimizer import ParamsT

from fusedstep._api.base import FusedOptimizer
from fusedstep._factored.formula import factored_update, length_of, numbers_of
from fusedstep._factored.options import LR, as_set, check_given_lr, of_a_variant
from fusedstep._factored.strategy import FactoredSteps
from fusedstep._matrix.galore import BESIDE_MOMENTS, GALORE, GaLore
from fusedstep._matrix.low_rank import LowRankOptimizer
from fusedstep._matrix.low_rank_states import has_rank, low_rank
from fusedstep._matrix.low_rank_strategy import LowRankSteps
from fusedstep._matrix.products import add_back, as_matrix, project, size_between
from fusedstep._matrix.projection import LEFT, RIGHT
from fusedstep._options.kinds import Number, Options
from fusedstep._state.kinds import Group, States
from fusedstep._step.owner import Owner
from fusedstep.optim.adafactor import Adafactor

__all__ = ["GaLoreAdafactor"]


class _FactoredLowRankSteps(LowRankSteps, FactoredSteps):
    """Steps groups with a rank by the formula: no plan steps moments of projected rows."""

    def is_composite(self, optimizer: Owner, group: Group) -> bool:
        return True

    def takes_scratch(
        self, optimizer: Owner, group: Group, weights: list[Tensor], grads: Sequence[Tensor]
    ) -> bool:
        return False

    def fuses(self, optimizer: Owner, group: Group) -> bool:
        return not has_rank(group) and super().fuses(optimizer, group)

    def written_early(
        self, optimizer: Owner, group: Group, weight: Tensor, kept: dict[str, Tensor]
    ) -> list[Tensor] | None:
        is_plain = weight.dim() == 2 and not optimizer._store.has_wide(group, weight)
        if not (has_rank(group) and is_plain):
            return super().written_early(optimizer, group, weight, kept)
        return [kept[name] for name in self.fresh[weight].keys() & kept.keys()]  # new bases


class GaLoreAdafactor(LowRankOptimizer, Adafactor):
    """Implements the GaLoreAdafactor algorithm, in groups and formula galore_torch's.

    For a weight ``w`` [M, N] of a group with a ``rank`` r, with gradient ``G``, at step ``t`` = 1,
    2, …; here of the type that projects from the right, by a basis ``B`` [r, N]::

        B = the first r right singular vectors of G      at steps 1, 1 + gap, 1 + 2 * gap, …
        R = G @ B.T                                      [M, r]
        row = (1 - t**decay_rate) * row + t**decay_rate * mean(R**2 + eps1, of each row)
        col = (1 - t**decay_rate) * col + t**decay_rate * mean(R**2 + eps1, of each column)
        u = R / sqrt(row * col / mean(row))
        u = u / max(1, rms(u) / clip_threshold)
        s = max(eps2, rms(w))
        lr = min(1e-2, 1 / sqrt(t))                      with relative_step
        w = w - lr * s * (scale * u @ B + weight_decay * w)

    From the left, ``R = A.T @ G`` [r, N] and the update is ``A @ u`` with the left singular vectors
    ``A`` [M, r]; ``"full"`` does both. `GaLore`_ is the projection; Adafactor is
    ``transformers.Adafactor``, as in :class:`Adafactor`: with a beta1 it is a running average of
    the step size times ``u`` that is projected back. Groups without a rank are :class:`Adafactor`
    of that variant.

    Weights that are projected have at least two dimensions; one of more is the matrix of its first
    one and all others together. The states ``exp_avg_sq_row`` and ``exp_avg_sq_col`` are those of
    the rows and columns of ``R``, and ``exp_avg`` has its shape; ``projector_left`` [M, r] and
    ``projector_right`` [r, N] are the bases; with ``svd="lazy"`` there is the number
    ``gap_doublings`` too, and ``place`` and ``turn`` are those of :class:`GaLoreAdamW`. All are
    float32 beside 16-bit weights. The products of a group with a rank are the library's, and what
    is done to ``R`` is torch's; other groups are one native operation.

    Args:
        params (iterable): iterable of parameters or named_parameters to optimize
            or iterable of dicts defining parameter groups
        lr (float, Tensor, optional): with ``relative_step=False`` the step size, before it is
            scaled; relative steps do not read it. None is 1e-2 (default: None)
        eps (tuple[float, float], optional): eps1, and the least value that counts as the root
            mean square of a weight (default: (1e-30, 1e-3))
        clip_threshold (float, optional): largest root mean square of an update (default: 1.0)
        decay_rate (float, optional): exponent of the decay of the second moments (default: -0.8)
        beta1 (float, optional): coefficient of a running average of the updates; None averages
            nothing (default: None)
        weight_decay (float, optional): decoupled weight decay (default: 0)
        scale_parameter (bool, optional): multiply the step size by the root mean square of the
            weight (default: True)
        relative_step (bool, optional): the step size is ``1 / sqrt(t)``, at most 1e-2
            (default: True)
        warmup_init (bool, optional): with relative_step, 1e-6 times ``t`` is the upper bound
            (default: False)
        max_relative_step (float, optional): upper bound of the relative step size (default: 1e-2)
        rank (int, optional): rank of the projected gradients of a group; None projects
            nothing (default: None)
        update_proj_gap (int, optional): steps from one basis to the next (default: 200)
        scale (float, optional): factor of projected updates (default: 0.25)
        proj_type (str, optional): the side that is projected, as in :class:`GaLoreAdamW`
            (default: "std")
        svd (str, optional): how a basis is made, as in :class:`GaLoreAdamW` (default: "exact")
        stagger (bool, optional): spread the refreshes of a group over the gap (default: False)
        seed (int, optional): of the random numbers of ``svd`` and of ``rounding="stochastic"``
            (default: 0)

    Raises:
        ValueError: if an option is out of range or unknown, ``params`` is empty, or a weight of a
            group with a rank has fewer than two dimensions, a side shorter than the rank, or is a
            DTensor or complex; the error names the parameter.
        RuntimeError: if ``fused=True`` meets ``foreach``, weights that native kernels do not
            update, or a missing native library; at :meth:`step`, before anything is changed, for
            sparse gradients, for NaN and infinite elements in gradients of a group with a rank, and
            for weights there on the meta device.

    Example::

        >>> groups = optim.groups(model, for_="galoreadafactor", rank=128)
        >>> optimizer = optim.GaLoreAdafactor(groups)

    .. _GaLore:
        https://arxiv.org/abs/2403.03507
    """

    _projection = GaLore()
    _strategy_class = _FactoredLowRankSteps
    _rule = Adafactor._rule
    _rule_values = Adafactor._rule_values
    _state_kinds: ClassVar[States] = {**low_rank(Adafactor._state_kinds), **BESIDE_MOMENTS}
    _allocates_first = False
    _takes_shards = False
    _option_kinds: ClassVar[Options] = {
        **Adafactor._option_kinds,
        **GALORE,
        "beta2_decay": Number(before=-0.8, least=None),
        "d": Number(before=1.0),
    }

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor | None = None,
        eps: tuple[float, float] = (1e-30, 1e-3),
        clip_threshold: float = 1.0,
        decay_rate: float = -0.8,
        beta1: float | None = None,
        weight_decay: float = 0.0,
        scale_parameter: bool = True,
        relative_step: bool = True,
        warmup_init: bool = False,
        *,
        max_relative_step: float = LR,
        rank: int | None = None,
        update_proj_gap: int = 200,
        scale: float = 0.25,
        proj_type: str = "std",
        svd: str = "exact",
        stagger: bool = False,
        foreach: bool | None = None,
        maximize: bool = False,
        fused: bool | None = None,
        master_weights: bool | str = False,
        rounding: str | None = None,
        seed: int = 0,
        max_grad_norm: float | None = None,
        skip_nonfinite: bool = False,
    ) -> None:
        own = {k: v for k, v in locals().items() if k not in ("self", "params", "__class__")}
        own = of_a_variant(own)
        check_given_lr(own)
        FusedOptimizer.__init__(self, params, as_set(own))

    def _formula(
        self, group: dict[str, Any], weight: Tensor, grad: Tensor, state: dict[str, Tensor]
    ) -> Tensor:
        bases = {side: state[side] for side in (LEFT, RIGHT) if side in state}
        if not bases:
            return Adafactor._formula(self, group, weight, grad, state)
        numbers = numbers_of(group, weight, state)
        length = length_of(numbers, weight)
        low = project(as_matrix(grad), bases)
        update = factored_update(group, numbers, low, state, length)
        # From the first change of the weight on nothing is allocated.
        matrix = as_matrix(weight)
        between = low.new_empty(size_between({side: each.shape for side, each in bases.items()}))
        if numbers["decay"] != 0:
            matrix.mul_(1 - numbers["decay"] * (length if numbers["decays_by_length"] else 1))
        add_back(matrix, update, bases, 1.0, -group["scale"], between)
        if matrix.data_ptr() != weight.data_ptr():  # strides that no matrix has
            weight.copy_(matrix.view(weight.shape))
        return weight
