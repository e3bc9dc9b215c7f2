"""Law: int8 rounds shares as bitsandbytes' optimizers do on a GPU, but for 2 ulp around a border.

A share is a number divided by its block's absmax. The reference has bitsandbytes' search. Here a
positive share of a state that is never negative does not become zero, and a step gives it no code
below the 15th. First steps round to nearest.
"""

import functools

import pytest
import torch

import fusedstep
from fusedstep import optim
from fusedstep._state.codes import storage_index
from reference.codes import MAPS, STEP_FLOORS, bitsandbytes_codes, bitsandbytes_map
from support.cuda_device import needs_cuda
from support.stepping import as_parameters, forced_isa

BLOCK = 256

#: Borders of the two libraries are at most so many float32 numbers apart. A tie is a border too:
#: bitsandbytes gives it to the even code, and sums in float32 decide here.
APART = 2

#: Float32 numbers on each side of a border, all of which are tried.
NEAR = 64

#: The maps, each with an optimizer whose first step makes the state of the gradient's magnitudes:
#: the name of the state, and what builds the optimizer.
STATES = {
    True: (
        "momentum_buffer",
        lambda params: optim.SGD(params, 0.125, momentum=0.5, state_dtype="int8"),
    ),
    False: ("exp_inf", lambda params: optim.Adamax(params, 0.125, eps=0.0, state_dtype="int8")),
}
SIGNED = pytest.mark.parametrize("signed", STATES, ids=["signed", "unsigned"])


def in_blocks(shares):
    """The shares in blocks that have the absmax one."""
    rows = torch.nn.functional.pad(shares, (0, -len(shares) % (BLOCK - 1))).view(-1, BLOCK - 1)
    return torch.nn.functional.pad(rows, (1, 0), value=1.0)


def out_of_blocks(codes, count):
    return codes.view(-1, BLOCK)[:, 1:].flatten()[:count].long()


def encoded(shares, signed):
    codes, absmax = torch.ops.fusedstep.encode_state(
        in_blocks(shares).flatten(), storage_index("int8"), signed
    )
    assert torch.all(absmax == 1)
    return out_of_blocks(codes, len(shares))


def stepped(shares, signed, device="cpu"):
    """The codes of a state after a step that makes the shares its numbers."""
    name, build = STATES[signed]
    gradient = in_blocks(shares)
    params = as_parameters([torch.zeros(gradient.shape, device=device)])
    params[0].grad = gradient.to(device)
    optimizer = build(params)
    optimizer.step()
    state = optimizer.state[params[0]]
    assert torch.all(state[f"{name}_absmax"] == 1)
    return out_of_blocks(state[name].cpu(), len(shares))


def borders(signed):
    values = bitsandbytes_map(signed)
    return (values[1:] + values[:-1]) * 0.5


def near_borders(signed):
    """All float32 shares near borders, and how many numbers each is away from its border."""
    away = torch.arange(-NEAR, NEAR + 1, dtype=torch.int32)
    shares = (borders(signed).view(torch.int32)[:, None] + away).view(torch.float32)
    return shares.flatten(), away.abs().expand(shares.shape).flatten()


def elsewhere(signed):
    """Random shares of every size, the values of the codes, and zero."""
    generator = torch.Generator().manual_seed(0)
    halves = [torch.rand(500_000, generator=generator) for _ in range(2)]
    shares = torch.cat([halves[0], 10 ** (-8 * halves[1])])
    if signed:
        shares *= torch.where(torch.rand(len(shares), generator=generator) < 0.5, -1, 1)
    return torch.cat([shares, bitsandbytes_map(signed), MAPS["int8", signed][0].float()])


def expected_codes(shares, signed, floor=1):
    codes = bitsandbytes_codes(shares, signed)
    return codes if signed else torch.maximum(codes, floor * (shares > 0).long())


def assert_codes_of_bitsandbytes(codes_of, signed, floor):
    shares, away = near_borders(signed)
    differ = codes_of(shares, signed) != expected_codes(shares, signed, floor)
    assert not torch.any(differ & (away > APART))
    shares = elsewhere(signed)
    differ = codes_of(shares, signed) != expected_codes(shares, signed, floor)
    bits, of_borders = shares.view(torch.int32).long(), borders(signed).view(torch.int32).long()
    away = torch.stack([(bits[differ] - border).abs() for border in of_borders]).amin(0)
    assert torch.all(away <= APART)


@SIGNED
@pytest.mark.parametrize("isa", fusedstep.isas())
@pytest.mark.parametrize(("codes_of", "floor"), [(encoded, 1), (stepped, STEP_FLOORS["int8"])])
def test_codes_are_those_of_bitsandbytes(codes_of, floor, isa, signed):
    with forced_isa(isa):
        assert_codes_of_bitsandbytes(codes_of, signed, floor)


@SIGNED
@needs_cuda
def test_codes_are_those_of_bitsandbytes_on_cuda(signed):
    codes_of = functools.partial(stepped, device="cuda")
    assert_codes_of_bitsandbytes(codes_of, signed, STEP_FLOORS["int8"])


@SIGNED
@pytest.mark.parametrize("codes_of", [encoded, stepped])
def test_minus_zero_is_zero(codes_of, signed):
    """bitsandbytes looks at the sign alone, and gives it the smallest negative number."""
    shares = torch.cat([torch.tensor([-0.0, 0.0]), elsewhere(signed)[:5000]])
    assert codes_of(shares, signed)[:2].tolist() == [127 * signed] * 2
    assert bitsandbytes_codes(shares, signed)[:2].tolist() == [126 * signed, 127 * signed]


@SIGNED
def test_the_bound_is_tight(signed):
    """Some share as far from a border as the bound says has another code."""
    shares, away = near_borders(signed)
    differ = encoded(shares, signed) != expected_codes(shares, signed)
    assert away[differ].max() == APART


@SIGNED
def test_the_search_finds_the_nearest_code(signed):
    """The reference's search, by distances to the codes. No negative share becomes zero."""
    shares = elsewhere(signed)
    values = bitsandbytes_map(signed).double()
    codes = bitsandbytes_codes(shares, signed)
    for part, code in zip(shares.double().split(10_000), codes.split(10_000), strict=True):
        distances = (part[:, None] - values).abs()
        nearest = distances.amin(1)
        found = distances.gather(1, code[:, None])[:, 0]
        allowed = torch.where((part < 0) & (code == 126), 0.55e-6, 2e-7 * part.abs())
        assert torch.all(found <= nearest + allowed)
