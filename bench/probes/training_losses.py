#!/usr/bin/env python3
"""Trains a small GPT on tiny Shakespeare with small states and with 16-bit weights.

    PYTHONPATH=bench:python python bench/probes/training_losses.py OUT.json [--data FOLDER]

All runs of a seed begin with the same weights and see the same batches of characters. The text is
FOLDER/shakespeare/input.txt; its last tenth is for validation. Writes the losses, and a plot of
them beside: OUT.svg.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from fusedstep import optim
from fusedstep._state.storage import value_of, way_of
from suites.small_gpt import SmallGPT

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from reports.tables import write_plot, write_table

BATCH, LENGTH, STEPS, LR, BETAS, WARM_UP = 32, 64, 500, 4e-3, (0.9, 0.99), 50

#: Steps that a number of a curve is the mean of.
EVERY = 10

#: Steps whose mean is the training loss in the end.
LAST = 20

BF16 = torch.bfloat16

MASTERS = "float32 masters"

#: The weights' dtype and the options of AdamW, by the name of the run. The first is compared with.
RUNS: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "float32": (torch.float32, {}),
    "int8": (torch.float32, {"state_dtype": "int8"}),
    "int4": (torch.float32, {"state_dtype": "int4"}),
    "fp8": (torch.float32, {"state_dtype": "fp8"}),
    f"bf16, {MASTERS}": (BF16, {"master_weights": "float32"}),
    "bf16, split": (BF16, {"master_weights": "split"}),
    "bf16, stochastic": (BF16, {"rounding": "stochastic"}),
    "bf16, Kahan": (BF16, {"rounding": "kahan"}),
    "bf16, split, int8": (BF16, {"master_weights": "split", "state_dtype": "int8"}),
    "bf16 alone": (BF16, {}),
}


def characters(folder: Path) -> tuple[Tensor, Tensor, int]:
    """The text as numbers, what is for training and what for validation; how many there are."""
    text = (folder / "shakespeare" / "input.txt").read_text(encoding="utf-8")
    kinds = sorted(set(text))
    numbers = {character: number for number, character in enumerate(kinds)}
    tokens = torch.tensor([numbers[character] for character in text])
    border = len(tokens) * 9 // 10
    return tokens[:border], tokens[border:], len(kinds)


def batches(tokens: Tensor, count: int, seed: int) -> list[Tensor]:
    """Random pieces of a text, each with the character after it."""
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(tokens) - LENGTH, (count, BATCH), generator=generator)
    return [tokens[each[:, None] + torch.arange(LENGTH + 1)] for each in starts]


def loss_of(model: SmallGPT, batch: Tensor) -> Tensor:
    scores = model(batch[:, :-1])
    return F.cross_entropy(scores.flatten(0, 1).float(), batch[:, 1:].flatten())


def new_model(kinds: int, seed: int) -> SmallGPT:
    torch.manual_seed(seed)
    model = SmallGPT(layers=2, width=64, heads=4, vocabulary=kinds, length=LENGTH)
    for embedding in (model.tokens, model.places):
        torch.nn.init.normal_(embedding.weight, std=0.02)
    return model


def rate(step: int, steps: int) -> float:
    """The share of the learning rate: it rises for a while, then falls to a tenth by a cosine."""
    if step < WARM_UP:
        return (step + 1) / WARM_UP
    return 0.55 + 0.45 * math.cos(math.pi * (step - WARM_UP) / max(1, steps - WARM_UP))


def start(name: str, kinds: int, seed: int) -> tuple[SmallGPT, optim.AdamW]:
    dtype, options = RUNS[name]
    options = {"lr": LR, "betas": BETAS, "weight_decay": 0.1, "fused": True} | options
    model = new_model(kinds, seed).to(dtype)
    return model, optim.AdamW(model.parameters(), **options)


@torch.no_grad()
def differing(optimizer: optim.AdamW, other: optim.AdamW) -> int:
    """Counts weights that have float32 values of other bits."""
    values = []
    for each in (optimizer, other):
        (group,) = each.param_groups
        ways = ((way_of(group, p), p, each.state[p]) for p in group["params"])
        values.append([value_of(*of_weight).view(torch.int32) for of_weight in ways])
    return sum(int((one != two).sum()) for one, two in zip(*values, strict=True))


def compare_values(data: tuple[Tensor, Tensor, int], steps: int) -> dict[str, int]:
    """Trains with split weights, and gives their gradients to float32 masters as well."""
    text, _, kinds = data
    (model, split), (_, masters) = (start(f"bf16, {n}", kinds, 0) for n in ("split", MASTERS))
    rounded = 0
    for step, batch in enumerate(tqdm(batches(text, steps, 0), desc="same gradients", leave=False)):
        loss_of(model, batch).backward()
        pairs = [*zip(*(each.param_groups[0]["params"] for each in (split, masters)), strict=True)]
        for weight, copied in pairs:
            copied.grad = weight.grad.clone()
        for optimizer in (split, masters):
            optimizer.param_groups[0]["lr"] = LR * rate(step, steps)
            optimizer.step(max_norm=1.0, zero_grad=True)
        rounded += sum(int((weight != copied).sum()) for weight, copied in pairs)
    return {
        "values that differ in the end": differing(split, masters),
        "weights rounded otherwise, over all steps": rounded,
    }


def train(name: str, data: tuple[Tensor, Tensor, int], seed: int, steps: int) -> dict[str, Any]:
    text, unseen, kinds = data
    model, optimizer = start(name, kinds, seed)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate(step, steps))
    losses = []
    for batch in tqdm(batches(text, steps, seed), desc=f"{name}, seed {seed}", leave=False):
        loss = loss_of(model, batch)
        loss.backward()
        optimizer.step(max_norm=1.0, zero_grad=True)
        scheduler.step()
        losses.append(loss.item())
    with torch.no_grad():
        validation = [loss_of(model, batch).item() for batch in batches(unseen, 25, 0)]
    curve = [statistics.fmean(losses[i : i + EVERY]) for i in range(0, steps, EVERY)]
    return {
        "run": name,
        "seed": seed,
        "training": round(statistics.fmean(losses[-LAST:]), 5),
        "validation": round(statistics.fmean(validation), 5),
        "curve": [round(loss, 4) for loss in curve],
    }


def summary(rows: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Means over the seeds of the losses in the end, and of their ratios to the first run's."""
    first = {row["seed"]: row for row in rows if row["run"] == next(iter(RUNS))}
    found = {}
    for name in dict.fromkeys(row["run"] for row in rows):
        mine = [row for row in rows if row["run"] == name]
        found[name] = {}
        for kind in ("training", "validation"):
            ratios = [row[kind] / first[row["seed"]][kind] for row in mine]
            found[name] |= {
                kind: round(statistics.fmean(row[kind] for row in mine), 4),
                f"{kind} ratio": round(statistics.fmean(ratios), 4),
                f"{kind} ratio, worst": round(max(ratios), 4),
            }
    return found


def draw(results: dict[str, Any], file: Path) -> None:
    """Draws the losses, and their ratios to those of the first run; the same results, same file."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4), layout="constrained")
    losses, ratios = figure.subplots(1, 2)
    seeds = sorted({row["seed"] for row in results["rows"]})
    curves = {
        (row["run"], row["seed"]): torch.tensor(row["curve"]).double() for row in results["rows"]
    }
    baseline = next(iter(RUNS))
    for name in results["summary"]:
        mean = torch.stack([curves[name, seed] for seed in seeds]).mean(0)
        of_first = torch.stack([curves[name, s] / curves[baseline, s] for s in seeds]).mean(0)
        steps = [EVERY * (i + 0.5) for i in range(len(mean))]
        dashes = {"ls": "--"} if name.startswith("bf16") else {}
        (line,) = losses.plot(steps, mean, lw=1, label=name, **dashes)
        ratios.plot(steps, 100 * (of_first - 1), lw=1, color=line.get_color(), **dashes)
    losses.set(xlabel="step", ylabel="training loss", yscale="log")
    losses.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    losses.yaxis.set_minor_formatter(lambda value, _: f"{value:g}")
    ratios.set(xlabel="step", ylabel=f"above that of {baseline}, %")
    for axis in (losses, ratios):
        axis.grid(alpha=0.3)
    figure.legend(loc="outside lower center", ncols=5, frameon=False)
    write_plot(file, figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("output", type=Path, metavar="OUT.json")
    data = os.environ.get("FUSEDSTEP_DATA", "data")
    parser.add_argument("--data", type=Path, default=Path(data), help="default: FUSEDSTEP_DATA")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seeds", type=int, default=3, help="how many (default: 3)")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    text = characters(arguments.data)
    jobs = [(name, seed) for seed in range(arguments.seeds) for name in RUNS]
    rows = [train(name, text, seed, arguments.steps) for name, seed in tqdm(jobs, desc="runs")]
    results = {
        "torch": torch.__version__,
        "threads": arguments.threads,
        "steps": arguments.steps,
        "weights": sum(weight.numel() for weight in new_model(text[2], 0).parameters()),
        "split weights beside masters of the same gradients": compare_values(text, arguments.steps),
        "summary": summary(rows),
        "rows": rows,
    }
    write_table(arguments.output, results)
    draw(results, arguments.output.with_suffix(".svg"))
    for name, found in results["summary"].items():
        print(f"{name:24} {found}")


if __name__ == "__main__":
    main()
