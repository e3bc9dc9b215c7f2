"""The subspace that most of a gradient lies in: orthonormal bases of it, by several ways.

=============  ================================================================================
way            basis
=============  ================================================================================
exact          the first singular vectors, by a full singular value decomposition
randomized     a range finder (Halko, Martinsson and Tropp, 2011, algorithms 4.4 and 5.1): a
               random product with 8 columns more than the rank, two power steps, each product
               made orthonormal by QR, and the singular vectors of what is left
power          one block power step from the last basis, made orthonormal by QR
=============  ================================================================================
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fusedstep._matrix.projection import LEFT

#: Columns of a random product beyond the rank, and power steps.
OVERSAMPLING, POWER_STEPS = 8, 2


def gaussian(shape: Sequence[int], key: int, like: Tensor) -> Tensor:
    """Standard normal numbers that follow from a key: the same on every device, in every dtype."""
    generator = torch.Generator("cpu").manual_seed(key % 2**63)
    numbers = torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")
    dtype = torch.float64 if like.dtype is torch.float64 else torch.float32
    return numbers.to(like.device, dtype)


def bases_of(
    matrix: Tensor,
    rank: int,
    sides: tuple[str, ...],
    svd: str,
    previous: dict[str, Tensor] | None,
    key: int,
) -> dict[str, Tensor]:
    """Orthonormal bases of a float32 or float64 matrix, by side.

    ``previous``: the last ones; without any ``"power"`` is ``"randomized"``. ``key``: of random
    numbers. If the library gives up, so does the way: the decomposition is tried in float64 and
    then of the Gram matrix, with a warning, once in a process.
    """
    try:
        if svd == "exact":
            return _exact(matrix, rank, sides)
        largest = matrix.abs().amax()
        matrix = matrix / torch.where(largest > 0, largest, 1)  # squares stay in range
        found = {}
        for side in sides:
            # The basis from the right is that of the transposed matrix from the left.
            tall = matrix if side == LEFT else matrix.t()
            last = None if previous is None else previous[side]
            last = last if last is None or side == LEFT else last.t()
            if last is None or svd != "power":
                basis = _randomized(tall, rank, last, key)
            else:
                basis = _power(tall, rank, last, key)
            found[side] = basis if side == LEFT else basis.t().contiguous()
        return found
    except torch.linalg.LinAlgError as error:
        return _by_other_means(matrix, rank, sides, str(error))


def overlap(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    """The mean squared cosine of the angles between two subspaces; of two sides the smaller."""
    found = []
    for side in a:
        cosines = a[side].t() @ b[side] if side == LEFT else a[side] @ b[side].t()
        found.append(cosines.square().sum().item() / len(cosines))
    return min(found)


def _exact(matrix: Tensor, rank: int, sides: tuple[str, ...]) -> dict[str, Tensor]:
    u, _, vh = torch.linalg.svd(matrix, full_matrices=False)
    return {side: u[:, :rank].contiguous() if side == LEFT else vh[:rank].clone() for side in sides}


def _orthonormal(columns: Tensor) -> Tensor:
    """An orthonormal basis of columns, near the columns themselves where these are orthogonal."""
    q, r = torch.linalg.qr(columns)
    return q * torch.where(r.diagonal() < 0, -1.0, 1.0).to(q.dtype)


def _randomized(matrix: Tensor, rank: int, previous: Tensor | None, key: int) -> Tensor:
    rows, columns = matrix.shape
    width = min(rank + OVERSAMPLING, rows, columns)
    image = matrix @ gaussian((columns, width), key, matrix)
    for _ in range(POWER_STEPS):
        image = matrix @ _orthonormal(matrix.t() @ _orthonormal(image))
    # The singular vectors of the matrix within the rows that it has been multiplied by last.
    _, vectors = torch.linalg.eigh(image.t() @ image)  # in ascending order
    return _orthonormal(image @ vectors.flip(1)[:, :rank])


def _power(matrix: Tensor, rank: int, previous: Tensor, key: int) -> Tensor:
    return _orthonormal(matrix @ (matrix.t() @ previous))


@functools.cache
def _warn(how: str) -> None:
    warnings.warn(f"a projector's decomposition did not succeed; {how}", stacklevel=2)


def _by_other_means(
    matrix: Tensor, rank: int, sides: tuple[str, ...], why: str
) -> dict[str, Tensor]:
    ways: dict[str, Callable[..., dict[str, Tensor]]] = {
        "it is done in float64 then": _exact,
        "the Gram matrix is decomposed then": _of_gram_matrix,
    }
    for how, decompose in ways.items():
        try:
            found = decompose(matrix.double(), rank, sides)
        except torch.linalg.LinAlgError:
            continue
        _warn(how)
        return {side: basis.to(matrix.dtype) for side, basis in found.items()}
    raise RuntimeError(f"no decomposition of a gradient succeeded: {why}")


def _of_gram_matrix(matrix: Tensor, rank: int, sides: tuple[str, ...]) -> dict[str, Tensor]:
    """The first singular vectors, by the eigenvectors of the smaller one of the two products."""
    is_wide = matrix.shape[0] <= matrix.shape[1]
    wide = matrix if is_wide else matrix.t()
    _, vectors = torch.linalg.eigh(wide @ wide.t())
    first = vectors.flip(1)[:, :rank]
    other = _orthonormal(wide.t() @ first)
    left, right = (first, other) if is_wide else (other, first)
    return {side: left if side == LEFT else right.t().contiguous() for side in sides}
