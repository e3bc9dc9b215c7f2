"""Base of the framework tests: a small network, its data, and the losses that are expected.

Importing a framework takes seconds. So a test file is about one of them, and has a fixture that
imports it; `./run.sh test` gives a file to one process.
"""

import importlib.util

import pytest
import torch
from torch.nn.functional import cross_entropy

from support.cases import Case


def need(framework: str) -> None:
    """Skips the file that is being imported if the framework is not installed."""
    if importlib.util.find_spec(framework) is None:
        pytest.skip(f"{framework} is not installed", allow_module_level=True)


def deepspeed_by_gloo() -> None:
    """Has DeepSpeed add up by gloo: what it has of its own for that takes a minute to compile."""
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def network() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3))


def batches(count: int = 6, size: int = 8) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (
            torch.randn(size, 6, generator=generator),
            torch.randint(3, (size,), generator=generator),
        )
        for _ in range(count)
    ]


def loss_of(model: torch.nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    inputs, labels = batch
    return cross_entropy(model(inputs), labels)


def reference(case: Case) -> tuple[type[torch.optim.Optimizer], dict]:
    """The class and the options to compare with: torch's, or ours in torch operations."""
    if case.namesake is not None:
        return case.namesake, case.options | {"foreach": False}
    return case.optimizer, case.options | {"fused": False}


def ours(case: Case) -> tuple[type[torch.optim.Optimizer], dict]:
    """The class and the options, nothing said about kernels."""
    return case.optimizer, case.options


def assert_native(optimizer: torch.optim.Optimizer) -> None:
    assert optimizer._plans, "stepped in torch operations"


def assert_same_losses(losses, expected, rtol: float = 1e-5) -> None:
    assert len(losses) == len(expected)
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=rtol, atol=0)
