from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim.nadam import nadam
from torch.optim.optimizer import ParamsT

from fusedstep._api.base import FusedOptimizer
from fusedstep._api.functional import by_torch
from fusedstep._options.kinds import Flag, Number, Options
from fusedstep._options.shared import CAPTURABLE, OF_ADAM, OF_TORCH
from fusedstep._state.kinds import COUNT, State, States, plain
from fusedstep._step.undo import numbers_first

__all__ = ["NAdam"]


class NAdam(FusedOptimizer):
    """Implements the NAdam algorithm, in signature and states :class:`torch.optim.NAdam`.

    For a weight ``w`` with gradient ``g``, at step ``t`` = 1, 2, …::

        g = g + weight_decay * w
        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * g**2
        mu, mu_next = (beta1 * (1 - 0.96**(i * momentum_decay) / 2) for i in (t, t + 1))
        mu_product = mu_product * mu            # starts at 1
        u = mu_next * m / (1 - mu_product * mu_next) + (1 - mu) * g / (1 - mu_product)
        w = w - lr * u / (sqrt(v / (1 - beta2**t)) + eps)

    This is algorithm 2 of `Incorporating Nesterov Momentum into Adam`_.

    Args:
        lr (float, Tensor, optional): learning rate (default: 2e-3)
        betas (tuple[float, float], optional): coefficients of the running averages of the
            gradient and its square (default: (0.9, 0.999))
        eps (float, optional): term added to the denominator (default: 1e-8)
        weight_decay (float, optional): weight decay (L2 penalty) (default: 0)
        momentum_decay (float, optional): how fast the momentum approaches ``beta1``
            (default: 4e-3)
        decoupled_weight_decay (bool, optional): shrink the weights as :class:`AdamW`
            does, instead of adding to the gradient (default: False)

    .. _Incorporating Nesterov Momentum into Adam:
        https://openreview.net/forum?id=OM0jvwB8jIp57ZJjtNEZ
    """

    _rule = "nadam"
    _state_kinds: ClassVar[States] = {
        **plain("exp_avg", "exp_avg_sq"),
        **COUNT,
        "mu_product": State(start=1.0, is_number=True),
    }
    _learns_in_int4 = True
    _allocates_first = True
    _torch_fuses = False
    _option_kinds: ClassVar[Options] = {
        **OF_TORCH,
        **CAPTURABLE,
        **OF_ADAM,
        "momentum_decay": Number(),
        "decoupled_weight_decay": Flag(before=False),
    }
    _formula = by_torch(nadam, "exp_avg", "exp_avg_sq", "mu_product", "step")

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 2e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        momentum_decay: float = 4e-3,
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

    def _imperative(
        self, group: dict[str, Any], weight: Tensor, grad: Tensor, state: dict[str, Tensor]
    ) -> None:
        lr, (beta1, beta2) = float(group["lr"]), map(float, group["betas"])
        exp_avg, exp_avg_sq = state["exp_avg"], state["exp_avg_sq"]
        step, decay = state["step"].item() + 1, float(group["weight_decay"])
        mu, mu_next = (
            beta1 * (1 - 0.5 * 0.96 ** (count * group["momentum_decay"]))
            for count in (step, step + 1)
        )
        product = (state["mu_product"] * mu).item()

        numbers = 1 - lr * decay, beta2, 1 - beta2**step, group["eps"]
        keep, beta2_, bias2, eps = numbers_first(exp_avg, *numbers)
        denom = torch.empty_like(exp_avg_sq)
        if decay and not group["decoupled_weight_decay"]:
            grad = grad.add(weight, alpha=decay)

        state["step"].fill_(step)  # nothing is allocated from here on
        state["mu_product"].fill_(product)
        if decay and group["decoupled_weight_decay"]:
            weight.mul_(keep)
        exp_avg.lerp_(grad, 1 - beta1)
        exp_avg_sq.mul_(beta2_).addcmul_(grad, grad, value=1 - beta2)
        torch.div(exp_avg_sq, bias2, out=denom).sqrt_().add_(eps)
        weight.addcdiv_(grad, denom, value=-lr * (1 - mu) / (1 - product))
        weight.addcdiv_(exp_avg, denom, value=-lr * mu_next / (1 - product * mu_next))
