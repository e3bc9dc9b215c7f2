"""Law: classes say what they are by data and few methods; a strategy steps their groups."""

import copy
import pickle

import pytest
import torch

from fusedstep import optim
from fusedstep._api.base import FusedOptimizer
from fusedstep._api.registry import classes
from fusedstep._step.strategy import Strategy, strategy_of

#: What classes may override of the base: formulas, and checks and forms of what they are given.
OVERRIDDEN = {
    "_formula",
    "_imperative",
    "_check",
    "_check_group",
    "_in_form",
    "_in_own_words",
    "_init_group",
    "add_param_group",
}


def methods(cls: type) -> set[str]:
    kinds = (classmethod, staticmethod, property)
    return {
        name
        for name, value in vars(cls).items()
        if isinstance(value, kinds) or (callable(value) and not isinstance(value, type))
    }


def own(bases: tuple[type, ...]) -> list[type]:
    return [cls for cls in bases if cls.__module__.startswith("fusedstep.")]


def test_classes_override_few_methods_of_the_base():
    of_base = set().union(*map(methods, own(FusedOptimizer.__mro__)))
    found = set()
    for cls in classes:
        for each in own(cls.__mro__):
            if each not in FusedOptimizer.__mro__:
                found |= {name for name in methods(each) & of_base if not name.startswith("__")}
    assert found - {"step"} == OVERRIDDEN  # torch wraps that of each class in its hooks


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
@pytest.mark.parametrize("name", ["Adam", "Adafactor", "GaLoreAdamW", "Muon"])
def test_a_copy_has_a_strategy_of_its_own(name, copied):
    weight = torch.nn.Parameter(torch.ones(4, 4))
    optimizer = getattr(optim, name)([weight])
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    other = copied(optimizer)
    assert type(strategy_of(other)) is type(strategy_of(optimizer))
    assert strategy_of(other) is not strategy_of(optimizer)
    other.step()
    optimizer.step()


def test_a_strategy_is_dropped_with_the_plans():
    optimizer = optim.Adam([torch.nn.Parameter(torch.ones(3))])
    before = strategy_of(optimizer)
    optimizer._forget_plans()
    assert isinstance(strategy_of(optimizer), Strategy)
    assert strategy_of(optimizer) is not before
