"""The build backend: scikit-build-core's, with the progress of a build on the terminal.

pip shows what a backend prints only with -v, and a build takes minutes.
"""

import contextlib
import os
import re
import select
import sys
import threading
import time
from pathlib import Path

from scikit_build_core import build

#: Seconds of one core: those of the CPU's kernels, and of the kernels for one kind of GPU.
#: bench/results/nvidia-h100/build_time.json has them.
_CPU, _GPU = 493, 940


def __getattr__(name):
    """Hooks that do not compile are scikit-build-core's own."""
    return getattr(build, name)


def build_wheel(*args, **options):
    with _progress():
        return build.build_wheel(*args, **options)


def build_editable(*args, **options):
    with _progress():
        return build.build_editable(*args, **options)


@contextlib.contextmanager
def _progress():
    restore = None
    with contextlib.suppress(OSError, RuntimeError):  # no such terminal; too many files or threads
        restore = _watch(_open_terminal())
    try:
        yield
    finally:
        if restore is not None:
            restore()


def _open_terminal():
    """Opens the terminal of the caller, as pip, where that does not show the output itself."""
    caller = Path(f"/proc/{os.getppid()}")
    words = (caller / "cmdline").read_text(errors="replace").split("\0")
    terminal = os.open(caller / "fd" / "1", os.O_WRONLY | os.O_NOCTTY | os.O_NONBLOCK)
    shown = os.isatty(1) or any(re.fullmatch("-v+|--verbose", word) for word in words)
    if shown or not os.isatty(terminal):
        os.close(terminal)
        raise OSError("there is nothing to add")
    return terminal


def _watch(terminal):
    """Puts a thread between the output and its reader. Returns what removes it."""
    numbers = (1, 2) if os.path.sameopenfile(1, 2) else (1,)
    outputs = {number: os.dup(number) for number in numbers}
    source, end = os.pipe()
    thread = threading.Thread(target=_copy, args=(source, outputs[1], terminal), daemon=True)
    thread.start()
    for number in outputs:
        os.dup2(end, number)
    os.close(end)

    def restore():
        sys.stdout.flush()
        for number, output in outputs.items():
            os.dup2(output, number)
        thread.join(10)  # a process that the build has left behind may keep the pipe open

    return restore


def _copy(source, output, terminal):
    """Copies all of the build's output, and tells on the terminal how far it has come."""
    began, doing, gpus, rest = time.monotonic(), "configuring", [], ""

    def write(text):
        """Leaves the terminal alone in the background: the system may stop who writes there."""
        with contextlib.suppress(OSError):
            if os.tcgetpgrp(terminal) == os.getpgrp():
                os.write(terminal, text.encode())

    def show(after):
        minutes, seconds = divmod(int(time.monotonic() - began), 60)
        write(f"\r\033[K  fusedstep: {doing}, {minutes} min {seconds:02} s{after}")

    write("\n")
    chunk = b""
    with os.fdopen(source, "rb", buffering=0) as pipe:
        while not select.select([pipe], [], [], 1)[0] or (chunk := pipe.read(65536)):
            *lines, rest = (rest + chunk.decode(errors="replace")).split("\n")
            while chunk:
                chunk = chunk[os.write(output, chunk) :]
            for line in lines:
                if found := re.match(r"\[(\d+)/(\d+)\]", line):
                    doing = f"{found[1]} of {found[2]} compiled"
                elif found := re.match("-- CUDA kernels are compiled for ([^,]+),", line):
                    gpus = found[1].split(";")
                elif line.startswith("-- Install configuration"):
                    doing = "all compiled"
                elif line.startswith("-- Build files have been written"):
                    doing, cores = "compiling", len(os.sched_getaffinity(0))
                    minutes = max(1, round((_CPU + _GPU * len(gpus)) / 60 / cores))
                    kinds = f"CPUs and GPUs ({', '.join(gpus)})" if gpus else "CPUs only"
                    write(
                        f"\r\033[K  fusedstep: kernels for {kinds}, "
                        f"about {minutes} min on {cores} cores\n"
                    )
            show("\r\033[C")  # pip's spinner turns before the cursor: in the first column
        show(" ...  ")  # pip writes "done" or "error" over the last column
