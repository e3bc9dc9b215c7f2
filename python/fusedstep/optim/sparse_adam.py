from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from fusedstep._api.base import FusedOptimizer
from fusedstep._options.kinds import Betas, Number, Options, floats
from fusedstep._options.shared import EPSILON, SHARED
from fusedstep._state.checks import name_of
from fusedstep._state.kinds import COUNT, Group, States, plain
from fusedstep._step.owner import Owner
from fusedstep._step.strategy import Strategy
from fusedstep.optim.adam import Adam

__all__ = ["SparseAdam"]


class _OfSparse(Strategy):
    """Takes sparse gradients alone."""

    def launches(
        self, optimizer: Owner, index: int, group: Group, weights: list[Tensor], grads: list[Tensor]
    ) -> Iterable[tuple[list[Tensor], list[Tensor]]]:
        if any(grad.layout is torch.strided for grad in grads):
            raise RuntimeError(
                "SparseAdam does not support dense gradients, please consider Adam instead"
            )
        return super().launches(optimizer, index, group, weights, grads)


class SparseAdam(FusedOptimizer):
    """Implements the SparseAdam algorithm.

    Signature and states are those of :class:`torch.optim.SparseAdam`. Of a weight with a sparse
    gradient only the rows that it has entries for are read and written: their moments stand still
    while they have none. For such a row ``w`` with the sum ``g`` of its entries, at step ``t`` = 1,
    2, … of the weight::

        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * g**2
        w = (1 - lr * weight_decay) * w
        w = w - lr * sqrt(1 - beta2**t) / (1 - beta1**t) * m / (sqrt(v) + eps)

    This is `Adam`_ in the order of its section 2, row by row.

    Weights are dense, of the native dtypes and in any layout; all gradients must be sparse. Entries
    for the same row are added up by the step. On a GPU torch operations step weight by weight. The
    states ``exp_avg`` and ``exp_avg_sq`` have the weight's dtype and dimension order; ``step`` is a
    0-dimensional float32 tensor.

    Args:
        lr (float, Tensor, optional): learning rate (default: 1e-3)
        betas (tuple[float, float], optional): coefficients of the running averages of the
            gradient and its square (default: (0.9, 0.999))
        eps (float, optional): term added to the denominator (default: 1e-8)
        weight_decay (float, optional): decoupled weight decay of the rows that have entries
            (default: 0)

    Example::

        >>> embedding = torch.nn.Embedding(10**6, 64, sparse=True)
        >>> optimizer = optim.SparseAdam(embedding.parameters(), lr=1e-3)
        >>> loss_fn(model(embedding(input)), target).backward()
        >>> optimizer.step(zero_grad="none")

    .. _Adam:
        https://arxiv.org/abs/1412.6980
    """

    _rule = Adam._rule
    _against_sparse = None
    _strategy_class = _OfSparse
    _native_devices = ("cpu",)
    _rule_values: ClassVar[dict[str, Any]] = Adam._rule_values | {
        "amsgrad": False,
        "decoupled_weight_decay": True,
        "eps_before_bias": True,
        "weight_decay": lambda group: group.get("weight_decay", 0.0),
    }
    _state_kinds: ClassVar[States] = {**plain("exp_avg", "exp_avg_sq"), **COUNT}
    _composite = True
    _takes_dense = False
    _torch_fuses = False
    _option_kinds: ClassVar[Options] = {
        **SHARED,
        "betas": Betas(),
        "eps": EPSILON,
        "weight_decay": Number(unset=0.0),
    }

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        maximize: bool = False,
        *,
        fused: bool | None = None,
        weight_decay: float = 0.0,
        max_grad_norm: float | None = None,
        skip_nonfinite: bool = False,
    ) -> None:
        super().__init__(params, locals())

    def _check_group(self, index: int, group: dict[str, Any]) -> None:
        for place, weight in enumerate(group["params"]):
            if weight.is_sparse or weight.is_complex():
                name, kind = (
                    name_of(group, index, place),
                    "sparse" if weight.is_sparse else "complex",
                )
                raise ValueError(f"SparseAdam does not support {kind} parameters: {name} is one")

    def _imperative(
        self, group: dict[str, Any], weight: Tensor, grad: Tensor, state: dict[str, Tensor]
    ) -> None:
        lr, (beta1, beta2) = float(group["lr"]), floats(self._option_kinds, group)
        state["step"] += 1
        step = state["step"].item()
        length = lr * math.sqrt(1 - beta2**step) / (1 - beta1**step)
        grad = grad.coalesce()  # the update is not linear: one value an index
        rows, values = tuple(grad.indices()), grad.values()
        exp_avg = state["exp_avg"][rows].lerp_(values, 1 - beta1)
        exp_avg_sq = state["exp_avg_sq"][rows].mul_(beta2).addcmul_(values, values, value=1 - beta2)
        state["exp_avg"][rows], state["exp_avg_sq"][rows] = exp_avg, exp_avg_sq
        kept = weight[rows].mul_(1 - lr * group.get("weight_decay", 0.0))
        weight[rows] = kept.addcdiv_(exp_avg, exp_avg_sq.sqrt().add_(group["eps"]), value=-length)
