"""Law: the native rule owns names, order and defaults; Python's classes have the same."""

import pytest
import torch

from fusedstep import optim
from fusedstep._native import ops
from support.cases import CASES, PLAIN

RULES = torch.ops.fusedstep.rules()

#: Options by which a class differs from its rule.
DIFFERENT = {"AdamW": {"weight_decay": 1e-2, "decoupled_weight_decay": True}}


def test_every_rule_has_a_class_and_every_class_a_rule():
    over_rows = optim.RowWiseAdagrad._rule
    assert {over_rows, *(case.optimizer._rule for case in PLAIN)} == set(RULES)


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
    *("storage_index", "new_codes", "force_isa"),
}


def test_no_operator_of_a_step_takes_a_text():
    found = set()
    for schema in torch._C._jit_get_all_schemas():
        space, _, name = schema.name.partition("::")
        if space == "fusedstep" and any("str" in str(each.type) for each in schema.arguments):
            found.add(name)
    assert found - {"options"} == WITH_TEXTS  # one of Python's, for compiled graphs
