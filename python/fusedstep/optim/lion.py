from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from fusedstep._api.base import FusedOptimizer
from fusedstep._options.kinds import Betas, Number, Options, as_number
from fusedstep._options.shared import CAPTURABLE, OF_TORCH
from fusedstep._state.kinds import States, plain

__all__ = ["Lion"]


class Lion(FusedOptimizer):
    """Implements the Lion algorithm.

    For a weight ``w`` with gradient ``g``::

        w = (1 - lr * weight_decay) * w - lr * sign(beta1 * m + (1 - beta1) * g)
        m = beta2 * m + (1 - beta2) * g

    This is algorithm 2 of `Symbolic Discovery of Optimization Algorithms`_. Every element moves by
    ``lr``, so that learning rates are three to ten times smaller, and weight decays as much larger,
    than with :class:`AdamW`.

    Args:
        lr (float, Tensor, optional): learning rate (default: 1e-4)
        betas (tuple[float | Tensor, float | Tensor], optional): share of the running average of
            the gradient in the update, and coefficient of that average (default: (0.9, 0.99))
        weight_decay (float, optional): decoupled weight decay (default: 0)

    Example::

        >>> optimizer = optim.Lion(model.parameters(), lr=1e-4, weight_decay=0.1)

    .. _Symbolic Discovery of Optimization Algorithms:
        https://arxiv.org/abs/2302.06675
    """

    _rule = "lion"
    _state_kinds: ClassVar[States] = plain("exp_avg")
    _allocates_first = True
    _option_kinds: ClassVar[Options] = {
        **OF_TORCH,
        **CAPTURABLE,
        "betas": Betas(),
        "weight_decay": Number(),
    }

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-4,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.99),
        weight_decay: float = 0,
        *,
        foreach: bool | None = None,
        maximize: bool = False,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        state_dtype: torch.dtype | str | None = None,
        master_weights: bool | str = False,
        rounding: str | None = None,
        seed: int = 0,
        max_grad_norm: float | None = None,
        skip_nonfinite: bool = False,
    ) -> None:
        super().__init__(params, locals())

    def _formula(
        self, group: dict[str, Any], weight: Tensor, grad: Tensor, state: dict[str, Tensor]
    ) -> Tensor:
        beta1, beta2 = group["betas"]
        lr, exp_avg = as_number(group["lr"]), state["exp_avg"]
        direction = (beta1 * exp_avg + (1 - beta1) * grad).sign()
        state["exp_avg"] = beta2 * exp_avg + (1 - beta2) * grad
        if group["weight_decay"] != 0:
            weight = weight * (1 - lr * group["weight_decay"])
        return weight - lr * direction
