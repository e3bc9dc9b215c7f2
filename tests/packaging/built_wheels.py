"""Builds the wheels, installs them, and runs what is installed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import torch

ROOT = Path(__file__).resolve().parents[2]


def run(*command: object, python: Path | None = None, **options) -> str:
    """Runs a command that does not see the checkout, and returns what it prints.

    ``python`` is the one that a command finds by that name.
    """
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    if python:
        environment["PATH"] = f"{python.parent}{os.pathsep}{environment['PATH']}"
    done = subprocess.run(
        [str(word) for word in command], capture_output=True, text=True, env=environment, **options
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


class Wheels(NamedTuple):
    """Paths: as they are built, and as they go to a package index. Those of CUDA where nvcc is."""

    raw: Path
    repaired: Path
    raw_cuda: Path | None
    cuda: Path | None


def build(folder: Path) -> None:
    """Without a GPU the CUDA kernels are compiled as those of the checkout are."""
    gpus = "AUTO" if torch.cuda.is_available() else "NONE"
    run(ROOT / "run.sh", "wheel", "--into", folder, "--architectures", gpus)


def wheels_in(folder: Path) -> Wheels:
    found = [*(folder / "raw").glob("*.whl"), *folder.glob("*.whl")]
    cpu = [path for path in found if path.name.startswith("fusedstep-")]
    cuda = [path for path in found if path.name.startswith("fusedstep_cuda-")]
    return Wheels(*cpu, *(cuda or (None, None)))


def environment(folder: Path, packages: list[str], *wheels: Path) -> Path:
    """Returns the Python of a new environment. It has the wheels, and sees folders of packages."""
    run(sys.executable, "-m", "venv", "--without-pip", folder)
    python = folder / "bin" / "python"
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "others.pth").write_text("\n".join(packages))
    pip = (sys.executable, "-m", "pip", "--python", python)
    run(*pip, "install", "--no-index", *wheels)  # what they need is there, or this fails
    return python
