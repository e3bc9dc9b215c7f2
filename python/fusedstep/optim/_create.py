"""Optimizers by name, with groups with and without weight decay."""

from __future__ import annotations

import difflib
import inspect
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from fusedstep.optim._base import FusedOptimizer
from fusedstep.optim._foreign import FOREIGN


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
        near = in_place_of(name) or _nearest(_plain(name), classes)
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


def create(
    name: str,
    params: torch.nn.Module | ParamsT,
    *,
    no_decay: Sequence[str] = (),
    **options: Any,
) -> FusedOptimizer:
    """Returns the optimizer of a name for a model or parameters.

    >>> optimizer = optim.create("adamw", model, lr=1e-3, no_decay=("bias", "norm"))

    Weights that ``no_decay`` matches have a group of their own, whose ``weight_decay`` is 0. A
    pattern matches a weight if a part of its name, between dots, contains it; so ``"norm"`` matches
    ``layers.0.norm1.weight`` and ``final_layernorm.bias``. A pattern with a dot is searched in the
    whole name. If ``params`` is a model, the class of the module that holds the weight counts as a
    part too: ``"norm"`` matches the weights of a ``LayerNorm`` whatever their names. Case does not
    matter. Shapes do not either.

    Args:
        name (str): one of :func:`names`. Case, ``_`` and ``-`` do not matter: ``"AdamW_8bit"`` is
            ``"adamw8bit"``
        params (Module or iterable): a model, or what the class takes: parameters, named parameters
            or dicts that define groups. Weights of a model are named in errors and in groups
            (``param_names``)
        no_decay (sequence of str, optional): patterns of names of weights without weight decay. It
            needs names: a model or named parameters (default: none)
        options: of the class; an option that it lacks is an error that names the nearest

    Raises:
        TypeError: an option that the class lacks; ``name`` or a pattern is no text.
        ValueError: the name is none of an optimizer; ``no_decay`` with weights without names; what
            the class raises.
    """
    cls = find(name)
    accepted = inspect.signature(cls).parameters
    for option in options.keys() - accepted.keys() - FOREIGN.keys():
        near = _nearest(option, accepted)
        raise TypeError(f"{cls.__name__} has no option {option!r}{near and f': {near}'}")
    # A text is a sequence of texts too.
    if isinstance(no_decay, str) or not all(isinstance(each, str) for each in no_decay):
        raise TypeError(
            f"no_decay must be a sequence of texts, such as ('bias',), not {no_decay!r}"
        )
    kinds: dict[str, str] = {}
    if isinstance(params, torch.nn.Module):
        if no_decay:
            kinds = _kinds_of_modules(params)
        params = list(params.named_parameters())
    if no_decay:
        patterns = tuple(each.lower() for each in no_decay)
        params = [half for group in _groups(params) for half in _halves(group, patterns, kinds)]
    return cls(params, **options)


def _classes() -> dict[str, type[FusedOptimizer]]:
    exported = vars(sys.modules[__package__]).values()
    return {
        _plain(each.__name__): each
        for each in exported
        if isinstance(each, type)
        and issubclass(each, FusedOptimizer)
        and each is not FusedOptimizer
    }


def _plain(name: str) -> str:
    return name.lower().replace("_", "").replace("-", "")


def _nearest(name: str, known: Iterable[str]) -> str:
    found = difflib.get_close_matches(name, list(known))
    return f"did you mean {' or '.join(map(repr, found))}?" if found else ""


def _kinds_of_modules(model: torch.nn.Module) -> dict[str, str]:
    """Returns the class of the module that holds it, by each weight's name."""
    return {
        f"{prefix}.{name}" if prefix else name: type(module).__name__
        for prefix, module in model.named_modules()
        for name, _ in module.named_parameters(recurse=False)
    }


def _groups(params: ParamsT) -> list[dict[str, Any]]:
    listed: list[Any] = list(params)
    if listed and isinstance(listed[0], dict):
        return listed
    return [{"params": listed}]


def _halves(
    group: dict[str, Any], patterns: tuple[str, ...], kinds: dict[str, str]
) -> list[dict[str, Any]]:
    """Returns those of a group with weight decay, and those without; no group is empty."""
    members = group["params"]
    halves: tuple[list[Any], list[Any]] = [], []
    for member in [members] if isinstance(members, Tensor) else members:
        if isinstance(member, Tensor):
            raise ValueError("no_decay needs names: pass a model, or its named_parameters()")
        name, _ = member
        halves[_matches(name, kinds.get(name, ""), patterns)].append(member)
    with_decay, without = halves
    both = group | {"params": with_decay}, group | {"params": without, "weight_decay": 0.0}
    return [half for half in both if half["params"]]


def _matches(name: str, kind: str, patterns: tuple[str, ...]) -> bool:
    name = name.lower()
    parts = [*name.split("."), kind.lower()]
    return any(
        pattern in name if "." in pattern else any(pattern in part for part in parts)
        for pattern in patterns
    )
