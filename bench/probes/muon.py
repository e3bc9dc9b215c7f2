"""Times steps of Muon on the matrices of GPT-2: torch's, ours and the products alone.

    python bench/probes/muon.py --device cuda --json OUT.json

The default matrices are of GPT-2 124 M. ``--width 2048 --layers 24`` times the matrices of a model
of 1.3 B.

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
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import torch

from fusedstep import optim
from fusedstep._matrix.coefficients import coefficients_of
from fusedstep._matrix.newton_schulz import (
    Chain,
    Scratch,
    has_engine,
    orthogonalize,
    usual_dtype,
)
from fusedstep._native import ops

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from reports.tables import write_table

#: Matrices of a layer, in widths: query, key and value; their projection; the two of the
#: feed-forward part.
LAYER = ((3, 1), (1, 1), (4, 1), (1, 4))

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


def shapes(asked: argparse.Namespace) -> list[tuple[int, int]]:
    return [(rows * asked.width, columns * asked.width) for rows, columns in LAYER] * asked.layers


def parameters(asked: argparse.Namespace) -> list[torch.nn.Parameter]:
    torch.manual_seed(0)
    device = torch.device(asked.device)
    params = [torch.nn.Parameter(torch.randn(s, device=device) * 0.02) for s in shapes(asked)]
    for param in params:
        param.grad = torch.randn_like(param) * 1e-3
    return params


def products(asked: argparse.Namespace, dtype: torch.dtype) -> Callable[[], object]:
    """The iteration on the matrices of each shape."""
    steps, scratch, device = coefficients_of("quintic", 5), Scratch(), torch.device(asked.device)
    stacks = [
        torch.randn(count, *shape, device=device, dtype=dtype).mul_(0.4 / asked.width)
        for shape, count in Counter(shapes(asked)).items()
    ]
    if has_engine(device) and dtype.itemsize == 2:
        chain = Chain(stacks, list(map(torch.empty_like, stacks)), steps)
        chain.take(scratch)
        return chain.run

    def run() -> None:
        for stack in stacks:
            orthogonalize(stack, steps, scratch)

    return run


def peers(asked: argparse.Namespace) -> dict[str, Callable[[], object]]:
    """Steps of gram-newton-schulz, by its own kernels and by torch, where it is installed."""
    if not find_spec("gram_newton_schulz"):
        return {}
    muon = import_module("gram_newton_schulz").Muon
    kinds = {"torch": False} | ({"its kernels": True} if find_spec("quack") else {})
    quintic = coefficients_of("quintic", 5)
    return {
        f"gram-newton-schulz, {name}": muon(
            parameters(asked), ns_coefficients=quintic, ns_use_kernels=kernels
        ).step
        for name, kernels in kinds.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, help="of torch on the CPU")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--dtypes", nargs="*", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    if asked.threads:
        torch.set_num_threads(asked.threads)
    device = torch.device(asked.device)

    steps: dict[str, Callable[[], object]] = {
        "torch.optim.Muon": torch.optim.Muon(parameters(asked)).step
    }
    usual = str(usual_dtype(device)).removeprefix("torch.")
    for name in dict.fromkeys((usual, *asked.dtypes)):
        ours = optim.Muon(parameters(asked), ns_dtype=DTYPES[name])
        steps[f"Muon, {name}"] = ours.step
        steps[f"products alone, {name}"] = products(asked, DTYPES[name])
    steps["Muon, rank_fraction=0.25"] = optim.Muon(parameters(asked), rank_fraction=0.25).step
    steps["Muon, 4 steps"] = optim.Muon(parameters(asked), ns_steps=4).step
    aol = optim.Muon(parameters(asked), ns_steps=4, ns_start="aol")
    steps['Muon, 4 steps, ns_start="aol"'] = aol.step
    steps |= peers(asked) if device.type == "cuda" else {}
    for name, fused in (("MuSGD", None), ("MuSGD, fused=False", False)):
        options = {"use_muon": True, "momentum": 0.9, "nesterov": True, "fused": fused}
        group = {"params": parameters(asked)}
        steps[name] = optim.MuSGD([group], lr=0.01, **options).step
    with torch.no_grad():
        found = milliseconds(steps, device, asked.rounds)
        if device.type == "cuda":
            for name in [name for name in steps if name.startswith(("Muon", "gram"))]:
                found[f"{name}, queued"] = queued(steps[name], device, 3 * asked.rounds)

    width = max(map(len, found))
    print(f"{asked.layers} layers of {asked.width}, {device}, usual: {usual}")
    for name, time_ in found.items():
        print(f"{name:{width}}  {time_:10.4g} ms  {found['torch.optim.Muon'] / time_:6.2f} x")
    if asked.json:
        about = {
            "by": "bench/probes/muon",
            "layers": asked.layers,
            "width": asked.width,
            "device": str(device),
            "usual": usual,
        }
        about |= {"threads": torch.get_num_threads(), "torch": torch.__version__}
        if device.type == "cpu":
            about["products"] = ops.product_isa() or "torch's"
        if device.type == "cuda":
            about["name"] = torch.cuda.get_device_name(device)
        write_table(asked.json, about | {"ms": found})


if __name__ == "__main__":
    main()
