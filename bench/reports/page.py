#!/usr/bin/env python3
"""The page of a machine: all tables of its results, and its plots.

    PYTHONPATH=bench python -m reports.page FOLDER...

writes the README.md of these folders anew, from their JSON files.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

from reports import adan, nanogpt, steps
from reports.grid import Grid, Results, subtitle

#: The tables of a machine's page in their order, by the names of their files.
TITLES = {
    "steps": "Steps",
    "peers": "Beside other libraries",
    "adan": "Adan over sizes of GPT-2",
    "clipping": "Clipping and clearing in the step",
    "embedding": "Sparse gradients of an embedding table",
    "nanogpt": "Training a small GPT",
}

#: What makes the tables of a suite and the lines below them; reports/steps.py does for all others.
OF_SUITE = {"adan": adan, "nanogpt": nanogpt}


def of(results: Results) -> ModuleType:
    return OF_SUITE.get(results["suite"], steps)


def grids(results: Results) -> list[Grid]:
    return of(results).grids(results)


def remarks(results: Results) -> Iterator[str]:
    """The lines below the tables."""
    return of(results).remarks(results)


def page(folder: Path) -> str:
    """All tables that a folder has the results of, and its plots."""
    found = {
        name: json.loads(file.read_text(encoding="utf-8"))
        for name in TITLES
        if (file := folder / f"{name}.json").is_file()
    }
    parts = [f"# Optimizer steps on {folder.name}"]
    for table, results in found.items():
        parts += [
            f"## {TITLES[table]}",
            f"{subtitle(results)}; {of(results).command(table, results)}.",
        ]
        parts += [each.markdown() for each in grids(results)]
        parts.append("\n".join(f"- {line}" for line in remarks(results)))
        parts += [f"![{plot.stem}]({plot.name})" for plot in sorted(folder.glob(f"{table}-*.svg"))]
    for file in sorted({*folder.glob("*.json")} - {folder / f"{name}.json" for name in TITLES}):
        parts.append(f"[{file.name}]({file.name}) is from `{maker(file)}`.")
    return "\n\n".join(parts) + "\n"


def maker(file: Path) -> str:
    """The command that a file names as `by`, or else the probe of the file's name."""
    results = json.loads(file.read_text(encoding="utf-8"))
    return results.get("by", f"bench/probes/{file.stem}")


def write_page(folder: Path) -> None:
    (folder / "README.md").write_text(page(folder), encoding="utf-8")


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    for each in sys.argv[1:]:
        write_page(Path(each))
