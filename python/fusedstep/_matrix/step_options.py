"""The options of a group as a step of its matrices takes them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from fusedstep._matrix.chosen import has_choice
from fusedstep._matrix.coefficients import coefficients_of
from fusedstep._matrix.muon_groups import ns_dtype_of, starts_aol

#: The factor of a group's learning rate for a matrix: its rows, and all other dimensions.
Ratio = Callable[[dict[str, Any], Sequence[int]], float]


class StepOptions:
    """The options of a group for the matrices on one device, as numbers."""

    def __init__(self, group: dict[str, Any], device: torch.device, ratio: Ratio) -> None:
        """``device``: that of the products."""
        self.group, self._ratio = group, ratio
        self.lr, self.momentum = float(group["lr"]), float(group["momentum"])
        self.lead = self.momentum if group["nesterov"] else 1.0
        """How far an update is on the way from the gradient to the average."""
        self.decay = self.lr * float(group["weight_decay"])
        self.is_cautious = bool(group.get("cautious_decay"))
        self.maximizes = bool(group.get("maximize"))
        self.has_choice = has_choice(group)
        self.eps, self.adds_eps = float(group["eps"]), bool(group.get("adds_eps"))
        self.steps = coefficients_of(group["ns_coefficients"], group["ns_steps"])
        self.starts_aol = starts_aol(group)
        self.products = ns_dtype_of(group, device)
        """The dtype of the products."""

    def ascending(self, grads: list[Tensor]) -> list[Tensor]:
        """The gradients of a step, negated where it maximizes."""
        return list(torch._foreach_neg(grads)) if self.maximizes else grads

    def factors(self, shapes: Iterable[tuple[int, ...]]) -> list[float]:
        """What directions are multiplied by; ``shapes``: those of the matrices of each."""
        return list(map(cache(lambda shape: -self.lr * self._ratio(self.group, shape)), shapes))
