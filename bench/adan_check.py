"""Whether an optimizer makes the right steps, before they are timed."""

from __future__ import annotations

import torch

from adan_contestants import CONTESTANTS
from implementations import told

SHAPES = ((64, 48), (1,), (1000,), (3, 5, 7))
STEPS, LR = 4, 1e-2


def _steps(name: str, device: torch.device, dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    params = [
        torch.nn.Parameter(torch.randn(shape, generator=generator).to(device, dtype))
        for shape in SHAPES
    ]
    optimizer = CONTESTANTS[name].build(params)
    for group in optimizer.param_groups:
        group["lr"] = LR
    for _ in range(STEPS):
        for param in params:
            param.grad = torch.randn(param.shape, generator=generator).to(device, dtype)
        optimizer.step()
    return [param.detach().cpu().double() for param in params]


def wrong(name: str, device: torch.device) -> str | None:
    """What is off, against the readable way of the same optimizer in double on the CPU."""
    reference = "adam_for_loop" if name.startswith("adam") else "adan_for_loop"
    expected = _steps(reference, torch.device("cpu"), torch.float64)
    try:
        found = _steps(name, device, torch.float32)
    except Exception as error:  # whatever another library raises
        return told(error)
    off = max((a - b).abs().max().item() for a, b in zip(found, expected, strict=True))
    return f"{off:.1e} off after {STEPS} steps" if not off < LR / 1000 else None
