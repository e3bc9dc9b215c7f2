"""Reads what the parts of `./run.sh test` took from what it printed at its end.

    ./run.sh test | tee LOG; python bench/probes/test_time.py LOG OUT.json

`seconds` are those that a part was waited for, which add up to the whole: few where it ran beside
others. `ran` are those from its own beginning to its end, if it tells them.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from reports.tables import write_table

PART = re.compile(r"^(?:passed|FAILED) +(\S.*?) +(\d+) s  (.*)$", re.MULTILINE)
RAN = re.compile(r"^(?P<tests>.*?)(?: in ([\d.]+)s\b.*|, (\d+) s: .*)?$")
"""The last words of pytest, and of the fuzz."""


def part(name: str, seconds: str, words: str) -> dict[str, str | int]:
    told = RAN.fullmatch(words)
    assert told is not None
    found: dict[str, str | int] = {"part": name, "seconds": int(seconds), "tests": told["tests"]}
    ran = told[2] or told[3]
    return found | {"ran": round(float(ran))} if ran else found


def parts_of(text: str) -> list[dict[str, str | int]]:
    return [part(*words) for words in PART.findall(text)]


def main() -> None:
    log, output = map(Path, sys.argv[1:])
    parts = parts_of(log.read_text(encoding="utf-8", errors="replace"))
    write_table(output, {"parts": parts, "seconds": sum(int(part["seconds"]) for part in parts)})


if __name__ == "__main__":
    main()
