from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim.adam import adam
from torch.optim.optimizer import ParamsT

from fusedstep._api.base import FusedOptimizer
from fusedstep._api.functional import by_torch
from fusedstep._options.kinds import Flag, Options
from fusedstep._options.shared import CAPTURABLE, OF_ADAM, OF_TORCH
from fusedstep._state.kinds import COUNT, State, States, plain
from fusedstep._step.undo import numbers_first

__all__ = ["Adam"]


class Adam(FusedOptimizer):
    r"""Implements the Adam algorithm, in signature and states :class:`torch.optim.Adam`.

    For a weight ``w`` with gradient ``g``, at step ``t`` = 1, 2, …::

        g = g + weight_decay * w
        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * g**2
        w = w - lr / (1 - beta1**t) * m / (sqrt(v / (1 - beta2**t)) + eps)

    With ``amsgrad`` the largest ``v`` so far takes its place in the last line. This is algorithm 1
    of `Adam: A Method for Stochastic Optimization`_.

    Args:
        lr (float, Tensor, optional): learning rate (default: 1e-3)
        betas (tuple[float | Tensor, float | Tensor], optional): coefficients of the
            running averages of the gradient and its square (default: (0.9, 0.999))
        eps (float, optional): term added to the denominator (default: 1e-8)
        weight_decay (float, optional): weight decay (L2 penalty) (default: 0)
        amsgrad (bool, optional): divide by the largest second moment so far, as in
            `On the Convergence of Adam and Beyond`_ (default: False)
        decoupled_weight_decay (bool, optional): shrink the weights as :class:`AdamW`
            does, instead of adding to the gradient (default: False)

    .. _Adam\: A Method for Stochastic Optimization:
        https://arxiv.org/abs/1412.6980
    .. _On the Convergence of Adam and Beyond:
        https://openreview.net/forum?id=ryQu7f-RZ
    """

    _rule = "adam"
    _against_sparse = "Adam does not support sparse gradients, please consider SparseAdam instead"
    _rule_values: ClassVar[dict[str, Any]] = {
        "eps_before_bias": False,
        "correct_bias": True,
        "decay_last": False,
    }
    _state_kinds: ClassVar[States] = {
        **plain("exp_avg", "exp_avg_sq"),
        "max_exp_avg_sq": State(needs="amsgrad"),
        **COUNT,
    }
    _learns_in_int4 = True
    _option_kinds: ClassVar[Options] = {
        **OF_TORCH,
        **CAPTURABLE,
        **OF_ADAM,
        "amsgrad": Flag(before=False),
        "decoupled_weight_decay": Flag(before=False),
    }
    _allocates_first = True
    _formula = by_torch(adam, "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "step")

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        amsgrad: bool = False,
        *,
        foreach: bool | None = None,
        maximize: bool = False,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        decoupled_weight_decay: bool = False,
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

        # All memory first: without it nothing is written.
        root = (1 - beta2**step) ** 0.5
        keep, beta2_, root_, eps = numbers_first(exp_avg, 1 - lr * decay, beta2, root, group["eps"])
        denom = torch.empty_like(exp_avg_sq)
        if decay and not group["decoupled_weight_decay"]:
            grad = grad.add(weight, alpha=decay)

        state["step"].fill_(step)
        if decay and group["decoupled_weight_decay"]:
            weight.mul_(keep)
        exp_avg.lerp_(grad, 1 - beta1)
        exp_avg_sq.mul_(beta2_).addcmul_(grad, grad, value=1 - beta2)
        if group["amsgrad"]:
            largest = state["max_exp_avg_sq"]
            exp_avg_sq = torch.maximum(largest, exp_avg_sq, out=largest)
        torch.sqrt(exp_avg_sq, out=denom).div_(root_).add_(eps)
        weight.addcdiv_(exp_avg, denom, value=-lr / (1 - beta1**step))
