from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from fusedstep._api.base import FusedOptimizer
from fusedstep._options.kinds import Flag, Number, Options, as_number
from fusedstep._options.shared import CAPTURABLE, OF_ADAM, OF_TORCH
from fusedstep._state.kinds import COUNT, States, plain

__all__ = ["ADOPT"]


class ADOPT(FusedOptimizer):
    r"""Implements the ADOPT algorithm: Adam that divides by the former gradients' mean square.

    For a weight ``w`` with gradient ``g``, at step ``t`` = 2, 3, …::

        g = g + weight_decay * w
        bound = (t - 1)**clip_exp
        u = clamp(g / max(sqrt(v), eps), -bound, bound)
        m = beta1 * m + (1 - beta1) * u
        w = w - lr * m
        v = beta2 * v + (1 - beta2) * g**2

    The first step sets ``v = g**2`` and leaves the weight as it is. This is algorithm 2 of
    `ADOPT\: Modified Adam Can Converge with Any β2 with the Optimal Rate`_.

    Args:
        lr (float, Tensor, optional): learning rate (default: 1e-3)
        betas (tuple[float | Tensor, float | Tensor], optional): coefficients of the running
            averages of the normalized gradient and of the gradient's square
            (default: (0.9, 0.9999))
        eps (float, optional): the least denominator (default: 1e-6)
        weight_decay (float, optional): weight decay (L2 penalty) (default: 0)
        clip_exp (float, optional): the exponent of the bound; None sets no bound (default: 0.25)
        decoupled_weight_decay (bool, optional): shrink the weights as :class:`AdamW`
            does, instead of adding to the gradient (default: False)

    Example::

        >>> optimizer = optim.ADOPT(model.parameters(), lr=1e-3)

    .. _ADOPT\: Modified Adam Can Converge with Any β2 with the Optimal Rate:
        https://arxiv.org/abs/2411.02853
    """

    _rule = "adopt"
    _state_kinds: ClassVar[States] = {**plain("exp_avg", "exp_avg_sq"), **COUNT}
    _allocates_first = True
    _option_kinds: ClassVar[Options] = {
        **OF_TORCH,
        **CAPTURABLE,
        **OF_ADAM,
        "clip_exp": Number(may_be_none=True),
        "decoupled_weight_decay": Flag(before=False),
    }
    _rule_values: ClassVar[dict[str, Any]] = {
        "clip_exp": lambda group: math.inf if group["clip_exp"] is None else group["clip_exp"],
    }

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.9999),
        eps: float = 1e-6,
        weight_decay: float = 0,
        clip_exp: float | None = 0.25,
        decoupled_weight_decay: bool = False,
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
        decay, decouples = group["weight_decay"], group["decoupled_weight_decay"]
        state["step"] = state["step"] + 1
        former = state["step"].to(weight.device, torch.float64) - 1
        is_later = former > 0
        lr, beta2 = as_number(group["lr"]), is_later.double() * beta2

        if decay != 0 and not decouples:
            grad = grad + decay * weight
        u = grad / state["exp_avg_sq"].sqrt().clamp(min=group["eps"])
        if group["clip_exp"] not in (None, math.inf):
            bound = former ** group["clip_exp"]
            u = torch.minimum(torch.maximum(u, -bound), bound)
        u = torch.where(is_later, u, 0)
        state["exp_avg"] = exp_avg = beta1 * state["exp_avg"] + (1 - beta1) * u
        state["exp_avg_sq"] = beta2 * state["exp_avg_sq"] + (1 - beta2) * grad * grad
        if decay != 0 and decouples:
            weight = weight * (1 - is_later.double() * lr * decay)
        exp_avg = torch.where(is_later, exp_avg, 0)
        # As alpha a number that the weight's dtype lacks is an error.
        return weight - lr * exp_avg if isinstance(lr, Tensor) else weight.sub(exp_avg, alpha=lr)
