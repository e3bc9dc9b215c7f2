"""What all optimizers have in common: the choice between native and imperative code, and the state."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from itertools import chain
from operator import is_
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.nn import Parameter
from torch.optim.optimizer import (
    Optimizer,
    ParamsT,
    _get_capturable_supported_devices,
    _use_grad_for_differentiable,
)

from fusedstep import _ops


class _Plan:
    """What the native side has worked out for a list of weights; lives as long as this object."""

    __slots__ = ("__weakref__", "handle", "slots", "weights")

    def __init__(self, weights: list[Tensor], states: list[Tensor], steps: list[Tensor]) -> None:
        self.handle = torch.ops.fusedstep.plan_new(weights, states, steps)
        weakref.finalize(self, torch.ops.fusedstep.plan_delete, self.handle)
        self.weights = weights
        self.slots = len(states) // len(weights)


class FusedOptimizer(Optimizer):
    """Base of all optimizers.

    A group is updated by the native kernels or, weight by weight, by the imperative twin. A subclass
    says what is its own: the constructor, the names of its states, the native operator, and the twin.
    """

    #: Options that older dictionaries lack, and what they mean where they are missing.
    _later_options: dict[str, Any] = {
        "foreach": None,
        "maximize": False,
        "differentiable": False,
        "fused": None,
    }

    #: Text of the error for a sparse gradient; None if the imperative twin takes them.
    _sparse_error: str | None = None

    def __init__(self, params: ParamsT, defaults: dict[str, Any]) -> None:
        self._forget_plans()
        super().__init__(params, defaults)

    # What a subclass says ------------------------------------------------------------------------

    def _state_names(self, group: dict[str, Any]) -> tuple[str, ...]:
        """Names of the states that have the weight's shape, in the order of the native operator."""
        raise NotImplementedError

    def _initial_value(self, group: dict[str, Any]) -> float:
        """What the states start at."""
        return 0.0

    def _native(
        self, plan: int, weights: list[Tensor], grads: list[Tensor], group: dict[str, Any]
    ) -> None:
        """Calls the native operator."""
        raise NotImplementedError

    def _imperative(
        self, group: dict[str, Any], weight: Tensor, grad: Tensor, state: dict[str, Tensor]
    ) -> None:
        """Updates one weight and its state in place by torch operations: the readable reference."""
        raise NotImplementedError

    def _out_of_place(
        self, group: dict[str, Any], weight: Tensor, grad: Tensor, state: dict[str, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns the new weight and state: what autograd follows and a device graph captures."""
        raise NotImplementedError

    # Groups and states ---------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            self._is_native(group, group["params"])
        except RuntimeError:
            self.param_groups.pop()
            raise
        if group["fused"] is None and _ops.missing:
            _ops.warn_missing()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._forget_plans()
        for group in self.param_groups:
            for name, value in self._later_options.items():
                group.setdefault(name, value)
            weights = [p for p in group["params"] if self.state.get(p)]
            for p in weights:
                step = self.state[p]["step"]
                if not isinstance(step, Tensor):
                    device = p.device if group.get("capturable") else "cpu"
                    self.state[p]["step"] = torch.tensor(float(step), device=device)
            if self._is_native(group, weights):
                self._place_states(group, weights)

    def _create_states(self, group: dict[str, Any], weights: list[Tensor]) -> None:
        """Gives a state to the weights that have none."""
        names = self._state_names(group)
        weights = [p for p in weights if not self.state[p].keys() >= {"step", *names}]
        if not weights:
            return
        value = self._initial_value(group)
        if self._is_native(group, weights):
            placed = torch.ops.fusedstep.new_states(weights, len(names))
            if value != 0:
                torch._foreach_add_(placed, value)
        else:
            placed = [_full_like(p, value) for _ in names for p in weights]
        for i, p in enumerate(weights):
            device = p.device if group.get("capturable") else "cpu"
            state = self.state[p]
            state.setdefault("step", torch.zeros((), dtype=torch.float32, device=device))
            for name, tensor in zip(names, placed[i :: len(weights)], strict=True):
                state.setdefault(name, tensor)

    def _place_states(self, group: dict[str, Any], weights: list[Tensor]) -> None:
        """Moves states that came from elsewhere to where the native kernels are fastest."""
        names = self._state_names(group)
        weights = [p for p in weights if self.state[p].keys() >= {"step", *names}]
        if not weights:
            return
        placed = torch.ops.fusedstep.new_states(weights, len(names))
        for i, p in enumerate(weights):
            state = self.state[p]
            state["step"] = state["step"].detach().to("cpu", torch.float32, copy=True)
            for name, tensor in zip(names, placed[i :: len(weights)], strict=True):
                state[name] = tensor.copy_(state[name].detach())

    # The step ------------------------------------------------------------------------------------

    @_use_grad_for_differentiable
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Perform a single optimization step.

        Args:
            closure (Callable, optional): A closure that reevaluates the model
                and returns the loss.
        """
        if "capturable" in self.defaults:
            self._accelerator_graph_capture_health_check()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._update()
        return loss

    def _update(self) -> None:
        for group in self.param_groups:
            weights = [p for p in group["params"] if p.grad is not None]
            self._create_states(group, weights)
            for weight in weights:
                self._imperative_step(group, weight, weight.grad)

    def _imperative_step(self, group: dict[str, Any], weight: Tensor, grad: Tensor) -> None:
        state = self.state[weight]
        if group["maximize"]:
            grad = -grad
        if weight.is_complex():
            state = {k: torch.view_as_real(v) if v.is_complex() else v for k, v in state.items()}
            weight, grad = torch.view_as_real(weight), torch.view_as_real(grad)
        self._imperative(group, weight, grad, state)

    def _forget_plans(self) -> None:
        self._plans = {}

    def _is_native(self, group, weights) -> bool:
        return False


def _full_like(weight: Tensor, value: float) -> Tensor:
    """A state of a weight, in its dtype and dimension order."""
    if weight.is_complex():
        value = complex(value, value)
    return torch.full_like(weight, value, memory_format=torch.preserve_format)
