"""torch's functional form of an optimizer as the formula of a class."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Protocol, cast

from torch import Tensor

#: Arguments that are the same for every weight, or that a step has applied to the gradient.
_GIVEN = {"foreach": False, "maximize": False}
_LEFT_OUT = {"fused", "grad_scale", "found_inf", "has_complex", "has_sparse_grad"}


class Formula(Protocol):
    """The method ``_formula`` of an optimizer."""

    def __call__(
        self, group: dict[str, Any], weight: Tensor, grad: Tensor, state: dict[str, Tensor]
    ) -> Tensor: ...


def by_torch(function: Callable[..., None], *states: str) -> Formula:
    """Returns the ``_formula`` of a class whose namesake computes its step by this function.

    ``states``: names in the order of the function's lists. The list of a state that is not there is
    empty.
    """
    parameters = list(inspect.signature(function).parameters)
    options = [
        name for name in parameters[2 + len(states) :] if name not in _LEFT_OUT | _GIVEN.keys()
    ]
    takes_sparse = "has_sparse_grad" in parameters

    def _formula(
        self: Any, group: dict[str, Any], weight: Tensor, grad: Tensor, state: dict[str, Tensor]
    ) -> Tensor:
        values = dict(group)
        if "betas" in group:
            values["beta1"], values["beta2"] = group["betas"]
        given = _GIVEN | {name: values[name] for name in options}
        if takes_sparse:
            given["has_sparse_grad"] = grad.is_sparse
        lists = [[state[name]] if name in state else [] for name in states]
        function([weight], [grad], *lists, **given)
        return weight

    return cast("Formula", _formula)  # a class makes a method of it
