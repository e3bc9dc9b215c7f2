"""Times AdamW steps of GPT-2 (124 M), with states in codes and 16-bit weights that train.

    python bench/probes/weight_codes.py OUT.json [cpu | cuda] [NAME [PEER...]]

Writes medians in milliseconds, of ways in turn: of steps, other libraries' where these are
installed, of copies of as many bytes, and of steps of 2,000 small weights. On a GPU ten follow one
another between two events, as a step follows a backward pass: the host is ahead unless it binds.
Prints the table of docs/small_states.md.

With NAME it adds a run to OUT.json, of float32 weights beside other libraries or only some of their
steps, under that name: two libraries that are imported by one name cannot be in one process.
"""

from __future__ import annotations

import importlib
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from decimal import ROUND_HALF_UP, Decimal
from pathlib import Path
from typing import Any, NamedTuple

import torch
from small_states import SMALL, shapes

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from reports.tables import write_table

FLOAT32, BF16 = torch.float32, torch.bfloat16
ROUNDS, STEPS = 10, 10
SLOW = 100.0  # milliseconds: of what takes longer two steps are enough


class Way(NamedTuple):
    dtype: torch.dtype
    """The dtype of weights and gradients."""
    size: int
    """The bytes that a step moves for each element."""
    title: str
    """The name on the page."""
    options: dict[str, Any]
    module: str = "fusedstep.optim"
    cls: str = "AdamW"


def ours(dtype: torch.dtype, size: int, title: str, **options: Any) -> Way:
    return Way(dtype, size, title, {"fused": True} | options)


SPLIT, KAHAN = {"master_weights": "split"}, {"rounding": "kahan"}
STOCHASTIC, INT8 = {"rounding": "stochastic"}, {"state_dtype": "int8"}
WAYS = {
    "float32": ours(FLOAT32, 28, "float32 weights"),
    "float32, int8": ours(FLOAT32, 16, 'float32, `"int8"` states', **INT8),
    "float32, fp8": ours(FLOAT32, 16, 'float32, `"fp8"` states', state_dtype="fp8"),
    "float32, int4": ours(FLOAT32, 14, 'float32, `"int4"` states', state_dtype="int4"),
    "bf16, float32 masters": ours(
        BF16, 30, 'bfloat16, `master_weights="float32"`', master_weights="float32"
    ),
    "bf16, split": ours(BF16, 26, 'bfloat16, `"split"`', **SPLIT),
    "bf16, Kahan": ours(BF16, 26, 'bfloat16, `rounding="kahan"`', **KAHAN),
    "bf16, stochastic": ours(BF16, 22, 'bfloat16, `"stochastic"`', **STOCHASTIC),
    "bf16, split, int8": ours(BF16, 14, '`"split"`, `"int8"`', **SPLIT | INT8),
    "bf16, Kahan, int8": ours(BF16, 14, '`"kahan"`, `"int8"`', **KAHAN | INT8),
    "bf16, stochastic, int8": ours(BF16, 10, '`"stochastic"`, `"int8"`', **STOCHASTIC | INT8),
}

#: Other libraries' steps that do the same.
PEERS = {
    "torch, float32": Way(
        FLOAT32, 28, "torch's fused AdamW, float32", {"fused": True}, "torch.optim"
    ),
    "bitsandbytes, float32, int8": Way(
        FLOAT32, 16, "bitsandbytes' `AdamW8bit`, float32", {}, "bitsandbytes.optim", "AdamW8bit"
    ),
    "torchao, float32, int8": Way(
        FLOAT32, 16, "torchao's `AdamW8bit`, float32", {}, "torchao.optim", "AdamW8bit"
    ),
    "torchao, bf16, stochastic, int8": Way(
        BF16, 10, "torchao's `AdamW8bit`, `bf16_stochastic_round`",
        {"bf16_stochastic_round": True}, "torchao.optim", "AdamW8bit",
    ),
    "flashoptim, bf16, 24 bits, int8": Way(
        BF16, 12, "flashoptim's `FlashAdamW`, 24 bits of weights, int8", {},
        "flashoptim", "FlashAdamW",
    ),
}  # fmt: skip


def weights(
    device: str, dtype: torch.dtype, sizes: list[tuple[int, ...]]
) -> list[torch.nn.Parameter]:
    made = [torch.nn.Parameter(torch.randn(s, device=device).to(dtype)) for s in sizes]
    for weight in made:
        weight.grad = torch.randn_like(weight) * 1e-3
    return made


def step(device: str, way: Way, sizes: list[tuple[int, ...]]) -> Callable[[], object]:
    cls = getattr(importlib.import_module(way.module), way.cls)
    return cls(weights(device, way.dtype, sizes), **way.options).step


def peers(
    device: str, sizes: list[tuple[int, ...]], names: Iterable[str] = PEERS
) -> dict[str, Callable[[], object]]:
    found = {}
    for name in names:
        try:
            run = step(device, PEERS[name], sizes)
            run()
        except Exception as error:
            print(f"{name} is left out: {error!r}")
            continue
        found[name] = run
    return found


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


def page(table: dict[str, Any], device: str) -> str:
    """The table of the page. On a GPU the limit is a copy, on a CPU the rate of float32."""
    ms = table["ms"]
    lines = [
        "| weights and states | bytes an element | ms | share | small weights, ms |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for name, size in table["bytes"].items():
        as_float32 = ms["float32"] * size / WAYS["float32"].size
        limit = table["copy ms"][str(size)] if device == "cuda" else as_float32
        cells = shown(ms[name]), f"{limit / ms[name]:.2f}", shown(table["small ms"][name])
        lines.append(f"| {WAYS[name].title} | {size} | {' | '.join(cells)} |")
    for name, way in PEERS.items():
        if name in ms:
            lines.append(f"| {way.title} | {way.size} | {shown(ms[name])} | | |")
    return "\n".join(lines)


def shown(milliseconds: float) -> str:
    last = "0.01" if milliseconds < 10 else "0.1" if milliseconds < 100 else "1"
    return str(Decimal(str(milliseconds)).quantize(Decimal(last), ROUND_HALF_UP))


def main(out: str, device: str = "cuda", name: str = "", *names: str) -> None:
    file = Path(out)
    if name:
        steps = {way: step(device, WAYS[way], shapes()) for way in ("float32", "float32, int8")}
        beside = peers(device, shapes(), names or PEERS)
        run = {name: {"ms": medians(device, steps | beside)}}
        write_table(file, json.loads(file.read_text()) | run)
        return
    elements = sum(torch.Size(shape).numel() for shape in shapes())
    steps = {name: step(device, way, shapes()) for name, way in WAYS.items()}
    sizes = sorted({way.size for way in WAYS.values()})
    small = {name: step(device, way, SMALL) for name, way in WAYS.items()}
    table = {
        "elements": elements,
        "bytes": {name: way.size for name, way in WAYS.items()},
        "ms": medians(device, steps | peers(device, shapes())),
        "copy ms": medians(device, {size: copy(device, size, elements) for size in sizes}),
        "small weights": len(SMALL),
        "small ms": medians(device, small),
    }
    write_table(file, table)
    print(page(json.loads(file.read_text()), device))


if __name__ == "__main__":
    main(*sys.argv[1:])
