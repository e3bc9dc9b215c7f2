"""States that bitsandbytes and torchao keep in codes, under the names of this package.

bitsandbytes has ``state1`` and ``state2``: float32 numbers, or uint8 codes with the map of their
values (``qmap1``) and the absolute maximum of each block (``absmax1``). torchao has tensors with
the attributes ``codes``, ``scale`` and, but for float8, ``qmap``.

Codes are taken over where they are the codes asked for: of the same block, and with values that the
map here has too. Others become float32 numbers.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fusedstep import optim
from fusedstep._api.base import FusedOptimizer
from fusedstep._native import ops
from fusedstep._sharding.dtensor import local, spread_like
from fusedstep._sharding.units import sizes_in_units
from fusedstep._state.codes import (
    BLOCKS,
    absmax_of,
    asked_kind,
    is_codes,
    pack,
    spread_absmax,
    spread_codes,
)

#: The key under which bitsandbytes nests the tensors of a state, since 0.49.2.
NESTED = "__bnb_optimizer_quant_state__"

#: Blocks that bitsandbytes has kernels for.
_BLOCKS = (64, 128, 256, 512, 1024, 2048, 4096)

#: The states that bitsandbytes calls state1 and state2.
_NAMES: dict[type[FusedOptimizer], tuple[str, ...]] = {
    optim.Adagrad: ("sum",),
    optim.Adam: ("exp_avg", "exp_avg_sq"),
    optim.AdamW: ("exp_avg", "exp_avg_sq"),
    optim.GaLoreAdamW: ("exp_avg", "exp_avg_sq"),
    optim.Lamb: ("exp_avg", "exp_avg_sq"),
    optim.Lion: ("exp_avg",),
    optim.RMSprop: ("square_avg",),
    optim.SGD: ("momentum_buffer",),
}

#: The largest code of fp8, which stands for the absolute maximum here.
_LARGEST_FP8 = torch.finfo(torch.float8_e4m3fn).max


class _Codes(NamedTuple):
    """A state in codes, its elements in order of rows and columns."""

    codes: Tensor
    """One an element: float8 numbers, or places in the map."""
    qmap: Tensor | None
    """The value of each code; none for float8."""
    scale: Tensor
    """The factor of each block's values."""
    block: int

    def numbers(self) -> Tensor:
        """The float32 numbers that the codes stand for."""
        if self.qmap is None:
            values = self.codes.float()
        else:
            values = self.qmap.to(self.codes.device, torch.float32)[self.codes.long()]
        scale = self.scale.to(self.codes.device, torch.float32)
        return values * scale.repeat_interleave(self.block)[: len(values)]

    def absmax(self) -> Tensor:
        """The magnitude that the largest code of each block stands for."""
        scale = self.scale.to(self.codes.device, torch.float32)
        return scale * _LARGEST_FP8 if self.qmap is None else scale


def options_of_bitsandbytes(
    group: Mapping[str, Any], states: list[Any], cls: type[FusedOptimizer]
) -> dict[str, Any]:
    """The options that say what a group's ``betas`` mean there, and what Adam's decay is."""
    is_theirs = "t_alpha" in group or any(map(_is_of_bitsandbytes, states))
    if not is_theirs or "betas" not in group:
        return {}
    beta1, *_ = group["betas"]
    if issubclass(cls, optim.SGD):
        return {"momentum": beta1, "dampening": 0}  # its kernels read no dampening
    if issubclass(cls, optim.RMSprop):
        return {"alpha": beta1}
    return {"decoupled_weight_decay": True} if issubclass(cls, optim.Adam) else {}


def in_our_codes(
    what: str, state: Any, cls: type[FusedOptimizer], group: Mapping[str, Any], weight: Tensor
) -> Any:
    """The state of a weight with the names and codes that it has here; any other as it is.

    `what`: the weight in an error. `weight`: the weight, or a tensor of the shape of its states.
    `group`: the options to come.

    Raises:
        ValueError: if a state is missing, truncated or of another optimizer.
    """
    state = _uncast(what, state, weight)
    if _is_of_bitsandbytes(state):
        found = _of_bitsandbytes(what, state, cls, weight)
    elif isinstance(state, Mapping) and any(map(is_of_torchao, state.values())):
        found = {
            name: _of_torchao(f"{name} of {what}", value, weight) if is_of_torchao(value) else value
            for name, value in state.items()
        }
    else:
        return state
    new: dict[str, Any] = {}
    signed = ops.signed_states[cls._rule]
    for name, value in found.items():
        if isinstance(value, _Codes):
            new |= _placed(what, name, value, group, weight, signed=name in signed)
        else:
            new[name] = value
    return new


def names_of_bitsandbytes(cls: type[FusedOptimizer]) -> tuple[str, ...]:
    """The states that are ``state1``, ``state2`` there; none for a class that it has not."""
    return next((names for each, names in _NAMES.items() if issubclass(cls, each)), ())


def is_of_torchao(value: Any) -> bool:
    value = local(value) if isinstance(value, Tensor) else value
    return isinstance(value, Tensor) and hasattr(value, "codes") and hasattr(value, "scale")


def _is_of_bitsandbytes(state: Any) -> bool:
    return isinstance(state, Mapping) and bool({NESTED, "state1"} & state.keys())


# Reading


def _of_bitsandbytes(
    what: str, state: Mapping[str, Any], cls: type[FusedOptimizer], weight: Tensor
) -> dict[str, Any]:
    nested = state.get(NESTED, {})
    if not isinstance(nested, Mapping):
        raise ValueError(f"{NESTED} of {what} must be a dict, not a {torch.typename(nested)}")
    state = {**state, **nested}
    names = names_of_bitsandbytes(cls)
    if not names:
        known = ", ".join(each.__name__ for each in _NAMES)
        raise ValueError(
            f"the state of {what} is one of bitsandbytes, which {cls.__name__} does not read; "
            f"{known} do"
        )
    if "state2" in state and len(names) == 1:
        raise ValueError(
            f"the state of {what} has state2: it is one of Adam, AdamW or LAMB, "
            f"not of {cls.__name__}"
        )
    if "unorm_vec" in state and len(names) == 1:
        raise ValueError(
            f"the state of {what} has unorm_vec: it is one of LARS, not of {cls.__name__}"
        )
    found: dict[str, Any]
    found = {name: state[name] for name in ("step", "projector") if name in state}
    for number, name in enumerate(names, 1):
        theirs = f"state{number}"
        if theirs not in state:
            raise ValueError(
                f"the state of {what} has no {theirs}, which {cls.__name__} takes for {name}"
            )
        found[name] = _read(f"{{}}{number} of {what}", number, state, weight)
    return found


def _read(text: str, number: int, state: Mapping[str, Any], weight: Tensor) -> Tensor | _Codes:
    """One of the states of bitsandbytes. `text` names a tensor of it, whose name has a number."""
    value, name = state[f"state{number}"], text.format("state")
    _check_dense(name, value)
    value, weight = local(value), local(weight)
    elements = weight.numel()
    if value.shape != weight.shape:
        shapes = f"{list(value.shape)}, but the weight has {list(weight.shape)}"
        raise ValueError(f"{name} has the shape {shapes}")
    if not value.is_contiguous():
        raise ValueError(
            f"{name} is not contiguous: on a GPU bitsandbytes takes its elements in the order of "
            "memory, on a CPU by rows and columns, and the state does not say which it was"
        )
    if value.dtype is not torch.uint8:
        if state.get(f"qmap{number}") is None:
            return value
        value = _as_codes(name, value, state.get(f"absmax{number}"))
    qmap = _check_dense(text.format("qmap"), state.get(f"qmap{number}"))
    absmax = _check_dense(text.format("absmax"), state.get(f"absmax{number}"))
    if qmap.shape != (256,):
        raise ValueError(f"{text.format('qmap')} must have 256 values, not {list(qmap.shape)}")
    fitting = [block for block in _BLOCKS if -(-elements // block) == absmax.numel()]
    if absmax.dim() != 1 or not fitting:
        raise ValueError(
            f"{text.format('absmax')} has the shape {list(absmax.shape)}, but the {elements} "
            "elements of the weight are no such number of blocks of 64, 128, … or 4096"
        )
    return _Codes(value.flatten(), qmap, absmax, 256 if 256 in fitting else fitting[0])


def _of_torchao(name: str, value: Any, weight: Tensor) -> _Codes:
    value, weight = local(value), local(weight)
    codes, scale, elements = value.codes, value.scale, weight.numel()
    for part, tensor in (("codes", codes), ("scale", scale)):
        _check_dense(f"the {part} of {name}", tensor)
    qmap: Tensor | None = None
    if codes.dtype is not torch.float8_e4m3fn:
        qmap = _check_dense(f"the qmap of {name}", getattr(value, "qmap", None))
        if codes.dtype is not torch.uint8 or qmap.shape not in ((256,), (16,)):
            raise ValueError(
                f"{name} must have float8_e4m3fn codes, or uint8 codes and a qmap of 256 or 16 "
                f"values; it has {codes.dtype} and {list(qmap.shape)}"
            )
    is_packed = qmap is not None and len(qmap) == 16
    if value.shape != weight.shape or codes.numel() * (2 if is_packed else 1) != elements:
        raise ValueError(
            f"{name} has the shape {list(value.shape)} and codes of {list(codes.shape)}, but the "
            f"weight has {list(weight.shape)}"
        )
    if not scale.numel() or elements % scale.numel():
        raise ValueError(
            f"the scale of {name} has {scale.numel()} numbers, but the {elements} elements of the "
            "weight are no such number of blocks"
        )
    codes = codes.flatten()
    if is_packed:
        codes = torch.stack([codes >> 4, codes & 15], 1).flatten()
    return _Codes(codes, qmap, scale, elements // scale.numel())


def _uncast(what: str, state: Any, weight: Tensor) -> Any:
    """A state of ours with its codes, where a class of torch has made numbers of them."""
    if not isinstance(state, Mapping):
        return state
    codes = {
        name: _as_codes(f"{name} of {what}", value, state[absmax_of(name)], weight)
        for name, value in state.items()
        if isinstance(value, Tensor) and absmax_of(name) in state and not is_codes(value)
    }
    return {**state, **codes} if codes else state


def _as_codes(name: str, value: Tensor, absmax: Any, weight: Tensor | None = None) -> Tensor:
    """The codes that a class of torch has cast to the dtype of its weights as it loaded them.

    ``weight``: one with the shape of the state, if codes are those of this package.
    """
    _check_dense(name, value)
    _check_dense(f"the absmax of {name}", absmax)
    part = local(value)
    if weight is not None and part.numel() and part.amax() == _LARGEST_FP8:
        codes = value.to(torch.float8_e4m3fn)
    else:
        codes = value.to(torch.uint8)
    # torch's class has made the tensor as it loaded the codes, and writes to it when it steps.
    was_stepped = not part.is_inference() and part._version > 0
    if was_stepped or not torch.equal(local(codes).to(part.dtype), part):
        raise ValueError(
            f"{name} has an absmax, but is not in codes: they were taken for numbers in a step"
        )
    if local(absmax).dtype is not torch.float32:
        raise ValueError(
            f"the absmax of {name} was rounded to {local(absmax).dtype}: load the dictionary that "
            "has the codes by fusedstep.import_state_dict"
        )
    return codes


def _check_dense(name: str, value: Any) -> Tensor:
    if not isinstance(value, Tensor) or value.layout is not torch.strided or value.is_meta:
        kind = "missing" if value is None else f"a {torch.typename(value)}"
        raise ValueError(f"{name} must be a dense tensor with values, but is {kind}")
    return value


# As states of ours


def _placed(
    what: str,
    name: str,
    found: _Codes,
    group: Mapping[str, Any],
    weight: Tensor,
    *,
    signed: bool,
) -> dict[str, Tensor]:
    """A state in codes if they are the ones that the options ask for, else in numbers."""
    shape, kind = local(weight).shape, asked_kind(group, weight)
    numbers = found.numbers()
    if not signed and torch.any(numbers < 0):
        raise ValueError(f"{name} of {what} has negative numbers: it is of another optimizer")
    codes = _same_codes(found, kind, signed)
    if kind is None or codes is None:
        return {name: spread_like(weight, numbers.view(shape))}
    codes = pack(codes).view(sizes_in_units(shape, 2)) if kind == "int4" else codes.view(shape)
    absmax = found.absmax().view(sizes_in_units(shape, BLOCKS[kind]))
    return {
        name: spread_codes(weight, codes, kind),
        absmax_of(name): spread_absmax(weight, absmax, kind),
    }


def _same_codes(found: _Codes, kind: str | None, signed: bool) -> Tensor | None:
    """The codes of a kind that stand for the same numbers; None if there are none."""
    if kind is None or found.block != BLOCKS[kind] or (found.qmap is None) != (kind == "fp8"):
        return None
    if found.qmap is None:
        return found.codes
    theirs, ours = found.qmap.cpu().double(), values_of(kind, signed)
    distance, places = (theirs[:, None] - ours).abs().min(1)
    is_same = distance <= 1e-6 * theirs.abs()  # makers of a map round its values otherwise
    used = found.codes.long().cpu().bincount(minlength=len(theirs)) > 0
    if not is_same[used].all():
        return None
    return places.to(found.codes.device, torch.uint8)[found.codes.long()]


@functools.cache
def values_of(kind: str, signed: bool) -> Tensor:
    """The values of all codes of a kind, in their order."""
    codes = torch.arange(256, dtype=torch.uint8, device="cpu")
    codes = pack(codes[:16]) if kind == "int4" else codes
    shape = [16 if kind == "int4" else 256]
    one = torch.ones(1, dtype=torch.float32, device="cpu")
    return torch.ops.fusedstep.decode_state(codes, one, shape, signed).double()
