"""Draws cases of the optimizers without a row in the table of cases, by rows or whole tensors.

A case has the form that `choices` describes. A gradient may also be sparse:

    gradient    sparse (usual, unique, coalesced, empty): entries for some rows, in disorder
    call        refused: first a step with an option out of range, which may change nothing
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from fusedstep import optim
from fuzz import choices
from reference.adafactor import adafactor
from reference.rowwise_adagrad import rowwise_adagrad
from reference.sparse_adam import sparse_adam

SHARE = 4
"""One case in so many is of these optimizers."""

SPARSE = ("usual", "unique", "coalesced", "empty")

CHANGES = (
    "option", "option", "layout", "data", "weight", "drop_states", "load", "load", "copy",
    "pickle", "group", "freeze", "zero_grad",
)  # fmt: skip

_MODES = {"fused": (None, True), "maximize": (False, True)}
_DECAY = (0.0, 0.01, 0.3)
_BETAS = ([0.9, 0.999], [0.5, 0.99], [0.0, 0.9])
_FACTORS = {
    "weight_decay": _DECAY,
    "beta1": (None, 0.9, 0.3),
    "scale_parameter": (True, False),
    "relative_step": (True, False),
    "lr": (1e-2, 0.1),
}


@dataclass(frozen=True)
class Composite:
    """An optimizer, the values that its options may have, and the properties of its steps."""

    optimizer: type[torch.optim.Optimizer]
    options: dict[str, tuple]
    later: tuple[str, ...] = ("lr", "weight_decay")
    """Options that may change between steps."""
    formula: Callable = field(kw_only=True)
    """The reference that each step is compared with."""
    sparse: float = 0.0
    """The share of the gradients that is sparse."""
    dims: tuple[int, ...] = ()
    """Numbers of dimensions that weights may have; any, if there are none."""


ROWS = {
    "rowwise_adagrad": Composite(
        optim.RowWiseAdagrad,
        _MODES
        | {
            "weight_decay": _DECAY,
            "lr_decay": (0.0, 0.5),
            "initial_accumulator_value": (0.0, 0.5),
            "eps": (1e-10, 1e-3),
            "decoupled_weight_decay": (False, True),
        },
        later=("lr", "weight_decay", "lr_decay", "eps", "maximize"),
        formula=rowwise_adagrad,
        sparse=0.6,
    ),
    "sparse_adam": Composite(
        optim.SparseAdam,
        _MODES | {"weight_decay": _DECAY, "betas": _BETAS, "eps": (1e-8, 1e-3)},
        later=("lr", "weight_decay", "betas", "eps", "maximize"),
        formula=sparse_adam,
        sparse=1.0,
        dims=(1, 2, 3),
    ),
    "adafactor": Composite(
        optim.Adafactor,
        _MODES
        | _FACTORS
        | {"beta2_decay": (-0.8, -0.5), "d": (1.0, 2.0), "variant": ("torch", "transformers")},
        formula=adafactor,
    ),
}


def draw(seed: int) -> dict[str, Any]:
    """The case of a seed: one in `SHARE` of these optimizers, else of those in the table."""
    return _Chooser(seed).case() if seed % SHARE == 0 else choices.draw(seed)


class _Chooser(choices._Chooser):
    def case(self) -> dict[str, Any]:
        name = self._one_of(*ROWS)
        self._row = ROWS[name]
        self._elements = self._one_of(300, 3_000, 20_000)
        several = self._one_of(1, 1, 2)
        count = self._random.randint(1, 5)
        self._dtypes = [self._one_of(*choices.DTYPES)] if self._chance(0.7) else [*choices.DTYPES]
        options = self._options(self._row.options, 0.4)
        groups = [self._group(max(1, count // several)) for _ in range(several)]
        groups[0]["options"] = {}
        self._weights = [weight for group in groups for weight in group["weights"]]
        self._groups = len(groups)
        self._known: dict[int, dict] = {}
        steps = [self._step(n) for n in range(1, 1 + self._random.randint(1, 7))]
        threads = [self._random.randint(1, 5) for _ in range(2)]
        settings = [
            [isa, each] for isa, each in zip((0, self._random.randrange(3)), threads, strict=True)
        ]
        return {
            "seed": self._seed,
            "row": name,
            "options": options,
            "groups": groups,
            "steps": steps,
            "settings": settings,
        }

    def _option(self, name: str) -> Any:
        values = self._row.options.get(name) or choices.BY_NAME[name]
        return self._one_of(*(each for each in values if not isinstance(each, dict)))

    def _later_option(self) -> tuple[str, Any]:
        name = self._one_of(*self._row.later)
        return name, self._option(name)

    def _group(self, count: int) -> dict[str, Any]:
        return {
            "options": self._options(self._row.later, 0.2),
            "weights": [self._weight(self._elements // count) for _ in range(count)],
        }

    def _shape(self, most: int) -> list[int]:
        while True:
            shape = super()._shape(most)
            if not self._row.dims or len(shape) in self._row.dims:
                return shape

    def _gradient(self, weight: dict[str, Any]) -> dict[str, Any]:
        gradient = super()._gradient(weight)
        if gradient["how"] == "share":
            gradient = {"how": "refill"}
        if gradient["how"] in ("new", "refill") and self._chance(self._row.sparse):
            gradient["sparse"] = self._one_of(*SPARSE[:1], *SPARSE)
        return gradient

    def _call(self) -> dict[str, Any]:
        call = super()._call()
        if self._chance(0.3):
            call["refused"] = True
        return call

    def _change(self) -> dict[str, Any]:
        while True:
            change = super()._change()
            if change["do"] in CHANGES:
                return change


def entries_of(kind: str, rows: int, seed: int) -> torch.Tensor:
    """Rows that a sparse gradient has entries for."""
    numbers = random.Random(seed)
    if kind == "empty" or rows == 0:
        return torch.empty(0, dtype=torch.int64)
    if kind == "unique":
        return torch.tensor(numbers.sample(range(rows), max(1, rows // 2)))
    return torch.tensor([numbers.randrange(rows) for _ in range(2 * rows // 3 + 1)])
