"""The products of batches that the native engine takes together, and the memory of these.

Batches may have different shapes. Each level of the chains of products is one launch for all.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fusedstep._matrix.newton_schulz import Chain, Scratch, has_engine
from fusedstep._matrix.passes import normalize_into, sums_size
from fusedstep._matrix.step_options import StepOptions
from fusedstep._step.plan import same

#: The number of the matrices of a part of a weight, and their rows and columns.
Form = tuple[int, int, int]

#: Elements that go through the products of a GPU together at most: their two copies have 0.5 GB.
AT_ONCE = 1 << 27

#: By the dtypes of weights and of products that a group asks for: the dtype of updates. One of 16
#: bits with float32's exponents is rounded as torch rounds an update; float16 would not have its
#: range, before it is divided by its norm.
_UPDATES = {
    (torch.float32, None): torch.bfloat16,
    (torch.float32, torch.bfloat16): torch.bfloat16,
    (torch.float32, torch.float16): torch.float32,
    (torch.bfloat16, None): torch.bfloat16,
    (torch.bfloat16, torch.bfloat16): torch.bfloat16,
    (torch.bfloat16, torch.float16): torch.bfloat16,
    (torch.float16, None): torch.float16,
    (torch.float16, torch.float16): torch.float16,
}


def takes_batches_of(
    device: torch.device, weights: torch.dtype, asked: torch.dtype | None, products: torch.dtype
) -> bool:
    """Returns whether the native engine and passes step batches of a device together.

    Those of a CPU if updates and products are bfloat16. ``asked``: the dtype of products that a
    group asks for; ``products``: the dtype that they have.
    """
    if device.type == "cpu":
        is_bfloat16 = products is updates_dtype(weights, asked) is torch.bfloat16
        return is_bfloat16 and has_engine(device)
    return device.type == "cuda" and has_engine(device)


def updates_dtype(weights: torch.dtype, asked: torch.dtype | None) -> torch.dtype | None:
    """The dtype of updates of weights; None where the engine does not step them."""
    return _UPDATES.get((weights, asked))


class ChainedBatches:
    """The memory of batches: updates, which passes write, and the matrices of the products."""

    def __init__(
        self,
        shapes: Sequence[tuple[int, ...]],
        forms: Sequence[Sequence[Form]],
        device: torch.device,
    ) -> None:
        """The parts of a batch, in order, have matrices of one number of rows and columns.

        ``shapes``: of parts of weights, or whole ones. ``forms``: the matrices of each, by batch.
        """
        self._shapes = shapes
        self._sizes = [math.prod(shape) for shape in shapes]
        self._batches = [(sum(n for n, *_ in batch), *batch[0][1:]) for batch in forms]
        self._of = [index for index, batch in enumerate(forms) for _ in batch]
        self._device = device
        self._memory: list[Tensor] = []
        self._kind: Any = None

    def take(self, scratch: Scratch, options: StepOptions, weights: torch.dtype) -> None:
        """Takes all memory of a step: what the step before has taken, if there is no other user.

        ``weights``: the dtype of the weights.
        """
        size, device = (sum(self._sizes),), self._device
        updates = updates_dtype(weights, options.group.get("ns_dtype"))
        assert updates is not None
        products, steps, is_aol = options.products, options.steps, options.starts_aol
        kind = updates, products, steps, is_aol
        update = scratch.take("update", size, updates, device)
        memory = [update, scratch.take("other", size, products, device)]
        in_place = updates.itemsize == products.itemsize
        if not in_place:
            memory.append(scratch.take("matrices", size, products, device))
        if not (kind == self._kind and same(memory, self._memory)):
            self._memory, self._kind = memory, kind
            quotient, spare = update.view(products) if in_place else memory[2], memory[1]
            self._matrices, self._quotients = self._in_batches(update), self._in_batches(quotient)
            self._chain = Chain(self._quotients, self._in_batches(spare), steps, is_aol)
            self.updates = self._parts(update)
            """Where each part's update is to be written."""
            self._sums_size = sums_size(self._matrices)
            found = [self._parts(spare), self._parts(quotient)]
            self._directions = [
                found[self._chain.is_in_place(batch)][place] for place, batch in enumerate(self._of)
            ]
        self._sums = scratch.take("sums", (self._sums_size,), torch.float32, device)
        self._chain.take(scratch)

    @property
    def flat_updates(self) -> Tensor:
        """The memory of all updates, one behind another, once it is taken."""
        return self._memory[0]

    def _parts(self, flat: Tensor) -> list[Tensor]:
        pieces = zip(flat.split(self._sizes), self._shapes, strict=True)
        return [piece.view(shape) for piece, shape in pieces]

    def _in_batches(self, flat: Tensor) -> list[Tensor]:
        pieces = flat.split([math.prod(batch) for batch in self._batches])
        return [piece.view(batch) for piece, batch in zip(pieces, self._batches, strict=True)]

    def orthogonalize(self, options: StepOptions) -> list[Tensor]:
        """Iterates on the updates. Returns the result of each part, in the part's shape."""
        eps, adds_eps = options.eps, options.adds_eps
        normalize_into(self._matrices, self._quotients, self._sums, eps, adds_eps)
        self._chain.run()
        return self._directions
