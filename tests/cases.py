"""The case table: one row per optimizer variant, from which every law takes its subjects.

A new optimizer gets all the laws by its rows here and its function in reference/.
"""

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from fusedstep import optim
from reference.adagrad import adagrad
from reference.adam import adam, adamw
from reference.adan import adan
from reference.lamb import lamb
from reference.lamb_variants import lamb_variant

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
LOW_PRECISION = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Tolerance:
    """What one step may add to the error, in units of the dtype's epsilon.

    `weight`: relative to the weight.
    `update`: relative to the largest move of a weight in one step.
    `state`: relative to the state and to what a gradient adds to it.
    """

    weight: float
    update: float
    state: float


# The reference rounds weights and states to the dtype after each step as the library has to, so low
# precision is held to units of its own epsilon as well: its maths is fp32, and only a result close
# to the middle between two neighbours goes the other way.
ELEMENTWISE = {
    torch.float32: Tolerance(weight=0.5, update=3, state=1),
    torch.float64: Tolerance(weight=0.5, update=3, state=1),
    torch.bfloat16: Tolerance(weight=0.25, update=0.25, state=0.25),
    torch.float16: Tolerance(weight=0.25, update=0.25, state=0.25),
}
# Decoupled decay multiplies the weight first: one rounding more, and that of the factor itself,
# which errs to the same side at every step.
DECOUPLED = ELEMENTWISE | {
    torch.float32: Tolerance(weight=1.25, update=3, state=1),
    torch.float64: Tolerance(weight=1.25, update=3, state=1),
}
# Adan's imperative twin adds two quotients to the weight, one after the other: one rounding more.
TWO_ADDITIONS = ELEMENTWISE | {
    torch.float32: Tolerance(weight=1, update=3, state=1),
    torch.float64: Tolerance(weight=1, update=3, state=1),
}
# The trust ratio is one factor of the whole update: its unit comes on top of the element's own. The
# sums of torch's norms are less exact, and the reference uses them.
WITH_NORMS = {
    torch.float32: Tolerance(weight=0.5, update=5, state=1),
    torch.float64: Tolerance(weight=0.5, update=10, state=1),
    torch.bfloat16: Tolerance(weight=0.5, update=0.5, state=0.25),
    torch.float16: Tolerance(weight=0.5, update=0.5, state=0.25),
}
DECOUPLED_WITH_NORMS = WITH_NORMS | {
    torch.float32: Tolerance(weight=1.25, update=5, state=1),
    torch.float64: Tolerance(weight=1.25, update=10, state=1),
}


@dataclass(frozen=True)
class Case:
    name: str
    optimizer: type[torch.optim.Optimizer]
    options: dict[str, Any]
    """Options that change the maths: given to the optimizer, the reference and the namesake."""
    reference: Callable
    states: tuple[str, ...]
    namesake: type[torch.optim.Optimizer] | None
    elementwise: bool
    modes: dict[str, Any] = field(default_factory=dict)
    """Options that leave the maths alone, for the optimizer only."""

    def __str__(self) -> str:
        return self.name

    def build(self, params, **overrides) -> torch.optim.Optimizer:
        """The optimizer of this row, fused unless told otherwise."""
        return self.optimizer(params, **({"fused": True} | self.options | self.modes | overrides))

    def build_namesake(self, params, **overrides) -> torch.optim.Optimizer:
        """torch's optimizer with the same options, as its for-loop."""
        return self.namesake(params, **({"foreach": False} | self.options | overrides))

    def stores_update_in_grad(self, dtype: torch.dtype) -> bool:
        """Whether a fused step leaves its update in a dense gradient of this dtype."""
        return (
            not self.elementwise
            and not self.modes.get("keep_grad", False)
            and dtype not in LOW_PRECISION
        )

    @property
    def lr(self) -> float:
        return self.options["lr"]

    @property
    def betas(self) -> tuple[float, ...]:
        """Those of the row, or else the optimizer's defaults; without any nothing is averaged."""
        parameter = inspect.signature(self.optimizer).parameters.get("betas")
        return self.options.get("betas", parameter.default if parameter else (0.0, 0.0))

    @property
    def tolerances(self) -> dict[torch.dtype, Tolerance]:
        decoupled = self.reference is adamw or "decoupled" in self.name
        if not self.elementwise:
            return DECOUPLED_WITH_NORMS if decoupled else WITH_NORMS
        if self.reference is adan:
            return DECOUPLED if self.options.get("weight_decay") else TWO_ADDITIONS
        return DECOUPLED if decoupled else ELEMENTWISE


MOMENTS = ("exp_avg", "exp_avg_sq")
MOMENTS_AND_MAX = (*MOMENTS, "max_exp_avg_sq")
MOMENTS_AND_DIFFERENCES = (*MOMENTS, "exp_avg_diff", "neg_pre_grad")


def _lamb(name, modes=None, **options):
    options = {"lr": 1e-2} | options
    return Case(name, optim.Lamb, options, lamb, MOMENTS, None, False, modes or {})


def _lamb_variant(name, **options):
    """Named after the variant. The laws are about one weight, and so know no norm over several.

    tests/test_lamb_variants.py has what clipping by that norm does. Where a row has an eps, it is
    for the first step: without decay all elements of its update are as large, and the roundings in
    torch's sum of their squares, for the norm in an imperative step, all go to one side.
    """
    variant = name.split("-")[1]
    options = {"lr": 1e-2, "variant": variant} | options
    if variant in ("apex", "nvlamb", "timm"):
        options["max_grad_norm"] = math.inf
    return Case(name, optim.Lamb, options, lamb_variant, MOMENTS, None, False)


def _adam(name, **options):
    states = MOMENTS_AND_MAX if options.get("amsgrad") else MOMENTS
    return Case(name, optim.Adam, {"lr": 1e-2} | options, adam, states, torch.optim.Adam, True)


def _adamw(name, **options):
    states = MOMENTS_AND_MAX if options.get("amsgrad") else MOMENTS
    return Case(name, optim.AdamW, {"lr": 1e-2} | options, adamw, states, torch.optim.AdamW, True)


def _adagrad(name, **options):
    options = {"lr": 2e-2} | options
    return Case(name, optim.Adagrad, options, adagrad, ("sum",), torch.optim.Adagrad, True)


def _adan(name, modes=None, **options):
    options = {"lr": 1e-2} | options
    return Case(name, optim.Adan, options, adan, MOMENTS_AND_DIFFERENCES, None, True, modes or {})


CASES = (
    _lamb("lamb"),
    _lamb("lamb-decay", weight_decay=0.02),
    _lamb("lamb-maximize", weight_decay=0.01, betas=(0.8, 0.95), eps=1e-6, maximize=True),
    _lamb("lamb-keep_grad", weight_decay=0.02, modes={"keep_grad": True}),
    _lamb_variant("lamb-apex"),
    _lamb_variant("lamb-apex-no_decay", weight_decay=0.0),
    _lamb_variant("lamb-nvlamb"),
    _lamb_variant("lamb-nvlamb-no_decay", weight_decay=0.0, eps=0.01),
    _lamb_variant("lamb-timm-decoupled", decoupled_decay=True, weight_decay=0.05, eps=0.01),
    _lamb_variant(
        "lamb-timm-no_decay", weight_decay=0.0, eps=0.01, always_adapt=True, max_ratio=1.0
    ),
    _lamb_variant("lamb-deepspeed"),
    _lamb_variant("lamb-deepspeed-decay", weight_decay=0.02, min_ratio=0.4, max_ratio=0.5),
    _lamb_variant("lamb-cybertron", eps=0.01),
    _lamb_variant("lamb-cybertron-decay", weight_decay=0.02),
    _adam("adam"),
    _adam("adam-l2", weight_decay=0.02, betas=(0.8, 0.95), eps=1e-6),
    _adam("adam-amsgrad", amsgrad=True),
    _adam("adam-amsgrad-l2-maximize", amsgrad=True, weight_decay=0.02, maximize=True),
    _adam("adam-decoupled", decoupled_weight_decay=True, weight_decay=0.02),
    _adam("adam-maximize", maximize=True),
    _adamw("adamw"),
    _adamw("adamw-amsgrad-maximize", amsgrad=True, maximize=True, weight_decay=0.1),
    _adan("adan"),
    _adan("adan-decoupled", weight_decay=0.02, betas=(0.8, 0.7, 0.95), eps=1e-6),
    _adan("adan-decoupled-no_prox", weight_decay=0.05, no_prox=True),
    _adan("adan-maximize", maximize=True),
    _adan("adan-one_by_one", modes={"foreach": False}),
    _adagrad("adagrad"),
    _adagrad("adagrad-decays", lr_decay=0.1, weight_decay=0.02, eps=1e-6),
    _adagrad("adagrad-accumulator", initial_accumulator_value=0.5),
    _adagrad("adagrad-maximize", maximize=True, lr_decay=0.01),
)
WITH_NAMESAKE = tuple(case for case in CASES if case.namesake is not None)
# One plain row per optimizer, for what does not depend on the maths.
PLAIN = tuple({case.optimizer: case for case in reversed(CASES)}.values())[::-1]
