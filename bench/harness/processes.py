"""Processes that measure: starts workers, reads what they tell, and says how they ended."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from harness.environment import ROOT, Env

WORKER = ROOT / "bench" / "suites" / "worker.py"

Request = dict[str, Any]
"""The fields of worker.Request."""

Tell = Callable[[str], None]


class WorkerError(Exception):
    """A process did not come to its end, or not as it should."""


class LateError(WorkerError):
    """A process was ended, as it had not come to its end long after its time."""


def events(
    request: Request, env: Env, log: Path | None = None, most_seconds: float | None = None
) -> Iterator[dict[str, Any]]:
    """The events of a worker."""
    return events_of([sys.executable, str(WORKER), json.dumps(request)], env, log, most_seconds)


def events_of(
    command: list[str], env: Env, log: Path | None = None, most_seconds: float | None = None
) -> Iterator[dict[str, Any]]:
    """The lines of JSON that a process prints.

    Its stderr goes to `log`; after `most_seconds` it is ended. Raises WorkerError in the end, if it
    failed.
    """
    stderr = None if log is None else log.open("w", encoding="utf-8")
    with subprocess.Popen(
        command, env=env, stdout=subprocess.PIPE, stderr=stderr, text=True
    ) as process:
        timer = threading.Timer(most_seconds or 0, process.kill)
        if most_seconds is not None:
            timer.start()
        try:
            # The last line of one that was ended may be cut off.
            yield from (json.loads(line) for line in process.stdout if line.endswith("\n"))
        finally:
            if sys.exc_info()[0] is not None:
                process.kill()
            process.wait()
            is_late = most_seconds is not None and not timer.is_alive()
            timer.cancel()
            if stderr is not None:
                stderr.close()
    if process.returncode != 0 and is_late:
        raise LateError("had not come to its end long after its time")
    if process.returncode != 0:
        raise WorkerError(_ending(process.returncode, log))


def _ending(status: int, log: Path | None) -> str:
    if status < 0:
        return f"ended by {signal.Signals(-status).name}"
    lines = log.read_text(encoding="utf-8", errors="replace").split("\n") if log else []
    last = next((line.strip() for line in reversed(lines) if line.strip()), "")
    return f"ended with status {status}" + f": {last}" * bool(last)


def check_allocator(facts: dict[str, Any], allocator: str) -> None:
    mapped = facts.pop("jemalloc")
    if (mapped is not None) != (allocator == "jemalloc"):
        raise WorkerError(f"{allocator} was asked for, but {mapped} is mapped")


def progress_over(console: Any) -> Progress:
    text = TextColumn("{task.description:<40}")
    return Progress(text, BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=console)


def show(progress: Progress, task: int, *parts: str) -> None:
    """Says what is measured: in the task's line, or in a line of its own off a terminal."""
    text = "".join(parts)
    progress.update(task, description=text)
    if not progress.console.is_terminal:
        progress.console.print(text, highlight=False)
