"""A type checker's view of the public functions."""

import subprocess
import sys
from pathlib import Path

import pytest


def test_mypy_finds_the_types_that_are_written_down(request, repository):
    """It reads torch for ten seconds, and keeps that for the next time."""
    pytest.importorskip("mypy", reason="mypy is not installed: pip install mypy")
    cache = request.config.cache.mkdir("mypy")
    run = subprocess.run(
        [
            *(sys.executable, "-m", "mypy", "--strict", "--follow-imports=silent"),
            *("--cache-dir", str(cache), str(Path(__file__).with_name("typing_cases.py"))),
        ],
        env={"MYPYPATH": str(repository / "python"), "PATH": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
