"""Adafactor: relative steps of transformers' class, and schedules that show them."""

import functools

import pytest
import torch

import fusedstep
from fusedstep import optim
from support.factored import stepped
from support.stepping import (
    make_gradients,
    make_weights,
)

#: Optimizers whose relative steps are those of transformers' class, by what they are made of.
RELATIVE = {
    "transformers": lambda params, **options: optim.Adafactor(
        params, lr=None, relative_step=True, **options
    ),
    "galore": lambda params, **options: optim.GaLoreAdafactor(
        [{"params": params, "rank": 2}], **options
    ),
    "galore without a rank": optim.GaLoreAdafactor,
}


relative = pytest.mark.parametrize("name", RELATIVE)


class Schedule(torch.optim.lr_scheduler.LambdaLR):
    """transformers' AdafactorSchedule."""

    def __init__(self, optimizer):
        for group in optimizer.param_groups:
            group["initial_lr"] = 0.0
        super().__init__(optimizer, lambda _: 0.0)

    def get_lr(self):
        opt, groups = self.optimizer, self.optimizer.param_groups
        firsts = [(group, group["params"][0]) for group in groups]
        found = [opt._get_lr(g, opt.state[p]) for g, p in firsts if p.grad is not None]
        return found or self.base_lrs


def trained(make, schedule=None, is_zeroed_first=False, fused=None, steps=3):
    weights = [torch.nn.Parameter(0.05 * w) for w in make_weights([(6, 5), (4, 7)], torch.float32)]
    optimizer = make(weights, fused=fused)
    scheduler = schedule and schedule(optimizer)
    for step in range(steps):
        for weight, grad in zip(
            weights, make_gradients([w.shape for w in weights], torch.float32, step), strict=True
        ):
            weight.grad = grad
        optimizer.step()
        if is_zeroed_first:
            optimizer.zero_grad()
        if scheduler:
            scheduler.step()
        optimizer.zero_grad()
    return optimizer, weights


@relative
@pytest.mark.parametrize("fused", [None, False])
def test_relative_steps_of_transformers_read_no_lr(name, fused):
    def falling(optimizer):
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5 * step)

    _, expected = trained(RELATIVE[name], fused=fused)
    for schedule in (falling, Schedule):
        for is_zeroed_first in (True, False):
            optimizer, weights = trained(RELATIVE[name], schedule, is_zeroed_first, fused)
            assert all(map(torch.equal, weights, expected))
    shown = 1e-2 * max(1e-3, weights[0].square().mean().sqrt().item())  # by the last of them
    assert optimizer.param_groups[0]["lr"] == pytest.approx(shown, rel=1e-5)


def test_a_schedule_that_shows_steps_is_refused_where_they_follow_lr():
    with pytest.raises(RuntimeError, match="variant='transformers'"):
        trained(optim.Adafactor, Schedule)


@pytest.mark.parametrize("cls", [optim.Adafactor, optim.GaLoreAdafactor])
def test_an_lr_that_no_step_reads_is_refused(cls):
    with pytest.raises(ValueError, match="give max_relative_step"):
        cls([torch.ones(2, 3)], lr=0.1, relative_step=True)


@pytest.mark.parametrize("door", ["load_state_dict", "import_state_dict", "convert"])
@pytest.mark.parametrize("shown", [0.0, torch.tensor(5.1e-4)], ids=str)
def test_checkpoints_under_a_schedule_go_on(door, shown):
    """Their lr is what was shown; their other options are those of the steps to come."""
    options = {"clip_threshold": 0.5, "decay_rate": -0.6, "beta1": 0.8, "weight_decay": 0.1}
    whole, expected = trained(lambda weights, fused: optim.Adafactor(weights, **options), steps=2)
    weights = [torch.nn.Parameter(weight.detach().clone()) for weight in expected]
    other = type("Adafactor", (torch.optim.Optimizer,), {"__module__": "transformers.optimization"})
    of_class = {"eps": (1e-30, 1e-3), "scale_parameter": True, "relative_step": True}
    theirs = other(weights, {"lr": None, "warmup_init": False, **of_class, **options})
    theirs.param_groups[0]["lr"] = shown
    for weight, own in zip(weights, expected, strict=True):
        state = {name: value.clone() for name, value in whole.state[own].items()}
        theirs.state[weight] = state | {"step": int(state["step"]), "RMS": 0.05}
    if door == "convert":
        ours = fusedstep.convert(theirs)
    else:
        ours = optim.Adafactor(weights, relative_step=True, lr=None)
        load = ours.load_state_dict
        if door == "import_state_dict":
            load = functools.partial(fusedstep.import_state_dict, ours)
        load(theirs.state_dict())
    stepped(whole, expected, 2, begin=2)
    stepped(ours, weights, 2, begin=2)
    assert all(map(torch.equal, weights, expected))


def test_shows_what_the_schedule_of_transformers_shows():
    transformers = pytest.importorskip("transformers.optimization", exc_type=ImportError)
    for is_zeroed_first in (True, False):
        (ours, weights), (theirs, others) = (
            trained(make, transformers.AdafactorSchedule, is_zeroed_first)
            for make in (
                RELATIVE["transformers"],
                lambda weights, fused: transformers.Adafactor(weights),
            )
        )
        for weight, other in zip(weights, others, strict=True):
            torch.testing.assert_close(weight, other, rtol=1e-5, atol=5e-6)
        lr, shown = (each.param_groups[0]["lr"] for each in (ours, theirs))
        assert lr == pytest.approx(float(shown), rel=0.01)  # by a weight before its last step
