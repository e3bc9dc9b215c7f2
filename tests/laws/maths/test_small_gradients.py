"""Law: where an average takes a half of each gradient or more, a small one after large ones counts.

A difference of the two is rounded by the larger, and would hide it.
"""

import itertools

import pytest
import torch

import fusedstep
from fusedstep import optim
from support.stepping import forced_isa

#: Makes an optimizer whose averages are the last gradient alone.
WITHOUT_MEMORY = {
    "Adam": lambda params, **of: optim.Adam(params, betas=(0.0, 0.999), **of),
    "Adam, both": lambda params, **of: optim.Adam(params, betas=(0.0, 0.0), amsgrad=True, **of),
    "AdamW": lambda params, **of: optim.AdamW(params, betas=(0.0, 0.999), **of),
    "Adamax": lambda params, **of: optim.Adamax(params, betas=(0.0, 0.0), **of),
    "Adan": lambda params, **of: optim.Adan(params, betas=(0.0, 0.0, 0.0), **of),
    "APOLLOAdamW": lambda params, **of: optim.APOLLOAdamW(params, betas=(0.0, 0.999), **of),
    "APOLLOAdamW, rank 1": lambda params, **of: optim.APOLLOAdamW(
        [{"params": params, "rank": 1}], betas=(0.0, 0.999), **of
    ),
    "GaLoreAdamW": lambda params, **of: optim.GaLoreAdamW(params, betas=(0.0, 0.999), **of),
    "GaLoreAdamW, rank 1": lambda params, **of: optim.GaLoreAdamW(
        [{"params": params, "rank": 1}], betas=(0.0, 0.999), **of
    ),
    "Lamb": lambda params, **of: optim.Lamb(params, betas=(0.0, 0.0), **of),
    "Lion": lambda params, **of: optim.Lion(params, betas=(0.9, 0.0), **of),
    "Muon": lambda params, **of: optim.Muon(params, momentum=0.0, **of),
    "NAdam": lambda params, **of: optim.NAdam(params, betas=(0.0, 0.0), **of),
    "RAdam": lambda params, **of: optim.RAdam(params, betas=(0.0, 0.999), **of),
    "RMSprop": lambda params, **of: optim.RMSprop(params, alpha=0.0, centered=True, **of),
}


def state_after(build, dtype, gradients, fused):
    param = torch.nn.Parameter(torch.zeros(5, 13, dtype=dtype))
    optimizer = build([param], fused=fused)
    for gradient in gradients:
        param.grad = torch.full_like(param, gradient)
        optimizer.step()
    state = optimizer.state[param]
    return param.detach(), {name: state[name] for name in ("exp_avg", "grad_avg") if name in state}


@pytest.mark.parametrize("isa", fusedstep.isas())
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("name", WITHOUT_MEMORY)
def test_an_average_without_memory_is_the_last_gradient(name, fused, isa):
    with forced_isa(isa):
        for last in (1e-4, 1e-8):
            gradients = (1.0, 1.0, last)
            _, found = state_after(WITHOUT_MEMORY[name], torch.float32, gradients, fused)
            _, exact = state_after(WITHOUT_MEMORY[name], torch.float64, gradients, fused)
            for key, value in exact.items():
                error = (found[key] - value).abs().amax()
                assert error <= 1e-6 * value.abs().amax(), key


@pytest.mark.parametrize("isa", fusedstep.isas())
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize(
    "build",
    [
        lambda params, **of: optim.Adam(params, 0.1, betas=(0.0, 0.0), **of),
        lambda params, **of: optim.AdamW(params, 0.1, betas=(0.0, 0.0), **of),
        lambda params, **of: optim.Adamax(params, 0.1, betas=(0.0, 0.0), **of),
    ],
    ids=["Adam", "AdamW", "Adamax"],
)
def test_a_weight_moves_by_a_small_gradient_after_a_large_one(build, fused, isa):
    with forced_isa(isa):
        found, _ = state_after(build, torch.float32, (1e8, 1.0), fused)
    exact, _ = state_after(build, torch.float64, (1e8, 1.0), fused)
    torch.testing.assert_close(found, exact.float())


@pytest.mark.parametrize("fused", [None, False])
@pytest.mark.parametrize("alpha", [0.0, 0.5, 0.99])
def test_a_variance_that_rounds_below_zero_is_zero(alpha, fused):
    """That of constant gradients, and of averages that keep nothing."""
    weight = torch.nn.Parameter(torch.zeros(1000))
    optimizer = optim.RMSprop([weight], alpha=alpha, centered=True, fused=fused)
    weight.grad = torch.linspace(0.1, 3, 1000)
    for _ in range(300 if alpha else 3):
        optimizer.step()
    assert weight.isfinite().all()


@pytest.mark.parametrize("isa", [*fusedstep.isas(), "torch operations"])
def test_averages_that_keep_nothing_have_no_variance(isa):
    """The difference of two equal numbers is exactly 0: a step is the gradient times lr / eps."""
    fused = isa in fusedstep.isas()
    for dtype, state_dtype, momentum in itertools.product(
        (torch.float32, torch.float64, torch.bfloat16),
        (None, torch.float32, "int8", "fp8", "int4"),
        (0.0, 0.5),
    ):
        options = {"alpha": 0.0, "centered": True, "momentum": momentum, "state_dtype": state_dtype}
        weight = torch.nn.Parameter(torch.zeros(33, 65, dtype=dtype))
        optimizer = optim.RMSprop([weight], lr=2**-10, eps=2**-10, fused=fused, **options)
        weight.grad = torch.linspace(0.1, 3, weight.numel()).to(dtype).view_as(weight)
        with forced_isa(isa if fused else "base"):
            for step in range(1, 2 if momentum else 3):
                optimizer.step()
                assert torch.equal(weight, -step * weight.grad), (dtype, state_dtype, momentum)
