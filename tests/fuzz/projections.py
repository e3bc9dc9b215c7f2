"""Expected results of a step through a projection: GaLore's and APOLLO's, as in `formulas`.

New bases of the library are checked by themselves, and then taken as they are.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fuzz import formulas, oracle
from fuzz.formulas import Asked, Stepped
from reference.adafactor import adafactor
from reference.apollo import apollo
from reference.galore import adamw
from reference.galore_adafactor import rms
from reference.low_rank_bases import side_of

LEFT, RIGHT = "projector_left", "projector_right"


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
        """Low-rank gradients within the error: all to one side, at random, and as near to zero.

        Vectors beyond the rank of the gradient have products of rounding alone, or of zero.
        Adafactor divides a row by its size, and clips by all rows: such a row counts fully or not.
        One product may be all of its row's size, so each is once the only one with an error; and of
        its column's, where the product of both is as near to zero as an exact one would be: so each
        is once the only one that is not.
        """
        generator = torch.Generator().manual_seed(seed)
        signs = [1, -1, *(formulas.noise(self.value, generator).sign() for _ in range(2))]
        found = [self.value + sign * self.error for sign in signs]
        nearest = self.value - self.value.clamp(-self.error, self.error)
        rows, columns = (torch.arange(size) % 16 for size in self.value.shape)
        for places in (rows[:, None], columns):
            for each in places.unique():
                others = (self.value, nearest)
                found += [torch.where(places == each, found[2], other) for other in others]
        return [*found, nearest]

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
    gap, svd = group["update_proj_gap"], group.get("svd", "exact")
    if svd != "exact":
        _kept(asked, "place", asked.place[:2])
    offset = 0
    if group.get("stagger"):
        index, number = _kept(asked, "turn", asked.place[1:])
        offset = index * gap // number
    due = count == 0 or (count + offset) % gap == 0
    doublings = asked.before.get("gap_doublings")
    if due and count and svd == "lazy":
        due = (count + offset) // gap % 2 ** int(doublings) == 0
    has_last = count and all(asked.before[side].any() for side in sides)
    due |= bool(count and not has_last)  # a basis of zeros is made anew
    bases = {side: asked.after[side].double() for side in sides}
    cosines = []
    for side, basis in bases.items():
        if asked.error is None:
            continue
        if not due:
            if not torch.equal(asked.before[side], asked.after[side]):
                raise oracle.WrongError(f"{side} has changed, but is not due")
            continue
        if not (grad.any() or basis.any()):
            continue  # it waits for a gradient that is not zero
        vectors = basis if side == LEFT else basis.T
        off = (vectors.T @ vectors - torch.eye(vectors.shape[1], dtype=torch.float64)).abs().max()
        if not off <= 1e-4:
            raise oracle.WrongError(f"{side} is not orthonormal: {off.item():.2g}")
        part = vectors.T @ grad if side == LEFT else grad @ vectors
        most = torch.linalg.svdvals(grad)[: group["rank"]].square().sum()
        # A random product finds most of what there is; one power step from an old basis may not.
        share = {"exact": 1 - 1e-4, "power": 0.0 if has_last else 0.5}.get(svd, 0.5)
        off = 2 * asked.error.norm()
        if not part.norm() >= (share * most).sqrt() - off:
            raise oracle.WrongError(
                f"{side} has {part.square().sum().item():.4g} of {most.item():.4g} of the gradient"
            )
        if has_last:
            old = asked.before[side].double()
            cosines.append((vectors.T @ (old if side == LEFT else old.T)).square().mean(1).sum())
            if svd == "power" and off == 0:
                _check_power_step(grad if side == LEFT else grad.T, old if side == LEFT else old.T,
                                  part.square().sum(), side)  # fmt: skip
    if svd == "lazy" and asked.error is not None:
        _check_doublings(asked, due, min(cosines, default=None))
    return bases


def _kept(asked: Asked, name: str, now: tuple[int, int]) -> tuple[int, int]:
    """The place of a weight when it got its states, which a state keeps."""
    expected = tuple(map(int, asked.before[name].tolist())) if name in asked.before else now
    if tuple(asked.after[name].tolist()) != expected:
        raise oracle.WrongError(f"{name} is {asked.after[name].tolist()} instead of {expected}")
    return expected


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
    if asked.unit:
        beta1, beta2 = asked.group["betas"]
        errors["exp_avg"] = formulas.of_product(asked, 1 - beta1, asked.grad)
        length = asked.group["lr"]
        if asked.group["correct_bias"]:
            length *= (1 - beta2**asked.step) ** 0.5 / (1 - beta1**asked.step)
        update, error = formulas.direction_of(asked)
        kept = 1 - asked.group["lr"] * asked.group["weight_decay"]
        error = kept * formulas.of_product(asked, length, update, error)
        errors["weight"] = (kept * (asked.weight - length * update) - new).abs() + error
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
        return formulas.of_adafactor(asked)
    bases = _checked_bases(asked)
    sign = -1 if group["maximize"] else 1
    low = _Low.of(replace(asked, grad=sign * asked.grad), bases)
    names = formulas.OF_TRANSFORMERS | {"moment": "exp_avg"}
    length = group["lr"]
    if group["relative_step"] is not False:
        bound = group["max_relative_step"] or 1e-2
        length = min(1e-6 * asked.step if group["warmup_init"] else bound, asked.step**-0.5)
    if group["scale_parameter"] is not False:
        length = length * max(group["eps"][1], rms(asked.weight).item())

    def step(grad: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        own = {k: asked.before[n].double() for k, n in names.items() if n in asked.before}
        move, states = adafactor(
            torch.zeros_like(grad), grad, own, asked.step, torchs=False, lr=length, scale=False,
            relative=False, **formulas.numbers_of_adafactor(asked, False),
        )  # fmt: skip
        return -group["scale"] * move, {names[key]: value for key, value in states.items()}

    found = _projected(asked, low, step, 1 - group["weight_decay"] * length, decays_last=False)
    found.values["weight"] = formulas.where_squares_are_finite(asked, found.values["weight"])
    return found


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
    """Normal numbers that follow from the seed, the draw, and the weight's first place."""
    group = asked.group
    (side,) = _sides(group, *shape)
    rank = group["rank"]
    key = _mixed(group["seed"])
    index, place = _kept(asked, "place", asked.place[:2])
    for number in ((int(asked.step) - 1) // group["update_proj_gap"], (index << 32) + place):
        key = _mixed((key + number) & _64_BITS)
    generator = torch.Generator().manual_seed(key % 2**63)
    dtype = torch.float64 if asked.dtype is torch.float64 else torch.float32
    size = (shape[0], rank) if side == LEFT else (rank, shape[1])
    numbers = torch.randn(size, generator=generator, dtype=torch.float32).to(dtype)
    return {side: (numbers / math.sqrt(rank)).double()}


_64_BITS = 2**64 - 1


def _mixed(x: int) -> int:
    """SplitMix64."""
    x = (x + 0x9E3779B97F4A7C15) & _64_BITS
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _64_BITS
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _64_BITS
    return x ^ (x >> 31)
