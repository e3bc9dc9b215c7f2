"""The passes of a step around its matrix products, in one native pass each.

Their bits are those of torch's operations one by one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from fusedstep._matrix.newton_schulz import Scratch
from fusedstep._native import ops

_PLAIN = (Tensor, torch.nn.Parameter)

#: Dtypes of products beside those of the weights themselves, by these.
_PRODUCTS = {
    torch.float32: (torch.bfloat16, torch.float16),
    torch.bfloat16: (torch.float16,),
}


def are_taken(weights: list[Tensor], averages: list[Tensor], grads: list[Tensor]) -> bool:
    """Returns whether native passes take the tensors of a batch that is stepped by itself.

    A GPU's: on a CPU its products may lack memory when averages have been written.
    """
    return weights[0].is_cuda and have_passes(weights, averages, grads)


def have_passes(weights: list[Tensor], averages: list[Tensor], grads: list[Tensor]) -> bool:
    """Returns whether there are native passes over these tensors, of one dtype and device.

    Gradients on a CPU may lie otherwise than passes take them: ``in_order`` copies these.
    """
    first = weights[0]
    return (
        (first.is_cpu or (first.is_cuda and not torch._C._len_torch_dispatch_stack()))
        and first.dtype in ops.DTYPES
        and not ops.missing_on(first.device.type)
        and lie_in_order(chain(weights, averages, () if first.is_cpu else grads))
        and all(type(each) in _PLAIN for each in grads)
    )


def lie_in_order(tensors: Iterable[Tensor]) -> bool:
    """Returns whether passes take tensors as they lie in memory."""
    return all(
        type(each) in _PLAIN and each.is_contiguous() and not each.is_neg() for each in tensors
    )


def in_order(tensors: list[Tensor]) -> list[Tensor]:
    """Tensors as passes take them: copies of those that lie otherwise."""
    return [each.resolve_neg().contiguous() for each in tensors]


def has_pass(weights: torch.dtype, products: torch.dtype) -> bool:
    """Returns whether passes over weights of a dtype write and read products of another."""
    return products in (weights, *_PRODUCTS.get(weights, ()))


def average_into(
    averages: list[Tensor],
    grads: list[Tensor],
    updates: Sequence[Tensor],
    share: float,
    lead: float,
) -> None:
    """Takes a share of gradients into averages, and writes updates that these lead.

    ``updates``: a part of the way from a gradient to the average, ``lead``; 1 is the average.
    """
    run = torch.ops.fusedstep.average_into.default
    run(averages, grads, updates, share, lead, lead != 1)
    increment_version(averages)


def sums_size(x: list[Tensor]) -> int:
    """The numbers of float32 that ``normalize_into`` needs for batches ``[B, M, N]``."""
    return torch.ops.fusedstep.normalize_sums.default(x)


def take_sums(x: list[Tensor], scratch: Scratch) -> Tensor:
    """Memory for the sums of squares of batches ``[B, M, N]``, as ``normalize_into`` needs it."""
    return scratch.take("sums", (sums_size(x),), torch.float32, x[0].device)


def normalize_into(
    x: list[Tensor], to: list[Tensor], sums: Tensor, eps: float, adds_eps: bool
) -> None:
    """Writes matrices divided by their norms, which are ``eps`` at least, or plus ``eps``.

    ``to`` may be the memory of ``x``, if their numbers have as many bytes.
    """
    torch.ops.fusedstep.normalize_into.default(x, to, sums, eps, adds_eps)


def decay_and_add(
    weights: list[Tensor], directions: Sequence[Tensor], keep: float, factors: list[float]
) -> None:
    """Multiplies weights by a number, and adds directions times their factors."""
    torch.ops.fusedstep.decay_and_add.default(weights, directions, keep, factors)
    increment_version(weights)
