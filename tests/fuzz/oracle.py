"""Expected results of a step, in float64 from the operands as they are stored before it.

Nothing here calls the library: formulas are the references of the case table, or stand below.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fuzz.bounded import Arithmetic, Bounded, UndecidableError, judge
from fuzz.memory import overlaps
from reference.codes import (
    MAPS,
    NOT_NEGATIVE,
    STEP_FLOORS,
    around,
    rounds_by_step,
    turning_points,
    values,
)
from support.cases import Case as Row

MASTER, LOW, COMPENSATION = "master_param", "low_param", "compensation"
BESIDE = (MASTER, LOW, COMPENSATION)
"""States that keep what a weight has no bits for."""

ABSMAX = "_absmax"
"""Suffix to the name of a state in codes: the absmax of its blocks."""

SIXTEEN_BITS = (torch.bfloat16, torch.float16)

ANY = "any"
"""A gradient that may hold anything after a step: the update is kept in its memory."""

#: Entries of a group that are no part of the formula. Clipping is done before it.
NOT_IN_FORMULAS = {
    "params", "foreach", "capturable", "differentiable", "fused", "state_dtype", "master_weights",
    "rounding", "seed",
    "keep_grad", "max_grad_norm", "skip_nonfinite",
}  # fmt: skip

#: The epsilon that torch.nn.utils.clip_grad_norm_ adds to the norm that it divides by.
CLIP_EPSILON = 1e-6

#: The same where an optimizer that clips by its own option adds something else.
OWN_CLIP_EPSILON = {"Adan": lambda group: group["eps"], "Lamb": lambda group: 0.0}


class WrongError(Exception):
    """A result that is not what the formula gives."""


def lamb(
    weight, grad, state, step, *, lr, betas, eps, weight_decay, maximize, debias, decoupled_decay,
    always_adapt, max_weight_norm, min_ratio, max_ratio,
):  # fmt: skip
    """LAMB with every option, from the tables of docs/optimizers/lamb.md."""
    gradient = -grad if maximize else grad
    zeros = torch.zeros_like(weight)
    m = betas[0] * state.get("exp_avg", zeros) + (1 - betas[0]) * gradient
    v = betas[1] * state.get("exp_avg_sq", zeros) + (1 - betas[1]) * gradient * gradient
    bias1, bias2 = (1 - beta**step for beta in betas)
    rate = lr * math.sqrt(bias2) / bias1 if debias == "lr" else lr
    if debias is True:
        m_hat, v_hat = m / bias1, v / bias2
    else:
        m_hat, v_hat = m, v
    update = m_hat / (v_hat.sqrt() + eps)
    if weight_decay != 0:
        if decoupled_decay:
            weight = weight - lr * weight_decay * weight
        else:
            update = update + weight_decay * weight
    if always_adapt or weight_decay != 0:
        weight_norm, update_norm = weight.norm(), update.norm()
        if weight_norm != 0 and update_norm != 0:
            ratio = min(weight_norm, max_weight_norm) / update_norm
            update = update * max(min(ratio, max_ratio), min_ratio)
    return weight - rate * update, {"exp_avg": m, "exp_avg_sq": v}


#: Formulas that know more options than the references of their rows.
FORMULAS: dict[str, Callable] = {"Lamb": lamb}


class _States(dict):
    """States before a step; one that is missing is zero, or the formula's value as it is stored."""

    def __init__(self, states: dict[str, Bounded], like: Bounded, dtype: torch.dtype):
        super().__init__(states)
        self._like, self._dtype = like, dtype

    def get(self, name: str, default: Bounded) -> Bounded:
        stored = default.value.to(self._dtype).double()
        return self[name] if name in self else Bounded(stored, 0.0, default.arithmetic)

    def __missing__(self, name: str) -> Bounded:
        return torch.zeros_like(self._like)


@dataclass
class Expected:
    """Expected values of a weight, its states and its gradient after a step."""

    weight: Bounded | None = None
    """None where nothing may change."""
    states: dict[str, Bounded] = field(default_factory=dict)
    dtype: torch.dtype = torch.float32
    """Dtype of the states."""
    count: float = 0.0
    counts: bool = True
    """True if the state has that count."""
    way: str | None = None
    """The way to keep more of the weight than it has bits for."""
    gradient: Bounded | str = "same"
    """Expected gradient, or a word: same, zero, none, any."""
    is_decidable: bool = True


@dataclass
class Step:
    """Requests that the caller makes of a step."""

    max_norm: float | None = None
    zero_grad: bool | str = False
    scale: float | None = None
    found_inf: bool = False
    untouched: frozenset[Tensor] = frozenset()
    """Weights whose states were made by steps that found_inf skipped: their first is to come."""


def number(option: Any) -> Any:
    if isinstance(option, Tensor):
        return option.item()
    return tuple(map(number, option)) if isinstance(option, (tuple, list)) else option


def expected_step(
    row: Row, optimizer: torch.optim.Optimizer, step: Step
) -> tuple[dict[Tensor, Expected], float]:
    """Expected values of every weight, and the norm of the gradients that the step returns."""
    groups = optimizer.param_groups
    pairs = [(group, p) for group in groups for p in group["params"]]
    expected = {p: Expected() for _, p in pairs}
    present = [(group, p) for group, p in pairs if p.grad is not None]
    is_zeroed = {True: "zero", "none": "none"}.get(step.zero_grad, "same")
    if step.found_inf:
        for _, p in present:
            expected[p].gradient = is_zeroed
        return expected, math.inf
    squares = sum(p.grad.double().square().sum().item() for _, p in present)
    factor = 1.0 if step.scale is None else 1.0 / step.scale
    left = norm = math.sqrt(squares) * factor
    if step.max_norm is not None and not (part := step.max_norm / (norm + CLIP_EPSILON)) >= 1:
        factor, left = factor * part, left * part
    own = own_max_norm(groups)
    left += OWN_CLIP_EPSILON.get(row.optimizer.__name__, lambda _: CLIP_EPSILON)(groups[-1])
    clip = own / left if left > own else 1.0
    places = Counter(p.grad.data_ptr() for _, p in present)
    for group, p in present:
        arithmetic = Arithmetic.of(p.dtype)
        if is_zeroed != "same":
            expected[p].gradient = is_zeroed
        elif (
            not row.elementwise
            and not group.get("keep_grad")
            and (p.dtype not in SIXTEEN_BITS or factor != 1)
        ):
            expected[p].gradient = ANY
        elif factor != 1:
            expected[p].gradient = factor * Bounded(p.grad.double(), 0.0, arithmetic)
        # Scaled in memory first, where the step may write it, or else as it is read.
        is_rounded = (
            isinstance(expected[p].gradient, Bounded)
            and clip == 1
            and p.dtype in SIXTEEN_BITS
            and places[p.grad.data_ptr()] == 1
            and not overlaps(p.shape, p.grad.stride())
        )
        state = optimizer.state.get(p, {})
        if p in step.untouched:
            state = {name: state[name] for name in state.keys() & {*row.numbers, *BESIDE}}
        _expect(expected[p], row, group, p, state, factor * clip, is_rounded)
    return expected, norm


def own_max_norm(groups: list[dict[str, Any]]) -> float:
    """Norm to which the optimizer's own option clips all gradients. None and 0 clip nothing."""
    return number(groups[-1].get("max_grad_norm")) or math.inf


def _expect(
    expected: Expected,
    row: Row,
    group: dict[str, Any],
    p: Tensor,
    state: dict[str, Tensor],
    factor: float,
    is_rounded: bool,
) -> None:
    arithmetic = Arithmetic.of(p.dtype)
    weight = p.detach().double()
    is_short = p.dtype in SIXTEEN_BITS
    expected.way = _way_of(group) if is_short else None
    weight = Bounded(value_of(p.detach(), state), 0.0, arithmetic)
    gradient = Bounded(p.grad.detach().double(), 0.0, arithmetic)
    if factor != 1:
        gradient = factor * gradient
        if is_rounded:
            low, high = (
                (gradient.value + sign * gradient.error).to(p.dtype).double() for sign in (-1, 1)
            )
            gradient = Bounded((low + high) / 2, (high - low) / 2, arithmetic)
    beside = {*row.numbers, *BESIDE}
    stored = {
        name: tensor
        for name, tensor in state.items()
        if name not in beside and not name.endswith(ABSMAX)
    }
    states = {}
    for name in stored:
        value = decoded(name, state, p.shape)
        # The values of codes are float32 numbers, made by float32 sums.
        error = 2.0**-22 * value.abs() if name + ABSMAX in state else 0.0
        states[name] = Bounded(value, error, arithmetic, True)
    wide = is_short and (expected.way or group.get("state_dtype") is not None)
    if stored and not expected.way:
        wide = is_short and next(iter(stored.values())).dtype not in SIXTEEN_BITS
    expected.dtype = torch.float32 if wide else p.dtype
    expected.count = (state["step"].item() if "step" in state else 0.0) + 1
    expected.counts = row.counts
    formula = FORMULAS.get(row.optimizer.__name__, row.reference)
    numbers = state.keys() & set(row.numbers) - {"step"}
    states |= {name: state[name].detach().clone() for name in numbers}
    try:
        expected.weight, expected.states = formula(
            weight,
            gradient,
            _States(states, weight, expected.dtype),
            expected.count,
            **_options(formula, group),
        )
    except UndecidableError:
        expected.is_decidable = False


def _way_of(group: dict[str, Any]) -> str | None:
    masters = group.get("master_weights", False)
    return group.get("rounding") or (MASTER if masters is True else masters or None)


def value_of(weight: Tensor, state: dict[str, Tensor]) -> Tensor:
    """The value that a step starts from, in float64: the weight's, and what is kept beside it."""
    if MASTER in state:
        # A weight that is not what its copy rounds to has been changed, and is taken as it is.
        copy = state[MASTER]
        return torch.where(copy.to(weight.dtype) == weight, copy, weight.float()).double()
    if COMPENSATION in state:
        return (weight.float() + state[COMPENSATION].float()).double()
    if LOW not in state:
        return weight.double()
    upper, low = weight.contiguous().view(torch.int16).int(), state[LOW].int()
    magnitude = upper & 0x7FFF
    # These would take zero across zero, and infinity to NaN: the weight has been changed.
    foreign = ((low < 0) & (magnitude == 0)) | ((low > 0) & (magnitude >= 0x7F80))
    return ((upper << 16) + torch.where(foreign, 0, low)).view(torch.float32).double()


def check_master(value: Tensor, weight: Tensor, what: str) -> None:
    """Raises `WrongError` unless a weight is what its value rounds to; a NaN is as any other."""
    if not torch.equal(value.to(weight.dtype).nan_to_num(0.5), weight.nan_to_num(0.5)):
        raise WrongError(f"{what}: the weight is not what its copy rounds to")


def kind_of(codes: Tensor, shape: torch.Size) -> str:
    """The kind of a state's codes."""
    if codes.dtype is torch.float8_e4m3fn:
        return "fp8"
    return "int8" if codes.numel() == shape.numel() else "int4"


def decoded(name: str, state: dict[str, Tensor], shape: torch.Size) -> Tensor:
    """A state in float64."""
    if name + ABSMAX not in state:
        return state[name].double()
    codes = state[name]
    kind = kind_of(codes, shape)
    return values(codes.contiguous(), state[name + ABSMAX], kind, name not in NOT_NEGATIVE, shape)


def step_of(expected: Expected) -> int:
    """The number by which the step rounds states in codes; 0: to nearest."""
    return int(expected.count) if expected.counts and rounds_by_step(expected.states) else 0


def as_codes(
    name: str, number: Bounded, state: dict[str, Tensor], shape: torch.Size, step: int
) -> Bounded:
    """A number with the error that its code adds, that of a step or the nearest."""
    kind, absmax = kind_of(state[name], shape), state[name + ABSMAX].double()
    of_code, block = MAPS[kind, name not in NOT_NEGATIVE]
    of_code = of_code[~of_code.isnan()].unique()
    most = absmax.repeat_interleave(block)[: shape.numel()].reshape(shape)
    share = (number.value / most).nan_to_num(0.0)
    low, high = around(share, kind, name not in NOT_NEGATIVE)
    turn = turning_points(low, high, kind, step)
    to_low, to_high = (share - low).abs(), (share - high).abs()
    near = torch.where(share.abs() > turn.abs(), to_high, to_low)
    # Sums in float32, and the number's error, leave a few near the turning point undecided.
    vague = 1e-6 * share.abs() + 2e-4 * (high - low).abs()
    vague = vague + (2 * number.error / most).nan_to_num(0.0)
    near = torch.where((share - turn).abs() <= vague, torch.maximum(to_low, to_high), near)
    if kind == "int8" and name not in NOT_NEGATIVE:  # nothing negative is rounded to zero
        least = of_code[of_code < 0].max()
        is_near = (share > least) & (number.value - number.error < 0)
        near = torch.where(is_near, torch.maximum(near, share - least), near)
    if kind != "int4" and name in NOT_NEGATIVE:  # nothing positive is rounded to zero
        least = of_code[of_code >= 0][STEP_FLOORS[kind] if step else 1]
        is_near = (share < least) & (number.value + number.error > 0)
        near = torch.where(is_near, torch.maximum(near, least - share), near)
    # Blocks of less count as zero, and of more as infinite.
    distance = torch.where(most < 2.0**-117, number.value.abs(), near * most)
    distance = torch.where(most > 2.0**126, torch.inf, distance)
    # Within its error the number may be that of a block's largest, or have another code.
    # A decoded value is rounded, however small the number that it is nearest to.
    unit = number.arithmetic.unit * (number.value.abs() + distance)
    return Bounded(number.value, distance + 2 * number.error + 4 * unit, number.arithmetic)


@functools.cache
def _parameters(formula: Callable) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(formula).parameters


def _options(formula: Callable, group: dict[str, Any]) -> dict[str, Any]:
    options = {k: number(v) for k, v in group.items() if k not in NOT_IN_FORMULAS}
    parameters = _parameters(formula)
    if any(each.kind is each.VAR_KEYWORD for each in parameters.values()):
        return options
    return {k: v for k, v in options.items() if k in parameters}


@dataclass
class Tally:
    """Elements that have been compared, and those of them that a small error could hide in."""

    elements: int = 0
    vague: int = 0


def compare(
    expected: Expected, p: Tensor, state: dict[str, Tensor], what: str, tally: Tally
) -> None:
    """Raises `WrongError` where a weight or a state is not within its bound."""
    if not expected.is_decidable:
        tally.elements += p.numel()
        tally.vague += p.numel()
        return
    count = state["step"].item() if expected.counts else expected.count
    if count != expected.count:
        raise WrongError(f"{what}: the step count is {count} instead of {expected.count}")
    for name, value, number in _stored(expected, p, state, what):
        verdict = judge(value.detach(), number)
        tally.elements += value.numel()
        if name + ABSMAX not in state:  # else it is a code that is near enough
            tally.vague += int(verdict.vague.sum())
        if verdict.wrong.any():
            raise WrongError(f"{what}: {name} {_first(verdict.wrong, value, number)}")


def _stored(
    expected: Expected, p: Tensor, state: dict[str, Tensor], what: str
) -> Iterator[tuple[str, Tensor, Bounded]]:
    for name, number in expected.states.items():
        value = state[name]
        if isinstance(number, Tensor):  # one that is there beside the count
            if not torch.equal(value, number):
                raise WrongError(f"{what}: {name} is {value.item()} instead of {number.item()}")
            continue
        if name + ABSMAX in state:
            number = as_codes(name, number, state, p.shape, step_of(expected))
            yield name, decoded(name, state, p.shape), number
            continue
        if (value.dtype, value.shape) != (expected.dtype, p.shape):
            raise WrongError(f"{what}: {name} is {value.dtype} {list(value.shape)}")
        yield name, value, number
    weight, after = expected.weight, value_of(p.detach(), state)
    if expected.way is None:
        yield "weight", p, weight
    elif expected.way == "stochastic":
        ulp = torch.nextafter(p.detach().abs(), torch.tensor(torch.inf, dtype=p.dtype)).double()
        ulp = (ulp - p.detach().abs().double()).nan_to_num(0.0, 0.0)
        yield "weight", p, Bounded(weight.value, weight.error + ulp, weight.arithmetic)
    else:
        if expected.way == MASTER:
            check_master(after, p.detach(), what)
        beside = 2.0**-16 * p.detach().double().abs().nan_to_num(0.0, 0.0, 0.0)
        error = weight.error + (beside if expected.way == "kahan" else 0.0)
        yield "weight", after.float(), Bounded(weight.value, error, weight.arithmetic)


def compare_gradient(expected: Expected, before: Tensor | None, p: Tensor, what: str) -> None:
    """Raises `WrongError` where a gradient is not what should be left of `before`."""
    kind, after = expected.gradient, p.grad
    if isinstance(kind, Bounded):
        verdict = judge(after.detach(), kind)
        if verdict.wrong.any():
            raise WrongError(f"{what}: the gradient {_first(verdict.wrong, after, kind)}")
    elif kind == "none" and after is not None:
        raise WrongError(f"{what}: the gradient is not None")
    elif kind == "zero" and after.count_nonzero():
        raise WrongError(f"{what}: the gradient is not zero")
    elif kind == "same" and before is not None and not torch.equal(before, after):
        raise WrongError(f"{what}: the gradient has changed")


def _first(wrong: Tensor, actual: Tensor, expected: Bounded) -> str:
    first = tuple(wrong.nonzero()[0].tolist())
    return (
        f"is {actual[first].item()!r} at {first} instead of {expected.value[first].item()!r} "
        f"within {expected.error[first].item():.2g}, and so are {int(wrong.sum())} "
        f"of {wrong.numel()} elements"
    )
