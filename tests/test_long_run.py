"""Law: over a thousand steps the classes here go where torch's go.

The experiment is the one by which torch checks its C++ optimizers against stored values: a small
network in double precision, with a learning rate far too large, looked at every 100 steps. Here
torch's class gives the values anew.
"""

import pytest
import torch

from fusedstep import optim
from peers import PEERS

WEIGHTS = (
    [[-0.2109, -0.4976], [-0.1413, -0.3420], [-0.2524, 0.6976]],
    [-0.1085, -0.2979, 0.6892],
    [[-0.0508, -0.3941, -0.2843]],
    [-0.0711],
)
ROWS = [
    (optim.Adam, {}),
    (optim.Adam, {"weight_decay": 1e-2}),
    (optim.Adam, {"weight_decay": 1e-6, "amsgrad": True}),
    (optim.AdamW, {}),
    (optim.AdamW, {"weight_decay": 0}),
    (optim.AdamW, {"amsgrad": True}),
    (optim.Adagrad, {}),
    (optim.Adagrad, {"weight_decay": 1e-2}),
    (optim.Adagrad, {"weight_decay": 1e-6, "lr_decay": 1e-3}),
]


def samples(cls, **options):
    """All weights after step 1, 101, ... 1001."""
    first, second = torch.nn.Linear(2, 3), torch.nn.Linear(3, 1)
    network = torch.nn.Sequential(first, torch.nn.Sigmoid(), second, torch.nn.Sigmoid()).double()
    params = list(network.parameters())
    with torch.no_grad():
        for param, value in zip(params, WEIGHTS, strict=True):
            param.copy_(torch.tensor(value))
    inputs = torch.tensor([[0.1, 0.2], [0.3, 0.4], [0.5, 0.6]], dtype=torch.float64)
    optimizer = cls(params, lr=1.0, **options)
    found = []
    for step in range(1001):
        optimizer.zero_grad()
        network(inputs).sum().backward()
        optimizer.step()
        if step % 100 == 0:
            found.append(torch.cat([param.detach().reshape(-1) for param in params]))
    return torch.stack(found)


@pytest.mark.parametrize(("cls", "options"), ROWS, ids=lambda row: getattr(row, "__name__", None))
def test_a_thousand_steps(cls, options):
    """torch's own tolerance for its stored values is 1e-3."""
    theirs = samples(PEERS[cls], **options)
    for fused in (True, False):
        ours = samples(cls, fused=fused, **options)
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=0, msg=f"fused={fused}")


def test_another_formula_drifts():
    """The control: beta2 off by a millionth of itself is seen."""
    ours = samples(optim.Adam, betas=(0.9, 0.999 * (1 - 1e-6)))
    assert (ours / samples(torch.optim.Adam) - 1).abs().max() > 1e-6
