"""Packed codes and absmax lie beside their elements, on any mesh."""

import itertools
import math
import random

from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset

from fusedstep._sharding.units import _has_borders_between, sizes_in_units

UNITS = (2, 128, 256)


class Mesh:
    """Stands in for a DeviceMesh: the part of it that _units asks."""

    def __init__(self, *shape):
        self.shape = shape

    def size(self, index):
        return self.shape[index]


def shard_of(sizes, mesh, place, placements):
    return _compute_local_shape_and_global_offset(
        tuple(sizes), mesh.shape, lambda index: place[index], placements
    )


def first_element(offset, sizes):
    """The index by rows and columns of the element that a shard begins with."""
    return sum(at * math.prod(sizes[d + 1 :]) for d, at in enumerate(offset))


def random_cases(count):
    numbers = random.Random(0)
    for _ in range(count):
        dims = numbers.choice((1, 2, 2, 2, 3))
        columns = numbers.choice((1, 2, 3, 64, 80, 96, 128, 256, 512, 768))
        sizes = [numbers.choice((1, 2, 5, 8, 31, 64, 90)), columns, 4][:dims]
        if dims == 1:
            sizes = [numbers.choice((4096, 5000, 8192, 12_800))]
        mesh = Mesh(*numbers.choice(((2,), (3,), (8,), (2, 2), (4, 2))))
        any_of = (Replicate(), *map(Shard, range(dims)))
        yield sizes, mesh, tuple(numbers.choice(any_of) for _ in mesh.shape), numbers.choice(UNITS)


def test_shards_of_units_are_units_of_shards():
    found = {True: 0, False: 0}
    for sizes, mesh, placements, unit in random_cases(600):
        whole = sizes_in_units(sizes, unit)
        alike = _has_borders_between(sizes, mesh, placements, whole, unit)
        found[alike] += 1
        for place in itertools.product(*map(range, mesh.shape)) if alike else ():
            what = f"{sizes}, {mesh.shape}, {placements}, {unit}, {place}"
            shard, offset = shard_of(sizes, mesh, place, placements)
            units, units_offset = shard_of(whole, mesh, place, placements)
            assert math.prod(units) == math.prod(sizes_in_units(shard, unit)), what
            if math.prod(shard):
                assert list(units) == sizes_in_units(shard, unit), what
                begin = first_element(offset, sizes)
                assert begin == first_element(units_offset, whole) * unit, what
    assert min(found.values()) > 100, found


def test_rows_of_whole_units_are_always_alike():
    for rows, ranks in itertools.product((1, 7, 50_257), (2, 3, 8, 1024)):
        whole = sizes_in_units((rows, 768), 256)
        assert whole == [rows, 3]
        assert _has_borders_between((rows, 768), Mesh(ranks), (Shard(0),), whole, 256)
