"""The case table: one row per optimizer variant, from which every law takes its subjects.

A new optimizer gets all the laws by its rows here and its function in reference/.
"""

import functools
import inspect
import itertools
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from fusedstep import optim
from reference.adadelta import adadelta
from reference.adagrad import adagrad
from reference.adam import adam, adamw
from reference.adamax import adamax
from reference.adan import adan
from reference.asgd import asgd
from reference.lamb import lamb
from reference.lamb_variants import lamb_variant
from reference.lion import lion
from reference.nadam import nadam
from reference.radam import radam
from reference.rmsprop import rmsprop
from reference.rprop import rprop
from reference.sgd import sgd

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
    """Those of its constructor. Laws ask at each step, and to read them takes as long as a step."""
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


def _lamb(name, modes=None, **options):
    options = {"lr": 1e-2} | options
    return Case(
        name,
        optim.Lamb,
        options,
        lamb,
        MOMENTS,
        modes=modes or {},
        elementwise=False,
        tolerances=WITH_NORMS,
    )


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
    decoupled = options.get("decoupled_decay", False)
    return Case(
        name,
        optim.Lamb,
        options,
        lamb_variant,
        MOMENTS,
        elementwise=False,
        decoupled=decoupled,
        tolerances=DECOUPLED_WITH_NORMS if decoupled else WITH_NORMS,
    )


def _moments(options):
    return MOMENTS_AND_MAX if options.get("amsgrad") else MOMENTS


def _adam(name, long_run=None, **options):
    options = {"lr": 1e-2} | options
    decoupled = options.get("decoupled_weight_decay", False)
    return Case(
        name,
        optim.Adam,
        options,
        adam,
        _moments(options),
        torch.optim.Adam,
        decoupled=decoupled,
        tolerances=DECOUPLED if decoupled else ELEMENTWISE,
        long_run=long_run or {},
    )


def _adamw(name, **options):
    options = {"lr": 1e-2} | options
    return Case(
        name,
        optim.AdamW,
        options,
        adamw,
        _moments(options),
        torch.optim.AdamW,
        decoupled=True,
        tolerances=DECOUPLED,
    )


def _adagrad(name, **options):
    options = {"lr": 2e-2} | options
    value = options.get("initial_accumulator_value")
    return Case(
        name,
        optim.Adagrad,
        options,
        adagrad,
        ("sum",),
        torch.optim.Adagrad,
        initial={"sum": value} if value else {},
        sparse=not options.get("weight_decay"),
        rosenbrock_lr=0.3,
    )


def _adan(name, modes=None, **options):
    """Squares the gradient plus beta2 of its difference from the last one, with 0 < beta2 < 1."""
    options = {"lr": 1e-2} | options
    return Case(
        name,
        optim.Adan,
        options,
        adan,
        MOMENTS_AND_DIFFERENCES,
        modes=modes or {},
        decoupled=True,
        tolerances=DECOUPLED if options.get("weight_decay") else TWO_ADDITIONS,
        squares=3.0,
    )


def _adadelta(name, **options):
    options = {"lr": 1e-2} | options
    return Case(
        name,
        optim.Adadelta,
        options,
        adadelta,
        ("square_avg", "acc_delta"),
        torch.optim.Adadelta,
        tolerances=SQUARED_UPDATE,
        rosenbrock_lr=1.0,
    )


def _adamax(name, long_run=None, **options):
    options = {"lr": 1e-2} | options
    return Case(
        name,
        optim.Adamax,
        options,
        adamax,
        ("exp_avg", "exp_inf"),
        torch.optim.Adamax,
        long_run=long_run or {},
    )


def _asgd(name, **options):
    numbers = {"eta": options.get("lr", 1e-2), "mu": 1.0}
    return Case(
        name,
        optim.ASGD,
        {"lr": 1e-2} | options,
        asgd,
        ("ax",),
        torch.optim.ASGD,
        numbers=("step", *numbers),
        initial=numbers,
        tolerances=DECOUPLED,
        rosenbrock_lr=1e-3,
    )


def _lion(name, **options):
    return Case(
        name,
        optim.Lion,
        {"lr": 1e-2} | options,
        lion,
        ("exp_avg",),
        numbers=(),
        continuous=False,
        decoupled=True,
        tolerances=DECOUPLED,
    )


def _sgd(name, **options):
    options = {"lr": 2e-3} | options
    buffered = "momentum" in options
    return Case(
        name,
        optim.SGD,
        options,
        sgd,
        ("momentum_buffer",) if buffered else (),
        torch.optim.SGD,
        numbers=(),
        rosenbrock_lr=1e-3,
        sparse=not (buffered or options.get("weight_decay")),
    )


def _nadam(name, long_run=None, **options):
    options = {"lr": 1e-2} | options
    decoupled = options.get("decoupled_weight_decay", False)
    return Case(
        name,
        optim.NAdam,
        options,
        nadam,
        MOMENTS,
        torch.optim.NAdam,
        numbers=("step", "mu_product"),
        initial={"mu_product": 1.0},
        decoupled=decoupled,
        tolerances=DECOUPLED if decoupled else TWO_ADDITIONS,
        long_run=long_run or {},
    )


def _radam(name, long_run=None, **options):
    options = {"lr": 1e-2} | options
    decoupled = options.get("decoupled_weight_decay", False)
    return Case(
        name,
        optim.RAdam,
        options,
        radam,
        MOMENTS,
        torch.optim.RAdam,
        decoupled=decoupled,
        tolerances=DECOUPLED if decoupled else ELEMENTWISE,
        rosenbrock_lr=0.01,
        long_run=long_run or {},
    )


def _rmsprop(name, long_run=None, **options):
    options = {"lr": 1e-3} | options  # its first step is ten times as long
    states = {
        "square_avg": True,
        "momentum_buffer": options.get("momentum", 0) > 0,
        "grad_avg": options.get("centered", False),
    }
    return Case(
        name,
        optim.RMSprop,
        options,
        rmsprop,
        tuple(state for state, is_there in states.items() if is_there),
        torch.optim.RMSprop,
        buffers_moves=True,
        long_run=long_run or {},
    )


def _rprop(name, **options):
    options = {"lr": 2**-7} | options  # which any dtype holds: it is a state's first value
    return Case(
        name,
        optim.Rprop,
        options,
        rprop,
        ("prev", "step_size"),
        torch.optim.Rprop,
        initial={"step_size": options["lr"]},
        continuous=False,
        long_run={"step_sizes": (1e-6, 1e-2)},
    )


#: For a thousand steps with weight decay: where it cancels the gradient, rounding decides the sign
#: of an update, and short averages carry that on.
LONG_AVERAGES = {"betas": (0.9, 0.999)}

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
    _adam(
        "adam-l2",
        weight_decay=0.02,
        betas=(0.8, 0.95),
        eps=1e-6,
        long_run=LONG_AVERAGES,
    ),
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
    _adadelta("adadelta"),
    _adadelta("adadelta-l2", weight_decay=0.02, rho=0.8, eps=1e-4),
    _adadelta("adadelta-maximize", maximize=True),
    _adamax("adamax"),
    _adamax("adamax-l2", LONG_AVERAGES, weight_decay=0.02, betas=(0.8, 0.95), eps=1e-6),
    _adamax("adamax-maximize", maximize=True),
    _asgd("asgd"),
    _asgd("asgd-averaged-decay", t0=1.0, lambd=0.5, alpha=0.5, weight_decay=0.02),
    _asgd("asgd-maximize", t0=-1.0, maximize=True),
    _lion("lion"),
    _lion("lion-decay", weight_decay=0.02, betas=(0.8, 0.95)),
    _lion("lion-maximize", maximize=True, weight_decay=0.1),
    _sgd("sgd"),
    _sgd("sgd-decay", weight_decay=0.02),
    _sgd("sgd-momentum", momentum=0.5),
    _sgd("sgd-dampening-decay", momentum=0.8, dampening=0.3, weight_decay=0.02),
    _sgd("sgd-nesterov", momentum=0.8, nesterov=True),
    _sgd("sgd-nesterov-decay", momentum=0.6, nesterov=True, weight_decay=0.02),
    _sgd("sgd-maximize", momentum=0.5, dampening=0.25, weight_decay=0.02, maximize=True),
    _nadam("nadam"),
    _nadam(
        "nadam-l2-maximize",
        {"weight_decay": 0.2},
        weight_decay=0.02,
        momentum_decay=0.1,
        eps=1e-6,
        maximize=True,
    ),
    _nadam("nadam-decoupled", decoupled_weight_decay=True, weight_decay=0.02, betas=(0.8, 0.95)),
    _radam("radam"),
    _radam(
        "radam-l2-maximize",
        LONG_AVERAGES,
        weight_decay=0.02,
        betas=(0.8, 0.95),
        eps=1e-6,
        maximize=True,
    ),
    _radam("radam-decoupled", decoupled_weight_decay=True, weight_decay=0.02, betas=(0.9, 0.9)),
    _rprop("rprop"),
    _rprop("rprop-bounds", etas=(0.25, 1.5), step_sizes=(2e-3, 0.03)),
    _rprop("rprop-maximize", maximize=True, etas=(0.8, 1.1)),
    _rmsprop("rmsprop"),
    _rmsprop("rmsprop-momentum", momentum=0.5, maximize=True),
    _rmsprop("rmsprop-centered", centered=True, alpha=0.95, eps=1e-6),
    _rmsprop(
        "rmsprop-centered-l2-momentum",
        {"alpha": 0.99, "eps": 0.01},
        centered=True,
        alpha=0.8,
        weight_decay=0.02,
        momentum=0.5,
    ),
)


#: Optimizers that take whole matrices in several operations, or sparse gradients alone, with the
#: name of their page, reference and laws. Laws that take rows are about weights of any shape with
#: dense gradients, and states of the same shape.
COMPOSITES = {
    optim.APOLLOAdamW: "apollo",
    optim.Adafactor: "adafactor",
    optim.CAME: "came",
    optim.GaLoreAdafactor: "galore",
    optim.GaLoreAdamW: "galore",
    optim.MuSGD: "musgd",
    optim.Muon: "muon",
    optim.RowWiseAdagrad: "rowwise_adagrad",
    optim.SparseAdam: "sparse_adam",
}


def first_of_each(kind: Callable[[Case], Any], cases: Iterable[Case]) -> tuple[Case, ...]:
    found = {}
    for case in cases:
        found.setdefault(kind(case), case)
    return tuple(found.values())


def thinned(
    cases: Iterable[Case], *axes: Iterable[Any], whole: Iterable[Case] | None = None
) -> list[tuple]:
    """Each row with values of each axis: in all combinations for the first row of a family.

    Other rows have each value once or more, in combinations that differ from row to row. `whole`:
    the rows that have all combinations, if not those.
    """
    axes, found = [list(axis) for axis in axes], []
    for number, case in enumerate(cases):
        if case in (FAMILIES if whole is None else whole):
            found += [(case, *values) for values in itertools.product(*axes)]
            continue
        for index in range(max(map(len, axes))):
            values = (axis[(index + number * i) % len(axis)] for i, axis in enumerate(axes))
            found.append((case, *values))
    return found


def dealt(cases: Iterable[Case], values: Iterable[Any], share: int) -> list[tuple[Case, Any]]:
    """Each row with some of the values: all for the first row of a family, for others a share.

    Neighbours have other values, so that each value has a row.
    """
    values, found = list(values), []
    for number, case in enumerate(cases):
        some = values if case in FAMILIES else values[number % share :: share]
        found += [(case, value) for value in some]
    return found


def per_optimizer(cases: Iterable[Case]) -> tuple[Case, ...]:
    return first_of_each(lambda case: case.optimizer, cases)


# Names of the states that are one number, in any of them.
NUMBERS = {name for case in CASES for name in case.numbers}
WITH_NAMESAKE = tuple(case for case in CASES if case.namesake is not None)
# With options that choose among torch's implementations. Not every class has all of them.
NAMESAKE_CHOICES = tuple(
    (case, options)
    for case in WITH_NAMESAKE
    for options in ({"foreach": False}, {"foreach": True}, {"fused": True})
    if options.keys() <= parameters_of(case.namesake).keys()
)
# A row of each family: of those that the engine steps in one way.
FAMILIES = first_of_each(lambda case: (case.elementwise, bool(case.states), case.counts), CASES)
# A row of each kind, for what does not depend on the maths.
KINDS = first_of_each(lambda case: case.kind, CASES)
# The plain row of each optimizer, for what does not depend on its states either.
PLAIN = per_optimizer(CASES)
# One row of each optimizer that has what the law is about.
WITH_STATES = per_optimizer(case for case in CASES if case.states)
WITH_COUNTS = per_optimizer(case for case in CASES if case.counts)
