#!/usr/bin/env python3
"""Time `import fusedstep` after `import torch`, in a process for each time.

    import_time.py OUT.json

CPU time: it reads files that are in memory, on one thread, and waits for nothing. The first process
compiles the modules' bytecode, as pip does, and is not counted.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from reports.tables import write_table

TIMES = 15
PROGRAM = """
import time
times = [time.process_time()]
import torch
times.append(time.process_time())
import fusedstep
times.append(time.process_time())
print(torch.__version__, *(later - earlier for earlier, later in zip(times, times[1:])))
"""


def main() -> None:
    environment = os.environ | {"PYTHONDONTWRITEBYTECODE": ""}
    times = []
    for _ in range(TIMES + 1):
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )
        version, *seconds = done.stdout.split()
        times.append([1e3 * float(each) for each in seconds])
    of_torch, ours = zip(*times[1:], strict=True)
    found = {
        "torch": version,
        "processes": TIMES,
        "cpu_ms": {
            "torch": round(statistics.median(of_torch)),
            "fusedstep, median": round(statistics.median(ours), 1),
            "fusedstep, longest": round(max(ours), 1),
        },
    }
    print(json.dumps(found, indent=1))
    write_table(Path(sys.argv[1]), found)


if __name__ == "__main__":
    main()
