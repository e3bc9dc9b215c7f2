"""The transfers of matrices between any number of processes, without the processes."""

import math
from typing import NamedTuple

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from fusedstep._sharding import exchange
from fusedstep._sharding.exchange import Form, batches_of, why_not_gathered


def form(shape, stack=0, blocks=1):
    """``blocks``: the number of equal ones, or the rows of each."""
    if isinstance(blocks, int):
        blocks = (shape[stack] // blocks,) * blocks
    return Form(shape, stack, blocks)


FORMS = (
    (form((12, 5)), form((7, 9)), form((1, 4)), form((12, 5))),
    (form((12, 5), blocks=3), form((24, 4), blocks=2), form((30, 2), blocks=30)),
    (form((12, 5), blocks=(8, 2, 2)), form((7, 9), blocks=(1, 6)), form((4, 3), blocks=(1, 2, 1))),
    (form((6, 3, 5)), form((4, 3, 2, 3))),
)
STACKS = (
    (form((3, 8, 5), 1), form((2, 4, 6), 1, 2), form((2, 9, 6), 1, (5, 2, 2))),
    (form((2, 3, 4, 5), 2),),
)

CASES = [(forms, dim) for forms in FORMS for dim in range(len(forms[0].shape))]
CASES += [(STACKS[0], 1), (STACKS[0], 2), (STACKS[1], 2), (STACKS[1], 3)]


def matrices(weight, form):
    stack = weight.reshape(math.prod(form.shape[: form.stack]), form.shape[form.stack], -1)
    return [block for each in stack for block in each.split(form.blocks)]


def shards_of(weight, dim, ranks):
    """The chunks that torch.chunk makes, and empty ones for the other ranks."""
    found = list(weight.chunk(ranks, dim))
    return found + [found[0].narrow(dim, 0, 0)] * (ranks - len(found))


def exchanged(buffers, counts):
    """An all-to-all; ``counts``: by sender, how much goes to whom."""
    parts = [buffer.split(sizes) for buffer, sizes in zip(buffers, counts, strict=True)]
    return [torch.cat([each[rank] for each in parts]) for rank in range(len(buffers))]


@pytest.mark.parametrize("at_once", [1, 40, 1000])
@pytest.mark.parametrize("ranks", [2, 3, 5])
@pytest.mark.parametrize(("forms", "dim"), CASES, ids=str)
def test_matrices_go_to_their_owners_and_back(forms, dim, ranks, at_once):
    wholes = [torch.randn(form.shape) for form in forms]
    shards = [shards_of(whole, dim, ranks) for whole in wholes]
    order = tuple(range(ranks))[::-1]  # the ranks of a group have any shards
    plans = [batches_of(forms, dim, order, rank, at_once) for rank in range(ranks)]
    computed, moved = [], [torch.zeros_like(whole) for whole in wholes]
    returned = [shards_of(each, dim, ranks) for each in moved]
    for batch in zip(*plans, strict=True):
        assert len({tuple(each.weights) for each in batch}) == 1
        sent = [torch.full([sum(each.counts)], math.nan) for each in batch]
        for rank, each in enumerate(batch):
            for unit, part in zip(each.units, each.parts_in(sent[rank]), strict=True):
                part.copy_(each.part_of_shard(unit, shards[unit.weight][order[rank]]))
        gathered = exchanged(sent, [each.counts for each in batch])
        results = []
        for each, found in zip(batch, gathered, strict=True):
            assert len(found) == sum(each.own_counts)
            result = torch.full_like(found, math.nan)
            parts, places = each.own_parts_in(found), each.own_parts_in(result)
            for share in each.shares:
                whole = torch.full((len(share.units), *share.matrix), math.nan)
                for place, rank, number in share.parts:
                    share.units[place].part(whole[place], rank).copy_(parts[number])
                computed += whole
                for place, rank, number in share.parts:
                    places[number].copy_(share.units[place].part(whole[place] * 2, rank))
            results.append(result)
        found = exchanged(results, [each.own_counts for each in batch])
        for rank, each in enumerate(batch):
            for unit, part in zip(each.units, each.parts_in(found[rank]), strict=True):
                each.part_of_shard(unit, returned[unit.weight][order[rank]]).copy_(part)
    expected = [each for w, f in zip(wholes, forms, strict=True) for each in matrices(w, f)]
    assert len(computed) == len(expected)  # each once
    for each in expected:
        assert any(torch.equal(each, found) for found in computed)
    for whole, result in zip(wholes, moved, strict=True):
        assert torch.equal(result, whole * 2)


def test_owners_have_an_even_cost():
    forms = (*[form((64, 64))] * 9, *[form((256, 64))] * 7, form((32, 8)))
    for ranks in (2, 3, 4):
        loads = []
        for rank in range(ranks):
            batches = batches_of(forms, 0, tuple(range(ranks)), rank, 10000)
            assert len(batches) > 1
            units = [unit for batch in batches for share in batch.shares for unit in share.units]
            loads.append(sum(math.prod(unit.shape) * min(unit.shape) for unit in units))
        assert max(loads) - min(loads) <= 256 * 64 * 64


def test_batches_are_of_about_so_many_elements():
    forms = (form((16, 16)),) * 10
    sizes = [len(each.weights) for each in batches_of(forms, 0, (0, 1), 0, 512)]
    assert sizes == [4, 4, 2]


class Mesh(NamedTuple):
    sizes: tuple[int, ...]

    def size(self, axis):
        return self.sizes[axis]


@pytest.mark.parametrize(
    ("sizes", "placements", "message"),
    [
        ((2,), (Shard(0),), None),
        ((2, 2), (Replicate(), Shard(1)), None),
        ((2, 1), (Shard(0), Shard(1)), None),
        ((2, 2), (Shard(0), Shard(1)), r"placements \(Shard\(dim=0\), Shard\(dim=1\)\)"),
        ((2, 2), (_StridedShard(0, split_factor=2), Replicate()), r"placements \(_Strided"),
    ],
    ids=str,
)
def test_placements(monkeypatch, sizes, placements, message):
    mesh = Mesh(sizes)
    monkeypatch.setattr(exchange, "is_dtensor", lambda tensor: True)
    monkeypatch.setattr(exchange, "spread_of", lambda tensor: (mesh, placements))
    found = why_not_gathered(torch.ones(4, 4))
    if message is None:
        assert found is None
    else:
        with pytest.raises(ValueError, match=message):
            raise ValueError(found)
