"""The attribute ``state`` of an optimizer, and whether code outside of the optimizer may hold it.

Code that has read it may exchange its entries, or move their memory, at any time. Every step then
looks for that and raises the versions of the states, until nobody holds them any more. Code of the
optimizer that lets nothing of the state out uses ``_state``. The store has the note of a read:
frameworks wrap an optimizer in an object of the same class, which shares the store.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections import defaultdict
from collections.abc import Callable
from itertools import chain
from types import SimpleNamespace
from typing import Any, Literal

import torch
from torch import Tensor

from fusedstep._step.owner import Owner
from fusedstep._step.plan import Plan, Snapshot


def get_state(optimizer: Owner) -> defaultdict[Tensor, dict[str, Any]]:
    optimizer._store.note_read()
    return optimizer._state


def set_state(optimizer: Owner, state: defaultdict[Tensor, dict[str, Any]]) -> None:
    is_first = "_state" not in vars(optimizer)
    optimizer._state = state
    optimizer._store = optimizer._new_store(state)
    if not is_first:  # torch's constructor sets the first one, and keeps it to itself
        optimizer._store.note_read()


def state_dict(optimizer: Owner, of_torch: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """``of_torch`` makes the dictionary."""
    was_read = optimizer._store.was_read
    dictionary = of_torch()
    # Without states it lets nothing out, unless hooks have had the optimizer.
    hooks = optimizer._optimizer_state_dict_pre_hooks, optimizer._optimizer_state_dict_post_hooks
    if not (optimizer._state or any(hooks)):
        optimizer._store.was_read = was_read
    return dictionary


def accessed_states(optimizer: Owner, weights: list[Tensor]) -> list[Tensor]:
    """The states of weights, if code outside may hold them: autograd may, too."""
    if not optimizer._store.was_read:
        return []
    values = chain.from_iterable(optimizer._state.get(p, {}).values() for p in weights)
    return [value for value in values if isinstance(value, Tensor) and not value.is_inference()]


def look_for_holders(optimizer: Owner) -> Literal[True]:
    """Counts steps since the state was read; now and then asks whether anybody holds it.

    For steps that repeat the last one: all states are then held by a plan, and nothing else.
    """
    store = optimizer._store
    if not store.is_look_due():
        return True
    store.was_read = False  # before counting: another thread's read makes it True
    if is_state_held(optimizer):
        store.was_read = True
    return True


def is_state_held(optimizer: Owner) -> bool:
    """Returns whether code outside holds states, if the last step can be repeated."""
    if optimizer._last_step is None:
        return False
    # The record of the last step has a list of the states, if they had been read by then.
    in_record = any(part.states for part in optimizer._last_step.parts)
    return not _is_held_as(optimizer._state, _holders_of_unread_states(), in_record)


def _is_held_as(
    state: dict[Tensor, dict[str, Any]],
    unread: tuple[tuple[int, int], tuple[int, ...]],
    in_record: bool,
) -> bool:
    """Compares the holders of all states with those of states that nobody has read."""
    (of_state, of_dictionary), (objects, *others) = unread
    of_value = (objects + in_record, *others)
    if sys.getrefcount(state) != of_state:
        return False
    for tensors in state.values():
        if sys.getrefcount(tensors) != of_dictionary:
            return False
        for value in tensors.values():
            if not isinstance(value, Tensor) or _holders(value) != of_value:
                return False
    return True


def _holders(value: Tensor) -> tuple[int, ...]:
    """Counts references to a tensor: as an object, in C++ (autograd's), and to its memory."""
    storage = value.untyped_storage()._cdata
    return (
        sys.getrefcount(value),
        weakref.getweakrefcount(value),
        value._use_count(),  # type: ignore[attr-defined]  # torch's stubs lack it
        torch._C._storage_Use_Count(storage),
    )


@functools.cache
def _holders_of_unread_states() -> tuple[tuple[int, int], tuple[int, ...]]:
    """Counts them where only an optimizer, a plan and a snapshot hold a state.

    Releases of Python and torch count differently: this asks the ones in use.
    """
    # Whatever the defaults of the process are.
    zeros = functools.partial(torch.zeros, dtype=torch.float32, device="cpu")
    weight, optimizer = zeros(1), SimpleNamespace()
    tensors = {"sum": zeros(1), "step": zeros(())}
    optimizer.state = optimizer.store = {weight: tensors}
    del tensors
    states = list(optimizer.state.values())
    slots = [state["sum"] for state in states]
    plan = Plan([weight], slots, states, ("sum",), ("step",), False, False)
    del slots, states
    snapshot = Snapshot(optimizer.state)
    found = _first_holders(optimizer.state)
    del plan, snapshot
    return found


def _first_holders(
    state: dict[Tensor, dict[str, Any]],
) -> tuple[tuple[int, int], tuple[int, ...]]:
    of_state = sys.getrefcount(state)
    for tensors in state.values():
        of_dictionary = sys.getrefcount(tensors)
        for value in tensors.values():
            return (of_state, of_dictionary), _holders(value)
    raise ValueError("there are no states")
