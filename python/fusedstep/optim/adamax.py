from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim.adamax import adamax
from torch.optim.optimizer import ParamsT

from fusedstep.optim._base import FusedOptimizer

__all__ = ["Adamax"]


class Adamax(FusedOptimizer):
    r"""Implements the Adamax algorithm, in signature and states :class:`torch.optim.Adamax`.

    For a weight ``w`` with gradient ``g``, at step ``t`` = 1, 2, …::

        g = g + weight_decay * w
        m = beta1 * m + (1 - beta1) * g
        u = max(beta2 * u, abs(g) + eps)
        w = w - lr / (1 - beta1**t) * m / u

    In the usual notation

    .. math::
        \begin{aligned}
            g_t      &\leftarrow g_t + \lambda \theta_{t-1}                                   \\
            m_t      &= \beta_1 m_{t-1} + (1 - \beta_1) g_t                                   \\
            u_t      &= \max(\beta_2 u_{t-1}, |g_t| + \epsilon)                               \\
            \theta_t &= \theta_{t-1} - \frac{\gamma}{1 - \beta_1^t} \, \frac{m_t}{u_t}
        \end{aligned}

    with gradient :math:`g_t` (negated if maximizing), ``lr`` :math:`\gamma`, ``betas``
    :math:`\beta`, ``eps`` :math:`\epsilon` and ``weight_decay`` :math:`\lambda`. This is algorithm
    2 of `Adam: A Method for Stochastic Optimization`_, but for ``eps``.

    Weights may have any shape and strides (transposed, channels-last, sliced), as may their
    gradients; of a gradient only the shape, dtype and device must be the weight's. The native
    kernels update float32, float64, bfloat16 and float16 weights on the CPU or a CUDA device;
    ``exp_avg`` and ``exp_inf`` have the weight's dtype and dimension order, ``step`` is a
    0-dimensional float32 tensor. bfloat16 and float16 are computed in float32 natively, and in
    their own precision with ``fused=False``.

    Args:
        params (iterable): iterable of parameters or named_parameters to optimize
            or iterable of dicts defining parameter groups
        lr (float, Tensor, optional): learning rate (default: 2e-3)
        betas (tuple[float, float], optional): coefficients of the running average of the
            gradient and of its running maximum (default: (0.9, 0.999))
        eps (float, optional): term added to the gradient's absolute value (default: 1e-8)
        weight_decay (float, optional): weight decay (L2 penalty) (default: 0)

    Example::

        >>> optimizer = optim.Adamax(model.parameters(), lr=2e-3)
        >>> optimizer.zero_grad()
        >>> loss_fn(model(input), target).backward()
        >>> optimizer.step()

    .. _Adam\: A Method for Stochastic Optimization:
        https://arxiv.org/abs/1412.6980
    """

    _rule = "adamax"
    _torch_fuses = False
    _later_options = FusedOptimizer._later_options | {"capturable": False}

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
        state_dtype: torch.dtype | None = None,
        master_weights: bool = False,
        max_grad_norm: float | None = None,
    ) -> None:
        options = {
            "lr": lr,
            "eps": eps,
            "betas": betas,
            "weight_decay": weight_decay,
            "foreach": foreach,
            "maximize": maximize,
            "differentiable": differentiable,
            "capturable": capturable,
            "fused": fused,
            "state_dtype": state_dtype,
            "master_weights": master_weights,
            "max_grad_norm": max_grad_norm,
        }
        super().__init__(params, options)

    def _state_names(self, group: dict[str, Any]) -> tuple[str, ...]:
        return "exp_avg", "exp_inf"

    def _sparse_error(self, group: dict[str, Any]) -> str | None:
        return "Adamax does not support sparse gradients"

    def _formula(
        self, group: dict[str, Any], weight: Tensor, grad: Tensor, state: dict[str, Tensor]
    ) -> Tensor:
        beta1, beta2 = group["betas"]
        adamax(
            [weight],
            [grad],
            [state["exp_avg"]],
            [state["exp_inf"]],
            [state["step"]],
            foreach=False,
            maximize=False,
            differentiable=group["differentiable"],
            capturable=group["capturable"],
            eps=group["eps"],
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
        )
        return weight
