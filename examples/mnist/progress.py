"""Progress on standard error: a live bar on a terminal, a plain line now and then elsewhere."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

SECONDS_BETWEEN_LINES = 10

Advance = Callable[..., None]  # advance(steps=1, note=None)


@contextmanager
def progress(what: str, total: int | None) -> Iterator[Advance]:
    """Yields `advance(steps=1, note=None)`, to be called as the work of `total` steps goes on.

    `total` may be None when it is not known; `note` is shown beside the bar until the next one.
    """
    console = Console(stderr=True)
    with _bar(console, what, total) if console.is_terminal else _lines(what, total) as advance:
        yield advance


@contextmanager
def _bar(console: Console, what: str, total: int | None) -> Iterator[Advance]:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(what, total=total, note="")

        def advance(steps: int = 1, note: str | None = None) -> None:
            bar.update(task, advance=steps, **({} if note is None else {"note": note}))

        yield advance


@contextmanager
def _lines(what: str, total: int | None) -> Iterator[Advance]:
    console = Console(stderr=True, soft_wrap=True, highlight=False, markup=False)
    done, shown, last = 0, "", time.monotonic()

    def advance(steps: int = 1, note: str | None = None) -> None:
        nonlocal done, shown, last
        done += steps
        shown = shown if note is None else note
        now = time.monotonic()
        if now - last >= SECONDS_BETWEEN_LINES:
            last = now
            share = f"{100 * done // total} %" if total else str(done)
            console.print(f"{what}: {share} {shown}".rstrip())

    yield advance
