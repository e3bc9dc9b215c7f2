"""What ADOPT alone does: its first step, and steps without a bound."""

import math

import pytest
import torch

from fusedstep import optim


def stepped(steps, **options):
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(65, generator=generator).requires_grad_()
    optimizer = optim.ADOPT([weight], lr=0.1, **options)
    for size in (1, 50, 1)[:steps]:  # the second is bounded by 1
        weight.grad = size * torch.randn(65, generator=generator)
        optimizer.step()
    return weight.detach(), optimizer.state[weight]


@pytest.mark.parametrize("fused", [None, False])
def test_the_first_step_leaves_the_weight(fused):
    weight, state = stepped(1, fused=fused, decoupled_weight_decay=True, weight_decay=0.5)
    before, _ = stepped(0)
    assert torch.equal(weight, before)
    assert not state["exp_avg"].any()
    assert state["exp_avg_sq"].all()


@pytest.mark.parametrize("fused", [None, False])
def test_an_infinite_exponent_sets_no_bound(fused):
    (none, _), (infinite, _), (bounded, _) = (
        stepped(3, fused=fused, clip_exp=clip_exp) for clip_exp in (None, math.inf, 0.25)
    )
    assert torch.equal(none, infinite)
    assert not torch.equal(none, bounded)
