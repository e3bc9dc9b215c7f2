"""Matrix products of a step into memory that is there: torch's, or for many matrices native ones.

``bases`` has a basis by the name of its side (``_matrix/projection.py``).
"""

from __future__ import annotations

import torch
from torch import Tensor

from fusedstep._matrix.projection import LEFT, RIGHT

#: Names of torch's precisions, by the number that the native products know them by.
_PRECISIONS = ("highest", "high", "medium")


def as_matrix(tensor: Tensor) -> Tensor:
    """A tensor as a matrix of its first dimension and all others: a view, if strides allow it."""
    return tensor if tensor.dim() == 2 else tensor.flatten(1)


def dtype_of_products(weight: Tensor) -> torch.dtype:
    """The dtype whose precision a move by products of gradients and bases has, or a rougher one.

    Bases amplify the roundings of float32 by ratios of singular values and of their distances.
    """
    if weight.dtype is not torch.float32:
        return weight.dtype
    is_exact = torch.get_float32_matmul_precision() == "highest"
    return torch.float16 if is_exact else torch.bfloat16


def product(a: Tensor, b: Tensor, out: Tensor, factor: float = 1.0) -> Tensor:
    """Writes ``factor * a @ b``."""
    if factor == 1:
        return torch.mm(a, b, out=out)
    return torch.addmm(out, a, b, beta=0, alpha=factor, out=out)


def project(
    grad: Tensor,
    bases: dict[str, Tensor],
    out: Tensor | None = None,
    between: Tensor | None = None,
    factor: float = 1.0,
) -> Tensor:
    """The low-rank gradient times a factor. ``between``: memory for the first of two products."""
    if out is None:
        out = grad.new_empty(_low_shape(grad, bases))
    if len(bases) == 1:
        return product(*_projection(grad, bases), out, factor)
    half = _half(bases, between)
    if _left_first(bases):
        return product(product(bases[LEFT].t(), grad, half), bases[RIGHT].t(), out, factor)
    return product(bases[LEFT].t(), product(grad, bases[RIGHT].t(), half), out, factor)


def project_all(
    grads: list[Tensor],
    bases: list[dict[str, Tensor]],
    out: list[Tensor],
    between: Tensor | None,
    factor: float,
) -> None:
    """Writes low-rank gradients of one dtype times a factor, in one call where one is native."""
    if all(len(of_one) == 1 for of_one in bases):
        pairs = [_projection(grad, of_one) for grad, of_one in zip(grads, bases, strict=True)]
        if _take_together(pairs, out, [factor] * len(out), [0.0] * len(out)):
            return
    for grad, of_one, low in zip(grads, bases, out, strict=True):
        project(grad, of_one, low, between, factor)


def _projection(grad: Tensor, bases: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """The factors of a product that projects a gradient from one side."""
    return (bases[LEFT].t(), grad) if LEFT in bases else (grad, bases[RIGHT].t())


def _take_together(
    pairs: list[tuple[Tensor, Tensor]], out: list[Tensor], alpha: list[float], beta: list[float]
) -> bool:
    """Takes ``out = alpha * a @ b + beta * out`` of all pairs, or returns False and takes none."""
    precision = _PRECISIONS.index(torch.get_float32_matmul_precision())
    if out[0].dtype is not torch.float32 or (out[0].is_cpu and precision == 0):
        return False
    some: list[int] = []
    empty: list[int] = []  # such as those of a shard without elements
    for index, (a, b) in enumerate(pairs):
        (some if a.numel() and b.numel() else empty).append(index)
    operands = *map(list, zip(*pairs, strict=True)), out, alpha, beta
    taken = [[of_all[index] for index in some] for of_all in operands]
    if not (some and torch.ops.fusedstep.low_rank_products.default(*taken, precision)):
        return False
    for index in empty:
        out[index].addmm_(*pairs[index], beta=beta[index], alpha=alpha[index])
    return True


def in_tf32(matrix: Tensor, count: int) -> Tensor:
    """A float32 matrix as [count, …] matrices that add up to it: the nearest of TF32, and the rest.

    With one of them, a product is rounded as in TF32; with two, it is as exact as in float32.
    """
    bits = (matrix.contiguous().view(torch.int32) + 0x1000) & -0x2000
    large = bits.view(torch.float32)
    return torch.stack([large, matrix - large][:count])


def add_back(
    weight: Tensor,
    low: Tensor,
    bases: dict[str, Tensor],
    keep: float,
    factor: float,
    between: Tensor | None = None,
) -> None:
    """Sets a matrix to ``keep`` times it plus ``factor`` times the low-rank update in full."""
    if len(bases) == 1:
        pair = _way_back(low, bases)
    elif _left_first(bases):
        pair = bases[LEFT], torch.mm(low, bases[RIGHT], out=_half(bases, between))
    else:
        pair = torch.mm(bases[LEFT], low, out=_half(bases, between)), bases[RIGHT]
    weight.addmm_(*pair, beta=keep, alpha=factor)


def add_back_all(
    weights: list[Tensor],
    low: list[Tensor],
    bases: list[dict[str, Tensor]],
    keep: float,
    factor: float,
) -> bool:
    """As ``add_back`` for all weights in one native call, or returns False and changes nothing."""
    if any(len(of_one) > 1 for of_one in bases):
        return False
    pairs = list(map(_way_back, low, bases))
    return _take_together(pairs, weights, [factor] * len(weights), [keep] * len(weights))


def _way_back(low: Tensor, bases: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """The factors of a low-rank update in full, from one side."""
    return (bases[LEFT], low) if LEFT in bases else (low, bases[RIGHT])


def size_between(bases: dict[str, torch.Size]) -> int:
    """Elements that the first of two products has; ``bases``: their shapes."""
    return min(shape.numel() for shape in bases.values()) if len(bases) == 2 else 0


def _left_first(bases: dict[str, Tensor]) -> bool:
    """Returns whether the first product of two is that from the left: the smaller one."""
    return bases[RIGHT].numel() <= bases[LEFT].numel()


def _half(bases: dict[str, Tensor], between: Tensor | None) -> Tensor:
    like = bases[RIGHT] if _left_first(bases) else bases[LEFT]
    return torch.empty_like(like) if between is None else between[: like.numel()].view(like.shape)


def _low_shape(grad: Tensor, bases: dict[str, Tensor]) -> tuple[int, int]:
    return (
        bases[LEFT].shape[1] if LEFT in bases else grad.shape[0],
        bases[RIGHT].shape[0] if RIGHT in bases else grad.shape[1],
    )
