"""Megatron-Core: its configuration's "adam" and "sgd" make optimizers of this package.

Its selection is here as a stub, since the package is large; training_by_megatron.py steps with
Megatron-Core itself.
"""

import importlib.util
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch

from fusedstep import integrations, optim
from support.pages import ROOT, run_page
from support.stepping import as_parameters, make_gradients, make_weights

FOLDER = ROOT / "build" / "megatron"
"""Folder in which `./run.sh test` puts Megatron-Core."""
sys.path.append(str(FOLDER))

SHAPES = ((33, 31), (40,))


class Config(types.SimpleNamespace):
    def __init__(self, **options):
        defaults = {
            "optimizer": "adam", "lr": 1e-2, "weight_decay": 0.1, "adam_beta1": 0.8,
            "adam_beta2": 0.9, "adam_eps": 1e-6, "sgd_momentum": 0.9, "bias_correction": True,
            "decoupled_weight_decay": True, "precision_aware": False,
        }  # fmt: skip
        super().__init__(**defaults | options)


def stub(*, has_te):
    """The names in megatron.core.optimizer that it selects by, and its selection."""
    core = types.ModuleType("megatron.core.optimizer")
    distrib = types.ModuleType("megatron.core.optimizer.distrib_optimizer")
    core.Adam = distrib.Adam = torch.optim.AdamW  # or Transformer Engine's
    core.SGD = core.CPUSGD = torch.optim.SGD
    core.CPUAdam, core.USING_PYTORCH_OPTIMIZER = torch.optim.AdamW, not has_te

    def selected(config, params):
        if config.optimizer == "sgd":
            return core.SGD(
                params, lr=config.lr, weight_decay=config.weight_decay, momentum=config.sgd_momentum
            )
        options = {
            "params": params,
            "lr": config.lr,
            "weight_decay": config.weight_decay,
            "betas": (config.adam_beta1, config.adam_beta2),
            "eps": config.adam_eps,
        }
        if core.USING_PYTORCH_OPTIMIZER:
            adam = torch.optim.AdamW if config.decoupled_weight_decay else torch.optim.Adam
        else:
            options["adam_w_mode"], adam = config.decoupled_weight_decay, core.Adam
        if config.precision_aware:
            options |= {"exp_avg_dtype": torch.bfloat16, "exp_avg_sq_dtype": torch.bfloat16}
        optimizer = adam(**options)
        assert isinstance(optimizer, (distrib.Adam, torch.optim.AdamW))  # the distributed one's
        return optimizer

    class DistributedOptimizer:
        state_dict = _set_main_param_and_optimizer_states = None
        load_parameter_state_from_dp_reshardable = None

    distrib.DistributedOptimizer = DistributedOptimizer
    core.OptimizerConfig, core.get_megatron_optimizer = Config, selected
    core.distrib_optimizer = distrib
    return core


@pytest.fixture(params=[False, True], ids=["torch", "Transformer Engine"])
def core(request, monkeypatch):
    core = stub(has_te=request.param)
    root, parent = types.ModuleType("megatron"), types.ModuleType("megatron.core")
    root.core, parent.optimizer = parent, core
    for module in (root, parent, core, core.distrib_optimizer):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    before = dict(vars(core))
    integrations.megatron.register()
    integrations.megatron.register()
    yield core
    integrations.megatron.unregister()
    assert vars(core) == before
    assert core.distrib_optimizer.Adam is torch.optim.AdamW


def step(optimizer, params, number):
    for param, grad in zip(params, make_gradients(SHAPES, torch.float32, number), strict=True):
        param.grad = grad
    optimizer.step()


@pytest.mark.parametrize("decoupled", [True, False])
def test_adam_is_ours_with_megatrons_numbers(core, decoupled):
    params, twins = (as_parameters(make_weights(SHAPES, torch.float32)) for _ in range(2))
    config = Config(decoupled_weight_decay=decoupled)
    optimizer = core.get_megatron_optimizer(config, params)
    assert isinstance(optimizer, optim.Adam)
    cls = optim.AdamW if decoupled else optim.Adam
    twin = cls(twins, lr=1e-2, weight_decay=0.1, betas=(0.8, 0.9), eps=1e-6)
    for number in range(3):
        step(optimizer, params, number)
        step(twin, twins, number)
    assert all(map(torch.equal, params, twins))
    assert optimizer._plans, "stepped in torch operations"


def test_sgd_is_ours_with_megatrons_numbers(core):
    params = as_parameters(make_weights(SHAPES, torch.float32))
    optimizer = core.get_megatron_optimizer(Config(optimizer="sgd"), params)
    assert type(optimizer) is optim.SGD
    group = optimizer.param_groups[0]
    assert (group["lr"], group["momentum"], group["weight_decay"]) == (1e-2, 0.9, 0.1)


def test_checkpoints_count_steps_in_groups_as_the_distributed_optimizers_do(core):
    params, others = (as_parameters(make_weights(SHAPES, torch.float32)) for _ in range(2))
    optimizer, loaded = (
        core.get_megatron_optimizer(Config(), params),
        core.get_megatron_optimizer(Config(), others),
    )
    for number in range(3):
        step(optimizer, params, number)
    saved = optimizer.state_dict()
    assert [group["step"] for group in saved["param_groups"]] == [3]
    moments = {  # it makes states of these alone
        key: {name: state[name].clone() for name in ("exp_avg", "exp_avg_sq")}
        for key, state in saved["state"].items()
    }
    loaded.load_state_dict(saved | {"state": moments})
    for param, other in zip(params, others, strict=True):
        other.data.copy_(param.data)
    step(optimizer, params, 3)
    step(loaded, others, 3)
    assert all(map(torch.equal, params, others))


def test_what_is_not_supported_is_named(core):
    params = as_parameters(make_weights(SHAPES, torch.float32))
    with pytest.raises(ValueError, match="use_precision_aware_optimizer"):
        core.get_megatron_optimizer(Config(precision_aware=True), params)
    with pytest.raises(ValueError, match="bias_correction=False"):
        core.Adam(params, bias_correction=False)


def test_megatron_core_trains_and_resumes_as_with_torchs_classes():
    found = importlib.util.find_spec("megatron")
    if found is None or importlib.util.find_spec("megatron.core") is None:
        pytest.skip("megatron-core is not installed")
    run = subprocess.run(
        [sys.executable, "-W", "ignore", str(Path(__file__).with_name("training_by_megatron.py"))],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.stdout.splitlines()[-1:] == ["trained"], run.stderr


def test_the_page(core):
    integrations.megatron.unregister()
    params = as_parameters(make_weights(SHAPES, torch.float32))
    names = run_page("megatron", model_chunks=params)
    assert isinstance(names["optimizer"], optim.Adam)
