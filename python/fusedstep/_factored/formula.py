"""Adafactor's formula, of both variants, and the numbers and states of a step."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from fusedstep._factored.moments import moved_factor, rms
from fusedstep._factored.options import averages, is_torchs, option_of, reads_lr
from fusedstep._state.storage import has_master


def numbers_of(group: dict[str, Any], weight: Tensor, state: dict[str, Tensor]) -> dict[str, Any]:
    """Counts a step; returns its numbers, by the native operator's names for them."""
    state["step"] = state["step"] + 1
    return numbers_at(group, state["step"].item(), first_eps(group, weight))


def length_of(numbers: dict[str, Any], weight: Tensor) -> Tensor | float:
    """The size of a step, by the root mean square of the weight if that is asked for."""
    if not numbers["scaled"]:
        return numbers["step"]
    return numbers["step"] * rms(weight).clamp(min=numbers["least_scale"])


def factored_update(
    group: dict[str, Any],
    numbers: dict[str, Any],
    grad: Tensor,
    state: dict[str, Tensor],
    length: Tensor | float,
) -> Tensor:
    """Takes the moments of a gradient forward, and returns the update of this length."""
    rate, least = numbers["rate"], numbers["least_mean"]
    names = moment_names(group, grad.dim())
    squares = grad * grad + numbers["added"]
    factor = moved_factor(state, names, squares, rate, keepdim=is_torchs(group), least=least)
    update = grad * factor.clamp(max=numbers["most"])
    update = update * (length / (rms(update) / numbers["threshold"]).clamp(min=1))
    if averages(group):
        update = numbers["beta"] * state["exp_avg"] + (1 - numbers["beta"]) * update
        state["exp_avg"] = update
    return update


#: The states of torch's variant, and of transformers': moments of the rows of a matrix, of its
#: columns, and of the elements of a weight of less than two dimensions.
TORCHS = "row_var", "col_var", "variance"
TRANSFORMERS = "exp_avg_sq_row", "exp_avg_sq_col", "exp_avg_sq"


def moment_names(group: dict[str, Any], dims: int) -> tuple[str, ...]:
    """The names of the second moments of a gradient of so many dimensions."""
    names = TORCHS if is_torchs(group) else TRANSFORMERS
    return names[:2] if dims > 1 else names[2:]


def first_eps(group: dict[str, Any], weight: Tensor) -> float:
    """The first eps, which may follow from the dtype of the weight's value."""
    eps = group["eps"][0]
    if eps is not None:
        return float(eps)
    if not is_torchs(group):
        return 1e-30
    return torch.finfo(torch.float32 if has_master(group, weight) else weight.dtype).eps


def size_at(group: dict[str, Any], step: float) -> float:
    """The size of a step before it is scaled by the weight."""
    if not option_of(group, "relative_step"):
        return float(group["lr"])
    if option_of(group, "warmup_init"):
        bound = 1e-6 * step
    else:
        bound = float(group["lr"] if reads_lr(group) else option_of(group, "max_relative_step"))
    return min(bound, step**-0.5)


def numbers_at(group: dict[str, Any], step: float, eps: float) -> dict[str, Any]:
    """The numbers of a step by the native operator's names for them."""
    is_torch = is_torchs(group)
    return {
        "rate": step ** group["beta2_decay"],
        "added": 0.0 if is_torch else eps,
        "least_mean": eps if is_torch else 0.0,
        "most": 1 / eps if is_torch and eps else math.inf,
        "step": size_at(group, step),
        "scaled": bool(option_of(group, "scale_parameter")),
        "least_scale": group["eps"][1],
        "threshold": group["d"],
        "decay": group["weight_decay"] * (float(group["lr"]) if is_torch else 1),
        "decays_by_length": not is_torch,
        "beta": option_of(group, "beta1") or 0.0,
        "grad_factor": -1.0 if group["maximize"] else 1.0,
    }
