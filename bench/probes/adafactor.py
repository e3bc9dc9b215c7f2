"""Times Adafactor's step of GPT-2 (124 M parameters) beside transformers', torch's and AdamW's.

    python bench/probes/adafactor.py [--device cuda] [--threads N] [--layers 12] [--json OUT.json]

Medians in milliseconds of steps that take turns. Embeddings are there with all 12 layers only.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import torch
from galore import parameters, shapes
from muon import milliseconds
from transformers import Adafactor

from fusedstep import optim


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, help="of torch on the CPU")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    if asked.threads:
        torch.set_num_threads(asked.threads)
    device = torch.device(asked.device)
    matrices, others = shapes(asked.layers)

    def step(make: Callable[..., torch.optim.Optimizer], **options: object) -> Callable[[], object]:
        return make(parameters([*matrices, *others], asked.device), **options).step

    steps = {
        "AdamW": step(optim.AdamW),
        "Adafactor, torch's": step(optim.Adafactor),
        "Adafactor, transformers'": step(optim.Adafactor, variant="transformers"),
        "Adafactor, transformers', beta1": step(optim.Adafactor, beta1=0.9),
        "torch.optim.Adafactor, foreach": step(torch.optim.Adafactor, foreach=True),
        "transformers.Adafactor": step(Adafactor),
    }
    found = milliseconds(steps, device, asked.rounds)
    width = max(map(len, found))
    for name, time_ in found.items():
        print(f"{name:{width}}  {time_:8.4g} ms  {found['transformers.Adafactor'] / time_:6.2f} x")
    if asked.json:
        about = {"layers": asked.layers, "device": str(device)}
        about |= {"threads": torch.get_num_threads(), "torch": torch.__version__}
        asked.json.write_text(json.dumps(about | {"ms": found}, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
