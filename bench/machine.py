"""The machine that figures belong to, and the name of its folder under results/."""

from __future__ import annotations

import os
import platform
import re
import resource
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

#: Capabilities that tell the instruction sets apart that optimizer steps can use.
FLAGS = ("avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512vl", "avx512_bf16")


@dataclass(frozen=True)
class Machine:
    cpu: str
    cores: int
    """Those that this process may use."""
    flags: list[str]
    caches: dict[str, str]
    memory_gib: int
    huge_pages: str

    @property
    def slug(self) -> str:
        """For "Intel(R) Xeon(R) Gold 6530 CPU @ 2.10GHz": "intel-xeon-gold-6530-16-cores"."""
        words = re.sub(r"\(\w+\)|\bCPU\b|\bProcessor\b|@.*", " ", self.cpu)
        return re.sub(r"[^a-z0-9]+", "-", f"{words} {self.cores} cores".lower()).strip("-")

    def facts(self) -> dict[str, Any]:
        return asdict(self)


class Others:
    """What the rest of the system takes, from now on, of the CPUs that this process may use."""

    def __init__(self) -> None:
        self._cpus = os.sched_getaffinity(0)
        self._began = self._seconds()

    def share(self) -> float:
        """Between 0 and 1. Children that were waited for count as this process."""
        passed, busy, own = (
            now - before for now, before in zip(self._seconds(), self._began, strict=True)
        )
        return max(0.0, busy - own) / passed if passed else 0.0

    def _seconds(self) -> tuple[float, float, float]:
        """CPU seconds that passed, that were used or stolen, and that were used by us."""
        passed = idle = 0
        for line in _read("/proc/stat").splitlines():
            name, *ticks = line.split()
            if name.removeprefix("cpu") in map(str, self._cpus):
                passed += sum(map(int, ticks[:8]))  # what follows is counted already, as user time
                idle += int(ticks[3]) + int(ticks[4])
        tick = 1 / os.sysconf("SC_CLK_TCK")
        usages = (resource.getrusage(w) for w in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
        own = sum(usage.ru_utime + usage.ru_stime for usage in usages)
        return passed * tick, (passed - idle) * tick, own


def this_machine() -> Machine:
    info = _read("/proc/cpuinfo")
    found = re.search(r"^flags\s*:(.*)$", info, re.MULTILINE)
    flags = set(found.group(1).split()) if found else set()
    model = re.search(r"^model name\s*:\s*(.*)$", info, re.MULTILINE)
    return Machine(
        cpu=model.group(1).strip() if model else platform.machine(),
        cores=len(os.sched_getaffinity(0)),
        flags=[flag for flag in FLAGS if flag in flags],
        caches=_caches(),
        memory_gib=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") >> 30,
        huge_pages=_read("/sys/kernel/mm/transparent_hugepage/enabled").strip(),
    )


def _caches() -> dict[str, str]:
    """Size of each cache level of the first CPU, as the kernel tells it."""
    caches = {}
    for index in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        if _read(index / "type").strip() != "Instruction":
            caches[f"L{_read(index / 'level').strip()}"] = _read(index / "size").strip()
    return caches


def _read(path: str | Path) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError:
        return ""
