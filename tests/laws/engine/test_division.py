"""Quotients next to the middle of two floats: where a division by estimates may go astray."""

import random
from fractions import Fraction

import pytest
import torch

import fusedstep
from fusedstep import optim
from support.cuda_device import needs_cuda
from support.stepping import forced_isa

LAST = 2**24


def next_to_the_middle(below):
    """Integers a of 24 bits for which a / below is as near to the middle as can be."""
    for power in (24, 25):
        inverse = pow(2**power, -1, below)
        for residue in (inverse, below - inverse):
            for above in (residue, residue + below):
                if LAST // 2 <= above < LAST and (power == 24) == (above >= below):
                    yield above


def pairs():
    """Pairs of such integers, as tensors: over many divisors, and over the last below 2^24."""
    drawn = random.Random(0)
    divisors = {drawn.randrange(LAST // 2 + 1, LAST, 2) for _ in range(4000)}
    divisors |= set(range(LAST - 4001, LAST, 2))
    found = [(above, below) for below in sorted(divisors) for above in next_to_the_middle(below)]
    found += [(LAST // 2, below) for below in range(LAST - 4000, LAST)]
    above, below = zip(*found, strict=True)
    return torch.tensor(above, dtype=torch.float32), torch.tensor(below, dtype=torch.float32)


def test_the_pairs_are_next_to_the_middle():
    """As far from the middle of two floats as 1 / (2 below) of their distance, no further."""
    for below in (LAST - 1, LAST - 3, LAST // 2 + 1):
        for above in next_to_the_middle(below):
            quotient = Fraction(above, below)
            distance = Fraction(1, LAST // 2 if above >= below else LAST)
            in_units = quotient / distance
            assert abs(in_units - int(in_units) - Fraction(1, 2)) == Fraction(1, 2 * below)


def quotients(above, below):
    """above / below, by a step of Adagrad whose sum of squares is below^2."""
    scale = 2.0**-70  # squares of such gradients do not count
    weight = torch.nn.Parameter(torch.zeros_like(above))
    optimizer = optim.Adagrad([weight], lr=1.0, eps=0.0, fused=True)
    optimizer.state[weight] = {"step": torch.tensor(0.0), "sum": below * below}
    assert torch.equal(optimizer.state[weight]["sum"].sqrt(), below)
    weight.grad = -above * scale
    optimizer.step()
    return weight.detach().cpu() / scale


def assert_rounded(found, above, below):
    # In double the quotient is near enough: the middle is 2^-50 away.
    right = (above.double() / below.double()).float()
    wrong = (found != right).nonzero().flatten().tolist()
    assert not wrong, [(above[i].item(), below[i].item(), found[i].item()) for i in wrong[:3]]


@pytest.mark.parametrize("isa", fusedstep.isas())
def test_quotients_are_rounded_to_the_right_side(isa):
    above, below = pairs()
    with forced_isa(isa):
        assert_rounded(quotients(above, below), above, below)


@needs_cuda
def test_quotients_are_rounded_to_the_right_side_on_cuda():
    above, below = pairs()
    assert_rounded(quotients(above.cuda(), below.cuda()), above, below)
