"""Collects the gradients of a step, and scales or zeroes those that no native kernel writes."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from itertools import repeat
from operator import is_not
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from fusedstep._sharding.dtensor import local, spread_like, spread_of_sums
from fusedstep._state.forked import in_pieces
from fusedstep._step.factors import is_one


def with_gradients(params: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """The weights that have a gradient, with these."""
    grads = [p.grad for p in params]
    if all(map(is_not, grads, repeat(None))):
        return list(params), cast("list[Tensor]", grads)
    weights = [p for p, grad in zip(params, grads, strict=True) if grad is not None]
    return weights, [grad for grad in grads if grad is not None]


def by_place(
    weights: list[Tensor], grads: list[Tensor], kinds: Sequence[Hashable]
) -> Iterable[tuple[list[Tensor], list[Tensor]]]:
    """The same, by themselves those of a kind and device that are spread over processes alike."""
    places = [(p.device, spread_of_sums(p), kind) for p, kind in zip(weights, kinds, strict=True)]
    if len(set(places)) == 1:
        return [(weights, grads)]
    parts: dict[Any, tuple[list[Tensor], list[Tensor]]] = {place: ([], []) for place in places}
    for place, weight, grad in zip(places, weights, grads, strict=True):
        parts[place][0].append(weight)
        parts[place][1].append(grad)
    return parts.values()


def multiplied(grads: list[Tensor], factor: float | Tensor) -> list[Tensor]:
    """Products of gradients and a factor, in memory of their own.

    Shards are multiplied in one call: operations over lists of DTensors take the host long.
    """
    if torch.is_grad_enabled():  # a differentiable step, which autograd follows
        return list(torch._foreach_mul(grads, factor))
    shards = list(map(local, grads))
    if isinstance(factor, Tensor):
        dtypes = {shard.dtype for shard in shards}
        factor = factor.to(shards[0].device, dtypes.pop() if len(dtypes) == 1 else None)
    found = torch._foreach_mul(shards, factor)
    return [spread_like(grad, shard) for grad, shard in zip(grads, found, strict=True)]


def cut_off(grads: list[Tensor]) -> None:
    """Takes gradients out of graphs that they are part of, as ``zero_grad`` does."""
    for grad in grads:
        if grad.grad_fn is not None:
            grad.detach_()
        elif grad.requires_grad:
            grad.requires_grad_(False)


def treat_grads(pairs: list[tuple[Tensor, Tensor]], factor: float | Tensor) -> None:
    """Multiplies gradients, or zeroes them: in place, and memory that several share once."""
    if is_one(factor):
        return

    def treat(grad: Tensor) -> Tensor:
        if isinstance(factor, Tensor):
            return grad.mul_(factor.to(grad.device))
        return grad.zero_() if factor == 0 else grad.mul_(factor)

    treated = set()
    there: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for weight, grad in pairs:
        if grad._is_zerotensor():  # which nothing may write
            continue
        place = id(grad) if grad.is_sparse else local(grad).data_ptr() or id(grad)
        if not grad.is_sparse and torch._debug_has_internal_overlap(grad):
            weight.grad = in_pieces(treat, in_pieces(Tensor.copy_, torch.empty_like(grad), grad))
        elif place not in treated:
            treated.add(place)
            shard = local(grad)
            if type(shard) is Tensor and shard.is_cuda and shard.layout is torch.strided:
                there.setdefault((shard.device, shard.dtype), []).append(shard)
                if shard is not grad:
                    increment_version(grad)
            else:
                in_pieces(treat, grad)
    for (device, dtype), shards in there.items():  # a call for each one takes the host long
        if isinstance(factor, Tensor):
            torch._foreach_mul_(shards, factor.to(device, dtype))
        elif factor == 0:
            torch._foreach_zero_(shards)
        else:
            torch._foreach_mul_(shards, factor)
