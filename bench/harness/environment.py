"""The environment that steps are timed in: threads, pinning and allocator."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[2]

ALLOCATORS = ("glibc", "jemalloc")

Env = dict[str, str]

#: Variables that set an allocator up. glibc's is measured as it comes.
OF_ALLOCATORS = ("LD_PRELOAD", "MALLOC_CONF", "GLIBC_TUNABLES")


def _launcher() -> ModuleType:
    """scripts/launch.py: the benchmark runs as every other program here is told to."""
    spec = importlib.util.spec_from_file_location("launch", ROOT / "scripts" / "launch.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def environments(wanted: list[str], tree: Path = ROOT) -> tuple[dict[str, Env], list[str]]:
    """The environment of each wanted allocator that there is, and what to say of the others.

    The library is that of a tree. Pins this process, and so those it starts.
    """
    launcher = _launcher()
    common = {k: v for k, v in os.environ.items() if k not in OF_ALLOCATORS}
    common["PYTHONPATH"] = os.pathsep.join(
        map(str, (tree / "python", ROOT / "bench", ROOT / "tests"))
    )
    launcher.threads_and_pinning(common)
    found, notes = {}, []
    for allocator in wanted:
        env = dict(common)
        told = launcher.jemalloc(env) if allocator == "jemalloc" else ""
        if allocator == "jemalloc" and "LD_PRELOAD" not in env:
            notes.append(told)
        else:
            found[allocator] = env
    return found, notes
