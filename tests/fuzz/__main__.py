"""`python -m fuzz`: random cases until the time is up, or one case again."""

from __future__ import annotations

import argparse
import json
import os
import random
import shlex
import sys
import time
from collections.abc import Iterator

# Threads that wait for one another must not spin: a case starts more of them than there are CPUs.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

from rich.console import Console
from rich.live import Live

from fuzz import composites, events, oracle, properties, run, shrink

SECONDS_BETWEEN_LINES = 10


def options(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="./run.sh fuzz", description=__doc__)
    parser.add_argument("--minutes", type=float, help="for so long (1 unless --cases is given)")
    parser.add_argument("--cases", type=int, help="so many cases")
    parser.add_argument("--seed", type=int, help="the first case's (default: another each time)")
    parser.add_argument("--case", type=json.loads, help="this case, as a failure prints it")
    return parser.parse_args(arguments)


def drawn(asked: argparse.Namespace, seed: int) -> Iterator[run.Case]:
    """The cases of a seed and those after it, until the time is up."""
    minutes = asked.minutes or (1 if asked.cases is None else None)
    end = None if minutes is None else time.monotonic() + 60 * minutes
    number = 0
    while (end is None or time.monotonic() < end) and number != asked.cases:
        kind = events if events.has(seed + number) else composites
        yield kind.draw(seed + number)
        number += 1


class Progress:
    """One line: live on a terminal, a plain one now and then elsewhere."""

    def __init__(self, console: Console):
        self._console, self._began, self._shown = console, time.monotonic(), time.monotonic()
        self._live = Live(console=console, transient=True) if console.is_terminal else None
        self.cases = self.steps = 0
        self.tally = oracle.Tally()

    def __enter__(self) -> Progress:
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *_) -> None:
        self.stop()

    def stop(self) -> None:
        if self._live:
            self._live.stop()

    def note(self, case: run.Case) -> None:
        self.cases += 1
        self.steps += len(case["steps"])
        if self._live:
            self._live.update(str(self))
        elif time.monotonic() - self._shown >= SECONDS_BETWEEN_LINES:
            self._shown = time.monotonic()
            self._console.print(str(self))

    def __str__(self) -> str:
        elements, seconds = self.tally.elements, time.monotonic() - self._began
        vague = 100 * self.tally.vague / max(elements, 1)
        return (
            f"fuzz: {self.cases:,} cases, {self.steps:,} steps, {elements:,} elements "
            f"({vague:.2f} % too near to tell), {seconds:.0f} s"
        )


def failure_of(case: run.Case) -> run.CaseError | None:
    try:
        properties.check(case, oracle.Tally())
    except run.CaseError as failure:
        return failure
    return None


def report(console: Console, case: run.Case, failure: run.CaseError) -> None:
    """Prints what has failed, and the smallest case found that fails like that."""
    console.print(f"seed {case['seed']}, {case['row']}: {failure.kind}: {failure}")
    console.print("making it smaller ...")
    kind = failure.kind

    def fails(smaller: run.Case) -> bool:
        found = failure_of(smaller)
        return found is not None and found.kind == kind

    small = shrink.shrink(case, fails) if fails(case) else case
    found = failure_of(small)
    console.print(f"smallest: {found}" if found else "it passes when it is run again")
    print(f"./run.sh fuzz --case {shlex.quote(json.dumps(small))}", flush=True)


def main() -> int:
    asked = options()
    console = Console(stderr=True, soft_wrap=True, highlight=False, markup=False)
    seed = random.SystemRandom().randrange(10**9) if asked.seed is None else asked.seed
    if asked.case is None:
        console.print(f"fuzz: cases from seed {seed} on")
    with Progress(console) as progress:
        try:
            for case in [asked.case] if asked.case else drawn(asked, seed):
                properties.check(case, progress.tally)
                progress.note(case)
        except KeyboardInterrupt:
            console.print("interrupted")
        except run.CaseError as failure:
            progress.stop()
            console.print(str(progress))
            if asked.case:
                console.print(f"{failure.kind}: {failure}")
            else:
                report(console, case, failure)
            return 1
    print(f"{progress}: {progress.cases} cases passed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
