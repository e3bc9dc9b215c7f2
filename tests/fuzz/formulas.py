"""Expected results of a step of each optimizer of `composites`, by the references in float64.

A formula gets what is stored before the step. Products of matrices are made in float32 or fewer
bits, and what follows may be far more sensitive to their error than to that of anything else: a
formula says how far its result may be from the library's, from the arithmetic of the products.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fusedstep._matrix.coefficients import coefficients_of
from fuzz import oracle
from fuzz.bounded import Arithmetic, Bounded
from reference.adafactor import adafactor
from reference.adagrad import adagrad
from reference.adam import adamw as adamw_of_torch
from reference.came import came
from reference.muon import muon
from reference.musgd import musgd
from reference.orthogonal import iterated
from reference.rowwise_adagrad import rowwise_adagrad
from reference.sgd import sgd
from reference.sparse_adam import sparse_adam

#: Iterations with other roundings, the largest distance of which from the exact one is multiplied
#: by `MARGIN`: the library's may be in another form, whose error is up to five times as large.
SAMPLES, MARGIN = 3, 4


#: For numbers whose errors are what that of the gradient makes of them, and nothing else.
EXACT = Arithmetic(0.0, 0.0, 0.0)


@dataclass(frozen=True)
class Asked:
    """The step of a weight that a formula is asked for."""

    group: dict[str, Any]
    weight: Tensor
    """The value before the step, in float64."""
    grad: Tensor
    """The gradient, in float64; values of `rows` alone where these are given."""
    rows: Tensor | None
    before: dict[str, Tensor]
    """States, as they are stored before the step."""
    after: dict[str, Tensor]
    """States after the step."""
    step: float
    dtype: torch.dtype
    """The weight's dtype."""
    value_dtype: torch.dtype
    """The dtype of the weight's value: float32 if a 16-bit weight keeps more than its bits."""
    place: tuple[int, int, int] = (0, 0, 1)
    """The number of the group, that of the weight in it, and how many weights it has."""
    seed: int = 0
    error: Tensor | None = None
    """The gradient's largest error; None where it is not that of the step, but a nearby one."""

    @property
    def gradient(self) -> Bounded:
        """The gradient, with its error."""
        return Bounded(self.grad, 0.0 if self.error is None else self.error, EXACT)

    @property
    def rounded_weight(self) -> Bounded:
        """A copy of the weight, whose products have an error: all that is left of a sum with a
        gradient that cancels the product out.
        """
        return Bounded(self.weight, 0.0, Arithmetic.of(self.value_dtype)).clone()

    def state(self, name: str, shape: torch.Size | None = None) -> Tensor | None:
        """A state before the step in float64; None if there is none. ``shape``: the weight's."""
        if name not in self.before:
            return None
        return oracle.decoded(name, self.before, self.weight.shape if shape is None else shape)

    def states(self, *names: str, shape: torch.Size | None = None) -> dict[str, Tensor]:
        """The states of these names that there are."""
        return {name: self.state(name, shape) for name in names if name in self.before}

    def options(self, *names: str) -> dict[str, Any]:
        return {name: self.group[name] for name in names}

    @property
    def unit(self) -> float:
        """The relative error of a result of a torch operation, where they have 16 bits; else 0.

        They have the dtype of moments that are numbers. Codes stand for float32 ones.
        """
        names = self.after.keys() & {"exp_avg", "momentum_buffer"}
        dtype = self.after[names.pop()].dtype if names else self.value_dtype
        is_short = dtype in oracle.SIXTEEN_BITS and self.group["state_dtype"] is None
        return torch.finfo(dtype).eps / 2 if is_short and self.group["fused"] is False else 0.0


@dataclass
class Stepped:
    """The result of a formula."""

    values: dict[str, Tensor]
    """The weight, as "weight", and its states, by name."""
    errors: dict[str, Tensor] = field(default_factory=dict)
    """Largest errors of elements, beside those of any arithmetic."""
    in_norm: dict[str, float] = field(default_factory=dict)
    """Largest norm of the errors of all elements together, where elements have no bound."""
    feels_gradient: bool = True
    """False where `errors` has what the gradient's own error makes of the results."""

    @staticmethod
    def of(results: dict[str, Bounded | Tensor]) -> Stepped:
        """Results of a formula that has gone over the bounded gradient.

        Each element may be off by the sum of what the errors of all of the gradient's make of it:
        of a sum of squares, where all of these are larger or smaller at once; of what is divided by
        such a sum, where it moves against them; of what a root mean square clips, where that does.
        """
        numbers = {name: each for name, each in results.items() if isinstance(each, Bounded)}
        return Stepped(
            results | {name: each.value for name, each in numbers.items()},
            {name: each.error for name, each in numbers.items()},
            feels_gradient=False,
        )


# ---- In 16 bits ----------------------------------------------------------------------------------

# Torch operations round each result: sqrt, lerp, addcmul, addcdiv and products with a number once.
# An add with an alpha rounds the alpha, then the product unless vectorised, then the sum. The bound
# of every state and weight has two roundings already, of what it was and of what it is.


def of_product(asked: Asked, alpha: float, value: Tensor, error: Tensor | float = 0.0) -> Tensor:
    """The error of ``alpha * value`` in an add; ``error``: that of the value."""
    rounded = torch.tensor(alpha, dtype=asked.dtype).item()
    found = abs(rounded - alpha) * value.abs() + abs(rounded) * error
    return found if abs(alpha) == 1 else found + asked.unit * (rounded * value).abs()


def direction_of(asked: Asked, bias2: float = 1.0) -> tuple[Tensor, Tensor]:
    """AdamW's direction, by its moments as they are stored, and its error.

    Three results are rounded: the root, its sum with eps, and the root over its bias or the
    quotient. The sum is a denormal number where the second moment is zero. It is then off by half
    of the least number, more than which eps=1e-8 is not in float16: the sum may be zero.
    """
    m, v = (asked.after[name].double() for name in ("exp_avg", "exp_avg_sq"))
    divisor = (v / bias2).sqrt() + asked.group["eps"]
    info = torch.finfo(asked.after["exp_avg_sq"].dtype)
    least = (divisor - info.smallest_normal * info.eps / 2).clamp(min=0)
    value = m / divisor
    return value, m.abs() / least * (1 - asked.unit) ** -3 - value.abs()


def exact(value: Tensor) -> Bounded:
    """A copy of a number that has no error."""
    return Bounded(value, 0.0, EXACT).clone()


# ---- By rows -------------------------------------------------------------------------------------


def rowwise(asked: Asked) -> Stepped:
    weight, group, rows = asked.weight, asked.group, asked.rows
    shape = (len(weight), *[1] * (weight.dim() - 1)) if weight.dim() else ()
    first = torch.full(shape, float(group["initial_accumulator_value"]), dtype=torch.float64)
    stored = asked.state("sum", torch.Size(shape))
    total = exact(first if stored is None else stored).reshape(-1, 1)
    new = asked.rounded_weight.reshape(len(total.value), -1)
    rows = torch.arange(len(total.value)) if rows is None else rows
    options = asked.options(
        "lr", "lr_decay", "weight_decay", "eps", "decoupled_weight_decay", "maximize"
    )
    grad = asked.gradient.reshape(len(rows), new.shape[1])
    new[rows], total[rows] = rowwise_adagrad(new[rows], grad, total[rows], asked.step, **options)
    return Stepped.of({"weight": new.reshape(*weight.shape), "sum": total})


def of_sparse_adam(asked: Asked) -> Stepped:
    moments = {}
    for name in ("exp_avg", "exp_avg_sq"):
        stored = asked.state(name)
        moments[name] = exact(torch.zeros_like(asked.weight) if stored is None else stored)
    options = asked.options("lr", "betas", "eps", "weight_decay", "maximize")
    new = sparse_adam(
        asked.rounded_weight, asked.rows, asked.gradient, moments, asked.step, **options
    )
    return Stepped.of({"weight": new} | moments)


def adagrad_rows(asked: Asked) -> Stepped:
    names = ("lr", "lr_decay", "initial_accumulator_value", "eps", "maximize")
    return _elementwise(adagrad, asked, ("sum",), asked.options(*names))


def sgd_rows(asked: Asked) -> Stepped:
    return _elementwise(sgd, asked, (), asked.options("lr", "maximize"))


def _elementwise(
    formula: Callable, asked: Asked, names: tuple[str, ...], options: dict[str, Any]
) -> Stepped:
    """Steps the rows of a gradient; states that are not there yet begin as the formula says."""
    states, weight = asked.states(*names), asked.weight
    if asked.rows is None:
        new, states = formula(weight, asked.gradient, states, asked.step, **options)
        return Stepped.of({"weight": new} | states)
    # Rows that have no gradient keep what a first step without one would give them.
    _, all_states = formula(weight, torch.zeros_like(weight), states, asked.step, **options)
    rows = {name: value[asked.rows] for name, value in states.items()}
    found, own = formula(weight[asked.rows], asked.gradient, rows, asked.step, **options)
    new = {"weight": weight} | {name: states.get(name, all_states[name]) for name in own}
    for name, value in ({"weight": found} | own).items():
        new[name] = exact(new[name])
        new[name][asked.rows] = value
    return Stepped.of(new)


# ---- By moments of rows and columns --------------------------------------------------------------


def of_adafactor(asked: Asked) -> Stepped:
    group, weight = asked.group, asked.weight
    torchs = "row_var" in asked.after or "variance" in asked.after
    names = {"row": "row_var", "column": "col_var"} if torchs else OF_TRANSFORMERS
    if weight.dim() < 2:
        names = {"column": "variance" if torchs else "exp_avg_sq"}
    names = names | {"moment": "exp_avg"}
    own = {key: asked.before[name].double() for key, name in names.items() if name in asked.before}
    if torchs and weight.dim() >= 2 and "row" in own:
        own |= {"row": own["row"].squeeze(-1), "column": own["column"].squeeze(-2)}
    new, states = adafactor(
        weight, asked.gradient, own, asked.step, torchs=torchs, lr=group["lr"],
        weight_decay=group["weight_decay"], scale=group["scale_parameter"] is not False,
        relative=group["relative_step"] is not False, warmup=bool(group["warmup_init"]),
        bound=group["max_relative_step"] or 1e-2,
        maximize=group["maximize"], **numbers_of_adafactor(asked, torchs),
    )  # fmt: skip
    found = Stepped.of({"weight": new} | {names[key]: each for key, each in states.items()})
    found.values["weight"] = where_squares_are_finite(asked, found.values["weight"])
    return found


def where_squares_are_finite(asked: Asked, new: Tensor) -> Tensor:
    """A new weight, or NaN, which is compared with nothing, if float32 squares of it overflow.

    The root mean square that scales a step is infinite then, in transformers' class too.
    """
    is_scaled = asked.group["scale_parameter"] is not False and asked.value_dtype != torch.float64
    largest = asked.weight.square().max() if is_scaled else torch.tensor(0.0)
    return new if largest <= torch.finfo(torch.float32).max else torch.full_like(new, torch.nan)


#: The names of its states in transformers' class.
OF_TRANSFORMERS = {"row": "exp_avg_sq_row", "column": "exp_avg_sq_col"}


def numbers_of_adafactor(asked: Asked, torchs: bool) -> dict[str, Any]:
    group = asked.group
    eps1, eps2 = group["eps"]
    if eps1 is None:
        eps1 = torch.finfo(asked.value_dtype).eps if torchs else 1e-30
    return {
        "decay": group["beta2_decay"], "eps1": eps1, "eps2": eps2, "d": group["d"],
        "beta1": group["beta1"],
    }  # fmt: skip


def of_came(asked: Asked) -> Stepped:
    """The reference has sums where the states are means."""
    weight, before = asked.weight, asked.before
    names = {"average": "exp_avg"}
    state = {key: before[name].double() for key, name in names.items() if name in before}
    pairs = {"moments": "exp_avg_sq", "residuals": "exp_avg_res"}
    of_rows, of_columns = weight.shape[-1:].numel(), weight.shape[-2:-1].numel()
    if weight.dim() < 2:
        if "exp_avg_sq" in asked.before:
            state["moments"] = asked.before["exp_avg_sq"].double()
    elif "exp_avg_sq_row" in asked.before:
        for key, name in pairs.items():
            row, column = (asked.before[f"{name}_{side}"].double() for side in ("row", "col"))
            state[key] = row * of_rows, column * of_columns
    options = asked.options("lr", "eps", "clip_threshold", "betas", "weight_decay", "maximize")
    new, found = came(weight, asked.gradient, state, **options)
    results = {"weight": new, "exp_avg": found["average"]}
    if weight.dim() < 2:
        results["exp_avg_sq"] = found["moments"]
        return Stepped.of(results)
    for key, name in pairs.items():
        rows, columns = found[key]
        results |= {f"{name}_row": rows / of_rows, f"{name}_col": columns / of_columns}
    return Stepped.of(results)


# ---- By Newton–Schulz ----------------------------------------------------------------------------


#: The reference's names of factors of the learning rate.
_FACTORS = {"match_rms_adamw": "rms", "spectral_unclamped": "spectral"}


def rows_of(options: dict[str, Any], shape: list[int]) -> int:
    """The rows of the matrices of a weight, before they are split into heads."""
    return shape[-2] if _is_stacked(options, shape) else shape[0]


def _is_stacked(options: dict[str, Any], shape: list[int]) -> bool:
    stacked = options.get("stacked")
    return len(shape) == 3 if stacked is None else stacked


def _stack_of(group: dict[str, Any], shape: torch.Size) -> tuple[int, int, int]:
    heads = group.get("split_heads", 1)
    rows, count = rows_of(group, shape), 1
    columns = shape[-1] if _is_stacked(group, shape) else shape[1:].numel()
    if _is_stacked(group, shape):
        count = shape[:-2].numel()
    return count * heads, rows // heads, columns


def of_muon(asked: Asked) -> Stepped:
    group, weight = asked.group, asked.weight
    if not group["use_muon"]:
        names = ("exp_avg", "exp_avg_sq")
        options = asked.options("lr", "betas", "eps", "weight_decay", "maximize")
        new, states = adamw_of_torch(
            weight, asked.grad, asked.states(*names), asked.step, **options
        )
        errors = {}
        if asked.unit:
            bias1, bias2 = (1 - beta**asked.step for beta in group["betas"])
            length = group["lr"] / bias1
            update, error = direction_of(asked, bias2)
            kept = weight * (1 - group["lr"] * group["weight_decay"])
            errors["weight"] = (kept - length * update - new).abs() + length * error
        return Stepped({"weight": new} | states, errors)
    stack = _stack_of(group, weight.shape)
    of_rows = torch.Size((*(weight.shape[:-1] if _is_stacked(group, weight.shape)
                            else weight.shape[:1]), 1))  # fmt: skip
    state = {name: value.reshape(stack) for name, value in asked.states("momentum_buffer").items()}
    if group["normuon"] and (v := asked.state("second_momentum_buffer", of_rows)) is not None:
        state["v"] = v.reshape(*stack[:2], 1)
    options = asked.options("lr", "weight_decay", "momentum", "nesterov", "eps") | {
        "coefficients": coefficients_of(group["ns_coefficients"], group["ns_steps"]),
        "adjust": _FACTORS.get(group["adjust_lr_fn"], "original"),
        "cautious": group["cautious_decay"],
        "beta2": group["beta2"] if group["normuon"] else None,
        "iterate": functools.partial(iterated, start=group["ns_start"]),
    }

    def step(state: dict[str, Tensor], gradient: Tensor, **more: Any) -> dict[str, Tensor]:
        new, found = muon(weight.reshape(stack), gradient, state, **options | more)
        values = {"weight": new.reshape(weight.shape)}
        values["momentum_buffer"] = found["momentum_buffer"].reshape(weight.shape)
        if "v" in found:
            values["second_momentum_buffer"] = found["v"].reshape(of_rows)
        return values

    sign = -1 if group["maximize"] else 1
    return _iterated(asked, state, sign * asked.grad.reshape(stack), step)


def of_musgd(asked: Asked) -> Stepped:
    group, weight = asked.group, asked.weight
    state = asked.states("momentum_buffer", "momentum_buffer_SGD")
    options = asked.options("lr", "momentum", "weight_decay", "nesterov", "use_muon", "muon")

    def step(state: dict[str, Tensor], gradient: Tensor, **more: Any) -> dict[str, Tensor]:
        new, found = musgd(weight, gradient, state, sgd_factor=group["sgd"], **options, **more)
        return {"weight": new} | found

    gradient = (-1 if group["maximize"] else 1) * asked.grad
    if not group["use_muon"]:
        found = step(state, gradient)
        return Stepped(found, _errors_of_sgd(asked, gradient, found["weight"]))
    return _iterated(asked, state, gradient, step)


def _errors_of_sgd(asked: Asked, gradient: Tensor, new: Tensor) -> dict[str, Tensor]:
    """The errors of SGD in 16 bits, whose buffer counts as it is stored."""
    if not asked.unit:
        return {}

    def added(value: Tensor, error: Tensor, alpha: float, other: Tensor) -> tuple[Tensor, Tensor]:
        value = value + alpha * other
        error = error + of_product(asked, alpha, other)
        return value, error + asked.unit * (value.abs() + error)

    group, errors = asked.group, {}
    update, error = gradient, torch.zeros_like(gradient)
    if group["weight_decay"]:
        update, error = added(update, error, group["weight_decay"], asked.weight)
    if group["momentum"]:
        errors["momentum_buffer"] = error
        buffer = asked.after["momentum_buffer"].double()
        if group["nesterov"]:
            update, error = added(update, error, group["momentum"], buffer)
        else:
            update, error = buffer, 0.0
    error = of_product(asked, group["lr"], update, error)
    return errors | {"weight": (asked.weight - group["lr"] * update - new).abs() + error}


def _iterated(
    asked: Asked,
    state: dict[str, Tensor],
    gradient: Tensor,
    step: Callable[..., dict[str, Tensor]],
) -> Stepped:
    """A step, and how far others are from it whose operands and products are rounded at random.

    Which singular values a rounding grows with depends on the matrix: those of a matrix of low
    rank are all noise, of a square random one the smallest are. Samples tell how much that is.
    """
    expected = step(state, gradient)
    products = asked.group["ns_dtype"] or torch.bfloat16
    narrow = torch.finfo(asked.dtype).eps
    generator = torch.Generator().manual_seed(asked.seed)
    start = asked.group.get("ns_start", "norm")
    iterate = _roughly(products, narrow, generator, start)
    in_norm = dict.fromkeys(expected.keys() - {"momentum_buffer"}, 0.0)
    for _ in range(SAMPLES):
        roughly = {
            name: value * (1 + narrow * noise(value, generator)) if name != "v" else value
            for name, value in state.items()
        }
        found = step(roughly, gradient * (1 + narrow * noise(gradient, generator)),
                     iterate=iterate)  # fmt: skip
        for name in in_norm:
            in_norm[name] = max(in_norm[name], (found[name] - expected[name]).norm().item())
    return Stepped(expected, in_norm={name: MARGIN * value for name, value in in_norm.items()})


def noise(like: Tensor, generator: torch.Generator) -> Tensor:
    """Numbers from -1 to 1."""
    return 2 * torch.rand(like.shape, generator=generator, dtype=torch.float64) - 1


def _roughly(
    products: torch.dtype, narrow: float, generator: torch.Generator, start: str
) -> Callable:
    """The iteration in products of a dtype, each with errors of a rounding or two."""
    info = torch.finfo(products)
    # Terms of products are added in float32 at least.
    sums = 4 * min(info.eps, torch.finfo(torch.float32).eps)

    def rounded(value: Tensor, *sizes: Tensor, unit: float = info.eps) -> Tensor:
        size = sum(map(torch.Tensor.abs, sizes or (value,)))
        return value + noise(value, generator) * (unit * size + info.smallest_normal * info.eps)

    def product(a: Tensor, b: Tensor) -> Tensor:
        return rounded(a @ b, a.abs() @ b.abs(), unit=sums)

    def iterate(matrix: Tensor, coefficients: Any, eps: float) -> Tensor:
        norm = matrix.square().sum((-2, -1), keepdim=True).sqrt().clamp(min=eps)
        x = rounded(matrix / rounded(norm, unit=narrow), unit=max(info.eps, narrow))
        is_tall = x.shape[-2] > x.shape[-1]
        x = x.mT if is_tall else x
        if start == "aol":
            sums = rounded(product(x, x.mT)).abs().sum(-1, keepdim=True)
            x = rounded(x / sums.clamp(min=2**-20 / x.shape[-2]).sqrt())
        for a, b, c in coefficients:
            gram = rounded(product(x, x.mT))
            squares = product(gram, gram)
            polynomial = rounded(b * gram + c * squares, b * gram, c * squares)
            times = product(polynomial, x)
            x = rounded(a * x + times, a * x, times)
        return rounded(x.mT if is_tall else x, unit=narrow)

    return iterate
