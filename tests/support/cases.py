"""The case table: one row per optimizer variant, from which every law takes its subjects.

A new optimizer gets all the laws by its rows in optimizers/ and its function in reference/. case.py
has what a row is.
"""

import importlib
import itertools
import pkgutil
from collections.abc import Callable, Iterable
from typing import Any

import torch

import optimizers
from fusedstep import optim
from support.case import DTYPES as DTYPES
from support.case import LOW_PRECISION as LOW_PRECISION
from support.case import MOMENTS as MOMENTS
from support.case import MOMENTS_AND_MAX as MOMENTS_AND_MAX
from support.case import Case as Case
from support.case import Tolerance as Tolerance
from support.case import parameters_of as parameters_of

# The first row of a kind stands for it: those of these come before the others.
_FIRST = ("lamb", "adam")
_OTHERS = (module.name for module in pkgutil.iter_modules(optimizers.__path__))
_NAMES = (*_FIRST, *(name for name in _OTHERS if name not in _FIRST))
CASES: tuple[Case, ...] = tuple(
    case for name in _NAMES for case in importlib.import_module(f"optimizers.{name}").CASES
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
#: Classes whose steps have matrix products, with options of groups and of the constructor.
PRODUCTS = {
    "APOLLOAdamW": (optim.APOLLOAdamW, {"rank": 2, "update_proj_gap": 2}, {}),
    "Muon": (optim.Muon, {"ns_dtype": torch.float32}, {}),
    "MuSGD": (optim.MuSGD, {"use_muon": True, "ns_dtype": torch.float32}, {}),
} | {
    f"{cls.__name__}, {svd}": (cls, {"rank": 2, "update_proj_gap": 2, "svd": svd}, options)
    for cls, options in ((optim.GaLoreAdamW, {}), (optim.GaLoreAdafactor, {"relative_step": False}))
    for svd in ("exact", "randomized", "power", "lazy")
}

#: Composites that update the rows that a sparse gradient has.
COMPOSITES_OF_ROWS = (optim.RowWiseAdagrad, optim.SparseAdam)


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
