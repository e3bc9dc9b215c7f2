"""Times steps of Muon on the matrices of GPT-2 (124 M): torch's, ours and the products alone.

    python bench/probes/muon.py --device cuda --json OUT.json

The products alone are those of the iteration on matrices that lie together already: no momentum, no
decay, no copies. MuSGD is timed beside its ``fused=False``, which steps weight by weight as the
original does. Medians in milliseconds of steps that take turns. Queued: steps that are launched one
after another, and waited for once, as in a training loop that looks at nothing.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch

from fusedstep import optim
from fusedstep._matrix.newton_schulz import Scratch, coefficients_of, orthogonalize, usual_dtype

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from reports.tables import write_table

#: Matrices of a layer: query, key and value; their projection; the two of the feed-forward part.
LAYER = ((2304, 768), (768, 768), (3072, 768), (768, 3072))

DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.float32, torch.bfloat16, torch.float16)
}


def milliseconds(
    steps: dict[str, Callable[[], object]], device: torch.device, rounds: int
) -> dict[str, float]:
    """Medians: the steps take turns, so that all have their share of a machine's bad moments."""

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    found: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(-2, rounds):
        for name, run in steps.items():
            wait()
            start = time.perf_counter()
            run()
            wait()
            if turn >= 0:
                found[name].append(1e3 * (time.perf_counter() - start))
    return {name: float(f"{statistics.median(times):.4g}") for name, times in found.items()}


def queued(step: Callable[[], object], device: torch.device, rounds: int) -> float:
    """Milliseconds of a step among others that nothing waits for."""
    torch.cuda.synchronize(device)
    start = time.perf_counter()
    for _ in range(rounds):
        step()
    torch.cuda.synchronize(device)
    return float(f"{1e3 * (time.perf_counter() - start) / rounds:.4g}")


def parameters(layers: int, device: torch.device) -> list[torch.nn.Parameter]:
    torch.manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(s, device=device) * 0.02) for s in LAYER * layers]
    for param in params:
        param.grad = torch.randn_like(param) * 1e-3
    return params


def products(layers: int, device: torch.device, dtype: torch.dtype) -> Callable[[], None]:
    """The iteration on the matrices of each shape."""
    steps, scratch = coefficients_of("quintic", 5), Scratch()
    stacks = [
        torch.randn(layers * count, *shape, device=device).mul_(0.5e-3).to(dtype)
        for shape, count in Counter(LAYER).items()
    ]

    def run() -> None:
        for stack in stacks:
            orthogonalize(stack, steps, scratch)

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, help="of torch on the CPU")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--dtypes", nargs="*", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    if asked.threads:
        torch.set_num_threads(asked.threads)
    device = torch.device(asked.device)

    steps: dict[str, Callable[[], object]] = {
        "torch.optim.Muon": torch.optim.Muon(parameters(asked.layers, device)).step
    }
    usual = str(usual_dtype(device)).removeprefix("torch.")
    for name in dict.fromkeys((usual, *asked.dtypes)):
        ours = optim.Muon(parameters(asked.layers, device), ns_dtype=DTYPES[name])
        steps[f"Muon, {name}"] = ours.step
        steps[f"products alone, {name}"] = products(asked.layers, device, DTYPES[name])
    for name, fused in (("MuSGD", None), ("MuSGD, fused=False", False)):
        options = {"use_muon": True, "momentum": 0.9, "nesterov": True, "fused": fused}
        group = {"params": parameters(asked.layers, device)}
        steps[name] = optim.MuSGD([group], lr=0.01, **options).step
    with torch.no_grad():
        found = milliseconds(steps, device, asked.rounds)
        if device.type == "cuda":
            found["queued"] = queued(steps[f"Muon, {usual}"], device, 3 * asked.rounds)

    width = max(map(len, found))
    print(f"{asked.layers} layers, {device}, {torch.get_num_threads()} threads, usual: {usual}")
    for name, time_ in found.items():
        print(f"{name:{width}}  {time_:10.4g} ms  {found['torch.optim.Muon'] / time_:6.2f} x")
    if asked.json:
        about = {"layers": asked.layers, "device": str(device), "usual": usual}
        about |= {"threads": torch.get_num_threads(), "torch": torch.__version__}
        if device.type == "cuda":
            about["name"] = torch.cuda.get_device_name(device)
        write_table(asked.json, about | {"ms": found})


if __name__ == "__main__":
    main()
