#!/usr/bin/env python3
"""Draw and tabulate which share of an iteration the optimizer step takes, in four trainings.

    PYTHONPATH=bench python -m reports.iterations

writes bench/results/iterations.svg, and prints the table of docs/performance.md.
"""

from __future__ import annotations

import json
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from matplotlib.figure import Figure

from reports.tables import write_plot

RESULTS = Path(__file__).parents[1] / "results"
BOTH = ("torch", "fusedstep")
HEADING = (
    "training",
    "other step",
    "its ms",
    "of an iteration",
    "our ms",
    "of an iteration",
    "training is faster by",
)


class Iteration(NamedTuple):
    """Milliseconds of an iteration, and the part that an optimizer adds to its passes."""

    title: str
    other: str
    """Who makes the other step."""
    ms: tuple[float, float]
    """With the other step, and with ours."""
    step: tuple[float, float]

    def shares(self) -> tuple[float, float]:
        """Returns what the two steps take of their iterations, in percent."""
        other, ours = (100 * step / ms for step, ms in zip(self.step, self.ms, strict=True))
        return other, ours

    def faster(self) -> float:
        """Returns by how many percent of the other iteration a training becomes shorter.

        The passes are the same and differ from run to run, so that the steps alone count.
        """
        return 100 * (self.step[0] - self.step[1]) / self.ms[0]


def _rows(file: str, key: str) -> dict[Any, Any]:
    return {row[key]: row for row in json.loads((RESULTS / file).read_text())["rows"]}


def _small_gpt(file: str, title: str, *attentions: str) -> Iteration:
    """Returns the means over kinds of attention."""
    rows = _rows(file, "name")
    ms, step = (
        tuple(fmean(rows[f"{name}:AdamW/{each}"][key] for each in attentions) for name in BOTH)
        for key in ("ms", "optimizer_ms")
    )
    return Iteration(title, "torch, fused", ms, step)


def _zero() -> Iteration:
    ms = json.loads((RESULTS / "nvidia-h200/zero_offload.json").read_text())["ms"]
    other, ours = ms["DeepSpeedCPUAdam"], ms["fusedstep"]
    return Iteration(
        "GPT of 354 M, ZeRO 3 offloaded, 2 H200",
        "DeepSpeedCPUAdam",
        (other["iteration"], ours["iteration"]),
        (other["optimizer"], ours["optimizer"]),
    )


def _offload() -> Iteration:
    rows = json.loads((RESULTS / "nvidia-h100/offload.json").read_text())["rows"]
    ms = {row["kind"]: row["ms"] for row in rows if row["weights"] == "float32"}
    passes = ms["none"]
    return Iteration(
        "GPT of 1.31 B, states on the CPU, H100",
        "torchao, torch fused",
        (ms["torchao"], ms["ours"]),
        (ms["torchao"] - passes, ms["ours"] - passes),
    )


def iterations() -> list[Iteration]:
    """Returns the four trainings, all with AdamW in float32 or beside bfloat16 passes."""
    return [
        _small_gpt("nvidia-h200/nanogpt.json", "GPT of 85 M, H200", "flash_attn"),
        _small_gpt("amd-zen4-2-cores/nanogpt.json", "GPT of 85 M, Zen 4", "naive", "flash_attn"),
        _zero(),
        _offload(),
    ]


def table() -> str:
    lines = [f"| {' | '.join(HEADING)} |", "| --- | --- |" + " ---: |" * 5]
    for each in iterations():
        cells = [
            f"{step:.3g} | {share:.2g} %"
            for step, share in zip(each.step, each.shares(), strict=True)
        ]
        lines.append(
            f"| {each.title} | {each.other} | {' | '.join(cells)} | {each.faster():.2g} % |"
        )
    return "\n".join(lines) + "\n"


def plot() -> Figure:
    """Draws two bars a training; the other step's iteration is 100. The shares are the table's."""
    found = iterations()
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    axis = figure.subplots()
    for place, each in enumerate(found):
        bars = zip((-0.2, 0.2), each.step, each.shares(), ("#1f77b4", "black"), strict=True)
        for offset, step, share, colour in bars:
            whole = 100 * (each.ms[0] - each.step[0] + step) / each.ms[0]
            part = 100 * step / each.ms[0]
            axis.barh(place + offset, whole - part, 0.36, color="#d9d9d9")
            axis.barh(place + offset, part, 0.36, left=whole - part, color=colour)
            name = each.other if offset < 0 else "ours"
            axis.text(whole + 1, place + offset, f"{name}: {share:.2g} %", va="center", fontsize=8)
    axis.set_yticks(range(len(found)), [each.title for each in found])
    axis.invert_yaxis()
    axis.set_xlim(0, 145)
    axis.set_xlabel("time, the iteration with the other step is 100: grey passes, coloured step")
    return figure


if __name__ == "__main__":
    write_plot(RESULTS / "iterations.svg", plot())
    print(table(), end="")
