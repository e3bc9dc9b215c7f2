"""Dictionaries of optimizers here in the form of other libraries' classes, for these to load.

A dictionary in such a form has ours beside it, under the key of ``fusedstep._api.saved.OWN``. Both
share their tensors, which ``torch.save`` writes once. An optimizer here loads its own part; the
other library's class does not read that part.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fusedstep import optim
from fusedstep._api.base import FusedOptimizer
from fusedstep._api.saved import OWN
from fusedstep._factored.formula import first_eps
from fusedstep._factored.options import RENAMED, is_torchs, option_of
from fusedstep._matrix.projection import LEFT, RIGHT
from fusedstep._sharding.dtensor import is_dtensor
from fusedstep._state.codes import BLOCKS, absmax_of, is_codes
from fusedstep._state.slots import Slot
from fusedstep.convert.codes import names_of_bitsandbytes, values_of

#: The options of a projection, as galore_torch and apollo_torch read them.
_RANKS = ("rank", "update_proj_gap", "scale", "proj_type", "proj", "scale_type")

#: The classes that are pickled in a library's dictionaries, with their modules.
_PICKLED = {
    "galore_torch": (("galore_torch.galore_projector", "GaLoreProjector"),),
    "apollo_torch": (
        ("apollo_torch.random_projector", "GradientProjector"),
        ("apollo_torch.svd_projector", "GaLoreProjector"),
    ),
    "torchao": (
        ("torchao.optim.subclass_8bit", "OptimState8bit"),
        ("torchao.optim.subclass_4bit", "OptimState4bit"),
    ),
}


class _Weight(NamedTuple):
    """A weight with its options and its states, as they were saved."""

    optimizer: FusedOptimizer
    group: dict[str, Any]
    weight: Tensor
    state: dict[str, Any]

    def step(self) -> int:
        """The number of steps; 1 where the class here does not count, nor theirs reads, them."""
        return int(self.state.get("step", 1))

    def slot(self, name: str) -> Slot:
        return self.optimizer._store.slot_of(self.group, self.weight, name)

    def numbers(self, name: str) -> Tensor:
        """A state of numbers, by rows and columns; float32 ones of codes."""
        value: Tensor = self.state[name]
        return (self.slot(name).decode(self.state) if is_codes(value) else value).contiguous()

    def kind(self, name: str) -> str | None:
        """The kind of codes that a state is in, if it is."""
        return self.slot(name).kind_in(self.state)


class _Form(NamedTuple):
    """The form of a library's class."""

    options: Callable[[FusedOptimizer, dict[str, Any]], dict[str, Any]]
    """The options of a group."""
    state: Callable[[_Weight], dict[str, Any]]
    """The state of a weight that has one."""


def in_form_of(
    library: str, optimizer: FusedOptimizer, theirs: list[list[Tensor]], saved: dict[str, Any]
) -> dict[str, Any]:
    """The dictionary of an optimizer in the form of a library's class, with its own inside.

    Where one group of the other class has the weights of several groups here, the group takes the
    options of most of its elements.

    Args:
        library (str): ``bitsandbytes``, ``torchao``, ``transformers``, ``galore_torch`` or
            ``apollo_torch``
        theirs (list): the weights of each group of the other class
        saved (dict): the dictionary of the optimizer

    Returns:
        dict: ``saved`` itself where the other library is not installed whose objects its
        dictionaries have, where states are DTensors, and where the class has no such formula.
    """
    if not _can_write(library, optimizer):
        return saved
    form = _form(library, optimizer)
    owned = [(group, weight) for group in optimizer.param_groups for weight in group["params"]]
    places = {id(weight): place for place, (_, weight) in enumerate(owned)}
    groups: list[dict[str, Any]] = []
    states: dict[int, dict[str, Any]] = {}
    number = 0
    for weights in theirs:
        sizes = dict.fromkeys(range(len(optimizer.param_groups)), 0)
        numbers = list(range(number, number + len(weights)))
        for key, weight in zip(numbers, weights, strict=True):
            place = places.get(id(weight))
            if place is None:  # one without a gradient
                continue
            group, _ = owned[place]
            index = next(i for i, each in enumerate(optimizer.param_groups) if each is group)
            sizes[index] += weight.numel()
            if state := saved["state"].get(place):
                states[key] = form.state(_Weight(optimizer, group, weight, state))
        number += len(weights)
        most = optimizer.param_groups[max(sizes, key=sizes.__getitem__)]
        begun = {name: most[name] for name in ("initial_lr",) if name in most}
        groups.append(form.options(optimizer, most) | begun | {"params": numbers})
    return {"state": states, "param_groups": groups, OWN: saved}


def _can_write(library: str, optimizer: FusedOptimizer) -> bool:
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    if any(map(is_dtensor, weights)) or any(_class(*each) is None for each in _pickled(library)):
        return False
    if isinstance(optimizer, (optim.Adafactor, optim.GaLoreAdafactor)):
        return not any(map(is_torchs, optimizer.param_groups))
    return True


def _form(library: str, optimizer: FusedOptimizer) -> _Form:
    if library != "galore_torch":
        return _FORMS[library]
    if isinstance(optimizer, optim.GaLoreAdafactor):
        return _projected(_FORMS["transformers"])
    is_8bit = isinstance(optimizer, optim.GaLoreAdamW8bit)
    return _projected(_OF_8_BITS if is_8bit else _PLAIN)


# Objects that are pickled


@contextlib.contextmanager
def readable(library: str) -> Iterator[None]:
    """Lets ``torch.load(..., weights_only=True)`` read the objects of a library's dictionaries.

    Others stand in for their classes where the library is not installed.
    """
    found: list[Any] = []
    for module, name in _pickled(library):
        stand_in = _Tensor if library == "torchao" else _Object
        found.append(_class(module, name) or (stand_in, f"{module}.{name}"))
    known = torch.serialization.get_safe_globals()  # which leaving would forget
    with torch.serialization.safe_globals([each for each in found if each not in known]):
        yield


def _pickled(library: str) -> tuple[tuple[str, str], ...]:
    return _PICKLED.get(library, ())


def _class(module: str, name: str) -> Any:
    """A class of another library; None where it is not installed."""
    try:
        return getattr(importlib.import_module(module), name)
    except ImportError:
        return None


class _Object:
    """Stands in for a class of objects."""


class _Tensor(Tensor):
    """Stands in for a class of tensors, whose attributes are read, and which compute nothing."""

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's stubs have a function of C++
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return NotImplemented


# bitsandbytes and torchao


@functools.cache
def _map(kind: str, signed: bool) -> Tensor:
    """The values of all codes, which their sums and products give, too, of the next steps there."""
    return values_of(kind, signed).float()


def _options_of_bitsandbytes(optimizer: FusedOptimizer, group: dict[str, Any]) -> dict[str, Any]:
    kept = {name: group[name] for name in ("lr", "weight_decay")}
    if isinstance(optimizer, optim.RMSprop):
        return kept | {"betas": (group["alpha"], group["momentum"]), "eps": group["eps"]}
    kept |= {"betas": group["betas"], "eps": group.get("eps", 0.0)}
    is_of_two = len(names_of_bitsandbytes(type(optimizer))) == 2
    return kept | ({"alpha": 0.0, "t_alpha": None, "t_beta3": None} if is_of_two else {})


def _state_of_bitsandbytes(of: _Weight) -> dict[str, Any]:
    """Beside ``step``, as before 0.49.2: later releases read the tensors there too."""
    new: dict[str, Any] = {"step": of.step()}
    for number, name in enumerate(names_of_bitsandbytes(type(of.optimizer)), 1):
        if of.kind(name) == "int8":
            codes, absmax = of.state[name], of.state[absmax_of(name)]
            new[f"state{number}"] = codes.contiguous()
            new[f"absmax{number}"] = absmax.flatten()
            new[f"qmap{number}"] = _map("int8", of.slot(name).is_signed).to(codes.device)
        else:  # its kernels read float32
            new[f"state{number}"] = of.numbers(name).float()
    return new


def _options_of_torchao(optimizer: FusedOptimizer, group: dict[str, Any]) -> dict[str, Any]:
    kept = {name: group[name] for name in ("betas", "eps", "weight_decay", "amsgrad")}
    lr = torch.tensor(float(group["lr"]), dtype=torch.float32, device="cpu")
    return {"lr": lr} | kept


def _state_of_torchao(of: _Weight) -> dict[str, Any]:
    names = [name for name in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq") if name in of.state]
    return {"step": of.state["step"]} | {name: _of_torchao(of, name) for name in names}


def _of_torchao(of: _Weight, name: str) -> Tensor:
    kind, value = of.kind(name), of.state[name]
    if kind not in ("int8", "int4") or of.weight.numel() % BLOCKS[kind]:
        return of.numbers(name)
    signed, absmax = of.slot(name).is_signed, of.state[absmax_of(name)].flatten()
    qmap = _map(kind, signed).to(value.device)
    of_8_bits, of_4_bits = (_class(*each) for each in _PICKLED["torchao"])
    if kind == "int8":
        made: Tensor = of_8_bits(value.contiguous(), absmax, qmap, signed, of.weight.dtype)
    else:
        flat = value.flatten()
        made = of_4_bits(flat, absmax, qmap, signed, of.weight.shape, of.weight.dtype)
    return made


# transformers' Adafactor


def _options_of_transformers(optimizer: FusedOptimizer, group: dict[str, Any]) -> dict[str, Any]:
    beyond = ("beta1", "scale_parameter", "relative_step", "warmup_init")
    return (
        {name: group[name] for name in ("lr", "weight_decay")}
        | {theirs: group[ours] for theirs, ours in RENAMED.items()}
        | {name: option_of(group, name) for name in beyond}
        | {"eps": (first_eps(group, group["params"][0]), group["eps"][1])}
    )


def _state_of_transformers(of: _Weight) -> dict[str, Any]:
    names = ("exp_avg", "exp_avg_sq", "exp_avg_sq_row", "exp_avg_sq_col")
    kept = {name: of.numbers(name) for name in names if name in of.state}
    return {"step": of.step(), "RMS": 0.0} | kept  # of the weight, as each step finds it


# galore_torch and apollo_torch


def _options_of_adamw(optimizer: FusedOptimizer, group: dict[str, Any]) -> dict[str, Any]:
    names = ("lr", "betas", "eps", "weight_decay", "correct_bias")
    return {name: group[name] for name in names}


def _state_of_adamw(of: _Weight) -> dict[str, Any]:
    return {"step": of.step()} | {name: of.numbers(name) for name in ("exp_avg", "exp_avg_sq")}


def _state_of_8_bits(of: _Weight) -> dict[str, Any]:
    """The class there asks bitsandbytes for a limit of the update's norm, which has a state."""
    state = _state_of_bitsandbytes(of)
    return state | {"unorm_vec": torch.zeros(1, dtype=torch.float32, device=of.weight.device)}


def _projected(form: _Form) -> _Form:
    """The form with the projections of GaLore."""

    def options(optimizer: FusedOptimizer, group: dict[str, Any]) -> dict[str, Any]:
        return form.options(optimizer, group) | _ranks(group)

    def state(of: _Weight) -> dict[str, Any]:
        bases = [of.state[side] for side in (LEFT, RIGHT) if side in of.state]
        made = _projector("galore_torch", 0, of, bases) if bases else {}
        return form.state(of) | made

    return _Form(options, state)


def _options_of_apollo(optimizer: FusedOptimizer, group: dict[str, Any]) -> dict[str, Any]:
    return _options_of_adamw(optimizer, group) | _ranks(group)


def _state_of_apollo(of: _Weight) -> dict[str, Any]:
    seed = 1 + next(
        place
        for place, weight in enumerate(w for g in of.optimizer.param_groups for w in g["params"])
        if weight is of.weight
    )
    new = _state_of_adamw(of) | {"seed": seed}
    if of.group.get("rank") is None:
        return new
    assert isinstance(of.optimizer, optim.APOLLOAdamW)
    new["scaled_grad"] = of.state["scaled_grad"]
    if of.group["proj"] == "svd":
        bases = [of.state[side] for side in (LEFT, RIGHT) if side in of.state]
        return new | _projector("apollo_torch", 1, of, bases)
    drawn = of.optimizer._projection.new_bases(
        of.group, of.weight, of.state, of.weight, of.step(), True, True
    )
    return new | _projector("apollo_torch", 0, of, [*drawn.values()], seed=seed)


def _ranks(group: dict[str, Any]) -> dict[str, Any]:
    if group.get("rank") is None:
        return {}
    return {name: group[name] for name in _RANKS if name in group}


def _projector(
    library: str, which: int, of: _Weight, bases: list[Tensor], **others: Any
) -> dict[str, Any]:
    cls = _class(*_PICKLED[library][which])
    ranks = {name: of.group[name] for name in ("update_proj_gap", "scale", "proj_type")}
    made = cls(of.group["rank"], **ranks, **others)
    bases = [basis.to(of.weight.dtype) for basis in bases]
    made.ortho_matrix = bases if of.group["proj_type"] == "full" else bases[0]
    return {"projector": made}


_PLAIN = _Form(_options_of_adamw, _state_of_adamw)
_OF_8_BITS = _Form(_options_of_bitsandbytes, _state_of_8_bits)
_FORMS = {
    "bitsandbytes": _Form(_options_of_bitsandbytes, _state_of_bitsandbytes),
    "torchao": _Form(_options_of_torchao, _state_of_torchao),
    "transformers": _Form(_options_of_transformers, _state_of_transformers),
    "apollo_torch": _Form(_options_of_apollo, _state_of_apollo),
}
