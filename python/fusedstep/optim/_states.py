"""The states of weights: which there are, and where a step finds them fastest."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import cycle, product
from typing import Any

import torch
from torch import Tensor

from fusedstep.optim import _dtensor
from fusedstep.optim._options import own_option
from fusedstep.optim._pieces import in_pieces

#: The state that a weight's master copy is.
MASTER = "master_param"

_SIXTEEN_BITS = (torch.bfloat16, torch.float16)


class StateStore:
    """The states of an optimizer's weights; it makes them.

    ``by_weight``: the optimizer's ``state``. ``first``: its numbers with their first values.
    ``names`` returns the states of the weight's shape that a group's options need, in the native
    rule's order. The option ``initial_option`` is the first value of these, or 0.
    """

    def __init__(
        self,
        by_weight: dict[Tensor, dict[str, Any]],
        first: dict[str, float],
        names: Callable[[dict[str, Any]], tuple[str, ...]],
        initial_option: str | None,
    ) -> None:
        self.by_weight = by_weight
        self._first, self._names, self._initial_option = first, names, initial_option
        self.numbers = tuple(first) or ("step",)  # those that a native step takes, its count first
        self._counts: dict[Tensor, Tensor] = {}  # of steps, where no dictionary holds them

    def names_of(self, group: dict[str, Any], weight: Tensor) -> tuple[str, ...]:
        """Names of the states of the weight's shape, in the order of a plan."""
        names = self._names(group)
        return (*names, MASTER) if has_master(group, weight) else names

    def has_wide(self, group: dict[str, Any], weight: Tensor) -> bool:
        """Returns whether a 16-bit weight's states are float32: by its own, else by options."""
        if weight.dtype not in _SIXTEEN_BITS or has_master(group, weight):
            return weight.dtype in _SIXTEEN_BITS
        state = self.by_weight.get(weight, {})
        dtypes = [state[name].dtype for name in self._names(group) if name in state]
        return (dtypes or [own_option(group, "state_dtype")])[0] is torch.float32

    def with_count(self, group: dict[str, Any], weight: Tensor) -> dict[str, Tensor]:
        """The state of a weight, and the count of its steps where that is not part of it."""
        if "step" in self._first:
            return self.by_weight[weight]
        # A graph is compiled again when what it reads changes: it reads no state that it needs not.
        state = self.by_weight[weight] if self.names_of(group, weight) else {}
        return state | {"step": self._count_of(group, weight)}

    def _count_of(self, group: dict[str, Any], weight: Tensor) -> Tensor:
        """A count that no dictionary has. It starts at 0 beside new states, at 1 beside others."""
        if weight not in self._counts:
            self._counts[weight] = _new_number(weight, group, bool(self.by_weight.get(weight)))
        return self._counts[weight]

    @torch.no_grad()
    def create(self, group: dict[str, Any], weights: list[Tensor], native: bool) -> None:
        """Gives a state to those weights that have none."""
        weights = [p for p in weights if not self._has_all(group, p)]
        value = group[self._initial_option] if self._initial_option else 0
        made: dict[Tensor, dict[str, Tensor]] = {p: {} for p in weights}
        for p, name, tensor in self._zeros(group, weights, native):
            state, new = self.by_weight.get(p, {}), made[p]
            for number in self._first:
                if not (number in state or number in new):
                    new[number] = _new_number(p, group, self._first[number])
            if name not in state:
                if name == MASTER:  # sparse gradients do not reach every row of it
                    in_pieces(Tensor.copy_, tensor, p)
                elif value != 0:
                    initial = complex(value, value) if p.is_complex() else value
                    in_pieces(lambda part, initial=initial: part.fill_(initial), tensor)
                new[name] = tensor
            elif has_master(group, p):  # which came later: no state is narrower than it
                new[name] = state[name].to(tensor.dtype)
        counts = {} if "step" in self._first else {p: _new_number(p, group) for p in weights}
        for p, new in made.items():  # all at once: memory may run out before all are there
            self.by_weight[p].update(new)
        self._counts.update(counts)

    def operands(self, group: dict[str, Any], weights: list[Tensor]) -> list[dict[str, Tensor]]:
        """The states of weights as a step takes them: with counts, and all numbers as tensors."""
        states = [self.with_count(group, p) for p in weights]
        if not all(isinstance(state[name], Tensor) for state in states for name in self.numbers):
            raise RuntimeError(
                "API has changed, `state_steps` argument must contain a list of singleton tensors"
            )
        return states

    def count_together(
        self, weights: list[Tensor], operands: list[dict[str, Tensor]], may_be_skipped: bool
    ) -> None:
        """Moves the numbers of weights on a device there if the host cannot keep all."""
        numbers = [state[name] for state in operands for name in self.numbers]
        if weights[0].is_cpu or not (may_be_skipped or any(not each.is_cpu for each in numbers)):
            return
        for p, state in zip(weights, operands, strict=True):
            state |= {name: state[name].to(p.device) for name in self.numbers}
            if "step" not in self._first:
                self._counts[p] = state["step"]

    def tidy(self, group: dict[str, Any]) -> None:
        """Makes tensors of numbers that come from elsewhere, and removes what is None."""
        for p in group["params"]:
            state = self.by_weight.get(p, {})
            for name in [name for name, value in state.items() if value is None]:
                del state[name]  # torch's SGD has had such: it is missing
            for name in self._first:
                if isinstance(state.get(name), (int, float)):
                    state[name] = _new_number(p, group, state[name])
            if "step" not in self._first:
                self._count_of(group, p)

    def keep_wide(self, group: dict[str, Any], weight: Tensor, saved: dict[str, Any]) -> None:
        """Takes from a saved state what has been cast to a 16-bit weight's dtype, and numbers."""
        for name in self.names_of(group, weight) if weight.dtype in _SIXTEEN_BITS else ():
            value = saved.get(name)
            if isinstance(value, Tensor) and value.itemsize > 2:
                self.by_weight[weight][name] = value.to(weight.device, torch.float32)
        for name in self._first.keys() - {"step"}:  # which torch casts to any dtype
            if isinstance(saved.get(name), Tensor):
                number = saved[name].detach().reshape(())
                self.by_weight[weight][name] = _new_number(weight, group).copy_(number)

    @torch.no_grad()
    def place(self, group: dict[str, Any], weights: list[Tensor]) -> None:
        """Moves states that come from elsewhere to where the native kernels find them fastest."""
        weights = [
            p
            for p in weights
            if self._has_all(group, p)
            and all(self.by_weight[p][name].shape == p.shape for name in self.names_of(group, p))
        ]
        for p in weights:
            for name in self._first:
                number = self.by_weight[p][name].reshape(())  # older ones have the shape [1]
                self.by_weight[p][name] = _new_number(p, group).copy_(number)
        for p, name, tensor in self._zeros(group, weights, native=True):
            self.by_weight[p][name] = in_pieces(Tensor.copy_, tensor, self.by_weight[p][name])

    def _has_all(self, group: dict[str, Any], p: Tensor) -> bool:
        return self.by_weight.get(p, {}).keys() >= {*self._first, *self.names_of(group, p)}

    def _zeros(
        self, group: dict[str, Any], weights: list[Tensor], native: bool
    ) -> Iterable[tuple[Tensor, str, Tensor]]:
        """A zeroed tensor for each state of each weight."""
        alike: dict[tuple[bool, tuple[str, ...]], list[Tensor]] = {}
        for p in weights:
            alike.setdefault((self.has_wide(group, p), self.names_of(group, p)), []).append(p)
        for (wide, names), some in alike.items():
            if native:
                shards = [_dtensor.local(p) for p in some]
                tensors = torch.ops.fusedstep.new_states(shards, len(names), wide)
                tensors = map(_dtensor.spread_like, cycle(some), tensors)
            else:
                dtype = torch.float32 if wide else None
                tensors = [torch.zeros_like(p, dtype=dtype) for _ in names for p in some]
            for (name, p), tensor in zip(product(names, some), tensors, strict=True):
                yield p, name, tensor


def has_master(group: dict[str, Any], weight: Tensor) -> bool:
    """Returns whether the step updates a float32 copy, and rounds the weight from it."""
    return weight.dtype in _SIXTEEN_BITS and own_option(group, "master_weights")


def _new_number(weight: Tensor, group: dict[str, Any], value: float = 0.0) -> Tensor:
    """A number beside a weight, on the host unless a device graph counts the steps."""
    device = weight.device if group.get("capturable") else "cpu"
    return torch.tensor(value, dtype=torch.float32, device=device)
