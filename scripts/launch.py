"""Run a program as it should run on a Xeon.

    launch.py PROGRAM [ARG ...]       PROGRAM: a Python script, or any executable
    launch.py -m MODULE [ARG ...]

- One thread per physical core of one socket, within the CPUs this process may use: threads of one
  socket share its cache and its memory. OMP_NUM_THREADS, when set, is respected.
- The process is held to one hardware thread of each of these cores. Its threads are not bound one
  by one: what the program forks (a DataLoader's workers) would inherit the main thread's single
  core, and one busy core would hold up the whole team. OMP_PROC_BIND, OMP_PLACES or
  GOMP_CPU_AFFINITY, when set, are left to do all of the pinning.
- jemalloc is preloaded and keeps the pages it has: with glibc's allocator, an unfused optimizer
  step is mostly page faults. A trial run shows that it is mapped and took its settings.
- Weights and gradients get huge pages, from jemalloc or, where that is missing, from glibc's
  allocator: steps of large models are up to a quarter shorter. GLIBC_TUNABLES, when set, is
  respected.
- The fusedstep of this source tree can be imported.

What was set is shown on stderr in one line.
"""

from __future__ import annotations

import ctypes.util
import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

MALLOC_CONF = (
    "oversize_threshold:1,background_thread:true,metadata_thp:auto,"
    "dirty_decay_ms:-1,muzzy_decay_ms:-1,thp:always"
)

# Makes glibc's allocator ask for huge pages.
GLIBC_TUNABLES = "glibc.malloc.hugetlb=1"

# Prints where jemalloc is mapped and the decay it works with.
PROBE = """
import ctypes
decay, size = ctypes.c_ssize_t(), ctypes.c_size_t(ctypes.sizeof(ctypes.c_ssize_t))
ctypes.CDLL(None).mallctl(
    b"opt.dirty_decay_ms", ctypes.byref(decay), ctypes.byref(size), None, ctypes.c_size_t(0)
)
with open("/proc/self/maps") as maps:
    path = next(line.split()[-1] for line in maps if "jemalloc" in line)
print(path, decay.value)
"""


def topology(cpu: int, name: str) -> str:
    """A line of what the kernel knows of a CPU's place; "" where it tells nothing."""
    try:
        return Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/{name}").read_text().strip()
    except OSError:
        return ""


def cores_of_one_socket() -> list[int]:
    """One CPU of each physical core, of the socket where this process may use most."""
    sockets: dict[str, dict[str, int]] = defaultdict(dict)
    for cpu in sorted(os.sched_getaffinity(0)):
        core = topology(cpu, "thread_siblings_list") or str(cpu)
        sockets[topology(cpu, "physical_package_id")].setdefault(core, cpu)
    return sorted(max(sockets.values(), key=len).values())


def cpu_quota() -> int | None:
    """The number of CPUs that the container's time limit amounts to, if it has one."""
    try:
        limit, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
    except (OSError, ValueError):
        return None
    return None if limit == "max" else max(1, int(limit) // int(period))


def threads_and_pinning(env: dict[str, str]) -> str:
    """Set the number of threads in `env` and this process's CPUs; tell of both."""
    cores = cores_of_one_socket()
    env.setdefault("OMP_NUM_THREADS", str(min(len(cores), cpu_quota() or len(cores))))
    told = f"OMP_NUM_THREADS={env['OMP_NUM_THREADS']}"
    if any(name in env for name in ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY")):
        return f"{told} (pinning as set by OpenMP's variables)"
    if not env["OMP_NUM_THREADS"].isdigit() or int(env["OMP_NUM_THREADS"]) > len(cores):
        return f"{told} (more than one socket's {len(cores)} cores: not pinned)"
    os.sched_setaffinity(0, cores)
    return f"{told} on CPUs {ranges(cores)}"


def ranges(numbers: list[int]) -> str:
    """[0, 1, 2, 5] → "0-2,5"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(f"{first}-{last}" if first < last else f"{first}" for first, last in runs)


def jemalloc(env: dict[str, str]) -> str:
    """Preload jemalloc in `env` if a trial run finds it mapped and set; tell the outcome."""
    library = ctypes.util.find_library("jemalloc")
    if library is None:
        return "no jemalloc: unfused steps will be slower (Debian, Ubuntu: libjemalloc2)"
    preload = {
        "LD_PRELOAD": " ".join(filter(None, [library, env.get("LD_PRELOAD")])),
        "MALLOC_CONF": MALLOC_CONF,
    }
    command = [sys.executable, "-c", PROBE]
    trial = subprocess.run(command, env=env | preload, capture_output=True, text=True, check=False)
    path, _, decay = trial.stdout.strip().rpartition(" ")
    if trial.returncode != 0 or trial.stderr or decay != "-1":
        reason = trial.stderr.strip().splitlines()[-1:] or [f"dirty_decay_ms is {decay}"]
        return f"{library} found, but not used: {reason[0]}"
    env.update(preload)
    return f"LD_PRELOAD={path} (mapped) MALLOC_CONF={MALLOC_CONF}"


def allocator(env: dict[str, str]) -> str:
    """jemalloc, or glibc's with huge pages; tell the outcome."""
    told = jemalloc(env)
    if env.get("MALLOC_CONF") == MALLOC_CONF:
        return told
    env.setdefault("GLIBC_TUNABLES", GLIBC_TUNABLES)
    return f"{told}; GLIBC_TUNABLES={env['GLIBC_TUNABLES']}"


def main() -> None:
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    env = dict(os.environ)
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT / "python"), env.get("PYTHONPATH")]))
    told = [threads_and_pinning(env), allocator(env)]
    print("run.sh:", *told, file=sys.stderr, flush=True)
    program = sys.argv[1:]
    if program[0] == "-m" or program[0].endswith(".py"):
        program.insert(0, sys.executable)
    os.execvpe(program[0], program, env)


if __name__ == "__main__":
    main()
