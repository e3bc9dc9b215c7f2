"""Checks of hyper-parameters, with torch's texts."""

from __future__ import annotations

import torch
from torch import Tensor


def check_lr(lr: float | Tensor, *, foreach: bool | None = None, capturable: bool = True) -> None:
    if isinstance(lr, Tensor):
        if foreach and not capturable:
            raise ValueError(
                "lr as a Tensor is not supported for capturable=False and foreach=True"
            )
        if lr.numel() != 1:
            raise ValueError("Tensor lr must be 1-element")
    if not lr >= 0.0:
        raise ValueError(f"Invalid learning rate: {lr}")


def check_eps(eps: float) -> None:
    if not eps >= 0.0:
        raise ValueError(f"Invalid epsilon value: {eps}")


def check_state_dtype(state_dtype: torch.dtype | None) -> None:
    if state_dtype not in (None, torch.float32):
        raise ValueError(f"state_dtype must be None or torch.float32, not {state_dtype}")


def check_at_least_zero(name: str, value: float) -> None:
    if not value >= 0.0:
        raise ValueError(f"Invalid {name} value: {value}")


def check_betas(
    betas: tuple[float | Tensor, float | Tensor], *, foreach: bool | None, capturable: bool
) -> tuple[float | Tensor, float | Tensor]:
    """Returns the betas, one-element tensors among them as 0-dimensional ones."""
    for i, beta in enumerate(betas):
        if isinstance(beta, Tensor):
            if foreach and not capturable:
                raise ValueError(
                    f"betas[{i}] as a Tensor is not supported for capturable=False and foreach=True"
                )
            if beta.numel() != 1:
                raise ValueError(f"Tensor betas[{i}] must be 1-element")
        if not 0.0 <= beta < 1.0:
            raise ValueError(f"Invalid beta parameter at index {i}: {beta}")
    beta1, beta2 = betas
    if isinstance(beta1, Tensor) and isinstance(beta2, Tensor):
        return beta1.squeeze(), beta2.squeeze()
    if isinstance(beta1, float) and isinstance(beta2, float):
        return beta1, beta2
    raise ValueError("betas must be either both floats or both Tensors")
