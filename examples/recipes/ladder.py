"""Memory and speed of a training step, as one saving after another is added.

Baseline is AdamW in float32. Then: accumulation, activation checkpointing, bfloat16 autocast, all
of them, and all with other states: of 8 bits, and Adafactor's where there is the class.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import recipe
import torch

from fusedstep import optim


class Rung(NamedTuple):
    name: str
    optimizer: str = "adamw"
    parts: int = 1
    checkpointing: bool = False
    bf16: bool = False


ALL = {"parts": 4, "checkpointing": True, "bf16": True}
RUNGS = [
    Rung("baseline"),
    Rung("accumulation", parts=4),
    Rung("checkpointing", checkpointing=True),
    Rung("bf16", bf16=True),
    Rung("all", **ALL),
    Rung("all, int8", "adamw8bit", **ALL),
    *([Rung("all, Adafactor", "adafactor", **ALL)] if "adafactor" in optim.names() else []),
]


def train(rung: Rung, args: argparse.Namespace, steps: int) -> list[float]:
    """Returns the losses of a new model's steps."""
    make = functools.partial(recipe.LanguageModel, checkpointing=rung.checkpointing)
    model = make(width=args.width, layers=args.layers, length=args.length).to(args.device)
    optimizer = optim.create(rung.optimizer, model, lr=1e-3)
    kind, losses = torch.device(args.device).type, []
    for tokens in recipe.batches(steps, args.batch, args.device, args.length):
        losses.append(torch.zeros((), device=args.device))
        for part in tokens.chunk(rung.parts):
            with torch.autocast(kind, torch.bfloat16, enabled=rung.bf16):
                loss = model.loss(part) * (len(part) / len(tokens))
            loss.backward()
            losses[-1] += loss.detach()
        optimizer.step(zero_grad=True if rung.parts > 1 else "none")
    return [float(loss) for loss in losses]


def peak(function: Callable[[], object], device: str) -> int:
    """Returns the most bytes that torch's allocator has handed out at a time in a call."""
    if torch.device(device).type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        function()
        return torch.cuda.max_memory_allocated()
    gc.collect()  # what another call has left would be given back in this one, and taken off
    # Not torch.profiler's, which makes objects of all events: seconds, for the trace has them.
    with torch.autograd.profiler.profile(profile_memory=True) as profile:
        function()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "trace.json")
        profile.export_chrome_trace(str(file))
        events = json.loads(file.read_text())["traceEvents"]
    changes = [event for event in events if event["name"] == "[memory]"]
    live = highest = 0
    for event in sorted(changes, key=lambda each: each["ts"]):
        live += event["args"]["Bytes"]
        highest = max(highest, live)
    return highest


def main(argv: list[str] | None = None) -> dict[str, tuple[float, int, float]]:
    """Returns samples a second, bytes and the last loss of each rung."""
    parser = recipe.arguments(__doc__, steps=10, batch=16)
    for name, size in (("width", 128), ("layers", 4), ("length", 128)):
        parser.add_argument(f"--{name}", type=int, default=size)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the table's figures too")
    args = parser.parse_args(argv)
    results = {}
    print(f"| {'':15} | samples/s |      MiB |   loss |")
    print(f"| {'':-<15} | --------: | -------: | -----: |")
    for rung in RUNGS:
        memory = peak(functools.partial(train, rung, args, 2), args.device)
        with recipe.Run(args.device, args.steps, quiet=True) as run:
            for loss in train(rung, args, args.steps):
                run.add(loss, args.batch)
        speed = run.samples / run.seconds
        results[rung.name] = speed, memory, float(run.losses[-1])
        print(f"| {rung.name:15} | {speed:9,.1f} | {memory / 2**20:8,.1f} | {run.losses[-1]:.4f} |")
    if args.json:
        names = ("samples_s", "bytes", "loss")
        rows = [
            {"rung": name} | dict(zip(names, row, strict=True)) for name, row in results.items()
        ]
        found = {"by": "examples/recipes/ladder.py", "torch": torch.__version__, "rows": rows}
        args.json.write_text(json.dumps(found) + "\n", encoding="utf-8")
    return results


if __name__ == "__main__":
    main()
