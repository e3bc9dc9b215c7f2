"""Weights that are stepped together, the parts that they are taken apart into, and shares of these.

Matrices of a share go through the products at one go.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fusedstep._matrix.muon_groups import Part
from fusedstep._matrix.operands import Moving, Parts


class BatchShare(NamedTuple):
    """Matrices of a batch that go through the products at one go."""

    parts: list[tuple[int, Part]]
    """Places of weights in the batch, and their parts."""
    counts: list[int]
    """The number of the matrices of each part."""
    shape: tuple[int, int, int]
    """The number of all matrices, and the rows and columns that they have with zeros."""
    is_padded: bool
    is_plain: bool
    """True if each part is one matrix, in its own shape."""

    @classmethod
    def made_of(cls, parts: list[tuple[int, Part]]) -> BatchShare:
        counts, rows, columns = map(list, zip(*(part.form for _, part in parts), strict=True))
        shape = sum(counts), max(rows), max(columns)
        is_padded = any(part.form[1:] != shape[1:] for _, part in parts)
        is_plain = all(part.shape == shape[1:] for _, part in parts)
        return cls(parts, counts, shape, is_padded, is_plain)

    def of(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The parts of tensors, one for each weight of the batch."""
        return [part.of(tensors[index]) for index, part in self.parts]

    def parts_in(self, x: Tensor) -> Sequence[Tensor]:
        """Views of matrices ``x``, in the shapes of the parts."""
        if self.is_plain:
            return x.unbind()  # in one call: the host is what a GPU waits for
        pieces = zip(x.split(self.counts), self.parts, strict=True)
        return [
            piece[:, : part.form[1], : part.form[2]].view(part.shape) for piece, (_, part) in pieces
        ]


class Together(NamedTuple):
    """Weights of one dtype that are stepped together: this process has whole matrices of them."""

    places: list[int]
    """Their places in the list of the step."""
    weights: list[Tensor]
    shares: list[BatchShare]
    """One of all whole weights, or one for each shape of the parts that weights are split into."""
    shapes: list[tuple[int, ...]]
    """The rows of the matrices of each part, and all other dimensions."""
    moving: list[Moving]
    """Their operands but for the gradients; empty where each step makes copies of some."""

    @property
    def is_padded(self) -> bool:
        return self.shares[0].is_padded  # where weights are split, none is

    @property
    def matrices(self) -> list[tuple[int, int, int]]:
        """The matrices of each share: their number, and the rows and columns of each."""
        return [share.shape for share in self.shares]

    def parts(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The parts of tensors, one for each weight, share by share."""
        return [part for share in self.shares for part in share.of(tensors)]

    def parts_of(self, moving: list[Moving]) -> Parts:
        """The parts of operands, one for each weight."""
        values, averages, grads = zip(*(each[-3:] for each in moving), strict=True)
        return Parts(*map(self.parts, (values, averages, grads)))

    def parts_in(self, x: list[Tensor]) -> Sequence[Tensor]:
        """Views of the matrices of each share, in the shapes of the parts."""
        if len(x) == 1:
            return self.shares[0].parts_in(x[0])
        pairs = zip(self.shares, x, strict=True)
        return [part for share, each in pairs for part in share.parts_in(each)]


def parts_of_batches(batches: list[Together], tensors: list[Tensor]) -> list[Tensor]:
    """The parts of tensors, one for each weight of some batches, batch by batch."""
    each = iter(tensors)
    return [
        part
        for batch in batches
        for part in batch.parts(list(itertools.islice(each, len(batch.weights))))
    ]


def moments_of(
    group: dict[str, Any], shares: list[BatchShare], moving: list[Moving]
) -> list[Tensor]:
    """Copies of NorMuon's averages, [count, rows, 1] of each share; none without NorMuon."""
    if not group.get("normuon"):
        return []
    moments = [each.state["second_momentum_buffer"] for each in moving]
    return [
        torch.cat([each.reshape(-1, share.shape[1], 1) for each in share.of(moments)])
        for share in shares
    ]


def keep_moments(shares: list[BatchShare], moving: list[Moving], moments: list[Tensor]) -> None:
    """Writes the averages of ``moments_of`` to the states."""
    for share, new in zip(shares, moments, strict=False):
        kept = share.of([each.state["second_momentum_buffer"] for each in moving])
        for old, part in zip(kept, new.split(share.counts), strict=True):
            old.copy_(part.view(old.shape))
