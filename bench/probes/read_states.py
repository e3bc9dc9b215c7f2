#!/usr/bin/env python3
"""Time a step whose states were read, as `state_dict()` reads them, against one whose were not.

Prints the medians of steps taken in turns, on one thread, and their ratio; `--json` keeps them.
After the read, which all steps follow that are timed, the dictionary is held or let go.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path

import torch

from fusedstep import optim

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from reports.tables import write_table

WEIGHTS, ELEMENTS, ROUNDS = 2_000, 64, 500

WARM_UP = 40
"""Steps before those that are timed: after 16 an optimizer looks whether its states are held."""


def subject(cls: type[torch.optim.Optimizer]) -> torch.optim.Optimizer:
    params = [torch.nn.Parameter(torch.ones(ELEMENTS)) for _ in range(WEIGHTS)]
    for param in params:
        param.grad = torch.full_like(param, 0.01)
    return cls(cls._grouped(params), lr=1e-4)


def microseconds(step) -> float:
    began = time.process_time()  # on one thread, whoever else keeps the CPU busy
    step()
    return (time.process_time() - began) * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    found = {}
    print(f"{'':12} {'unread':>7} {'read':>7} {'held':>7} ratios   (µs a step)")
    for name in ("Lamb", "Adam", "AdamW", "Adan", "Adagrad", "SGD", "Lion"):
        optimizers = [subject(getattr(optim, name)) for _ in range(3)]
        for optimizer in optimizers:
            optimizer.step()
        optimizers[1].state_dict()
        held = optimizers[2].state_dict()
        steps = [optimizer.step for optimizer in optimizers]
        for _ in range(WARM_UP):
            for step in steps:
                step()
        times = [[microseconds(step) for step in steps] for _ in range(ROUNDS)]
        unread, read, kept = map(statistics.median, zip(*times, strict=True))
        del held
        ratio, of_held = read / unread, kept / unread
        print(f"{name:12} {unread:7.0f} {read:7.0f} {kept:7.0f} {ratio:.2f} {of_held:.2f}")
        figures = {"unread": unread, "read": read, "held": kept}
        figures |= {"ratio": ratio, "ratio held": of_held}
        found[name] = {what: float(f"{value:.3g}") for what, value in figures.items()}
    if asked.json:
        about = {"torch": torch.__version__, "threads": 1, "weights": f"{WEIGHTS} of {ELEMENTS}"}
        write_table(asked.json, about | {"us": found})


if __name__ == "__main__":
    main()
