"""Reads what the parts of `./run.sh test` took from what it printed at its end.

    ./run.sh test | tee LOG; python bench/probes/test_time.py LOG OUT.json

Parts that ran beside others have the seconds that they were waited for.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tables import write_table

PART = re.compile(r"^(?:passed|FAILED) +(\S.*?) +(\d+) s  (.*)$", re.MULTILINE)


def main() -> None:
    log, output = map(Path, sys.argv[1:])
    text = log.read_text(encoding="utf-8", errors="replace")
    parts = [
        {"part": name, "seconds": int(seconds), "tests": tests.partition(" in ")[0]}
        for name, seconds, tests in PART.findall(text)
    ]
    total = sum(part["seconds"] for part in parts)
    write_table(output, {"parts": parts, "seconds": total})


if __name__ == "__main__":
    main()
