"""Moves of weights along their gradients, each channel by a factor that norms in a low rank give.

Native passes go over all weights of a plan at once. The sums of squares between them are tensors,
so that processes may add up theirs.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from itertools import accumulate

import torch
from torch import Tensor
from torch.autograd.graph import increment_version


class Channels(IntEnum):
    """The parts of a matrix that have a factor each."""

    ROWS = 0
    COLUMNS = 1
    WHOLE = 2

    @property
    def reduced(self) -> int | None:
        """The dimension that a channel lies along; None for all."""
        return None if self is Channels.WHOLE else 1 - self

    def count(self, matrix: Tensor) -> int:
        return 1 if self is Channels.WHOLE else matrix.shape[self]


class ChannelMoves:
    """Moves of the weights that a plan has low-rank gradients and updates of.

    The methods are those of a step, in their order. Only the first two may fail on a CPU.
    """

    def __init__(
        self, plan: int, lows: list[Tensor], updates: list[Tensor], channels: Sequence[Channels]
    ) -> None:
        torch.ops.fusedstep.plan_channels.default(plan, lows, updates, channels)
        self._plan, self._memory = plan, lows[0].new_empty(0, dtype=torch.float64)
        counts = [each.count(low) for each, low in zip(channels, lows, strict=True)]
        self._firsts = list(accumulate(counts, initial=0))
        self._grads: list[Tensor] = []

    @torch.inference_mode(False)  # the memory is for steps outside of it, too
    def bind(
        self,
        weights: list[Tensor] | None,
        grads: list[Tensor],
        last_norms: list[Tensor],
        lengths: list[float],
    ) -> None:
        """Takes note of the operands, which are matrices.

        ``weights``: for ``move``. ``last_norms``: those of the last scaled gradients. ``lengths``:
        factors that the updates have.
        """
        operators = torch.ops.fusedstep
        size = operators.channels_bind.default(self._plan, grads, last_norms, lengths)
        if weights is not None:
            operators.channels_bind_weights.default(self._plan, weights)
        if self._memory.numel() < size:
            self._memory = self._memory.new_empty(size)
        self._grads = grads  # some may be copies

    def sum_gradients(self) -> None:
        """Writes ``low_squares`` and ``squares``."""
        torch.ops.fusedstep.channels_sum_gradients.default(self._plan, self._memory)

    def sum_updates(self) -> None:
        """Writes ``update_squares``."""
        torch.ops.fusedstep.channels_sum_updates.default(self._plan)

    def scale(self, factor: float, epsilon: float) -> None:
        """Makes factors of these sums, and writes ``norm_squares``.

        ``factor``: of the low-rank gradients alone. ``epsilon``: added to norms of the divisor.
        """
        torch.ops.fusedstep.channels_scale.default(self._plan, factor, epsilon)

    def limit(
        self, limits: bool, in_front: bool, root: float, growth: float, epsilon: float, times: float
    ) -> None:
        """Limits the growth of the norm, and writes the norms that gradients have then.

        ``root``: a factor, ``in_front`` of the limit or behind it. ``times``: of the moves.
        """
        run = torch.ops.fusedstep.channels_limit.default
        run(self._plan, limits, in_front, root, growth, epsilon, times)

    def move(self, first: int, weights: list[Tensor], keep: float) -> None:
        """Multiplies weights by a number, and adds gradients times their factors.

        ``weights``: those that are bound, from number ``first`` on.
        """
        torch.ops.fusedstep.channels_move.default(self._plan, first, len(weights), keep)
        increment_version(weights)

    def move_onto(self, index: int, matrix: Tensor, keep: float) -> None:
        """Moves a matrix in place of a weight."""
        torch.ops.fusedstep.channels_move_onto.default(self._plan, index, matrix, keep)
        increment_version(matrix)

    def release(self) -> None:
        """Holds no gradients any more."""
        self._grads = []

    def low_squares(self, index: int) -> Tensor:
        """The sums of squares of the channels of a low-rank gradient, float64 as all of them."""
        return self._of(0, index)

    def squares(self, index: int) -> Tensor:
        """Those of a gradient."""
        return self._of(1, index)

    def update_squares(self, index: int) -> Tensor:
        """Those of an update."""
        return self._of(2, index)

    def norm_squares(self, index: int) -> Tensor:
        """The square of the norm of a scaled gradient."""
        begin = 3 * self._firsts[-1] + index
        return self._memory[begin : begin + 1]

    def _of(self, kind: int, index: int) -> Tensor:
        begin = kind * self._firsts[-1]
        return self._memory[begin + self._firsts[index] : begin + self._firsts[index + 1]]
