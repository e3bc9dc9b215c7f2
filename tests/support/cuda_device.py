"""Base of the laws on a CUDA device: subjects there, their gradients, and comparisons."""

import copy
import subprocess
import sys

import pytest
import torch

from fusedstep._native import ops
from support.stepping import as_parameters, assert_same_bits, make_gradients, make_weights

needs_cuda = pytest.mark.skipif(
    not torch.cuda.is_available() or ops.missing_on("cuda") is not None,
    reason="needs a CUDA device and libfusedstep_cuda.so",
)


#: Around words, segments, parts and chunks of the kernels; one of several chunks.
SHAPES = ((1,), (7,), (64, 64), (129,), (4097,), (16385,), (300, 500), (3, 5, 7), (0, 4))


def on_cuda(params):
    """The same parameters on the device, in the same layouts."""
    twins = []
    for param in params:
        there = torch.empty_strided(
            param.shape, param.stride(), dtype=param.dtype, device="cuda"
        ).copy_(param.detach())
        twins.append(torch.nn.Parameter(there))
    return twins


def subjects(case, dtype, shapes=SHAPES, **options):
    """An optimizer on the CPU, its parameters, and both on the device."""
    params = as_parameters(make_weights(shapes, dtype))
    twins = on_cuda(params)
    return case.build(params, **options), params, case.build(twins, **options), twins


def set_gradients(params, twins, step, scale=1.0):
    gradients = make_gradients([p.shape for p in params], params[0].dtype, step)
    for param, twin, grad in zip(params, twins, gradients, strict=True):
        param.grad = grad * scale
        twin.grad = param.grad.to(twin.device)


def assert_same(optimizer, params, twin_optimizer, twins, what):
    for param, twin in zip(params, twins, strict=True):
        assert_same_bits(twin.detach().cpu(), param.detach(), what)
        for name, value in optimizer.state[param].items():
            assert_same_bits(twin_optimizer.state[twin][name].cpu(), value, f"{what}: {name}")


def assert_states_move(optimizer, params, twin_optimizer, twins):
    """Both go on alike after each has loaded the states of the other device."""
    for step in (1, 2, 3, 4):
        set_gradients(params, twins, step)
        if step == 3:
            first, second = optimizer.state_dict(), twin_optimizer.state_dict()
            optimizer.load_state_dict(copy.deepcopy(second))
            twin_optimizer.load_state_dict(copy.deepcopy(first))
        optimizer.step()
        twin_optimizer.step()
    assert_same(optimizer, params, twin_optimizer, twins, "after the states were exchanged")


def assert_reported(code, environment):
    """In a process of its own: after an error of the device nothing else works there."""
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True
    )
    assert "reported: CUDA error" in done.stdout, done.stdout + done.stderr
