"""Muon's step of one weight, in operations of torch out of place."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fusedstep._matrix.chosen import Chosen, has_choice
from fusedstep._matrix.coefficients import coefficients_of
from fusedstep._matrix.muon_groups import (
    beta2_of,
    keeps_range,
    norm_dtype,
    ns_dtype_of,
    parts_of,
    starts_aol,
    to_divisors,
)
from fusedstep._matrix.newton_schulz import LEAST_SUM
from fusedstep._matrix.step_options import Ratio


def formula(
    group: dict[str, Any], weight: Tensor, grad: Tensor, state: dict[str, Tensor], ratio: Ratio
) -> Tensor:
    """Returns the new weight, and leaves the new states in ``state``."""
    lr, momentum = float(group["lr"]), float(group["momentum"])
    if has_choice(group):
        average = state["momentum_buffer"] + grad
        update = average.clone()  # its chosen rows decay
    else:
        average = state["momentum_buffer"].lerp(grad, 1 - momentum)
        update = grad.lerp(average, momentum) if group["nesterov"] else average
    state["momentum_buffer"] = average

    parts = parts_of(group, weight)
    orthogonal = torch.empty_like(update, memory_format=torch.contiguous_format)
    if group.get("normuon"):
        state["second_momentum_buffer"] = state["second_momentum_buffer"].clone()
    for part in parts:
        matrices = part.of(update).reshape(part.form)
        chosen = Chosen.among(group, matrices) if has_choice(group) else None
        x = _iterated(group, chosen.take(matrices) if chosen else matrices)
        if group.get("normuon"):
            kept = part.of(state["second_momentum_buffer"])
            moments = kept.reshape(*part.form[:2], 1).clone()
            own = chosen.take(moments) if chosen else moments
            _normalize_rows(x, own, beta2_of(group))
            kept.copy_((chosen.put(moments, own) if chosen else own).view(kept.shape))
        if chosen:
            chosen.put(matrices, chosen.take(matrices) * momentum)
            part.of(average).copy_(matrices.view(part.shape))
            x = chosen.put(torch.zeros_like(matrices), x)
        part.of(orthogonal).copy_(x.view(part.shape))

    decay = lr * group["weight_decay"]
    if group.get("cautious_decay"):
        decay = decay * (orthogonal * weight >= 0).to(weight.dtype)
    for part in parts:
        part.of(orthogonal).mul_(lr * ratio(group, part.matrix_shape))
    return weight * (1 - decay) - orthogonal


def _iterated(group: dict[str, Any], update: Tensor) -> Tensor:
    """Iterates on updates [count, rows, columns], one by one; returns their dtype."""
    orthogonal = torch.empty_like(update, memory_format=torch.contiguous_format)
    steps = coefficients_of(group["ns_coefficients"], group["ns_steps"])
    is_tall = update.shape[1] > update.shape[2]
    with torch._C._DisableAutocast():  # it would round the products
        narrow = ns_dtype_of(group, update.device)
        for place, matrix in enumerate(update):
            x = matrix.to(narrow) if keeps_range(narrow) else matrix
            x = x.T if is_tall else x
            x = (x / to_divisors(group, x.norm(dtype=norm_dtype(x)))).to(narrow)
            if starts_aol(group):
                x = _almost_orthogonal(x)
            for a, b, c in steps:
                gram = x @ x.T
                x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
            orthogonal[place].copy_(x.T if is_tall else x)
    return orthogonal


def _almost_orthogonal(x: Tensor) -> Tensor:
    """The rows of a wide matrix of norm 1, scaled as the AOL start scales them."""
    side = len(x)
    gram = torch.mm(x * side, x.T).abs()  # in the range of float16
    sums = gram.sum(1, keepdim=True, dtype=torch.promote_types(x.dtype, torch.float32))
    return (x * (side / sums.clamp(min=LEAST_SUM)).sqrt()).to(x.dtype)


def _normalize_rows(x: Tensor, moments: Tensor, beta2: float) -> None:
    """Gives the rows of matrices [count, rows, columns] one size, as NorMuon does, in place.

    ``moments`` [count, rows, 1], running averages of the mean squares of rows, are taken forward.
    """
    mean = torch.mean if x.numel() else torch.sum  # none without elements
    means = mean(x.square(), -1, keepdim=True)
    averages = moments.lerp(means, 1 - beta2)
    moments.copy_(averages)
    norm = x.norm(dim=(1, 2), keepdim=True)
    x /= averages.sqrt() + 1e-10
    x *= norm / (x.norm(dim=(1, 2), keepdim=True) + 1e-10)
