"""Trains a small Llama on the characters of tiny Shakespeare: AdamW, GaLore, APOLLO and Muon.

    python bench/probes/galore_training.py --json OUT.json --plot OUT.svg

The data is the file input.txt in the folder shakespeare of FUSEDSTEP_DATA. All runs begin with the
same weights and see the same batches; losses are of a part of the text that is not trained on. The
memory is that of the states after the last step.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
from muon_training import losses_of, tokens
from torch import Tensor

from fusedstep import optim
from probes.small_llama import SmallLlama

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from reports.tables import write_plot, write_table

WIDTH, LAYERS, RANK, GAP = 128, 3, 32, 50

#: The class, options, and those of the groups of matrices, by the name of the run.
RUNS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "AdamW": ("AdamW", {"lr": 3e-3}, {}),
    "GaLore, imperative": ("GaLoreAdamW", {"lr": 1e-2, "fused": False}, {"svd": "exact"}),
    "GaLore": ("GaLoreAdamW", {"lr": 1e-2}, {"svd": "exact"}),
    "GaLore, randomized": ("GaLoreAdamW", {"lr": 1e-2}, {"svd": "randomized"}),
    "GaLore, lazy": ("GaLoreAdamW", {"lr": 1e-2}, {"svd": "lazy"}),
    "APOLLO": ("APOLLOAdamW", {"lr": 1e-2}, {"scale_type": "channel", "scale": 1.0}),
    "Muon + AdamW": ("Muon", {"lr": 0.02, "weight_decay": 0.01}, {}),
}


def new_model(characters: int) -> SmallLlama:
    torch.manual_seed(0)
    return SmallLlama(layers=LAYERS, width=WIDTH, heads=4, vocabulary=characters)


def optimizer_of(name: str, model: SmallLlama) -> torch.optim.Optimizer:
    kind, options, of_matrices = RUNS[name]
    matrices = [p for p in model.blocks.parameters() if p.ndim == 2]
    known = set(map(id, matrices))
    others = [p for p in model.parameters() if id(p) not in known]
    rate = RUNS["AdamW"][1]["lr"]
    groups: list[dict[str, Any]] = [{"params": matrices}, {"params": others, "lr": rate}]
    if kind == "Muon":
        groups[1]["use_muon"] = False
    if of_matrices:
        groups[0] |= {"rank": RANK, "update_proj_gap": GAP} | of_matrices
    return getattr(optim, kind)(groups, betas=(0.9, 0.95), **options)


def train(name: str, steps: int, every: int, device: torch.device) -> dict[str, Any]:
    text = tokens()
    model = new_model(text[2]).to(device)
    optimizer = optimizer_of(name, model)
    losses = losses_of(model, optimizer, text, steps, every)
    states = [value for state in optimizer.state.values() for value in state.values()]
    return {
        "run": name,
        "losses": losses,
        "state_bytes": sum(each.nbytes for each in states if isinstance(each, Tensor)),
        "weights": sum(p.numel() for p in model.parameters()),
    }


def draw(runs: list[dict[str, Any]], every: int, path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    for run in runs:
        steps = [every * (i + 1) for i in range(len(run["losses"]))]
        dashes = {"ls": "--"} if "imperative" in run["run"] else {}
        axes.plot(steps, run["losses"], label=run["run"], **dashes)
    axes.set(xlabel="step", ylabel="loss of held-out text")
    axes.legend()
    write_plot(path, figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--every", type=int, default=20)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path, help="needs matplotlib")
    asked = parser.parse_args()
    runs = []
    for name in RUNS:
        runs.append(train(name, asked.steps, asked.every, torch.device(asked.device)))
        last = runs[-1]
        mebibytes = last["state_bytes"] / 2**20
        print(f"{name:20} {last['losses'][-1]:.4f}  {mebibytes:.2f} MiB", flush=True)
    if asked.json:
        about = {"steps": asked.steps, "every": asked.every, "device": asked.device}
        write_table(asked.json, about | {"runs": runs})
    if asked.plot:
        draw(runs, asked.every, asked.plot)


if __name__ == "__main__":
    main()
