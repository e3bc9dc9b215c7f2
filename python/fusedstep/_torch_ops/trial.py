"""Tells options with which torch operations may stop half way, and makes what tries them.

Torch refuses a number that the dtype of an operation does not have, where it comes to that
operation: an ``lr`` of 1e300 when moments of float32 have been written. Python stops at a division
by zero. A step with options far from usual ones is first taken by weights of a few elements.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from fusedstep._sharding.dtensor import local
from fusedstep._state.checks import is_number

#: The largest number that is usual. A step multiplies two, and divides some by 1 - beta, which is
#: at least 2**-53: the result is a number of float32.
_MOST = 1e9

#: The same for float16, with the least 1 - beta.
_MOST_OF_HALF, _LEAST_OF_HALF = 1.0, 1e-4

#: Options that may be negative.
_ANY_SIGN = frozenset({"beta2_decay", "dampening", "ns_coefficients", "t0"})

#: What a group has beside its options, and an option that is not a number to compute with.
_NO_OPTIONS = frozenset({"params", "param_names", "seed"})

_NO_NUMBERS = (bool, str, type(None), torch.dtype)

#: Whole numbers of something, which no operation on a tensor takes.
_COUNTS = frozenset({"ns_steps", "rank", "split_heads", "update_proj_gap"})

#: Options that are no factors, and may be infinite.
_LIMITS = frozenset({"max_grad_norm", "max_ratio", "max_weight_norm"})


def is_usual(group: dict[str, Any], half: bool) -> bool:
    """Returns whether no operation of a step can refuse a number that follows from the options.

    ``half``: whether some are of float16. Options on a device count as usual: to look at them would
    wait for it.
    """
    most = _MOST_OF_HALF if half else _MOST
    for name, value in group.items():
        kind = type(value)
        if (kind is float and 0 <= value <= most) or kind in _NO_NUMBERS or name in _LIMITS:
            continue
        if kind is int and name in _COUNTS:
            continue
        if name == "betas" and kind is tuple:
            if not all(_is_usual_beta(each, half) for each in value):
                return False
        elif name not in _NO_OPTIONS:
            least = -most if name in _ANY_SIGN else 0
            values = value if kind in (list, tuple) else (value,)
            if not all(least <= _as_number(each) <= most for each in values):
                return False
    alpha = group.get("alpha", 0)  # of ASGD it is a power
    return 0 <= _as_number(alpha) <= 1


def _is_usual_beta(beta: Any, half: bool) -> bool:
    return 0 <= _as_number(beta) < 1 and not (half and 1 - beta < _LEAST_OF_HALF)


def _as_number(value: Any) -> float:
    """An option as a number; zero if it is none, which is for the step to say."""
    if type(value) is float:
        return value
    if not is_number(value) or (isinstance(value, Tensor) and not _is_here(value)):
        return 0
    try:
        # Torch warns where a number of a graph is taken out of it.
        return float(value.detach() if isinstance(value, Tensor) else value)
    except OverflowError:  # an int
        return math.inf
    except (RuntimeError, TypeError, ValueError):
        return 0


def _is_here(number: Tensor) -> bool:
    return number.is_cpu and number.numel() == 1


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
