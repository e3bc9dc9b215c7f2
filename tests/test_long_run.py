"""Law: over a thousand steps the classes here go where torch's go.

The experiment is the one by which torch checks its C++ optimizers against stored values: a small
network in double precision, with a learning rate far too large, looked at every 100 steps. Here
torch's class gives the values anew.
"""

import functools

import pytest
import torch

from cases import PLAIN, WITH_NAMESAKE

WEIGHTS = (
    [[-0.2109, -0.4976], [-0.1413, -0.3420], [-0.2524, 0.6976]],
    [-0.1085, -0.2979, 0.6892],
    [[-0.0508, -0.3941, -0.2843]],
    [-0.0711],
)


def samples(*builds):
    """All weights after step 1, 101, ... 1001, for the optimizer that each function builds.

    Their networks go forward and backward together, which takes as long as one alone.
    """
    stacks = [
        torch.stack(len(builds) * [torch.tensor(value, dtype=torch.float64)]).requires_grad_()
        for value in WEIGHTS
    ]
    inputs = torch.tensor([[0.1, 0.2], [0.3, 0.4], [0.5, 0.6]], dtype=torch.float64)
    params = [[torch.nn.Parameter(each) for each in stack.detach()] for stack in stacks]
    optimizers = [build(own) for build, *own in zip(builds, *params, strict=True)]
    found = []
    for step in range(1001):
        first, first_bias, second, second_bias = stacks
        hidden = (inputs @ first.mT + first_bias[:, None]).sigmoid()
        outputs = (hidden @ second.mT + second_bias[:, None]).sigmoid()
        for own, grads in zip(params, torch.autograd.grad(outputs.sum(), stacks), strict=True):
            for param, grad in zip(own, grads, strict=True):
                param.grad = grad
        for optimizer in optimizers:
            optimizer.step()
        if step % 100 == 0:
            found.append(torch.cat([stack.detach().flatten(1) for stack in stacks], dim=1))
    return torch.stack(found, dim=1)


@pytest.mark.parametrize("cls", dict.fromkeys(case.optimizer for case in WITH_NAMESAKE))
def test_a_thousand_steps(cls):
    """torch's own tolerance for its stored values is 1e-3."""
    builds = {}
    for case in (case for case in WITH_NAMESAKE if case.optimizer is cls):
        options = {"lr": 1.0} | case.long_run
        builds[case.name, "torch"] = functools.partial(case.build_namesake, **options)
        for fused in (True, False) if case in PLAIN else (True,):
            builds[case.name, fused] = functools.partial(case.build, fused=fused, **options)
    found = dict(zip(builds, samples(*builds.values()), strict=True))
    for (name, fused), each in found.items():
        torch.testing.assert_close(
            each, found[name, "torch"], rtol=1e-12, atol=0, msg=f"{name}, fused={fused}"
        )


def test_another_formula_drifts():
    """The control: beta2 off by a millionth of itself is seen."""
    case = next(case for case in WITH_NAMESAKE if case.has("betas"))
    beta1, beta2 = case.betas
    betas = beta1, beta2 * (1 - 1e-6)
    ours, theirs = samples(
        functools.partial(case.build, lr=1.0, betas=betas),
        functools.partial(case.build_namesake, lr=1.0),
    )
    assert (ours / theirs - 1).abs().max() > 1e-6
