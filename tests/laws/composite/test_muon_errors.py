"""Muon: what its constructor and its step refuse."""

import pytest
import torch

from fusedstep import optim
from support.matrices import SHAPES, parameters, step


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ns_coefficients": "quartic"}, "ns_coefficients must be one of 'quintic', 'polar_expr"),
        ({"ns_coefficients": (1.0, 2.0)}, "ns_coefficients must be three numbers"),
        ({"ns_coefficients": ()}, "ns_coefficients must be three numbers"),
        ({"ns_coefficients": ((1, 2, 3), (1, 2))}, "ns_coefficients must be three numbers"),
        ({"ns_coefficients": (1, 2, float("nan"))}, "ns_coefficients must be three numbers"),
        ({"ns_coefficients": None}, "ns_coefficients must be three numbers"),
        ({"adjust_lr_fn": "rms"}, "adjust_lr_fn must be None, 'original', 'match_rms_adamw' or"),
        ({"ns_steps": 100}, "ns_steps must be an int from 0 to 99, not 100"),
        ({"ns_steps": 2.5}, "ns_steps must be an int"),
        ({"ns_start": "spectral"}, "ns_start must be 'norm' or 'aol', not 'spectral'"),
        ({"ns_start": None}, "ns_start must be 'norm' or 'aol', not None"),
        ({"ns_start": "aol", "ns_steps": 0}, "ns_start='aol' needs ns_steps of at least 1"),
        ({"ns_dtype": torch.int8}, "ns_dtype must be None, torch.bfloat16"),
        ({"split_heads": 0}, "split_heads must be an int of at least 1"),
        ({"split_heads": 5}, "parameter 0 of group 0 has matrices of 24 rows, which split_heads=5"),
        ({"split_sizes": 24}, "split_sizes must be None or a tuple of ints of at least 1, not 24"),
        (
            {"split_sizes": ()},
            r"split_sizes must be None or a tuple of ints of at least 1, not \(\)",
        ),
        ({"split_sizes": "abc"}, "split_sizes must be None or a tuple of ints"),
        ({"split_sizes": (16, 0, 8)}, "split_sizes must be None or a tuple of ints"),
        ({"split_sizes": (16, -8, 16)}, "split_sizes must be None or a tuple of ints"),
        ({"split_sizes": (16, 8.0)}, "split_sizes must be None or a tuple of ints"),
        ({"split_sizes": (23, True)}, "split_sizes must be None or a tuple of ints"),
        (
            {"split_sizes": (16, 4)},
            r"has matrices of 24 rows, of which split_sizes=\(16, 4\) has 20",
        ),
        (
            {"split_sizes": (16, 5, 3), "split_heads": 2},
            r"split_heads=2 does not divide each of split_sizes=\(16, 5, 3\)",
        ),
        ({"lr": -1}, "Invalid learning rate"),
        ({"momentum": -1}, "Invalid momentum value"),
        ({"weight_decay": -1}, "Invalid weight_decay value"),
        ({"betas": (1.0, 0.5)}, "Invalid beta parameter at index 0"),
        ({"adamw_eps": -1}, "Invalid adamw_eps value"),
        ({"beta2": 1.0}, "Invalid beta2 value: 1.0"),
        ({"beta2": -0.1}, "Invalid beta2 value: -0.1"),
    ],
    ids=str,
)
def test_options_out_of_range(options, message):
    with pytest.raises(ValueError, match=message):
        optim.Muon(parameters(SHAPES[:1]), **options)
    with pytest.raises((ValueError, TypeError)):
        optim.Muon(parameters(SHAPES[:1])).add_param_group(
            {"params": [torch.nn.Parameter(torch.ones(24, 8))], "use_muon": "no"} | options
        )


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        (torch.ones(3), r"'odd' has the shape \[3\], and Muon steps matrices.*use_muon=False"),
        (torch.ones(()), r"'odd' has the shape \[\], and Muon steps matrices"),
        (torch.ones(3, 3, dtype=torch.complex64), "'odd' is complex"),
    ],
    ids=["vector", "number", "complex"],
)
def test_weights_that_are_no_matrices(weight, message):
    named = [("even", torch.nn.Parameter(torch.ones(3, 3))), ("odd", torch.nn.Parameter(weight))]
    with pytest.raises(ValueError, match=message):
        optim.Muon(named)
    optimizer = optim.Muon(named[:1])
    with pytest.raises(ValueError, match=message):
        optimizer.add_param_group({"params": named[1:]})
    assert len(optimizer.param_groups) == 1
    optimizer.add_param_group({"params": named[1:], "use_muon": False})
    optimizer.param_groups[1]["use_muon"] = True
    for _, p in named:
        p.grad = torch.ones_like(p)
    with pytest.raises(ValueError, match=message):
        optimizer.step()
    assert (named[0][1] == 1).all()


@pytest.mark.parametrize("name", ["ns_coefficients", "adjust_lr_fn", "split_sizes", "ns_start"])
def test_a_bad_option_at_a_step_changes_nothing(name):
    params = parameters([(12, 8), (8,)])
    groups = [{"params": params[1:], "use_muon": False}, {"params": params[:1]}]
    optimizer = optim.Muon(groups)
    optimizer.param_groups[1][name] = "other"
    with pytest.raises(ValueError, match=name):
        step(optimizer, params, 0)
    assert all((p == q).all() for p, q in zip(params, parameters([(12, 8), (8,)]), strict=True))
    groups = [{"params": params[1:], "use_muon": False}, {"params": params[:1]}]
    with pytest.raises(ValueError, match=f"group 1 of the dictionary: {name}"):
        optim.Muon(groups).load_state_dict(optimizer.state_dict())


def test_sparse_gradients():
    (weight,) = parameters([(12, 8)])
    weight.grad = torch.ones(12, 8).to_sparse()
    with pytest.raises(RuntimeError, match="Muon does not support sparse gradients"):
        optim.Muon([weight]).step()


def test_no_group_steps_if_a_state_of_another_is_wrong():
    weights = [torch.nn.Parameter(torch.randn(4, 6)) for _ in range(2)]
    optimizer = optim.Muon([{"params": [weight]} for weight in weights])
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    optimizer.step()
    optimizer.state[weights[1]]["momentum_buffer"] = torch.zeros(3, 3)
    before = weights[0].detach().clone()
    with pytest.raises(RuntimeError, match="parameter 0 of group 1: the state momentum_buffer"):
        optimizer.step()
    assert torch.equal(weights[0].detach(), before)
