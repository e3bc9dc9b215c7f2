"""Clocks and memory of a training run, on a CPU and on a GPU."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import torch

Mark = Any
"""A moment: seconds on a CPU, an event in the stream of a GPU."""


class CpuMeter:
    def mark(self) -> Mark:
        return time.perf_counter()

    def ms(self, began: Mark, ended: Mark) -> float:
        return 1e3 * (ended - began)

    def wait(self) -> None:
        """A CPU has done all that was asked of it."""

    def reset_peak(self) -> None:
        """The peak is the process's, from its start on."""

    def memory(self) -> dict[str, int]:
        """Returns the peak of the process's resident memory: torch and compilers are in it."""
        status = Path("/proc/self/status").read_text(encoding="utf-8")
        return {"peak": 1024 * int(re.search(r"^VmHWM:\s*(\d+) kB", status, re.MULTILINE)[1])}


class CudaMeter:
    """Marks are events, so that nothing waits for the device while it trains."""

    def mark(self) -> Mark:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def ms(self, began: Mark, ended: Mark) -> float:
        ended.synchronize()
        return began.elapsed_time(ended)

    def wait(self) -> None:
        torch.cuda.synchronize()

    def reset_peak(self) -> None:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()

    def memory(self) -> dict[str, int]:
        """Returns the peaks of torch's allocator: what it handed out, what it had reserved."""
        return {
            "peak": torch.cuda.max_memory_allocated(),
            "peak_reserved": torch.cuda.max_memory_reserved(),
        }


def meter_of(device_type: str) -> CpuMeter | CudaMeter:
    return CudaMeter() if device_type == "cuda" else CpuMeter()
