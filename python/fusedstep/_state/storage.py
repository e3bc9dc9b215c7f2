"""Ways to keep the float32 value of a 16-bit weight, which a step starts from and leaves.

============  ==============================================  =====================================
way           state beside the weight                         the value
============  ==============================================  =====================================
float32       ``master_param``: the value                     this, where it rounds to the weight
split         ``low_param``: its lower 16 bits, as int16      all of it, by the bits of both
kahan         ``compensation``: the last rounding error       the sum of both
stochastic    none                                            the weight
============  ==============================================  =====================================

The native library does the same with the same bits (src/core/weight_code.h).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from fusedstep._options.shared import own_option
from fusedstep._sharding.dtensor import is_dtensor, local, shard_number, spread_like

#: The state that a weight's float32 copy is.
MASTER = "master_param"

#: The lower 16 bits of a weight's value.
LOW = "low_param"

#: The states beside a weight, by way.
BESIDE = {"float32": MASTER, "split": LOW, "kahan": "compensation"}

#: Their storage, by way: as for ``codes.new_states``.
BESIDE_STORAGE = {"float32": "float32", "split": "int16", "kahan": "weight"}

SIXTEEN_BITS = (torch.bfloat16, torch.float16)

#: Options that ask for a way.
ASKED = {
    "float32": "master_weights='float32'",
    "split": "master_weights='split'",
    "kahan": "rounding='kahan'",
    "stochastic": "rounding='stochastic'",
}


def check_ways(options: Mapping[str, Any]) -> None:
    """Raises if the options of a group ask for a way that is none, or for two."""
    masters, rounding = own_option(options, "master_weights"), own_option(options, "rounding")
    if masters not in (False, True, "float32", "split"):
        raise ValueError(
            f"master_weights must be a bool, 'float32' or 'split', not {masters!r:.40}"
        )
    if rounding is not None and rounding not in ("stochastic", "kahan"):
        raise ValueError(f"rounding must be None, 'stochastic' or 'kahan', not {rounding!r:.40}")
    if masters and rounding:
        raise ValueError(
            f"master_weights={masters!r} and rounding={rounding!r} exclude each other: "
            "each keeps what a 16-bit weight cannot hold"
        )
    seed = own_option(options, "seed")
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**63:
        raise ValueError(f"seed must be an int from 0 to 2**63 - 1, not {seed!r:.40}")


def asked_way(group: dict[str, Any]) -> str | None:
    """The way that the options of a group ask for."""
    masters, rounding = own_option(group, "master_weights"), own_option(group, "rounding")
    if not (masters or rounding):
        return None
    check_ways(group)
    return rounding or (masters if isinstance(masters, str) else "float32")


def note_of(group: Mapping[str, Any]) -> str:
    """Says that options ask for the value of 16-bit weights where there are none; or no text."""
    masters, rounding = own_option(group, "master_weights"), own_option(group, "rounding")
    if not (masters or rounding) or any(p.dtype in SIXTEEN_BITS for p in group["params"]):
        return ""
    asked = f"master_weights={masters!r}" if masters else f"rounding={rounding!r}"
    return f"{asked} changes nothing, for no weight of the group has 16 bits"


def way_of(group: dict[str, Any], weight: Tensor) -> str | None:
    """The way in which a 16-bit weight keeps its value; None if in none, and for others."""
    if weight.dtype not in SIXTEEN_BITS:
        return None
    way = asked_way(group)
    if way in ("split", "stochastic") and weight.dtype is not torch.bfloat16:
        raise RuntimeError(f"{ASKED[way]} takes bfloat16 weights, but one is float16")
    return way


def has_master(group: dict[str, Any], weight: Tensor) -> bool:
    """Returns whether the step updates a float32 value, and rounds the weight from it."""
    return way_of(group, weight) is not None


def seed_of(group: dict[str, Any], weight: Tensor) -> int | None:
    """The seed by which a weight is rounded at random; None if it is not."""
    return own_option(group, "seed") if way_of(group, weight) == "stochastic" else None


def refuse_differentiable(group: dict[str, Any]) -> None:
    way = asked_way(group)
    if way not in (None, "float32"):
        raise RuntimeError(f"{ASKED[way]} does not support `differentiable`")


# Values, in operations of torch


def value_of(way: str, weight: Tensor, state: dict[str, Tensor]) -> Tensor:
    """The value of a weight, in float32."""
    if way == "stochastic":
        return weight.float()
    beside = state[BESIDE[way]]
    if way == "float32":  # the weight itself, where it has been changed since
        return torch.where(beside.to(weight.dtype) == weight, beside, weight.float())
    if way == "kahan":
        return weight.float() + beside.float()
    return spread_like(weight, _joined(local(weight), local(beside)))


def put_value(
    way: str, weight: Tensor, value: Tensor, state: dict[str, Tensor], draws: int = 0
) -> None:
    """Rounds a weight from its new value. ``draws``: the key of its random numbers."""
    if way == "float32":
        weight.copy_(value)
        state[MASTER].copy_(value)
        return
    if is_dtensor(weight):
        increment_version([weight])  # no operation of its own writes it
    weight, value = local(weight), local(value)
    if way == "stochastic":
        weight.copy_(rounded_at_random(value, draws))
        return
    beside = local(state[BESIDE[way]])
    if way == "split":
        rounded, low = _split(value)
        weight.copy_(rounded)
        beside.copy_(low)
    else:
        weight.copy_(value)
        beside.copy_(_beside(way, weight, value))


def start_beside(way: str, weight: Tensor, value: Tensor) -> Tensor:
    """The state beside a weight that gives it this value, which rounds to it."""
    return _beside(way, local(weight), local(value))


def _beside(way: str, weight: Tensor, value: Tensor) -> Tensor:
    if way == "float32":  # of a value in the middle of two weights the next that rounds to this one
        towards = torch.nextafter(value, weight.float())
        return torch.where(value.to(weight.dtype) == weight, value, towards)
    if way == "kahan":
        return torch.where(weight.isfinite(), value - weight.float(), 0.0).to(weight.dtype)
    upper = weight.detach().view(torch.int16).to(torch.int64) << 16
    low = value.view(torch.int32).to(torch.int64) - upper
    return torch.where(weight.isnan(), 0, low.clamp(-(2**15), 2**15 - 1)).to(torch.int16)


def _joined(weight: Tensor, low: Tensor) -> Tensor:
    upper, lower = (each.detach().view(torch.int16).to(torch.int32) for each in (weight, low))
    magnitude = upper & 0x7FFF
    # A weight that was changed: these would take zero across zero, or infinity to NaN.
    is_foreign = ((lower < 0) & (magnitude == 0)) | ((lower > 0) & (magnitude >= 0x7F80))
    return ((upper << 16) + torch.where(is_foreign, 0, lower)).view(torch.float32)


def _split(value: Tensor) -> tuple[Tensor, Tensor]:
    bits = torch.where(value.isnan(), 0x7FC00000, value.view(torch.int32))
    low = ((bits & 0xFFFF) ^ 0x8000) - 0x8000
    return _as_bfloat16(bits + 0x8000), low.to(torch.int16)


def _as_bfloat16(bits: Tensor) -> Tensor:
    """The upper halves of float32 numbers."""
    return (bits >> 16).to(torch.int16).view(torch.bfloat16)


# Random numbers

_64_BITS, _32_BITS = 2**64 - 1, 2**32 - 1

#: Places in a group that numbers of places of an optimizer tell apart.
PLACES = 1 << 32

#: Numbers that are made at a time.
_PIECE = 1 << 20


def _mixed(x: int) -> int:
    x = (x + 0x9E3779B97F4A7C15) & _64_BITS
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _64_BITS
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _64_BITS
    return x ^ (x >> 31)


def key_of_draws(seed: int, step: int, place: int) -> int:
    """The key from which the random numbers of a weight's step follow."""
    return _mixed((_mixed((_mixed(seed) + step) & _64_BITS) + place) & _64_BITS)


def places_of(
    groups: list[dict[str, Any]], group: dict[str, Any], weights: list[Tensor]
) -> list[int]:
    """The places of weights of a group among those of an optimizer, and of this process's shards.

    Random numbers follow from them: shards at different places have different ones.
    """
    places = zip(weights, whole_places_of(groups, group, weights), strict=True)
    return [(shard_number(p) << 48) + place for p, place in places]


def whole_places_of(
    groups: list[dict[str, Any]], group: dict[str, Any], weights: list[Tensor]
) -> list[int]:
    """The places of weights of a group among those of an optimizer: the same in all processes."""
    params = group["params"]
    index = next(i for i, each in enumerate(groups) if each["params"] is params)
    places = {id(p): i for i, p in enumerate(params)}
    return [index * PLACES + places[id(p)] for p in weights]


def random_bits(key: int, count: int, device: torch.device) -> Tensor:
    """16 random bits for each of so many elements, as int32."""
    found = torch.empty(count, dtype=torch.int32, device=device)
    for begin in range(0, count, _PIECE):
        key_of_range = _mixed((key + (begin >> 32)) & _64_BITS)
        end = min(begin + _PIECE, count)
        index = torch.arange(begin, end, dtype=torch.int64, device=device) & _32_BITS
        x = index ^ (key_of_range & _32_BITS)
        x = ((x ^ (x >> 16)) * 0x7FEB352D) & _32_BITS
        x = ((x ^ (x >> 15)) + (key_of_range >> 32)) & _32_BITS
        x = ((x ^ (x >> 13)) * 0x846CA68B) & _32_BITS
        found[begin:end] = x >> 16
    return found


def rounded_at_random(value: Tensor, key: int) -> Tensor:
    """Float32 numbers rounded to bfloat16, up with a probability of their distance from below.

    What lies between the largest number and infinity is rounded to nearest.
    """
    bits = torch.where(value.isnan(), 0x7FC00000, value.view(torch.int32))
    random = random_bits(key, value.numel(), value.device).reshape(value.shape)
    random = torch.where((bits & 0x7FFFFFFF) >= 0x7F7F0000, 0x8000, random)
    return _as_bfloat16(torch.where(value.isnan(), bits, bits + random))
