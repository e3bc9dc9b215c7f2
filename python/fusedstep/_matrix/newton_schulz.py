"""Newton–Schulz iterations: matrices of one shape go through matrix products together.

A step of coefficients (a, b, c) takes the singular values s of a matrix to ``a s + b s³ + c s⁵``
and leaves the singular vectors alone. In the usual form it is ``X ← a X + (b A + c A²) X`` with the
Gram matrix ``A = X Xᵀ``. In the *Gram form* only the small matrices are iterated, A and the product
Q of all polynomials, and one product ``Q X`` follows. It has fewer operations for long matrices,
but A has the squares of the singular values, and a rounding that makes a small one negative grows
from step to step. So after a run of two or three steps Q is multiplied by X, and A computed anew.

Matrices begin with a norm of 1. With the *AOL start* (almost orthogonal layers) the iteration
begins with ``F X`` in their place, where F is diagonal::

    F = diag(1 / sqrt(max(sum_j |A_ij|, 2**-20 / M)))       (M: the rows of the short side)

``diag(sum_j |A_ij|) - A`` is diagonally dominant, so that no singular value of F X is above 1, as
of X, but most are larger. The floor leaves rows short whose norms are below 2**-10 of the root mean
square: zeros stay zeros, and F is finite. X is not scaled: the first run has F A F for A, and ends
with ``Q F``. A is computed times M, and the root of M is a factor of ``Q F X``, which keeps all
numbers in the range of float16: elements of M A are M at most, and 1 on average on the diagonal; F
without the root is 2**10 at most, and an element of Q, the product of the a of its run, is 35 at
most for the runs of `_GROWN`. The largest singular value of the absolute values of F A F is 1 at
most, as that of A's: a rounding of each element has the same bound, and runs are as long.

torch's library computes the products, or the native engine on a device that has one.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from fusedstep._matrix.coefficients import Step
from fusedstep._native import ops

#: The most steps from one Gram matrix of the whole to the next, in the Gram form, and the most that
#: a rounding of this matrix may grow to in them: in the first run, and in later runs, where small
#: singular values have grown. A step multiplies small values by a², and adds roundings of its other
#: terms: the mean of |a|, |b| and |c| counts where it is larger. Two steps of "quintic" in
#: bfloat16 (0.55) err about as much as the usual form. The first two of Polar Express (16) diverge,
#: as the next two do (1.0); in float16 the first err 17 times as much (2.0). Three of "quintic" in
#: float16 (0.82) err 25 times as much as a first run, and twice as much after two other steps.
_RUN, _GROWN, _GROWN_LATER = 3, 0.6, 0.9

#: The share of its operations that a product with a symmetric result takes: the native engine
#: computes one triangle, and the tiles of the diagonal.
_TRIANGLE = 0.55

#: The least sum of a row of M A that the AOL start divides by.
LEAST_SUM = 2.0**-20


class Scratch:
    """Memory that is kept from step to step: a buffer for each use, dtype and device."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, torch.dtype, torch.device], Tensor] = {}
        self._views: dict[tuple[str, torch.dtype, torch.device], dict[tuple[int, ...], Tensor]] = {}

    def take(
        self, use: str, shape: Sequence[int], dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """A tensor with any values, in memory that the next call for this use gets as well."""
        key, shape = (use, dtype, device), tuple(shape)
        views = self._views.setdefault(key, {})
        if shape not in views:
            count = math.prod(shape)
            if key not in self._buffers or self._buffers[key].numel() < count:
                self._buffers.pop(key, None)  # before the larger one is there
                views.clear()
                with torch.inference_mode(False):  # the memory is for steps outside of it, too
                    self._buffers[key] = torch.empty(count, dtype=dtype, device=device)
            views[shape] = self._buffers[key][:count].view(shape)
        return views[shape]

    def tensors(self) -> list[Tensor]:
        return list(self._buffers.values())


def usual_dtype(device: torch.device) -> torch.dtype:
    """The dtype in which a device takes products fastest.

    float16 on GPUs with the native engine: its products take the time of bfloat16's, and three bits
    more let runs of the Gram form be longer. bfloat16 on other GPUs, on CPUs with AVX512-BF16 or
    AMX, and on ARM if oneDNN has instructions for it. Elsewhere oneDNN converts at each use, which
    takes twice the time of float32.
    """
    if device.type != "cpu":
        return torch.float16 if has_engine(device) else torch.bfloat16
    if torch.backends.cpu.get_cpu_capability().startswith("AVX"):
        asks = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
        has = any(getattr(torch.cpu, name, bool)() for name in asks)
    else:
        has = bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return torch.bfloat16 if has else torch.float32


def has_engine(device: torch.device) -> bool:
    """Returns whether the native engine takes chains of 16-bit products on a device."""
    if device.type == "cuda":
        return _has_cuda_engine(device.index or 0)
    return device.type == "cpu" and not ops.missing and torch.ops.fusedstep.has_chains.default(-1)


@functools.cache
def _has_cuda_engine(index: int) -> bool:
    return ops.missing_on("cuda") is None and torch.ops.fusedstep.has_chains(index)


def fits_engine(rows: int, columns: int) -> bool:
    """Returns whether that of a GPU takes matrices of a shape: rows begin at 16 bytes."""
    return rows > 0 and columns > 0 and columns % 8 == 0


def _is_chained(x: Tensor) -> bool:
    if type(x) is not Tensor or not (x.numel() and x.is_contiguous() and has_engine(x.device)):
        return False
    if x.is_cpu:
        return x.dtype is torch.bfloat16
    return x.dtype in (torch.float16, torch.bfloat16) and fits_engine(*x.shape[1:])


def takes_gram_form(
    shape: Sequence[int], dtype: torch.dtype, steps: Sequence[Step], symmetric: float = 1.0
) -> bool:
    """Returns whether the Gram form of these steps has fewer operations than the usual one.

    float32 has to be that: where products round it to fewer bits, as
    ``torch.set_float32_matmul_precision`` allows, the usual form is taken. ``symmetric``: the
    share of its operations that a product with a symmetric result takes.
    """
    if dtype is torch.float32 and torch.get_float32_matmul_precision() != "highest":
        return False
    ratio = max(shape[-2:]) / max(min(shape[-2:]), 1)
    # In products of two matrices of the small size.
    usual = len(steps) * (symmetric * (1 + ratio) + ratio)
    gram, begins = 0.0, True
    for ends in _ends_of(steps, dtype):
        gram += symmetric * (1 + (ratio if begins else 1)) + (ratio if ends else 2 * symmetric)
        begins = ends
    return gram < usual


def _ends_of(steps: Sequence[Step], dtype: torch.dtype) -> tuple[bool, ...]:
    """Tells of each step whether it ends a run: the whole matrix is multiplied after it."""
    return _ends_of_tuple(tuple(steps), torch.finfo(dtype).eps / 2)


@functools.lru_cache(maxsize=64)
def _ends_of_tuple(steps: tuple[Step, ...], unit: float) -> tuple[bool, ...]:
    ends: list[bool] = []
    grown, length, most = unit, 0, _GROWN
    for step in steps:
        growth = max(abs(step[0]), sum(map(abs, step)) / 3) ** 2
        grown, length = grown * growth, length + 1
        if length > 1 and (length > _RUN or grown > most):
            ends[-1] = True
            grown, length, most = unit * growth, 1, _GROWN_LATER
        ends.append(False)
    return (*ends[:-1], True) if ends else ()


def orthogonalize(
    x: Tensor, steps: Sequence[Step], scratch: Scratch, is_aol: bool = False
) -> Tensor:
    """Iterates on matrices ``[B, M, N]`` of which no norm is larger than 1.

    Returns ``x`` or a tensor in the scratch, with the result. ``x`` is overwritten. ``is_aol``: the
    iteration begins with the AOL start.
    """
    spare = scratch.take("other", x.shape, x.dtype, x.device)
    if _is_chained(x):
        chain = Chain([x], [spare], steps, is_aol)
        chain.take(scratch)
        return chain.run()[0]
    short = min(x.shape[1:])
    square = (x.shape[0], short, short)
    names = ["gram", "polynomial"]
    form = _usual_form
    if takes_gram_form(x.shape, x.dtype, steps):
        form, names = _gram_form, [*names, "product", "other product"]
    squares = [scratch.take(name, square, x.dtype, x.device) for name in names]
    start = _Aol(x, scratch) if is_aol else None
    return form(x, spare, squares, steps, start)


class Chain:
    """The products of the native engine over batches of one dtype and device, all together."""

    def __init__(
        self, x: list[Tensor], spare: list[Tensor], steps: Sequence[Step], is_aol: bool = False
    ) -> None:
        """``x``: batches as ``orthogonalize`` has them. ``spare``: tensors of their shapes."""
        ends = [_ends_in_engine(each, steps) for each in x]
        self._in_place = [sum(batch) % 2 == 0 for batch in ends]
        self._x, self._spare = x, spare
        self._arguments = (
            [float(each) for step in steps for each in step],
            [each for batch in ends for each in batch],
            is_aol,
        )
        self._bytes = torch.ops.fusedstep.newton_schulz_workspace.default(x, *self._arguments)

    def is_in_place(self, batch: int) -> bool:
        """Returns whether the result of a batch is in ``x``, or in ``spare``."""
        return self._in_place[batch]

    def take(self, scratch: Scratch) -> None:
        """Takes memory for the products."""
        device = self._x[0].device
        self._workspace = scratch.take("workspace", (self._bytes,), torch.uint8, device)

    def run(self) -> list[Tensor]:
        """Iterates on ``x``. ``x`` and ``spare`` are overwritten; returns the result of each."""
        run = torch.ops.fusedstep.newton_schulz.default
        run(self._x, self._spare, self._workspace, *self._arguments)
        pairs = zip(self._spare, self._x, self._in_place, strict=True)
        return [x if in_place else spare for spare, x, in_place in pairs]


def _ends_in_engine(x: Tensor, steps: Sequence[Step]) -> tuple[bool, ...]:
    if takes_gram_form(x.shape, x.dtype, steps, _TRIANGLE):
        return _ends_of(steps, x.dtype)
    return (True,) * len(steps)


class _Aol:
    """The AOL start of matrices ``[B, M, N]``: the factors of their short side, and what has them.

    The first run of steps has F A F for the Gram matrix A, and multiplies X by Q F.
    """

    def __init__(self, x: Tensor, scratch: Scratch) -> None:
        self._is_tall = x.shape[1] > x.shape[2]
        self._side = min(x.shape[1:])
        wide = torch.promote_types(x.dtype, torch.float32)
        shape = x.shape[0], self._side
        self._factors = scratch.take("factors", shape, wide, x.device)
        self._wide = None
        if wide is not x.dtype:
            self._wide = scratch.take("wide", (*shape, self._side), wide, x.device)

    def gram(self, x: Tensor, out: Tensor) -> None:
        """F A F, from x itself."""
        pair = (x.mT, x) if self._is_tall else (x, x.mT)
        torch.baddbmm(out, *pair, beta=0, alpha=self._side, out=out)
        wide, factors = self._widened(out), self._factors
        torch.linalg.vector_norm(wide, 1, dim=2, out=factors)
        factors.clamp_(min=LEAST_SUM).rsqrt_()
        out.copy_(wide.mul_(factors.unsqueeze(2)).mul_(factors.unsqueeze(1)))

    def times(self, q: Tensor, x: Tensor, out: Tensor) -> None:
        """Q F X. Overwrites Q."""
        q.copy_(self._widened(q).mul_(self._factors.unsqueeze(2 if self._is_tall else 1)))
        pair = (x, q) if self._is_tall else (q, x)
        torch.baddbmm(out, *pair, beta=0, alpha=math.sqrt(self._side), out=out)

    def _widened(self, square: Tensor) -> Tensor:
        """The matrices in float32 at least: themselves or a copy."""
        return square if self._wide is None else self._wide.copy_(square)


def _gram(x: Tensor, out: Tensor) -> None:
    """The Gram matrix of the short side."""
    if x.shape[1] > x.shape[2]:
        torch.bmm(x.mT, x, out=out)
    else:
        torch.bmm(x, x.mT, out=out)


def _times(factor: Tensor, x: Tensor, own: float, out: Tensor) -> None:
    """``own * x`` and a symmetric matrix times x, from the short side."""
    pair = (x, factor) if x.shape[1] > x.shape[2] else (factor, x)
    if own:
        torch.baddbmm(x, *pair, beta=own, out=out)
    else:
        torch.bmm(*pair, out=out)


def _polynomial(gram: Tensor, b: float, c: float, out: Tensor) -> None:
    """Writes b A + c A²."""
    if c == 0:  # torch's product of bfloat16 on a CPU is wrong then
        torch.mul(gram, b, out=out)
    else:
        torch.baddbmm(gram, gram, gram, beta=b, alpha=c, out=out)


def _usual_form(
    x: Tensor, spare: Tensor, squares: list[Tensor], steps: Sequence[Step], start: _Aol | None
) -> Tensor:
    gram, polynomial = squares
    for a, b, c in steps:
        if start:
            start.gram(x, out=gram)
        else:
            _gram(x, out=gram)
        _polynomial(gram, b, c, out=polynomial)
        if start:
            polynomial.diagonal(dim1=1, dim2=2).add_(a)
            start.times(polynomial, x, out=spare)
            start = None
        else:
            _times(polynomial, x, a, out=spare)
        x, spare = spare, x
    return x


def _gram_form(
    x: Tensor, spare: Tensor, squares: list[Tensor], steps: Sequence[Step], start: _Aol | None
) -> Tensor:
    gram, polynomial, product, other = squares
    begins = True
    for (a, b, c), ends in zip(steps, _ends_of(steps, x.dtype), strict=True):
        if begins and start:
            start.gram(x, out=gram)
        elif begins:
            _gram(x, out=gram)
        # The step multiplies by a I + this. All these matrices are polynomials of one, and commute.
        _polynomial(gram, b, c, out=polynomial)
        if begins and ends and not start:
            _times(polynomial, x, a, out=spare)
            x, spare = spare, x
            continue
        if begins:
            product.copy_(polynomial).diagonal(dim1=1, dim2=2).add_(a)
        else:
            torch.baddbmm(product, product, polynomial, beta=a, out=other)
            product, other = other, product
        begins = ends
        if not ends:
            torch.baddbmm(gram, gram, polynomial, beta=a, out=other)
            torch.baddbmm(other, other, polynomial, beta=a, out=gram)
            continue
        if start:
            start.times(product, x, out=spare)
            start = None
        else:
            _times(product, x, 0.0, out=spare)
        x, spare = spare, x
    return x
