"""Options and states of other optimizers that a class knows nothing of."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Iterable, Mapping, Set
from typing import Any

import torch
from torch import Tensor

from fusedstep._api.foreign import FOREIGN, in_our_words, look_alike_of, maker_of
from fusedstep._api.registry import classes
from fusedstep._options.cached import cached
from fusedstep._state.codes import absmax_of, is_codes
from fusedstep._state.storage import BESIDE
from fusedstep._step.owner import Owner

#: Keys of every group, and notes that schedulers and trainers leave there. No step reads the notes.
_NOTES = frozenset(
    {"params", "param_names", "step", "base_lr", "base_momentum", "initial_lr", "layer_id"}
    | {"lr_mult", "lr_scale", "max_lr", "max_momentum", "min_lr", "swa_lr"}
)


@cached
def options_of(cls: type[Owner]) -> frozenset[str]:
    """The names of the options that groups of a class have."""
    named = inspect.signature(cls).parameters.keys() - {"params", cls._preset}
    return frozenset(named | cls._later_options.keys())


def is_dictionary_of(optimizer: Owner, saved: Mapping[str, Any]) -> bool:
    """Returns whether a group has all options of a class: what else is there is the user's own."""
    return optimizer.defaults.keys() - optimizer._own_options.keys() <= saved.keys()


def unknown_options(
    cls: type[Owner], group: Mapping[str, Any], notes: Set[str] = frozenset()
) -> list[str]:
    """The options of a group that may ask for another formula than the one of a class.

    ``notes``: names that are known to be the user's own.
    """
    known = options_of(cls) | cls._own_options.keys() | FOREIGN.keys() | _moot() | _NOTES | notes
    return [
        f"{name}={value!r:.40}"
        for name, value in group.items()
        if name not in known and not _says_nothing(value) and not _is_default(name, value)
    ]


def check_keys(cls: type[Owner], keys: Iterable[Any]) -> None:
    """Raises a key of a group that is an option with a typo; all others are the user's own."""
    own = options_of(cls) | cls._own_options.keys()
    known = own | _NOTES | FOREIGN.keys() | _of_any_class()
    for key in keys:
        if isinstance(key, str) and key not in known and (near := _misspelt(key, own)):
            raise ValueError(
                f"{key!r} of a group is no option of {cls.__name__}: did you mean {near!r}? "
                "A key of your own needs a name that is less like an option's"
            )


def _misspelt(key: str, options: Set[str]) -> str | None:
    """The option that a key is meant to be; None if the key is another word, or extends one."""
    plain = key.lower().replace("-", "_")
    for option in options:
        if sorted(plain) == sorted(option):  # letters that have changed places
            return option
    for option in difflib.get_close_matches(plain, sorted(options), cutoff=0.8):
        if option not in plain or len(plain) <= len(option) + 1:
            return option
    return None


@cached
def _moot() -> frozenset[str]:
    """The options of all classes that ask no class without them for another formula."""
    kinds = [kinds for cls in classes for kinds in cls._option_kinds.items()]
    return frozenset(name for name, kind in kinds if kind.moot_elsewhere)


@cached
def _of_any_class() -> frozenset[str]:
    """The options of all classes: groups that are meant for one may be another's."""
    return frozenset().union(*map(options_of, classes))


def check_foreign_options(cls: type[Owner], group: Mapping[str, Any], advice: str) -> None:
    """Raises those options of other libraries that ask a class for another formula."""
    for name in group.keys() & (FOREIGN.keys() - options_of(cls)):
        value = group[name]
        decays = bool(group.get("weight_decay", True))
        if in_our_words(name, value, cls.__name__, options_of(cls), decays) != {}:
            raise ValueError(
                f"{name}={value!r:.40} has no counterpart of this name in {cls.__name__}{advice}"
            )


def check_look_alike(cls: type[Owner], group: Mapping[str, Any]) -> None:
    """Raises a group that may have another formula with the options and states of a class.

    Call it last: all that has a name of its own makes a better error.
    """
    ours = next(each.__name__ for each in cls.__mro__ if each in classes)
    if library := look_alike_of(group, ours):
        raise ValueError(
            f"the dictionary is one of {library}, of an optimizer whose formula {ours} has not"
        )


def check_unknown(
    cls: type[Owner], group: Mapping[str, Any], advice: str, notes: Set[str] = frozenset()
) -> None:
    """Raises the options of a group that a class does not know.

    ``notes``: names that are known to be the user's own.
    """
    if unknown := unknown_options(cls, group, notes):
        have = "has" if len(unknown) == 1 else "have"
        raise ValueError(
            f"{', '.join(unknown)} {have} no counterpart in {cls.__name__}{maker_of(group)}{advice}"
        )


def unknown_states(
    optimizer: Owner, group: dict[str, Any], weight: Tensor, state: Mapping[Any, Any]
) -> list[Any]:
    """The names in the state of a weight that a class does not keep."""
    kinds = optimizer._state_kinds.items()
    kept = {name for name, kind in kinds if kind.may_be(group, weight.shape)}
    kept |= {absmax_of(name) for name in kept if is_codes(state.get(name))}
    kept |= {"step", *optimizer._numbers, *BESIDE.values(), *optimizer._foreign_states}
    return [name for name in state if name not in kept]


def check_states_known(
    optimizer: Owner,
    name: str,
    group: dict[str, Any],
    weight: Tensor,
    state: Mapping[Any, Any],
    advice: str = "",
) -> None:
    """Raises the names in the state of a weight that a class does not keep."""
    unknown = [
        key for key in unknown_states(optimizer, group, weight, state) if state[key] is not None
    ]
    if unknown:
        own = type(optimizer).__name__
        likely = looks_like([cls for cls in classes if is_state_of(cls, state)])
        raise ValueError(
            f"the state of {name} has {', '.join(map(str, unknown))}, which {own} does not keep"
            f"{maker_of(state) or (likely and f': it is not one of {own}{likely}')}{advice}"
        )


def is_state_of(cls: type[Owner], state: Mapping[Any, Any]) -> bool:
    """Returns whether a state of a weight has the names of a class, and no other ones."""
    if cls._composite:  # whose groups may have the states of Adam
        return False
    kinds = cls._state_kinds.items()
    needed = {name for name, kind in kinds if kind.is_needed(cls._later_options)} - {"step"}
    absmax = {absmax_of(name) for name, value in state.items() if is_codes(value)}
    names = state.keys() - {"step", *BESIDE.values()} - absmax
    return bool(names) and needed <= names <= {*needed, *cls._states}


def looks_like(likely: list[type[Owner]]) -> str:
    names = " or ".join(cls.__name__ for cls in likely)
    return f", but looks like one of {names}" if names else ""


def _says_nothing(value: Any) -> bool:
    """Returns whether a value is none of an option that changes a number."""
    if isinstance(value, (list, tuple)):
        return all(map(_says_nothing, value))
    if isinstance(value, Tensor):
        return value.numel() == 1 and not value.is_meta and not value.any()
    return not (isinstance(value, torch.dtype) or (isinstance(value, (int, float)) and value))


def _is_default(name: str, value: Any) -> bool:
    """Returns whether a class here has an option, and this value of it unless it is set."""
    if isinstance(value, Tensor):
        value = value.tolist()
    return (tuple(value) if isinstance(value, list) else value) in _defaults(name)


@cached
def _defaults(name: str) -> tuple[Any, ...]:
    parameters = [inspect.signature(cls).parameters.get(name) for cls in classes]
    later = [cls._later_options[name] for cls in classes if name in cls._later_options]
    return *(each.default for each in parameters if each), *later
