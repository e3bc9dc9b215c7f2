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
                times = {n: r["ms"] for n, r in row["results"].items() if "ms" in r}
                return f"{what} ({link}):\n\n{bars(results, times)}"
    return ""


def machine(results: dict[str, Any]) -> str:
    return results.get("device") or f"{results['threads']} cores of {results['machine']['cpu']}"


def bars(results: dict[str, Any], times: dict[str, float], mark: str = "") -> str:
    """The fastest first."""
    names = results["implementations"]
    times = {name: time for name, time in times.items() if name not in NO_STEPS}
    longest = max(times.values())
    lines = []
    for name, time in sorted(times.items(), key=lambda item: item[1]):
        kind = "bar ours" if name == "fused" else "bar"
        told = f"{time:#.3g}".rstrip(".") if time < 999.5 else f"{time:,.0f}"
        length = f'<i style="width: {100 * time / longest:.1f}%"></i>'
        cells = f"<span>{html.escape(names[name])}</span><span>{length}</span><b>{told}{mark}</b>"
        lines.append(f'<div class="{kind}">{cells}</div>')
    return "\n".join(['<div class="bars">', *lines, "</div>\n"])


def narrow(picture: Path) -> str:
    """What a narrow screen shows in place of peers-times.svg: times of ours, of some weights."""
    results = json.loads((picture.parent / "peers.json").read_text(encoding="utf-8"))
    parts = ['<div class="narrow">']
    told = set()
    for row in results["rows"]:
        of = row["title"], row["optimizer"]
        if row["title"] in (*OF, "2,000 small tensors") and "results" in row and of not in told:
            told.add(of)
            parts += [f"<b>{html.escape(', '.join(reversed(of)))}</b>"]
            times = {n: r["times"] for n, r in row["results"].items() if "times" in r}
            parts += [bars(results, {"fused": 1} | times, "×")]
    return "\n".join([*parts, "</div>"])
