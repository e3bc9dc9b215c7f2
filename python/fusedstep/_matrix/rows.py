"""Updates of matrices, and their directions, in operations of torch: of all rows, or of some.

Matrices go through the iteration in tensors ``[count, rows, columns]``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from fusedstep._matrix.chained import ChainedBatches, takes_batches_of, updates_dtype
from fusedstep._matrix.chosen import Chosen
from fusedstep._matrix.muon_groups import beta2_of, keeps_range, norm_dtype, to_divisors
from fusedstep._matrix.newton_schulz import Scratch, fits_engine, orthogonalize
from fusedstep._matrix.operands import Moving, Parts
from fusedstep._matrix.passes import average_into, has_pass, normalize_into, take_sums
from fusedstep._matrix.step_options import StepOptions
from fusedstep._matrix.together import Together


class AllRows:
    """The updates and directions of a batch whose matrices this process has in full."""

    def __init__(
        self, options: StepOptions, scratch: Scratch, batch: Together, is_native: bool
    ) -> None:
        """``is_native``: whether native passes take the weights of the batch."""
        self._options, self._scratch, self._batch = options, scratch, batch
        self._is_native = is_native

    def average(self, moving: list[Moving], parts: Parts) -> None:
        """Writes the updates, and the averages.

        On a CPU, where products may lack memory, ``write`` does the latter.
        """
        options, batch, like = self._options, self._batch, parts.averages[0]
        dtype, device, products = like.dtype, like.device, options.products
        is_narrow = self._is_native and keeps_range(products) and has_pass(dtype, products)
        self._dtype, narrow = dtype, products if is_narrow else dtype
        self._updates = memory_of(self._scratch, "update", batch.matrices, narrow, device)
        if batch.is_padded:
            self._updates[0].zero_()
        updates = batch.parts_in(self._updates)
        self._advances = [] if self._is_native or device.type != "cpu" else moving
        if self._is_native:
            average_into(parts.averages, parts.grads, updates, 1 - options.momentum, options.lead)
        elif self._advances:
            for average, grad, out in zip(parts.averages, parts.grads, updates, strict=True):
                torch.lerp(average, grad, 1 - options.momentum, out=out)
                _write_update(options, grad, out, out)
        else:
            advance(options, moving)
            write_updates(options, parts, updates)

    def directions(self, moments: list[Tensor]) -> list[Tensor]:
        """The directions of each share. ``moments``: NorMuon's averages, which go forward."""
        updates, products = self._updates, self._options.products
        moves_along = _moves_along(self._options, self._dtype, self._is_native)
        stays = len(updates) == 1 and (moves_along or products is self._dtype)
        to = updates
        if not (moves_along or updates[0].dtype is self._dtype):
            memory = "update", self._batch.matrices, self._dtype, updates[0].device
            to = memory_of(self._scratch, *memory)
        directions = []
        for update, own in zip(updates, to, strict=True):
            x = orthogonal(self._options, self._scratch, update)
            directions.append(x if stays else own.copy_(x))
        for x, new in zip(directions, moments, strict=False):
            _normalize_rows(x, new, beta2_of(self._options.group))
        return directions

    def write(self) -> None:
        """Writes averages that are not written yet."""
        if self._advances:
            advance(self._options, self._advances)


class ChosenRows(AllRows):
    """As ``AllRows``, of the rows or columns that are chosen; directions of all others are 0."""

    def average(self, moving: list[Moving], parts: Parts) -> None:
        """Adds gradients to copies of the averages, which ``write`` copies back."""
        like, self._averages = parts.averages[0], parts.averages
        memory = "gathered sums", self._batch.matrices, like.dtype, like.device
        self._updates = memory_of(self._scratch, *memory)
        sums = self._batch.parts_in(self._updates)
        for average, grad, out in zip(parts.averages, parts.grads, sums, strict=True):
            torch.add(average, grad, out=out)

    def directions(self, moments: list[Tensor]) -> list[Tensor]:
        options, sums = self._options, self._updates
        moves_along = _moves_along(options, sums[0].dtype, self._is_native)
        kind = options.products if moves_along else sums[0].dtype
        chosen = [Chosen.among(options.group, x) for x in sums]
        return directions_of_chosen(options, self._scratch, sums, chosen, kind, moments)

    def write(self) -> None:
        torch._foreach_copy_(self._averages, list(self._batch.parts_in(self._updates)))


#: NorMuon's eps: added to roots and norms that are divided by.
_NORMUON_EPS = 1e-10


def _normalize_rows(x: Tensor, moments: Tensor, beta2: float) -> None:
    """Gives the rows of matrices ``[B, M, N]`` one size, as NorMuon does, in place.

    ``moments`` [B, M, 1], running averages of the mean squares of rows, are taken forward. The
    norms of the matrices stay: they and their new ones follow from those of rows.
    """
    norms = torch.linalg.vector_norm(x, dim=2, keepdim=True, dtype=moments.dtype)
    moments.lerp_(norms.square() / max(x.shape[2], 1), 1 - beta2)
    factors = 1 / moments.sqrt().add_(_NORMUON_EPS)
    whole, new = (
        torch.linalg.vector_norm(each, dim=1, keepdim=True) for each in (norms, norms * factors)
    )
    x.mul_(factors * (whole / new.add_(_NORMUON_EPS)))


def memory_of(
    scratch: Scratch,
    use: str,
    shapes: Sequence[Sequence[int]],
    dtype: torch.dtype,
    device: torch.device,
) -> list[Tensor]:
    """Memory for matrices of several shapes, one behind another."""
    sizes = list(map(math.prod, shapes))
    flat = scratch.take(use, (sum(sizes),), dtype, device)
    return [x.view(shape) for shape, x in zip(shapes, flat.split(sizes), strict=True)]


def advance(options: StepOptions, moving: list[Moving]) -> None:
    """Takes gradients into the averages."""
    averages, grads = [each.average for each in moving], [each.grad for each in moving]
    if options.has_choice:
        torch._foreach_add_(averages, grads)
    else:
        torch._foreach_lerp_(averages, grads, 1 - options.momentum)


def write_updates(options: StepOptions, parts: Parts, updates: Sequence[Tensor]) -> None:
    """Writes the updates of averages that gradients have been taken into."""
    for average, grad, out in zip(parts.averages, parts.grads, updates, strict=True):
        _write_update(options, grad, average, out)


def _write_update(options: StepOptions, grad: Tensor, average: Tensor, out: Tensor) -> None:
    if options.group["nesterov"] and not options.has_choice:
        torch.lerp(grad, average, options.momentum, out=out)
    elif out is not average:
        out.copy_(average)


def _moves_along(options: StepOptions, weights: torch.dtype, is_native: bool) -> bool:
    """Returns whether a native pass moves weights by directions in the dtype of the products."""
    has_moments = options.group.get("normuon")
    return is_native and has_pass(weights, options.products) and not has_moments


def orthogonal(options: StepOptions, scratch: Scratch, update: Tensor) -> Tensor:
    """Iterates on updates [count, rows, columns], in the products' dtype; overwrites them."""
    device, dtype = update.device, options.products

    def narrowed() -> Tensor:
        if dtype is update.dtype:
            return update
        return scratch.take("matrices", update.shape, dtype, device).copy_(update)

    kinds = update.dtype, None, dtype
    if type(update) is Tensor and update.is_cpu and takes_batches_of(device, *kinds):
        x = narrowed()  # as in a step of batches together
        if x.numel():
            normalize_into([x], [x], take_sums([x], scratch), options.eps, options.adds_eps)
        return orthogonalize(x, options.steps, scratch, options.starts_aol)

    # Norms and quotients of narrow numbers take half the bytes; a CPU would widen them.
    is_wide = update.is_cpu or update.dtype is torch.float64 or not keeps_range(dtype)
    x = update if is_wide else narrowed()
    of = None if is_wide else torch.float32
    norms = torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True, dtype=norm_dtype(x) or of)
    x.div_(to_divisors(options.group, norms))
    x = narrowed() if is_wide else x
    return orthogonalize(x, options.steps, scratch, options.starts_aol)


def directions_of_chosen(
    options: StepOptions,
    scratch: Scratch,
    sums: list[Tensor],
    chosen: list[Chosen],
    dtype: torch.dtype,
    moments: Sequence[Tensor] = (),
) -> list[Tensor]:
    """The directions of chosen rows or columns, in a dtype, with zeros for all others.

    What is chosen of the sums decays. ``moments``: as ``AllRows.directions`` has them.
    """
    shapes = [each.shape(x.shape) for each, x in zip(chosen, sums, strict=True)]
    wide, device = sums[0].dtype, sums[0].device
    taken = memory_of(scratch, "chosen", shapes, wide, device)
    decayed = memory_of(scratch, "decayed", shapes, wide, device)
    for x, each, own, new in zip(sums, chosen, taken, decayed, strict=True):
        each.take(x, own)
        each.put(x, torch.mul(own, options.momentum, out=new))
    found = [x.to(dtype) for x in _orthogonal_together(options, scratch, taken)]
    for x, each, new in zip(found, chosen, moments, strict=False):
        own = each.take(new)
        _normalize_rows(x, own, beta2_of(options.group))
        each.put(new, own)
    directions = memory_of(scratch, "direction", [x.shape for x in sums], dtype, device)
    for out, each, x in zip(directions, chosen, found, strict=True):
        each.put(out.zero_(), x)
    return directions


def _orthogonal_together(
    options: StepOptions, scratch: Scratch, updates: list[Tensor]
) -> list[Tensor]:
    """As ``orthogonal``: by one chain of products where the native engine takes all."""
    first, asked = updates[0], options.group.get("ns_dtype")
    fits = first.is_cpu or all(fits_engine(*x.shape[1:]) for x in updates)
    kinds = first.dtype, asked, options.products
    has_updates = updates_dtype(first.dtype, asked) is not None
    if not (fits and has_updates and takes_batches_of(first.device, *kinds)):
        return [update.copy_(orthogonal(options, scratch, update)) for update in updates]
    shapes = [(len(x), *x.shape[1:]) for x in updates]
    chain = ChainedBatches(shapes, [[shape] for shape in shapes], first.device)
    chain.take(scratch, options, first.dtype)
    torch._foreach_copy_(chain.updates, updates)
    return chain.orthogonalize(options)
