#!/usr/bin/env python3
"""Trains a small network of regression with every optimizer that keeps its states in codes.

    PYTHONPATH=bench:python python bench/probes/losses_in_codes.py OUT.json

The learning rate of an optimizer is the one of a grid with which float32 states end lowest. All
runs of a seed begin with the same weights and see the same batches; their networks are stacked.
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from tqdm import tqdm

from fusedstep import optim

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from reports.tables import write_table

INPUTS, WIDTH, BATCH, STEPS, EXAMPLES = 64, 64, 64, 400, 2048

#: Steps whose mean is the loss at the end.
LAST = 50

KINDS = ("int8", "int4", "fp8")

Optimizer = Callable[[list[Parameter], float, str | None], torch.optim.Optimizer]


def of_all(cls: Callable[..., torch.optim.Optimizer], **options: Any) -> Optimizer:
    return lambda weights, lr, kind: cls(weights, lr=lr, state_dtype=kind, **options)


def of_matrices(
    cls: Callable[..., torch.optim.Optimizer], of: dict[str, Any], of_others: dict[str, Any]
) -> Optimizer:
    def make(weights: list[Parameter], lr: float, kind: str | None) -> torch.optim.Optimizer:
        matrices = [weight for weight in weights if min(weight.shape) > 1]
        others = [weight for weight in weights if min(weight.shape) == 1]
        groups = [{"params": matrices, **of}, {"params": others, **of_others}]
        return cls(groups, lr=lr, state_dtype=kind)

    return make


#: Optimizers with the learning rate in the middle of their grid.
RUNS: dict[str, tuple[Optimizer, float]] = {
    "Adam": (of_all(optim.Adam), 3e-3),
    "Adam, amsgrad": (of_all(optim.Adam, amsgrad=True), 3e-3),
    "AdamW": (of_all(optim.AdamW), 3e-3),
    "NAdam": (of_all(optim.NAdam), 3e-3),
    "RAdam": (of_all(optim.RAdam), 3e-3),
    "Adamax": (of_all(optim.Adamax), 3e-3),
    "Lamb": (of_all(optim.Lamb), 1e-2),
    "Adan": (of_all(optim.Adan), 3e-3),
    "Lion": (of_all(optim.Lion), 3e-4),
    "SGD, momentum 0.9": (of_all(optim.SGD, momentum=0.9), 3e-2),
    "RMSprop": (of_all(optim.RMSprop), 1e-3),
    "RMSprop, centered, momentum 0.9": (
        of_all(optim.RMSprop, centered=True, momentum=0.9),
        3e-4,
    ),
    "Adagrad": (of_all(optim.Adagrad), 1e-2),
    "Adadelta": (of_all(optim.Adadelta), 1.0),
    "ASGD": (of_all(optim.ASGD), 1e-1),
    "Rprop": (of_all(optim.Rprop), 1e-3),
    "Muon": (of_matrices(optim.Muon, {}, {"use_muon": False}), 3e-2),
    "MuSGD": (of_matrices(optim.MuSGD, {"use_muon": True, "momentum": 0.9}, {}), 3e-2),
    "GaLoreAdamW": (of_matrices(optim.GaLoreAdamW, {"rank": 64, "scale": 1.0}, {}), 3e-3),
    "APOLLOAdamW": (of_matrices(optim.APOLLOAdamW, {"rank": 64}, {}), 3e-3),
}


def gaussian(seed: int, gain: float, shapes: list[tuple[int, ...]]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [gain * s[-1] ** -0.5 * torch.randn(s, generator=generator) for s in shapes]


def output(weights: list[Tensor], inputs: Tensor) -> Tensor:
    """The outputs of networks whose weights and inputs are stacked."""
    first, bias, second, other_bias, last = weights
    hidden = torch.baddbmm(bias, inputs, first.mT).tanh()
    return torch.bmm(torch.baddbmm(other_bias, hidden, second.mT).tanh(), last.mT)


def losses_of(make: Optimizer, lrs: list[float], seeds: int) -> Tensor:
    """Trains at once for each learning rate, kind and seed; returns the last losses so."""
    shapes = [(WIDTH, INPUTS), (1, WIDTH), (WIDTH, WIDTH), (1, WIDTH), (1, WIDTH)]
    runs = list(itertools.product(lrs, (None, *KINDS), range(seeds)))
    inputs, targets = [], []
    for seed in range(seeds):
        generator = torch.Generator().manual_seed(seed)
        inputs.append(torch.randn(EXAMPLES, INPUTS, generator=generator))
        teacher = [each[None] for each in gaussian(seed + 100, 3.0, shapes)]
        found = output(teacher, inputs[-1][None])[0]
        targets.append((found - found.mean()) / found.std())
    models = [list(map(Parameter, gaussian(seed, 1.0, shapes))) for *_, seed in runs]
    optimizers = [make(m, lr, kind) for m, (lr, kind, _) in zip(models, runs, strict=True)]
    generator, last = torch.Generator().manual_seed(7), []
    for _ in range(STEPS):
        batch = torch.randint(EXAMPLES, (BATCH,), generator=generator)
        weights = [torch.stack(each) for each in zip(*models, strict=True)]
        ours = torch.stack([inputs[seed][batch] for *_, seed in runs])
        errors = output(weights, ours) - torch.stack([targets[seed][batch] for *_, seed in runs])
        losses = errors.square().mean((1, 2))
        losses.sum().backward()
        for optimizer in optimizers:
            optimizer.step(zero_grad="none")
        last.append(losses.detach())
    return torch.stack(last[-LAST:]).mean(0).view(len(lrs), 1 + len(KINDS), seeds)


def row(name: str, seeds: int) -> dict[str, Any]:
    make, middle = RUNS[name]
    lrs = [middle * factor for factor in (0.3, 1.0)]
    losses = losses_of(make, lrs, seeds)
    best = int(losses[:, 0].mean(1).nan_to_num(math.inf).argmin())
    found: dict[str, Any] = {"optimizer": name, "lr": lrs[best]}
    for kind, of_kind in zip(("float32", *KINDS), losses[best], strict=True):
        ratios = of_kind / losses[best, 0]
        found[kind] = of_kind.mean().item()
        if kind != "float32":
            found[f"{kind} over float32"] = ratios.mean().item()
            found[f"{kind} over float32, most"] = ratios.max().item()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("output", type=Path, metavar="OUT.json")
    parser.add_argument("--seeds", type=int, default=3, help="how many (default: 3)")
    parser.add_argument("--only", help="optimizers whose name contains this")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    names = [name for name in RUNS if not arguments.only or arguments.only in name]
    rows = [row(name, arguments.seeds) for name in tqdm(names, desc="optimizers")]
    write_table(arguments.output, {"torch": torch.__version__, "steps": STEPS, "rows": rows})
    for found in rows:
        print(found)


if __name__ == "__main__":
    main()
