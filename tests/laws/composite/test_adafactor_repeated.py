"""Adafactor: steps that repeat the last one see what has changed."""

import pytest
import torch

from fusedstep import optim
from fusedstep._factored.strategy import FactoredSteps
from fusedstep._native import ops
from support.adafactor import SHAPES, steps_of
from support.stepping import (
    make_gradients,
    make_weights,
)

CHANGES = {
    "nothing": lambda optimizer, weights: None,
    "lr": lambda optimizer, weights: optimizer.param_groups[0].update(lr=0.5),
    "weight_decay": lambda optimizer, weights: optimizer.param_groups[1].update(weight_decay=0.3),
    "relative_step": lambda optimizer, weights: optimizer.param_groups[0].update(
        relative_step=False
    ),
    "eps": lambda optimizer, weights: optimizer.param_groups[0].update(eps=(0.3, 2.0)),
    "fused": lambda optimizer, weights: optimizer.param_groups[0].update(fused=False),
    "no gradient": lambda optimizer, weights: setattr(weights[1], "grad", None),
    "a count": lambda optimizer, weights: optimizer.state[weights[0]]["step"].add_(5),
    "all counts": lambda optimizer, weights: [
        optimizer.state[weight]["step"].data.add_(5) for weight in weights
    ],
    "a state": lambda optimizer, weights: optimizer.state[weights[0]].update(
        row_var=optimizer.state[weights[0]]["row_var"] * 2
    ),
    "no state": lambda optimizer, weights: optimizer.state.pop(weights[0]),
    "memory": lambda optimizer, weights: setattr(
        weights[0], "data", weights[0].t().contiguous().t()
    ),
    "strides": lambda optimizer, weights: setattr(
        weights[0], "data", weights[0].data.as_strided(weights[0].shape, (1, len(weights[0])))
    ),
    "order": lambda optimizer, weights: optimizer.param_groups[0]["params"].reverse(),
    "less weights": lambda optimizer, weights: optimizer.state.pop(
        optimizer.param_groups[0]["params"].pop()
    ),
    "zeros": lambda optimizer, weights: setattr(
        weights[0], "grad", torch._efficientzerotensor(weights[0].shape)
    ),
    "negated": lambda optimizer, weights: setattr(
        weights[0], "grad", torch.complex(weights[0].grad, weights[0].grad).conj().imag
    ),
}


class StepsWithoutPlans(FactoredSteps):
    def is_native(self, *operands):
        super().is_native(*operands)
        return False


class WithoutPlans(optim.Adafactor):
    """Steps on the CPU by the operator that steps weights on a device."""

    _strategy_class = StepsWithoutPlans


@pytest.mark.parametrize("cls", [optim.Adafactor, WithoutPlans])
@pytest.mark.parametrize("change", CHANGES)
def test_steps_alike_see_what_has_changed(change, cls):
    """A step repeats the last one, or is bound from the start: with the same bits."""
    kept = []
    for repeats in (True, False):
        weights = make_weights(SHAPES, torch.float32)
        groups = [{"params": weights[:4]}, {"params": weights[4:], "weight_decay": 0.1}]
        optimizer = cls(groups)
        for step in range(5):
            for weight, grad in zip(
                weights, make_gradients(SHAPES, torch.float32, step), strict=True
            ):
                if weight.grad is None or step == 4:  # after a change of gradients
                    weight.grad = grad
                weight.grad.copy_(grad)
            if step == 3:
                CHANGES[change](optimizer, weights)
            if step == 3 and cls is WithoutPlans:
                assert optimizer._memory[weights[0]].derived
            elif step == 3 and ops.bind:
                assert optimizer._last_step
            if not repeats:
                optimizer._forget_plans()
            version = weights[2]._version
            optimizer.step()
            assert weights[2]._version > version
        kept.append((weights, optimizer.state_dict()["state"]))
    (weights, states), (others, other_states) = kept
    assert all(map(torch.equal, weights, others))
    for key, state in states.items():
        assert all(torch.equal(value, other_states[key][name]) for name, value in state.items())


@pytest.mark.parametrize("lr", [1e-2, torch.tensor(1e-2)], ids=["a number", "a tensor"])
def test_parts_of_a_step_are_made_once(lr):
    weights = make_weights(SHAPES, torch.float32)
    for weight, grad in zip(weights, make_gradients(SHAPES, torch.float32, 0), strict=True):
        weight.grad = grad
    optimizer = WithoutPlans(weights, lr=lr)
    optimizer.step()
    parts = optimizer._memory[weights[0]].derived
    optimizer.step()
    assert optimizer._memory[weights[0]].derived is parts


def test_an_lr_that_changes_in_place_is_checked_at_each_step():
    weight, lr = torch.ones(3, 4), torch.tensor(1e-2)
    weight.grad = torch.ones(3, 4)
    optimizer = WithoutPlans([weight], lr=lr)
    for _ in range(2):
        optimizer.step()
    before = weight.clone()
    lr.fill_(torch.nan)
    with pytest.raises(ValueError, match=r"Invalid options of group 0.*Learning rate"):
        optimizer.step()
    assert torch.equal(weight, before)


def test_an_lr_below_0_is_an_error_of_a_repeated_step_too():
    weights = make_weights(SHAPES, torch.float32)
    optimizer = steps_of(weights, 3)
    before = [weight.clone() for weight in weights]
    optimizer.param_groups[0]["lr"] = -0.5
    with pytest.raises(ValueError, match=r"Learning rate should be >= 0 but is: -0\.5"):
        optimizer.step()
    assert all(map(torch.equal, weights, before))
