"""Adafactor: the variants of groups, dictionaries of the namesakes, and conversions."""

import copy
import itertools

import pytest
import torch

import fusedstep
from fusedstep import optim
from support.adafactor import SHAPES, case, steps_of
from support.factored import ADAFACTOR as CASES
from support.stepping import (
    make_gradients,
    make_weights,
)


def theirs(name, params):
    if CASES[name][1]["torchs"]:
        return torch.optim.Adafactor(params, foreach=False, **CASES[name][0])
    transformers = pytest.importorskip("transformers.optimization", exc_type=ImportError)
    options = {k: v for k, v in CASES[name][0].items() if k != "variant"}
    if "max_relative_step" in options:
        pytest.skip("transformers' class has no such option")
    return transformers.Adafactor(params, **options)


@case
def test_goes_on_from_checkpoints_of_the_namesakes(name, tmp_path):
    weights, others = make_weights(SHAPES, torch.float32), make_weights(SHAPES, torch.float32)
    gradients = [make_gradients(SHAPES, torch.float32, step) for step in range(4)]
    ours, namesake = optim.Adafactor(weights, **CASES[name][0]), theirs(name, others)
    for step, grads in enumerate(gradients):
        if step == 2:  # each goes on with the other's state
            dictionaries = [copy.deepcopy(each.state_dict()) for each in (ours, namesake)]
            torch.save(dictionaries[1], tmp_path / "saved.pt")
            ours = optim.Adafactor(weights, fused=True)
            ours.load_state_dict(torch.load(tmp_path / "saved.pt", weights_only=True))
            if CASES[name][1]["torchs"]:
                namesake = theirs(name, others)
                namesake.load_state_dict(dictionaries[0])
        for weight, other, grad in zip(weights, others, grads, strict=True):
            weight.grad, other.grad = grad.clone(), grad.clone()
        ours.step()
        namesake.step()
    for weight, other in zip(weights, others, strict=True):
        torch.testing.assert_close(weight, other, rtol=1e-5, atol=5e-6)


def test_is_converted_and_verified():
    weights = make_weights(SHAPES, torch.float32)
    namesake = torch.optim.Adafactor(weights, lr=0.05)
    for weight, grad in zip(weights, make_gradients(SHAPES, torch.float32, 0), strict=True):
        weight.grad = grad
    namesake.step()
    ours = fusedstep.convert(namesake, fused=True)
    assert type(ours) is optim.Adafactor
    assert ours.param_groups[0]["lr"] == 0.05
    fusedstep.verify(ours)


def test_groups_have_options_of_their_own():
    first, second = (make_weights(SHAPES[:2], torch.float32) for _ in range(2))
    alone = [copy.deepcopy(first), copy.deepcopy(second)]
    groups = [{"params": first}, {"params": second, "relative_step": False, "lr": 1e-3}]
    optimizer = optim.Adafactor(groups, fused=True)
    grads = make_gradients(SHAPES[:2], torch.float32, 0)
    for weight, grad in zip(itertools.chain(first, second), itertools.cycle(grads), strict=False):
        weight.grad = grad.clone()
    optimizer.step()
    steps_of(alone[0], 1)
    steps_of(alone[1], 1, {"relative_step": False, "lr": 1e-3, "variant": "torch"})
    assert all(map(torch.equal, (*first, *second), (*alone[0], *alone[1])))
    assert optimizer.param_groups[0].keys() >= {"beta2_decay", "d"}
    assert "variant" not in optimizer.param_groups[0]


def test_transformers_optimizer_is_converted():
    transformers = pytest.importorskip("transformers.optimization", exc_type=ImportError)
    weights = make_weights(SHAPES, torch.float32)
    other = transformers.Adafactor(weights, beta1=0.5, clip_threshold=0.9)
    for weight, grad in zip(weights, make_gradients(SHAPES, torch.float32, 0), strict=True):
        weight.grad = grad
    other.step()
    ours = fusedstep.convert(other)
    group = ours.param_groups[0]
    assert (group["variant"], group["d"], group["beta1"]) == ("transformers", 0.9, 0.5)
    assert ours.state[weights[0]].keys() == {"step", "exp_avg_sq_row", "exp_avg_sq_col", "exp_avg"}


@pytest.mark.parametrize(
    ("name", "of_all", "of_group"),
    [
        ("relative_step", False, True),
        ("scale_parameter", False, True),
        ("warmup_init", True, False),
        ("beta1", 0.9, None),
        ("variant", "transformers", "torch"),
    ],
)
def test_an_option_of_a_group_wins(name, of_all, of_group):
    weights = [torch.ones(2, 3), torch.ones(2, 3)]
    groups = [{"params": weights[:1]}, {"params": weights[1:], name: of_group}]
    optimizer = optim.Adafactor(groups, **{name: of_all})
    assert [group[name] for group in optimizer.param_groups] == [of_all, of_group]


def test_a_variant_that_was_given_is_that_of_all_groups():
    groups = [{"params": [torch.ones(2)]}, {"params": [torch.ones(2)], "beta1": 0.9}]
    optimizer = optim.Adafactor(groups, variant="torch")
    assert not any("variant" in group for group in optimizer.param_groups)
    assert optimizer.param_groups[1]["beta1"] == 0.9


def test_dictionaries_say_which_variant_goes_on():
    weights, others = (make_weights(SHAPES, torch.float32) for _ in range(2))
    for variant, dictionary in (
        ("transformers", steps_of(weights, 1).state_dict()),
        ("torch", steps_of(others, 1, variant="transformers").state_dict()),
    ):
        optimizer = optim.Adafactor(weights, variant=variant, fused=True)
        optimizer.load_state_dict(dictionary)
        optimizer.step()
        names = optimizer.state[weights[0]].keys()
        assert ("row_var" in names) == (variant == "transformers")


def test_a_variant_that_is_given_is_kept_by_a_dictionary():
    """beta1 is transformers' option, and asks for its variant unless another is given."""
    (weight,) = make_weights([(4, 3)], torch.float32)
    optimizer = optim.Adafactor([weight], variant="torch", beta1=0.5)
    for _ in range(2):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
        optimizer.load_state_dict(optimizer.state_dict())
        assert {*optimizer.state[weight]} == {"step", "row_var", "col_var", "exp_avg"}
        assert optimizer.param_groups[0]["variant"] == "torch"


def test_a_beta1_of_a_group_leaves_its_variant_to_the_constructor():
    """A dictionary that says nothing of a variant, but has a beta1, is taken for transformers'."""
    params = [torch.nn.Parameter(torch.randn(6, 5)) for _ in range(2)]
    params[1].data.copy_(params[0])
    groups = [{"params": [params[0]], "beta1": 0.9}], [{"params": [params[1]]}]
    first, other = (optim.Adafactor(each, variant="torch") for each in groups)
    params[0].grad = torch.randn(6, 5)
    first.step()
    params[1].data.copy_(params[0])
    other.load_state_dict(copy.deepcopy(first.state_dict()))
    assert {*other.state[params[1]]} == {"step", "row_var", "col_var", "exp_avg"}
    for p in params:
        p.grad = torch.ones(6, 5)
    first.step()
    other.step()
    assert torch.equal(*params)
