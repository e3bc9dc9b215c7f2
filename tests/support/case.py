"""A row of the case table: a variant of an optimizer, with the tolerances it may have."""

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
LOW_PRECISION = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Tolerance:
    """The error that one step may add, in units of the dtype's epsilon.

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
# The imperative twins of Adan and NAdam add two quotients to the weight, one after the other: one
# rounding more.
TWO_ADDITIONS = ELEMENTWISE | {
    torch.float32: Tolerance(weight=1, update=3, state=1),
    torch.float64: Tolerance(weight=1, update=3, state=1),
}
# Adadelta squares its update, which doubles the roundings of a quotient of two roots.
SQUARED_UPDATE = ELEMENTWISE | {
    torch.float32: Tolerance(weight=0.5, update=4, state=3),
    torch.float64: Tolerance(weight=0.5, update=4, state=3),
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


@functools.cache
def parameters_of(cls: type) -> Mapping[str, inspect.Parameter]:
    """The constructor's. Laws ask at each step, and to read them takes as long as a step."""
    return inspect.signature(cls).parameters


@dataclass(frozen=True, eq=False)
class Case:
    """A variant of an optimizer, and what laws have to know of it. No law knows it by its name."""

    name: str
    optimizer: type[torch.optim.Optimizer]
    options: dict[str, Any]
    """Options that change the maths: given to the optimizer, the reference and the namesake."""
    reference: Callable
    states: tuple[str, ...]
    """Names of the states that have the weight's shape. There may be none."""
    namesake: type[torch.optim.Optimizer] | None = None
    nearest: type[torch.optim.Optimizer] | None = None
    """Without a namesake: torch's class with the nearest options, checks and states."""
    modes: dict[str, Any] = field(default_factory=dict)
    """Options that leave the maths alone, for the optimizer only."""
    numbers: tuple[str, ...] = ("step",)
    """Names of the states that are one float32 number. Without `step` the state has no count."""
    initial: dict[str, float] = field(default_factory=dict)
    """Values that states start at, if not at 0."""
    elementwise: bool = True
    """False if an element's update depends on other elements, as through a norm."""
    continuous: bool = True
    """False if the update jumps, as a sign does: rounding may then turn that of a few elements."""
    decoupled: bool = False
    """True if weight decay shrinks the weight; otherwise it adds to the gradient or the update."""
    sparse: bool = False
    """True if of a weight with a sparse gradient the rows are updated that it has."""
    tolerances: dict[torch.dtype, Tolerance] = field(default_factory=lambda: ELEMENTWISE)
    buffers_moves: bool = False
    """True if `momentum_buffer` adds up gradients divided by the root of their mean square."""
    bounded: tuple[str, ...] = ()
    """Names of the states that stay finite where a gradient is infinite."""
    squares: float = 1.0
    """The largest number that is squared, in gradients."""
    rosenbrock_lr: float = 0.02
    """A learning rate with which 300 steps descend Rosenbrock's valley."""
    long_run: dict[str, Any] = field(default_factory=dict)
    """Options for a thousand steps with a learning rate of 1, if not those of the row."""

    def __str__(self) -> str:
        return self.name

    @property
    def counts(self) -> bool:
        """True if the state has a step count."""
        return "step" in self.numbers

    @property
    def kind(self) -> tuple:
        """All that is seen of a row by a law that does not depend on the maths."""
        return (
            self.optimizer,
            self.states,
            self.numbers,
            *sorted(self.initial.items()),
            *sorted(self.modes.items()),
        )

    def has(self, option: str) -> bool:
        return option in parameters_of(self.optimizer)

    def option(self, name: str) -> Any:
        """The value of the row, or else the optimizer's default."""
        if name in self.options:
            return self.options[name]
        return parameters_of(self.optimizer)[name].default

    def build(self, params, **overrides) -> torch.optim.Optimizer:
        """The optimizer of this row, fused unless told otherwise."""
        return self.optimizer(params, **({"fused": True} | self.options | self.modes | overrides))

    def build_namesake(self, params, **overrides) -> torch.optim.Optimizer:
        """torch's optimizer with the same options, as its for-loop."""
        loop = {"foreach": False} if "foreach" in parameters_of(self.namesake) else {}
        return self.namesake(params, **(loop | self.options | overrides))

    def stores_update_in_grad(self, dtype: torch.dtype) -> bool:
        """True if a fused step leaves its update in a dense gradient of this dtype."""
        return (
            not self.elementwise
            and not self.modes.get("keep_grad", False)
            and dtype not in LOW_PRECISION
        )

    @property
    def lr(self) -> float:
        return self.option("lr")

    @property
    def betas(self) -> tuple[float, ...]:
        """Coefficients of the averages. Without any nothing is averaged."""
        for name in ("alpha", "rho"):
            if self.has(name):
                return self.option(name), self.option(name)
        return self.option("betas") if self.has("betas") else (0.0, 0.0)


MOMENTS = ("exp_avg", "exp_avg_sq")
MOMENTS_AND_MAX = (*MOMENTS, "max_exp_avg_sq")
MOMENTS_AND_DIFFERENCES = (*MOMENTS, "exp_avg_diff", "neg_pre_grad")
#: For a thousand steps with weight decay: where it cancels the gradient, rounding decides the sign
#: of an update, and short averages carry that on.
LONG_AVERAGES = {"betas": (0.9, 0.999)}


def moments(options):
    return MOMENTS_AND_MAX if options.get("amsgrad") else MOMENTS
