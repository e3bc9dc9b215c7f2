"""The twin of a native step: the same in operations of torch, for a weight at a time."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fusedstep.optim._checks import check_capturable


class ImperativeTwin:
    """What steps weights where no native kernel does."""

    def _imperative_groups(
        self, groups: list[tuple[dict[str, Any], list[Tensor], list[Tensor]]]
    ) -> None:
        """Steps weights of groups: those that have a gradient, with these."""
        for group, weights, grads in groups:
            self._imperative_steps(group, weights, grads)

    def _imperative_steps(
        self, group: dict[str, Any], weights: list[Tensor], grads: list[Tensor]
    ) -> None:
        for weight, grad in zip(weights, grads, strict=True):
            self._imperative_step(group, weight, grad)

    def _imperative_step(self, group: dict[str, Any], weight: Tensor, grad: Tensor) -> None:
        state = self._state[weight]
        if group["maximize"]:
            grad = -grad
        if weight.is_complex():
            state = {k: torch.view_as_real(v) if v.is_complex() else v for k, v in state.items()}
            weight, grad = torch.view_as_real(weight), torch.view_as_real(grad)

        if not (group["differentiable"] or group.get("capturable")):
            if self._has_wide_states(group, weight):
                wide = weight.float()
                self._imperative(group, wide, grad.float(), state)
                weight.copy_(wide)
            else:
                self._imperative(group, weight, grad, state)
            return

        if group["differentiable"] and state["step"].requires_grad:
            raise RuntimeError("`requires_grad` is not supported for `step` in differentiable mode")
        if group.get("capturable"):
            check_capturable(weight, state["step"], group)
        # Autograd keeps what the update reads: it reads copies, for the originals are overwritten.
        copies = {name: tensor.clone() for name, tensor in state.items()}
        weight.copy_(self._traceable(group, weight.clone(), grad, copies))
        for name, tensor in copies.items():
            state[name].copy_(tensor)
