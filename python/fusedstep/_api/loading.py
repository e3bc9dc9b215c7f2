"""Takes over states and options that were made elsewhere: saved, copied or unpickled."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import Any

import torch
from torch.optim import Optimizer

from fusedstep._api.registry import register
from fusedstep._api.saved import (
    check_dictionary,
    check_is_no_checkpoint,
    own_of,
    with_options_of_empty_groups,
)
from fusedstep._native import ops
from fusedstep._options.kinds import make_plain
from fusedstep._options.shared import fill_own
from fusedstep._step.kernels import wants_native, why_no_kernels
from fusedstep._step.owner import Owner


def load_state_dict(
    optimizer: Owner, state_dict: dict[str, Any], by_torch: Callable[[dict[str, Any]], None]
) -> None:
    """Loads a dictionary into an optimizer: all, or nothing. ``by_torch``: torch's method."""
    if (inner := _wrapped(optimizer)) is not None:
        inner.load_state_dict(state_dict)
        shared = vars(optimizer).keys() & vars(inner).keys()  # of wrappers that have copied them
        vars(optimizer).update({name: vars(inner)[name] for name in shared})
        return
    if "_stepping" in vars(optimizer):
        raise RuntimeError(ops.IS_STEPPED)
    for plan in (*optimizer._plans.values(), *optimizer._aside):
        ops.check_idle(plan.handle)
    # The last hook sees the dictionary as the user's hooks have left it, before torch casts it.
    optimizer._loading = {}

    def look(_: Optimizer, dictionary: dict[str, Any]) -> dict[str, Any]:
        dictionary = own_of(dictionary)
        check_is_no_checkpoint(dictionary)
        dictionary = _in_own_form(optimizer, dictionary)
        dictionary = with_options_of_empty_groups(optimizer, dictionary)
        check_dictionary(optimizer, dictionary)
        optimizer._loading.update(dictionary)
        return dictionary

    hook = optimizer.register_load_state_dict_pre_hook(look)
    try:
        by_torch(state_dict)
    except RuntimeError as error:
        ops.raise_memory_error(error)
        raise
    finally:
        hook.remove()
        del optimizer._loading
    # torch has made the dictionary of states: without any, nobody but a hook can have it.
    if not (optimizer._state or optimizer._optimizer_load_state_dict_post_hooks):
        optimizer._store.was_read = False


def _wrapped(optimizer: Owner) -> Owner | None:
    """The optimizer inside of a wrapper that took its class; None if this is no such wrapper.

    torch's method would load into the wrapper alone, whose states nobody steps.
    """
    store = getattr(optimizer, "_store", None)
    inside = [value for value in vars(optimizer).values() if isinstance(value, Owner)]
    return next((each for each in inside if each._store is store), None)


def _in_own_form(optimizer: Owner, dictionary: dict[str, Any]) -> dict[str, Any]:
    """A dictionary by this class's names, without states that no step reads."""
    if not dictionary.keys() >= {"param_groups", "state"}:
        return dictionary  # torch has an error for that
    groups = [optimizer._in_own_words(group, {}) for group in dictionary["param_groups"]]
    states = {
        key: {name: value for name, value in state.items() if name not in optimizer._unread_states}
        if isinstance(state, dict)
        else state
        for key, state in dictionary["state"].items()
    }
    return {**dictionary, "param_groups": groups, "state": states}


def set_state_of_copy(
    optimizer: Owner, state: dict[str, Any], by_torch: Callable[[dict[str, Any]], None]
) -> None:
    """Takes over what was copied, unpickled or loaded: all, or nothing."""
    before = {k: v for k, v in vars(optimizer).items() if k in ("_state", "_store", "_groups")}
    try:
        _take_over(optimizer, state, by_torch)
    except BaseException:  # memory that ran out, for one
        vars(optimizer).update(before)
        optimizer._forget_plans()
        raise


@torch.inference_mode(False)  # as where a step makes states
def _take_over(
    optimizer: Owner, state: dict[str, Any], by_torch: Callable[[dict[str, Any]], None]
) -> None:
    is_loading = "_loading" in vars(optimizer)
    names = [set(group) for group in vars(optimizer).get("_groups", ())]
    by_torch(state)
    if "param_groups" in vars(optimizer):
        optimizer.param_groups = vars(optimizer).pop("param_groups")
    if "state" in vars(optimizer):
        optimizer.state = vars(optimizer).pop("state")
        optimizer._store.note_read()
    if "_name" not in vars(optimizer):
        optimizer._name = register(optimizer)
    optimizer._forget_plans()
    loading = optimizer._loading if is_loading else {"param_groups": (), "state": {}}
    keys = chain.from_iterable(group["params"] for group in loading["param_groups"])
    for index, group in enumerate(optimizer.param_groups):
        for name, value in optimizer._later_options.items():
            group.setdefault(name, value)
        kept = names[index] if index < len(names) else group
        fill_own(group, optimizer.defaults, optimizer._own_options, kept)
        make_plain(optimizer._option_kinds, group)
        for p, key in zip(group["params"], keys, strict=False):
            optimizer._store.keep_wide(group, p, loading["state"].get(key, {}))
        optimizer._store.make_ordinary(group["params"])
        optimizer._store.tidy(group)
        weights = [p for p in group["params"] if optimizer._state.get(p)]
        for p in weights:
            optimizer._store.convert(group, [p])
        optimizer._store.create_later(group, weights, optimizer._groups)
        if wants_native(optimizer, group) and not why_no_kernels(optimizer, weights):
            optimizer._store.place(group, weights, from_dictionary=is_loading)
