"""Law: over a thousand steps the classes here go where torch's go.

The experiment is the one by which torch checks its C++ optimizers against stored values: a small
network in double precision, with a learning rate far too large, looked at every 100 steps. Here
torch's class gives the values anew.
"""

import functools

import torch

from support.cases import PLAIN, WITH_NAMESAKE

WEIGHTS = (
    [[-0.2109, -0.4976], [-0.1413, -0.3420], [-0.2524, 0.6976]],
    [-0.1085, -0.2979, 0.6892],
    [[-0.0508, -0.3941, -0.2843]],
    [-0.0711],
)


INPUTS = ((0.1, 0.2), (0.3, 0.4), (0.5, 0.6))

LANES = 16
"""Numbers that a kernel of torch takes at a time, at most: what is left over has other bits."""


def outputs_of(first, first_bias, second, second_bias):
    """The sum of a network's outputs, for each of those that lie along the last dimension.

    Products and sums are of elements, so that no network has other bits than its neighbours.
    """
    found = 0
    for a, b in INPUTS:
        hidden = (a * first[:, 0] + b * first[:, 1] + first_bias).sigmoid()
        output = second_bias[0]
        for weight, unit in zip(second[0], hidden, strict=True):
            output = output + weight * unit
        found = found + output.sigmoid()
    return found


def samples(*builds):
    """All weights after step 1, 101, ... 1001, for the optimizer that each function builds.

    Their networks go forward and backward together, which takes as long as one alone.
    """
    stacks = [torch.tensor([value] * len(builds), dtype=torch.float64) for value in WEIGHTS]
    lanes = torch.arange(-(-len(builds) // LANES) * LANES) % len(builds)
    params = [[torch.nn.Parameter(each) for each in stack] for stack in stacks]
    optimizers = [build(own) for build, *own in zip(builds, *params, strict=True)]
    found = []
    for step in range(1001):
        networks = [stack[lanes].movedim(0, -1).contiguous().requires_grad_() for stack in stacks]
        every = torch.autograd.grad(outputs_of(*networks).sum(), networks)
        for own, grads in zip(params, every, strict=True):
            for param, grad in zip(own, grads.movedim(-1, 0), strict=False):
                param.grad = grad.contiguous()
        for optimizer in optimizers:
            optimizer.step()
        if step % 100 == 0:
            found.append(torch.cat([stack.flatten(1) for stack in stacks], dim=1))
    return torch.stack(found, dim=1)


def test_a_thousand_steps():
    """torch's own tolerance for its stored values is 1e-3."""
    builds = {}
    for case in WITH_NAMESAKE:
        options = {"lr": 1.0} | case.long_run
        builds[case.name, "torch"] = functools.partial(case.build_namesake, **options)
        for fused in (True, False) if case in PLAIN else (True,):
            builds[case.name, fused] = functools.partial(case.build, fused=fused, **options)
    found = dict(zip(builds, samples(*builds.values()), strict=True))
    others = {
        f"{name}, fused={fused}"
        for (name, fused), each in found.items()
        if not torch.allclose(each, found[name, "torch"], rtol=1e-12, atol=0)
    }
    assert not others


def test_equal_optimizers_have_the_same_bits():
    """The control: no optimizer goes another way for the place of its network among others."""
    case = next(case for case in WITH_NAMESAKE if case.name == "rmsprop-centered-l2-momentum")
    build = functools.partial(case.build_namesake, **{"lr": 1.0} | case.long_run)
    found = samples(*[build] * 5)
    assert all(torch.equal(each, found[0]) for each in found)


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
