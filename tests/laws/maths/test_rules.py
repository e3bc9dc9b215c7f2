"""Law: the native rule owns names, order and defaults; Python's classes have the same."""

import itertools

import pytest
import torch

from fusedstep import optim
from fusedstep._native import ops
from support.cases import CASES, PLAIN

RULES = torch.ops.fusedstep.rules()

#: Options by which a class differs from its rule.
DIFFERENT = {"AdamW": {"weight_decay": 1e-2, "decoupled_weight_decay": True}}


def test_every_rule_has_a_class_and_every_class_a_rule():
    over_rows = optim.RowWiseAdagrad._rule, optim.Adafactor._rule
    assert {*over_rows, *(case.optimizer._rule for case in PLAIN)} == set(RULES)


@pytest.mark.parametrize("case", PLAIN, ids=str)
def test_defaults_are_those_of_the_rule(case):
    rule = case.optimizer._rule
    names = torch.ops.fusedstep.rule_options(rule)
    assert ops.rule_options[rule] == tuple(names)
    expected = dict(zip(names, torch.ops.fusedstep.rule_defaults(rule), strict=True))
    optimizer = case.optimizer([torch.zeros(3)])
    found = optimizer._options(optimizer.param_groups[0])
    assert len(found) == len(names) + 1
    differences = DIFFERENT.get(case.optimizer.__name__, {})
    assert dict(zip(names, found, strict=False)) == expected | differences
    assert found[-1] is False  # maximize


@pytest.mark.parametrize("adds_eps_first", [False, True])
def test_adam_in_all_its_forms(adds_eps_first):
    """Weights have taken other numbers of steps, and are stepped together."""
    lr, (beta1, beta2), eps, decay = 0.1, (0.8, 0.9), 0.5, 0.7
    for corrects, decays_last in itertools.product((False, True), repeat=2):

        class Form(optim.AdamW):
            _rule_values = optim.AdamW._rule_values | {
                "eps_before_bias": adds_eps_first,
                "correct_bias": corrects,
                "decay_last": decays_last,
            }

        torch.manual_seed(0)
        weights = [torch.randn(9, dtype=torch.float64) for _ in range(2)]
        expected = [weight.clone() for weight in weights]
        moments = [[torch.zeros_like(weight) for _ in range(2)] for weight in weights]
        optimizer = Form(weights, lr, (beta1, beta2), eps, decay, fused=True)
        for step in range(4):
            for i, weight in enumerate(weights[: 1 + (step > 1)]):
                weight.grad = grad = torch.randn_like(weight)
                count, (m, v) = step + 1 - 2 * i, moments[i]
                m.lerp_(grad, 1 - beta1)
                v.lerp_(grad**2, 1 - beta2)
                bias1 = 1 - beta1**count if corrects else 1.0
                root2 = (1 - beta2**count) ** 0.5 if corrects else 1.0
                added = eps / root2 if adds_eps_first else eps
                move, keep = lr / bias1 * m / (v.sqrt() / root2 + added), 1 - lr * decay
                last = keep if decays_last else 1.0
                expected[i] = keep * expected[i] - last * move
            optimizer.step()
        for found, value in zip(weights, expected, strict=True):
            torch.testing.assert_close(found, value, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_states_are_those_of_the_rule_in_its_order(case):
    states = torch.ops.fusedstep.rule_states(case.optimizer._rule)
    assert case.optimizer._states == tuple(states)
    assert [name for name in states if name in case.states] == list(case.states)


@pytest.mark.parametrize("function", ["rule_options", "rule_defaults", "rule_states"])
def test_an_unknown_rule_is_named(function):
    with pytest.raises(RuntimeError, match='there is no rule "adem"'):
        getattr(torch.ops.fusedstep, function)("adem")


@pytest.mark.parametrize("index", [-1, len(RULES)])
def test_a_number_of_no_rule_is_named(index):
    with pytest.raises(RuntimeError, match=f"there is no rule of the number {index}"):
        torch.ops.fusedstep.plan_prepare(0, index, [], 1.0, 0)


#: Operators that are asked about the library, choose its code, or make states: none is called in a
#: step, where torch 2.11 would leak memory for each text.
WITH_TEXTS = {
    *("rule_index", "rule_options", "rule_defaults", "rule_states", "rule_signed_states"),
    *("storage_index", "new_states", "force_isa"),
}


def test_no_operator_of_a_step_takes_a_text():
    found = set()
    for schema in torch._C._jit_get_all_schemas():
        space, _, name = schema.name.partition("::")
        if space == "fusedstep" and any("str" in str(each.type) for each in schema.arguments):
            found.add(name)
    assert found - {"options"} == WITH_TEXTS  # one of Python's, for compiled graphs
