"""Rows of the benchmark: an optimizer over a list of shapes, in a precision, on some threads."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import torch

import cases
import shapes
from limit_library import Streams, powers_of_two
from shapes import ShapeList


@dataclass(frozen=True)
class Precision:
    name: str
    title: str
    weight: torch.dtype
    """And gradient."""
    state: torch.dtype

    @classmethod
    def of(cls, name: str, title: str) -> Precision:
        return cls(name, title, getattr(torch, name), getattr(torch, name))


FLOAT32 = Precision.of("float32", "fp32")
BFLOAT16 = Precision.of("bfloat16", "all bf16")
MIXED = Precision("mixed", "bf16, fp32 states", torch.bfloat16, torch.float32)
PRECISIONS = {
    precision.name: precision
    for precision in (
        FLOAT32,
        Precision.of("float64", "fp64"),
        BFLOAT16,
        Precision.of("float16", "all fp16"),
        MIXED,
    )
}


class Purpose(Enum):
    """What a row is measured for: which part of the report it belongs to."""

    LIST = "list"
    SIZE = "size"
    THREADS = "threads"
    HOST = "host"


@dataclass(frozen=True)
class Row:
    case: cases.Case
    shape_list: ShapeList
    precision: Precision = FLOAT32
    threads: int | None = None
    """None: all."""
    purpose: Purpose = Purpose.LIST

    def __str__(self) -> str:
        parts = [str(self.case), str(self.shape_list)]
        if self.precision != FLOAT32:
            parts.append(self.precision.name)
        if self.threads is not None:
            parts.append(f"{self.threads}-threads")
        return "/".join(parts)

    @property
    def title(self) -> str:
        title = self.shape_list.title
        return title if self.precision == FLOAT32 else f"{title}, {self.precision.title}"

    @property
    def contiguous(self) -> Row | None:
        """The row whose time is told against that of this layout, where it is another."""
        shape_list = self.shape_list.contiguous
        return None if shape_list == self.shape_list else replace(self, shape_list=shape_list)

    @property
    def weight(self) -> float:
        """Its share of the time: models of many elements need more for the same number of steps.

        One of many points of a plot needs less.
        """
        least = 0.4 if self.purpose in (Purpose.SIZE, Purpose.HOST) else 1
        return least + self.shape_list.elements / 64e6

    @property
    def options(self) -> dict[str, Any]:
        """What our optimizers need to be told to keep states in this precision."""
        is_mixed = self.precision.state != self.precision.weight
        return {"state_dtype": self.precision.state} if is_mixed else {}

    @property
    def elements(self) -> list[int]:
        """Of each tensor."""
        return [math.prod(shape) for shape in self.shape_list.shapes]

    @property
    def streams(self) -> Streams:
        size, state = self.precision.weight.itemsize, self.precision.state.itemsize
        weight = 2 * size if self.shape_list.layout == "sliced" else size
        return Streams(len(self.case.states), weight, size, state, not self.case.elementwise)

    @property
    def arrays_bytes(self) -> int:
        """What weights, gradients and states take."""
        return self.streams.arrays_bytes * self.shape_list.elements

    @property
    def bytes(self) -> int:
        """What a step must move at least."""
        return self.streams.bytes_per_element * self.shape_list.elements


PLAIN = tuple(case for case in cases.PLAIN if case.name != "adamw")  # Adam but for one product


def of_lists(*, quick: bool, all_cases: bool, precision: Precision) -> Iterator[Row]:
    """Optimizers over lists of shapes."""
    for case in cases.CASES if all_cases else PLAIN:
        for shape_list in shapes.QUICK if quick else shapes.ALL:
            yield Row(case, shape_list, precision)


def beside_peers(threads: int) -> Iterator[Row]:
    """What is compared with other libraries; what takes longest comes last.

    `threads` is what the machine has.
    """
    lists = {each.name: each for each in (*shapes.MODELS, *shapes.LAYOUTS)}
    named = {case.name: case for case in cases.PLAIN}
    large = lists.pop("gpt2-large")
    for shape_list in lists.values():
        yield from (Row(case, shape_list) for case in PLAIN)
    for name in ("matrix", "gpt2"):
        for precision in (FLOAT32, BFLOAT16, MIXED):
            yield Row(named["adamw"], lists[name], precision)
    for shape_list in shapes.HOST:
        yield Row(named["adam"], shape_list, purpose=Purpose.HOST)
    for count in powers_of_two(threads):
        yield Row(named["adam"], lists["gpt2"], threads=count, purpose=Purpose.THREADS)
    for shape_list in shapes.SIZES:
        yield from (Row(case, shape_list, purpose=Purpose.SIZE) for case in PLAIN)
    yield from (Row(case, large) for case in PLAIN)


def matching(rows: Iterable[Row], pattern: str) -> list[Row]:
    return [row for row in rows if re.search(pattern, str(row))]
