"""NAdam alone: the product of its momenta, a number beside the step count."""

import copy

import pytest
import torch

from cases import PLAIN
from fusedstep import optim
from stepping import (
    as_parameters,
    assert_same_bits,
    assert_same_contents,
    contents,
    make_weights,
    train,
)

(NADAM,) = (case for case in PLAIN if case.optimizer is optim.NAdam)
SHAPES = ((33, 31), (7,), ())


def started(dtype=torch.float32, steps=3, **options):
    params = as_parameters(make_weights(SHAPES, dtype))
    optimizer = NADAM.build(params, **options)
    train(optimizer, params, range(1, steps + 1))
    return optimizer, params


@pytest.mark.parametrize("momentum_decay", [0.0, 4e-3, 0.5])
def test_the_product_has_torchs_bits(momentum_decay):
    optimizer, params = started(steps=200, momentum_decay=momentum_decay)
    others = as_parameters(make_weights(SHAPES, torch.float32))
    namesake = NADAM.build_namesake(others, momentum_decay=momentum_decay)
    train(namesake, others, range(1, 201))
    for ours, theirs in zip(params, others, strict=True):
        found, expected = (o.state[p] for o, p in ((optimizer, ours), (namesake, theirs)))
        assert_same_bits(found["mu_product"], expected["mu_product"], "mu_product")


def test_weights_with_other_products_step_as_they_would_alone():
    """Their counts are the same: both numbers of a weight tell its scalars."""
    products = (0.5, 0.25, 0.5)
    optimizer, params = started()
    for product, param in zip(products, params, strict=True):
        optimizer.state[param]["mu_product"].fill_(product)
    alone = copy.deepcopy(optimizer.state_dict())
    twins = as_parameters(params)
    for index, twin in enumerate(twins):
        one = NADAM.build([twin])
        group = {**alone["param_groups"][0], "params": [0]}
        one.load_state_dict({"state": {0: alone["state"][index]}, "param_groups": [group]})
        twin.grad = torch.full_like(twin, 0.5)
        one.step()
    for param in params:
        param.grad = torch.full_like(param, 0.5)
    optimizer.step()
    for param, twin in zip(params, twins, strict=True):
        assert_same_bits(param, twin, "weight")
    found = [optimizer.state[param]["mu_product"].item() for param in params]
    assert found[0] == found[2] != found[1]
    assert found[0] == 2 * found[1]


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "unfused"])
def test_a_loaded_product_stays_float32(fused):
    """torch casts it to the dtype of a bfloat16 weight."""
    whole, whole_params = started(torch.bfloat16, fused=fused)
    params = as_parameters(whole_params)
    resumed = NADAM.build(params, fused=fused)
    resumed.load_state_dict(copy.deepcopy(whole.state_dict()))
    for optimizer, its in ((whole, whole_params), (resumed, params)):
        train(optimizer, its, range(4, 7))
    assert_same_contents(contents(resumed), contents(whole))


def test_a_product_that_is_no_number_is_refused():
    optimizer, params = started()
    for wrong, text in ((torch.zeros(2), "of one element"), (-1.0, "finite and at least 0")):
        dictionary = copy.deepcopy(optimizer.state_dict())
        dictionary["state"][1]["mu_product"] = wrong
        with pytest.raises(ValueError, match=f"mu_product of parameter 1.* must be.*{text}"):
            NADAM.build(params).load_state_dict(dictionary)
