"""AdamW as transformers had it, which GaLore's and APOLLO's authors took over::

    m = beta1 * m + (1 - beta1) * g
    v = beta2 * v + (1 - beta2) * g**2
    w = w - lr * sqrt(1 - beta2**t) / (1 - beta1**t) * m / (sqrt(v) + eps)
    w = w - lr * weight_decay * w

It differs from torch's: eps is added before the bias of v is corrected, and the decay comes last.
The native rule of Adam has ``eps_before_bias``, ``correct_bias`` and ``decay_last`` for this.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor


def bias_correction(group: dict[str, Any], count: int) -> float:
    """The factor by which the biases of both moments are corrected at a step."""
    if not group["correct_bias"]:
        return 1.0
    beta1, beta2 = map(float, group["betas"])
    return math.sqrt(1 - beta2**count) / (1 - beta1**count)


def second_bias(group: dict[str, Any], count: int) -> float:
    """The factor by which the root of the second moment is too small at a step.

    It is 1 where no biases are corrected.
    """
    if not group["correct_bias"]:
        return 1.0
    return math.sqrt(1 - float(group["betas"][1]) ** count)


def direction(
    exp_avg: Tensor, exp_avg_sq: Tensor, grad: Tensor, betas: Sequence[float], eps: float
) -> Tensor:
    """Takes the moments forward, in place, and returns the direction of the step."""
    beta1, beta2 = betas
    exp_avg.mul_(beta1).add_(grad, alpha=1 - beta1)
    exp_avg_sq.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
    return exp_avg / exp_avg_sq.sqrt().add_(eps)


def advance(group: dict[str, Any], grad: Tensor, state: dict[str, Tensor]) -> tuple[Tensor, float]:
    """Counts a step; returns its direction and the length of it."""
    state["step"] += 1
    betas = tuple(map(float, group["betas"]))
    found = direction(state["exp_avg"], state["exp_avg_sq"], grad, betas, group["eps"])
    return found, float(group["lr"]) * bias_correction(group, int(state["step"]))


def move(group: dict[str, Any], weight: Tensor, direction: Tensor, length: float) -> Tensor:
    """Moves a weight against a direction in place, and decays it."""
    weight.add_(direction.view_as(weight), alpha=-length)
    return weight.mul_(1 - float(group["lr"]) * group["weight_decay"])
