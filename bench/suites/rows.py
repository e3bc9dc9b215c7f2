"""Rows of the benchmark: an optimizer over a list of shapes, in a precision, on some threads."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from fusedstep import optim
from reference.rowwise_adagrad import rowwise_adagrad
from reference.sparse_adam import sparse_adam
from suites import gpt2, shapes
from suites.adan_published import PUBLISHED
from suites.limit_library import Streams, powers_of_two
from suites.shapes import ShapeList
from support import cases


@dataclass(frozen=True)
class Precision:
    name: str
    title: str
    weight: torch.dtype
    """Dtype of weight and gradient."""
    state: torch.dtype

    @classmethod
    def of(cls, name: str, title: str) -> Precision:
        return cls(name, title, getattr(torch, name), getattr(torch, name))


FLOAT32 = Precision.of("float32", "fp32")
FLOAT64 = Precision.of("float64", "fp64")
BFLOAT16 = Precision.of("bfloat16", "all bf16")
FLOAT16 = Precision.of("float16", "all fp16")
MIXED = Precision("mixed", "bf16, fp32 states", torch.bfloat16, torch.float32)
PRECISIONS = {each.name: each for each in (FLOAT32, FLOAT64, BFLOAT16, FLOAT16, MIXED)}


#: The gradient of a table that is looked up in bags. Some libraries step in the backward pass: so
#: for all it is a part of the step that is timed.
BAGS = "backward-of-bags"


class Purpose(Enum):
    """Purpose of measuring a row: the part of the report that it belongs to."""

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
    gradient: str = "dense"
    """Dense, or sparse as subjects.batch makes it; BAGS: and the backward pass is timed too."""

    def __str__(self) -> str:
        precision = "" if self.precision == FLOAT32 else self.precision.name
        threads = self.threads and f"{self.threads}-threads"
        gradient = "" if self.gradient == "dense" else self.gradient
        parts = (str(self.case), str(self.shape_list), precision, threads, gradient)
        return "/".join(filter(None, parts))

    @property
    def title(self) -> str:
        if self.gradient != "dense":
            return self.gradient.replace("-", " ")
        precision = "" if self.precision == FLOAT32 else self.precision.title
        threads = self.threads and f"{self.threads} thread{'s' * (self.threads != 1)}"
        return ", ".join(filter(None, (self.shape_list.title, precision, threads)))

    @property
    def contiguous(self) -> Row | None:
        """The row of contiguous weights that this layout is compared with, if it is another."""
        shape_list = self.shape_list.contiguous
        return None if shape_list == self.shape_list else replace(self, shape_list=shape_list)

    @property
    def weight(self) -> float:
        """Its share of the time: models need more for as many steps, points of a plot less."""
        least = 0.4 if self.purpose in (Purpose.SIZE, Purpose.HOST) else 1
        return least + self.shape_list.elements / 64e6

    @property
    def options(self) -> dict[str, Any]:
        """The options that make our optimizers keep states in this precision."""
        is_mixed = self.precision.state != self.precision.weight
        return {"state_dtype": self.precision.state} if is_mixed else {}

    @property
    def elements(self) -> list[int]:
        """The number for each tensor."""
        return [math.prod(shape) for shape in self.shape_list.shapes]

    @property
    def streams(self) -> Streams:
        size, state = self.precision.weight.itemsize, self.precision.state.itemsize
        weight = 2 * size if self.shape_list.layout == "sliced" else size
        return Streams(len(self.case.states), weight, size, state, not self.case.elementwise)

    @property
    def arrays_bytes(self) -> int:
        """The bytes of weights, gradients and states."""
        return self.streams.arrays_bytes * self.shape_list.elements

    @property
    def bytes(self) -> int:
        """The bytes that a step must move at least."""
        return self.streams.bytes_per_element * self.shape_list.elements

    def described(self) -> dict[str, Any]:
        facts = {
            "name": str(self),
            "optimizer": self.case.name,
            "shapes": self.shape_list.name,
            "title": self.title,
            "precision": self.precision.name,
            "threads": self.threads,
            "purpose": self.purpose.value,
            "tensors": len(self.shape_list.shapes),
            "elements": self.shape_list.elements,
            "bytes": self.bytes,
        }
        return {key: value for key, value in facts.items() if value is not None}


#: An optimizer each, but for AdamW, which is Adam with one more product.
PLAIN = tuple(case for case in cases.PLAIN if case.name != "adamw")
NAMED = {case.name: case for case in cases.CASES}
LISTS = {each.name: each for each in (*shapes.MODELS, *shapes.LAYOUTS)}


def _rowwise_adagrad(
    weight: Tensor, grad: Tensor, state: dict[str, Tensor], step: int, **options: Any
) -> tuple[Tensor, dict[str, Tensor]]:
    weight, total = rowwise_adagrad(weight, grad, state.get("sum", 0.0), step, **options)
    return weight, {"sum": total}


def _sparse_adam(
    weight: Tensor, grad: Tensor, state: dict[str, Tensor], step: int, **options: Any
) -> tuple[Tensor, dict[str, Tensor]]:
    """Rows without a gradient stay as they are, with their moments."""
    new = {name: state.get(name, torch.zeros_like(weight)).clone() for name in cases.MOMENTS}
    rows = grad.any(dim=1).nonzero()[:, 0]
    return sparse_adam(weight, rows, grad[rows], new, step, **options), new


#: Optimizers for tables alone, beside the case table's.
ROWWISE_ADAGRAD = cases.Case(
    "rowwise_adagrad", optim.RowWiseAdagrad, {"lr": 1e-2}, _rowwise_adagrad, (), sparse=True
)
SPARSE_ADAM = cases.Case(
    "sparse_adam", optim.SparseAdam, {"lr": 1e-2}, _sparse_adam, cases.MOMENTS,
    torch.optim.SparseAdam, sparse=True,
)  # fmt: skip


def steps(
    device: str,
    quick: bool = False,
    all_cases: bool = False,
    precision: Precision = FLOAT32,
    **_: Any,
) -> Iterator[Row]:
    """Optimizers over lists of shapes, on a CPU also over sizes of one tensor."""
    lists = shapes.QUICK if quick else shapes.ALL
    for case in cases.CASES if all_cases else PLAIN:
        for shape_list in lists:
            purpose = Purpose.SIZE if shape_list in shapes.SIZES else Purpose.LIST
            if device == "cpu" or purpose == Purpose.LIST:
                yield Row(case, shape_list, precision, purpose=purpose)
    if device == "cuda" and not quick and precision == FLOAT32:
        yield from _in_16_bits("gpt2")


def _in_16_bits(*names: str) -> Iterator[Row]:
    for name in names:
        yield from (Row(NAMED["adamw"], LISTS[name], each) for each in (BFLOAT16, MIXED))


def beside_peers(device: str, threads: int, **_: Any) -> Iterator[Row]:
    """Rows that other libraries step too, on up to `threads`. Those that take longest are last."""
    large = LISTS["gpt2-large"]
    for shape_list in LISTS.values():
        if shape_list != large:
            yield from (Row(case, shape_list) for case in PLAIN)
    yield from (Row(NAMED["adamw"], LISTS[name]) for name in ("matrix", "gpt2"))
    yield from _in_16_bits("matrix", "gpt2")
    if device == "cpu":
        for shape_list in shapes.HOST:
            yield Row(NAMED["adam"], shape_list, purpose=Purpose.HOST)
        for count in powers_of_two(threads):
            yield Row(NAMED["adam"], LISTS["gpt2"], threads=count, purpose=Purpose.THREADS)
        for shape_list in shapes.SIZES:
            yield from (Row(case, shape_list, purpose=Purpose.SIZE) for case in PLAIN)
    yield from (Row(case, large) for case in PLAIN)


def clipping(**_: Any) -> Iterator[Row]:
    for name in ("gpt2", "small"):
        yield from (Row(case, LISTS[name]) for case in PLAIN)


def embedding(**_: Any) -> Iterator[Row]:
    for case in (NAMED["adagrad"], ROWWISE_ADAGRAD, SPARSE_ADAM):
        for gradient in ("each-row-once", "each-row-twice", "coalesced", BAGS):
            yield Row(case, shapes.EMBEDDING, gradient=gradient)


def adan(**_: Any) -> Iterator[Row]:
    """The sizes of GPT-2 that Adan's authors published."""
    for name, published in PUBLISHED.items():
        with torch.device("meta"):
            model = gpt2.GPT2(published)
        sizes = tuple(tuple(parameter.shape) for parameter in model.parameters())
        yield Row(NAMED["adan"], ShapeList(name, name.replace("x", " × "), sizes))
