"""Law: every scheduler of torch.optim.lr_scheduler drives the classes here as it drives torch's."""

import copy
import inspect

import pytest
import torch
from torch.optim import lr_scheduler, swa_utils

from support.cases import FAMILIES, PLAIN, thinned
from support.peers import MODES, PEERS, Build, is_same, name_of_peer, outcome_of
from support.stepping import as_parameters, contents, make_weights, train

SHAPES = ((33, 31), (7,))
STEPS = 8
SOME_MODES = [mode for mode in MODES if mode != "foreach"]
BY_MODE = pytest.mark.parametrize("mode", SOME_MODES)
BY_CLASS = pytest.mark.parametrize("cls", PEERS, ids=lambda cls: cls.__name__)


def chained(optimizer):
    return lr_scheduler.ChainedScheduler(
        [
            lr_scheduler.ConstantLR(optimizer, factor=0.4, total_iters=3),
            lr_scheduler.ExponentialLR(optimizer, gamma=0.9),
        ]
    )


def sequential(optimizer):
    schedulers = [
        lr_scheduler.LinearLR(optimizer, start_factor=0.4, total_iters=3),
        lr_scheduler.CosineAnnealingLR(optimizer, T_max=6),
    ]
    return lr_scheduler.SequentialLR(optimizer, schedulers, milestones=[3])


def cycles_momentum(optimizer):
    """They cycle beta1 or momentum as well; an optimizer without has to say that they must not."""
    return {"cycle_momentum": not {"betas", "momentum"}.isdisjoint(optimizer.defaults)}


SCHEDULERS = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, [lambda t: 0.9**t, lambda t: 1 / (1 + t)]),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda t: 0.95),
    "StepLR": lambda o: lr_scheduler.StepLR(o, step_size=2, gamma=0.5),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, milestones=[2, 5], gamma=0.1),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, factor=0.5, total_iters=4),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, start_factor=0.5, total_iters=4),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, gamma=0.9),
    "SequentialLR": sequential,
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=5),
    "ChainedScheduler": chained,
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=1),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(
        o, base_lr=1e-3, max_lr=0.1, step_size_up=3, **cycles_momentum(o)
    ),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, T_0=3),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(
        o,
        max_lr=0.1,
        total_steps=STEPS + 1,
        base_momentum=0.5,  # by default 0.85 to 0.95: SGD's weights grow to sums that cancel
        max_momentum=0.6,
        **cycles_momentum(o),
    ),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, total_iters=6, power=0.9),
    "SWALR": lambda o: swa_utils.SWALR(o, swa_lr=0.05, anneal_epochs=4),
}


def test_the_table_has_every_scheduler():
    modules = (lr_scheduler, swa_utils)
    classes = (getattr(module, name) for module in modules for name in module.__all__)
    names = {c.__name__ for c in classes if inspect.isclass(c) and "optimizer" in parameters(c)}
    names |= {"ChainedScheduler"}
    assert SCHEDULERS.keys() == names - {"LRScheduler"}


def parameters(cls):
    return inspect.signature(cls.__init__).parameters


def scheduled_run(build, make_scheduler, lr):
    params = as_parameters(make_weights(SHAPES, torch.float32))
    groups = [{"params": params[:1], "lr": lr}, {"params": params[1:]}]
    optimizer = build(groups, lr=0.05)
    scheduler = make_scheduler(optimizer)
    rates = []
    for step in range(1, STEPS + 1):
        train(optimizer, params, [step])
        needs_metric = isinstance(scheduler, lr_scheduler.ReduceLROnPlateau)
        scheduler.step(*([1.0] if needs_metric else []))
        rates.append(
            [
                [float(group["lr"]), group.get("betas"), group.get("momentum")]
                for group in optimizer.param_groups
            ]
        )
    assert rates[0] != rates[-1]
    return rates, contents(optimizer), optimizer.param_groups[0]["lr"]


@pytest.mark.parametrize(
    ("case", "name", "mode", "lr"),
    thinned(PLAIN, SCHEDULERS, SOME_MODES, ["number", "tensor"], whole=FAMILIES[:2]),
    ids=str,
)
def test_steps_as_with_torch(case, name, mode, lr):
    """The same rates and the same weights, and the same warnings."""
    cls, lr = case.optimizer, torch.tensor(0.1) if lr == "tensor" else 0.1
    ours, theirs = (
        outcome_of(scheduled_run, Build(each, mode), SCHEDULERS[name], copy.deepcopy(lr))
        for each in (cls, PEERS[cls])
    )
    assert is_same(ours, theirs), f"{cls.__name__}:\n{ours}\n{name_of_peer(cls)}:\n{theirs}"
    assert theirs.error is None


@BY_MODE
@BY_CLASS
def test_a_scheduler_before_the_first_step_is_warned_of(cls, mode):
    """The scheduler looks into the step function of the optimizer to know."""

    def scheduler_first(build):
        optimizer = build(as_parameters(make_weights(SHAPES, torch.float32)))
        lr_scheduler.StepLR(optimizer, step_size=1).step()
        return optimizer.param_groups[0]["lr"]

    ours, theirs = (outcome_of(scheduler_first, Build(each, mode)) for each in (cls, PEERS[cls]))
    assert "Detected call of `lr_scheduler.step()` before `optimizer.step()`" in str(theirs)
    assert is_same(ours, theirs), f"{cls.__name__}:\n{ours}\n{name_of_peer(cls)}:\n{theirs}"
