from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim.adamax import adamax
from torch.optim.optimizer import ParamsT

from fusedstep._api.base import FusedOptimizer
from fusedstep._api.functional import by_torch
from fusedstep._options.kinds import Options
from fusedstep._options.shared import CAPTURABLE, OF_ADAM, OF_TORCH
from fusedstep._state.kinds import COUNT, States, plain
from fusedstep._step.undo import numbers_first

__all__ = ["Adamax"]


class Adamax(FusedOptimizer):
    r"""Implements the Adamax algorithm, in signature and states :class:`torch.optim.Adamax`.

    For a weight ``w`` with gradient ``g``, at step ``t`` = 1, 2, …::

        g = g + weight_decay * w
        m = beta1 * m + (1 - beta1) * g
        u = max(beta2 * u, abs(g) + eps)
        w = w - lr / (1 - beta1**t) * m / u

    This is algorithm 2 of `Adam: A Method for Stochastic Optimization`_, but for ``eps``.

    Args:
        lr (float, Tensor, optional): learning rate (default: 2e-3)
        betas (tuple[float, float], optional): coefficients of the running average of the
            gradient and of its running maximum (default: (0.9, 0.999))
        eps (float, optional): term added to the gradient's absolute value (default: 1e-8)
        weight_decay (float, optional): weight decay (L2 penalty) (default: 0)

    .. _Adam\: A Method for Stochastic Optimization:
        https://arxiv.org/abs/1412.6980
    """

    _rule = "adamax"
    _state_kinds: ClassVar[States] = {**plain("exp_avg", "exp_inf"), **COUNT}
    _learns_in_int4 = True
    _allocates_first = True
    _torch_fuses = False
    _option_kinds: ClassVar[Options] = {
        **OF_TORCH,
        **CAPTURABLE,
        **OF_ADAM,
    }
    _formula = by_torch(adamax, "exp_avg", "exp_inf", "step")

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 2e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        foreach: bool | None = None,
        *,
        maximize: bool = False,
        differentiable: bool = False,
        capturable: bool = False,
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
        exp_inf, step, decay = state["exp_inf"], state["step"].item() + 1, group["weight_decay"]
        if decay:
            grad = grad.add(weight, alpha=decay)
        beta2_, eps = numbers_first(exp_inf, beta2, group["eps"])
        size = grad.abs().add_(eps)

        state["step"].fill_(step)  # nothing is allocated from here on
        state["exp_avg"].lerp_(grad, 1 - beta1)
        torch.maximum(exp_inf.mul_(beta2_), size, out=exp_inf)
        weight.addcdiv_(state["exp_avg"], exp_inf, value=-lr / (1 - beta1**step))
