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
from collections.abc import Mapping
from pathlib import Path

from harness.environment import ROOT, Env

FOLDER = ROOT / "build" / "peers"


def _builders(*names: str) -> str:
    loads = "".join(f"{name}().load()\n" for name in names)
    return f"from deepspeed.ops.op_builder import {', '.join(names)}\n{loads}"


#: Programs that compile a library's kernels for a device, which else happens at the first step.
PREPARATIONS = {
    ("deepspeed", "cpu"): _builders("CPUAdamBuilder", "CPUAdagradBuilder"),
    ("deepspeed", "cuda"): _builders("FusedAdamBuilder", "FusedLambBuilder"),
}

#: Variables that keep a library off the GPU.
CPU_ONLY = {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}


class AbsentError(Exception):
    """A library is not to be had. The text says why."""


def environment(name: str, env: Env, folder: Path = FOLDER, device: str = "cpu") -> Env:
    """`env` in which a library can be imported, settled on the device. Raises AbsentError."""
    home = folder / name
    if not (home / "installed").is_file() and importlib.util.find_spec(name) is None:
        raise AbsentError(_read(home / "reason") or "not installed")
    if reason := _read(home / f"reason-{device}"):
        raise AbsentError(reason)
    return _environment(home, env, device)


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.is_file() else ""


def _environment(home: Path, env: Env, device: str) -> Env:
    found = {path for pattern in ("site-packages", "dist-packages") for path in home.rglob(pattern)}
    python_path = [env.get("PYTHONPATH"), *map(str, sorted(found))]
    path = [home / "bin", home / "local" / "bin", env.get("PATH", os.defpath)]
    return env | {
        "PYTHONPATH": os.pathsep.join(filter(None, python_path)),
        "PATH": os.pathsep.join(map(str, path)),
        "TORCH_EXTENSIONS_DIR": str(home / "extensions"),
        **(CPU_ONLY if device == "cpu" else {"DS_ACCELERATOR": device}),
    }


def install_all(
    requirements: list[str], options: list[str], folder: Path = FOLDER, device: str = "cpu"
) -> None:
    """Installs each library with all that it needs, and compiles its kernels for a device."""
    found = [(each.metadata["Name"], each.version) for each in importlib.metadata.distributions()]
    installed = dict(reversed(found))  # keeps the first of two with one name, which is imported
    pip = [sys.executable, "-m", "pip", "install", "--no-input", "--disable-pip-version-check"]
    for requirement in requirements:
        home = folder / re.split("[<>=]", requirement)[0]
        program = PREPARATIONS.get((home.name, device))
        if not (home / "installed").is_file():
            home.mkdir(parents=True, exist_ok=True)
            constraints = home / "constraints.txt"
            lines = [f"{name}=={version}\n" for name, version in installed.items()]
            constraints.write_text("".join(lines), encoding="utf-8")
            where = ["--prefix", str(home), "-c", str(constraints), requirement]
            if not _attempt(home, "installed", "reason", [*pip, *options, *where], os.environ):
                continue
        if program and not (home / f"prepared-{device}").is_file():
            env = _environment(home, dict(os.environ), device)
            command = [sys.executable, "-c", program]
            _attempt(home, f"prepared-{device}", f"reason-{device}", command, env)


def _attempt(
    home: Path, result: str, reason: str, command: list[str], env: Mapping[str, str]
) -> bool:
    """Runs a command. A file of the name `result` tells that it succeeded, `reason` why not."""
    print(f"{home.name}: {result} ...", file=sys.stderr, flush=True)
    log = home / f"{result}.log"
    with log.open("w", encoding="utf-8") as output:
        done = subprocess.run(
            command, env=env, stdin=subprocess.DEVNULL, stdout=output, stderr=output, check=False
        )
    if done.returncode == 0:
        (home / result).touch()
        (home / reason).unlink(missing_ok=True)
        return True
    text = _reason(log.read_text(encoding="utf-8", errors="replace"))
    (home / reason).write_text(text, encoding="utf-8")
    print(f"{home.name}: left out: {text}", file=sys.stderr)
    return False


def _reason(log: str) -> str:
    """The first line that tells of an error, or else the last one."""
    lines = [line.strip() for line in log.splitlines() if line.strip()] or ["no reason was given"]
    errors = (line for line in lines if line.startswith("ERROR:") or "Error: " in line)
    return next(errors, lines[-1]).removeprefix("ERROR: ")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("requirements", nargs="*", metavar="REQUIREMENT", help='as "timm>=1.0"')
    add("--find-links", type=Path, metavar="DIR", help="wheels to install from, without network")
    add("--device", choices=("cpu", "cuda"), default="cpu", help="what kernels are compiled for")
    arguments = parser.parse_args()
    options = ["--retries", "1"]
    if arguments.find_links:
        options = ["--no-index", "--find-links", str(arguments.find_links)]
    install_all(arguments.requirements, options, device=arguments.device)


if __name__ == "__main__":
    main()
