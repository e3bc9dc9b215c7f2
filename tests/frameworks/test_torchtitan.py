"""torchtitan: its container of optimizers, and its flat checkpoints."""

import importlib
import sys

import pytest
import torch.distributed.checkpoint as dcp

from fusedstep import integrations, optim
from support.cases import PLAIN, WITH_NAMESAKE
from support.pages import ROOT, run_page
from support.small import assert_native, assert_same_losses, batches, loss_of, need, network

FOLDER = ROOT / "build" / "torchtitan"
"""Folder in which `./run.sh test` puts torchtitan."""
sys.path.append(str(FOLDER))
need("torchtitan")

NAMESAKES = [case for case in PLAIN if case in WITH_NAMESAKE]
DATA = batches(4)


@pytest.fixture(scope="module")
def titan():
    return importlib.import_module("torchtitan.components.optimizer")


class Training:
    """Trains a network with weights and biases in two groups."""

    def __init__(self, titan, cls, options, implementation="fused"):
        class Optimizers(titan.OptimizersContainer):
            @staticmethod
            def _resolve_optimizer_factory(name):
                return cls

        groups = [
            titan.ParamGroupConfig(pattern=pattern, optimizer_name="it", optimizer_kwargs=options)
            for pattern in (r"bias$", ".*")
        ]
        config = titan.OptimizersContainer.Config(
            param_groups=groups, implementation=implementation
        )
        self.model = network()
        self.optimizers = Optimizers(config, model_parts=[self.model])

    def train(self, data):
        losses = []
        for batch in data:
            loss = loss_of(self.model, batch)
            loss.backward()
            self.optimizers.step()
            self.optimizers.zero_grad()
            losses.append(loss.item())
        return losses

    def save(self, path):
        state = self.model.state_dict() | self.optimizers.state_dict()
        dcp.save(state, checkpoint_id=path, no_dist=True)

    def load(self, path):
        weights, states = self.model.state_dict(), self.optimizers.state_dict()
        state = weights | states
        dcp.load(state, checkpoint_id=path, no_dist=True)
        self.model.load_state_dict({name: state[name] for name in weights})
        self.optimizers.load_state_dict({name: state[name] for name in states})


def expected_losses(titan, case):
    cls = case.namesake or case.optimizer
    return Training(titan, cls, case.options, "for-loop").train(DATA)


@pytest.mark.parametrize("case", PLAIN, ids=str)
def test_training(titan, case):
    it = Training(titan, case.optimizer, case.options)
    losses = it.train(DATA)
    for optimizer in it.optimizers:
        assert_native(optimizer)
    assert_same_losses(losses, expected_losses(titan, case))


def exchanged(titan, case, first, second, folder):
    """Two steps with the one, two with the other."""
    begun, resumed = (Training(titan, cls, case.options | own) for cls, own in (first, second))
    losses = begun.train(DATA[:2])
    begun.save(folder)
    resumed.load(folder)
    return losses + resumed.train(DATA[2:]), resumed


@pytest.mark.parametrize("to_ours", [True, False])
@pytest.mark.parametrize("case", NAMESAKES, ids=str)
def test_checkpoints_of_torchs_and_ours_are_exchanged(titan, tmp_path, case, to_ours):
    kinds = (case.namesake, {}), (case.optimizer, {})
    losses, _ = exchanged(titan, case, *(kinds if to_ours else kinds[::-1]), tmp_path)
    assert_same_losses(losses, expected_losses(titan, case))


@pytest.mark.parametrize("options", [{}, {"master_weights": True, "max_grad_norm": 1e9}])
@pytest.mark.parametrize("case", PLAIN, ids=str)
def test_our_checkpoints_are_loaded(titan, tmp_path, case, options):
    kind = case.optimizer, options
    losses, it = exchanged(titan, case, kind, kind, tmp_path)
    assert losses == Training(titan, case.optimizer, case.options | options).train(DATA)
    for group in next(iter(it.optimizers)).param_groups:
        assert options.items() <= group.items()


def test_the_page(titan):
    names = run_page("torchtitan", model=network())
    integrations.torchtitan.unregister()
    (optimizer,) = names["optimizers"]
    assert type(optimizer) is optim.AdamW


@pytest.mark.parametrize(
    ("name", "cls"),
    [("AdamW", optim.AdamW), ("Lamb", optim.Lamb), ("AdamW8bit", optim.AdamW8bit)],
)
def test_names_select_ours_once_registered(titan, name, cls):
    def optimizers(name):
        groups = [
            titan.ParamGroupConfig(
                pattern=".*", optimizer_name=name, optimizer_kwargs={"lr": 0.1, "betas": (0.8, 0.7)}
            )
        ]
        config = titan.OptimizersContainer.Config(param_groups=groups)
        return titan.OptimizersContainer(config, model_parts=[network()])

    theirs = vars(titan.OptimizersContainer)["_resolve_optimizer_factory"].__func__
    try:
        for _ in range(2):
            integrations.torchtitan.register()
        (optimizer,) = optimizers(name)
        assert type(optimizer) is cls
        (group,) = optimizer.param_groups
        assert (group["lr"], group["betas"], group["fused"]) == (0.1, (0.8, 0.7), True)
        with pytest.raises(NotImplementedError, match="Optimizer xyz not added"):
            optimizers("xyz")
        resolve = titan.OptimizersContainer._resolve_optimizer_factory
        assert resolve("DistMuon") is theirs("DistMuon")
    finally:
        for _ in range(2):
            integrations.torchtitan.unregister()
    assert vars(titan.OptimizersContainer)["_resolve_optimizer_factory"].__func__ is theirs
    with pytest.raises(NotImplementedError):
        optimizers("Lamb")
