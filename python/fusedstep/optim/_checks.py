"""Checks of hyper-parameters and what goes with them, with torch's texts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim.optimizer import _get_capturable_supported_devices


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


def check_max_grad_norm(max_grad_norm: float | None) -> None:
    if max_grad_norm is not None and not max_grad_norm > 0.0:
        raise ValueError(f"Invalid max_grad_norm value: {max_grad_norm}")


def check_at_least_zero(name: str, value: float) -> None:
    if not value >= 0.0:
        raise ValueError(f"Invalid {name} value: {value}")


def check_beta(index: int, beta: float | Tensor) -> None:
    if isinstance(beta, Tensor) and beta.numel() != 1:
        raise ValueError(f"Tensor betas[{index}] must be 1-element")
    if not 0.0 <= beta < 1.0:
        raise ValueError(f"Invalid beta parameter at index {index}: {beta}")


def check_betas(
    betas: tuple[float | Tensor, float | Tensor], *, foreach: bool | None, capturable: bool
) -> tuple[float | Tensor, float | Tensor]:
    """Returns the betas, one-element tensors among them as 0-dimensional ones."""
    for i in range(2):
        check_beta(i, betas[i])
    beta1, beta2 = betas
    if isinstance(beta1, float) and isinstance(beta2, float):
        return beta1, beta2
    if not (isinstance(beta1, Tensor) and isinstance(beta2, Tensor)):
        raise ValueError("betas must be either both floats or both Tensors")
    if foreach and not capturable:
        raise ValueError(
            "betas[0] as a Tensor is not supported for capturable=False and foreach=True"
        )
    return as_number(beta1), as_number(beta2)


def as_number(option: float | Tensor) -> float | Tensor:
    """A one-element tensor without dimensions, which would go over to the weight."""
    return option.squeeze() if isinstance(option, Tensor) else option


def check_operands(weights: list[Tensor], grads: list[Tensor]) -> None:
    """What native kernels refuse, where torch's operations would broadcast or stop half way."""
    for index, (weight, grad) in enumerate(zip(weights, grads, strict=True)):
        what = f"tensor {index} of the list: the gradient"
        if grad.shape != weight.shape:
            shapes = f"{list(grad.shape)} is not the weight's, {list(weight.shape)}"
            raise RuntimeError(f"{what}'s shape {shapes}")
        if grad.dtype != weight.dtype:
            dtypes = [str(each.dtype).removeprefix("torch.") for each in (grad, weight)]
            raise RuntimeError(f"{what} is {dtypes[0]} but the weight is {dtypes[1]}")
        if grad.device != weight.device:
            raise RuntimeError(f"{what} is on {grad.device} but the weight is on {weight.device}")
        plain = type(weight) in (Tensor, Parameter) and weight.layout is torch.strided
        if plain and torch._debug_has_internal_overlap(weight) == 1:
            raise RuntimeError(
                f"tensor {index} of the list: the weight overlaps itself in memory "
                "(an expanded tensor?); clone() it first"
            )


def numeric(group: dict[str, Any]) -> str:
    """The options of a group that are numbers or should be, for an error's text."""
    others = {"params", "param_names", "foreach", "fused", "state_dtype"}
    return ", ".join(
        f"{name}={value!r}"
        for name, value in group.items()
        if name not in others and not isinstance(value, bool)
    )


def check_capturable(weight: Tensor, step: Tensor, group: dict[str, Any]) -> None:
    devices = _get_capturable_supported_devices(supports_xla=not group["foreach"])
    if weight.device.type != step.device.type or weight.device.type not in devices:
        raise AssertionError(
            f"If capturable=True, params and state_steps must be on supported devices: {devices}."
        )
