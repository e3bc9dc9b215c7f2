from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from fusedstep.optim._base import FusedOptimizer
from fusedstep.optim._checks import check_at_least_zero, check_betas, check_eps, check_lr

__all__ = ["Lamb"]


class Lamb(FusedOptimizer):
    _later_options = FusedOptimizer._later_options | {"capturable": False, "keep_grad": False}
    _sparse_error = "Lamb does not support sparse gradients"

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
    ) -> None:
        check_lr(lr, foreach=foreach, capturable=capturable)
        check_eps(eps)
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
        }
        super().__init__(params, defaults)

    def _state_names(self, group: dict[str, Any]) -> tuple[str, ...]:
        return "exp_avg", "exp_avg_sq"

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

        weight_norm = torch.linalg.vector_norm(weight).item()
        update_norm = torch.linalg.vector_norm(update).item()
        trust_ratio = weight_norm / update_norm if weight_norm and update_norm else 1.0
        weight.add_(update, alpha=-float(group["lr"]) * trust_ratio)

    def _out_of_place(
        self, group: dict[str, Any], weight: Tensor, grad: Tensor, state: dict[str, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        beta1, beta2 = group["betas"]
        step = state["step"] + 1
        exp_avg = beta1 * state["exp_avg"] + (1 - beta1) * grad
        exp_avg_sq = beta2 * state["exp_avg_sq"] + (1 - beta2) * grad * grad
        denom = (exp_avg_sq / (1 - beta2**step)).sqrt() + group["eps"]
        update = exp_avg / (1 - beta1**step) / denom + group["weight_decay"] * weight
        weight_norm, update_norm = weight.norm(), update.norm()
        trust_ratio = torch.where(
            (weight_norm == 0) | (update_norm == 0), 1.0, weight_norm / update_norm
        )
        return (
            weight - group["lr"] * trust_ratio * update,
            {"step": step, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq},
        )

    def _native(
        self, plan: int, weights: list[Tensor], grads: list[Tensor], group: dict[str, Any]
    ) -> None:
        beta1, beta2 = group["betas"]
        torch.ops.fusedstep.lamb_.default(
            plan,
            weights,
            grads,
            float(group["lr"]),
            float(beta1),
            float(beta2),
            group["eps"],
            group["weight_decay"],
            group["maximize"],
            group["keep_grad"],
        )
        if not group["keep_grad"]:
            torch.autograd.graph.increment_version(grads)
