"""torch.distributed.checkpoint, by names, as torchtitan saves: torch's class and ours continue."""

import copy
import pickle

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from support.cases import PLAIN, WITH_NAMESAKE
from support.composites import ROWS
from support.small import assert_same_losses, batches, loss_of, network, ours, reference

DATA = batches(6)


class Training:
    """Of a network whose biases are a group of their own."""

    def __init__(self, kind, is_flat):
        cls, options = kind
        self.model = network()
        named = dict(self.model.named_parameters())
        biases = {name: named.pop(name) for name in list(named) if name.endswith("bias")}
        groups = [{"params": [*each.values()]} for each in (named, biases)]
        groups[1]["lr"] = 0.5 * options.get("lr", 1e-2)
        self.optimizer = cls(groups, **options)
        self.options = StateDictOptions(flatten_optimizer_state_dict=is_flat)

    def train(self, data):
        losses = []
        for batch in data:
            loss = loss_of(self.model, batch)
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    def states(self):
        return get_optimizer_state_dict(self.model, self.optimizer, options=self.options)

    def save(self, folder):
        state = {"model": self.model.state_dict(), "optimizer": self.states()}
        dcp.save(state, checkpoint_id=folder, no_dist=True)

    def load(self, folder):
        state = {"model": self.model.state_dict(), "optimizer": self.states()}
        dcp.load(state, checkpoint_id=folder, no_dist=True)
        self.model.load_state_dict(state["model"])
        set_optimizer_state_dict(
            self.model, self.optimizer, state["optimizer"], options=self.options
        )


@pytest.mark.parametrize("is_flat", [True, False], ids=["flat", "nested"])
@pytest.mark.parametrize("to_ours", [True, False], ids=["to ours", "to torch's"])
@pytest.mark.parametrize("case", [each for each in PLAIN if each in WITH_NAMESAKE], ids=str)
def test_three_more_steps_by_the_other_class(case, to_ours, is_flat, tmp_path):
    kinds = [reference(case), ours(case)]
    begun, other = kinds if to_ours else kinds[::-1]
    first, resumed = Training(begun, is_flat), Training(other, is_flat)
    first.train(DATA[:3])
    first.save(tmp_path)
    resumed.load(tmp_path)
    rates = [[group["lr"] for group in each.optimizer.param_groups] for each in (first, resumed)]
    assert rates[0] == rates[1]
    assert_same_losses(resumed.train(DATA[3:]), first.train(DATA[3:]))


@pytest.mark.parametrize("row", [*PLAIN, *ROWS], ids=str)
def test_loading_leaves_a_group_its_options(row):
    """A checkpoint is read by them: one of a run that went on from another has the same."""
    optimizer = row.build([torch.nn.Parameter(torch.ones(12, 8))])
    (group,) = optimizer.param_groups
    for name, unset in type(optimizer)._own_options.items():
        group.setdefault(name, unset)
    names = group.keys()
    optimizer.load_state_dict(optimizer.state_dict())
    for each in (optimizer, copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert each.param_groups[0].keys() == names
