"""Matrices of which the processes of a mesh have shards: each is gathered to one, its owner.

An operation on whole matrices takes three parts of each batch of weights::

    every process   its parts of the matrices     gather: one all-to-all
    the owners      their matrices in full        scatter: one all-to-all
    every process   its parts of the results

Each matrix is computed once. Owners are chosen for an even cost, from the shapes of the weights
alone, so that all processes choose alike. Each batch is a pass, by ``_step/program.py``: its gather
is under way while the matrices of the batch before are computed, and so is the scatter of the batch
before that.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Generator, Iterator, Sequence
from itertools import accumulate, groupby, product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fusedstep._sharding.dtensor import is_dtensor, local, spread_of


class Cut(NamedTuple):
    """The shards of a tensor lie along one dimension of it, over one dimension of a mesh."""

    mesh: Any
    axis: int
    dim: int


class Form(NamedTuple):
    """The matrices that a tensor is made of."""

    shape: tuple[int, ...]
    stack: int
    """The number of leading dimensions that count matrices."""
    blocks: tuple[int, ...]
    """The rows of each matrix of those that lie one below the other, in each of the stack."""


def cut_of(weight: Tensor) -> Cut | None:
    """Returns how the shards of a weight lie; None if this process has all of it."""
    return _cut_of(*spread_of(weight), weight.ndim) if is_dtensor(weight) else None


@functools.lru_cache(maxsize=256)  # a mesh takes tens of microseconds to tell its size
def _cut_of(mesh: Any, placements: tuple[Any, ...], ndim: int) -> Cut | None:
    for axis, placement in enumerate(placements):
        if not placement.is_replicate() and mesh.size(axis) > 1:
            return Cut(mesh, axis, placement.dim % max(ndim, 1))
    return None


def why_not_gathered(weight: Tensor) -> str | None:
    """Returns why the matrices of a weight cannot be gathered; None if they can."""
    return _why_not_gathered(*spread_of(weight)) if is_dtensor(weight) else None


@functools.lru_cache(maxsize=256)
def _why_not_gathered(mesh: Any, placements: tuple[Any, ...]) -> str | None:
    from torch.distributed.tensor import Replicate, Shard

    cuts = sum(type(p) is Shard and mesh.size(axis) > 1 for axis, p in enumerate(placements))
    if cuts < 2 and all(type(each) in (Replicate, Shard) for each in placements):
        return None
    return (
        f"is a DTensor with the placements {tuple(placements)}: whole matrices are gathered of "
        "shards along one dimension of a mesh, Shard(…) there and Replicate() in all others"
    )


def is_gathered(form: Form, cut: Cut | None) -> bool:
    """Returns whether the cut goes through the matrices, which then must be gathered.

    If not, each process holds some whole matrices.
    """
    return cut is not None and cut.dim >= form.stack


class Unit(NamedTuple):
    """A matrix of a weight, and which part of it each process has."""

    weight: int
    """The place of its weight in a list."""
    position: tuple[int, ...]
    """Where it is in the stack."""
    first: int
    """Its first row among those of all blocks."""
    shape: tuple[int, ...]
    """Its rows, and all other dimensions."""
    dim: int
    """The dimension of ``shape`` along which it is cut."""
    parts: tuple[tuple[int, int], ...]
    """Where the part of each process begins, and its length, by rank in the group."""
    owner: int

    @property
    def matrix(self) -> tuple[int, int]:
        """Its rows and columns."""
        return self.shape[0], math.prod(self.shape[1:])

    def part_shape(self, rank: int) -> tuple[int, ...]:
        return *self.shape[: self.dim], self.parts[rank][1], *self.shape[self.dim + 1 :]

    def size(self, rank: int) -> int:
        return math.prod(self.part_shape(rank))

    def part(self, whole: Tensor, rank: int) -> Tensor:
        """The part of a process in the whole matrix, which may be flattened."""
        whole = whole if len(self.shape) == 2 else whole.view(self.shape)
        return whole.narrow(self.dim, *self.parts[rank])


class Share(NamedTuple):
    """Matrices of one shape that one process computes."""

    matrix: tuple[int, int]
    """Their rows and columns."""
    units: list[Unit]
    parts: list[tuple[int, int, int]]
    """All parts of them: the matrix's place in ``units``, the process, and the place in buffers."""


class Batch:
    """Weights whose matrices are gathered together, and where their parts are in buffers."""

    def __init__(self, units: list[Unit], rank: int, begins: dict[int, int]) -> None:
        """``begins``: where this process's shard begins, by the place of its weight."""
        self._rank, self._begins = rank, begins
        self.weights = sorted({unit.weight for unit in units})
        self.owners = {unit.weight: unit.owner for unit in units}
        """Who computes a weight of one matrix, by its place."""
        units = self.all_units = sorted(units, key=lambda unit: unit.matrix)
        """The matrices, in an order that all processes have."""
        ranks = range(len(units[0].parts))
        own = [unit for unit in units if unit.owner == rank]

        self.units = sorted((u for u in units if u.size(rank)), key=lambda unit: unit.owner)
        """The matrices of which this process has a part, as buffers have them."""
        self.counts = [sum(u.size(rank) for u in units if u.owner == owner) for owner in ranks]
        """The number of elements that go to each owner, and come back."""
        self.own_counts = [sum(unit.size(other) for unit in own) for other in ranks]
        """The number of elements of each process in the matrices that this one computes."""
        own_parts = [(unit, other) for other in ranks for unit in own if unit.size(other)]
        self._own_shapes = [unit.part_shape(other) for unit, other in own_parts]
        self.shares = [
            _share(matrix, list(alike), own_parts)
            for matrix, alike in groupby(own, lambda unit: unit.matrix)
        ]

    def part_of_shard(self, unit: Unit, shard: Tensor) -> Tensor:
        """The part of a matrix in this process's shard of the weight."""
        rows = shard[unit.position] if unit.position else shard
        first, length = unit.first, unit.shape[0]
        if not unit.dim:
            begin, length = unit.parts[self._rank]
            first += begin - self._begins[unit.weight]
        return rows if length == len(rows) else rows.narrow(0, first, length)

    def part_of_numbers(self, unit: Unit, numbers: Tensor, of_rows: bool) -> Tensor:
        """Those of this process's part, of one number for each row of a matrix, or each column."""
        shape, dim = (unit.shape[:1], unit.dim) if of_rows else (unit.shape[1:], unit.dim - 1)
        numbers = numbers.view(shape)
        return numbers.narrow(dim, *unit.parts[self._rank]) if 0 <= dim < len(shape) else numbers

    def parts_in(self, buffer: Tensor) -> list[Tensor]:
        """Views of a buffer: this process's parts of ``units``."""
        return _views(buffer, [unit.part_shape(self._rank) for unit in self.units])

    def own_parts_in(self, buffer: Tensor) -> list[Tensor]:
        """Views of a buffer: all parts of the matrices that this process computes."""
        return _views(buffer, self._own_shapes)


def _share(matrix: tuple[int, int], units: list[Unit], own_parts: list[tuple[Unit, int]]) -> Share:
    places = {id(unit): place for place, unit in enumerate(units)}
    parts = [
        (places[id(unit)], rank, number)
        for number, (unit, rank) in enumerate(own_parts)
        if id(unit) in places
    ]
    return Share(matrix, units, parts)


def _views(buffer: Tensor, shapes: list[tuple[int, ...]]) -> list[Tensor]:
    parts = buffer.split_with_sizes([math.prod(shape) for shape in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


@functools.lru_cache(maxsize=256)
def batches_of(
    forms: tuple[Form, ...], dim: int, order: tuple[int, ...], rank: int, at_once: int
) -> tuple[Batch, ...]:
    """Batches of weights that are cut along one dimension, and the owners of their matrices.

    Args:
        forms: of the weights, all with elements
        dim (int): the dimension that they are cut along
        order: the number of the shard that each process has, by rank in the group
        rank (int): that of this process
        at_once (int): elements that a process computes in a batch, about
    """
    units = [_units(place, form, dim, order) for place, form in enumerate(forms)]
    # The longest first, and those of one shape together.
    places = sorted(range(len(forms)), key=lambda place: -max(map(_cost, units[place])))
    loads, batches, size = [0] * len(order), [], 0
    batch: list[Unit] = []
    begins = {
        place: _chunk(form.shape[dim], len(order), order[rank])[0]
        for place, form in enumerate(forms)
    }
    for place in places:
        elements = math.prod(forms[place].shape)
        if batch and size + elements > at_once * len(order):
            batches.append(Batch(batch, rank, begins))
            batch, size = [], 0
        size += elements
        for unit in units[place]:
            owner = min(range(len(order)), key=loads.__getitem__)
            loads[owner] += _cost(unit)
            batch.append(unit._replace(owner=owner))
    return *batches, Batch(batch, rank, begins)


def _cost(unit: Unit) -> int:
    """The operations of a product with the Gram matrix."""
    rows, columns = unit.matrix
    return rows * columns * min(rows, columns)


def _units(place: int, form: Form, dim: int, order: tuple[int, ...]) -> list[Unit]:
    rest = form.shape[form.stack + 1 :]
    chunks = [_chunk(form.shape[dim], len(order), number) for number in order]
    found = []
    for index in product(*map(range, form.shape[: form.stack])):
        for first, rows in zip(accumulate(form.blocks, initial=0), form.blocks, strict=False):
            parts = chunks
            if dim == form.stack:
                ends = [(max(b, first), min(b + n, first + rows)) for b, n in chunks]
                parts = [(b - first, e - b) if b < e else (0, 0) for b, e in ends]
            shape = (rows, *rest)
            found.append(Unit(place, index, first, shape, dim - form.stack, tuple(parts), 0))
    return found


def _chunk(extent: int, chunks: int, number: int) -> tuple[int, int]:
    """Where a shard begins, and its length, as :func:`torch.chunk` has it and so DTensor."""
    length = -(-extent // chunks)
    begin = min(length * number, extent)
    return begin, min(length, extent - begin)


@functools.lru_cache(maxsize=64)
def order_of(mesh: Any, axis: int) -> tuple[int, ...]:
    """The number of the shard that each process has along a mesh's dimension, by its rank there."""
    place = list(mesh.get_coordinate())
    place[axis] = slice(None)
    ranks = mesh.mesh[tuple(place)].tolist()
    group = mesh.get_group(axis)
    numbers = {torch.distributed.get_group_rank(group, r): i for i, r in enumerate(ranks)}
    return tuple(numbers[rank] for rank in range(len(ranks)))


def batches_over(cut: Cut, forms: Sequence[Form], at_once: int) -> tuple[Batch, ...]:
    """The batches of weights that are cut alike, as ``batches_of`` has them."""
    order, number = order_of(cut.mesh, cut.axis), cut.mesh.get_local_rank(cut.axis)
    return batches_of(tuple(forms), cut.dim, order, order.index(number), at_once)


#: Returns memory by its use, shape, dtype and device.
Take = Callable[[str, Sequence[int], torch.dtype, torch.device], Tensor]


class Exchange:
    """The transfers of a batch of matrices, in memory that is kept from step to step.

    A pass yields from ``gather`` and ``scatter``: these yield the transfer that they wait for.
    """

    def __init__(
        self,
        cut: Cut,
        batch: Batch,
        number: int,
        take: Take,
        device: torch.device,
        sent: torch.dtype,
        returned: torch.dtype,
    ) -> None:
        """Finds the memory of a batch.

        Args:
            cut (Cut): how the weights are cut
            batch (Batch): the same in every process
            number (int): its place among the batches of the step
            take: returns memory
            device (torch.device): of the weights
            sent (torch.dtype): of the parts that owners get
            returned (torch.dtype): of the parts of results
        """
        self._group, self._batch, self._number = cut.mesh.get_group(cut.axis), batch, number
        self._memory, self._device = take, device
        self._sent, self._returned = sent, returned
        self._there = transfer_device(cut, device)
        self._count, self._own_count = sum(batch.counts), sum(batch.own_counts)
        self._packed = self._buffer("parts", self._count, sent, device)
        self.parts = batch.parts_in(self._packed)
        """Memory of this process's parts of ``batch.units``, to be written before the gather."""

    def gather(self) -> Generator[Any, Any, None]:
        """Takes matrices to their owners."""
        batch, sent = self._batch, self._packed
        if self._there != self._device:
            sent = self._buffer("parts", self._count, self._sent, self._there).copy_(sent)
        gathered = self._buffer("gathered", self._own_count, self._sent, self._there)
        yield self._transfer(gathered, sent, batch.own_counts, batch.counts)
        self._own_parts = batch.own_parts_in(gathered)

    def wholes(self) -> Iterator[tuple[Share, Tensor]]:
        """The matrices that this process computes, [count, rows, columns], share by share.

        All shares have the same memory, which may be overwritten.
        """
        for share in self._batch.shares:
            shape = (len(share.units), *share.matrix)
            whole = self._memory("whole", shape, self._sent, self._there)
            found = [self._own_parts[number] for _, _, number in share.parts]
            torch._foreach_copy_(_parts_of(share, whole), found)
            yield share, whole

    def scatter(
        self, compute: Callable[[Share, Tensor], Tensor]
    ) -> Generator[Any, Any, list[Tensor]]:
        """Takes results back; ``compute`` returns those of matrices.

        Returns this process's parts of the results of ``batch.units``, where the weights are and in
        the dtype in which their parts were sent.
        """
        batch = self._batch
        results = self._buffer("results", self._own_count, self._returned, self._there)
        results_of = batch.own_parts_in(results)
        for share, whole in self.wholes():
            to = [results_of[number] for _, _, number in share.parts]
            torch._foreach_copy_(to, _parts_of(share, compute(share, whole)))
        found = self._buffer("found", self._count, self._returned, self._there)
        yield self._transfer(found, results, batch.counts, batch.own_counts)
        if found.dtype is not self._sent or self._there != self._device:
            found = self._memory("results", [self._count], self._sent, self._device).copy_(found)
        return batch.parts_in(found)

    def _buffer(self, use: str, count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        # Two of each use: the transfers of two batches are under way at once.
        return self._memory(f"{use} {self._number % 2}", [count], dtype, device)

    def _transfer(
        self, received: Tensor, sent: Tensor, counts: list[int], sent_counts: list[int]
    ) -> Any:
        return torch.distributed.all_to_all_single(
            received, sent, counts, sent_counts, group=self._group, async_op=True
        )


def _parts_of(share: Share, whole: Tensor) -> list[Tensor]:
    return [share.units[place].part(whole[place], rank) for place, rank, _ in share.parts]


def whole_of(tensor: Any) -> Tensor:
    """All of a tensor of which this process has a part."""
    mesh, placements = spread_of(tensor)
    part = local(tensor).to(mesh.device_type)
    if is_int16 := part.dtype is torch.int16:  # which gloo and NCCL do not send
        part = part.view(torch.bfloat16)
    sizes = {"shape": tensor.shape, "stride": tensor.stride()}
    found = type(tensor).from_local(part, mesh, placements, run_check=False, **sizes)
    whole = found.full_tensor().to(tensor.device)
    return whole.view(torch.int16) if is_int16 else whole


def part_of(whole: Tensor, cut: Cut) -> Tensor:
    """The part that this process has of a whole tensor that is cut."""
    extent, number = whole.shape[cut.dim], cut.mesh.get_local_rank(cut.axis)
    return whole.narrow(cut.dim, *_chunk(extent, cut.mesh.size(cut.axis), number))


def step_whole(
    formula: Callable[[Tensor, Tensor, dict[str, Tensor]], Tensor],
    weight: Tensor,
    grad: Tensor,
    state: dict[str, Tensor],
) -> None:
    """Steps a DTensor by a formula of whole tensors, which all processes take.

    ``formula`` gets the weight, its gradient and its state, returns the new weight and leaves the
    new states in the state.
    """
    found = {name: whole_of(each) if is_dtensor(each) else each for name, each in state.items()}
    new = formula(whole_of(weight), whole_of(grad), found)
    for target, whole in ((weight, new), *((each, found[name]) for name, each in state.items())):
        if target is not whole:
            cut = cut_of(target)
            local(target).copy_(part_of(whole, cut) if cut else whole)


def transfer_device(cut: Cut, device: torch.device) -> torch.device:
    """Where transfers and products are: a mesh of GPUs may have its weights on the CPU."""
    kind = cut.mesh.device_type
    if device.type == kind:
        return device
    return torch.device(kind, torch.get_device_module(kind).current_device())
