"""Compares the starts of Muon's iteration: how near to orthogonal matrices come, and how it trains.

    python bench/probes/muon_starts.py --json OUT.json [--device cuda] [--train SEEDS]

For matrices of GPT-2's shapes, in float64 and in the usual dtype of the device: singular values
after the iteration, and the distance from the orthogonal factor of the matrix, relative to it. With
--train: the losses at the end of the training of muon_training.py instead, of so many seeds.
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path

import torch
from torch import Tensor

from fusedstep import optim
from fusedstep._matrix.coefficients import coefficients_of
from fusedstep._matrix.newton_schulz import Scratch, orthogonalize, usual_dtype

sys.path.insert(0, str(Path(__file__).parents[1]))
from probes import muon_training
from reports.tables import write_table

SHAPES = ((768, 768), (768, 3072))

#: Starts, and numbers of steps.
WAYS = (("norm", 4), ("norm", 5), ("aol", 4), ("aol", 5))
COEFFICIENTS = ("quintic", "polar_express")

#: Learning rates of a training.
RATES = (0.02, 0.04)


def matrices(rows: int, columns: int) -> dict[str, Tensor]:
    """Matrices whose singular values differ in various ways, in float64."""
    generator = torch.Generator().manual_seed(rows + columns)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    u, _, v = torch.linalg.svd(normal(rows, columns), full_matrices=False)
    rank = rows // 16
    low = normal(rows, rank) @ normal(rank, columns) / math.sqrt(rank)
    sizes = torch.logspace(0, -2, rows, dtype=torch.float64)
    return {
        "normal": normal(rows, columns),
        "a sixteenth of the rank, and noise of 3 %": low + 0.03 * normal(rows, columns),
        "singular values from 1 to 1e-4": u * torch.logspace(0, -4, rows, dtype=torch.float64) @ v,
        "singular values 1 / i": u / torch.arange(1, rows + 1) @ v,
        "rows from 1 to 1e-2": sizes[:, None] * normal(rows, columns),
    }


def figures_of(x: Tensor, orthogonal: Tensor) -> dict[str, float]:
    values = torch.linalg.svdvals(x)
    distance = (x - orthogonal).norm() / orthogonal.norm()
    tenth, median = values.quantile(torch.tensor([0.1, 0.5], dtype=x.dtype)).tolist()
    return {
        "tenth": tenth,
        "median": median,
        "largest": values.max().item(),
        "distance": distance.item(),
    }


def spreads(device: torch.device) -> list[dict]:
    found = []
    for shape in SHAPES:
        for kind, x in matrices(*shape).items():
            u, _, v = torch.linalg.svd(x, full_matrices=False)
            x = (x / x.norm())[None].to(device)
            for name in COEFFICIENTS:
                for start, count in WAYS:
                    about = {"shape": shape, "kind": kind, "coefficients": name, "start": start}
                    about["steps"] = count
                    for dtype in (torch.float64, usual_dtype(device)):
                        steps = coefficients_of(name, count)
                        y = orthogonalize(x.to(dtype, copy=True), steps, Scratch(), start == "aol")[
                            0
                        ]
                        about[str(dtype)[6:]] = figures_of(y.double().cpu(), u @ v)
                    found.append(about)
                    print(about, flush=True)
    return found


def losses(seeds: int, steps: int, device: torch.device) -> list[dict]:
    found = []
    for start, count in WAYS[:3]:
        own = {"ns_start": start, "ns_steps": count}
        for rate in RATES:
            ends = [trained(seed, rate, own, steps, device) for seed in range(seeds)]
            found.append({"start": start, "steps": count, "lr": rate, "losses": ends})
            print(found[-1], flush=True)
    return found


def trained(seed: int, rate: float, own: dict, steps: int, device: torch.device) -> float:
    """The loss of held-out text by the end."""
    text = muon_training.tokens()
    model = muon_training.model_of(text[2], seed).to(device)
    optimizer = muon_training.optimizer_of("Muon + AdamW", model, rate)
    assert isinstance(optimizer, optim.Muon)
    for group in optimizer.param_groups:
        if group.get("use_muon", True):
            group.update(own)
    return muon_training.losses_of(model, optimizer, text, steps, steps)[-1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"))
    parser.add_argument("--threads", type=int, help="of torch on the CPU")
    parser.add_argument("--train", type=int, default=0, help="seeds to train with")
    parser.add_argument("--steps", type=int, default=150, help="of a training")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    if asked.threads:
        torch.set_num_threads(asked.threads)
    results = {"by": "bench/probes/muon_starts", "device": asked.device.type}
    if asked.train:
        results |= {"steps": asked.steps, "losses": losses(asked.train, asked.steps, asked.device)}
    else:
        results["spreads"] = spreads(asked.device)
    if asked.json:
        write_table(asked.json, results)


if __name__ == "__main__":
    main()
