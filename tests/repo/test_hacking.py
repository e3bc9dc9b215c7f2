"""HACKING.md tells the sizes that the code has."""

import re
import subprocess
import sys

import pytest


def tables(text):
    """The numbers of each row, by its name."""
    rows = re.findall(r"^\| ([^|]+) \| ([\d,.| ]+) \|$", text, re.MULTILINE)
    return {name: [float(each.replace(",", "")) for each in row.split("|")] for name, row in rows}


def test_sizes_are_what_a_script_finds(repository):
    if not (repository / ".git").exists():
        pytest.skip("sizes are those of tracked files")
    script = [sys.executable, repository / "scripts" / "sizes.py"]
    done = subprocess.run(script, capture_output=True, text=True, check=True)
    found, told = tables(done.stdout), tables((repository / "HACKING.md").read_text())
    assert len(found) > 10
    for name, numbers in found.items():
        assert told[name] == pytest.approx(numbers, rel=0.1, abs=0.02), name
