"""Draws cases of the optimizers without a row in the table of cases, by rows or whole tensors.

A case has the form that `choices` describes. A gradient may also be sparse:

    gradient    sparse (usual, unique, coalesced, empty): entries for some rows, in disorder
    call        refused: first a step with an option out of range, which may change nothing
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from fusedstep import optim
from fuzz import choices, formulas, projections

SHARE = 4
"""One case in so many is of these optimizers."""

SPARSE = ("usual", "unique", "coalesced", "empty")

CHANGES = (
    "option", "option", "layout", "data", "weight", "drop_states", "load", "load", "copy",
    "pickle", "group", "freeze", "zero_grad",
)  # fmt: skip

_FUSED = {"fused": (None, True)}
#: For optimizers that have a formula in torch operations beside their native step.
_ANY_FUSED = {"fused": (None, True, False)}
_MAXIMIZE = {"maximize": (False, True)}
_DECAY = (0.0, 0.01, 0.3)
_BETAS = ([0.9, 0.999], [0.5, 0.99], [0.0, 0.9])
_FACTORS = {
    "weight_decay": _DECAY,
    "beta1": (None, 0.9, 0.3),
    "scale_parameter": (True, False),
    "relative_step": (True, False),
}
_ADAMW = {
    "betas": _BETAS,
    "eps": (1e-6, 1e-3),
    "weight_decay": _DECAY,
    "correct_bias": (True, False),
}
_PRODUCTS = {"ns_dtype": ("float32", "float32", "float64", "bfloat16", "float16", None)}
_MATRICES = _PRODUCTS | {
    "split_heads": (1, 2, 3),
    "stacked": (None, True, False),
    "adjust_lr_fn": (None, "original", "match_rms_adamw", "spectral_unclamped"),
    "ns_coefficients": ("quintic", "polar_express", [2.0, -1.5, 0.5]),
    "ns_steps": (5, 3, 1, 8),
    "ns_start": ("norm", "norm", "aol"),
    "cautious_decay": (False, True),
    "normuon": (False, True),
    "beta2": (0.95, 0.6),
    "nesterov": (True, False),
}
_PROJECTED = {"rank": (1, 2, 4), "update_proj_gap": (1, 2, 3), "scale": (0.25, 1.0, 4.0)}
_PROJ_TYPES = ("std", "reverse_std", "left", "right")
_SINGULAR_VECTORS = _PROJECTED | {
    "proj_type": (*_PROJ_TYPES, "full"),
    "svd": ("exact", "exact", "randomized", "power", "lazy"),
    "stagger": (False, True),
    "seed": (0, 7),
}

#: Options that every group of their kind has.
_ALWAYS = {"use_muon", "rank"}


def _any(options: dict[str, Any], shape: list[int]) -> bool:
    return True


def _has_rows(options: dict[str, Any], shape: list[int]) -> bool:
    return 1 <= len(shape) <= 3


def _is_of_matrices(options: dict[str, Any], shape: list[int]) -> bool:
    if not options.get("use_muon", True):
        return True
    if len(shape) < 2:
        return False
    return formulas.rows_of(options, shape) % options.get("split_heads", 1) == 0


def _is_of_matrices_if_asked(options: dict[str, Any], shape: list[int]) -> bool:
    return not options.get("use_muon", False) or len(shape) >= 2


def _has_the_rank(options: dict[str, Any], shape: list[int]) -> bool:
    rank = options.get("rank") or 0
    return not rank or (len(shape) >= 2 and min(shape[0], math.prod(shape[1:])) >= rank)


@dataclass(frozen=True)
class Composite:
    """An optimizer, the values that its options may have, and the properties of its steps."""

    optimizer: type[torch.optim.Optimizer]
    options: dict[str, tuple]
    later: tuple[str, ...] = ("lr", "weight_decay")
    """Options that may change between steps."""
    kinds: tuple[dict[str, tuple], ...] = ({},)
    """Options of groups, each of which is of one of these kinds."""
    fits: Callable[[dict[str, Any], list[int]], bool] = _any
    """Tells whether a group with these options takes a weight of this shape."""
    formula: Callable = field(kw_only=True)
    """The formula of `formulas` that each step is compared with."""
    sparse: float = 0.0
    """The share of the gradients that is sparse."""
    ways: tuple[str, ...] = ()
    """Which ways to keep states and weights it has: codes, masters, all for bfloat16."""
    same_bits: bool = True
    """False where sums of torch and of its products may depend on the number of threads."""


_LOW_BITS = ("codes", "bfloat16")

ROWS = {
    "rowwise_adagrad": Composite(
        optim.RowWiseAdagrad,
        _FUSED
        | _MAXIMIZE
        | {
            "weight_decay": _DECAY,
            "lr_decay": (0.0, 0.5),
            "initial_accumulator_value": (0.0, 0.5),
            "eps": (1e-10, 1e-3),
            "decoupled_weight_decay": (False, True),
        },
        later=("lr", "weight_decay", "lr_decay", "eps", "maximize"),
        formula=formulas.rowwise,
        sparse=0.6,
    ),
    "sparse_adam": Composite(
        optim.SparseAdam,
        _FUSED | _MAXIMIZE | {"weight_decay": _DECAY, "betas": _BETAS, "eps": (1e-8, 1e-3)},
        later=("lr", "weight_decay", "betas", "eps", "maximize"),
        formula=formulas.of_sparse_adam,
        sparse=1.0,
        fits=_has_rows,
    ),
    "adagrad by rows": Composite(
        optim.Adagrad,
        _FUSED
        | _MAXIMIZE
        | {"lr_decay": (0.0, 0.5), "initial_accumulator_value": (0.0, 0.5), "eps": (1e-10, 1e-3)},
        later=("lr", "lr_decay", "eps", "maximize"),
        formula=formulas.adagrad_rows,
        sparse=0.7,
        ways=("masters",),
    ),
    "sgd by rows": Composite(
        optim.SGD,
        _FUSED | _MAXIMIZE,
        later=("lr", "maximize"),
        formula=formulas.sgd_rows,
        sparse=0.7,
        ways=("masters",),
    ),
    "adafactor": Composite(
        optim.Adafactor,
        _ANY_FUSED
        | _MAXIMIZE
        | _FACTORS
        | {"beta2_decay": (-0.8, -0.5), "d": (1.0, 2.0), "variant": ("torch", "transformers")},
        kinds=({"lr": (1e-2, 0.1)},),
        formula=formulas.of_adafactor,
        ways=_LOW_BITS[1:],
    ),
    "came": Composite(
        optim.CAME,
        _ANY_FUSED
        | _MAXIMIZE
        | {
            "weight_decay": _DECAY,
            "betas": ([0.9, 0.999, 0.9999], [0.5, 0.9, 0.8]),
            "clip_threshold": (1.0, 0.3),
            "eps": ([1e-30, 1e-16], [1e-8, 1e-4]),
        },
        formula=formulas.of_came,
        ways=_LOW_BITS[1:],
        same_bits=False,
    ),
    "muon": Composite(
        optim.Muon,
        _ANY_FUSED | _MAXIMIZE | {"weight_decay": _DECAY, "momentum": (0.95, 0.5)},
        kinds=(_MATRICES, _MATRICES, {"use_muon": (False,), "betas": _BETAS, "eps": (1e-8, 1e-3)}),
        fits=_is_of_matrices,
        formula=formulas.of_muon,
        ways=_LOW_BITS,
        same_bits=False,
    ),
    "musgd": Composite(
        optim.MuSGD,
        _ANY_FUSED
        | _MAXIMIZE
        | {"weight_decay": _DECAY, "muon": (0.5, 0.2), "sgd": (0.5, 1.0), "momentum": (0.0, 0.9)},
        kinds=(
            _PRODUCTS | {"use_muon": (True,)},
            _PRODUCTS | {"use_muon": (True,), "nesterov": (True,), "momentum": (0.9,)},
            {},
        ),
        fits=_is_of_matrices_if_asked,
        formula=formulas.of_musgd,
        ways=_LOW_BITS,
        same_bits=False,
    ),
    "galore": Composite(
        optim.GaLoreAdamW,
        _ANY_FUSED | _MAXIMIZE | _ADAMW,
        kinds=(_SINGULAR_VECTORS, _SINGULAR_VECTORS, {}),
        fits=_has_the_rank,
        formula=projections.of_galore,
        ways=_LOW_BITS,
        same_bits=False,
    ),
    "galore_adafactor": Composite(
        optim.GaLoreAdafactor,
        _ANY_FUSED
        | _MAXIMIZE
        | _FACTORS
        | {"decay_rate": (-0.8, -0.5), "clip_threshold": (1.0, 2.0)}
        | {"max_relative_step": (1e-2, 0.1)},
        kinds=(_SINGULAR_VECTORS, _SINGULAR_VECTORS, {}),
        fits=_has_the_rank,
        formula=projections.of_galore_adafactor,
        ways=_LOW_BITS[1:],
        same_bits=False,
    ),
    "apollo": Composite(
        optim.APOLLOAdamW,
        _ANY_FUSED
        | _MAXIMIZE
        | _ADAMW
        | {"scale_front": (False, True), "disable_nl": (False, True)},
        kinds=(
            *2
            * [
                _PROJECTED
                | {
                    "proj": ("random", "svd"),
                    "proj_type": _PROJ_TYPES,
                    "scale_type": ("channel", "tensor"),
                    "seed": (0, 7),
                }
            ],
            {},
        ),
        fits=_has_the_rank,
        formula=projections.of_apollo,
        ways=_LOW_BITS,
        same_bits=False,
    ),
}


def draw(seed: int) -> dict[str, Any]:
    """The case of a seed: one in `SHARE` of these optimizers, else of those in the table."""
    return _Chooser(seed).case() if seed % SHARE == 0 else choices.draw(seed)


class _Chooser(choices._Chooser):
    def case(self) -> dict[str, Any]:
        name = self._one_of(*ROWS)
        self._row = ROWS[name]
        self._elements = self._one_of(300, 3_000, 10_000)
        several = self._one_of(1, 1, 2)
        count = self._random.randint(1, 5)
        self._dtypes = [self._one_of(*choices.DTYPES)] if self._chance(0.7) else [*choices.DTYPES]
        options = self._options(self._row.options, 0.4) | self._ways()
        groups = [self._group(max(1, count // several)) for _ in range(several)]
        self._weights = [weight for group in groups for weight in group["weights"]]
        self._groups = len(groups)
        self._known: dict[int, dict] = {}
        steps = [self._step(n) for n in range(1, 1 + self._random.randint(1, 7))]
        threads = [self._random.randint(1, 5) for _ in range(2)]
        if not self._row.same_bits:
            threads[1] = threads[0]
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

    def _ways(self) -> dict[str, Any]:
        ways = self._row.ways
        if not ways or self._chance(0.6):
            return {}
        if "masters" in ways:
            return {"master_weights": True}
        found = {"state_dtype": self._one_of(*choices.CODES)} if "codes" in ways else {}
        if not found or self._chance(0.5):
            self._dtypes = self._one_of(["bfloat16"], ["bfloat16", "float32"])
            found = self._one_of({}, found) | self._one_of(
                {"master_weights": True}, *choices.BFLOAT16_WAYS
            )
        return found

    def _group(self, count: int) -> dict[str, Any]:
        kind = self._one_of(*self._row.kinds)
        own = {
            name: self._one_of(*values)
            for name, values in kind.items()
            if name in _ALWAYS or len(values) == 1 or self._chance(0.5)
        }
        self._of_group = own
        return {
            "options": self._options(self._row.later, 0.2) | own,
            "weights": [self._weight(self._elements // count) for _ in range(count)],
        }

    def _shape(self, most: int) -> list[int]:
        while True:
            shape = super()._shape(most)
            if self._row.fits(self._of_group, shape):
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
