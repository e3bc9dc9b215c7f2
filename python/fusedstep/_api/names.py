"""Optimizers by name."""

from __future__ import annotations

import sys

from fusedstep._api.base import FusedOptimizer
from fusedstep._state.checks import did_you_mean


def names() -> tuple[str, ...]:
    """Returns the names that :func:`create` knows, sorted: those of the classes in lower case.

    Low-bit classes are among them, such as ``"adamw8bit"``.

    >>> "lamb" in optim.names()
    True
    """
    return tuple(sorted(_classes()))


def find(name: str) -> type[FusedOptimizer]:
    """Returns the class of a name. Case, ``_`` and ``-`` do not matter.

    Raises:
        TypeError: ``name`` is no text.
        ValueError: no class has the name; the text has those that are nearest.
    """
    if not isinstance(name, str):
        raise TypeError(f"name must be a text, such as 'adamw', not {name!r}")
    classes = _classes()
    cls = classes.get(_plain(name))
    if cls is None:
        near = in_place_of(name) or did_you_mean(_plain(name), classes)
        raise ValueError(f"no optimizer is named {name!r}: {near or f'names are {names()}'}")
    return cls


def in_place_of(name: str) -> str:
    """Says what to write in place of bitsandbytes' name of a class, or one in another case."""
    plain = _plain(name)
    cls = _classes().get(plain.removeprefix("paged").removesuffix("32bit"))
    if cls is None:
        return ""
    is_wide, is_paged = plain.endswith("32bit"), plain.startswith("paged")
    wide = " with state_dtype=torch.float32" if is_wide else ""
    paged = ", whose states are not paged: fusedstep.offload keeps them on the host"
    return f"write {cls.__name__}{wide}{paged if is_paged else ''}"


def name_of_class(cls: type[FusedOptimizer]) -> str:
    """The name of a class, as :func:`names` has it."""
    return _plain(cls.__name__)


def _classes() -> dict[str, type[FusedOptimizer]]:
    exported = vars(sys.modules["fusedstep.optim"]).values()
    return {
        name_of_class(each): each
        for each in exported
        if isinstance(each, type)
        and issubclass(each, FusedOptimizer)
        and each is not FusedOptimizer
    }


def _plain(name: str) -> str:
    return name.lower().replace("_", "").replace("-", "")
