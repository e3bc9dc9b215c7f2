"""Codes of 8 and 4 bits by plain torch: maps as the papers and libraries define them."""

import torch
from torch import Tensor


def dynamic_map(signed: bool, exponents: int, bits: int) -> Tensor:
    """The values of a dynamic map in the order of their codes, as bitsandbytes makes them."""
    values = [0.0, 1.0]
    for i in range(exponents):
        parts = 2 ** (i + bits - 1 - exponents + (not signed))
        edges = torch.linspace(0.1, 1, parts + 1, dtype=torch.float64)
        middles = (edges[:-1] + edges[1:]) / 2 * 10.0 ** (i - exponents + 1)
        values += middles.tolist()
        values += (-middles).tolist() if signed else []
    return torch.tensor(sorted(values), dtype=torch.float64)


#: By kind, and whether the state may be negative: values of the codes, and the length of a block.
MAPS = {
    ("int8", True): (dynamic_map(True, 7, 8), 256),
    ("int8", False): (dynamic_map(False, 7, 8), 256),
    ("int4", True): (dynamic_map(True, 3, 4), 128),
    ("int4", False): (torch.arange(1, 17, dtype=torch.float64) / 16, 128),
    ("fp8", True): (
        torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double() / 448,
        256,
    ),
}
MAPS["fp8", False] = MAPS["fp8", True]


#: States that no rule makes negative.
NOT_NEGATIVE = {
    "exp_avg_sq", "max_exp_avg_sq", "sum", "square_avg", "acc_delta", "exp_inf", "step_size",
    "second_momentum_buffer",
}  # fmt: skip


#: The least level of a positive number in a step, by kind, where the state is never negative.
STEP_FLOORS = {"int8": 15, "fp8": 8}


def rounds_by_step(names) -> bool:
    """Whether steps of a rule with a count and these states round codes by their number."""
    return not NOT_NEGATIVE.isdisjoint(names)


def rounding_of_step(step: int) -> float:
    """What step number ``step`` adds to exact levels before it cuts them off; 0: to nearest."""
    golden_ratio = 0x9E3779B9  # times 2**32, less one
    found = (max(step - 1, 0) * golden_ratio + 2**31) % 2**32 >> 16
    return min(max(found, 16), 2**16 - 16) / 2**16


def around(shares: Tensor, kind: str, signed: bool) -> tuple[Tensor, Tensor]:
    """The values of the codes that float64 shares lie between: the one nearer to zero first."""
    of_code = MAPS[kind, signed][0]
    of_code = of_code[~of_code.isnan()].unique()
    above = torch.searchsorted(of_code, shares.contiguous()).clamp(1, len(of_code) - 1)
    low, high = of_code[above - 1], of_code[above]
    return torch.where(shares < 0, high, low), torch.where(shares < 0, low, high)


def turning_points(low: Tensor, high: Tensor, kind: str, step: int) -> Tensor:
    """The shares beyond which a step, or 0, rounds to the value that is further from zero."""
    rounding = torch.full_like(low, 0.5 if kind == "int4" else rounding_of_step(step))
    if kind == "int8":  # between zero and the first level it is the middle at every step
        rounding[low == 0] = 0.5
    return high - rounding * (high - low)


def rounded(shares: Tensor, kind: str, signed: bool, step: int) -> tuple[Tensor, Tensor]:
    """The values that a step, or 0, rounds float64 shares to, and where these are sure.

    Sums in float32 decide close to the turning points.
    """
    low, high = around(shares, kind, signed)
    turn = turning_points(low, high, kind, step)
    found = torch.where(shares.abs() > turn.abs(), high, low)
    of_code = MAPS[kind, signed][0].nan_to_num(-1.0).unique()
    if not signed and kind != "int4":
        least = of_code[of_code >= 0][STEP_FLOORS[kind] if step else 1]
        found = torch.where(shares > 0, found.clamp(min=least), found)
    elif signed and kind == "int8":  # nothing negative becomes zero
        found = torch.where(shares < 0, found.clamp(max=of_code[of_code < 0].max()), found)
    return found, (shares - turn).abs() > 1e-6 * shares.abs() + 2e-4 * (high - low).abs()


def bitsandbytes_map(signed: bool) -> Tensor:
    """The values of the int8 map as bitsandbytes computes them, each step in float32."""
    values = [0.0, 1.0]
    for i in range(7):
        edges = torch.linspace(0.1, 1, 2 ** (i + (not signed)) + 1, dtype=torch.float32)
        middles = 10.0 ** (i - 6) * ((edges[:-1] + edges[1:]) / 2)
        values += middles.tolist() + ((-middles).tolist() if signed else [])
    return torch.tensor(sorted(values), dtype=torch.float32)


def bitsandbytes_codes(shares: Tensor, signed: bool) -> Tensor:
    """The codes of float32 shares in bitsandbytes' optimizers on a GPU.

    A bisection ends at an even code. A share beyond the middle, in float32, between it and its
    neighbour gets the neighbour's code. A code of another sign than the share moves by one.
    """
    of_code = bitsandbytes_map(signed)
    at = torch.full(shares.shape, 127)
    for step in (64, 32, 16, 8, 4, 2, 1):
        at += torch.where(shares > of_code[at], step, -step)
    above = shares > of_code[at]
    neighbour = (at + torch.where(above, 1, -1)).clamp(min=0)
    middle = (of_code[at] + of_code[neighbour]) * 0.5
    code = torch.where(torch.where(above, shares > middle, shares < middle), neighbour, at)
    wrong = (of_code[code].signbit() != shares.signbit()) & signed
    return code + wrong * torch.where(shares > 0, 1, -1)


def values(codes: Tensor, absmax: Tensor, kind: str, signed: bool, shape) -> Tensor:
    """The numbers that codes stand for, in float64."""
    of_code, block = MAPS[kind, signed]
    flat = codes.view(torch.uint8).flatten().long()
    if kind == "int4":
        flat = torch.stack([flat >> 4, flat & 15], 1).flatten()
    n = torch.Size(shape).numel()
    return (of_code[flat[:n]] * absmax.double().repeat_interleave(block)[:n]).reshape(shape)


def nearest(numbers: Tensor, kind: str, signed: bool) -> tuple[Tensor, Tensor]:
    """The distance of each number to the nearest value of a code, and the absmax of each block."""
    of_code, block = MAPS[kind, signed]
    of_code = of_code[~of_code.isnan()]
    flat = numbers.double().flatten()
    blocks = torch.nn.functional.pad(flat, (0, -len(flat) % block)).view(-1, block)
    absmax = blocks.abs().amax(1)
    near = (blocks[..., None] - of_code * absmax[:, None, None]).abs().amin(-1)
    return near.flatten()[: len(flat)].reshape(numbers.shape), absmax
