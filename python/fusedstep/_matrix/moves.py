"""Decays weights and moves them along their directions."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fusedstep._matrix.newton_schulz import Scratch
from fusedstep._matrix.passes import decay_and_add
from fusedstep._matrix.step_options import StepOptions
from fusedstep._step.undo import numbers_first


class Move:
    """A move of values of weights, or of parts of them: it allocates nothing when it is taken."""

    def __init__(
        self, options: StepOptions, scratch: Scratch, values: list[Tensor], is_native: bool
    ) -> None:
        """``is_native``: whether a native pass takes the values."""
        self._options, self._values, self._is_native = options, values, is_native
        if is_native and not options.is_cautious:
            return
        like, most = values[0], max(map(Tensor.numel, values))
        shape = (most if options.is_cautious else 0,)
        self._share, self._is_same = (
            scratch.take("share", shape, x, like.device) for x in (like.dtype, torch.bool)
        )
        self._keep, self._zero = numbers_first(like, 1 - options.decay, 0.0)

    def take(self, directions: Sequence[Tensor], factors: list[float]) -> None:
        """``factors``: what directions are multiplied by."""
        values, decay = self._values, self._options.decay
        if decay and self._options.is_cautious:
            self._decay_cautiously(directions)
            decay = 0.0
        if self._is_native:
            decay_and_add(values, directions, 1 - decay, factors)
            return
        if decay:
            torch._foreach_mul_(values, self._keep)
        alike: dict[float, list[int]] = {}
        for index, factor in enumerate(factors):
            alike.setdefault(factor, []).append(index)
        for factor, indices in alike.items():
            pairs = ([each[i] for i in indices] for each in (values, directions))
            torch._foreach_add_(*pairs, alpha=factor)

    def _decay_cautiously(self, directions: Sequence[Tensor]) -> None:
        """Decays the elements that the directions make smaller."""
        for value, direction in zip(self._values, directions, strict=True):
            share, is_same = (
                x[: value.numel()].view(value.shape) for x in (self._share, self._is_same)
            )
            torch.ge(torch.mul(value, direction, out=share), self._zero, out=is_same)
            value.addcmul_(share.copy_(is_same), value, value=-self._options.decay)
