"""Counts the codes in which AdamW8bit differs from bitsandbytes' own on a GPU.

    PYTHONPATH=python:tests python bench/probes/bitsandbytes_codes.py OUT.json

First from shares within 64 ulp of all borders between two codes, by a step whose state is the
gradient; then after one step and ten of a million weights. `ulp` is how far the shares of those
that differ are from a border. Needs bitsandbytes.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import bitsandbytes
import torch
from torch import Tensor

from fusedstep import optim
from reference.codes import bitsandbytes_codes, bitsandbytes_map

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from reports.tables import write_table

SHAPE, BLOCK, AWAY = (4096, 256), 256, 64
STATES = (("exp_avg", "state1", True), ("exp_avg_sq", "state2", False))
"""Names here and there, and whether the state has a sign."""


def borders(signed: bool) -> Tensor:
    values = bitsandbytes_map(signed)
    return (values[1:] + values[:-1]) * 0.5


def ulp_to_border(shares: Tensor, signed: bool) -> Tensor:
    """The distance of float64 shares to the next border, in units of float32's last place."""
    found = borders(signed).double()
    at = torch.searchsorted(found, shares).clamp(1, len(found) - 1)
    is_below = (shares - found[at - 1]).abs() < (shares - found[at]).abs()
    near = found[torch.where(is_below, at - 1, at)]
    return (shares - near).abs() / 2.0 ** (near.abs().log2().floor() - 23)


class Pair:
    """One weight stepped by bitsandbytes and by this library."""

    def __init__(self, weight: Tensor, **options: Any) -> None:
        self.weights = [torch.nn.Parameter(weight.clone().cuda()) for _ in range(2)]
        classes = (bitsandbytes.optim.AdamW8bit, optim.AdamW8bit)
        self.optimizers = [
            cls([weight], lr=1e-3, weight_decay=0.01, **options)
            for cls, weight in zip(classes, self.weights, strict=True)
        ]

    def step(self, gradient: Tensor) -> None:
        for weight, optimizer in zip(self.weights, self.optimizers, strict=True):
            weight.grad = gradient.cuda()
            optimizer.step()

    def codes(self, ours: str, theirs: str) -> list[Tensor]:
        states = (o.state[w] for o, w in zip(self.optimizers, self.weights, strict=True))
        return [
            s[name].flatten().long().cpu() for s, name in zip(states, (theirs, ours), strict=True)
        ]


def compared(
    theirs: Tensor, ours: Tensor, shares: Tensor | None = None, signed: bool = True
) -> dict[str, Any]:
    apart = (theirs - ours).abs()
    differ = apart > 0
    found = {"codes": len(apart), "differ": int(differ.sum()), "levels": int(apart.max())}
    if shares is None or not found["differ"]:
        return found
    return found | {"ulp": float(ulp_to_border(shares[differ], signed).max())}


def near_borders() -> dict[str, Any]:
    found = {}
    for ours, theirs, signed in STATES:
        away = torch.arange(-AWAY, AWAY + 1, dtype=torch.int32)
        near = (borders(signed).view(torch.int32)[:, None] + away).view(torch.float32).flatten()
        near = near if signed else near.double().sqrt().float()  # the second moment has squares
        rows = torch.nn.functional.pad(near, (0, -len(near) % (BLOCK - 1))).view(-1, BLOCK - 1)
        gradient = torch.nn.functional.pad(rows, (1, 0), value=1.0)
        pair = Pair(torch.zeros_like(gradient), betas=(0.0, 0.0))
        pair.step(gradient)
        shares = (gradient if signed else gradient * gradient).flatten()
        kept = shares != 0
        real, mine = (codes[kept] for codes in pair.codes(ours, theirs))
        search = bitsandbytes_codes(shares, signed)[kept]
        found["signed" if signed else "unsigned"] = {
            "ours": compared(real, mine, shares.double()[kept], signed),
            "the search of the tests": compared(real, search, shares.double()[kept], signed),
        }
    return found


def after_steps() -> dict[str, Any]:
    torch.manual_seed(0)
    pair, found = Pair(torch.randn(SHAPE, device="cuda")), {}
    generator = torch.Generator().manual_seed(1)
    scale = 10 ** (3 * torch.rand(SHAPE[0], 1, generator=generator) - 4)
    for step in range(1, 11):
        pair.step(torch.randn(SHAPE, generator=generator) * scale)
        if step in (1, 10):
            found[str(step)] = {
                ours: compared(*pair.codes(ours, theirs)) for ours, theirs, _ in STATES
            }
    return found


def main() -> None:
    write_table(Path(sys.argv[1]), {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "bitsandbytes": bitsandbytes.__version__,
        "near borders": near_borders(),
        "after steps": after_steps(),
    })  # fmt: skip


if __name__ == "__main__":
    main()
