"""Memory for the low-rank gradients and updates of a list of weights, and the step over it."""

from __future__ import annotations

import math
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from fusedstep._matrix.channel_moves import ChannelMoves
from fusedstep._matrix.products import as_matrix, project_all, size_between
from fusedstep._native import ops
from fusedstep._state.states import StateStore
from fusedstep._step.plan import GradUse, Plan

#: Tensors in scratch memory begin at multiples of so many elements.
_ALIGNED = 64


class Scratch:
    """Low-rank gradients and updates of weights of one dtype on one device.

    The native step takes the updates for weights that are 0, and so leaves in them what it would
    add to a weight. Products of 16-bit weights have their dtype; the step is float32.
    """

    @torch.inference_mode(False)  # the memory is for steps outside of it, too
    @torch.no_grad()
    def __init__(
        self,
        weights: list[Tensor],
        states: list[dict[str, Tensor]],
        shapes: list[torch.Size],
        bases: list[dict[str, torch.Size]],
        kind: tuple[Any, ...],
    ) -> None:
        """``shapes``: of low-rank gradients. ``bases``: their shapes by side.

        ``kind``: all that this memory is made for.
        """
        self.weights, self.kind = list(weights), kind
        self.dtype, device = weights[0].dtype, weights[0].device
        ends = list(accumulate(-(-shape.numel() // _ALIGNED) * _ALIGNED for shape in shapes))

        def memory(dtype: torch.dtype) -> tuple[Tensor, list[Tensor]]:
            flat = torch.zeros(ends[-1], dtype=dtype, device=device)
            begins = [0, *ends[:-1]]
            return flat, [
                flat[begin : begin + shape.numel()].view(shape)
                for begin, shape in zip(begins, shapes, strict=True)
            ]

        wide = torch.float64 if self.dtype is torch.float64 else torch.float32
        self._flat_grads, self.grads = memory(wide)
        self._flat_updates, self.updates = memory(wide)
        self._flat_narrow: Tensor | None = None
        self._narrow: list[Tensor] = []
        if wide != self.dtype:
            self._flat_narrow, self._narrow = memory(self.dtype)
        between = max(map(size_between, bases))
        self.between = torch.empty(between, dtype=self.dtype, device=device) if between else None
        self._bases: list[dict[str, Tensor]] = [{} for _ in weights]
        self._new: dict[int, dict[str, Tensor]] = {}
        names = ("exp_avg", "exp_avg_sq")
        slots = StateStore.slots(names, self.updates, states)
        self.plan = Plan(self.updates, slots, states, names, ("step",), False, False)
        self.moves: ChannelMoves | None = None
        """Those of an optimizer whose weights move along their gradients."""
        self.has_products = False
        """True if the step under way has taken products before its bases were looked at."""
        self.had_no_factor = False
        """True if the last step did not multiply gradients."""

    def bases(self, index: int) -> dict[str, Tensor]:
        """The bases of a weight, in its dtype: those of the step under way, or none before one."""
        return self._new.get(index, self._bases[index])

    def keep_bases(self, index: int, bases: dict[str, Tensor]) -> None:
        """Keeps new bases for the steps that follow; ``bases``: where they are in full."""
        new = self._new.pop(index)
        self._bases[index] = bases if self._flat_narrow is None else new

    def forget_step(self) -> None:
        """Forgets new bases that have not been kept, and gradients."""
        self._new.clear()
        if self.moves:
            self.moves.release()

    def low(self, index: int) -> Tensor:
        """The low-rank gradient of a weight, as its product has left it."""
        return (self._narrow or self.grads)[index]

    def update(self, index: int) -> Tensor:
        """The update of a weight in its dtype, when the step has been taken."""
        return (self._narrow or self.updates)[index]

    def set_bases(self, index: int, bases: dict[str, Tensor]) -> None:
        """Sets the bases that a weight has in this step."""
        if bases is not self._bases[index]:
            self._new[index] = {side: basis.to(self.dtype) for side, basis in bases.items()}

    def project(self, grads: dict[int, Tensor], factor: float) -> None:
        """Writes the low-rank gradients of weights, times a factor; ``grads``: by index.

        Gradients that are no matrices in memory are copied, one at a time.
        """
        together: dict[int, Tensor] = {}
        for index, grad in grads.items():
            matrix = as_matrix(grad)
            if matrix.data_ptr() == grad.data_ptr():
                together[index] = matrix
            else:
                self._project({index: matrix}, factor)
        if together:
            self._project(together, factor)

    def _project(self, matrices: dict[int, Tensor], factor: float) -> None:
        bases, low = map(self.bases, matrices), map(self.low, matrices)
        project_all([*matrices.values()], [*bases], [*low], self.between, factor)

    def look(self) -> None:
        """Takes one pass over all low-rank gradients, and does not wait for it."""
        flat = self._flat_grads if self._flat_narrow is None else self._flat_narrow
        self._sum = flat.sum(dtype=self._flat_grads.dtype)

    def is_finite(self) -> bool:
        """Returns whether all low-rank gradients are, as ``look`` has found; waits for that."""
        return math.isfinite(self._sum.item())

    def prepare(self, rule: str, numbers: tuple[Any, ...]) -> None:
        """Does what may fail in the step, and changes no state yet."""
        if self._flat_narrow is not None:
            self._flat_grads.copy_(self._flat_narrow)
        self._flat_updates.zero_()
        self.plan.bind(self.updates, self.grads, False)
        ops.prepare_step(rule, self.plan.handle, numbers, 1.0, GradUse.LEAVE)

    def narrow(self) -> None:
        """Rounds the updates to the dtype of the products, when the step has been taken."""
        if self._flat_narrow is not None:
            self._flat_narrow.copy_(self._flat_updates)


def step_all(scratches: list[Scratch]) -> None:
    """Takes the steps that have been prepared in one call: nothing can fail between two."""
    if scratches:
        ops.take_steps([scratch.plan.handle for scratch in scratches])
    for scratch in scratches:
        scratch.narrow()
