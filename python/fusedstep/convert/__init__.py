"""Goes on where another optimizer stopped: one of torch or of another library."""

from __future__ import annotations

import inspect
import math
from collections import defaultdict
from collections.abc import Mapping, Set
from typing import Any, TypeVar, overload

import torch
from torch import Tensor
from torch.optim import Optimizer

from fusedstep import optim
from fusedstep._api.base import FusedOptimizer
from fusedstep._api.buckets import check_ours
from fusedstep._api.foreign import FOREIGN, in_our_words
from fusedstep._api.registry import classes
from fusedstep._api.saved import (
    REMOVE,
    check_count_of_steps,
    check_is_dictionary,
    check_is_state,
    check_names,
    check_saved_options,
    check_state,
    check_tensor,
    own_of,
    strays,
)
from fusedstep._api.unknown import (
    check_look_alike,
    check_states_known,
    check_unknown,
    is_dictionary_of,
    options_of,
    unknown_states,
)
from fusedstep._factored.options import RENAMED
from fusedstep._matrix.low_rank import LowRankOptimizer
from fusedstep._matrix.projection import low_shape_of
from fusedstep._options.shared import own_option
from fusedstep._state.checks import name_of
from fusedstep._state.codes import absmax_of, is_codes, of_shape
from fusedstep._state.kinds import numbers_of
from fusedstep._state.storage import MASTER, asked_way
from fusedstep.convert.codes import in_our_codes, options_of_bitsandbytes
from fusedstep.convert.groups import in_our_options, in_our_states
from fusedstep.convert.libraries import in_groups_of_storage, storage_of, successor

#: Options that choose among torch's implementations. They say nothing about the choice here.
_CHOICES = ("foreach", "fused")


_Ours = TypeVar("_Ours", bound=FusedOptimizer)


@overload
def convert(optimizer: _Ours, **overrides: Any) -> _Ours: ...


@overload
def convert(optimizer: torch.optim.AdamW, **overrides: Any) -> optim.AdamW: ...


@overload
def convert(optimizer: torch.optim.Adam, **overrides: Any) -> optim.Adam: ...


@overload
def convert(optimizer: torch.optim.Adagrad, **overrides: Any) -> optim.Adagrad: ...


@overload
def convert(optimizer: torch.optim.Adadelta, **overrides: Any) -> optim.Adadelta: ...


@overload
def convert(optimizer: torch.optim.Adafactor, **overrides: Any) -> optim.Adafactor: ...


@overload
def convert(optimizer: torch.optim.Adamax, **overrides: Any) -> optim.Adamax: ...


@overload
def convert(optimizer: torch.optim.ASGD, **overrides: Any) -> optim.ASGD: ...


@overload
def convert(optimizer: torch.optim.Muon, **overrides: Any) -> optim.Muon: ...


@overload
def convert(optimizer: torch.optim.NAdam, **overrides: Any) -> optim.NAdam: ...


@overload
def convert(optimizer: torch.optim.RAdam, **overrides: Any) -> optim.RAdam: ...


@overload
def convert(optimizer: torch.optim.RMSprop, **overrides: Any) -> optim.RMSprop: ...


@overload
def convert(optimizer: torch.optim.Rprop, **overrides: Any) -> optim.Rprop: ...


@overload
def convert(optimizer: torch.optim.SGD, **overrides: Any) -> optim.SGD: ...


@overload
def convert(optimizer: Optimizer, **overrides: Any) -> FusedOptimizer: ...


def convert(optimizer: Optimizer, **overrides: Any) -> FusedOptimizer:
    """Returns the optimizer of this package that goes on where the given one stopped.

    It updates the very same parameters and starts with the given one's states, step counts and
    options: those of each group, the defaults for groups added later, the names of parameters, and
    the very tensor where ``lr`` is one. The given optimizer must not be used any more: states of
    weights without native kernels are shared with it.

    Left behind are:

    - ``foreach`` and ``fused``, which choose among torch's implementations. ``fused`` becomes None
      here, which takes the native kernels wherever they can update the weights, and ``foreach``
      what it is by default; override them to have it otherwise. ``differentiable`` stays, and
      keeps them off.
    - Registered hooks. Register them again.
    - Learning rate schedulers: they go on changing the old optimizer. Give each the new one, with
      ``scheduler.optimizer = optimizer``.

    Args:
        optimizer (Optimizer): exactly a ``torch.optim`` class that has a namesake in
            :mod:`fusedstep.optim`, a class of that module, ``FusedAdam`` or ``FusedAdagrad`` of
            apex, ``FusedAdam``, ``DeepSpeedCPUAdam`` or ``DeepSpeedCPUAdagrad`` of DeepSpeed,
            ``Adan`` of its authors (module ``adan``) or of timm, ``Adopt`` of timm, ``Adafactor``
            of transformers, ``RowWiseAdagrad`` of torchrec, ``MuSGD`` of Ultralytics, ``CAME`` of
            came_pytorch, the classes of galore_torch, ``APOLLOAdamW`` of apollo_torch, whose
            projections go on with other random numbers, one of bitsandbytes but for LAMB, LARS and
            AdEMAMix, or a class of ``torchao.optim`` with states of 8 or 4 bits. The last two go on
            with the ``state_dtype`` that they have
        **overrides: options for all groups, in place of the given optimizer's

    Raises:
        TypeError: for another optimizer, a subclass of one of these too, for what it adds would be
            lost; and for an override that is not an option.
        ValueError: for an option that asks for what the optimizers here do not do, and for states
            in codes that are truncated.

    Example::

        >>> optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        >>> scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10)
        >>> ...  # train
        >>> optimizer = scheduler.optimizer = fusedstep.convert(optimizer)
        >>> ...  # train on
    """
    cls, needed = successor(optimizer)
    asked, overrides = overrides, needed | overrides
    masters = None
    if getattr(optimizer, "master_weights", False):  # apex's, which may have taken no step yet
        overrides = {"master_weights": True} | overrides
        masters = getattr(optimizer, "param_groups_master", None)
    accepted = inspect.signature(cls).parameters
    arguments = {ours: name for name, ours in RENAMED.items() if name in accepted}
    arguments |= {name: name for name in accepted if name not in _CHOICES}
    defaults = {
        arguments[name]: value for name, value in optimizer.defaults.items() if name in arguments
    }
    theirs = optimizer.param_groups
    if "state_dtype" not in asked:
        theirs = in_groups_of_storage(optimizer)
    given = [[optimizer.state.get(p, {}) for p in g["params"]] for g in theirs]
    groups = [
        _carried(group, members, cls, group.keys() - optimizer.defaults.keys())
        | overrides
        | {"params": _params(group)}
        | ({} if "state_dtype" in asked else storage_of(optimizer, group))
        for group, members in zip(theirs, given, strict=True)
    ]
    converted = cls(groups, **(defaults | {"fused": None} | overrides))
    states = _taken(converted, theirs, converted.param_groups, given)
    for group, members in zip(masters, states, strict=True) if masters else ():
        for master, state in zip(group["params"], members, strict=True):
            if state:
                state[MASTER] = master.detach()
    _give_states(converted, states, converted.param_groups)
    return converted


def import_state_dict(optimizer: FusedOptimizer, state_dict: Mapping[str, Any]) -> None:
    """Loads the state dictionary of another library's optimizer, or of torch's.

    Read are dictionaries of optimizers that store what the optimizer here stores: of torch's
    namesakes, of apex (``FusedAdam``, ``FusedLAMB``, ``FusedAdagrad``), of DeepSpeed without ZeRO
    (``FusedAdam``, ``DeepSpeedCPUAdam``, ``FusedLamb``, ``DeepSpeedCPUAdagrad``), of timm
    (``Lamb``, ``Adan``, ``Adopt``), of Adan's authors, of galore_torch and apollo_torch with their
    pickled projectors, of bitsandbytes and torchao with states of 8 and 4 bits, and others of this
    form. A step count in a group is given to each of its weights. Codes are taken over where they
    are those that ``state_dtype`` asks for, and else decoded.

    Keys of states that JSON has made texts of are taken for the numbers that they were.

    Options come along, as with :meth:`~torch.optim.Optimizer.load_state_dict`, except for
    ``foreach`` and ``fused``: which code runs is what this optimizer was made with. What the
    dictionary does not say stays too. Apex and DeepSpeed do not store whether Adam's weight decay
    is decoupled: the class chosen here says so. Nor do they store all that makes their LAMB: the
    ``variant`` chosen here says it. Options that only other optimizers of this package have are
    left behind. float32 states of 16-bit weights stay float32. Hooks of ``load_state_dict`` are
    not run.

    A dictionary has no name of its class. Optimizers of timm, pytorch_optimizer and torch_optimizer
    are known by their options, and refused where their formula is not the one of the class chosen
    here. Options of ``lr``, ``betas``, ``eps`` and ``weight_decay`` alone beside Adam's moments do
    not tell the formula: the dictionary is taken for one of the class chosen here.

    Args:
        optimizer (Optimizer): one of :mod:`fusedstep.optim`, over the parameters of the other
        state_dict (dict): what the other's ``state_dict()`` returned

    Raises:
        TypeError: if ``optimizer`` is not of this package, or an option has the wrong type.
        ValueError: if the dictionary does not fit the optimizer, or has an option that asks for
            what the optimizer does not do. After an error nothing has changed.

    Example::

        >>> optimizer = optim.AdamW(model.parameters(), lr=1e-3)
        >>> fusedstep.import_state_dict(optimizer, torch.load("apex.pt")["optimizer"])
    """
    check_ours(optimizer)
    check_is_dictionary(state_dict)
    own, cls = own_of(state_dict), type(optimizer)
    sizes = [
        [len(g["params"]) for g in each]
        for each in (state_dict["param_groups"], optimizer.param_groups, own["param_groups"])
    ]
    if sizes[2] == sizes[1]:
        state_dict = own
    elif sizes[0] != sizes[1]:
        raise ValueError(
            f"state_dict has groups of {sizes[0]} parameters, but the optimizer of {sizes[1]}"
        )
    groups = state_dict["param_groups"]
    given = _by_place(state_dict["state"], groups)
    options = [
        optimizer._in_own_words(
            _carried(
                group, members, cls, (group if is_dictionary_of(optimizer, group) else own).keys()
            ),
            own,
        )
        for group, members, own in zip(groups, given, optimizer.param_groups, strict=True)
    ]
    new_groups = [own | new for own, new in zip(optimizer.param_groups, options, strict=True)]
    out_of_range = None
    for index, each in enumerate(options):
        try:
            check_saved_options(optimizer, index, each)
        except ValueError as error:
            out_of_range = out_of_range or error
    states = _taken(optimizer, groups, new_groups, given)  # says better what another class is
    if out_of_range:
        raise out_of_range
    for group in groups:
        check_look_alike(cls, group)
    _give_states(optimizer, states, new_groups)


def _by_place(states: Any, groups: list[dict[str, Any]]) -> list[list[Any]]:
    """The states of each group in the order of its parameters.

    JSON makes texts of the numbers that parameters have as keys.
    """
    if not isinstance(states, Mapping):
        raise ValueError(f"'state' of state_dict must be a dict, not a {torch.typename(states)}")
    keys = [[key if key in states else str(key) for key in group["params"]] for group in groups]
    if unknown := strays(states, keys):
        raise ValueError(
            f"'state' of state_dict has {unknown}, which 'params' of no group has: the states of "
            "these parameters would be lost"
        )
    return [[states.get(key, {}) for key in group] for group in keys]


# Groups


def _params(group: dict[str, Any]) -> list[Any]:
    """The parameters of a group as a constructor takes them, with names if they have any."""
    names = group.get("param_names")
    return list(zip(names, group["params"], strict=True)) if names else list(group["params"])


def _carried(
    group: dict[str, Any], states: list[Any], cls: type[FusedOptimizer], notes: Set[str]
) -> dict[str, Any]:
    """The options of another optimizer's group that a group of this class goes on with.

    ``notes``: names that are known to be the user's own.
    """
    group = in_our_options(group, states, cls)
    if theirs := options_of_bitsandbytes(group, states, cls):
        group, notes = group | theirs, notes | {"alpha", "betas"}
    decays = bool(group.get("weight_decay", True))
    cls = next(each for each in cls.__mro__ if each in classes and issubclass(each, FusedOptimizer))
    accepted = inspect.signature(cls).parameters.keys() - {"variant"}
    of_others = set().union(*map(options_of, classes)) - options_of(cls)
    carried: dict[str, Any] = {}
    check_unknown(cls, group, REMOVE, notes)
    for name, value in group.items():
        if name == "max_grad_norm" and value in (None, 0, math.inf):  # each clips nothing
            if issubclass(cls, (optim.Adan, optim.Lamb)):
                carried[name] = 0.0 if issubclass(cls, optim.Adan) else math.inf
        elif name in FOREIGN and name not in accepted:
            words = in_our_words(name, value, cls.__name__, accepted, decays)
            if words is None:
                raise ValueError(f"{name}={value} has no counterpart in {cls.__name__}{REMOVE}")
            carried |= words
        elif name not in {"params", "param_names", "step", *_CHOICES, *of_others}:
            carried[name] = value
    return carried


# States


def _taken(
    optimizer: FusedOptimizer,
    groups: list[dict[str, Any]],
    new_groups: list[dict[str, Any]],
    given: list[list[Any]],
) -> list[list[dict[str, Any]]]:
    """The states of another optimizer's groups as those of new groups here.

    Raises:
        ValueError: if a state is not one of this optimizer.
    """
    given = [
        [
            in_our_states(name_of(own, index, place), own["params"][place], state, group, own)
            for place, state in enumerate(members)
        ]
        for index, (group, own, members) in enumerate(zip(groups, new_groups, given, strict=True))
    ]
    given = _decoded(new_groups, given, type(optimizer))
    for index, (group, members) in enumerate(zip(groups, given, strict=True)):
        _check_given(optimizer, new_groups[index], index, group, members)
    states = [
        _translated(own | {"step": group.get("step")}, members, optimizer)
        for group, own, members in zip(groups, new_groups, given, strict=True)
    ]
    states = _in_form(optimizer, new_groups, states)
    for index, (group, members) in enumerate(zip(new_groups, states, strict=True)):
        for place, state in enumerate(members):
            check_state(optimizer, group, group, (index, place), state)
    return states


def _decoded(
    groups: list[dict[str, Any]], states: list[list[Any]], cls: type[FusedOptimizer]
) -> list[list[Any]]:
    """The states of groups, those in other libraries' codes in ours, or in numbers."""
    return [
        [
            in_our_codes(name_of(group, index, place), state, cls, group, _like(cls, group, place))
            for place, state in enumerate(members)
        ]
        for index, (group, members) in enumerate(zip(groups, states, strict=True))
    ]


def _like(cls: type[FusedOptimizer], group: dict[str, Any], place: int) -> Tensor:
    """A weight, or a tensor of the shape of its states where a class projects it."""
    weight = group["params"][place]
    is_projected = issubclass(cls, LowRankOptimizer) and group.get("rank") is not None
    return of_shape(weight, low_shape_of(group, weight.shape)) if is_projected else weight


def _translated(
    group: dict[str, Any], states: list[dict[str, Any]], optimizer: FusedOptimizer
) -> list[dict[str, Any]]:
    """The states of a group under our names, each with a step count of its own."""
    cls = type(optimizer)
    if issubclass(cls, optim.Adagrad):
        # DeepSpeed calls the sum by Adam's name. apex counts no steps: only lr_decay needs them.
        states = [
            {"step": 0.0}
            | {"sum" if name == "exp_avg_sq" else name: value for name, value in state.items()}
            if state and "exp_avg" not in state  # which would be Adam's
            else state
            for state in states
        ]
    if issubclass(cls, (optim.Adafactor, optim.CAME)):  # others keep a number that nothing reads
        states = [{k: v for k, v in state.items() if k != "RMS"} for state in states]
    if issubclass(cls, optim.Adan):
        # pytorch_optimizer calls the last gradient, with the sign changed, by another name.
        states = [
            {"neg_pre_grad" if name == "previous_grad" else name: x for name, x in state.items()}
            for state in states
        ]
        # Zeros that its authors' restart_opt() has made before a first gradient.
        zeros = {"exp_avg", "exp_avg_sq", "exp_avg_diff"}
        states = [{} if state.keys() - {"step"} == zeros else state for state in states]
    kinds, weights = cls._state_kinds, group["params"]
    if not all("step" in numbers_of(kinds, group, weight.shape) for weight in weights):
        counted = [optimizer._store.keeps_count(group, weight) for weight in weights]
        return [
            {name: value for name, value in state.items() if name != "step" or has_count}
            for state, has_count in zip(states, counted, strict=True)
        ]
    counts = [group.get("step"), *(state.get("step") for state in states)]
    largest = max((float(steps) for steps in counts if steps is not None), default=None)
    return [_with_step(state, largest) for state in states]


def _with_step(state: dict[str, Any], largest: float | None) -> dict[str, Any]:
    """A state with its step count, or where it has none with the largest that its group knows.

    apex counts steps in the group. So does DeepSpeed's FusedAdam in effect: it counts for the last
    weight of a group, updates all with that count, and leaves the others at 0. A count of 0 beside
    moments is not one.
    """
    steps = state.get("step")
    moments = state.get(absmax_of("exp_avg"), state.get("exp_avg"))
    if steps is not None and steps == 0 and moments is not None and moments.any():
        steps = None
    steps = largest if steps is None else float(steps)
    if not state or steps is None:
        return state
    return {"step": steps} | {name: value for name, value in state.items() if name != "step"}


def _in_form(
    optimizer: FusedOptimizer, groups: list[dict[str, Any]], states: list[list[dict[str, Any]]]
) -> list[list[dict[str, Any]]]:
    """The states of groups with what only the optimizer itself can read put into its form.

    Raises:
        ValueError: if a state lacks a name, or has one that the optimizer does not keep.
    """
    formed: list[list[dict[str, Any]]] = []
    for index, (group, members) in enumerate(zip(groups, states, strict=True)):
        formed.append([])
        for place, (weight, state) in enumerate(zip(group["params"], members, strict=True)):
            if state:
                name = name_of(group, index, place)
                if not optimizer._foreign_states:
                    check_names(optimizer, name, state, group, weight)
                check_states_known(optimizer, name, group, weight, state)
                unknown = unknown_states(optimizer, group, weight, state)  # and None
                state = {name: value for name, value in state.items() if name not in unknown}
                state = optimizer._in_form(group, weight, state)
            formed[-1].append(state)
    return formed


def _check_given(
    optimizer: FusedOptimizer,
    own: dict[str, Any],
    index: int,
    group: dict[str, Any],
    states: list[dict[str, Any]],
) -> None:
    """Raises what cannot be translated. Neither counts nor moments need be there."""
    if group.get("step") is not None:
        check_count_of_steps(f"group {index}", group["step"])
    for place, (weight, state) in enumerate(zip(own["params"], states, strict=True)):
        name = name_of(own, index, place)
        check_is_state(name, state)
        if state.get("step") is not None:
            check_count_of_steps(name, state["step"])
        if "exp_avg" in state:
            shape = optimizer._store.slot_of(own, weight, "exp_avg").shape
            absmax = state.get(absmax_of("exp_avg"))
            check_tensor(f"exp_avg of {name}", state["exp_avg"], weight, absmax, shape)


def _give_states(
    optimizer: FusedOptimizer, states: list[list[dict[str, Any]]], groups: list[dict[str, Any]]
) -> None:
    """Gives the parameters of each group these states, in place of all that there are."""
    state: dict[Tensor, dict[str, Any]] = defaultdict(dict)
    for group, members in zip(groups, states, strict=True):
        for weight, given in zip(group["params"], members, strict=True):
            if given:
                state[weight] = {
                    name: value if name in optimizer._numbers else _fitted(value, weight, group)
                    for name, value in given.items()
                }
    # Calls the end of load_state_dict only. Its beginning would copy the options, and so a tensor
    # lr.
    optimizer.__setstate__({"state": state, "param_groups": groups})


def _fitted(value: Any, weight: Tensor, group: dict[str, Any]) -> Any:
    """A state as a weight's has to be; that of a 16-bit weight may be float32, or be asked to."""
    if not isinstance(value, Tensor):
        return value
    if is_codes(value) or not (value.is_floating_point() or value.is_complex()):
        return value.to(weight.device)
    asked = own_option(group, "state_dtype") is not None or asked_way(group)
    wide = value.itemsize > 2 or asked
    is_small = weight.dtype in (torch.bfloat16, torch.float16)
    return value.to(weight.device, torch.float32 if wide and is_small else weight.dtype)
