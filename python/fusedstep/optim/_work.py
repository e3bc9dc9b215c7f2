"""The unit of a step: weights of a group that are updated at one go."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

if TYPE_CHECKING:
    from fusedstep.optim._plan import Plan


class Work(NamedTuple):
    """A group that has gradients, or what of it is updated at one go."""

    group: dict[str, Any]
    weights: list[Tensor]
    grads: list[Tensor]
    plan: Plan | None
    """None where the imperative twin updates it."""

    def pairs(self) -> Iterable[tuple[Tensor, Tensor]]:
        return zip(self.weights, self.grads, strict=True)
