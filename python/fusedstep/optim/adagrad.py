from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from fusedstep.optim._base import FusedOptimizer
from fusedstep.optim._checks import check_at_least_zero, check_eps, check_lr

__all__ = ["Adagrad"]


class Adagrad(FusedOptimizer):
    _sparse_error = None

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-2,
        lr_decay: float = 0,
        weight_decay: float = 0,
        initial_accumulator_value: float = 0,
        eps: float = 1e-10,
        foreach: bool | None = None,
        *,
        maximize: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
    ) -> None:
        check_lr(lr)
        check_at_least_zero("lr_decay", lr_decay)
        check_at_least_zero("weight_decay", weight_decay)
        check_at_least_zero("initial_accumulator_value", initial_accumulator_value)
        check_eps(eps)
        defaults = {
            "lr": lr,
            "lr_decay": lr_decay,
            "eps": eps,
            "weight_decay": weight_decay,
            "initial_accumulator_value": initial_accumulator_value,
            "foreach": foreach,
            "maximize": maximize,
            "differentiable": differentiable,
            "fused": fused,
        }
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        self._create_states(group, group["params"])

    def share_memory(self) -> None:
        """Calls tensor.share_memory_() on the state sum tensors."""
        for state in self.state.values():
            state["sum"].share_memory_()

    def _state_names(self, group: dict[str, Any]) -> tuple[str, ...]:
        return ("sum",)

    def _initial_value(self, group: dict[str, Any]) -> float:
        return group["initial_accumulator_value"]

    def _imperative(
        self, group: dict[str, Any], weight: Tensor, grad: Tensor, state: dict[str, Tensor]
    ) -> None:
        state["step"] += 1
        step = state["step"].item()
        clr = float(group["lr"]) / (1 + (step - 1) * group["lr_decay"])

        if group["weight_decay"] != 0:
            if grad.is_sparse:
                raise RuntimeError("weight_decay option is not compatible with sparse gradients")
            grad = grad.add(weight, alpha=group["weight_decay"])
        if grad.is_sparse:
            grad = grad.coalesce()  # the update is not linear: one value an index
            state["sum"].add_(grad * grad)
            std = state["sum"].sparse_mask(grad).values().sqrt_().add_(group["eps"])
            update = torch.sparse_coo_tensor(grad.indices(), grad.values() / std, grad.shape)
            weight.add_(update, alpha=-clr)
        else:
            std = state["sum"].addcmul_(grad, grad).sqrt().add_(group["eps"])
            weight.addcdiv_(grad, std, value=-clr)

    def _out_of_place(
        self, group: dict[str, Any], weight: Tensor, grad: Tensor, state: dict[str, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        step = state["step"] + 1
        clr = group["lr"] / (1 + (step - 1) * group["lr_decay"])
        grad = grad + group["weight_decay"] * weight
        sums = state["sum"] + grad * grad
        return weight - clr * grad / (sums.sqrt() + group["eps"]), {"step": step, "sum": sums}

    def _native(
        self, plan: int, weights: list[Tensor], grads: list[Tensor], group: dict[str, Any]
    ) -> None:
        torch.ops.fusedstep.adagrad_.default(
            plan,
            weights,
            grads,
            float(group["lr"]),
            group["lr_decay"],
            group["weight_decay"],
            group["eps"],
            group["maximize"],
        )
