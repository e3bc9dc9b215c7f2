#!/usr/bin/env python3
"""Install the libraries of the peers, one by one, each into a folder of its own in build/peers.

What is installed already is neither replaced nor installed again: a library that wants another
version of torch, say, is left out, as is one that cannot be built. Why is written beside it, and
shown by `./run.sh bench peers`.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

from environment import ROOT

FOLDER = ROOT / "build" / "peers"

#: What compiles a library's kernels, where it would do so at the first step.
PREPARATIONS = {
    "deepspeed": (
        "from deepspeed.ops.op_builder import CPUAdagradBuilder, CPUAdamBuilder\n"
        "CPUAdamBuilder().load()\n"
        "CPUAdagradBuilder().load()\n"
    )
}


class AbsentError(Exception):
    """A library is not to be had. The text says why."""


def environment(name: str, env: dict[str, str], folder: Path = FOLDER) -> dict[str, str]:
    """`env` in which a library can be imported, and is settled on the CPU.

    Raises:
        AbsentError: if there is no such library.
    """
    home = folder / name
    if not (home / "installed").is_file() and importlib.util.find_spec(name) is None:
        reason = home / "reason"
        raise AbsentError(
            reason.read_text(encoding="utf-8") if reason.is_file() else "not installed"
        )
    found = {path for pattern in ("site-packages", "dist-packages") for path in home.rglob(pattern)}
    python_path = [env.get("PYTHONPATH"), *map(str, sorted(found))]
    path = [home / "bin", home / "local" / "bin", env.get("PATH", os.defpath)]
    return env | {
        "PYTHONPATH": os.pathsep.join(filter(None, python_path)),
        "PATH": os.pathsep.join(map(str, path)),
        "TORCH_EXTENSIONS_DIR": str(home / "extensions"),
        "CUDA_VISIBLE_DEVICES": "",
        "DS_ACCELERATOR": "cpu",
    }


def install(name: str, requirement: str, options: list[str], folder: Path = FOLDER) -> None:
    """Installs a library with what it needs.

    Raises:
        AbsentError: if that does not succeed.
    """
    home = folder / name
    home.mkdir(parents=True, exist_ok=True)
    installed = {d.metadata["Name"]: d.version for d in importlib.metadata.distributions()}
    constraints = home / "constraints.txt"
    constraints.write_text("".join(f"{n}=={v}\n" for n, v in installed.items()), encoding="utf-8")
    pip = [sys.executable, "-m", "pip", "install", "--no-input", "--disable-pip-version-check"]
    command = [*pip, *options, "--prefix", str(home), "-c", str(constraints), requirement]
    _run(command, dict(os.environ), home / "install.log")
    (home / "installed").touch()
    if name in PREPARATIONS:
        command = [sys.executable, "-c", PREPARATIONS[name]]
        _run(command, environment(name, dict(os.environ), folder), home / "prepare.log")


def _run(command: list[str], env: dict[str, str], log: Path) -> None:
    with log.open("w", encoding="utf-8") as output:
        done = subprocess.run(
            command, env=env, stdin=subprocess.DEVNULL, stdout=output, stderr=output, check=False
        )
    if done.returncode != 0:
        raise AbsentError(_reason(log.read_text(encoding="utf-8", errors="replace")))


def _reason(log: str) -> str:
    """Of what was printed, the first line that tells of an error, or else the last one."""
    lines = [line.strip() for line in log.splitlines() if line.strip()] or ["no reason was given"]
    errors = (line for line in lines if line.startswith("ERROR:") or "Error: " in line)
    return next(errors, lines[-1]).removeprefix("ERROR: ")


def install_all(requirements: list[str], options: list[str], folder: Path = FOLDER) -> None:
    for requirement in requirements:
        name = re.split("[<>=]", requirement)[0]
        home = folder / name
        if (home / "installed").is_file():
            continue
        print(f"{name}: installing {requirement} ...", file=sys.stderr, flush=True)
        try:
            install(name, requirement, options, folder)
        except AbsentError as reason:
            (home / "installed").unlink(missing_ok=True)
            (home / "reason").write_text(str(reason), encoding="utf-8")
            print(f"{name}: left out: {reason}", file=sys.stderr)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("requirements", nargs="*", metavar="REQUIREMENT", help='as "timm>=1.0"')
    parser.add_argument(
        "--find-links", type=Path, metavar="DIR", help="wheels to install from, without network"
    )
    arguments = parser.parse_args()
    options = ["--retries", "1"]
    if arguments.find_links:
        options = ["--no-index", "--find-links", str(arguments.find_links)]
    install_all(arguments.requirements, options)


if __name__ == "__main__":
    main()
