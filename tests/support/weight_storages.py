"""How 16-bit weights keep their float32 value: the options, layouts and errors of steps."""

import pytest
import torch

from fusedstep import optim
from support.layouts import Layout

BF16 = torch.bfloat16


SPLIT, KAHAN = {"master_weights": "split"}, {"rounding": "kahan"}


STOCHASTIC = {"rounding": "stochastic", "seed": 7}


WAYS = (SPLIT, KAHAN, STOCHASTIC)


EACH_WAY = pytest.mark.parametrize("way", WAYS, ids=lambda way: next(iter(way.values())))


def sgd(values, way, lr=1.0, fused=True):
    param = torch.nn.Parameter(values.clone())
    return param, optim.SGD([param], lr=lr, fused=fused, **way)


def step(optimizer, *grads) -> None:
    params = [p for group in optimizer.param_groups for p in group["params"]]
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad
    optimizer.step()


LAYOUTS = (
    Layout("transposed", (70, 63), (1, 70)),
    Layout("every second column", (70, 63), (126, 2)),
    Layout("sliced", (70, 63), (80, 1), offset=3),
    Layout("channels last", (5, 16, 9, 7), (1008, 1, 112, 16)),
)


def errors_of_steps(steps, options=None, count=10**6, device="cpu"):
    """Roundings of values that are 0.3 of the way between two weights."""
    way = STOCHASTIC | (options or {})
    found = []
    param, optimizer = sgd(torch.ones(count, dtype=BF16, device=device), way)
    for _ in range(steps):
        with torch.no_grad():
            param.fill_(1.0)
        step(optimizer, torch.full_like(param, -0.3 * 2**-7))
        assert set(param.unique().tolist()) == {1.0, 1 + 2**-7}
        found.append((param.detach() > 1).double())
    return found


KNOWN = "0100000110111111100000101100011010100000000000001000100100010001"
