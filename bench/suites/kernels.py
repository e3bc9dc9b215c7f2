"""The kernels alone, without torch and Python: runs what is built from kernels.cpp."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

from harness.environment import Env
from harness.processes import Tell
from suites.rows import PLAIN

NAME = "fusedstep_bench_kernels"

#: A figure is the median of as many repetitions as fit into SECONDS. Each is as short as can be
#: timed well, so that what disturbs the machine now and then disturbs few of them.
SECONDS, SECONDS_EACH = 0.15, 0.0005
LEAST_REPETITIONS = 5

MILLISECONDS = {"ns": 1e-6, "us": 1e-3, "ms": 1.0, "s": 1e3}


class Kernels:
    """The program, in an environment that says how many threads there are."""

    def __init__(self, folder: Path, env: Env) -> None:
        self._command, self._env = str(folder / NAME), env
        self._names = set(self._run("--benchmark_list_tests").split())

    def find(self, rule: str | None, shapes: str, isa: str, threads: int) -> str | None:
        """The benchmark of a rule over a list of shapes, if there is one."""
        name = f"{rule}/{shapes}/{isa}/threads:{threads}/real_time"
        return name if name in self._names else None

    def milliseconds(self, name: str, estimate: float) -> float:
        """The median; `estimate` says roughly what to expect."""
        repetitions = int(SECONDS / max(SECONDS_EACH, estimate / 1e3))
        output = self._run(
            f"--benchmark_filter=^{name}$",
            f"--benchmark_repetitions={max(LEAST_REPETITIONS, repetitions)}",
            f"--benchmark_min_time={SECONDS_EACH}",
            "--benchmark_format=json",
        )
        runs = json.loads(output)["benchmarks"]
        (median,) = (run for run in runs if run.get("aggregate_name") == "median")
        return median["real_time"] * MILLISECONDS[median["time_unit"]]

    def _run(self, *options: str) -> str:
        command = [self._command, *options]
        done = subprocess.run(command, env=self._env, capture_output=True, text=True, check=True)
        return done.stdout


def add_kernels(
    folder: Path,
    env: Env,
    facts: dict[str, Any],
    rows: list[dict[str, Any]],
    note: Tell,
    tell: Tell,
) -> None:
    """Adds the kernels alone to the results of each row that there is such a benchmark for.

    The allocator has no influence: the rows of a list under several have the same figure.
    """
    if not (folder / NAME).is_file():
        return note("built without Google Benchmark: the kernels alone are not timed")
    try:
        kernels, found = Kernels(folder, env), {}
        rules = {case.name: case.optimizer.__name__ for case in PLAIN}
        for row in rows:
            estimate = row.get("results", {}).get("fused", {}).get("ms")
            if estimate is None or row["precision"] != "float32" or "threads" in row:
                continue
            place = (rules.get(row["optimizer"]), row["shapes"], facts["isa"], facts["threads"])
            if (name := kernels.find(*place)) is None:
                continue
            tell(row["name"])
            found[name] = found.get(name) or kernels.milliseconds(name, estimate)
            row["results"]["kernels"] = {"ms": found[name]}
            facts["implementations"]["kernels"] = "kernels alone"
    except subprocess.CalledProcessError as failure:
        note(f"the kernels alone were not timed: {failure}")
    return None
