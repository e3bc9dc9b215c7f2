"""The twin of a native step: the same in operations of torch, for a weight at a time."""

from __future__ import annotations

import functools
from collections import defaultdict
from typing import Any

import torch
from torch import Tensor

from fusedstep._options.kinds import are_usual, numeric
from fusedstep._state.checks import check_capturable
from fusedstep._state.codes import is_codes
from fusedstep._state.counts import is_long, read_count, write_count
from fusedstep._state.storage import (
    MASTER,
    key_of_draws,
    places_of,
    put_value,
    seed_of,
    value_of,
    way_of,
)
from fusedstep._step.hooks import is_compiling
from fusedstep._step.owner import Owner
from fusedstep._step.strategy import strategy_of
from fusedstep._step.undo import is_out_of_memory, undone_on_error
from fusedstep._torch_ops.trial import made_stand_ins


def rehearse(
    optimizer: Owner, group: dict[str, Any], weights: list[Tensor], grads: list[Tensor]
) -> None:
    """Raises what a step in torch operations would stop at half way: an option of the group.

    Nothing is made or changed by this.
    """
    if group.get("differentiable") or group.get("capturable"):
        return
    half = any(p.dtype is torch.float16 for p in weights)
    if (
        are_usual(optimizer._option_kinds, group, half)
        or not optimizer._rehearses
        or torch._C._len_torch_dispatch_stack()
    ):
        return
    pairs = [pair for pair in zip(weights, grads, strict=True) if not pair[0].is_meta]
    kept = {weight: optimizer._store.plain_parts(group, weight) for weight, _ in pairs}
    # The sides of matrices have to be divided by the heads, and are no less than a rank.
    sides = [group.get(name) for name, kind in optimizer._option_kinds.items() if kind.fills_sides]
    sides = [sum(each) if isinstance(each, (list, tuple)) else each for each in sides]
    side = max([1, *(each for each in sides if isinstance(each, int))])
    stand_ins, state = made_stand_ins(pairs, side, kept)
    # Made as unpickling makes one: constructors of subclasses may take anything.
    other = type(optimizer).__new__(type(optimizer))
    other.__setstate__(
        {
            "defaults": dict(optimizer.defaults),  # to which torch adds
            "state": defaultdict(dict, state),
            "param_groups": [group | {"params": stand_ins}],
            "_rehearses": False,
        }
    )
    try:
        other._update_all(None, False)
    except (ArithmeticError, RuntimeError, TypeError, ValueError) as error:
        if is_out_of_memory(error):
            raise
        if str(error).startswith("Invalid options of"):
            return  # the step says so itself, with the number of the group
        text = f"Invalid options of a group, {numeric(optimizer._option_kinds, group)}: {error}"
        raise type(error)(text) from error


def imperative_steps(
    optimizer: Owner, group: dict[str, Any], weights: list[Tensor], grads: list[Tensor]
) -> None:
    for weight, grad in zip(weights, grads, strict=True):
        step = functools.partial(imperative_step, optimizer, group, weight, grad)
        optimizer._progress.take([weight], step)


def imperative_step(optimizer: Owner, group: dict[str, Any], weight: Tensor, grad: Tensor) -> None:
    """Steps a weight, or changes nothing if memory runs out."""
    kept = optimizer._store.with_count(group, weight)
    if _is_direct(optimizer, group, weight, grad, kept):
        count = _long_count(kept["step"])
        optimizer._imperative(group, weight, -grad if group.get("maximize") else grad, kept)
        if count is not None:
            write_count(kept["step"], count + 1)
    else:
        written = _written_early(optimizer, group, weight, grad, kept)
        with undone_on_error(written, _written_rows(optimizer, group, weight, grad)):
            state = optimizer._store.decoded(group, weight, kept)
            _step_on_numbers(optimizer, group, weight, grad, state)
            optimizer._store.encode(group, weight, kept, state)


def _is_direct(
    optimizer: Owner, group: dict[str, Any], weight: Tensor, grad: Tensor, kept: dict[str, Tensor]
) -> bool:
    """Returns whether the formula takes weight and states as they are, and needs no copies."""
    return (
        optimizer._allocates_first
        and weight.dtype in (torch.float32, torch.float64)
        and not (group.get("differentiable") or group.get("capturable") or grad.is_sparse)
        and not any(map(is_codes, kept.values()))
    )


def _written_early(
    optimizer: Owner, group: dict[str, Any], weight: Tensor, grad: Tensor, kept: dict[str, Tensor]
) -> list[Tensor]:
    """Returns what a step of a weight may have written before its last allocation."""
    if group.get("differentiable") or group.get("capturable"):
        return []  # it writes what it has computed, last
    early = strategy_of(optimizer).written_early(optimizer, group, weight, kept)
    if early is not None:
        return early
    store = optimizer._store
    is_plain = not (store.has_wide(group, weight) or store.kind_of(group, weight))
    if optimizer._allocates_first and is_plain and not grad.is_sparse:
        return []
    return [weight, *filter(torch.is_tensor, kept.values())]  # scripts keep other things there


def _written_rows(
    optimizer: Owner, group: dict[str, Any], weight: Tensor, grad: Tensor
) -> Tensor | None:
    """Rows that a step by a sparse gradient writes; None if it may write others."""
    if not grad.is_sparse or grad.sparse_dim() != 1:
        return None
    if optimizer._store.has_wide(group, weight) or optimizer._store.kind_of(group, weight):
        return None
    return grad._indices()[0].unique()


def _step_on_numbers(
    optimizer: Owner, group: dict[str, Any], weight: Tensor, grad: Tensor, state: dict[str, Tensor]
) -> None:
    group, state = strategy_of(optimizer).operands_of_formula(optimizer, group, weight, state)
    if group.get("maximize"):
        grad = -grad
    if weight.is_complex():  # and has no master copy
        group = group | {"master_weights": False, "rounding": None}
        state = {k: torch.view_as_real(v) if v.is_complex() else v for k, v in state.items()}
        weight, grad = torch.view_as_real(weight), torch.view_as_real(grad.resolve_conj())

    wide = widened(optimizer, group, weight, state)
    grad = grad.to(wide.dtype)
    count = None if seed_of(group, weight) is None else state["step"].clone()
    if not (group.get("differentiable") or group.get("capturable")):
        long = _long_count(state["step"])
        optimizer._imperative(group, wide, grad, state)
        if long is not None:
            write_count(state["step"], long + 1)
        elif count is not None:  # formulas without bias corrections leave it alone
            state["step"].copy_(count + 1)
        write_back(optimizer, group, weight, wide, state)
        return

    if group.get("differentiable") and state["step"].requires_grad:
        raise RuntimeError("`requires_grad` is not supported for `step` in differentiable mode")
    if group.get("capturable"):
        check_capturable(weight, state["step"], group)
    # Autograd keeps what the update reads: it reads copies, for the originals are overwritten.
    copies = {name: tensor.clone() for name, tensor in state.items() if name != MASTER}
    new = optimizer._formula(group, wide.clone(), grad, copies)
    for name, tensor in copies.items():
        state[name].copy_(tensor)
    if count is not None:
        state["step"].copy_(count + 1)
    write_back(optimizer, group, weight, new, state)


def widened(
    optimizer: Owner, group: dict[str, Any], weight: Tensor, state: dict[str, Tensor]
) -> Tensor:
    """Returns the tensor that is updated for a weight: itself or, in float32, its value."""
    if not optimizer._store.has_wide(group, weight):
        return weight
    way = way_of(group, weight)
    return weight.float() if way is None else value_of(way, weight, state)


def write_back(
    optimizer: Owner, group: dict[str, Any], weight: Tensor, wide: Tensor, state: dict[str, Tensor]
) -> None:
    if wide is weight:
        return
    way, seed = way_of(group, weight), seed_of(group, weight)
    if way is None:
        weight.copy_(wide)
    elif seed is None:
        put_value(way, weight, wide, state)
    else:
        (place,) = places_of(optimizer._groups, group, [weight])
        put_value(
            way, weight, wide, state, key_of_draws(seed, int(read_count(state["step"])), place)
        )


def _long_count(step: Tensor) -> float | None:
    """The value of a step count that formulas cannot raise by one; None for others."""
    return read_count(step) if not is_compiling() and is_long(step) else None
