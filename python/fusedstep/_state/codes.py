"""States in codes of 8 or 4 bits: which there are, and numbers of them.

A state ``name`` in codes is two tensors: the codes under its own name, and the absolute maximum of
each block of them, float32, under ``name_absmax``. Blocks follow the weight's elements by rows and
columns, whatever its layout. Bytes of int4, and absolute maxima, have the shapes of ``_units``.

=====  =========================================================  =====
kind   codes                                                      block
=====  =========================================================  =====
int8   uint8, in the weight's shape                               256
int4   uint8, two a byte, the first in the upper half             128
fp8    float8_e4m3fn, in the weight's shape                       256
=====  =========================================================  =====
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Mapping
from typing import Any, TypeGuard

import torch
from torch import Tensor
from torch._subclasses import FakeTensor

from fusedstep._options.shared import own_option
from fusedstep._sharding.dtensor import is_dtensor, local, spread_like, spread_of
from fusedstep._sharding.units import part_of_units, shape_of_units, sizes_in_units, spread_units

#: Elements that share an absolute maximum.
BLOCKS = {"int8": 256, "int4": 128, "fp8": 256}

#: The dtypes of numbers that need not be of the weight's: lower bits of a weight are int16.
NUMBERS = {"float32": torch.float32, "int16": torch.int16}

#: What is in front of the kind of codes of a state that is never negative.
UNSIGNED = "unsigned "

#: A whole weight of fewer elements has float32 states, as in bitsandbytes.
LEAST_ELEMENTS = 4096

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
CODES = (torch.uint8, torch.float8_e4m3fn)


#: Why states do badly in int4 codes.
OF_INT4 = (
    "state_dtype='int4' may train worse than float32 states: a moment that changes little in a "
    "step rounds back to its code. 'int8' does not (docs/small_states.md)."
)


@functools.cache
def warn_of_codes(name: str, why: str) -> None:
    """Warns of states in codes, once in a process for each class and reason."""
    warnings.warn(f"{name} with {why}", stacklevel=2)


def absmax_of(name: str) -> str:
    """The name of the absolute maxima that belong to a state."""
    return f"{name}_absmax"


def can_be_coded(weight: Tensor) -> bool:
    """Returns whether the states of a weight may be in codes."""
    return weight.numel() >= LEAST_ELEMENTS and weight.dtype in _DTYPES


def asked_kind(group: Mapping[str, Any], weight: Tensor) -> str | None:
    """The kind of codes that the options of a group ask for."""
    kind = own_option(group, "state_dtype")
    return kind if isinstance(kind, str) and can_be_coded(weight) else None


def is_codes(value: Any) -> TypeGuard[Tensor]:
    """Returns whether a value is a state in codes."""
    return isinstance(value, Tensor) and value.dtype in CODES


def of_shape(weight: Tensor, shape: torch.Size | None) -> Tensor:
    """The weight where a state has its shape; else a tensor without memory that has the state's.

    Codes of a state are as those of a weight of this shape.
    """
    if shape is None or shape == weight.shape:
        return weight
    return torch.empty((), dtype=weight.dtype, device=weight.device).expand(shape)


def kind_of(codes: Tensor, weight: Tensor) -> str:
    """The kind of a state's codes."""
    if codes.dtype is torch.float8_e4m3fn:
        return "fp8"
    return "int8" if codes.shape == weight.shape else "int4"


def check_codes(name: str, codes: Tensor, absmax: Any, weight: Tensor) -> None:
    """Raises ValueError unless these are the codes of a state of the weight, and their absmax."""
    kind = kind_of(codes, weight)
    packed, blocks = (shape_of_units(weight, unit) for unit in (2, BLOCKS[kind]))
    if not (_has_shape(codes, packed, weight) if kind == "int4" else codes.shape == weight.shape):
        raise ValueError(
            f"{name} has codes of the shape {list(codes.shape)}; of a weight of the shape "
            f"{list(weight.shape)} they have {list(weight.shape)}, or {packed} (int4)"
        )
    if not isinstance(absmax, Tensor) or absmax.layout is not torch.strided:
        raise ValueError(f"the absmax of {name} must be a dense tensor, since it has codes")
    if not _has_shape(absmax, blocks, weight):
        raise ValueError(
            f"the absmax of {name} has {absmax.numel()} numbers, of the shape "
            f"{list(absmax.shape)}, but there are {math.prod(blocks)} blocks, of the shape {blocks}"
        )
    for tensor in (codes, absmax):
        if _spread(tensor)[0] != _spread(weight)[0]:
            raise ValueError(f"{name} must be a DTensor if, and only if, its weight is one")


def are_codes_of(codes: Tensor, absmax: Any, weight: Tensor) -> bool:
    """Returns whether these are the codes of a state of the weight, and their absmax."""
    try:
        check_codes("", codes, absmax, weight)
    except ValueError:
        return False
    return True


#: Elements that tell whether numbers are codes.
_TOLD_BY = 16384


def cast_codes(value: Tensor) -> str | None:
    """The kind of codes that numbers seem to be: DCP casts them to the dtype of what it loads into.

    A block has the largest code, but for a few signed ones: a part of the numbers tells, of no more
    elements than torch takes on one thread, as a child of fork() has no other.
    """
    part = local(value.detach())
    while part.numel() > _TOLD_BY:
        dim = max(range(part.dim()), key=part.size)
        part = part.narrow(dim, 0, part.size(dim) // 2)
    if not part.numel() or part.is_meta or isinstance(part, FakeTensor):
        return None
    largest = part.amax().item()
    if largest == 255 and part.amin() >= 0 and torch.equal(part.round(), part):
        return "int8"
    if largest == 448 and torch.equal(part.to(torch.float8_e4m3fn).to(part.dtype), part):
        return "fp8"
    return None


def _spread(tensor: Tensor) -> tuple[Any, ...]:
    return spread_of(tensor) if is_dtensor(tensor) else (None,)


def _has_shape(units: Tensor, shape: list[int], weight: Tensor) -> bool:
    """Returns whether units have a shape, or are the flat ones of a weight in one place."""
    return list(units.shape) == shape or (
        not is_dtensor(weight) and units.dim() == 1 and units.numel() == math.prod(shape)
    )


def in_form(units: Tensor, weight: Tensor, unit: int) -> Tensor:
    """Units in the shape that they have here, which were flat perhaps."""
    return units if is_dtensor(weight) else units.reshape(shape_of_units(weight, unit))


@torch.no_grad()
def decode(codes: Tensor, absmax: Tensor, weight: Tensor, signed: bool) -> Tensor:
    """The float32 numbers of codes, in the weight's shape."""
    codes, absmax, part = (*parts(codes, absmax, weight), local(weight))
    numbers = torch.ops.fusedstep.decode_state(
        codes.cpu().contiguous(), absmax.cpu().contiguous(), part.shape, signed
    )
    return spread_like(weight, numbers.to(part.device))


@functools.cache
def storage_index(kind: str) -> int:
    """The number of a storage, as the operator takes it."""
    return torch.ops.fusedstep.storage_index(kind)


@torch.no_grad()
def encode(numbers: Tensor, kind: str, signed: bool, step: int = 0) -> tuple[Tensor, Tensor]:
    """The codes of numbers, and their absmax: the nearest, or those that a step rounds to.

    ``step``: the number of the step of a rule that rounds by it (src/core/code_map.h), or 0.
    """
    part = local(numbers)
    codes, absmax = torch.ops.fusedstep.encode_state(
        part.detach().to("cpu", torch.float32).contiguous(), storage_index(kind), signed, step
    )
    return codes.to(part.device), absmax.to(part.device)


def new_states(weights: list[Tensor], storage: list[str]) -> list[Tensor]:
    """The same as the operator of this name, in torch operations, on any device.

    Returns zeroed states of the weights slot by slot, then the absmax of each that is in codes.
    ``storage``: of each slot ``"weight"`` for numbers of the weight's dtype, a key of ``NUMBERS``,
    or a kind of codes, after ``UNSIGNED`` if the states are never negative.
    """
    states, absmax = [], []
    two = torch.zeros(2, dtype=torch.float32, device="cpu")
    for each in storage:
        kind = each.removeprefix(UNSIGNED)
        if kind not in BLOCKS:
            states += [torch.zeros_like(weight, dtype=NUMBERS.get(kind)) for weight in weights]
            continue
        zeros = encode(two, kind, kind == each)[0].view(torch.uint8)
        for weight in weights:
            shape = sizes_in_units(weight.shape, 2) if kind == "int4" else weight.shape
            made = torch.full(shape, int(zeros[0]), dtype=torch.uint8, device=weight.device)
            states.append(made.view(torch.float8_e4m3fn) if kind == "fp8" else made)
            blocks = sizes_in_units(weight.shape, BLOCKS[kind])
            absmax.append(torch.zeros(blocks, dtype=torch.float32, device=weight.device))
    return states + absmax


def pack(codes: Tensor) -> Tensor:
    """Codes of 4 bits, two a byte."""
    pairs = torch.nn.functional.pad(codes, (0, len(codes) % 2)).view(-1, 2)
    return pairs[:, 0] << 4 | pairs[:, 1]


def parts(codes: Tensor, absmax: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """This process's part of a state in codes, as native steps take it."""
    kind = kind_of(codes, weight)
    part = part_of_units(weight, codes, 2) if kind == "int4" else local(codes)
    return part, part_of_units(weight, absmax, BLOCKS[kind])


def spread_codes(weight: Tensor, codes: Tensor, kind: str) -> Tensor:
    """Codes spread over processes as their weight is, of which this one has these."""
    return spread_units(weight, codes, 2) if kind == "int4" else spread_like(weight, codes)


def spread_absmax(weight: Tensor, absmax: Tensor, kind: str) -> Tensor:
    """The absmax of a state, spread over processes as its weight is."""
    return spread_units(weight, absmax, BLOCKS[kind])
