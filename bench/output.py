"""What the commands of the benchmark have in common: their options, and where results go."""

from __future__ import annotations

import argparse
import datetime
import json
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

import report
from environment import ROOT
from machine import Machine, this_machine

#: Share of the CPUs above which the rest of the system disturbs figures enough to say so.
DISTURBING = 0.1


@dataclass
class Collected:
    machine: Machine = field(default_factory=this_machine)
    """Made before this process is pinned to some of its CPUs."""
    facts: dict[str, Any] = field(default_factory=dict)
    rows: list[dict[str, Any]] = field(default_factory=list)
    kernels: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    def note_disturbance(self, share: float) -> None:
        if share > DISTURBING:
            self.note(
                f"other programs took {100 * share:.0f} % of the CPUs meanwhile: these are the "
                "figures of a busy machine"
            )

    def results(self) -> dict[str, Any]:
        return {
            "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            "machine": self.machine.facts(),
            **self.facts,
            "notes": self.notes,
            "rows": self.rows,
            "kernels": self.kernels,
        }


def filter_argument(parser: argparse.ArgumentParser, told: str | None = None) -> None:
    parser.add_argument("filter", nargs="?", default="", metavar="FILTER", type=_pattern, help=told)


def add_arguments(parser: argparse.ArgumentParser, seconds: float | None = None) -> None:
    filter_argument(parser)
    parser.add_argument(
        "--budget", type=float, metavar="SECONDS", default=seconds, help="time for all steps"
    )
    output_arguments(parser)
    parser.add_argument(
        "--libraries",
        type=Path,
        metavar="DIR",
        default=ROOT / "build" / "release" / "bench",
        help="where the native parts of the benchmark were built",
    )


def output_arguments(parser: argparse.ArgumentParser) -> None:
    where = parser.add_mutually_exclusive_group()
    where.add_argument(
        "--output", type=Path, metavar="DIR", help="instead of one in build/results/MACHINE"
    )
    where.add_argument(
        "--commit",
        action="store_true",
        help="write into bench/results/MACHINE, which the pages are made from",
    )


def _pattern(text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        raise argparse.ArgumentTypeError(f"not a regular expression: {error}") from None
    return text


def check_libraries(folder: Path) -> None:
    if not list(folder.glob("libfusedstep_limit.*")):
        sys.exit(
            f"{folder} has no libfusedstep_limit.so. Build it: "
            "cmake --preset release && cmake --build --preset release"
        )


def results_folder(arguments: argparse.Namespace, *names: str) -> Path:
    """The folder that `output_arguments` ask for. Git ignores the usual one, in build/."""
    root = ROOT / ("bench" if arguments.commit else "build") / "results"
    found = arguments.output or root.joinpath(*names)
    found.mkdir(parents=True, exist_ok=True)
    return found


def write(folder: Path, results: dict[str, Any], markdown: str) -> None:
    (folder / "results.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    (folder / "README.md").write_text(markdown, encoding="utf-8")


def show(tables: list[Table], remarks: Iterable[str], folder: Path) -> None:
    """Figures that are cut off would be worse than lines that wrap."""
    terminal = Console()
    console = Console(width=max(terminal.width, *map(report.width_of, tables)))
    for table in tables:
        console.print(table)
    for line in remarks:
        terminal.print(line, markup=False, highlight=False)
    terminal.print(f"Results, tables and plots are in {folder}", markup=False, highlight=False)
