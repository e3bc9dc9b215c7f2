"""The machine that figures belong to, and the name of its folder of results."""

from __future__ import annotations

import os
import platform
import re
import resource
from dataclasses import dataclass
from pathlib import Path

#: Capabilities that tell the instruction sets apart that optimizer steps can use.
FLAGS = ("avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512vl", "avx512_bf16")

#: Processors by vendor, family and model, first and last, as Linux tells them: virtual machines
#: often have no better name for them than "AMD EPYC".
MICROARCHITECTURES = (
    ("AuthenticAMD", 23, 0, 47, "amd-zen"),
    ("AuthenticAMD", 23, 48, 255, "amd-zen2"),
    ("AuthenticAMD", 25, 0, 15, "amd-zen3"),
    ("AuthenticAMD", 25, 32, 95, "amd-zen3"),
    ("AuthenticAMD", 25, 16, 255, "amd-zen4"),
    ("AuthenticAMD", 26, 0, 255, "amd-zen5"),
    ("GenuineIntel", 6, 85, 85, "intel-skylake-sp"),
    ("GenuineIntel", 6, 106, 108, "intel-ice-lake"),
    ("GenuineIntel", 6, 143, 143, "intel-sapphire-rapids"),
    ("GenuineIntel", 6, 173, 174, "intel-granite-rapids"),
    ("GenuineIntel", 6, 207, 207, "intel-emerald-rapids"),
)


@dataclass(frozen=True)
class Machine:
    cpu: str
    vendor: str
    family: int
    model: int
    cores: int
    """The number that this process may use."""
    flags: list[str]
    caches: dict[str, str]
    memory_gib: int
    huge_pages: str

    @property
    def slug(self) -> str:
        """Name by the microarchitecture: "amd-zen4-2-cores"; else by all facts about the CPU."""
        for vendor, family, first, last, name in MICROARCHITECTURES:
            if (vendor, family) == (self.vendor, self.family) and first <= self.model <= last:
                return f"{name}-{self.cores}-cores"
        words = re.sub(r"\(\w+\)|\bCPU\b|\bProcessor\b|@.*", " ", self.cpu)
        text = f"{words} {self.family} {self.model} {self.cores} cores"
        return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


class Others:
    """The use that the rest of the system makes, from now on, of the CPUs of this process."""

    def __init__(self) -> None:
        self._cpus = os.sched_getaffinity(0)
        self._began = self._seconds()

    def share(self) -> float:
        """Share between 0 and 1. Children that were waited for count as this process."""
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
                passed += sum(map(int, ticks[:8]))  # later ticks are counted already, as user time
                idle += int(ticks[3]) + int(ticks[4])
        tick = 1 / os.sysconf("SC_CLK_TCK")
        usages = (resource.getrusage(w) for w in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
        own = sum(usage.ru_utime + usage.ru_stime for usage in usages)
        return passed * tick, (passed - idle) * tick, own


def this_machine() -> Machine:
    # The first processor stands for all.
    facts = dict(re.findall(r"^(.+?)\s*:[ \t]*(.*)$", _read("/proc/cpuinfo"), re.MULTILINE)[::-1])
    flags = facts.get("flags", "").split()
    return Machine(
        cpu=facts.get("model name", platform.machine()),
        vendor=facts.get("vendor_id", ""),
        family=int(facts.get("cpu family", 0)),
        model=int(facts.get("model", 0)),
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
