"""Times Adafactor's step of GPT-2 (124 M parameters) beside transformers', torch's and AdamW's.

And those of 2,000 matrices of 32 by 32, and of ResNet-50, whose convolutions are stacks of small
matrices; on a GPU also steps of GPT-2 that are queued.

    python bench/probes/adafactor.py [--device cuda] [--threads N] [--layers 12] [--json OUT.json]

Medians in milliseconds of steps that take turns. Embeddings are there with all 12 layers only.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from galore import parameters, shapes
from muon import milliseconds
from transformers import Adafactor

from fusedstep import optim

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from reports.tables import write_table
from suites.shapes import resnet50


def steps_of(sizes: list[tuple[int, ...]], device: str) -> dict[str, Callable[[], object]]:
    def step(make: Callable[..., torch.optim.Optimizer], **options: object) -> Callable[[], object]:
        return make(parameters(sizes, device), **options).step

    fixed = {"lr": 1e-3, "relative_step": False, "scale_parameter": False}
    return {
        "AdamW": step(optim.AdamW),
        "Adafactor, torch's": step(optim.Adafactor),
        "Adafactor, transformers'": step(optim.Adafactor, variant="transformers"),
        "Adafactor, transformers', fixed": step(optim.Adafactor, **fixed),
        "Adafactor, transformers', beta1": step(optim.Adafactor, beta1=0.9),
        "torch.optim.Adafactor, foreach": step(torch.optim.Adafactor, foreach=True),
        "transformers.Adafactor": step(Adafactor),
    }


def milliseconds_queued(step: Callable[[], object]) -> float:
    """The median of steps that are queued before the first of them begins."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    found = []
    for _ in range(7):
        torch.cuda.synchronize()
        torch.cuda._sleep(20_000_000)
        begin.record()
        for _ in range(10):
            step()
        end.record()
        torch.cuda.synchronize()
        found.append(begin.elapsed_time(end) / 10)
    return float(f"{statistics.median(found):.4g}")


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

    models = {
        "ms": [*matrices, *others],
        "small_ms": [(32, 32)] * 2000,
        "resnet50_ms": list(resnet50()),
    }
    found = {}
    for model, sizes in models.items():
        steps = steps_of(sizes, asked.device)
        found[model] = milliseconds(steps, device, asked.rounds)
        if model == "ms" and device.type == "cuda":
            name = "Adafactor, torch's"
            found["queued_ms"] = {name: milliseconds_queued(steps[name])}
            print("queued", found["queued_ms"])
        width = max(map(len, found[model]))
        print(model)
        for name, time_ in found[model].items():
            share = found[model]["transformers.Adafactor"] / time_
            print(f"{name:{width}}  {time_:8.4g} ms  {share:6.2f} x")
    if asked.json:
        about: dict[str, object] = {"layers": asked.layers, "device": str(device)}
        if device.type == "cuda":
            about |= {"gpu": torch.cuda.get_device_name(device)}
        about |= {"threads": torch.get_num_threads(), "torch": torch.__version__}
        write_table(asked.json, about | found)


if __name__ == "__main__":
    main()
