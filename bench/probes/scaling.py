#!/usr/bin/env python3
"""Computes what training steps cost on 1 to 1,024 GPUs: tables and plot of docs/scaling.md.

    PYTHONPATH=bench:python python bench/probes/scaling.py [PLOT.svg] [--network GB/S]

The terms of a step are fitted to steps of one and two GPUs, which bench/probes/fsdp2 has measured,
and tested on the steps of more GPUs that its results have. Terms of the network are options. They
are not measured.
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

RESULTS = Path(__file__).parents[1] / "results"
STEPS = RESULTS / "nvidia-h200" / "fsdp2.json"
FITTED_ON = (1, 2)
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


class Terms(NamedTuple):
    """Terms of a clipped step, in seconds."""

    operand: float
    """of each weight that a rank has: its operands are read and written"""
    tensor: float
    """of each tensor: the host's time"""
    overlaps: bool
    """Whether kernels run while the host starts others: a step then takes the longer of both."""

    def seconds(self, weights: float, tensors: float) -> float:
        parts = self.operand * weights, self.tensor * tensors
        return max(parts) if self.overlaps else sum(parts)


class Measured(NamedTuple):
    """Terms that were measured."""

    steps: dict[str, Terms]
    """by optimizer"""
    flops: float
    """six for each weight and token, in a second"""


class Way(NamedTuple):
    """A row of the results."""

    optimizer: str
    how: str
    overlaps: bool
    """As of ``Terms``: of torch's, which start kernels tensor by tensor."""


#: By the names that the tables have.
WAYS = {
    "AdamW": Way("AdamW", "fusedstep, clipped", overlaps=False),
    "LAMB": Way("Lamb", "fusedstep, clipped", overlaps=False),
    "torch's AdamW": Way("AdamW", "torch fused, clipped", overlaps=True),
}


def seconds_measured() -> dict[tuple[str, str, int], float]:
    """Clipped steps, by optimizer, model and the number of GPUs."""
    by_ranks = json.loads(STEPS.read_text())["on_gpus"]["ms"]
    return {
        (way, model.name, int(ranks)): by_model[model.name][row.optimizer][row.how] / 1e3
        for ranks, by_model in by_ranks.items()
        for model in MODELS
        if model.name in by_model
        for way, row in WAYS.items()
    }


def fitted(way: str, times: dict[tuple[str, str, int], float], net: Network) -> Terms:
    """Terms with the least squares of relative errors, of one and two GPUs."""
    models = {model.name: model for model in MODELS}
    points = []
    for (name, model, ranks), seconds in times.items():
        if name == way and ranks in FITTED_ON:
            weights, tensors = models[model].weights / ranks, models[model].tensors
            seconds -= net.small(ranks)
            points.append((weights / seconds, tensors / seconds))
    points.sort(key=lambda point: point[0] / point[1])
    if not WAYS[way].overlaps:
        return Terms(*_of_both(points), overlaps=False)
    # The host is the limit of the first of them, and the operands are that of the others.
    found = [
        Terms(_of_one([x for x, _ in points[k:]]), _of_one([y for _, y in points[:k]]), True)
        for k in range(1, len(points))
    ]
    return min(found, key=lambda terms: sum((1 - terms.seconds(*each)) ** 2 for each in points))


def _of_one(values: list[float]) -> float:
    """The a with the least squares of 1 - a x."""
    return sum(values) / sum(x * x for x in values)


def _of_both(points: list[tuple[float, float]]) -> tuple[float, float]:
    """The a and b with the least squares of 1 - a x - b y."""
    xx, xy, yy = (sum(p[i] * p[j] for p in points) for i, j in ((0, 0), (0, 1), (1, 1)))
    x, y = (sum(p[i] for p in points) for i in (0, 1))
    whole = xx * yy - xy * xy
    return (x * yy - xy * y) / whole, (xx * y - x * xy) / whole


def measured(net: Network) -> Measured:
    times = seconds_measured()
    training = json.loads((RESULTS / "nvidia-h100" / "gpt_iteration.json").read_text())
    settings = training["settings"]
    tokens = math.prod(
        settings[name] for name in ("batch_size", "block_size", "gradient_accumulation_steps")
    )
    (row,) = (
        row for row in training["rows"] if row["name"] == "fusedstep:AdamW/flash_attn/compiled"
    )
    flops = 6 * row["weights"] * tokens / (row["ms"] / 1e3)
    return Measured({way: fitted(way, times, net) for way in WAYS}, flops)


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


def step_of(model: Model, ranks: int, way: str, known: Measured, net: Network) -> float:
    """Seconds of a clipped step of shards."""
    return known.steps[way].seconds(model.weights / ranks, model.tensors) + net.small(ranks)


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
    return Cost(compute, exposed, step_of(model, ranks, way, known, net))


# Tables


def table(head: list[str], rows: Iterable[list[str]]) -> str:
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def number(x: float) -> str:
    return f"{x:,.0f}" if x >= 100 else f"{x:.3g}"


def terms(known: Measured, net: Network) -> str:
    rows = [
        *(
            [f"operands of a weight: {way}", f"{each.operand * 1e12:.3g} ps", "fitted"]
            for way, each in known.steps.items()
        ),
        *(
            [f"host, each tensor: {way}", f"{each.tensor * 1e6:.3g} µs", "fitted"]
            for way, each in known.steps.items()
        ),
        ["computation", f"{known.flops / 1e12:.0f} TFLOP/s", "measured, one GPU"],
        ["NVLink, each GPU, up to 8", f"{net.nvlink / 1e9:.0f} GB/s", "assumed"],
        ["network, each GPU", f"{net.network / 1e9:.0f} GB/s", "assumed"],
        ["latency of a message", f"{net.latency * 1e6:.0f} µs", "assumed"],
    ]
    return table(["term", "value", "from"], rows)


def errors(known: Measured, net: Network) -> str:
    """A table of measured times, and by how many percent the time of the model is longer."""
    times = seconds_measured()
    ranks = sorted({number for _, _, number in times})
    rows = []
    for model in MODELS:
        for way in WAYS:
            if (way, model.name, ranks[0]) not in times:
                continue
            row = [f"{model.name}, {way}"]
            for number in ranks:
                seconds = times[way, model.name, number]
                off = step_of(model, number, way, known, net) / seconds - 1
                row += [f"{1e3 * seconds:.3g}", f"{100 * off:+.0f} %"]
            rows.append(row)
    head = [cell for number in ranks for cell in (f"{number}, measured", "the model is off by")]
    return table(["ms a clipped step", *head], rows)


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
            number(1e3 * step_of(model, ranks, way, known, net))
            for ranks in (1, 2, 8, 64, 256, 1024)
        ]
        for model in MODELS
        for way in known.steps
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
        "Errors": errors(known, net),
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
    known = measured(net)
    found = tables(known, net, args.tokens)
    for name, each in found.items():
        print(f"{name}\n\n{each}\n")
    if args.plot:

        def time_of(model: Model, ranks: int, way: str) -> float:
            return step_of(model, ranks, way, known, net)

        plot(args.plot, time_of, known.steps)
    return found


if __name__ == "__main__":
    main()
