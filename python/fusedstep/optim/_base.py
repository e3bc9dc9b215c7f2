"""What all optimizers share: the choice between native and imperative code, and the states."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable
from itertools import chain, repeat
from operator import is_, is_not
from typing import Any, ClassVar

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
    """What the native side has worked out for a list of weights; it frees that when it dies."""

    __slots__ = ("__weakref__", "handle", "names", "weights")

    def __init__(
        self, weights: list[Tensor], states: list[dict[str, Tensor]], names: tuple[str, ...]
    ) -> None:
        slots = [state[name] for name in names for state in states]
        steps = [state["step"] for state in states]
        self.handle: int = torch.ops.fusedstep.plan_new(weights, slots, steps)
        self.names = names
        self.weights = list(weights)
        weakref.finalize(self, torch.ops.fusedstep.plan_delete, self.handle)


class _Snapshot:
    """Which tensors an optimizer's state consisted of: a plan is good for these and no others."""

    __slots__ = ("states", "values", "views")

    def __init__(self, state: dict[Tensor, dict[str, Any]]) -> None:
        self.states = list(state.values())
        self.views = [tensors.values() for tensors in self.states]
        self.values = list(self._flat())

    def is_of(self, state: dict[Tensor, dict[str, Any]]) -> bool:
        return _same(state.values(), self.states) and all(map(is_, self._flat(), self.values))

    def _flat(self) -> Iterable[Any]:
        # The end mark tells views that have grown or shrunk.
        return chain(chain.from_iterable(self.views), (None,))


class FusedOptimizer(Optimizer):
    """Base of all optimizers: updates a group natively or, weight by weight, by torch operations.

    A subclass says what is its own: the constructor, the names of its states, the native operator's
    arguments, and the imperative twin.
    """

    #: Options that older dictionaries lack, with the values that mean what was done then.
    _later_options: ClassVar[dict[str, Any]] = {
        "foreach": None,
        "maximize": False,
        "differentiable": False,
        "fused": None,
    }

    def __init__(self, params: ParamsT, defaults: dict[str, Any]) -> None:
        self._forget_plans()
        super().__init__(params, defaults)

    # What a subclass says

    def _state_names(self, group: dict[str, Any]) -> tuple[str, ...]:
        """Names of the states of the weight's shape, in the order of the native operator."""
        raise NotImplementedError

    def _sparse_error(self, group: dict[str, Any]) -> str | None:
        """Text of the error for a sparse gradient; None where the imperative twin takes them."""
        raise NotImplementedError

    def _initial_value(self, group: dict[str, Any]) -> float:
        """What these states start at."""
        return 0.0

    def _native(
        self, plan: int, weights: list[Tensor], grads: list[Tensor], group: dict[str, Any]
    ) -> None:
        """Calls the native operator."""
        raise NotImplementedError

    def _imperative(
        self, group: dict[str, Any], weight: Tensor, grad: Tensor, state: dict[str, Tensor]
    ) -> None:
        """Updates a weight and its state in place by torch operations: the readable reference."""
        raise NotImplementedError

    def _out_of_place(
        self, group: dict[str, Any], weight: Tensor, grad: Tensor, state: dict[str, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns the new weight and state, by operations autograd or a device graph can follow."""
        raise NotImplementedError

    # Groups and states

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            self._is_native(group, group["params"])
        except RuntimeError:
            self.param_groups.pop()
            raise
        if _ops.missing and _wants_native(group):
            _ops.warn_missing()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._forget_plans()
        for group in self.param_groups:
            for name, value in self._later_options.items():
                group.setdefault(name, value)
            weights = [p for p in group["params"] if self.state.get(p)]
            for p in weights:
                step = self.state[p].get("step")
                if isinstance(step, (int, float)):
                    self.state[p]["step"] = _new_step(p, group).fill_(step)
            if _wants_native(group) and not _obstacle(weights):
                self._place_states(group, weights)

    @torch.no_grad()
    def _create_states(self, group: dict[str, Any], weights: list[Tensor]) -> None:
        """Gives a state to those weights that have none."""
        names = self._state_names(group)
        weights = [p for p in weights if not self.state[p].keys() >= {"step", *names}]
        if not weights:
            return
        value = self._initial_value(group)
        if self._is_native(group, weights):
            tensors = torch.ops.fusedstep.new_states(weights, len(names))
        else:
            tensors = [torch.zeros_like(p) for _ in names for p in weights]
        for i, p in enumerate(weights):
            state = self.state[p]
            state.setdefault("step", _new_step(p, group))
            for name, tensor in zip(names, tensors[i :: len(weights)], strict=True):
                if value != 0:
                    tensor.fill_(complex(value, value) if p.is_complex() else value)
                state.setdefault(name, tensor)

    @torch.no_grad()
    def _place_states(self, group: dict[str, Any], weights: list[Tensor]) -> None:
        """Moves states that come from elsewhere to where the native kernels find them fastest."""
        names = self._state_names(group)
        weights = [
            p
            for p in weights
            if all(name in self.state[p] and self.state[p][name].shape == p.shape for name in names)
        ]
        if not weights:
            return
        tensors = torch.ops.fusedstep.new_states(weights, len(names))
        for i, p in enumerate(weights):
            state = self.state[p]
            state["step"] = _new_step(p, group).copy_(state["step"])
            for name, tensor in zip(names, tensors[i :: len(weights)], strict=True):
                state[name] = tensor.copy_(state[name])

    # The choice of code

    def _is_native(self, group: dict[str, Any], weights: list[Tensor]) -> bool:
        """Whether the native kernels update these weights; an error if they cannot but must."""
        if not _wants_native(group):
            return False
        obstacle = _obstacle(weights)
        if obstacle and group["fused"]:
            raise RuntimeError(obstacle)
        return obstacle is None

    def _forget_plans(self) -> None:
        self._plans: dict[int, _Plan] = {}  # by the group's index
        self._seen: _Snapshot | None = None  # of the state that the plans were made for

    def _plan(
        self, index: int, group: dict[str, Any], weights: list[Tensor], grads: list[Tensor]
    ) -> _Plan | None:
        """The native plan of a group; None where the imperative twin updates it."""
        names = self._state_names(group)
        plan = self._plans.get(index)
        if plan and names == plan.names and _same(weights, plan.weights) and _wants_native(group):
            return plan

        self._plans.pop(index, None)
        sparse = any(grad.layout is not torch.strided for grad in grads)
        if sparse and (error := self._sparse_error(group)):
            raise RuntimeError(error)
        native = self._is_native(group, weights) and not sparse
        self._create_states(group, weights)
        if not native:
            return None
        plan = _Plan(weights, [self.state[p] for p in weights], names)
        self._plans[index] = plan
        self._seen = None
        return plan

    # The step

    @_use_grad_for_differentiable
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Perform a single optimization step.

        Args:
            closure (Callable, optional): A closure that reevaluates the model
                and returns the loss.
        """
        if "capturable" in self.defaults and not self._is_on_host():
            self._accelerator_graph_capture_health_check()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._update()
        return loss

    def _is_on_host(self) -> bool:
        # To ask an accelerator about graph capture starts it, which fails in a child of fork().
        return all(p.is_cpu for group in self.param_groups for p in group["params"][:1])

    @torch._disable_dynamo
    def _update(self) -> None:
        if self._seen is None or not self._seen.is_of(self.state):
            self._forget_plans()

        # What can be wrong is found out for all groups before the first is changed.
        work = []
        for index, group in enumerate(self.param_groups):
            weights, grads = _with_gradients(group["params"])
            if weights:
                plan = self._plan(index, group, weights, grads)
                work.append((index, group, weights, grads, plan))
        if self._plans and self._seen is None:
            self._seen = _Snapshot(self.state)

        if len(work) > 1:
            work = [self._checked(*item) for item in work]

        for index, group, weights, grads, plan in work:
            if plan is None or not self._native_step(index, group, weights, grads):
                for weight, grad in zip(weights, grads, strict=True):
                    self._imperative_step(group, weight, grad)

    def _checked(
        self,
        index: int,
        group: dict[str, Any],
        weights: list[Tensor],
        grads: list[Tensor],
        plan: _Plan | None,
    ) -> tuple[int, dict[str, Any], list[Tensor], list[Tensor], _Plan | None]:
        """Raises what the native step of a group would raise, with nothing changed yet."""
        if plan is not None:
            try:
                torch.ops.fusedstep.plan_check.default(plan.handle, weights, grads)
            except NotImplementedError:
                # The dispatcher's error: a tensor has changed its device or layout since.
                del self._plans[index]
                plan = self._plan(index, group, weights, grads)
        return index, group, weights, grads, plan

    def _native_step(
        self, index: int, group: dict[str, Any], weights: list[Tensor], grads: list[Tensor]
    ) -> bool:
        """Returns whether the group was updated; if not, the imperative twin has to do it."""
        try:
            self._native(self._plans[index].handle, weights, grads, group)
        except NotImplementedError:
            # The dispatcher's error: a tensor has changed its device or layout since the choice.
            del self._plans[index]
            plan = self._plan(index, group, weights, grads)
            if plan is None:
                return False
            self._native(plan.handle, weights, grads, group)
        increment_version(weights)
        return True

    def _imperative_step(self, group: dict[str, Any], weight: Tensor, grad: Tensor) -> None:
        state = self.state[weight]
        if group["maximize"]:
            grad = -grad
        if weight.is_complex():
            state = {k: torch.view_as_real(v) if v.is_complex() else v for k, v in state.items()}
            weight, grad = torch.view_as_real(weight), torch.view_as_real(grad)

        if not (group["differentiable"] or group.get("capturable")):
            self._imperative(group, weight, grad, state)
            return

        if group["differentiable"] and state["step"].requires_grad:
            raise RuntimeError("`requires_grad` is not supported for `step` in differentiable mode")
        if group.get("capturable"):
            _check_capturable(weight, state["step"])
        # Autograd keeps what the update reads: it reads copies, for the originals are overwritten.
        copies = {name: tensor.clone() for name, tensor in state.items()}
        new_weight, new_state = self._out_of_place(group, weight.clone(), grad, copies)
        weight.copy_(new_weight)
        for name, tensor in new_state.items():
            state[name].copy_(tensor)


def _wants_native(group: dict[str, Any]) -> bool:
    """Whether the options of a group ask for native kernels, or allow them."""
    if group["fused"]:
        if group["differentiable"]:
            raise RuntimeError("`fused` does not support `differentiable`")
        if group["foreach"]:
            raise RuntimeError("`fused` and `foreach` cannot be `True` together.")
        return True
    return group["fused"] is None and not (group["foreach"] or group["differentiable"])


def _obstacle(weights: list[Tensor]) -> str | None:
    """Why the native kernels cannot update these weights; None if they can."""
    if _ops.missing:
        return f"`fused=True` needs native kernels. {_ops.missing}"
    for p in weights:
        if p.device.type not in _ops.DEVICES or p.dtype not in _ops.DTYPES:
            return (
                "`fused=True` requires all the params to be floating point Tensors of "
                f"supported devices: {list(_ops.DEVICES)} but {p.dtype} and {p.device.type}"
            )
        if type(p) not in (Tensor, Parameter) or p.layout is not torch.strided:
            return (
                "`fused=True` requires all the params to be dense Tensors but one is a "
                f"{torch.typename(p)} of layout {p.layout}"
            )
    if len(set(map(id, weights))) != len(weights):
        return "`fused=True` requires all the params of a group to be different Tensors"
    return None


def _check_capturable(weight: Tensor, step: Tensor) -> None:
    devices = _get_capturable_supported_devices()
    if weight.device.type != step.device.type or weight.device.type not in devices:
        raise AssertionError(
            f"If capturable=True, params and state_steps must be on supported devices: {devices}."
        )


def _new_step(weight: Tensor, group: dict[str, Any]) -> Tensor:
    """A step count of zero, on the host unless a device graph counts the steps."""
    device = weight.device if group.get("capturable") else "cpu"
    return torch.zeros((), dtype=torch.float32, device=device)


def _with_gradients(params: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    grads = [p.grad for p in params]
    if all(map(is_not, grads, repeat(None))):
        return params, grads
    weights = [p for p, grad in zip(params, grads, strict=True) if grad is not None]
    return weights, [grad for grad in grads if grad is not None]


def _same(a: Collection[Any], b: Collection[Any]) -> bool:
    """Whether two collections hold the very same objects; in C, for it runs at every step."""
    return len(a) == len(b) and all(map(is_, a, b))
