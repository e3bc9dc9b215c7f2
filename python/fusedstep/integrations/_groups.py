"""Optimizers over other groups than a framework gives, and checkpoints of those that it makes."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import Tensor

from fusedstep import optim
from fusedstep._api.buckets import check_ours
from fusedstep._api.saved import OWN
from fusedstep._api.unknown import options_of
from fusedstep._torch_ops import twin as _twin
from fusedstep.convert import import_state_dict
from fusedstep.convert.forms import in_form_of

Groups = list[dict[str, Any]]

#: Of optimizers that are saved as another library's: the library, and the weights of its groups.
_written_as: weakref.WeakKeyDictionary[Any, tuple[str, list[list[Tensor]]]]
_written_as = weakref.WeakKeyDictionary()


def made_by(
    cls: type[optim.FusedOptimizer], make: Callable[..., optim.FusedOptimizer]
) -> type[optim.FusedOptimizer]:
    """Returns a class of the name of ``cls`` whose instances ``make(params, **options)`` makes.

    Frameworks make groups after they have been given an optimizer, and want a class.
    """

    def new(_: type, params: Iterable[Any], **options: Any) -> optim.FusedOptimizer:
        return make(params, **options)

    metaclass: Any = type(cls)
    return metaclass(cls.__name__, (cls,), {"__new__": new}, is_alias=True)


def listed(params: Iterable[Any]) -> Groups:
    """Returns groups as an optimizer takes them, their weights in lists."""
    given = list(params)
    groups = given if given and isinstance(given[0], dict) else [{"params": given}]
    lists = (
        [g["params"]] if isinstance(g["params"], Tensor) else list(g["params"]) for g in groups
    )
    return [group | {"params": weights} for group, weights in zip(groups, lists, strict=True)]


def weights_of(groups: Groups) -> list[list[Tensor]]:
    """Returns the weights of listed groups, without names."""
    return [
        [each if isinstance(each, Tensor) else each[1] for each in group["params"]]
        for group in groups
    ]


def take_over(
    optimizer: optim.FusedOptimizer, theirs: list[list[Tensor]], library: str | None = None
) -> None:
    """Makes ``load_state_dict`` take what the optimizer of the same name in a framework has saved.

    ``theirs``: the weights of that optimizer's groups; each group here is a part of one of them.
    ``library``: the one whose form :func:`written_as_theirs` gives the optimizer's dictionaries.
    """
    flat = {id(weight): place for place, weight in enumerate(w for ws in theirs for w in ws)}
    places = [[flat[id(weight)] for weight in group["params"]] for group in optimizer.param_groups]
    sizes = [len(weights) for weights in theirs]
    optimizer.register_load_state_dict_pre_hook(functools.partial(_in_our_groups, sizes, places))
    if library:
        _written_as[optimizer] = library, theirs


@contextlib.contextmanager
def written_as_theirs(optimizer: Any, schedule: Any) -> Iterator[None]:
    """Gives dictionaries of both the form that the other optimizer of :func:`take_over` loads.

    Both may be wrapped by Accelerate. An optimizer of no library stays as it is.
    """
    optimizer = getattr(optimizer, "optimizer", optimizer)
    schedule = getattr(schedule, "scheduler", schedule)
    library, theirs = _written_as.get(optimizer, (None, []))
    if library is None:
        yield
        return
    hook = optimizer.register_state_dict_post_hook(
        lambda optimizer, saved: in_form_of(library, optimizer, theirs, saved)
    )
    ours = [{id(weight) for weight in group["params"]} for group in optimizer.param_groups]
    first = [_first_with(weights, ours) for weights in theirs]
    lists = {
        name: value
        for name in ("base_lrs", "_last_lr", "min_lrs", "lr_lambdas")
        if isinstance(value := getattr(schedule, name, None), list) and len(value) == len(ours)
    }
    try:
        vars(schedule).update({name: [of[i] for i in first] for name, of in lists.items()})
        yield
    finally:
        vars(schedule).update(lists)
        hook.remove()


def _first_with(weights: list[Tensor], ours: list[set[int]]) -> int:
    """The place of the first group of ours that has one of the weights."""
    chosen = {id(weight) for weight in weights}
    return next((place for place, group in enumerate(ours) if chosen & group), 0)


def _in_our_groups(
    sizes: list[int],
    places: list[list[int]],
    optimizer: optim.FusedOptimizer,
    saved: dict[str, Any],
) -> dict[str, Any] | None:
    """Returns the dictionary of an optimizer here for one of another; None if it is not one.

    ``sizes``: of the groups of the other. ``places``: of our weights among all of the other.
    """
    if OWN in saved:  # which load_state_dict takes
        return None
    groups, found = optimizer.param_groups, saved["param_groups"]
    options = options_of(type(optimizer))

    def has_options(group: dict[str, Any], own: dict[str, Any]) -> bool:
        return own.keys() & options <= group.keys()

    if (
        [len(group["params"]) for group in found] != sizes
        or [len(group["params"]) for group in groups] != [len(each) for each in places]
        or (len(found) == len(groups) and all(map(has_options, found, groups)))
    ):
        return None
    keys = [key for group in found for key in group["params"]]
    sources = [group for group in found for _ in group["params"]]
    in_our_groups = [
        {k: v for k, v in sources[own[0]].items() if k != "param_names"}
        | {"params": [keys[place] for place in own]}
        for own in places
    ]
    twin = _twin.like(optimizer, [dict(group) for group in groups])
    import_state_dict(check_ours(twin), {**saved, "param_groups": in_our_groups})
    return twin.state_dict()


def fit_schedule(schedule: Any, optimizer: Any) -> None:
    """Gives a schedule that was loaded the rates of an optimizer of more groups than the saved one.

    Both may be wrapped by Accelerate. ``initial_lr`` and ``lr`` of the groups have been loaded.
    """
    schedule = getattr(schedule, "scheduler", schedule)
    groups = getattr(optimizer, "optimizer", optimizer).param_groups
    for name, option in (("base_lrs", "initial_lr"), ("_last_lr", "lr")):
        rates = getattr(schedule, name, groups)
        if len(rates) < len(groups):
            setattr(schedule, name, [group.get(option, group["lr"]) for group in groups])
    least = getattr(schedule, "min_lrs", groups)
    if len(least) < len(groups):  # Trainer gives all groups the same
        schedule.min_lrs = least[:1] * len(groups)
