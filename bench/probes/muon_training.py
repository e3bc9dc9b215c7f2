"""Trains a small GPT on the characters of tiny Shakespeare: with AdamW, and with Muon and AdamW.

    python bench/probes/muon_training.py --json OUT.json --plot OUT.svg

The data is the file input.txt in the folder shakespeare of FUSEDSTEP_DATA. Each optimizer trains
with each of its learning rates, from the same weights on the same batches; losses are of a part of
the text that is not trained on.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

from fusedstep import optim

sys.path.insert(0, str(Path(__file__).parents[1]))
from reports.tables import write_plot, write_table
from suites.small_gpt import SmallGPT

BATCH, LENGTH, WARM_UP = 16, 128, 20

#: Learning rates of all weights with AdamW, and those of the hidden matrices where Muon steps them.
RATES = {"AdamW": (1e-3, 3e-3, 6e-3), "Muon + AdamW": (0.01, 0.02, 0.04)}
#: The learning rate of the other weights then: the best of AdamW's.
RATE_BESIDE_MUON = 3e-3


def tokens() -> tuple[Tensor, Tensor, int]:
    """The numbers of the text to train on, those of the other, and the count of characters."""
    folder = Path(os.environ["FUSEDSTEP_DATA"]) / "shakespeare"
    text = (folder / "input.txt").read_text()
    characters = sorted(set(text))
    numbers = torch.tensor([characters.index(each) for each in text])
    cut = len(numbers) * 9 // 10
    return numbers[:cut], numbers[cut:], len(characters)


def batch(text: Tensor, generator: torch.Generator, device: torch.device) -> Tensor:
    places = torch.randint(len(text) - LENGTH - 1, (BATCH,), generator=generator)
    return torch.stack([text[i : i + LENGTH + 1] for i in places]).to(device)


def loss_of(model: nn.Module, rows: Tensor) -> Tensor:
    return F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())


def optimizer_of(kind: str, model: SmallGPT, rate: float) -> torch.optim.Optimizer:
    if kind == "AdamW":
        return optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.1)
    fused = [block.inputs.weight for block in model.blocks]
    known = set(map(id, fused))
    matrices = [p for p in model.blocks.parameters() if p.ndim == 2 and id(p) not in known]
    known |= set(map(id, matrices))
    others = [p for p in model.parameters() if id(p) not in known]
    groups = [
        {"params": fused, "split_heads": 3},
        {"params": matrices},
        {"params": others, "use_muon": False, "lr": RATE_BESIDE_MUON, "betas": (0.9, 0.95)},
    ]
    return optim.Muon(groups, lr=rate, weight_decay=0.1)


def model_of(vocabulary: int, seed: int = 0) -> SmallGPT:
    torch.manual_seed(seed)
    model = SmallGPT(layers=3, width=128, heads=4, vocabulary=vocabulary, length=LENGTH)
    for p in model.parameters():
        if p.ndim == 2:
            torch.nn.init.normal_(p, std=0.02)
    return model


def train(kind: str, rate: float, steps: int, every: int, device: torch.device) -> list[float]:
    """Losses after every so many steps."""
    text = tokens()
    model = model_of(text[2]).to(device)
    return losses_of(model, optimizer_of(kind, model, rate), text, steps, every)


def losses_of(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    text: tuple[Tensor, Tensor, int],
    steps: int,
    every: int,
) -> list[float]:
    """Losses of held-out text after every so many steps, under a schedule and clipped."""
    trained_on, other, _ = text
    device = next(model.parameters()).device
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda t: min((t + 1) / WARM_UP, 0.1 + 0.45 * (1 + math.cos(math.pi * t / steps))),
    )
    generator = torch.Generator().manual_seed(1)
    held = [batch(other, generator, device) for _ in range(4)]
    found = []
    for step in tqdm(range(1, steps + 1), leave=False):
        loss_of(model, batch(trained_on, generator, device)).backward()
        optimizer.step(max_norm=1.0)
        optimizer.zero_grad()
        scheduler.step()
        if step % every == 0:
            with torch.no_grad():
                found.append(sum(loss_of(model, rows).item() for rows in held) / len(held))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, help="of torch on the CPU")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--every", type=int, default=20)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path, help="needs matplotlib")
    asked = parser.parse_args()
    if asked.threads:
        torch.set_num_threads(asked.threads)
    runs = []
    for kind, rates in RATES.items():
        for rate in rates:
            start = time.perf_counter()
            losses = train(kind, rate, asked.steps, asked.every, torch.device(asked.device))
            runs.append({"optimizer": kind, "lr": rate, "losses": losses})
            seconds = time.perf_counter() - start
            print(f"{kind:13} {rate:6g}  {losses[-1]:.4f}  {seconds:5.1f} s", flush=True)
    if asked.json:
        about = {"steps": asked.steps, "every": asked.every, "device": asked.device}
        write_table(asked.json, about | {"runs": runs})
    if asked.plot:
        draw(runs, asked.every, asked.plot)


def draw(runs: list[dict], every: int, path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    for kind in RATES:
        best = min((r for r in runs if r["optimizer"] == kind), key=lambda r: r["losses"][-1])
        steps = [every * (i + 1) for i in range(len(best["losses"]))]
        axes.plot(steps, best["losses"], label=f"{kind}, lr {best['lr']:g}")
    axes.set(xlabel="step", ylabel="loss of held-out text")
    axes.legend()
    write_plot(path, figure)


if __name__ == "__main__":
    main()
