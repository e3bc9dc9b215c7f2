from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.optim.adam import adam
from torch.optim.optimizer import ParamsT

from fusedstep.optim._base import FusedOptimizer
from fusedstep.optim._checks import (
    as_number,
    check_at_least_zero,
    check_betas,
    check_eps,
    check_lr,
    check_state_dtype,
)
from fusedstep.optim._dtensor import whole

__all__ = ["Lamb"]


class Lamb(FusedOptimizer):
    r"""Implements the LAMB algorithm: Adam's direction, scaled for each weight by a trust ratio.

    .. math::
        \begin{aligned}
            m_t      &= \beta_1 m_{t-1} + (1 - \beta_1) g_t                                   \\
            v_t      &= \beta_2 v_{t-1} + (1 - \beta_2) g_t^2                                 \\
            u_t      &= \frac{m_t / (1 - \beta_1^t)}
                             {\sqrt{v_t / (1 - \beta_2^t)} + \epsilon} + \lambda \theta_{t-1} \\
            r_t      &= \lVert \theta_{t-1} \rVert_2 \, / \, \lVert u_t \rVert_2
                        \quad (1 \text{ where either norm is } 0)                             \\
            \theta_t &= \theta_{t-1} - \gamma \, r_t \, u_t
        \end{aligned}

    with gradient :math:`g_t` (negated if maximizing), ``lr`` :math:`\gamma`, ``betas``
    :math:`\beta`, ``eps`` :math:`\epsilon` and ``weight_decay`` :math:`\lambda`. This is algorithm
    2 of `Large Batch Optimization for Deep Learning: Training BERT in 76 minutes`_, with
    :math:`\phi(z) = z`.

    Weights may have any shape and strides (transposed, channels-last, sliced), as may their
    gradients; of a gradient only the shape, dtype and device must be the weight's. The native
    kernels update float32, float64, bfloat16 and float16 weights on the CPU; ``exp_avg`` and
    ``exp_avg_sq`` have the weight's dtype and dimension order, ``step`` is a 0-dimensional float32
    tensor. bfloat16 and float16 are computed in float32 natively, and in their own precision with
    ``fused=False``.

    .. note::
        The native step keeps :math:`u_t` in the gradient's memory, and so leaves it in ``.grad``.
        ``keep_grad=True`` leaves ``.grad`` as it was, and computes :math:`u_t` twice. Gradients
        that cannot hold it (expanded, sharing memory, bfloat16 or float16) are always left alone.

    Args:
        params (iterable): iterable of parameters or named_parameters to optimize
            or iterable of dicts defining parameter groups
        lr (float, Tensor, optional): learning rate (default: 1e-3)
        betas (tuple[float | Tensor, float | Tensor], optional): coefficients of the
            running averages of the gradient and its square (default: (0.9, 0.999))
        eps (float, optional): term added to the denominator (default: 1e-8)
        weight_decay (float, optional): weight decay, as part of the update whose norm
            is taken (default: 0)
        foreach (bool, optional): True asks for plain torch operations, weight by
            weight, as ``fused=False`` does (default: None)
        maximize (bool, optional): maximize the objective instead of minimizing it
            (default: False)
        capturable (bool, optional): keep the step count on the weight's device, so
            that a step without native kernels can be captured in a CUDA graph
            (default: False)
        differentiable (bool, optional): let autograd go through the step, which
            then runs without native kernels (default: False)
        fused (bool, optional): True runs the native kernels, False the same formula
            in plain torch operations. None takes the native kernels if they can
            update every weight of the group and neither foreach nor differentiable
            is True (default: None)
        state_dtype (torch.dtype, optional): torch.float32 keeps float32 states for bfloat16 and
            float16 weights; None keeps all states in the weight's dtype (default: None)
        keep_grad (bool, optional): leave ``.grad`` as it was (default: False)

    Raises:
        ValueError: if a hyper-parameter is out of range, or ``params`` is empty.
        RuntimeError: if ``fused=True`` meets ``foreach`` or ``differentiable``, weights that are
            not of the dtypes and devices above, or a missing native library; at :meth:`step`,
            before the group is changed, for sparse gradients and weights that overlap themselves in
            memory.

    Example::

        >>> optimizer = optim.Lamb(model.parameters(), lr=1e-2)
        >>> optimizer.zero_grad()
        >>> loss_fn(model(input), target).backward()
        >>> optimizer.step()

    .. _Large Batch Optimization for Deep Learning\: Training BERT in 76 minutes:
        https://arxiv.org/abs/1904.00962
    """

    _operator = "lamb_"
    _elementwise = False
    _later_options = FusedOptimizer._later_options | {"capturable": False, "keep_grad": False}

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        *,
        foreach: bool | None = None,
        maximize: bool = False,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        keep_grad: bool = False,
        state_dtype: torch.dtype | None = None,
    ) -> None:
        check_lr(lr, foreach=foreach, capturable=capturable)
        check_eps(eps)
        check_state_dtype(state_dtype)
        check_at_least_zero("weight_decay", weight_decay)
        defaults = {
            "lr": lr,
            "betas": check_betas(betas, foreach=foreach, capturable=capturable),
            "eps": eps,
            "weight_decay": weight_decay,
            "maximize": maximize,
            "foreach": foreach,
            "capturable": capturable,
            "differentiable": differentiable,
            "fused": fused,
            "keep_grad": keep_grad,
            "state_dtype": state_dtype,
        }
        super().__init__(params, defaults)

    def _state_names(self, group: dict[str, Any]) -> tuple[str, ...]:
        return "exp_avg", "exp_avg_sq"

    def _sparse_error(self, group: dict[str, Any]) -> str | None:
        return "Lamb does not support sparse gradients"

    def _imperative(
        self, group: dict[str, Any], weight: Tensor, grad: Tensor, state: dict[str, Tensor]
    ) -> None:
        beta1, beta2 = map(float, group["betas"])
        exp_avg, exp_avg_sq = state["exp_avg"], state["exp_avg_sq"]
        state["step"] += 1
        step = state["step"].item()

        exp_avg.mul_(beta1).add_(grad, alpha=1 - beta1)
        exp_avg_sq.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        denom = (exp_avg_sq / (1 - beta2**step)).sqrt_().add_(group["eps"])
        update = (exp_avg / (1 - beta1**step)).div_(denom)
        if group["weight_decay"] != 0:
            update.add_(weight, alpha=group["weight_decay"])

        weight_norm = whole(torch.linalg.vector_norm(weight)).item()
        update_norm = whole(torch.linalg.vector_norm(update)).item()
        trust_ratio = weight_norm / update_norm if weight_norm and update_norm else 1.0
        weight.add_(update, alpha=-float(group["lr"]) * trust_ratio)

    def _traceable(
        self, group: dict[str, Any], weight: Tensor, grad: Tensor, state: dict[str, Tensor]
    ) -> Tensor:
        # Up to the decay, LAMB's update is the step of an Adam from zero.
        beta1, beta2 = group["betas"]
        descent = torch.zeros_like(weight)
        adam(
            [descent],
            [grad],
            [state["exp_avg"]],
            [state["exp_avg_sq"]],
            [],
            [state["step"]],
            foreach=False,
            capturable=group["capturable"],
            differentiable=group["differentiable"],
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=1.0,
            weight_decay=0.0,
            eps=group["eps"],
            maximize=False,
        )
        update = -descent
        if group["weight_decay"] != 0:
            update = update + group["weight_decay"] * weight
        weight_norm, update_norm = weight.norm(), update.norm()
        trust_ratio = torch.where(
            (weight_norm == 0) | (update_norm == 0), 1.0, weight_norm / update_norm
        )
        return weight - as_number(group["lr"]) * trust_ratio * update

    def _native_arguments(self, group: dict[str, Any]) -> tuple[Any, ...]:
        beta1, beta2 = map(float, group["betas"])
        return (
            float(group["lr"]),
            beta1,
            beta2,
            group["eps"],
            group["weight_decay"],
            False,
            True,
            False,
            True,
            math.inf,
            0.0,
            math.inf,
        )

    def _uses_grads(self, group: dict[str, Any]) -> bool:
        return not group["keep_grad"]
