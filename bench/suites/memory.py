#!/usr/bin/env python3
"""Peak memory of a whole training step: forward, backward and the optimizer's step.

    memory.py SIZE IMPLEMENTATION      on the CPU; prints the peaks as JSON

On a GPU it is what torch's allocator has handed out at most, and what it had reserved for that. A
CPU has no such count: there it is the growth of the peak resident set of a process that does
nothing else, with an allocator that gives back at once what is freed.
"""

from __future__ import annotations

import gc
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

from suites.adan_published import ADAM, ADANS, PUBLISHED
from suites.gpt2 import GPT2, POSITIONS, VOCABULARY, make_gradients
from suites.implementations import ADAN
from suites.rows import NAMED, Row
from suites.shapes import ShapeList

#: Compared in the memory table: Adam as published, and the fused ways.
COMPARED = (ADAM, *ADANS)

Peaks = dict[str, int]
"""Bytes: in the first step, which makes the states, and in a later one."""


def _status(name: str) -> int:
    text = Path("/proc/self/status").read_text(encoding="utf-8")
    return int(re.search(rf"^{name}:\s*(\d+) kB", text, re.MULTILINE)[1]) * 1024


def training_steps(model: GPT2, name: str) -> Iterator[str]:
    """Takes the first step and a later one, and tells which after each."""
    device = model.norm.weight.device
    tokens = torch.randint(VOCABULARY, (1, POSITIONS), device=device)
    implementation = next(each for each in ADAN if each.name == name)
    row = Row(NAMED["adan"], ShapeList("model", "model", ()))
    optimizer = implementation.build(row, list(model.parameters())).optimizer
    for step in ("first", "later"):
        optimizer.zero_grad()
        # The logits stay until the step is done, as in a training that logs something of them.
        loss, logits = model(tokens)
        loss.backward()
        optimizer.step()
        yield step
        del loss, logits


def peaks(size: str, name: str, device: str) -> Peaks:
    """Raises RuntimeError, of which OutOfMemoryError is one, where a step fails."""
    return _on_cuda(size, name) if device == "cuda" else _on_cpu(size, name)


def _on_cuda(size: str, name: str) -> Peaks:
    """A backward before it makes workspaces of libraries, which would count for the first only."""
    with torch.device("cuda"):
        model = GPT2(PUBLISHED[size])
    make_gradients(model)
    model.zero_grad()
    gc.collect()
    _reset_peak()
    found = {}
    for step in training_steps(model, name):
        found[step] = torch.cuda.max_memory_allocated()
        found[f"{step}_reserved"] = torch.cuda.max_memory_reserved()
        _reset_peak()
    return found


def _reset_peak() -> None:
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()


def _on_cpu(size: str, name: str) -> Peaks:
    """In a process of its own."""
    env = {key: value for key, value in os.environ.items() if key != "LD_PRELOAD"}
    # A threshold that is set does not rise by itself: what is larger is given back when freed.
    env["MALLOC_MMAP_THRESHOLD_"] = str(1 << 17)
    command = [sys.executable, __file__, size, name]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    if done.returncode == -signal.SIGKILL:
        raise torch.OutOfMemoryError("the system ended the process")
    if done.returncode:
        raise RuntimeError((done.stderr.strip() or f"status {done.returncode}").splitlines()[-1])
    return json.loads(done.stdout)


def lacking(size: str, parameters: int, available: int) -> str | None:
    """Reason to skip a size: without memory the system may end any process, not just this one."""
    needed = 1.2e6 * PUBLISHED[size].adan_peak + 16 * parameters
    if needed <= available:
        return None
    return f"needs about {needed / 2**30:.0f} GiB, {available / 2**30:.0f} are free"


if __name__ == "__main__":
    size, name = sys.argv[1:]
    before = _status("VmRSS")
    steps = training_steps(GPT2(PUBLISHED[size]), name)
    # A later step's peak is never below the first's, so there is nothing to reset.
    print(json.dumps({step: _status("VmHWM") - before for step in steps}))
