"""Reads what the parts of `./run.sh test` took, and its Python tests by file and by function.

    ./run.sh test | tee LOG
    python bench/probes/test_time.py LOG OUT.json [build/logs/python-tests.xml]

`seconds` are those that a part was waited for, which add up to the whole: few where it ran beside
others. `ran` are those from its own beginning to its end, if it tells them. `files` and `functions`
have the core-seconds of the longest ones in the Python part, with what their fixtures took, by the
report that pytest writes. Where OUT.json is there already, the files that have grown by half since
are printed.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

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


def longest(seconds: Counter[str], count: int) -> dict[str, int]:
    return {name: round(value) for name, value in seconds.most_common(count) if value >= 1}


def by_file_and_function(report: Path) -> dict[str, dict[str, int]]:
    """Reads the report of pytest's --junitxml."""
    files: Counter[str] = Counter()
    functions: Counter[str] = Counter()
    for _, test in ElementTree.iterparse(report):
        if test.tag == "testcase":
            file, name = test.attrib["classname"], test.attrib["name"].partition("[")[0]
            files[file] += float(test.attrib["time"])
            functions[f"{file}.{name}"] += float(test.attrib["time"])
            test.clear()
    return {"files": longest(files, 60), "functions": longest(functions, 60)}


def grown(before: dict[str, int], now: dict[str, int]) -> list[str]:
    """Tells of files of ten seconds and more that take half as long again as they did."""
    return [
        f"{file}: {seconds} s, {before.get(file, 0)} s before"
        for file, seconds in now.items()
        if seconds >= max(10, 1.5 * before.get(file, 0))
    ]


def main() -> None:
    log, output, *reports = map(Path, sys.argv[1:])
    parts = parts_of(log.read_text(encoding="utf-8", errors="replace"))
    told = {"parts": parts, "seconds": sum(int(part["seconds"]) for part in parts)}
    for report in reports:
        told |= by_file_and_function(report)
        if output.is_file():
            before = json.loads(output.read_text(encoding="utf-8")).get("files", {})
            print(*grown(before, told["files"]), sep="\n")
    write_table(output, told)


if __name__ == "__main__":
    main()
