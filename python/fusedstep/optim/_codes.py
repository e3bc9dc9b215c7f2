"""States in codes of 8 or 4 bits: which there are, and numbers of them.

A state ``name`` in codes is two tensors: the codes under its own name, and the absolute maximum of
each block of them, float32, under ``name_absmax``. Blocks follow the weight's elements by rows and
columns, whatever its layout.

=====  ==================================================================  =====
kind   codes                                                               block
=====  ==================================================================  =====
int8   uint8, in the weight's shape                                        256
int4   uint8, two a byte, the first in the upper half: ``ceil(n / 2)``     128
fp8    float8_e4m3fn, in the weight's shape                                256
=====  ==================================================================  =====
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fusedstep.optim._dtensor import local, spread_like
from fusedstep.optim._options import own_option

#: Elements that share an absolute maximum.
BLOCKS = {"int8": 256, "int4": 128, "fp8": 256}

#: A whole weight of fewer elements has float32 states, as in bitsandbytes.
LEAST_ELEMENTS = 4096

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
CODES = (torch.uint8, torch.float8_e4m3fn)


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


def is_codes(value: Any) -> bool:
    """Returns whether a value is a state in codes."""
    return isinstance(value, Tensor) and value.dtype in CODES


def kind_of(codes: Tensor, weight: Tensor) -> str:
    """The kind of a state's codes."""
    if codes.dtype is torch.float8_e4m3fn:
        return "fp8"
    return "int8" if codes.shape == weight.shape else "int4"


def check_codes(name: str, codes: Tensor, absmax: Any, weight: Tensor) -> None:
    """Raises ValueError unless these are the codes of a state of the weight, and their absmax.

    Of a weight that is spread over processes the codes are those of this process's part.
    """
    codes, weight = local(codes), local(weight)
    kind, elements = kind_of(codes, weight), weight.numel()
    shape = [-(-elements // 2)] if kind == "int4" else list(weight.shape)
    if list(codes.shape) != shape:
        raise ValueError(
            f"{name} has codes of the shape {list(codes.shape)}; of a weight of the shape "
            f"{list(weight.shape)} they have {list(weight.shape)}, or [{-(-elements // 2)}] (int4)"
        )
    blocks = -(-elements // BLOCKS[kind])
    if not isinstance(absmax, Tensor) or absmax.layout is not torch.strided:
        raise ValueError(f"the absmax of {name} must be a dense tensor, since it has codes")
    if absmax.numel() != blocks:
        raise ValueError(
            f"the absmax of {name} has {absmax.numel()} numbers, but there are {blocks} blocks"
        )


@torch.no_grad()
def decode(codes: Tensor, absmax: Tensor, weight: Tensor, signed: bool) -> Tensor:
    """The float32 numbers of codes, in the weight's shape."""
    codes, absmax, part = local(codes), local(absmax), local(weight)
    numbers = torch.ops.fusedstep.decode_state(
        codes.cpu().contiguous(), absmax.cpu().contiguous(), part.shape, signed
    )
    return spread_like(weight, numbers.to(part.device))


@torch.no_grad()
def encode(numbers: Tensor, kind: str, signed: bool) -> tuple[Tensor, Tensor]:
    """The codes of numbers, and their absmax."""
    part = local(numbers)
    codes, absmax = torch.ops.fusedstep.encode_state(
        part.detach().to("cpu", torch.float32).contiguous(), kind, signed
    )
    return codes.to(part.device), absmax.to(part.device)


def new_codes(weights: list[Tensor], kind: str, signed: list[bool]) -> list[Tensor]:
    """The same as the operator of this name, in torch operations, on any device."""
    codes, absmax = [], []
    for is_signed in signed:
        zeros = encode(torch.zeros(2), kind, is_signed)[0].view(torch.uint8)
        for weight in weights:
            n = weight.numel()
            shape = (-(-n // 2),) if kind == "int4" else weight.shape
            made = torch.full(shape, int(zeros[0]), dtype=torch.uint8, device=weight.device)
            codes.append(made.view(torch.float8_e4m3fn) if kind == "fp8" else made)
            absmax.append(torch.zeros(-(-n // BLOCKS[kind]), device=weight.device))
    return codes + absmax


def pack(codes: Tensor) -> Tensor:
    """Codes of 4 bits, two a byte."""
    pairs = torch.nn.functional.pad(codes, (0, len(codes) % 2)).view(-1, 2)
    return pairs[:, 0] << 4 | pairs[:, 1]


def spread_codes(weight: Tensor, codes: Tensor) -> Tensor:
    """Codes spread over processes as their weight is, where they have its shape."""
    return spread_like(weight, codes) if codes.shape == local(weight).shape else codes
