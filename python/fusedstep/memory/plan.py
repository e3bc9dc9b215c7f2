"""The bytes of a training run by part, on each rank."""

from __future__ import annotations

import ast
import inspect
import warnings
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from fusedstep import optim
from fusedstep._api.buckets import buckets_of
from fusedstep._api.names import find
from fusedstep._matrix.projection import matrix_shape
from fusedstep._state.storage import BESIDE
from fusedstep.memory.activations import Activations
from fusedstep.memory.model import Model

#: Values of ``state_dtype`` that a class may accept, by their names.
STATE_DTYPES: dict[str, Any] = {
    "default": None,
    "float32": torch.float32,
    "int8": "int8",
    "int4": "int4",
    "fp8": "fp8",
}

#: Values of ``master_weights``, by their names.
MASTERS: dict[str, Any] = {"none": False, "float32": True, "split": "split"}

#: Enough for any state_dtype, and a matrix for classes that keep states of matrices alone.
_LARGE = (torch.Size([8192]), torch.Size([8192, 8192]))

#: States that hold a part of the weight.
_OF_WEIGHTS = tuple(BESIDE.values())


class Choice(NamedTuple):
    """An optimizer with its options."""

    optimizer: str
    options: dict[str, Any]
    states: str
    """The name of the dtype of its states."""


class Run(NamedTuple):
    """All of a training run that does not depend on the optimizer."""

    weights: torch.dtype = torch.float32
    gradients: torch.dtype | None = None
    """None: the weights' dtype."""
    masters: str = "none"
    autocast: torch.dtype | None = None
    inference: bool = False
    accumulate: bool = False
    """True if gradients are kept from one backward to the next."""
    zero: int = 0
    ranks: int = 1
    rank: int | None = None
    """Of the projections of optimizers that have a rank, and are given none."""
    trained: torch.dtype | None = None
    """Of weights that are trained, where others are not. None: as those."""
    bucket: float | None = None
    """Bytes of the buckets of gradients that are stepped in the backward pass. None: no bucket."""
    buckets: int = 1
    """Buckets of gradients at a time: one is filled, others are copied."""

    @property
    def of_trained(self) -> torch.dtype:
        return self.trained or self.weights


class Need(NamedTuple):
    """Bytes on a rank, by part."""

    weights: int
    copies: int
    """Weights as autocast casts them."""
    masters: int
    states: int
    scratch: int
    """What a step takes beside the states."""
    gradients: int
    activations: int
    """The rest of the peak, beyond the other parts."""

    @property
    def total(self) -> int:
        return sum(self)


class Scratch(NamedTuple):
    """Bytes that an optimizer takes beside its states: from step to step, and during a step."""

    kept: int
    taken: int


NO_SCRATCH = Scratch(0, 0)


def parse(text: str) -> tuple[str, dict[str, Any]]:
    """The class and the options in a text such as ``SGD:momentum=0.9,nesterov=True``.

    Raises:
        ValueError: if there is no such class, or its options are not written like this.
    """
    name, _, written = text.partition(":")
    try:
        cls = find(name)
    except ValueError as error:
        raise ValueError(f"--optimizer {name}: {error}") from None
    options: dict[str, Any] = {}
    try:
        # Parsed as the arguments of a call, so that a value may be a tuple.
        call: Any = ast.parse(f"f({written})", mode="eval").body
        options = {each.arg: _value(each.value) for each in call.keywords}
        is_right = not call.args and None not in options
    except (SyntaxError, ValueError):
        is_right = False
    if not is_right:
        raise ValueError(f"--optimizer {text}: write NAME:OPTION=VALUE,OPTION=VALUE")
    return cls.__name__, options


def _value(written: ast.expr) -> Any:
    """A text needs no quotes, which a shell would take."""
    return written.id if isinstance(written, ast.Name) else ast.literal_eval(written)


def choices(
    optimizers: list[str], states: list[str], run: Run, left_out: list[str] | None = None
) -> Iterator[Choice]:
    """The optimizers with each of the state dtypes that their classes accept.

    Args:
        optimizers (list[str]): texts for parse(); empty for every class as it is made by default
        states (list[str]): keys of ``STATE_DTYPES``; empty for all that differ, or for the one that
            the class is named by or its options have
        left_out (list[str], optional): gets a line for each that a class does not accept

    Raises:
        ValueError: if a class does not accept its own options, or no class the rest.
    """
    left_out = [] if left_out is None else left_out
    is_any = False
    for text in optimizers or optim.__all__:
        name, options = parse(text)
        is_given = name not in optim.__all__ or "state_dtype" in options
        if run.rank and "rank" not in options and has_rank(name):
            options["rank"] = run.rank
        _check(f"--optimizer {text}", Choice(name, options, "default"), run.weights, "none")
        for kind in states or (("default",) if is_given else STATE_DTYPES):
            choice = Choice(name, options, kind)
            given = f" --masters {run.masters}" * (run.masters != "none")
            try:
                told = f"--optimizer {text} --states {kind}{given}"
                _check(told, choice, run.weights, run.masters)
            except ValueError as error:
                if states or kind == "default":
                    left_out.append(str(error))
                continue
            if not (states or kind == "default"):
                default = choice._replace(states="default")
                sizes = [
                    state_bytes(_LARGE, run.weights, each, run.masters)
                    for each in (choice, default)
                ]
                if sizes[0] == sizes[1]:
                    continue
            is_any = True
            yield choice
    if not is_any:
        raise ValueError(left_out[0])


def kinds(choice: Choice, run: Run, asked: tuple[str, ...] = ()) -> list[str]:
    """The dtypes of states that an optimizer learns with, from the most bytes; ``asked``: of these.

    They are float32 at most, by its default where that is float32, and as precise at least: int4
    where it trains as well by that. Empty if the class does not accept the options.
    """
    cls = getattr(optim, choice.optimizer)
    found: dict[str, tuple[int, int]] = {}
    for kind in asked or ("default", "float32", "int8", "int4"):
        if kind == "int4" and not asked and not cls._learns_in_int4:
            continue
        each = choice._replace(states=kind)
        try:
            _check("", each, run.of_trained, run.masters)
        except ValueError:
            continue
        found[kind] = state_bytes(_LARGE, run.of_trained, each, run.masters)
    if not asked and "float32" in found:
        del found["float32" if found["float32"] == found["default"] else "default"]
    return list(found)


def has_rank(optimizer: str) -> bool:
    """Returns whether a class projects gradients to a rank."""
    return "rank" in inspect.signature(getattr(optim, optimizer)).parameters


def _check(told: str, choice: Choice, weights: torch.dtype, masters: str) -> None:
    """Raises a ValueError that begins with ``told`` if the class does not accept the options."""
    try:
        build([torch.empty(1, device="meta", dtype=weights)], choice, masters)
    except (RuntimeError, TypeError, ValueError) as error:
        text = str(error).replace(".__init__() got an unexpected keyword argument", " lacks")
        raise ValueError(f"{told}: {text}") from None


def accepted(states: str = "default", masters: str = "none") -> bool:
    """Returns whether there are such states and master weights: whether AdamW accepts them."""
    weights = [torch.empty(1, device="meta", dtype=torch.bfloat16)]
    try:
        build(weights, Choice("AdamW", {}, states), masters)
    except (TypeError, ValueError):
        return False
    return True


def build(weights: list[Tensor], choice: Choice, masters: str) -> optim.FusedOptimizer:
    options = dict(choice.options)
    if choice.states != "default":
        options["state_dtype"] = STATE_DTYPES[choice.states]
    if masters != "none":
        options["master_weights"] = MASTERS[masters]
    cls = getattr(optim, choice.optimizer)
    groups = cls._grouped([torch.nn.Parameter(w) for w in weights])
    if has_rank(choice.optimizer) and (rank := options.get("rank")):
        groups = [each for group in groups for each in _split(group, rank)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of how an optimizer trains
        return cls(groups, **options)


def _split(group: dict[str, Any], rank: int) -> list[dict[str, Any]]:
    """A group in two: matrices that have more rows and columns than the rank, and no rank."""
    halves: tuple[list[Tensor], list[Tensor]] = [], []
    for weight in group["params"]:
        halves[weight.ndim < 2 or min(matrix_shape(weight)) <= rank].append(weight)
    split = group | {"params": halves[0]}, group | {"params": halves[1], "rank": None}
    return [each for each in split if each["params"]]


def state_bytes(
    shapes: tuple[torch.Size, ...], dtype: torch.dtype, choice: Choice, masters: str = "none"
) -> tuple[int, int]:
    """The bytes of the states that an optimizer makes for weights, and of their master weights.

    The optimizer makes them, on the meta device, for one weight of each shape.
    """
    counts = Counter(shapes)
    weights = [torch.empty(shape, dtype=dtype, device="meta") for shape in counts]
    if not weights:
        return 0, 0
    optimizer = build(weights, choice, masters)
    for group in optimizer.param_groups:
        optimizer._store.create(group, group["params"], False, optimizer.param_groups)
    sizes = {True: 0, False: 0}
    for weight, state in optimizer.state.items():
        for name, value in state.items():
            tensors = [each for each in tree_leaves(value) if isinstance(each, Tensor)]
            size = sum(each.nbytes for each in tensors)
            sizes[name in _OF_WEIGHTS] += size * counts[weight.shape]
    return sizes[False], sizes[True]


def need(
    model: Model,
    run: Run,
    choice: Choice,
    activations: Activations | None,
    scratch: Scratch = NO_SCRATCH,
) -> Need:
    """The bytes of a run on each of its ranks.

    ZeRO 1 shards states and masters, ZeRO 2 the gradients as well, ZeRO 3 the weights too.
    """

    def share(size: int, stage: int) -> int:
        return -(-size // run.ranks) if run.zero >= stage else size

    elements = model.parameters
    weights = (model.frozen + model.buffers) * run.weights.itemsize
    weights = share(weights + model.trained_elements * run.of_trained.itemsize, 3)
    copies = share(elements * run.autocast.itemsize, 3) if run.autocast else 0
    if run.inference:
        beside = activations.beside(copies, 0, False) if activations else 0
        return Need(weights, copies, 0, 0, 0, 0, beside)
    states, masters = state_bytes(model.trained, run.of_trained, choice, run.masters)
    dtype = run.gradients or run.of_trained
    gradients = share(model.trained_elements * dtype.itemsize, 2)
    full = model.trained_elements * run.of_trained.itemsize
    if run.bucket is not None:
        full = largest_bucket(model.trained, run.of_trained, run.bucket)
        gradients = share(full, 2) * run.buckets
    beside = 0
    if activations:
        beside = activations.beside(gradients, gradients / max(full, 1), run.accumulate)
        beside = max(beside - copies - scratch.taken, 0)  # a step comes after the highest time
    held = share(scratch.kept + scratch.taken, 1)
    return Need(weights, copies, share(masters, 1), share(states, 1), held, gradients, beside)


def largest_bucket(shapes: tuple[torch.Size, ...], dtype: torch.dtype, cap: float) -> int:
    """The bytes of the gradients of the largest bucket of weights in a group."""
    weights = [torch.empty(shape, dtype=dtype, device="meta") for shape in shapes]
    buckets = buckets_of([{"params": weights}], cap)
    return max((sum(weight.nbytes for weight in each.weights) for each in buckets), default=0)
