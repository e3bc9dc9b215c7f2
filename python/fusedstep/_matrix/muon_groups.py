"""Options of Muon's groups, and the matrices that their weights are."""

from __future__ import annotations

import itertools
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fusedstep._matrix.coefficients import coefficients_of
from fusedstep._matrix.newton_schulz import usual_dtype
from fusedstep._options.kinds import (
    Betas,
    Count,
    Counts,
    Flag,
    Number,
    NumberTuple,
    Option,
    Options,
    check_kinds,
    check_number,
    check_ranges,
    floats,
    named_values,
)
from fusedstep._options.shared import EPSILON
from fusedstep._sharding.dtensor import is_dtensor
from fusedstep._sharding.exchange import Form, why_not_gathered

_ADJUSTMENTS = (None, "original", "match_rms_adamw", "spectral_unclamped")

_STARTS = ("norm", "aol")

_NS_DTYPES = (None, torch.float32, torch.float64, torch.bfloat16, torch.float16)

#: Muon's options. A group has those that torch's class lacks only where they were set.
MUON: Options = {
    "weight_decay": Number(),
    "momentum": Number(),
    "nesterov": Flag(),
    "ns_coefficients": NumberTuple(count=None, any_sign=True),
    "eps": EPSILON,
    "ns_steps": Count(),
    "adjust_lr_fn": Option(),
    "use_muon": Flag(unset=True),
    "split_heads": Count(unset=1, fills_sides=True),
    "split_sizes": Counts(unset=None, fills_sides=True),
    "stacked": Flag(unset=None),
    "ns_dtype": Option(unset=None),
    "ns_start": Option(unset="norm"),
    "cautious_decay": Flag(unset=False),
    "normuon": Flag(unset=False),
    "rank_fraction": Number(unset=None, above=True, most=1.0, may_be_none=True),
    "beta2": Number(unset=0.95),
    "betas": Betas(unset=(0.9, 0.999)),
    "adamw_eps": Number(unset=1e-8),
    "maximize": Flag(unset=False),
}

MUON_OWN = named_values(MUON, "unset")

_FLAGS = [name for name, option in MUON.items() if isinstance(option, Flag)]


def uses_muon(group: dict[str, Any]) -> bool:
    return bool(group.get("use_muon", True))


def is_of_muon(group: dict[str, Any], shape: torch.Size) -> bool:
    """Returns whether Muon steps the weights of a group, of whichever shape."""
    return uses_muon(group)


def as_adamw(group: dict[str, Any]) -> dict[str, Any]:
    """A group with the options of Adam that it has not."""
    others = {"amsgrad": False, "capturable": False, "decoupled_weight_decay": True}
    return {"betas": MUON_OWN["betas"]} | group | others


#: Hyper-parameters of Adam's rule, of a group without Muon.
ADAMW_RULE: dict[str, Any] = {
    "amsgrad": False,
    "decoupled_weight_decay": True,
    "beta1": lambda group: floats(MUON, as_adamw(group))[0],
    "beta2": lambda group: floats(MUON, as_adamw(group))[1],
}


def check_muon_options(options: dict[str, Any]) -> None:
    """Raises options that are none of those that there are."""
    steps = options["ns_steps"]
    if isinstance(steps, bool) or not isinstance(steps, int) or not 0 <= steps < 100:
        raise ValueError(f"ns_steps must be an int from 0 to 99, not {steps!r:.40}")
    coefficients_of(options["ns_coefficients"], steps)
    if options["adjust_lr_fn"] not in _ADJUSTMENTS:
        raise ValueError(
            f"adjust_lr_fn must be None, {', '.join(map(repr, _ADJUSTMENTS[1:-1]))} or "
            f"{_ADJUSTMENTS[-1]!r}, not {options['adjust_lr_fn']!r:.40}"
        )
    if options.get("ns_dtype") not in _NS_DTYPES:
        raise ValueError(
            "ns_dtype must be None, torch.bfloat16, torch.float16, torch.float32 or "
            f"torch.float64, not {options['ns_dtype']!r:.40}"
        )
    start = options.get("ns_start", "norm")
    if start not in _STARTS:
        raise ValueError(
            f"ns_start must be {' or '.join(map(repr, _STARTS))}, not {options['ns_start']!r:.40}"
        )
    if start == "aol" and not steps:
        raise ValueError("ns_start='aol' needs ns_steps of at least 1")
    heads = options.get("split_heads", 1)
    if isinstance(heads, bool) or not isinstance(heads, int) or heads < 1:
        raise ValueError(f"split_heads must be an int of at least 1, not {heads!r:.40}")
    _check_sizes(options.get("split_sizes"), heads)
    check_kinds(MUON, {name: value for name, value in options.items() if name in _FLAGS})
    ranges = {name: options[name] for name in ("momentum", "weight_decay")}
    ranges["rank_fraction"] = options.get("rank_fraction")
    check_ranges(MUON, ranges, tensors=True)
    beta2 = options.get("beta2", MUON_OWN["beta2"])
    check_number("beta2", beta2)
    if not 0 <= beta2 < 1:
        raise ValueError(f"Invalid beta2 value: {beta2}")


def _check_sizes(sizes: Any, heads: int) -> None:
    if sizes is None:
        return
    is_right = isinstance(sizes, (list, tuple)) and len(sizes) > 0
    if not (is_right and all(type(each) is int and each > 0 for each in sizes)):
        raise ValueError(
            f"split_sizes must be None or a tuple of ints of at least 1, not {sizes!r:.60}"
        )
    if any(each % heads for each in sizes):
        raise ValueError(f"split_heads={heads} does not divide each of split_sizes={sizes!r:.60}")


def why_no_matrix(group: dict[str, Any], weight: Tensor, other: str) -> str | None:
    """Returns why Muon cannot step a weight; None if it can. ``other``: steps all other groups."""
    if weight.ndim < 2:
        return (
            f"has the shape {list(weight.shape)}, and Muon steps matrices: put biases, the weights "
            f"of norms and other vectors into a group with use_muon=False, which {other} steps"
        )
    if weight.is_nested:
        return f"is a nested tensor, which neither Muon nor {other} supports"
    if weight.is_complex():
        return f"is complex, which Muon does not support; use_muon=False has {other} step it"
    if reason := why_not_gathered(weight):
        return f"{reason}; use_muon=False has {other} step it"
    if group.get("normuon") and is_dtensor(weight):
        return "is a DTensor, of whose rows normuon=True keeps no moments"
    heads, sizes = group.get("split_heads", 1), group.get("split_sizes")
    rows = weight.shape[-2] if _is_stacked(group, weight.shape) else weight.shape[0]
    if sizes and sum(sizes) != rows:
        return f"has matrices of {rows} rows, of which split_sizes={sizes!r:.60} has {sum(sizes)}"
    if rows % heads:
        return f"has matrices of {rows} rows, which split_heads={heads} does not divide"
    return None


def _is_stacked(group: dict[str, Any], shape: torch.Size) -> bool:
    asked = group.get("stacked")
    return len(shape) == 3 if asked is None else bool(asked)


class Part(NamedTuple):
    """Rows of a weight that are matrices of one shape, or rows of each matrix of a stack."""

    shape: tuple[int, ...]
    form: tuple[int, int, int]
    """The number of the matrices, and the rows and columns of each."""
    stack: int
    """The number of leading dimensions that count matrices."""
    first: int
    """The first row."""
    is_whole: bool
    """True if the weight has no other part."""

    @property
    def matrix_shape(self) -> tuple[int, ...]:
        """The rows of a matrix, and all other dimensions."""
        return self.form[1], *self.shape[self.stack + 1 :]

    def of(self, tensor: Tensor) -> Tensor:
        """The part of a tensor that has the weight's rows."""
        if self.is_whole:
            return tensor
        return tensor.narrow(self.stack, self.first, self.shape[self.stack])


def parts_of(group: dict[str, Any], weight: Tensor) -> list[Part]:
    """The matrices of a weight, those of one shape that lie one below the other in one part."""
    shape, stack, blocks = form_of(group, weight)
    rest, parts, first = shape[stack + 1 :], [], 0
    for rows, alike in itertools.groupby(blocks):
        count = len(list(alike))
        form = math.prod(shape[:stack]) * count, rows, math.prod(rest)
        own = *shape[:stack], count * rows, *rest
        parts.append(Part(own, form, stack, first, count == len(blocks)))
        first += count * rows
    return parts


def beta2_of(group: dict[str, Any]) -> float:
    """The coefficient of NorMuon's averages."""
    return float(group.get("beta2", MUON_OWN["beta2"]))


def rows_shape(group: dict[str, Any], shape: torch.Size) -> torch.Size:
    """The shape of one number for each row of the matrices of a weight of this shape."""
    rows = shape[:-1] if _is_stacked(group, shape) else shape[:1]
    return torch.Size((*rows, 1))


def form_of(group: dict[str, Any], weight: Tensor) -> Form:
    """The matrices of a weight, as they lie in it."""
    stack = weight.ndim - 2 if _is_stacked(group, weight.shape) else 0
    heads, sizes = group.get("split_heads", 1), group.get("split_sizes") or (weight.shape[stack],)
    blocks = tuple(size // heads for size in sizes for _ in range(heads))
    return Form(tuple(weight.shape), stack, blocks)


def is_split(group: dict[str, Any]) -> bool:
    """Returns whether the matrices of a group's weights are split into others."""
    return group.get("split_heads", 1) > 1 or bool(group.get("split_sizes"))


def ns_dtype_of(group: dict[str, Any], device: torch.device) -> torch.dtype:
    asked = group.get("ns_dtype")
    return usual_dtype(device) if asked is None else asked


def starts_aol(group: dict[str, Any]) -> bool:
    """Returns whether the iteration begins with the AOL start."""
    return group.get("ns_start") == "aol"


def keeps_range(dtype: torch.dtype) -> bool:
    """Returns whether a dtype of 16 bits has the exponent range of float32: bfloat16 has."""
    return dtype is torch.bfloat16


def norm_dtype(x: Tensor) -> torch.dtype | None:
    """The dtype of norms, if it is not that of their tensor: float16 ends at 65,504."""
    return torch.float32 if x.dtype is torch.float16 else None


def to_divisors(group: dict[str, Any], norms: Tensor) -> Tensor:
    """Makes of the norms of updates, in place, what these are divided by."""
    eps = group["eps"]
    return norms.add_(eps) if group.get("adds_eps") else norms.clamp_(min=eps)


def ratio_of(group: dict[str, Any], rows: int, columns: int) -> float:
    """The factor of the learning rate for matrices of this shape."""
    if group["adjust_lr_fn"] == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, columns))
    least = 0 if group["adjust_lr_fn"] == "spectral_unclamped" else 1
    return math.sqrt(max(least, rows / max(columns, 1)))
