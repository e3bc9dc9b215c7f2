"""Expected results of a step of each optimizer of `composites`, by the references in float64.

A formula gets what is stored before the step. Products of matrices are made in float32 or fewer
bits, and what follows may be far more sensitive to their error than to that of anything else: a
formula says how far its result may be from the library's, from the arithmetic of the products.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from fusedstep.optim._newton_schulz import coefficients_of
from fuzz import oracle
from reference.adafactor import adafactor
from reference.adagrad import adagrad
from reference.adam import adamw as adamw_of_torch
from reference.apollo import apollo
from reference.came import came
from reference.galore import adamw, side_of
from reference.galore_adafactor import rms
from reference.muon import muon
from reference.musgd import musgd
from reference.rowwise_adagrad import rowwise_adagrad
from reference.sgd import sgd
from reference.sparse_adam import sparse_adam

LEFT, RIGHT = "projector_left", "projector_right"

#: Iterations with other roundings, the largest distance of which from the exact one is multiplied
#: by `MARGIN`: the library's may be in another form, whose error is up to five times as large.
SAMPLES, MARGIN = 3, 4


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
    """That of the weight."""
    place: tuple[int, int, int] = (0, 0, 1)
    """The number of the group, that of the weight in it, and how many weights it has."""
    seed: int = 0
    error: Tensor | None = None
    """The gradient's largest error; None where it is not that of the step, but a nearby one."""

    def state(self, name: str, shape: torch.Size | None = None) -> Tensor | None:
        """A state before the step in float64; None if there is none. ``shape``: the weight's."""
        if name not in self.before:
            return None
        return oracle.decoded(name, self.before, self.weight.shape if shape is None else shape)

    def states(self, *names: str, shape: torch.Size | None = None) -> dict[str, Tensor]:
        """Those of these states that there are."""
        return {name: self.state(name, shape) for name in names if name in self.before}

    def options(self, *names: str) -> dict[str, Any]:
        return {name: self.group[name] for name in names}


@dataclass
class Stepped:
    """What a formula gives."""

    values: dict[str, Tensor]
    """The weight, as "weight", and its states, by name."""
    errors: dict[str, Tensor] = field(default_factory=dict)
    """Largest errors of elements, beside those of any arithmetic."""
    in_norm: dict[str, float] = field(default_factory=dict)
    """Largest norm of the errors of all elements together, where elements have no bound."""


# ---- By rows -------------------------------------------------------------------------------------


def rowwise(asked: Asked) -> Stepped:
    weight, group, rows = asked.weight, asked.group, asked.rows
    shape = (len(weight), *[1] * (weight.dim() - 1)) if weight.dim() else ()
    first = torch.full(shape, float(group["initial_accumulator_value"]), dtype=torch.float64)
    stored = asked.state("sum", torch.Size(shape))
    total = (first if stored is None else stored).reshape(-1, 1).clone()
    new = weight.reshape(len(total), -1).clone()
    rows = torch.arange(len(total)) if rows is None else rows
    options = asked.options(
        "lr", "lr_decay", "weight_decay", "eps", "decoupled_weight_decay", "maximize"
    )
    grad = asked.grad.reshape(len(rows), new.shape[1])
    new[rows], total[rows] = rowwise_adagrad(new[rows], grad, total[rows], asked.step, **options)
    return Stepped({"weight": new.reshape(weight.shape), "sum": total})


def of_sparse_adam(asked: Asked) -> Stepped:
    moments = {}
    for name in ("exp_avg", "exp_avg_sq"):
        stored = asked.state(name)
        moments[name] = torch.zeros_like(asked.weight) if stored is None else stored.clone()
    options = asked.options("lr", "betas", "eps", "weight_decay", "maximize")
    new = sparse_adam(asked.weight, asked.rows, asked.grad, moments, asked.step, **options)
    return Stepped({"weight": new} | moments)


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
        new, states = formula(weight, asked.grad, states, asked.step, **options)
        return Stepped({"weight": new} | states)
    # Rows that have no gradient keep what a first step without one would give them.
    _, all_states = formula(weight, torch.zeros_like(weight), states, asked.step, **options)
    rows = {name: value[asked.rows] for name, value in states.items()}
    found, own = formula(weight[asked.rows], asked.grad, rows, asked.step, **options)
    new = {"weight": weight} | {name: states.get(name, all_states[name]) for name in own}
    for name, value in ({"weight": found} | own).items():
        new[name] = new[name].clone()
        new[name][asked.rows] = value
    return Stepped(new)


# ---- By moments of rows and columns --------------------------------------------------------------


def of_adafactor(asked: Asked) -> Stepped:
    group, weight = asked.group, asked.weight
    torchs = "row_var" in asked.after or "variance" in asked.after
    names = {"row": "row_var", "column": "col_var"} if torchs else _OF_TRANSFORMERS
    if weight.dim() < 2:
        names = {"column": "variance" if torchs else "exp_avg_sq"}
    names = names | {"moment": "exp_avg"}
    own = {key: asked.before[name].double() for key, name in names.items() if name in asked.before}
    if torchs and weight.dim() >= 2 and "row" in own:
        own |= {"row": own["row"].squeeze(-1), "column": own["column"].squeeze(-2)}
    new, states = adafactor(
        weight, asked.grad, own, asked.step, torchs=torchs, lr=group["lr"],
        weight_decay=group["weight_decay"], scale=group["scale_parameter"] is not False,
        relative=group["relative_step"] is not False, warmup=bool(group["warmup_init"]),
        maximize=group["maximize"], **_numbers_of_adafactor(asked, torchs),
    )  # fmt: skip
    return Stepped({"weight": new} | {names[key]: value for key, value in states.items()})


_OF_TRANSFORMERS = {"row": "exp_avg_sq_row", "column": "exp_avg_sq_col"}


def _numbers_of_adafactor(asked: Asked, torchs: bool) -> dict[str, Any]:
    group = asked.group
    eps1, eps2 = group["eps"]
    if eps1 is None:
        eps1 = torch.finfo(asked.dtype).eps if torchs else 1e-30
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
            rows = row.reshape(-1, weight.shape[-2]) * of_rows
            columns = column.reshape(-1, weight.shape[-1]) * of_columns
            state[key] = [*zip(rows, columns, strict=True)]
    options = asked.options("lr", "eps", "clip_threshold", "betas", "weight_decay", "maximize")
    new, found = came(weight, asked.grad, state, **options)
    values = {"weight": new, "exp_avg": found["average"]}
    if weight.dim() < 2:
        values["exp_avg_sq"] = found["moments"]
        return Stepped(values)
    for key, name in pairs.items():
        rows, columns = zip(*found[key], strict=True)
        values[f"{name}_row"] = torch.stack(rows) / of_rows
        values[f"{name}_col"] = torch.stack(columns) / of_columns
    return Stepped(values)


# ---- By Newton–Schulz ----------------------------------------------------------------------------


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
        if group["fused"] is False:  # the update is that of moments as they are stored
            bias1, bias2 = (1 - beta**asked.step for beta in group["betas"])
            m, v = (asked.after[name].double() for name in names)
            update = group["lr"] * (m / bias1) / ((v / bias2).sqrt() + group["eps"])
            kept = weight * (1 - group["lr"] * group["weight_decay"])
            errors["weight"] = (kept - update - new).abs()
        return Stepped({"weight": new} | states, errors)
    stack = _stack_of(group, weight.shape)
    of_rows = torch.Size((*(weight.shape[:-1] if _is_stacked(group, weight.shape)
                            else weight.shape[:1]), 1))  # fmt: skip
    state = {name: value.reshape(stack) for name, value in asked.states("momentum_buffer").items()}
    if group["normuon"] and (v := asked.state("second_momentum_buffer", of_rows)) is not None:
        state["v"] = v.reshape(*stack[:2], 1)
    options = asked.options("lr", "weight_decay", "momentum", "nesterov", "eps") | {
        "coefficients": coefficients_of(group["ns_coefficients"], group["ns_steps"]),
        "adjust": "rms" if group["adjust_lr_fn"] == "match_rms_adamw" else "original",
        "cautious": group["cautious_decay"],
        "beta2": group["beta2"] if group["normuon"] else None,
    }

    def step(state: dict[str, Tensor], gradient: Tensor, **more: Any) -> dict[str, Tensor]:
        new, found = muon(weight.reshape(stack), gradient, state, **options, **more)
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
        return Stepped(step(state, gradient))
    return _iterated(asked, state, gradient, step)


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
    iterate = _roughly(products, narrow, generator)
    in_norm = dict.fromkeys(expected.keys() - {"momentum_buffer"}, 0.0)
    for _ in range(SAMPLES):
        roughly = {
            name: value * (1 + narrow * _noise(value, generator)) if name != "v" else value
            for name, value in state.items()
        }
        found = step(roughly, gradient * (1 + narrow * _noise(gradient, generator)),
                     iterate=iterate)  # fmt: skip
        for name in in_norm:
            in_norm[name] = max(in_norm[name], (found[name] - expected[name]).norm().item())
    return Stepped(expected, in_norm={name: MARGIN * value for name, value in in_norm.items()})


def _noise(like: Tensor, generator: torch.Generator) -> Tensor:
    """Numbers from -1 to 1."""
    return 2 * torch.rand(like.shape, generator=generator, dtype=torch.float64) - 1


def _roughly(products: torch.dtype, narrow: float, generator: torch.Generator) -> Callable:
    """The iteration in products of a dtype, each with errors of a rounding or two."""
    info = torch.finfo(products)
    # Terms of products are added in float32 at least.
    sums = 4 * min(info.eps, torch.finfo(torch.float32).eps)

    def rounded(value: Tensor, *sizes: Tensor, unit: float = info.eps) -> Tensor:
        size = sum(map(torch.Tensor.abs, sizes or (value,)))
        return value + _noise(value, generator) * (unit * size + info.smallest_normal * info.eps)

    def product(a: Tensor, b: Tensor) -> Tensor:
        return rounded(a @ b, a.abs() @ b.abs(), unit=sums)

    def iterate(matrix: Tensor, coefficients: Any, eps: float) -> Tensor:
        norm = matrix.square().sum((-2, -1), keepdim=True).sqrt().clamp(min=eps)
        x = rounded(matrix / rounded(norm, unit=narrow), unit=max(info.eps, narrow))
        is_tall = x.shape[-2] > x.shape[-1]
        x = x.mT if is_tall else x
        for a, b, c in coefficients:
            gram = rounded(product(x, x.mT))
            squares = product(gram, gram)
            polynomial = rounded(b * gram + c * squares, b * gram, c * squares)
            times = product(polynomial, x)
            x = rounded(a * x + times, a * x, times)
        return rounded(x.mT if is_tall else x, unit=narrow)

    return iterate


# ---- By projections ------------------------------------------------------------------------------


def _sides(group: dict[str, Any], rows: int, columns: int) -> tuple[str, ...]:
    side = side_of(group["proj_type"], rows, columns)
    return {"left": (LEFT,), "right": (RIGHT,), "full": (LEFT, RIGHT)}[side]


def _low_shape(group: dict[str, Any], shape: torch.Size) -> torch.Size:
    rows, columns = shape[0], shape[1:].numel()
    sides = _sides(group, rows, columns)
    rank = group["rank"]
    return torch.Size((rank if LEFT in sides else rows, rank if RIGHT in sides else columns))


@dataclass
class _Low:
    """A low-rank gradient, how far the library's may be, and the way back."""

    value: Tensor
    error: Tensor
    bases: dict[str, Tensor]
    unit: float
    """The relative error of a product."""

    @staticmethod
    def of(asked: Asked, bases: dict[str, Tensor]) -> _Low:
        grad, info = asked.grad.flatten(1), torch.finfo(asked.dtype)
        # Sums of float32 have more errors than one, and never fewer than of float32's size.
        unit = 16 * info.eps if asked.dtype in (torch.float32, torch.float64) else 4 * info.eps
        sizes, ones = grad.abs(), grad.abs()
        value = grad
        for side, basis in bases.items():
            one = torch.ones_like(basis)
            if side == LEFT:
                value, sizes, ones = basis.T @ value, basis.abs().T @ sizes, one.T @ ones
            else:
                value, sizes, ones = value @ basis.T, sizes @ basis.abs().T, ones @ one.T
        least = info.smallest_normal * info.eps
        # A factor of the gradient is one of the product: a gradient may be denormal before it.
        return _Low(value, unit * sizes + least * (1 + ones), bases, unit)

    def nearby(self, seed: int) -> list[Tensor]:
        """Low-rank gradients within the error: all to one side, and at random."""
        generator = torch.Generator().manual_seed(seed)
        signs = [1, -1, *(_noise(self.value, generator).sign() for _ in range(2))]
        return [self.value + sign * self.error for sign in signs]

    def back(self, update: Tensor) -> Tensor:
        for side, basis in self.bases.items():
            update = basis @ update if side == LEFT else update @ basis
        return update

    def sizes_back(self, update: Tensor) -> Tensor:
        for side, basis in self.bases.items():
            update = basis.abs() @ update.abs() if side == LEFT else update.abs() @ basis.abs()
        return update


def _farthest(value: Tensor, others: list[Tensor]) -> Tensor:
    """Twice the largest distance of each element: extremes may lie between those looked at."""
    return 2 * torch.stack([(each - value).abs() for each in others]).amax(0)


def _checked_bases(asked: Asked) -> dict[str, Tensor]:
    """The bases of a step, which are states: the old ones, or new ones of this gradient."""
    group, grad = asked.group, asked.grad.flatten(1)
    sides = _sides(group, *grad.shape)
    count = int(asked.step) - 1
    index, number = asked.place[1:]
    gap = group["update_proj_gap"]
    offset = index * gap // number if group.get("stagger") else 0
    svd = group.get("svd", "exact")
    due = count == 0 or (count + offset) % gap == 0
    doublings = asked.before.get("gap_doublings")
    if due and count and svd == "lazy":
        due = (count + offset) // gap % 2 ** int(doublings) == 0
    bases = {side: asked.after[side].double() for side in sides}
    cosines = []
    for side, basis in bases.items():
        if asked.error is None:
            continue
        if not due:
            if not torch.equal(asked.before[side], asked.after[side]):
                raise oracle.WrongError(f"{side} has changed, but is not due")
            continue
        vectors = basis if side == LEFT else basis.T
        off = (vectors.T @ vectors - torch.eye(vectors.shape[1], dtype=torch.float64)).abs().max()
        if not off <= 1e-4:
            raise oracle.WrongError(f"{side} is not orthonormal: {off.item():.2g}")
        part = vectors.T @ grad if side == LEFT else grad @ vectors
        most = torch.linalg.svdvals(grad)[: group["rank"]].square().sum()
        # A random product finds most of what there is; one power step from an old basis may not.
        share = {"exact": 1 - 1e-4, "power": 0.0 if count else 0.5}.get(svd, 0.5)
        off = 2 * asked.error.norm()
        if not part.norm() >= (share * most).sqrt() - off:
            raise oracle.WrongError(
                f"{side} has {part.square().sum().item():.4g} of {most.item():.4g} of the gradient"
            )
        if count:
            old = asked.before[side].double()
            cosines.append((vectors.T @ (old if side == LEFT else old.T)).square().mean(1).sum())
            if svd == "power" and off == 0:
                _check_power_step(grad if side == LEFT else grad.T, old if side == LEFT else old.T,
                                  part.square().sum(), side)  # fmt: skip
    if svd == "lazy" and asked.error is not None:
        _check_doublings(asked, due, min(cosines, default=None))
    return bases


def _check_power_step(matrix: Tensor, old: Tensor, found: Tensor, side: str) -> None:
    image = matrix @ (matrix.T @ old)
    q, r = torch.linalg.qr(image)
    diagonal = r.diagonal().abs()
    if diagonal.min() < 1e-3 * diagonal.max():
        return  # columns that are nothing but rounding have any direction
    expected = (q.T @ matrix).square().sum()
    if not (found - expected).abs() <= 1e-2 * expected:
        raise oracle.WrongError(f"{side} has {found:.4g} of the gradient instead of {expected:.4g}")


def _check_doublings(asked: Asked, due: bool, cosine: Tensor | None) -> None:
    before, after = (float(each.get("gap_doublings", 0)) for each in (asked.before, asked.after))
    if not due:
        expected = (before,)
    elif cosine is None:
        expected = (0.0,)
    else:
        more = min(before + 1, 4.0)
        expected = (0.0, more) if abs(cosine - 0.4) < 1e-3 else (more if cosine > 0.4 else 0.0,)
    if after not in expected:
        raise oracle.WrongError(f"gap_doublings is {after} instead of {expected}")


_ADAMW_OPTIONS = ("lr", "betas", "eps", "correct_bias")


def _moments(asked: Asked, shape: torch.Size) -> dict[str, Tensor]:
    names = {"m": "exp_avg", "v": "exp_avg_sq"}
    return {k: asked.state(name, shape) for k, name in names.items() if name in asked.before}


def _adamw(asked: Asked) -> Stepped:
    """The step of a group without a rank."""
    sign = -1 if asked.group["maximize"] else 1
    state = _moments(asked, asked.weight.shape)
    new, state = adamw(
        asked.weight, sign * asked.grad, state, asked.step, **asked.options(*_ADAMW_OPTIONS)
    )
    new = new * (1 - asked.group["lr"] * asked.group["weight_decay"])
    errors = {}
    if asked.group["fused"] is False:  # the update is that of moments as they are stored
        m, v = (asked.after[name].double() for name in ("exp_avg", "exp_avg_sq"))
        beta1, beta2 = asked.group["betas"] if asked.group["correct_bias"] else (0.0, 0.0)
        length = asked.group["lr"] * (1 - beta2**asked.step) ** 0.5 / (1 - beta1**asked.step)
        kept = 1 - asked.group["lr"] * asked.group["weight_decay"]
        stored = kept * (asked.weight - length * m / (v.sqrt() + asked.group["eps"]))
        errors["weight"] = (stored - new).abs()
    return Stepped({"weight": new, "exp_avg": state["m"], "exp_avg_sq": state["v"]}, errors)


def of_galore(asked: Asked) -> Stepped:
    group = asked.group
    if group["rank"] is None:
        return _adamw(asked)
    bases = _checked_bases(asked)
    sign = -1 if group["maximize"] else 1
    low = _Low.of(replace(asked, grad=sign * asked.grad), bases)

    def step(grad: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        state = _moments(asked, grad.shape)
        options = asked.options(*_ADAMW_OPTIONS)
        move, state = adamw(torch.zeros_like(grad), grad, state, asked.step, **options)
        return -group["scale"] * move, {"exp_avg": state["m"], "exp_avg_sq": state["v"]}

    return _projected(asked, low, step, 1 - group["lr"] * group["weight_decay"], decays_last=True)


def _projected(
    asked: Asked,
    low: _Low,
    step: Callable[[Tensor], tuple[Tensor, dict[str, Tensor]]],
    keep: float,
    decays_last: bool,
) -> Stepped:
    """A step by the update of a low-rank gradient, and what errors of products change of it."""
    update, states = step(low.value)
    others = [step(each) for each in low.nearby(asked.seed)]
    error = _farthest(update, [each for each, _ in others])
    of_move = keep if decays_last else 1.0
    move = of_move * low.back(update).view(asked.weight.shape)
    errors = {
        name: _farthest(value, [state[name] for _, state in others])
        for name, value in states.items()
    }
    sizes = low.sizes_back(error + low.unit * update.abs())
    errors["weight"] = abs(of_move) * sizes.view(asked.weight.shape)
    return Stepped({"weight": keep * asked.weight - move} | states, errors)


def of_galore_adafactor(asked: Asked) -> Stepped:
    group = asked.group
    if group["rank"] is None:
        return of_adafactor(asked)
    bases = _checked_bases(asked)
    sign = -1 if group["maximize"] else 1
    low = _Low.of(replace(asked, grad=sign * asked.grad), bases)
    names = _OF_TRANSFORMERS | {"moment": "exp_avg"}
    length = group["lr"]
    if group["relative_step"] is not False:
        length = min(1e-6 * asked.step if group["warmup_init"] else length, asked.step**-0.5)
    if group["scale_parameter"] is not False:
        length = length * max(group["eps"][1], rms(asked.weight).item())

    def step(grad: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        own = {k: asked.before[n].double() for k, n in names.items() if n in asked.before}
        move, states = adafactor(
            torch.zeros_like(grad), grad, own, asked.step, torchs=False, lr=length, scale=False,
            relative=False, **_numbers_of_adafactor(asked, False),
        )  # fmt: skip
        return -group["scale"] * move, {names[key]: value for key, value in states.items()}

    return _projected(asked, low, step, 1 - group["weight_decay"] * length, decays_last=False)


def of_apollo(asked: Asked) -> Stepped:
    group, weight = asked.group, asked.weight
    if group["rank"] is None:
        return _adamw(asked)
    grad = asked.grad.flatten(1)
    bases = _checked_bases(asked) if group["proj"] == "svd" else _random_basis(asked, grad.shape)
    ((side, basis),) = bases.items()
    low = _Low.of(asked, bases)
    shape, dim = low.value.shape, (None if group["scale_type"] == "tensor" else int(side == RIGHT))
    state = _moments(asked, shape)
    last = asked.before.get("scaled_grad")
    if last is not None and last > 0:  # a norm of zero limits nothing
        state["norm"] = last.double()
    options = asked.options(
        *_ADAMW_OPTIONS, "weight_decay", "scale_front", "disable_nl", "scale_type", "scale",
        "proj_type", "maximize",
    )  # fmt: skip
    new, state = apollo(weight.flatten(1), grad, state, asked.step, basis=basis, **options)
    values = {"weight": new.view(weight.shape), "exp_avg": state["m"], "exp_avg_sq": state["v"]}

    sign = -1 if group["maximize"] else 1
    adamw_options = asked.options(*_ADAMW_OPTIONS) | {"lr": 1.0}

    def direction(grad: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        moments = _moments(asked, shape)
        found, after = adamw(torch.zeros_like(grad), grad, moments, asked.step, **adamw_options)
        return found, {"exp_avg": after["m"], "exp_avg_sq": after["v"]}

    def norm(tensor: Tensor) -> Tensor:
        return tensor.square().sum(dim or (0, 1) if dim is None else dim, keepdim=True).sqrt()

    update, _ = direction(sign * low.value)
    others = [direction(sign * each) for each in low.nearby(asked.seed)]
    of_update = norm(_farthest(update, [each for each, _ in others])) / norm(update)
    of_low = norm(low.error) / norm(low.value).clamp(min=1e-300)
    # Relative errors of the factors, of which the limit of the norm has one for all.
    relative = (of_update + 2 * of_low + 4 * low.unit).nan_to_num(0.0, torch.inf)
    scaled = grad * norm(update) / (norm(low.value) + 1e-8)
    whole = (scaled * relative).norm() / scaled.norm()
    of_all = (relative + whole.nan_to_num(torch.inf)).expand_as(grad)
    move = (weight.flatten(1) * (1 - group["lr"] * group["weight_decay"]) - new).abs()
    errors = {"weight": (of_all * move).nan_to_num(0.0, torch.inf).view(weight.shape)}
    for name in ("exp_avg", "exp_avg_sq"):
        errors[name] = _farthest(values[name], [after[name] for _, after in others])
    if not group["disable_nl"]:
        values["scaled_grad"] = state["norm"]
        errors["scaled_grad"] = (state["norm"] * whole).nan_to_num(torch.inf)
    return Stepped(values, errors)


def _random_basis(asked: Asked, shape: torch.Size) -> dict[str, Tensor]:
    """Normal numbers that follow from the seed, the draw, the group and the weight's place."""
    group = asked.group
    (side,) = _sides(group, *shape)
    rank = group["rank"]
    key = _mixed(group["seed"])
    index, place, _ = asked.place
    for number in ((int(asked.step) - 1) // group["update_proj_gap"], (index << 32) + place):
        key = _mixed((key + number) & _64_BITS)
    generator = torch.Generator().manual_seed(key % 2**63)
    dtype = torch.float64 if asked.dtype is torch.float64 else torch.float32
    size = (shape[0], rank) if side == LEFT else (rank, shape[1])
    numbers = torch.randn(size, generator=generator, dtype=dtype)
    return {side: (numbers / math.sqrt(rank)).double()}


_64_BITS = 2**64 - 1


def _mixed(x: int) -> int:
    """SplitMix64."""
    x = (x + 0x9E3779B97F4A7C15) & _64_BITS
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _64_BITS
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _64_BITS
    return x ^ (x >> 31)
