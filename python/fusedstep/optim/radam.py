from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT
from torch.optim.radam import radam

from fusedstep._api.base import FusedOptimizer
from fusedstep._api.functional import by_torch
from fusedstep._options.kinds import Flag, Options
from fusedstep._options.shared import CAPTURABLE, OF_ADAM, OF_TORCH
from fusedstep._state.kinds import COUNT, States, plain
from fusedstep._step.undo import numbers_first

__all__ = ["RAdam"]


class RAdam(FusedOptimizer):
    """Implements the RAdam algorithm, in signature and states :class:`torch.optim.RAdam`.

    For a weight ``w`` with gradient ``g``, at step ``t`` = 1, 2, …::

        g = g + weight_decay * w
        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * g**2
        rho = rho_inf - 2 * t * beta2**t / (1 - beta2**t)      # rho_inf = 2 / (1 - beta2) - 1
        if rho > 5:
            r = sqrt((rho - 4) * (rho - 2) * rho_inf / ((rho_inf - 4) * (rho_inf - 2) * rho))
            u = r * sqrt(1 - beta2**t) / (sqrt(v) + eps)
        else:
            u = 1
        w = w - lr / (1 - beta1**t) * m * u

    This is algorithm 2 of `On the Variance of the Adaptive Learning Rate and Beyond`_.

    Args:
        lr (float, Tensor, optional): learning rate (default: 1e-3)
        betas (tuple[float, float], optional): coefficients of the running averages of the
            gradient and its square (default: (0.9, 0.999))
        eps (float, optional): term added to the denominator (default: 1e-8)
        weight_decay (float, optional): weight decay (L2 penalty) (default: 0)
        decoupled_weight_decay (bool, optional): shrink the weights as :class:`AdamW`
            does, instead of adding to the gradient (default: False)

    .. _On the Variance of the Adaptive Learning Rate and Beyond:
        https://arxiv.org/abs/1908.03265
    """

    _rule = "radam"
    _state_kinds: ClassVar[States] = {**plain("exp_avg", "exp_avg_sq"), **COUNT}
    _learns_in_int4 = True
    _allocates_first = True
    _torch_fuses = False
    _option_kinds: ClassVar[Options] = {
        **OF_TORCH,
        **CAPTURABLE,
        **OF_ADAM,
        "decoupled_weight_decay": Flag(before=False),
    }
    _formula = by_torch(radam, "exp_avg", "exp_avg_sq", "step")

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
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
        bias2 = 1 - beta2**step
        longest = 2 / (1 - beta2) - 1
        length = longest - 2 * step * beta2**step / bias2
        rectifies = length > 5
        rectification = 1.0
        if rectifies:
            ahead, behind = (length - 4) * (length - 2), (longest - 4) * (longest - 2)
            rectification = (ahead * longest / (behind * length)) ** 0.5

        numbers = lr, 1 - lr * decay, beta2, 1 - beta1**step, group["eps"], bias2**0.5
        lr_, keep, beta2_, bias1, eps, root = numbers_first(exp_avg, *numbers)
        (rectification_,) = numbers_first(exp_avg, rectification)
        update, denom = torch.empty_like(exp_avg), torch.empty_like(exp_avg_sq)
        if decay and not group["decoupled_weight_decay"]:
            grad = grad.add(weight, alpha=decay)

        state["step"].fill_(step)  # nothing is allocated from here on
        if decay and group["decoupled_weight_decay"]:
            weight.mul_(keep)
        exp_avg.lerp_(grad, 1 - beta1)
        exp_avg_sq.mul_(beta2_).addcmul_(grad, grad, value=1 - beta2)
        torch.div(exp_avg, bias1, out=update).mul_(lr_)
        if rectifies:
            torch.sqrt(exp_avg_sq, out=denom).add_(eps).reciprocal_().mul_(root)
            update.mul_(denom).mul_(rectification_)
        weight.sub_(update)
