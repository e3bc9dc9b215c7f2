"""Works of two processes of which one has no gradient of a weight, or of none."""

import math

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard

from fusedstep import optim
from fusedstep._sharding.dtensor import local
from support.stepping import assert_same_bits
from support.two_processes import part_of

#: Steps with a norm over all processes.
STEPS = (
    (lambda weights: optim.Lamb(weights), {}),
    (lambda weights: optim.Lamb(weights, fused=False), {}),
    (lambda weights: optim.AdamW(weights), {"max_norm": 0.5}),
    (lambda weights: optim.AdamW(weights, fused=False), {"max_norm": 0.5}),
    (lambda weights: optim.Adafactor(weights), {}),
    (lambda weights: optim.Adan(weights, max_grad_norm=0.5), {}),
    (
        lambda weights: optim.Lamb(
            [{"params": weights[:2]}, {"params": weights[2:], "fused": False}]
        ),
        {},
    ),
)


def a_gradient_of_one_process_is_refused_by_name(here):
    for make, options in STEPS:
        for lost in ((1,), (0, 1, 2, 3)):
            _, spread = here.subjects(Shard(0))
            optimizer = make(spread)
            optimizer.step(**options)
            before = [local(weight).detach().clone() for weight in spread]
            if here.rank == 1:
                for index in lost:
                    spread[index].grad = None
            steps_alike = len({group.get("fused") for group in optimizer.param_groups}) == 1
            first = rf"{lost[0]} of group 0" if steps_alike else r"\d of group \d"
            name = f"parameter {first} has a gradient in some processes only"
            with pytest.raises(RuntimeError, match=name):
                optimizer.step(**options)
            for weight, kept in zip(spread, before, strict=True) if steps_alike else ():
                assert_same_bits(local(weight).detach(), kept, "weight")


def gradients_that_all_processes_lack_change_nothing(here):
    for make, options in STEPS:
        params, spread = here.subjects(Shard(0))
        ours, theirs = make(params), make(spread)
        for weights in (params, spread):
            weights[1].grad = weights[3].grad = None
        ours.step(**options)
        theirs.step(**options)
        for weights in (params, spread):
            for weight in weights:
                weight.grad = None
        theirs.step(**options)
        for param, shards in zip(params, spread, strict=True):
            found, expected = local(shards).detach(), part_of(param, shards)
            torch.testing.assert_close(found, expected, rtol=2e-6, atol=2e-7)


def copies_need_no_gradient_of_the_other_process(here):
    _, spread = here.subjects(Replicate())
    if here.rank == 1:
        spread[1].grad = None
    optim.Lamb(spread).step(max_norm=0.5)


SHAPES = ((9, 4), (24, 8), (3, 8), (8, 24))


def matrices_of(here, fused):
    """Shards of matrices with gradients, and an optimizer that steps them with and without Muon."""
    spread = []
    for shape in SHAPES:
        weight = torch.nn.Parameter(here.spread(torch.ones(shape), Shard(0)))
        weight.grad = here.spread(torch.ones(shape), Shard(0))
        spread.append(weight)
    groups = [{"params": spread[:3]}, {"params": spread[3:], "use_muon": False}]
    return spread, optim.Muon(groups, fused=fused)


def a_gradient_of_one_process_is_refused_before_matrices_are_gathered(here):
    for fused in (None, False):
        for lost in ((1,), (0, 1, 2), (0, 1, 2, 3)):
            spread, optimizer = matrices_of(here, fused)
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
            before = [local(weight).detach().clone() for weight in spread]
            states = [
                {name: local(value).clone() for name, value in optimizer.state[weight].items()}
                for weight in spread
            ]
            if here.rank == 1:
                for index in lost:
                    spread[index].grad = None
            name = f"parameter {lost[0]} of group 0 has a gradient in some processes only"
            with pytest.raises(RuntimeError, match=name):
                optimizer.step()
            for weight, kept, state in zip(spread, before, states, strict=True):
                assert_same_bits(local(weight).detach(), kept, "weight")
                for key, value in state.items():
                    assert_same_bits(local(optimizer.state[weight][key]), value, key)


def matrices_without_gradients_in_all_processes_stay(here):
    for fused in (None, False):
        for lost in ((1,), (0, 1, 2), (0, 1, 2, 3)):
            spread, optimizer = matrices_of(here, fused)
            for index in lost:
                spread[index].grad = None
            optimizer.step()
            for index, weight in enumerate(spread):
                assert (local(weight).detach() == 1).all() == (index in lost)


def subjects_of(here):
    """Shards with an optimizer, and arguments of its steps."""
    for make, options in STEPS:
        _, spread = here.subjects(Shard(0))
        yield spread, make(spread), options
    for fused in (None, False):
        yield *matrices_of(here, fused), {}
    for cls in (optim.GaLoreAdamW, optim.APOLLOAdamW):
        spread, _ = matrices_of(here, None)
        yield spread, cls([{"params": spread[:2], "rank": 2}, {"params": spread[2:]}]), {}


def steps_with_bad_gradients(here):
    """Optimizers after a step: one process now has a bad gradient of the first weight."""
    for bad in (math.nan, math.inf):
        for spread, optimizer, options in subjects_of(here):
            optimizer.step(**options)
            before = [local(weight).detach().clone() for weight in spread]
            if here.rank == 1:
                local(spread[0].grad).view(-1)[0] = bad
            local(spread[1].grad).fill_(bad)
            yield optimizer, options
            for weight, kept in zip(spread, before, strict=True):
                assert_same_bits(local(weight).detach(), kept, "weight")


def a_gradient_that_is_not_finite_stops_all_processes_alike(here):
    text = "gradient of parameter 0 of group 0 is not finite"
    for optimizer, options in steps_with_bad_gradients(here):
        with pytest.raises(RuntimeError, match=text) as raised:
            optimizer.step(**options, error_if_nonfinite=True)
        messages = [None, None]
        torch.distributed.all_gather_object(messages, str(raised.value))
        assert messages[0] == messages[1]


def a_gradient_that_is_not_finite_has_all_processes_skip(here):
    for optimizer, options in steps_with_bad_gradients(here):
        for group in optimizer.param_groups:
            group["skip_nonfinite"] = True
        optimizer.step(**options)
        assert optimizer.skipped_steps == 1


WORKS = (
    a_gradient_that_is_not_finite_has_all_processes_skip,
    a_gradient_that_is_not_finite_stops_all_processes_alike,
    a_gradient_of_one_process_is_refused_by_name,
    gradients_that_all_processes_lack_change_nothing,
    copies_need_no_gradient_of_the_other_process,
    a_gradient_of_one_process_is_refused_before_matrices_are_gathered,
    matrices_without_gradients_in_all_processes_stay,
)
