"""Times AdamW steps of GPT-2 (124 M) with states in codes, on the CPU and a GPU.

    python bench/probes/small_states.py OUT.json [cpu] [cuda]

Writes medians in milliseconds, of steps of 2,000 small weights too, and those of copies of as many
bytes as a step moves.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from fusedstep import optim

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from reports.tables import write_table

WIDTH, LAYERS, VOCABULARY, CONTEXT = 768, 12, 50257, 1024
SMALL = [(64, 64)] * 2000
STEPS = {"cpu": 15, "cuda": 100}


def shapes() -> list[tuple[int, ...]]:
    d = WIDTH
    matrices = [(3 * d, d), (3 * d,), (d, d), (d,), (4 * d, d), (4 * d,), (d, 4 * d), (d,)]
    norms = [(d,)] * 4
    return [(VOCABULARY, d), (CONTEXT, d), *(matrices + norms) * LAYERS, (d,), (d,)]


def milliseconds(run: Callable[[], object], device: str) -> float:
    for _ in range(3):
        run()
    found = []
    for _ in range(STEPS[device]):
        if device == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        if device == "cuda":
            torch.cuda.synchronize()
        found.append(1e3 * (time.perf_counter() - start))
    return float(f"{statistics.median(found):.4g}")


def optimizer(
    device: str, dtype: torch.dtype, kind: str | None, sizes: list[tuple[int, ...]]
) -> torch.optim.Optimizer:
    params = [torch.nn.Parameter(torch.randn(s, device=device).to(dtype)) for s in sizes]
    for param in params:
        param.grad = torch.randn_like(param) * 1e-3
    if kind == "torch":
        return torch.optim.AdamW(params, fused=True)
    return optim.AdamW(params, state_dtype=kind, fused=True)


def main(out: str, *devices: str) -> None:
    elements = sum(torch.Size(shape).numel() for shape in shapes())
    table: dict[str, float] = {"elements": elements}
    devices = devices or ("cpu",) + ("cuda",) * torch.cuda.is_available()
    for device in devices:
        for dtype in (torch.float32, torch.bfloat16):
            for kind in (None, "torch", "int8", "int4", "fp8"):
                if kind == "torch" and dtype is not torch.float32:
                    continue
                step = optimizer(device, dtype, kind, shapes()).step
                table[f"{device} {dtype} {kind}"] = milliseconds(step, device)
        for kind in (None, "int8", "int4", "fp8"):
            step = optimizer(device, torch.float32, kind, SMALL).step
            table[f"{device} {len(SMALL)} small weights {kind}"] = milliseconds(step, device)
    for size in (10, 16, 28) if "cuda" in devices else ():
        source = torch.empty(elements * size // 8, device="cuda")
        target = torch.empty_like(source)
        name = f"cuda copy of {size} B an element"
        table[name] = milliseconds(lambda s=source, t=target: t.copy_(s), "cuda")
    write_table(Path(out), table)


if __name__ == "__main__":
    main(*sys.argv[1:])
