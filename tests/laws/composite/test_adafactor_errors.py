"""Adafactor: what its constructor, its plan and its step refuse."""

import copy

import pytest
import torch

from fusedstep import optim
from fusedstep._native import ops
from support.adafactor import steps_of
from support.stepping import (
    make_weights,
)


@pytest.mark.parametrize("variant", ["torch", "transformers"])
def test_an_lr_of_two_elements_is_an_error_that_names_it(variant):
    lr = torch.tensor([0.1, 0.2])
    (weight,) = make_weights([(4, 3)], torch.float32)
    with pytest.raises(ValueError, match="Tensor lr must be 1-element"):
        optim.Adafactor([weight], lr=lr, variant=variant)
    optimizer = steps_of([weight], 2)
    before = weight.clone()
    optimizer.param_groups[0]["lr"] = lr
    with pytest.raises(ValueError, match="Tensor lr must be 1-element"):
        optimizer.step()
    assert torch.equal(weight, before)


@pytest.mark.parametrize(
    ("role", "spoil", "text"),
    [
        (0, torch.Tensor.double, "a state of rows is float64 but has to be float32"),
        (1, lambda state: state[:2].clone(), "a number for each of the 3 columns"),
        (2, torch.Tensor.bfloat16, "a state is bfloat16 but the weight is float32"),
    ],
)
def test_a_plan_refuses_states_of_another_form(role, spoil, text):
    weight, grad = torch.ones(4, 3), torch.ones(4, 3)
    states = [torch.zeros(4), torch.zeros(3), torch.zeros(4, 3)]
    states[role] = spoil(states[role])
    plan = torch.ops.fusedstep.plan_new([weight], states, [torch.zeros(())])
    torch.ops.fusedstep.plan_roles(plan, ops.rule_index["adafactor"])
    with pytest.raises(RuntimeError, match=text):
        torch.ops.fusedstep.plan_bind(plan, [weight], [grad])
    torch.ops.fusedstep.plan_delete(plan)


@pytest.mark.parametrize(
    ("dtype", "use", "text"),
    [
        (torch.float32, 3, "leaves gradients as they are"),
        (torch.bfloat16, 0, "the first moment must be float32"),
    ],
)
def test_a_plan_refuses_what_its_step_cannot_do(dtype, use, text):
    weight, grad = (torch.ones(4, 3, dtype=dtype) for _ in range(2))
    states = [torch.zeros(4), torch.zeros(3), torch.zeros_like(weight)]
    plan = torch.ops.fusedstep.plan_new([weight], states, [torch.zeros(())])
    torch.ops.fusedstep.plan_roles(plan, ops.rule_index["adafactor"])
    torch.ops.fusedstep.plan_bind(plan, [weight], [grad])
    options = [*torch.ops.fusedstep.rule_defaults("adafactor"), 0.0]
    options[ops.rule_options["adafactor"].index("averages")] = 1.0
    with pytest.raises(RuntimeError, match=text):
        torch.ops.fusedstep.plan_prepare(plan, ops.rule_index["adafactor"], options, 1.0, use)
    torch.ops.fusedstep.plan_delete(plan)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"eps": 1e-3}, r"eps must be \(eps1, eps2\)"),
        ({"eps": (None, -1.0)}, "epsilon2 should be >= 0"),
        ({"eps": (-1.0, 1.0)}, "epsilon1 should be >= 0"),
        ({"eps": (1e-30, "1")}, r"eps\[1\] must be a number"),
        ({"beta2_decay": 0.8}, "beta2_decay"),
        ({"decay_rate": 0.8}, "beta2_decay"),
        ({"d": 0.5}, "d should be >= 1"),
        ({"clip_threshold": "1"}, "d must be a number"),
        ({"beta1": 1.0}, "beta1"),
        ({"variant": "fairseq"}, "variant"),
        ({"lr": -1.0}, "Learning rate should"),
        ({"weight_decay": -1.0}, "weight_decay"),
        ({"warmup_init": True, "relative_step": False}, "warmup_init"),
        ({"max_relative_step": -1.0}, "max_relative_step should be >= 0"),
        ({"max_relative_step": "1"}, "max_relative_step must be a number"),
        ({"max_relative_step": 0.1, "variant": "torch"}, "max_relative_step is lr"),
        ({"master_weights": "half"}, "master_weights"),
    ],
    ids=str,
)
def test_refuses_what_is_out_of_range(options, text):
    weight = torch.ones(3, 4)
    with pytest.raises((TypeError, ValueError), match=text):
        optim.Adafactor([weight], **options)
    optimizer = optim.Adafactor([weight])
    with pytest.raises((TypeError, ValueError), match=text):
        optimizer.add_param_group({"params": [torch.ones(2)], **options})
    assert len(optimizer.param_groups) == 1


def test_refuses_complex_weights_by_name():
    with pytest.raises(RuntimeError, match="complex parameters: parameter 0 of group 0"):
        optim.Adafactor([torch.ones(3, 4, dtype=torch.complex64)])


def spoil_a_state(optimizer, weight):
    optimizer.state[weight]["row_var"] = torch.zeros(3, 3, dtype=weight.dtype)


def spoil_an_option(optimizer, weight):
    optimizer.param_groups[1]["eps"] = 1e-3


def spoil_a_gradient(optimizer, weight):
    weight.grad = weight.detach()


def spoil_a_dtype(optimizer, weight):
    weight.grad = None
    weight.data = weight.data.float()
    weight.grad = torch.ones_like(weight)


@pytest.mark.parametrize(
    ("spoil", "text"),
    [
        (spoil_a_state, "parameter 0 of group 1.*row_var"),
        (spoil_an_option, "options of group 1"),
        (spoil_a_gradient, "parameter 0 of group 1.*shares memory"),
        (spoil_a_dtype, "parameter 0 of group 1.*row_var"),
    ],
)
def test_no_group_steps_if_one_cannot(spoil, text):
    first, second = make_weights([(4, 6)], torch.float32), make_weights([(5, 7)], torch.float64)
    groups = [{"params": first}, {"params": second}]
    optimizer = optim.Adafactor(groups, fused=True)
    for weight in (*first, *second):
        weight.grad = torch.ones_like(weight)
    optimizer.step()
    spoil(optimizer, second[0])
    weights = (*first, *second)
    before = [weight.clone() for weight in weights]
    states = copy.deepcopy(optimizer.state[first[0]])
    with pytest.raises((RuntimeError, TypeError), match=text):
        optimizer.step()
    assert all(map(torch.equal, weights, before))
    assert all(torch.equal(optimizer.state[first[0]][k], v) for k, v in states.items())
