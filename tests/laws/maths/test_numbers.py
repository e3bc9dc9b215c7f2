"""Numbers of a state beside the step count: NAdam's product of momenta, ASGD's learning rate."""

import copy

import pytest
import torch

from fusedstep import optim
from support.cases import PLAIN
from support.stepping import (
    as_parameters,
    assert_same_bits,
    assert_same_contents,
    contents,
    make_weights,
    train,
)

ROWS = tuple(case for case in PLAIN if len(case.numbers) > 1)
OPTIONS = {
    optim.ASGD: ({}, {"t0": 50.0, "lambd": 0.5}, {"alpha": 0.5, "lambd": 2.0, "t0": -3.0}),
    optim.NAdam: ({"momentum_decay": 0.0}, {}, {"momentum_decay": 0.5}),
}
SHAPES = ((33, 31), (7,), ())


def names_of(case):
    return [name for name in case.numbers if name != "step"]


def started(case, dtype=torch.float32, steps=3, **options):
    params = as_parameters(make_weights(SHAPES, dtype))
    optimizer = case.build(params, **options)
    train(optimizer, params, range(1, steps + 1))
    return optimizer, params


@pytest.mark.parametrize(
    ("case", "options"),
    [(case, options) for case in ROWS for options in OPTIONS[case.optimizer]],
    ids=str,
)
def test_numbers_have_torchs_bits(case, options):
    optimizer, params = started(case, steps=200, **options)
    others = as_parameters(make_weights(SHAPES, torch.float32))
    namesake = case.build_namesake(others, **options)
    train(namesake, others, range(1, 201))
    for ours, theirs in zip(params, others, strict=True):
        found, expected = (o.state[p] for o, p in ((optimizer, ours), (namesake, theirs)))
        for name in names_of(case):
            assert_same_bits(found[name], expected[name], name)


@pytest.mark.parametrize("case", ROWS, ids=str)
def test_weights_with_other_numbers_step_as_they_would_alone(case):
    """Their counts are the same: all numbers of a weight tell its scalars."""
    for name in names_of(case):
        optimizer, params = started(case)
        for number, param in zip((0.5, 0.25, 0.5), params, strict=True):
            optimizer.state[param][name].fill_(number)
        alone = copy.deepcopy(optimizer.state_dict())
        twins = as_parameters(params)
        for index, twin in enumerate(twins):
            one = case.build([twin])
            group = {**alone["param_groups"][0], "params": [0]}
            one.load_state_dict({"state": {0: alone["state"][index]}, "param_groups": [group]})
            twin.grad = torch.full_like(twin, 0.5)
            one.step()
            params[index].grad = torch.full_like(twin, 0.5)
        optimizer.step()
        moves = []
        for param, twin in zip(params, twins, strict=True):
            assert_same_bits(param, twin, f"weight, {name}")
            moves.append([optimizer.state[param][each].item() for each in case.numbers])
        assert moves[0] == moves[2]


@pytest.mark.parametrize("case", ROWS, ids=str)
@pytest.mark.parametrize("fused", [True, False], ids=["fused", "unfused"])
def test_a_loaded_number_stays_float32(case, fused):
    """torch casts it to the dtype of a bfloat16 weight."""
    whole, whole_params = started(case, torch.bfloat16, fused=fused)
    params = as_parameters(whole_params)
    resumed = case.build(params, fused=fused)
    resumed.load_state_dict(copy.deepcopy(whole.state_dict()))
    for optimizer, its in ((whole, whole_params), (resumed, params)):
        train(optimizer, its, range(4, 7))
    assert_same_contents(contents(resumed), contents(whole))


@pytest.mark.parametrize("case", ROWS, ids=str)
def test_what_is_no_number_is_refused(case):
    optimizer, _ = started(case)
    for name in names_of(case):
        for wrong, text in (
            (torch.zeros(2), "of one element"),
            (torch.tensor(1j), "of one element, not a tensor of torch.complex64"),
            (torch.tensor(1 + 0j), "of one element, not a tensor of torch.complex64"),
            (-1.0, "finite and at least 0"),
        ):
            dictionary = copy.deepcopy(optimizer.state_dict())
            dictionary["state"][1][name] = wrong
            with pytest.raises(ValueError, match=f"{name} of parameter 1.* must be.*{text}"):
                case.build(started(case, steps=0)[1]).load_state_dict(dictionary)


def test_a_changed_rate_counts_a_step_later():
    """As in torch: a step of ASGD computes the rate of the next one."""
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = optim.ASGD([weight], lr=0.5, lambd=0.0)
    for lr, expected in ((0.5, 0.5), (0.25, 0.0), (0.25, -0.25)):
        optimizer.param_groups[0]["lr"] = lr
        weight.grad = torch.ones(3)
        optimizer.step()
        assert weight.tolist() == [expected] * 3


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "unfused"])
def test_rprop_starts_at_the_rate_and_keeps_within_its_bounds(fused):
    weight = torch.nn.Parameter(torch.zeros(2))
    optimizer = optim.Rprop([weight], lr=1.0, etas=(0.5, 2.0), step_sizes=(0.5, 3.0), fused=fused)
    expected = [((1, 1), -1.0), ((1, 1), -3.0), ((1, 1), -6.0), ((-1, 0), -6.0), ((-1, 0), -4.5)]
    for gradient, moved in expected:
        weight.grad = torch.tensor(gradient, dtype=torch.float32)
        optimizer.step()
        optimizer.param_groups[0]["lr"] *= 2  # without effect
        assert weight[0].item() == moved
    assert optimizer.state[weight]["step_size"].tolist() == [1.5, 3.0]


def test_the_sign_of_tiny_gradients_counts():
    """In float32 their product is 0."""
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = optim.Rprop([weight], lr=1.0)
    for _ in range(2):
        weight.grad = torch.full_like(weight, 1e-30)
        optimizer.step()
    assert optimizer.state[weight]["step_size"].item() == torch.tensor(1.2).item()
