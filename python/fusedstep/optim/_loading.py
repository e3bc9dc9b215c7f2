"""Takes over states and options that were made elsewhere: saved, copied or unpickled."""

from __future__ import annotations

from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from fusedstep import _ops
from fusedstep.optim._options import fill_own
from fusedstep.optim._pieces import in_pieces
from fusedstep.optim._registry import register
from fusedstep.optim._saved import check_dictionary

SIXTEEN_BITS = (torch.bfloat16, torch.float16)


class LoadsStates:
    """Gives an optimizer ``load_state_dict`` and ``__setstate__``: they take all, or nothing."""

    @torch._disable_dynamo
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the optimizer state, as torch does, but for float32 states of 16-bit weights.

        They stay float32. torch casts them to the weight's dtype. Nothing has changed after an
        error. Another thread must not step meanwhile: who comes second gets an error.
        """
        for plan in self._plans.values():
            _ops.check_idle(plan.handle)
        # The last hook sees the dictionary as the user's hooks have left it, before torch casts it.
        self._loading: dict[str, Any] = {}

        def look(optimizer: Optimizer, dictionary: dict[str, Any]) -> None:
            check_dictionary(optimizer, dictionary)
            optimizer._loading.update(dictionary)

        hook = self.register_load_state_dict_pre_hook(look)
        try:
            super().load_state_dict(state_dict)
        except RuntimeError as error:
            _ops.raise_memory_error(error)
            raise
        finally:
            hook.remove()
            del self._loading
        # torch has made the dictionary of states: without any, nobody but a hook can have it.
        if not (self._state or self._optimizer_load_state_dict_post_hooks):
            self._state_was_accessed = False

    def _keep_wide_states(self, dictionary: dict[str, Any]) -> None:
        """Takes from a dictionary what has been cast to a 16-bit weight's dtype, and numbers."""
        keys = chain.from_iterable(group["params"] for group in dictionary["param_groups"])
        for group in self.param_groups:
            for p, key in zip(group["params"], keys, strict=False):
                saved = dictionary["state"].get(key, {})
                for name in self._names_of(group, p) if p.dtype in SIXTEEN_BITS else ():
                    value = saved.get(name)
                    if isinstance(value, Tensor) and value.itemsize > 2:
                        self._state[p][name] = value.to(p.device, torch.float32)
                for name in self._numbers.keys() - {"step"}:  # which torch casts to any dtype
                    if isinstance(saved.get(name), Tensor):
                        number = saved[name].detach().reshape(())
                        self._state[p][name] = new_number(p, group).copy_(number)

    def __setstate__(self, state: dict[str, Any]) -> None:
        before = {name: vars(self)[name] for name in ("_state", "_groups") if name in vars(self)}
        try:
            self._take_over(state)
        except BaseException:  # memory that ran out, for one
            vars(self).update(before)
            self._forget_plans()
            raise

    def _take_over(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if "param_groups" in self.__dict__:
            self.param_groups = self.__dict__.pop("param_groups")
        if "state" in self.__dict__:
            self.state = self.__dict__.pop("state")
            self._note_access()
        if "_name" not in self.__dict__:
            self._name = register(self)
        self._forget_plans()
        self._counts = {}
        for group in self.param_groups:
            for name, value in self._later_options.items():
                group.setdefault(name, value)
            fill_own(group, self.defaults)
        if "_loading" in self.__dict__:
            self._keep_wide_states(self._loading)
        for group in self.param_groups:
            weights = [p for p in group["params"] if self._state.get(p)]
            for p in weights:
                for name in [name for name, value in self._state[p].items() if value is None]:
                    del self._state[p][name]  # torch's SGD has had such: it is missing
                for name in self._numbers:
                    number = self._state[p].get(name)
                    if isinstance(number, (int, float)):
                        self._state[p][name] = new_number(p, group, number)
            for p in group["params"] if "step" not in self._numbers else ():
                self._count_of(group, p)
            if self._wants_native(group) and not self._why_not_native(weights):
                self._place_states(group, weights)

    @torch.no_grad()
    def _place_states(self, group: dict[str, Any], weights: list[Tensor]) -> None:
        """Moves states that come from elsewhere to where the native kernels find them fastest."""
        weights = [
            p
            for p in weights
            if self._state[p].keys() >= self._numbers.keys()
            and all(
                name in self._state[p] and self._state[p][name].shape == p.shape
                for name in self._names_of(group, p)
            )
        ]
        for p in weights:
            for name in self._numbers:
                number = self._state[p][name].reshape(())  # older ones have the shape [1]
                self._state[p][name] = new_number(p, group).copy_(number)
        for p, name, tensor in self._zeros(group, weights, native=True):
            self._state[p][name] = in_pieces(Tensor.copy_, tensor, self._state[p][name])


def new_number(weight: Tensor, group: dict[str, Any], value: float = 0.0) -> Tensor:
    """A number beside a weight, on the host unless a device graph counts the steps."""
    device = weight.device if group.get("capturable") else "cpu"
    return torch.tensor(value, dtype=torch.float32, device=device)
