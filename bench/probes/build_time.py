#!/usr/bin/env python3
"""Time building the library from nothing, without ccache, for some choices of GPUs.

    build_time.py [--output FILE.json]

Prints seconds, CPU seconds and the bytes of the libraries, and writes them as JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import tempfile
import time
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent.parent

CHOICES = (
    {"FUSEDSTEP_WITH_CUDA": "OFF"},
    {"FUSEDSTEP_WITH_CUDA": "AUTO", "FUSEDSTEP_CUDA_ARCHITECTURES": "90"},
    {"FUSEDSTEP_WITH_CUDA": "AUTO", "FUSEDSTEP_CUDA_ARCHITECTURES": "80-real;90-real;100-real;120"},
)


def cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def measure(options: dict[str, str]) -> dict[str, str | float]:
    launchers = [f"-DCMAKE_{language}_COMPILER_LAUNCHER=" for language in ("CXX", "CUDA")]
    with tempfile.TemporaryDirectory() as folder:
        configure = ["cmake", "-S", ROOT, "-B", folder, "-G", "Ninja", *launchers]
        configure += ["-DCMAKE_BUILD_TYPE=Release", *(f"-D{k}={v}" for k, v in options.items())]
        subprocess.run(configure, check=True)
        began, cpu_began = time.monotonic(), cpu_seconds()
        build = ["cmake", "--build", folder, "--target", "fusedstep_python"]
        subprocess.run(build, check=True)
        return options | {
            "seconds": round(time.monotonic() - began),
            "cpu_seconds": round(cpu_seconds() - cpu_began),
            "libraries_bytes": sum(each.stat().st_size for each in Path(folder).rglob("*.so")),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, metavar="FILE.json")
    arguments = parser.parse_args()
    machine = {"cpus": len(os.sched_getaffinity(0)), "torch": torch.__version__}
    results = {"machine": machine, "rows": [measure(each) for each in CHOICES]}
    text = json.dumps(results, indent=1)
    print(text)
    if arguments.output:
        arguments.output.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
