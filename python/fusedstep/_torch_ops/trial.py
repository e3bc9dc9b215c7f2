"""Makes a few stand-in elements, with which a step tries options that it could stop at half way.

Torch refuses a number that the dtype of an operation does not have, where it comes to that
operation: an ``lr`` of 1e300 when moments of float32 have been written. Python stops at a division
by zero. A step with options far from usual ones is first taken by weights of a few elements.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from fusedstep._sharding.dtensor import local


def made_stand_ins(
    pairs: Iterable[tuple[Tensor, Tensor]],
    side: int,
    states: dict[Tensor, dict[str, Any]],
) -> tuple[list[Tensor], dict[Tensor, dict[str, Tensor]]]:
    """Weights of few elements with gradients, and their states: one of each kind that there is.

    ``side``: the most that they have along a dimension. ``states``: the numbers of weights, and
    those states that have the weight's shape; others are made by the step.
    """
    kinds: dict[Any, Tensor] = {}
    for weight, grad in pairs:
        of_state = tuple(
            (name, local(value).dtype if value.dim() else value.item())
            for name, value in states.get(weight, {}).items()
        )
        sparse_dims = grad.sparse_dim() if grad.is_sparse else 0
        shape = tuple(min(size, side) for size in weight.shape)
        kind = weight.device, weight.dtype, shape, sparse_dims, of_state
        kinds.setdefault(kind, weight)
    weights, made = [], {}
    for (device, dtype, shape, sparse_dims, of_state), weight in kinds.items():
        stand_in = torch.ones(shape, dtype=dtype, device=device)
        stand_in.grad = torch.ones_like(stand_in)
        if sparse_dims:
            stand_in.grad = stand_in.grad.to_sparse(sparse_dims)
        weights.append(stand_in)
        made[stand_in] = {
            name: torch.zeros_like(stand_in, dtype=found)
            if isinstance(found, torch.dtype)
            else states[weight][name].clone()
            for name, found in of_state
        }
    return weights, made
