#!/usr/bin/env python3
"""Time a step through Accelerate's wrapper against the step itself: 2,000 weights of 64 elements.

Prints the medians of steps taken in turns, on one thread, and their ratio; `--json` keeps them.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from read_states import ELEMENTS, ROUNDS, WEIGHTS, microseconds, subject

from fusedstep import optim

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from reports.tables import write_table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    found = {}
    accelerator = Accelerator(cpu=True)
    print(f"{'':8} {'directly':>9} {'Accelerate':>11} ratio   (µs a step)")
    for name in sorted(optim.__all__):
        cls = getattr(optim, name)
        if not cls._takes_dense:
            continue
        ways = subject(cls).step, accelerator.prepare(subject(cls)).step
        for step in ways:
            microseconds(step)
        times = [[microseconds(step) for step in ways] for _ in range(ROUNDS)]
        direct, wrapped = map(statistics.median, zip(*times, strict=True))
        print(f"{name:8} {direct:9.0f} {wrapped:11.0f} {wrapped / direct:5.2f}")
        figures = {"directly": direct, "through Accelerate": wrapped, "ratio": wrapped / direct}
        found[name] = {what: float(f"{value:.3g}") for what, value in figures.items()}
    if asked.json:
        about = {"torch": torch.__version__, "threads": 1, "weights": f"{WEIGHTS} of {ELEMENTS}"}
        write_table(asked.json, about | {"us": found})


if __name__ == "__main__":
    main()
