"""Tells what fusedstep found on this machine, with advice where something costs speed."""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from fusedstep._native import ops
from fusedstep._native.libraries import CUDA, library_path, why_not_cuda
from fusedstep._version import __version__
from fusedstep.doctor.optimizer import Finding, count, findings_of


class Findings(list[Finding]):
    """The lines of a report."""

    def __repr__(self) -> str:
        """One line: a notebook shows it below the lines that doctor() has printed."""
        return (
            f"<{len(self)} findings, {sum(each.advice is not None for each in self)} with advice>"
        )


def doctor(optimizer: Any = None) -> Findings:
    """Prints one line for each finding about this machine, with advice where steps are slow.

    Args:
        optimizer (optional): one of :mod:`fusedstep.optim`, perhaps offloaded. Lines for each of
            its groups follow: native kernels or torch operations, and why; what bfloat16 weights
            lose of their moves; ``foreach`` and ``fused`` that a checkpoint brought; and for
            states that code outside holds, and steps that ``skip_nonfinite`` left out. It waits
            for devices, and changes nothing

    Returns:
        list of (topic, finding, advice), where advice is None if there is nothing to do

    Raises:
        TypeError: if the optimizer is of another library.

    Example::

        >>> fusedstep.doctor(optimizer)
        fusedstep    0.1.0
        torch        2.11.0+cu130
        ...
        group 0      AdamW, 148 weights, 124,439,808 elements, bfloat16 on cuda: native
    """
    of_optimizer = [] if optimizer is None else findings_of(optimizer)
    findings = Findings([check() for check in CHECKS] + of_optimizer)
    width = max(len(topic) for topic, _, _ in findings) + 2
    for topic, finding, advice in findings:
        print(f"{topic:<{width}}{finding}{f' → {advice}' if advice else ''}")
    return findings


def check_fusedstep() -> Finding:
    return Finding("fusedstep", __version__)


def check_torch() -> Finding:
    return Finding("torch", torch.__version__)


def check_library() -> Finding:
    if ops.missing:
        return Finding("library", "no native kernels: fused=False is used", ops.missing)
    compiler = ops.capabilities().get("compiler", "unknown")
    return Finding("library", f"{library_path()} (compiler {compiler})")


def check_binding() -> Finding:
    if ops.bind:
        return Finding("binding", "tensors are read directly")
    advice = "install Python's headers (Debian: python3-dev) and build again"
    return Finding("binding", "through an operator", None if ops.missing else advice)


def check_isa() -> Finding:
    if ops.missing:
        return Finding("ISA", "unknown without native kernels")
    used, runnable, products = ops.isa(), ops.isas(), ops.product_isa()
    return Finding(
        "ISA",
        f"{used} used, of {', '.join(runnable)}" + (f"; products: {products}" if products else ""),
        None if used == runnable[0] else f"unset FUSEDSTEP_ISA to use {runnable[0]}",
    )


def check_threads() -> Finding:
    threads = torch.get_num_threads()
    cpus = usable_cpus()
    cores = min(len({siblings(cpu) for cpu in cpus}), cpu_quota() or len(cpus))
    processes = processes_here()
    share = max(1, cores // processes)
    setting = os.environ.get("OMP_NUM_THREADS")
    finding = f"{threads} on {count(cores, 'core')} ({count(len(cpus), 'CPU')} usable)"
    if processes > 1:
        finding += f", {processes} processes"
    if setting:
        finding += f", OMP_NUM_THREADS={setting}"
    advice = None
    if threads > max(1, len(cpus) // processes):
        advice = f"more threads than CPUs wait for one another: OMP_NUM_THREADS={share}"
    elif threads < share and setting == "1" and "TORCHELASTIC_RUN_ID" in os.environ:
        advice = (
            "torchrun sets 1, with which steps on the CPU take several times as long: "
            f"OMP_NUM_THREADS={share} torchrun ..."
        )
    elif threads < share:
        advice = f"cores are idle: OMP_NUM_THREADS={share}"
    return Finding("threads", finding, advice)


def check_jemalloc() -> Finding:
    mapped = mapped_libraries(r"libjemalloc")
    if mapped is None:
        return Finding("jemalloc", UNKNOWN)
    if not mapped:
        return Finding("jemalloc", "not mapped: only steps in torch operations gain by it")
    decay = jemalloc_decay(mapped[0])
    settings = os.environ.get("MALLOC_CONF", "no MALLOC_CONF")
    return Finding(
        "jemalloc",
        f"{mapped[0]} mapped, {settings}",
        None if decay in (-1, None) else or_by_launcher(f"it gives pages back: {KEEP_PAGES}"),
    )


def check_openmp() -> Finding:
    mapped = mapped_libraries(r"lib(gomp|iomp5|omp)\b")
    if mapped is None:
        return Finding("OpenMP", UNKNOWN)
    if len(mapped) == 1:
        return Finding("OpenMP", f"one runtime, {mapped[0]}")
    return Finding(
        "OpenMP",
        f"{len(mapped)} runtimes{''.join(f', {path}' for path in mapped)}",
        "each starts threads of its own: import torch first, preload none" if mapped else None,
    )


def allocator_asks_for_huge_pages() -> bool:
    """True if the allocator of weights and gradients asks for huge pages."""
    if mapped_libraries(r"libjemalloc"):
        return "thp:always" in os.environ.get("MALLOC_CONF", "").split(",")
    return "glibc.malloc.hugetlb=1" in os.environ.get("GLIBC_TUNABLES", "").split(":")


def check_huge_pages() -> Finding:
    try:
        modes = Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text()
        mode = modes[modes.index("[") + 1 : modes.index("]")]
    except (OSError, ValueError):
        return Finding("huge pages", UNKNOWN)
    if mode == "never":
        advice = "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled (as root)"
        return Finding("huge pages", mode, advice)
    if mode == "always" or allocator_asks_for_huge_pages():
        return Finding("huge pages", mode)
    return Finding(
        "huge pages",
        f"{mode}: states have them, weights and gradients not",
        or_by_launcher(
            "MALLOC_CONF=thp:always"
            if mapped_libraries(r"libjemalloc")
            else "GLIBC_TUNABLES=glibc.malloc.hugetlb=1"
        ),
    )


def check_environment() -> Finding:
    """The variables that other lines advise to set, together."""
    advised = [check().advice or "" for check in (check_threads, check_jemalloc, check_huge_pages)]
    found: dict[str, str] = {}
    for name, value in re.findall(r"\b([A-Z][A-Z_]+)=(\S+)", " ".join(advised)):
        set_already = os.environ.get(name) if name in _LISTS else None
        before = found.get(name, set_already)
        found[name] = f"{before}{_LISTS[name]}{value}" if before else value
    if not found:
        return Finding("environment", "nothing to set")
    values = " ".join(f"{name}={value}" for name, value in found.items())
    return Finding("environment", "to paste before the command", f"{values} python …")


def check_cuda() -> Finding:
    if not torch.backends.cuda.is_built():
        return Finding("CUDA", "torch is built without it")
    if not torch.cuda.is_available():
        present = library_path(CUDA).is_file()
        return Finding(
            "CUDA",
            f"no device that torch can use; library {'present' if present else 'not built'}",
            why_not_cuda() if present else None,
        )
    devices = count(torch.cuda.device_count(), "device")
    if missing := ops.missing_on("cuda"):
        return Finding("CUDA", f"{devices}, no native kernels: fused=False is used", missing)
    return Finding("CUDA", f"{devices}, native kernels loaded")


CHECKS: tuple[Callable[[], Finding], ...] = (
    check_fusedstep,
    check_torch,
    check_library,
    check_binding,
    check_isa,
    check_threads,
    check_jemalloc,
    check_openmp,
    check_huge_pages,
    check_cuda,
    check_environment,
)

#: Variables that hold several settings, of which the last counts, with what is between two.
_LISTS = {"GLIBC_TUNABLES": ":", "MALLOC_CONF": ","}

UNKNOWN = "unknown on this system"

#: Makes jemalloc keep the pages it has.
KEEP_PAGES = "MALLOC_CONF=dirty_decay_ms:-1,muzzy_decay_ms:-1"


def or_by_launcher(advice: str) -> str:
    """Advice to set variables; in a source tree with the script that does it."""
    is_source_tree = (Path(__file__).resolve().parents[3] / "run.sh").is_file()
    return f"{advice} (./run.sh SCRIPT.py does)" if is_source_tree else advice


def processes_here() -> int:
    """The processes of this job on this machine, as torchrun and other launchers tell them."""
    told = os.environ.get("LOCAL_WORLD_SIZE", "")
    return max(1, int(told)) if told.isdigit() else 1


def usable_cpus() -> list[int]:
    """The CPUs this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def siblings(cpu: int) -> str:
    """The CPUs that share a core with this one, as the kernel writes them."""
    try:
        folder = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology")
        return (folder / "thread_siblings_list").read_text().strip()
    except OSError:
        return str(cpu)


def cpu_quota() -> int | None:
    """The CPUs that the container's time limit amounts to; None without one."""
    try:
        limit, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return max(1, int(limit) // int(period))
    except (OSError, ValueError):
        return None


def mapped_libraries(pattern: str) -> list[str] | None:
    """Paths of the libraries mapped into this process whose file name matches; None if unknown."""
    try:
        maps = Path("/proc/self/maps").read_text()
    except OSError:
        return None
    paths = {line.split(maxsplit=5)[-1] for line in maps.splitlines() if "/" in line}
    return sorted(path for path in paths if re.match(pattern, Path(path).name))


def jemalloc_decay(path: str) -> int | None:
    """jemalloc's dirty_decay_ms; None if it does not tell."""
    value = ctypes.c_ssize_t()
    size = ctypes.c_size_t(ctypes.sizeof(value))
    try:
        failed = ctypes.CDLL(path).mallctl(
            b"opt.dirty_decay_ms", ctypes.byref(value), ctypes.byref(size), None, ctypes.c_size_t(0)
        )
    except (OSError, AttributeError):
        return None
    return None if failed else value.value
