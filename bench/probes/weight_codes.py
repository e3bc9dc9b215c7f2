"""Times AdamW steps of GPT-2 (124 M), with states in codes and 16-bit weights that train.

    python bench/probes/weight_codes.py OUT.json [cpu | cuda]

Writes medians in milliseconds, of ways in turn: of steps, other libraries' where these are
installed, of copies of as many bytes, and of steps of 2,000 small weights. On a GPU ten follow one
another between two events, as a step follows a backward pass: the host is ahead unless it binds.
"""

from __future__ import annotations

import importlib
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from small_states import SMALL, shapes

from fusedstep import optim

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tables import write_table

FLOAT32, BF16 = torch.float32, torch.bfloat16
ROUNDS, STEPS = 10, 10
SLOW = 100.0  # milliseconds: of what takes longer two steps are enough

#: Dtype of weights and gradients, options, and the bytes that a step moves for each element.
WAYS: dict[str, tuple[torch.dtype, dict[str, Any], int]] = {
    "float32": (FLOAT32, {}, 28),
    "float32, int8": (FLOAT32, {"state_dtype": "int8"}, 16),
    "float32, fp8": (FLOAT32, {"state_dtype": "fp8"}, 16),
    "float32, int4": (FLOAT32, {"state_dtype": "int4"}, 14),
    "bf16, float32 masters": (BF16, {"master_weights": "float32"}, 30),
    "bf16, split": (BF16, {"master_weights": "split"}, 26),
    "bf16, Kahan": (BF16, {"rounding": "kahan"}, 26),
    "bf16, stochastic": (BF16, {"rounding": "stochastic"}, 22),
    "bf16, split, int8": (BF16, {"master_weights": "split", "state_dtype": "int8"}, 14),
    "bf16, Kahan, int8": (BF16, {"rounding": "kahan", "state_dtype": "int8"}, 14),
    "bf16, stochastic, int8": (BF16, {"rounding": "stochastic", "state_dtype": "int8"}, 10),
}

#: Other libraries' steps that do the same: dtype, module, class, options.
PEERS: dict[str, tuple[torch.dtype, str, str, dict[str, Any]]] = {
    "torch, float32": (FLOAT32, "torch.optim", "AdamW", {"fused": True}),
    "bitsandbytes, float32, int8": (FLOAT32, "bitsandbytes.optim", "AdamW8bit", {}),
    "torchao, float32, int8": (FLOAT32, "torchao.optim", "AdamW8bit", {}),
    "flashoptim, bf16, 24 bits, int8": (BF16, "flashoptim", "FlashAdamW", {}),
    "torchao, bf16, stochastic, int8": (
        BF16, "torchao.optim", "AdamW8bit", {"bf16_stochastic_round": True},
    ),
}  # fmt: skip


def weights(
    device: str, dtype: torch.dtype, sizes: list[tuple[int, ...]]
) -> list[torch.nn.Parameter]:
    made = [torch.nn.Parameter(torch.randn(s, device=device).to(dtype)) for s in sizes]
    for weight in made:
        weight.grad = torch.randn_like(weight) * 1e-3
    return made


def peers(device: str, sizes: list[tuple[int, ...]]) -> dict[str, Callable[[], object]]:
    found = {}
    for name, (dtype, module, cls, options) in PEERS.items():
        try:
            made = getattr(importlib.import_module(module), cls)
            step = made(weights(device, dtype, sizes), **options).step
            step()
        except Exception as error:
            print(f"{name} is left out: {error!r}")
            continue
        found[name] = step
    return found


def step(device: str, name: str, sizes: list[tuple[int, ...]]) -> Callable[[], object]:
    dtype, options, _ = WAYS[name]
    return optim.AdamW(weights(device, dtype, sizes), fused=True, **options).step


def copy(device: str, size: int, elements: int) -> Callable[[], object]:
    source = torch.ones(elements * size // 8, device=device)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def on_gpu(run: Callable[[], object]) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    run()
    begin.record()
    for _ in range(STEPS):
        run()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / STEPS


def on_cpu(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return 1e3 * (time.perf_counter() - start)


def medians(device: str, runs: Mapping[Any, Callable[[], object]]) -> dict[Any, float]:
    """Milliseconds of each, which take turns."""
    milliseconds = on_gpu if device == "cuda" else on_cpu
    found: dict[Any, list[float]] = {name: [] for name in runs}
    for round_ in range(ROUNDS + 1):
        for name, run in runs.items():
            if len(found[name]) > 1 and found[name][-1] > SLOW:
                continue
            took = milliseconds(run)
            if round_ > 0:  # the first makes plans and fills caches
                found[name].append(took)
    return {name: statistics.median(times) for name, times in found.items()}


def main(out: str, device: str = "cuda") -> None:
    elements = sum(torch.Size(shape).numel() for shape in shapes())
    sizes = {size for _, _, size in WAYS.values()}
    steps = {name: step(device, name, shapes()) for name in WAYS}
    copies = {size: copy(device, size, elements) for size in sorted(sizes)}
    small = {name: step(device, name, SMALL) for name in WAYS}
    table = {
        "elements": elements,
        "bytes": {name: size for name, (_, _, size) in WAYS.items()},
        "ms": medians(device, steps | peers(device, shapes())),
        "copy ms": medians(device, copies),
        "small weights": len(SMALL),
        "small ms": medians(device, small),
    }
    write_table(Path(out), table)


if __name__ == "__main__":
    main(*sys.argv[1:])
