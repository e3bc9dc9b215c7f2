from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from fusedstep._api.base import FusedOptimizer
from fusedstep._matrix.muon_groups import (
    ADAMW_RULE,
    MUON,
    MUON_OWN,
    as_adamw,
    check_muon_options,
    is_of_muon,
    rows_shape,
    uses_muon,
)
from fusedstep._matrix.muon_optimizer import MuonOptimizer
from fusedstep._matrix.muon_steps import MuonSteps
from fusedstep._options.kinds import Options, check_ranges
from fusedstep._options.shared import SHARED
from fusedstep._state.kinds import State, States
from fusedstep.optim.adam import Adam

__all__ = ["Muon"]


def _is_of_adamw(group: dict[str, Any], shape: torch.Size) -> bool:
    return not uses_muon(group)


class Muon(MuonOptimizer, Adam):
    """Implements the Muon algorithm, in signature and states :class:`torch.optim.Muon`.

    For a matrix ``w`` with gradient ``g``::

        m = momentum * m + (1 - momentum) * g
        u = momentum * m + (1 - momentum) * g           (m itself without nesterov)
        x = u / max(norm(u), eps)
        x = a * x + b * (x x') x + c * (x x')**2 x      (ns_steps times)
        w = (1 - lr * weight_decay) * w
        w = w - lr * sqrt(max(1, rows / columns)) * x

    ``a``, ``b`` and ``c`` are ``ns_coefficients``: the iteration takes all singular values to the
    neighbourhood of 1. This is Keller Jordan's `Muon`_; ``adjust_lr_fn="match_rms_adamw"`` has the
    factor ``0.2 * sqrt(max(rows, columns))`` of equation 4 of `Muon is Scalable for LLM Training`_
    in place of the root, and ``"spectral_unclamped"`` has ``sqrt(rows / columns)``, which is below
    1 for wide matrices, of `Deriving Muon`_.

    With ``ns_start="aol"`` the rows of x are scaled before the first step, as `Turbo-Muon`_ does;
    the columns of a tall matrix, as the rows of its transpose::

        s = sum(abs(x x'), of each row)
        x = x / sqrt(max(s, 2**-20 / rows))

    No singular value is above 1 then, and most are larger than before: they are nearer to 1 after
    as many steps. The result belongs to the scaled matrix, whose singular vectors are others. Rows
    of zeros stay zeros; rows far below the others, of 2**-10 of the root mean square, stay short.

    With ``rank_fraction`` a step orthogonalises a part of each matrix, as `Dion2`_ does::

        m = m + g
        i = the k rows with the largest L1 norms of m   (columns, if these are fewer)
        u = m[i]
        m[i] = momentum * m[i]
        w = (1 - lr * weight_decay) * w
        w[i] = w[i] - lr * factor * x                   (x and factor as above, of u and of w)

    ``k`` is ``ceil(rank_fraction * rows)``. Of equal norms the first row is taken. On shards the
    choice is that of the whole matrix: it depends on neither device nor number of processes.
    ``nesterov`` counts for nothing. Products have ``rank_fraction**2`` of their operations or less.
    With ``normuon`` a step chooses rows of every matrix, as NorDion2 does, and takes the averages
    of these rows forward.

    Groups with ``use_muon=False`` are stepped by :class:`AdamW`, natively, in the same step:
    embeddings, the last layer, biases and the weights of norms. They take ``betas``, and have the
    states ``exp_avg``, ``exp_avg_sq`` and ``step``; ``lr``, ``weight_decay`` and ``eps`` mean
    AdamW's there.

    Weights have two dimensions or more. Those of three are stacks of matrices, [experts, M, N];
    those of more, as of convolutions, are flattened to [out, rest]: ``stacked`` says otherwise.
    They may have any strides, and be float32, float64, bfloat16 or float16 on any device;
    ``momentum_buffer`` has the weight's dtype and dimension order. Matrices of one shape go through
    the iteration together, in memory that the optimizer keeps. A gradient with a NaN makes NaN of
    its own matrix, and of no other. Of sharded DTensors each matrix is gathered to one process,
    which computes it for all.

    Args:
        params (iterable): iterable of parameters or named_parameters to optimize
            or iterable of dicts defining parameter groups
        lr (float, Tensor, optional): learning rate (default: 1e-3)
        weight_decay (float, optional): decoupled weight decay (default: 0.1)
        momentum (float, optional): coefficient of the running average of the gradient
            (default: 0.95)
        nesterov (bool, optional): the update is the average after the gradient was added once
            more; False takes the average itself (default: True)
        ns_coefficients (tuple or str, optional): a, b and c of all steps, a tuple of such triples,
            of which the last is repeated, or a name: ``"quintic"``, which is the default, or
            ``"polar_express"``, those of `The Polar Express`_
            (default: (3.4445, -4.775, 2.0315))
        eps (float, optional): lower bound of the norm that the update is divided by; in groups of
            AdamW the term added to the denominator, there ``adamw_eps`` by default (default: 1e-7)
        ns_steps (int, optional): steps of the iteration, below 100 (default: 5)
        adjust_lr_fn (str, optional): "original", "match_rms_adamw" or "spectral_unclamped": the
            factor of the learning rate; None is "original" (default: None)
        use_muon (bool, optional): False makes a group AdamW's (default: True)
        split_heads (int, optional): number of equal blocks of rows that are orthogonalised
            separately: 3 for the weight of a layer that computes query, key and value, not the
            number of heads (default: 1)
        split_sizes (tuple[int, ...], optional): numbers of rows that are orthogonalised separately,
            each with a norm and a factor of its own: those of query, key and value in one weight,
            as (4096, 1024, 1024) of grouped queries. Their sum is the number of the matrix's rows.
            With ``split_heads`` each of these parts has so many equal blocks (default: None)
        stacked (bool, optional): True takes the last two dimensions for those of a matrix, False
            flattens all but the first; None is True for weights of three dimensions alone
            (default: None)
        ns_dtype (torch.dtype, optional): of the products: torch.bfloat16, torch.float16,
            torch.float32 or torch.float64; None is float16 on GPUs of compute capability 9.0,
            float32 on CPUs without instructions for bfloat16, and bfloat16 elsewhere
            (default: None)
        ns_start (str, optional): "norm" begins the iteration with the update divided by its norm;
            "aol" scales the update's rows or columns as well, see above. Turbo-Muon has
            ``ns_steps=4`` with it, and trains a small GPT a little worse then than 5 steps do
            without it (default: "norm")
        cautious_decay (bool, optional): decay only elements that the update makes smaller, as
            `Cautious Weight Decay`_ does (default: False)
        normuon (bool, optional): give the rows of an update one size, as `NorMuon`_ does: each is
            divided by the root of a running average of its mean square, which is kept in the state
            ``second_momentum_buffer``, and the matrix is given its norm of before. States are
            float32 then beside 16-bit weights (default: False)
        rank_fraction (float, optional): update this fraction of the rows, or of the columns if
            these are fewer, as `Dion2`_ does: those with the largest L1 norms of ``m``, above 0 and
            up to 1; see above (default: None)
        beta2 (float, optional): coefficient of that average (default: 0.95)
        betas (tuple[float, float], optional): of AdamW (default: (0.9, 0.999))
        adamw_eps (float, optional): eps of groups with ``use_muon=False`` that have none of their
            own (default: 1e-8)
        fused (bool, optional): False steps matrix by matrix in plain torch operations; True and
            None take matrices together, and native kernels for groups of AdamW (default: None)

    Raises:
        ValueError: if a hyper-parameter is out of range, ``params`` is empty, or a group of Muon
            has a weight of fewer than two dimensions, one that is complex, one whose rows
            ``split_heads`` does not divide or ``split_sizes`` does not add up to, or a DTensor that
            is no shard along one dimension of a mesh.
        RuntimeError: at :meth:`step`, before anything is changed, for sparse gradients, weights
            that overlap themselves in memory, and shards with a gradient in some processes only.

    Example::

        >>> groups = optim.groups(model, for_="muon", others={"lr": 3e-4})
        >>> print(groups)
        >>> optimizer = optim.Muon(groups, lr=0.02)
        >>> optimizer.zero_grad()
        >>> loss_fn(model(input), target).backward()
        >>> optimizer.step()

    .. _Muon:
        https://kellerjordan.github.io/posts/muon/
    .. _Muon is Scalable for LLM Training:
        https://arxiv.org/abs/2502.16982
    .. _Deriving Muon:
        https://jeremybernste.in/writing/deriving-muon
    .. _The Polar Express:
        https://arxiv.org/abs/2505.16932
    .. _Turbo-Muon:
        https://arxiv.org/abs/2512.04632
    .. _NorMuon:
        https://arxiv.org/abs/2510.05491
    .. _Dion2:
        https://arxiv.org/abs/2512.16928
    .. _Cautious Weight Decay:
        https://arxiv.org/abs/2510.12402
    """

    _state_kinds: ClassVar[States] = {
        "momentum_buffer": State(of=is_of_muon, is_signed=True),
        "second_momentum_buffer": State(of=is_of_muon, needs="normuon", shape=rows_shape),
        "exp_avg": State(of=_is_of_adamw),
        "exp_avg_sq": State(of=_is_of_adamw),
        "step": State(of=_is_of_adamw, is_number=True),
    }
    _learns_in_int4 = False
    _elementwise = False
    _torch_fuses = False
    _option_kinds: ClassVar[Options] = {**SHARED, **MUON}
    _rule_values = Adam._rule_values | ADAMW_RULE
    _strategy_class = MuonSteps
    _by_dimensions = ({}, {"use_muon": False})
    _other = "AdamW"
    _against_sparse = "Muon does not support sparse gradients"

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: Any = (3.4445, -4.7750, 2.0315),
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        *,
        use_muon: bool = True,
        split_heads: int = 1,
        split_sizes: tuple[int, ...] | None = None,
        stacked: bool | None = None,
        ns_dtype: torch.dtype | None = None,
        ns_start: str = "norm",
        cautious_decay: bool = False,
        normuon: bool = False,
        rank_fraction: float | None = None,
        beta2: float = 0.95,
        betas: tuple[float, float] = (0.9, 0.999),
        adamw_eps: float = 1e-8,
        maximize: bool = False,
        fused: bool | None = None,
        state_dtype: torch.dtype | str | None = None,
        master_weights: bool | str = False,
        rounding: str | None = None,
        seed: int = 0,
        max_grad_norm: float | None = None,
        skip_nonfinite: bool = False,
    ) -> None:
        FusedOptimizer.__init__(self, params, locals())

    # Options

    def _check(self, options: dict[str, Any]) -> None:
        check_muon_options(options)
        FusedOptimizer._check(self, options)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        of = self._own_options | self.defaults
        if not param_group.get("use_muon", of["use_muon"]):
            param_group = {"betas": of["betas"], "eps": of["adamw_eps"]} | param_group
        super().add_param_group(param_group)

    def _as_other(self, group: dict[str, Any]) -> dict[str, Any]:
        return as_adamw(group)

    def _check_group(self, index: int, group: dict[str, Any]) -> None:
        super()._check_group(index, group)
        if not uses_muon(group):
            options = {"betas": MUON_OWN["betas"]} | {
                name: group[name] for name in ("betas", "eps") if name in group
            }
            check_ranges(self._option_kinds, options, tensors=True)
