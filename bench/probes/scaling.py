#!/usr/bin/env python3
"""Computes what training steps cost on 1 to 1,024 GPUs: tables and plot of docs/scaling.md.

    PYTHONPATH=bench:python python bench/probes/scaling.py [PLOT.svg] [--network GB/S]

Terms of one and two GPUs are measured: their files are in bench/results/nvidia-h100. Terms of the
network are options. They are not measured.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from reports.tables import write_plot

RESULTS = Path(__file__).parents[1] / "results" / "nvidia-h100"
RANKS = tuple(2**k for k in range(11))
GIB = 2**30


class Model(NamedTuple):
    """A GPT: each layer has 12 tensors, 12 times its width squared of weights."""

    name: str
    layers: int
    width: int

    @property
    def weights(self) -> int:
        return 12 * self.layers * self.width**2 + (50_257 + 1_024) * self.width

    @property
    def tensors(self) -> int:
        return 12 * self.layers + 4


MODELS = (
    Model("GPT-2 124 M", 12, 768),
    Model("1.3 B", 24, 2048),
    Model("7.5 B", 36, 4096),
    Model("65 B", 80, 8192),
)


class Measured(NamedTuple):
    """Terms that were measured, in seconds."""

    moved: float
    """of a step for each weight: its operands are read and written"""
    host: dict[str, float]
    """of a step for each tensor: the time of two GPUs beyond that of the operands"""
    clipped: dict[str, float]
    """more with max_norm, for each tensor"""
    flops: float
    """six for each weight and token, in a second"""


def measured() -> Measured:
    ms = json.loads((RESULTS / "fsdp2.json").read_text())["on_gpus"]["ms"]
    states = json.loads((RESULTS / "small_states.json").read_text())
    training = json.loads((RESULTS / "gpt_iteration.json").read_text())
    gpt = MODELS[0]
    moved = states["cuda torch.float32 None"] / 1e3 / states["elements"]
    ways = {
        "AdamW": ("AdamW", "fusedstep"),
        "LAMB": ("Lamb", "fusedstep"),
        "torch's AdamW": ("AdamW", "torch fused"),
    }
    bare = {way: ms[name][whose] / 1e3 for way, (name, whose) in ways.items()}
    host = {way: (each - moved * gpt.weights / 2) / gpt.tensors for way, each in bare.items()}
    clipped = {
        way: (ms[name][f"{whose}, clipped"] / 1e3 - bare[way]) / gpt.tensors
        for way, (name, whose) in ways.items()
    }
    settings = training["settings"]
    tokens = math.prod(
        settings[name] for name in ("batch_size", "block_size", "gradient_accumulation_steps")
    )
    (row,) = (
        row for row in training["rows"] if row["name"] == "fusedstep:AdamW/flash_attn/compiled"
    )
    return Measured(moved, host, clipped, 6 * row["weights"] * tokens / (row["ms"] / 1e3))


class Network(NamedTuple):
    """Assumptions: bytes a second of each GPU, and seconds that a message takes."""

    nvlink: float
    network: float
    latency: float
    host_size: int = 8

    def bytes_per_second(self, ranks: int) -> float:
        return self.nvlink if ranks <= self.host_size else self.network

    def ring(self, size: float, ranks: int) -> float:
        """An all-gather or a reduce-scatter of so many bytes in all."""
        part = (ranks - 1) / ranks
        return part * size / self.bytes_per_second(ranks) + self.latency * math.log2(ranks)

    def small(self, ranks: int) -> float:
        """An all-reduce of a few numbers."""
        return 2 * self.latency * math.log2(ranks)


# Memory of a rank, in bytes a weight: how many, and whether ZeRO spreads them from a stage on


class Part(NamedTuple):
    name: str
    size: float
    spread_from: int


MIXED = (Part("weights", 2, 3), Part("gradients", 2, 2), Part("states", 12, 1))
SMALL = (Part("weights", 2, 3), Part("gradients", 2, 2), Part("states", 2 + 2 * (1 + 4 / 256), 1))


def memory(parts: Iterable[Part], stage: int, ranks: int) -> float:
    """Bytes a weight that a rank has."""
    return sum(part.size / (ranks if stage >= part.spread_from else 1) for part in parts)


# Time


class Cost(NamedTuple):
    """Seconds of an iteration."""

    compute: float
    exposed: float
    step: float

    @property
    def total(self) -> float:
        return sum(self)


def step_of(
    model: Model, ranks: int, way: str, known: Measured, net: Network, *, clips: bool
) -> float:
    """Seconds of an optimizer step of shards."""
    seconds = known.moved * model.weights / ranks + known.host[way] * model.tensors
    if clips:
        # The measured one holds the read of gradients and the collective of two GPUs.
        seconds += known.clipped[way] * model.tensors + net.small(ranks) - net.small(2)
    if way == "LAMB":
        seconds += net.small(ranks) - net.small(2)
    return seconds


def iteration(
    model: Model, ranks: int, way: str, tokens: int, known: Measured, net: Network
) -> Cost:
    """FSDP2 in bfloat16: weights are gathered twice, gradients reduced once, a layer at a time."""
    compute = 6 * model.weights * tokens / known.flops
    layer = 2 * model.weights / model.layers
    one = net.ring(layer, ranks) if ranks > 1 else 0.0
    communication = 3 * model.layers * one
    # The first gather and the last reduction have nothing to hide behind.
    exposed = max(communication - compute, 0.0) + (2 * one if communication < compute else 0.0)
    return Cost(compute, exposed, step_of(model, ranks, way, known, net, clips=True))


# Tables


def table(head: list[str], rows: Iterable[list[str]]) -> str:
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def number(x: float) -> str:
    return f"{x:,.0f}" if x >= 100 else f"{x:.3g}"


def terms(known: Measured, net: Network) -> str:
    us = 1e6
    rows = [
        [
            "operands of a weight",
            f"{known.moved * 1e12:.3g} ps",
            "measured, one GPU",
        ],
        *(
            [f"host, each tensor: {way}", f"{each * us:.3g} µs", "measured, two GPUs"]
            for way, each in known.host.items()
        ),
        *(
            [
                f"clipping, each tensor: {way}",
                f"{each * us:.3g} µs",
                "measured, two GPUs",
            ]
            for way, each in known.clipped.items()
        ),
        ["computation", f"{known.flops / 1e12:.0f} TFLOP/s", "measured, one GPU"],
        ["NVLink, each GPU, up to 8", f"{net.nvlink / 1e9:.0f} GB/s", "assumed"],
        ["network, each GPU", f"{net.network / 1e9:.0f} GB/s", "assumed"],
        ["latency of a message", f"{net.latency * us:.0f} µs", "assumed"],
    ]
    return table(["term", "value", "from"], rows)


def memories() -> str:
    model = MODELS[2]

    def row(name: str, parts: Iterable[Part], stage: int) -> list[str]:
        sizes = [memory(parts, stage, ranks) * model.weights / GIB for ranks in (1, 8, 64, 1024)]
        return [name, *map(number, sizes)]

    ways = (("DDP", 0), ("ZeRO 1", 1), ("ZeRO 2", 2), ("ZeRO 3, FSDP2", 3))
    rows = [
        row(f"{name}, {states}", parts, stage)
        for states, parts in (("float32 masters and states", MIXED), ("split, int8 states", SMALL))
        for name, stage in ways
    ]
    return table([f"GiB a rank, {model.name}", "1", "8", "64", "1,024"], rows)


def published() -> str:
    """ZeRO's figure of 7.5 B weights on 64 ranks, in gigabytes, beside the formula."""
    given = {"DDP": 120, "ZeRO 1": 31.4, "ZeRO 2": 16.6, "ZeRO 3": 1.9}
    rows = [
        [name, number(there), f"{memory(MIXED, stage, 64) * 7.5:.1f}"]
        for stage, (name, there) in enumerate(given.items())
    ]
    return table(["GB a rank", "ZeRO's paper", "formula"], rows)


def steps(known: Measured, net: Network) -> str:
    rows = [
        [f"{model.name}, {way}"]
        + [
            number(1e3 * step_of(model, ranks, way, known, net, clips=True))
            for ranks in (1, 2, 8, 64, 256, 1024)
        ]
        for model in MODELS
        for way in known.host
    ]
    return table(["ms a clipped step", "1", "2", "8", "64", "256", "1,024"], rows)


def iterations(known: Measured, net: Network, tokens: int) -> str:
    rows = []
    for model in MODELS:
        for ranks in (1, 8, 64, 1024):
            ours, torchs = (
                iteration(model, ranks, way, tokens, known, net)
                for way in ("AdamW", "torch's AdamW")
            )
            rows.append(
                [
                    f"{model.name}, {ranks:,}",
                    number(1e3 * ours.compute),
                    number(1e3 * ours.exposed),
                    f"{100 * ours.step / ours.total:.2g} %",
                    f"{100 * torchs.step / torchs.total:.2g} %",
                    f"{torchs.total / ours.total:.3f}",
                ]
            )
    head = [
        "model, ranks",
        "computation, ms",
        "communication not hidden, ms",
        "step's share",
        "torch's step's share",
        "gain",
    ]
    return table(head, rows)


def tables(known: Measured, net: Network, tokens: int) -> dict[str, str]:
    return {
        "Terms": terms(known, net),
        "Memory": memories(),
        "ZeRO's figure": published(),
        "Steps": steps(known, net),
        "Iterations": iterations(known, net, tokens),
    }


def plot(path: Path, time_of: Callable[[Model, int, str], float], ways: Iterable[str]) -> None:
    import matplotlib
    from matplotlib.figure import Figure

    matplotlib.rcParams.update({"font.size": 9})
    figure = Figure(figsize=(9, 2.8), layout="constrained")
    axes = figure.subplots(1, len(MODELS), sharey=True)
    for axis, model in zip(axes, MODELS, strict=True):
        for way in ways:
            axis.loglog(RANKS, [1e3 * time_of(model, ranks, way) for ranks in RANKS], label=way)
        axis.set_title(model.name, fontsize=10)
        axis.set_xlabel("ranks")
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("ms a clipped step")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    write_plot(path, figure)


def main(argv: list[str] | None = None) -> dict[str, str]:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("plot", nargs="?", type=Path)
    parser.add_argument("--nvlink", type=float, default=400, help="GB/s of a GPU, up to 8")
    parser.add_argument("--network", type=float, default=50, help="GB/s of a GPU, beyond")
    parser.add_argument("--latency", type=float, default=10, help="µs of a message")
    parser.add_argument("--tokens", type=int, default=8192, help="of a rank in an iteration")
    args = parser.parse_args(argv)
    net = Network(args.nvlink * 1e9, args.network * 1e9, args.latency * 1e-6)
    known = measured()
    found = tables(known, net, args.tokens)
    for name, each in found.items():
        print(f"{name}\n\n{each}\n")
    if args.plot:

        def time_of(model: Model, ranks: int, way: str) -> float:
            return step_of(model, ranks, way, known, net, clips=True)

        plot(args.plot, time_of, known.host)
    return found


if __name__ == "__main__":
    main()
