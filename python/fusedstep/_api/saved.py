"""Checks of saved states and options, made before anything of them is loaded."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensor

from fusedstep._api.registry import classes
from fusedstep._api.unknown import (
    check_foreign_options,
    check_look_alike,
    check_states_known,
    check_unknown,
    is_dictionary_of,
    is_state_of,
    looks_like,
    options_of,
)
from fusedstep._options.kinds import always_saved, make_plain
from fusedstep._sharding.dtensor import local
from fusedstep._state.checks import is_whole, name_of
from fusedstep._state.codes import (
    absmax_of,
    can_be_coded,
    cast_codes,
    check_codes,
    is_codes,
    of_shape,
)
from fusedstep._state.kinds import numbers_of, shapes_of
from fusedstep._state.storage import BESIDE, LOW, asked_way
from fusedstep._step.kernels import wants_native
from fusedstep._step.owner import Owner

#: What to do about an option that a class does not know.
REMOVE = "; to go on without it, remove it from the parameter group"

_IMPORT = ". fusedstep.import_state_dict loads dictionaries of other optimizers"


def check_is_dictionary(state_dict: Any) -> None:
    """Raises if this is no optimizer's dictionary; the text names a key that holds one."""
    check_is_no_checkpoint(state_dict)
    if not isinstance(state_dict, Mapping):
        raise TypeError(
            f"state_dict must be the dictionary of an optimizer, not {torch.typename(state_dict)}"
        )
    if not state_dict.keys() >= _KEYS:
        raise _no_dictionary(state_dict)


def own_of(state_dict: Any) -> Any:
    """The dictionary of this package inside of one in another library's form; else the given."""
    has_own = isinstance(state_dict, Mapping) and state_dict.keys() >= {OWN, *_KEYS}
    return state_dict[OWN] if has_own else state_dict


def check_is_no_checkpoint(state_dict: Any) -> None:
    """Raises for a checkpoint that has dictionaries of optimizers inside."""
    paths = _dictionaries_in(state_dict)
    if paths and "" not in paths:
        raise _no_dictionary(state_dict, " or ".join(f"state_dict{path}" for path in paths))


def _no_dictionary(state_dict: Iterable[Any], inside: str = "") -> ValueError:
    names = [repr(name) for name in state_dict] if isinstance(state_dict, Mapping) else ["a list"]
    shown = ", ".join(names[:8]) + (", …" if len(names) > 8 else "")
    return ValueError(
        "state_dict must have 'state' and 'param_groups', as the optimizer's own dictionary has; "
        f"this one has [{shown}]{inside and f': pass {inside}'}"
    )


#: The key of this package's dictionary inside of one in another library's form.
OWN = "fusedstep"

#: The keys of an optimizer's dictionary.
_KEYS = frozenset({"state", "param_groups"})


def _dictionaries_in(parent: Any, depth: int = 3) -> list[str]:
    """The ways to dictionaries of optimizers in a checkpoint, as one writes them in Python."""
    members: Iterable[tuple[Any, Any]] = ()
    if isinstance(parent, Mapping):
        if parent.keys() >= _KEYS:
            return [""]
        members = parent.items()
    elif isinstance(parent, (list, tuple)):
        members = enumerate(parent)
    return [
        f"[{key!r}]{path}"
        for key, each in (members if depth else ())
        for path in _dictionaries_in(each, depth - 1)
    ]


def with_options_of_empty_groups(optimizer: Owner, dictionary: dict[str, Any]) -> dict[str, Any]:
    """The dictionary with all options of groups without weights.

    torch's distributed checkpoints leave these options out: the optimizer keeps its own.
    """
    saved, own = dictionary.get("param_groups", ()), optimizer.param_groups
    if len(saved) != len(own) or all(group["params"] for group in saved):
        return dictionary
    groups = [
        new if new["params"] or old["params"] else old | new
        for new, old in zip(saved, own, strict=True)
    ]
    return {**dictionary, "param_groups": groups}


def check_dictionary(optimizer: Owner, dictionary: Mapping[str, Any]) -> None:
    """Raises what keeps a dictionary from being loaded, but for what torch checks itself."""
    saved_groups, states = dictionary.get("param_groups", ()), dictionary.get("state", {})
    groups = optimizer.param_groups
    sizes = [[len(g["params"]) for g in each] for each in (saved_groups, groups)]
    if sizes[0] != sizes[1] or not isinstance(states, Mapping):
        return
    _check_keys(optimizer, states, saved_groups)
    for index, (group, saved) in enumerate(zip(groups, saved_groups, strict=True)):
        members = [states.get(key, {}) for key in saved["params"]]
        _check_kind(optimizer, index, saved, members)
        is_own = is_dictionary_of(optimizer, saved)
        check_foreign_options(type(optimizer), saved, _IMPORT)
        if not is_own:
            check_unknown(type(optimizer), saved, REMOVE, notes=group.keys())
        check_saved_options(optimizer, index, saved)
        count = saved.get("step") if optimizer._counts_in_groups else None
        if count is not None:
            check_count_of_steps(f"group {index}", count)
        options = {**optimizer.defaults, **optimizer._later_options, **saved}
        for place, key in enumerate(saved["params"]):
            state = states.get(key, {})
            if count is not None and isinstance(state, Mapping) and state:
                state = {"step": count, **state}
            check_state(optimizer, options, group, (index, place), state)
            if not is_own:
                name, weight = name_of(group, index, place), group["params"][place]
                check_states_known(optimizer, name, options, weight, state, _IMPORT)
        check_look_alike(type(optimizer), saved)


def _check_keys(optimizer: Owner, states: Mapping[Any, Any], groups: list[dict[str, Any]]) -> None:
    """Raises if a state belongs to no parameter; entries of other kinds are the user's own."""
    names = {"step", *optimizer._numbers, *optimizer._states}
    of_weights = {
        key: state
        for key, state in states.items()
        if isinstance(state, Mapping) and state.keys() & names
    }
    if unknown := strays(of_weights, [group["params"] for group in groups]):
        raise ValueError(
            f"the dictionary has states of {unknown}, which 'params' of no group has{_IMPORT}, and "
            "those whose keys went through JSON"
        )


def strays(states: Mapping[Any, Any], keys: Iterable[Iterable[Any]]) -> str:
    """The names of those states that no group has a key for, or no text."""
    unknown = [f"{key!r:.60}" for key in states.keys() - set(chain.from_iterable(keys))]
    return ", ".join(sorted(unknown)[:5]) + (", …" if len(unknown) > 5 else "")


def check_saved_options(optimizer: Owner, index: int, saved: dict[str, Any]) -> None:
    saved = dict(saved)
    make_plain(optimizer._option_kinds, saved, sequences=False)
    try:
        optimizer._check_kinds(saved)
        weights = optimizer.param_groups[index]["params"]
        optimizer._check_group(index, optimizer.defaults | saved | {"params": weights})
    except (TypeError, ValueError) as error:
        raise type(error)(f"group {index} of the dictionary: {error}") from None
    options = optimizer.defaults | optimizer._later_options | saved
    wants_native(optimizer, options)  # raises options that exclude each other


def check_state(
    optimizer: Owner,
    options: dict[str, Any],
    group: dict[str, Any],
    where: tuple[int, int],
    state: Any,
) -> None:
    """Raises what is missing from the state of a weight, or cannot be part of it.

    `options`: those to come. `where`: the index of its group, and its place there.
    """
    index, place = where
    weight, name = group["params"][place], name_of(group, index, place)
    kinds = optimizer._state_kinds
    check_is_state(name, state)
    if not state:
        return
    check_names(optimizer, name, state, options, weight, advice=_IMPORT)
    for number in () if weight.is_meta else numbers_of(kinds, options, weight.shape):
        check_count_of_steps(name, state[number], number)
    shapes, needed = shapes_of(kinds, options, weight.shape), _needed(optimizer, options, weight)
    if asked_way(options) == "stochastic" and "step" in state:
        check_count_of_steps(name, state["step"])
    for key in dict.fromkeys((*shapes, *needed, *BESIDE.values())):
        if key in needed or state.get(key) is not None:
            shape, absmax = shapes.get(key), state.get(absmax_of(key))
            check_tensor(f"{key} of {name}", state[key], weight, absmax, shape)
            if absmax_of(key) in state and not is_codes(state[key]):
                raise ValueError(
                    f"{key} of {name} has an absmax, but is in numbers: torch's class has made "
                    "them of codes, which fusedstep.import_state_dict reads"
                )
            if key in kinds and kinds[key].is_whole and not weight.is_meta:
                _check_whole(f"{key} of {name}", state[key])
            if shape is None and key not in BESIDE.values():
                _check_not_cast(f"{key} of {name}", state[key], weight)
        if key == LOW and state.get(key) is not None and state[key].dtype is not torch.int16:
            raise ValueError(f"{key} of {name} must be int16, not {state[key].dtype}")


def check_names(
    optimizer: Owner,
    name: str,
    state: Mapping[str, Any],
    options: dict[str, Any],
    weight: Tensor,
    advice: str = "",
) -> None:
    """Raises if the state of a weight lacks what it has whatever other options are."""
    numbers = numbers_of(optimizer._state_kinds, options, weight.shape)
    needed = {*numbers, *_needed(optimizer, options, weight)}
    if missing := sorted(needed - state.keys()):
        likely = [cls for cls in classes if is_state_of(cls, state)]
        raise ValueError(
            f"the state of {name} has no {', '.join(missing)}: it is not one of "
            f"{type(optimizer).__name__}{looks_like(likely)}{advice}"
        )


def _needed(optimizer: Owner, options: dict[str, Any], weight: Tensor) -> list[str]:
    """The tensors that no dictionary lacks."""
    kinds, later = optimizer._state_kinds, optimizer._later_options
    shapes = shapes_of(kinds, options, weight.shape)
    if any(shape is not None for shape in shapes.values()):
        return [name for name in shapes if not kinds[name].is_later]
    tensors = [(name, kinds[name]) for name in optimizer._states]
    may_be = [(name, kind) for name, kind in tensors if kind.may_be(options, weight.shape)]
    return [name for name, kind in may_be if kind.is_lasting(options, later)]


def check_is_state(name: str, state: Any) -> None:
    if not isinstance(state, Mapping):
        raise ValueError(f"the state of {name} must be a dict, not {_kind(state)}")


def check_count_of_steps(name: str, count: Any, what: str = "step") -> None:
    """Raises if it does not say how many steps there were, or is no other number of a state."""
    is_tensor = isinstance(count, Tensor) and count.layout is torch.strided and not count.is_meta
    is_real = is_tensor and not count.is_complex() and count.dtype is not torch.bool
    if not (isinstance(count, (int, float)) or (is_real and count.numel() == 1)):
        kinds = "an int, a float or a tensor of one element"
        raise ValueError(f"{what} of {name} must be {kinds}, not {_kind(count)}")
    if isinstance(count, FakeTensor):
        return
    steps = float(count)
    if not (math.isfinite(steps) and steps >= 0):
        raise ValueError(f"{what} of {name} must be finite and at least 0, not {steps}")


def check_tensor(
    name: str,
    value: Any,
    weight: Tensor,
    absmax: Any = None,
    shape: torch.Size | None = None,
) -> None:
    """Raises unless it is a state of the weight: numbers, or codes with their ``absmax``.

    ``shape``: the state's, if it is not the weight's.
    """
    is_dense = isinstance(value, Tensor) and value.layout is torch.strided
    if not is_dense or (value.is_meta and not weight.is_meta):
        raise ValueError(f"{name} must be a dense tensor with values, not {_kind(value)}")
    if value.is_complex() and not weight.is_complex():
        raise ValueError(f"{name} is {value.dtype} but the weight is {weight.dtype}")
    if hasattr(value, "codes"):
        raise ValueError(
            f"{name} has the codes of another library; fusedstep.import_state_dict reads torchao's"
        )
    if is_codes(value):
        check_codes(name, value, absmax, of_shape(weight, shape))
    elif value.shape != (weight.shape if shape is None else shape):
        needs = "the weight has" if shape in (None, weight.shape) else "must have"
        shape = weight.shape if shape is None else shape
        raise ValueError(f"{name} has the shape {list(value.shape)}, but {needs} {list(shape)}")


def _check_whole(name: str, value: Tensor) -> None:
    """Raises for a state whose numbers are not whole."""
    if not (isinstance(value, FakeTensor) or is_whole(local(value))):
        raise ValueError(
            f"{name} must have whole numbers of at least 0, not {local(value).tolist()}"
        )


def _check_not_cast(name: str, value: Tensor, weight: Tensor) -> None:
    """Raises if numbers are codes of another optimizer's state, which DCP has cast."""
    if can_be_coded(weight) and not is_codes(value) and (kind := cast_codes(value)):
        raise ValueError(
            f"{name} has the codes of {kind} states as numbers, without their absmax: a "
            "distributed checkpoint of such states is loaded by an optimizer with "
            f"state_dtype={kind!r}"
        )


def _kind(value: Any) -> str:
    """Describes a value in an error."""
    if isinstance(value, (str, type(None))):
        return f"{value!r:.40}"
    if not isinstance(value, Tensor):
        return f"a {torch.typename(value)}"
    if value.layout is not torch.strided:
        return f"a tensor of layout {value.layout}"
    if value.is_complex() or value.dtype is torch.bool:
        return f"a tensor of {value.dtype}"
    return f"a tensor of the shape {list(value.shape)} on {value.device}"


# Which optimizer has saved it


def _check_kind(optimizer: Owner, index: int, saved: dict[str, Any], states: list[Any]) -> None:
    """Raises if the options of a saved group are those of an optimizer with another formula."""
    own = optimizer.defaults.keys() | options_of(type(optimizer)) | optimizer._own_options.keys()
    own -= {optimizer._preset}  # which a class finds out for a dictionary of another one
    name = type(optimizer).__name__
    likely = [
        cls
        for cls in classes
        if saved.keys() & (options_of(cls) - own) and not saved.keys() & (own - options_of(cls))
    ]
    shared = [len(saved.keys() & options_of(cls)) for cls in likely]
    likely = [cls for cls, count in zip(likely, shared, strict=True) if count == max(shared)]
    known = set().union(*(options_of(cls) - cls._own_options.keys() for cls in classes))
    stepped = [each for each in states if isinstance(each, Mapping) and each]
    exact = [
        cls
        for cls in classes
        if (options_of(cls) - cls._own_options.keys()) & known == saved.keys() & known
        and all(is_state_of(cls, each) for each in stepped)
    ]
    missing = sorted(
        optimizer.defaults.keys() & always_saved(optimizer._option_kinds) - saved.keys()
    )
    if exact and (likely or missing):
        likely = exact if saved.keys() & known != own & known else []
    if likely or missing:
        lacks = ", ".join(missing or sorted(own - options_of(likely[0])))
        has = f"no {lacks}" if lacks else ", ".join(sorted(saved.keys() & known - own))
        raise ValueError(
            f"group {index} of the dictionary has {has}: it is not one of "
            f"{name}{looks_like(likely)}. To go on from another optimizer all the same, "
            "call fusedstep.import_state_dict"
        )
