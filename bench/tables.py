"""Tables and plots of results as files: compact JSON with four significant digits, lean SVG."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def rounded(value: Any) -> Any:
    """Four digits of each number: runs differ by more."""
    if isinstance(value, dict):
        return {key: rounded(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [rounded(each) for each in value]
    return float(f"{value:.4g}") if isinstance(value, float) and math.isfinite(value) else value


def write_table(file: Path, results: dict[str, Any]) -> None:
    """Writes results as the tables in bench/results are."""
    text = json.dumps(rounded(results), separators=(",", ":"), ensure_ascii=False)
    file.write_text(text + "\n", encoding="utf-8")


def write_plot(file: Path, figure: Figure) -> None:
    """Draws a figure into an SVG file, the same at each run, with its text as text."""
    from matplotlib import rc_context

    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "fusedstep"}):
        figure.savefig(file, format="svg", metadata={"Date": None})
    file.write_text(lean(file.read_text(encoding="utf-8")), encoding="utf-8")


def lean(svg: str) -> str:
    """An SVG of matplotlib without what no viewer shows: two decimals are 1/100 of a point."""
    what = r"<!DOCTYPE[^>]*>\s*|<metadata>.*?</metadata>\s*|<!--.*?-->\s*"
    svg = re.sub(what, "", svg, flags=re.DOTALL)
    svg = re.sub(r"-?\d+\.\d{3,}", lambda n: f"{float(n[0]):.2f}".rstrip("0").rstrip("."), svg)
    svg = re.sub(r"\s*\n\s*(?=[^<\s])", " ", svg)  # lines of a path
    return re.sub(r'(?m)^ +| +(?=" style=|"/>)', "", svg)
