"""Cases of optimizers with factored second moments, Adafactor and CAME, and steps of them."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from fusedstep import optim
from support.stepping import make_gradients

#: Options of Adafactor by torch's names, and those of its reference.
ADAFACTOR: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "torch": ({}, {"torchs": True}),
    "torch-decay": (
        {"lr": 0.05, "beta2_decay": -0.6, "d": 1.5, "weight_decay": 0.1, "maximize": True},
        {"torchs": True, "lr": 0.05, "decay": -0.6, "d": 1.5, "weight_decay": 0.1}
        | {"maximize": True},
    ),
    "torch-eps": ({"eps": (0.3, 2.0)}, {"torchs": True, "eps1": 0.3, "eps2": 2.0}),
    "transformers": ({"variant": "transformers"}, {"torchs": False}),
    "transformers-warmup": (
        {"warmup_init": True, "beta1": 0.8, "weight_decay": 0.1, "clip_threshold": 0.5},
        {"torchs": False, "warmup": True, "beta1": 0.8, "weight_decay": 0.1, "d": 0.5},
    ),
    "transformers-bound": (
        {"max_relative_step": 0.05, "weight_decay": 0.1},
        {"torchs": False, "bound": 0.05, "weight_decay": 0.1},
    ),
    "transformers-fixed": (
        {"lr": 1e-3, "relative_step": False, "scale_parameter": False, "decay_rate": -0.7},
        {"torchs": False, "lr": 1e-3, "relative": False, "scale": False, "decay": -0.7},
    ),
}

#: Options of CAME.
CAME: dict[str, dict[str, Any]] = {
    "defaults": {},
    "decay": {"lr": 0.02, "weight_decay": 0.3},
    "betas": {"lr": 0.02, "betas": (0.6, 0.95, 0.7)},
    "eps": {"lr": 0.02, "eps": (0.3, 0.2)},
    "clipped": {"lr": 0.02, "clip_threshold": 0.4, "maximize": True},
}

#: Of both.
CASES = [(optim.Adafactor, options) for options, _ in ADAFACTOR.values()] + [
    (optim.CAME, options) for options in CAME.values()
]
IDS = [f"adafactor-{name}" for name in ADAFACTOR] + [f"came-{name}" for name in CAME]


def stepped(
    optimizer: torch.optim.Optimizer,
    weights: list[Tensor],
    steps: int = 3,
    grads: Iterable[Tensor] | None = None,
    begin: int = 0,
) -> torch.optim.Optimizer:
    """The optimizer after some steps, of the same gradients each, or of others."""
    for step in range(begin, begin + steps):
        found = grads or make_gradients([w.shape for w in weights], weights[0].dtype, step)
        for weight, grad in zip(weights, found, strict=True):
            weight.grad = grad
        optimizer.step()
    return optimizer


def assert_same(
    found: tuple[list[Tensor], torch.optim.Optimizer],
    expected: tuple[list[Tensor], torch.optim.Optimizer],
) -> None:
    """The same bits of weights and states."""
    (weights, optimizer), (others, other) = found, expected
    for weight, same in zip(weights, others, strict=True):
        assert torch.equal(weight, same)
        assert optimizer.state[weight].keys() == other.state[same].keys()
        for name, value in optimizer.state[weight].items():
            assert torch.equal(value, other.state[same][name]), name
