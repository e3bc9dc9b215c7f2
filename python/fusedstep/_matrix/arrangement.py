"""Which matrices of a group go through the products together: by dtype, device and shape.

An arrangement is made once, and lasts for as long as operands and options stay.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from fusedstep._matrix.chained import AT_ONCE, takes_batches_of, updates_dtype
from fusedstep._matrix.chosen import has_choice
from fusedstep._matrix.coefficients import coefficients_of
from fusedstep._matrix.muon_groups import (
    Part,
    form_of,
    is_split,
    ns_dtype_of,
    parts_of,
    starts_aol,
)
from fusedstep._matrix.native_batches import NativeBatches
from fusedstep._matrix.near_shapes import Shape, joined, newton_schulz_operations
from fusedstep._matrix.newton_schulz import fits_engine, takes_gram_form
from fusedstep._matrix.operands import operands_of
from fusedstep._matrix.together import BatchShare, Together
from fusedstep._sharding.dtensor import is_dtensor, local
from fusedstep._sharding.exchange import cut_of, is_gathered
from fusedstep._state.states import StateStore
from fusedstep._step.owner import Owner
from fusedstep._step.plan import same

#: Elements that go through the products together at most. More do not fill a device better, and
#: their copies would have to be kept: on a CPU they leave its caches as well.
_AT_ONCE = {"cpu": 1 << 22}
_AT_ONCE_ELSEWHERE = 1 << 25

#: The bytes of these, at most.
MOST_BYTES = 8 * _AT_ONCE["cpu"]

#: Elements that the native engine of a CPU takes together for each thread, at most: two threads are
#: slower where more leave their caches.
_AT_ONCE_OF_THREAD = 1 << 19

#: Operations that take as long as the calls of one more batch, which on a GPU the host is busy with
#: (0.25 ms on an H100). Shapes are joined where padding adds fewer.
_CALLS = {"cpu": 1 << 26}
_CALLS_ELSEWHERE = 1 << 35


_Key = TypeVar("_Key")


class Arrangement(NamedTuple):
    """The batches that a group is stepped in, for as long as its operands and options stay."""

    weights: list[Tensor]
    options: list[Any] | None
    """Those that have passed checks; None where a step has to look again."""
    native: list[NativeBatches]
    """Batches that the native engine steps together where dtypes and gradients allow it."""
    batches: list[Together]
    cut_alike: dict[Any, list[int]]
    """Places of weights whose matrices processes share, by how they are cut."""


def last_arrangement(
    optimizer: Owner, group: dict[str, Any], weights: list[Tensor]
) -> Arrangement | None:
    """The arrangement of the last step, if nothing has changed since but floats."""
    operands = optimizer._memory.get(weights[0])
    known: Arrangement | None = operands.derived if operands else None
    if known and known.options is _passed_options(optimizer, group):
        return known if same(weights, known.weights) else None
    return None


def _passed_options(optimizer: Owner, group: dict[str, Any]) -> list[Any] | None:
    """The options that have passed checks: another object if one has changed."""
    return optimizer._passed.get(id(group["params"]))


def arrange(optimizer: Owner, group: dict[str, Any], weights: list[Tensor]) -> Arrangement:
    """Arranges the weights of a group anew. The arrangement is kept if it can last."""
    store = optimizer._store
    alone: list[int] = []
    cut_alike: dict[Any, list[int]] = {}
    for place, p in enumerate(weights):
        if is_gathered(form_of(group, p), cut := cut_of(p)):
            key = cut, p.dtype, store.has_wide(group, p)
            if p.numel():
                cut_alike.setdefault(key, []).append(place)
        else:
            alone.append(place)
    batches = [
        _new_batch(optimizer, group, places, [weights[i] for i in places])
        for places in _batches(store, group, weights, alone)
    ]
    native, others = _in_chains(group, batches)
    options = _passed_options(optimizer, group)
    arranged = Arrangement(weights, options, native, others, cut_alike)
    if operands := optimizer._memory.get(weights[0]):
        operands.derived = arranged if options is not None and not cut_alike else None
    return arranged


def _in_chains(
    group: dict[str, Any], batches: list[Together]
) -> tuple[list[NativeBatches], list[Together]]:
    """Batches that the native engine may step together, by dtype and device, and all others."""
    alike: dict[Any, list[Together]] = {}
    others: list[Together] = []
    for batch in batches:
        key = batch.weights[0].device, batch.weights[0].dtype
        (alike.setdefault(key, []) if _may_chain(group, batch) else others).append(batch)
    native = []
    for (device, _), some in alike.items():
        sizes = {index: sum(map(Tensor.numel, each.weights)) for index, each in enumerate(some)}
        for indices in _in_lists(sizes, _most_together(device)):
            native.append(NativeBatches(group, [some[index] for index in indices]))
    return native, others


def _may_chain(group: dict[str, Any], batch: Together) -> bool:
    """Returns whether the native engine takes the matrices of a batch, in some dtypes."""
    first = batch.weights[0]
    return (
        bool(batch.moving)
        and takes_batches_of_group(group, first.device, first.dtype)
        and not group.get("normuon")
        and not batch.is_padded
        and (
            first.is_cpu
            or has_choice(group)  # the chosen rows have another shape than the weight
            or all(fits_engine(*share.shape[1:]) for share in batch.shares)
        )
    )


def _new_batch(
    optimizer: Owner, group: dict[str, Any], places: list[int], weights: list[Tensor]
) -> Together:
    shares: dict[Shape | None, list[tuple[int, Part]]] = {}
    for index, p in enumerate(weights):
        for part in parts_of(group, local(p)):
            # Whole weights of near shapes go through products together, with zeros.
            key = None if part.is_whole and not has_choice(group) else part.form[1:]
            shares.setdefault(key, []).append((index, part))
    moving = []
    if not any(_has_copies(optimizer._store, group, p) for p in weights):
        moving = operands_of(optimizer, group, weights, weights)  # gradients are not known yet
    made = list(map(BatchShare.made_of, shares.values()))
    shapes = [part.matrix_shape for share in made for _, part in share.parts]
    return Together(places, weights, made, shapes, moving)


def _has_copies(store: StateStore, group: dict[str, Any], weight: Tensor) -> bool:
    """Returns whether a step works on something else than the weight and its states."""
    return (
        is_dtensor(weight)
        or store.has_wide(group, weight)
        or store.kind_of(group, weight) is not None
    )


def _batches(
    store: StateStore, group: dict[str, Any], weights: list[Tensor], places: list[int]
) -> Iterable[list[int]]:
    """Places of weights that are stepped together: of one dtype, of one shape or near ones."""
    alike: dict[Any, dict[tuple[Shape, ...], list[int]]] = {}
    for place in places:
        p = weights[place]
        if (shard := local(p)).numel():
            kind = p.device, p.dtype, store.has_wide(group, p)
            shapes = tuple(part.form[1:] for part in parts_of(group, shard))
            alike.setdefault(kind, {}).setdefault(shapes, []).append(place)
    for (device, dtype, _), by_shape in alike.items():
        some = [weights[place] for places in by_shape.values() for place in places]
        has_copies = any(_has_copies(store, group, p) for p in some)
        is_chained = takes_batches_of_group(group, device, dtype) and not (
            device.type == "cpu" and has_copies
        )
        goes_together = is_chained or _takes_all_shapes(group, device)
        at_once = (_most_together if goes_together else most_at_once)(device)
        for some_shapes in _joined(group, device, weights, by_shape, is_chained):
            together = [place for shapes in some_shapes for place in by_shape[shapes]]
            first = local(weights[together[0]])
            # Joined shapes are no more than that.
            most = max(at_once // first.numel(), 1) if len(some_shapes) == 1 else len(together)
            yield from (together[i : i + most] for i in range(0, len(together), most))


def _joined(
    group: dict[str, Any],
    device: torch.device,
    weights: list[Tensor],
    by_shape: dict[tuple[Shape, ...], list[int]],
    is_chained: bool,
) -> list[list[tuple[Shape, ...]]]:
    """Shapes that go through products together, padded to the largest sides among them.

    ``is_chained``: whether the native engine takes shapes together as they are.
    """
    if _takes_all_shapes(group, device):
        sizes = {
            shapes: sum(local(weights[i]).numel() for i in places)
            for shapes, places in by_shape.items()
        }
        return _in_lists(sizes, _most_together(device))
    is_alone = len(by_shape) == 1 or group.get("normuon") or is_split(group)
    # Zeros may make a matrix tall that is not, and the AOL start scales the shorter side.
    if is_alone or is_chained or has_choice(group) or starts_aol(group):
        return [[shapes] for shapes in by_shape]
    steps = coefficients_of(group["ns_coefficients"], group["ns_steps"])
    dtype = ns_dtype_of(group, device)
    found = joined(
        {
            shape: sum(parts_of(group, local(weights[i]))[0].form[0] for i in places)
            for (shape,), places in by_shape.items()
        },
        most_at_once(device),
        _CALLS.get(device.type, _CALLS_ELSEWHERE),
        lambda shape: newton_schulz_operations(shape, len(steps)),
        lambda shape: takes_gram_form(shape, dtype, steps),
    )
    return [[(shape,) for shape in shapes] for shapes in found]


def _takes_all_shapes(group: dict[str, Any], device: torch.device) -> bool:
    """Returns whether weights of all shapes are stepped in one batch, without zeros.

    The products of chosen rows are small: a GPU would wait for the host, shape by shape.
    """
    return has_choice(group) and device.type != "cpu"


def _in_lists(sizes: dict[_Key, int], most: int) -> list[list[_Key]]:
    """Keys in lists of so many elements at most, or of one key; ``sizes``: the elements of each."""
    lists: list[list[_Key]] = []
    for key, size in sizes.items():
        if not lists or sum(sizes[each] for each in lists[-1]) + size > most:
            lists.append([])
        lists[-1].append(key)
    return lists


def takes_batches_of_group(group: dict[str, Any], device: torch.device, dtype: torch.dtype) -> bool:
    """Returns whether the native engine and passes step batches of these weights together.

    Cautious decay is in no pass that moves chosen rows, nor in the one of a CPU, which writes
    averages and weights in one call.
    """
    if group.get("cautious_decay") and (device.type == "cpu" or has_choice(group)):
        return False
    return takes_batches_of(device, dtype, group.get("ns_dtype"), ns_dtype_of(group, device))


def takes_native(group: dict[str, Any], weight: Tensor) -> bool:
    """Returns whether the native engine takes weights of a dtype by the options of a group.

    These and the instruction set may have changed since the batches were made.
    """
    takes_updates = updates_dtype(weight.dtype, group.get("ns_dtype")) is not None
    return takes_updates and takes_batches_of_group(group, weight.device, weight.dtype)


def _most_together(device: torch.device) -> int:
    """The most elements that the native engine takes together."""
    if device.type != "cpu":
        return AT_ONCE
    return min(most_at_once(device), torch.get_num_threads() * _AT_ONCE_OF_THREAD)


def most_at_once(device: torch.device) -> int:
    return _AT_ONCE.get(device.type, _AT_ONCE_ELSEWHERE)
