from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from fusedstep.optim._base import FusedOptimizer
from fusedstep.optim._checks import check_at_least_zero, check_betas, check_eps, check_lr

__all__ = ["Adam"]


class Adam(FusedOptimizer):
    _later_options = FusedOptimizer._later_options | {
        "amsgrad": False,
        "capturable": False,
        "decoupled_weight_decay": False,
    }
    _sparse_error = "Adam does not support sparse gradients, please consider SparseAdam instead"

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
    ) -> None:
        check_lr(lr, foreach=foreach, capturable=capturable)
        check_eps(eps)
        check_at_least_zero("weight_decay", weight_decay)
        defaults = {
            "lr": lr,
            "betas": check_betas(betas, foreach=foreach, capturable=capturable),
            "eps": eps,
            "weight_decay": weight_decay,
            "amsgrad": amsgrad,
            "maximize": maximize,
            "foreach": foreach,
            "capturable": capturable,
            "differentiable": differentiable,
            "fused": fused,
            "decoupled_weight_decay": decoupled_weight_decay,
        }
        super().__init__(params, defaults)

    def _state_names(self, group: dict[str, Any]) -> tuple[str, ...]:
        names = ("exp_avg", "exp_avg_sq")
        return (*names, "max_exp_avg_sq") if group["amsgrad"] else names

    def _imperative(
        self, group: dict[str, Any], weight: Tensor, grad: Tensor, state: dict[str, Tensor]
    ) -> None:
        lr, (beta1, beta2) = float(group["lr"]), map(float, group["betas"])
        exp_avg, exp_avg_sq = state["exp_avg"], state["exp_avg_sq"]
        state["step"] += 1
        step = state["step"].item()

        if group["weight_decay"] != 0:
            if group["decoupled_weight_decay"]:
                weight.mul_(1 - lr * group["weight_decay"])
            else:
                grad = grad.add(weight, alpha=group["weight_decay"])
        exp_avg.lerp_(grad, 1 - beta1)
        exp_avg_sq.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        if group["amsgrad"]:
            largest = state["max_exp_avg_sq"]
            exp_avg_sq = torch.maximum(largest, exp_avg_sq, out=largest)
        denom = exp_avg_sq.sqrt().div_((1 - beta2**step) ** 0.5).add_(group["eps"])
        weight.addcdiv_(exp_avg, denom, value=-lr / (1 - beta1**step))

    def _out_of_place(
        self, group: dict[str, Any], weight: Tensor, grad: Tensor, state: dict[str, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        lr, (beta1, beta2) = group["lr"], group["betas"]
        step = state["step"] + 1
        if group["decoupled_weight_decay"]:
            weight = weight * (1 - lr * group["weight_decay"])
        else:
            grad = grad + group["weight_decay"] * weight
        exp_avg = state["exp_avg"] + (1 - beta1) * (grad - state["exp_avg"])
        exp_avg_sq = beta2 * state["exp_avg_sq"] + (1 - beta2) * grad * grad
        new = {"step": step, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
        if group["amsgrad"]:
            exp_avg_sq = torch.maximum(state["max_exp_avg_sq"], exp_avg_sq)
            new["max_exp_avg_sq"] = exp_avg_sq
        denom = exp_avg_sq.sqrt() / (1 - beta2**step) ** 0.5 + group["eps"]
        return weight - lr / (1 - beta1**step) * exp_avg / denom, new

    def _native(
        self, plan: int, weights: list[Tensor], grads: list[Tensor], group: dict[str, Any]
    ) -> None:
        beta1, beta2 = group["betas"]
        torch.ops.fusedstep.adam_.default(
            plan,
            weights,
            grads,
            float(group["lr"]),
            float(beta1),
            float(beta2),
            group["eps"],
            group["weight_decay"],
            group["amsgrad"],
            group["maximize"],
            group["decoupled_weight_decay"],
        )
