"""How long a step takes, as bars on the page of an optimizer, from the committed results."""

from __future__ import annotations

import html
import json
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parents[2] / "bench" / "results"

#: Files in which an optimizer is looked for: of each line the first that has it is drawn.
FILES = (
    (
        "intel-emerald-rapids-16-cores/peers.json",
        "intel-emerald-rapids-16-cores/steps.json",
        "amd-zen5-2-cores/peers.json",
    ),
    ("nvidia-h200/peers.json", "nvidia-h200/steps.json", "nvidia-h100/steps.json"),
    ("intel-emerald-rapids-16-cores/embedding.json",),
)
#: Rows that are drawn, by their titles, and of what they have the steps.
OF = {
    "GPT-2 124 M": "GPT-2 124 M",
    "GPT-2 124 M, all bf16": "GPT-2 124 M, all bf16",
    "each row once": "a table of 1,000,000 × 128, of which a batch has 4,096 rows",
}
#: Not whole steps from Python, or replayed.
NO_STEPS = ("kernels", "graph", "torch_graph")


def section(optimizer: str, repository: str) -> str:
    """Markdown, empty where nothing was measured."""
    figures = [figure for files in FILES if (figure := first_of(files, optimizer, repository))]
    return "\n".join(["\n## Speed\n", *figures]) if figures else ""


def first_of(files: tuple[str, ...], optimizer: str, repository: str) -> str:
    for file in files:
        results = json.loads((RESULTS / file).read_text(encoding="utf-8"))
        for row in results["rows"]:
            if row["optimizer"] == optimizer and row["title"] in OF and "results" in row:
                what = f"Milliseconds a step of {OF[row['title']]}, {machine(results)}"
                link = f"[results]({repository}/blob/main/bench/results/{file})"
                return f"{what} ({link}):\n\n{bars(results, row)}"
    return ""


def machine(results: dict[str, Any]) -> str:
    return results.get("device") or f"{results['threads']} cores of {results['machine']['cpu']}"


def bars(results: dict[str, Any], row: dict[str, Any]) -> str:
    """The fastest first."""
    names, measured = results["implementations"], row["results"]
    times = {n: r["ms"] for n, r in measured.items() if "ms" in r and n not in NO_STEPS}
    longest = max(times.values())
    lines = []
    for name, ms in sorted(times.items(), key=lambda item: item[1]):
        kind = "bar ours" if name == "fused" else "bar"
        time = f"{ms:#.3g}".rstrip(".") if ms < 999.5 else f"{ms:,.0f}"
        length = f'<i style="width: {100 * ms / longest:.1f}%"></i>'
        cells = f"<span>{html.escape(names[name])}</span><span>{length}</span><b>{time}</b>"
        lines.append(f'<div class="{kind}">{cells}</div>')
    return "\n".join(['<div class="bars">', *lines, "</div>\n"])
