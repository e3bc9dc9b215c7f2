#!/usr/bin/env python3
"""Measures the peak of training steps of a small GPT, beside what the tool says beforehand.

    PYTHONPATH=bench:python python bench/probes/memory_of_a_step.py OUT.json [--device cuda]

On a GPU the peak is that of torch's allocator. On a CPU it is summed from the profiler's records of
what the allocator hands out and takes back. Weights are in it, and the states of earlier steps.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from fusedstep import optim
from fusedstep.memory.activations import checkpoint_blocks, loss_of, trace
from fusedstep.memory.model import load
from fusedstep.memory.plan import MASTERS, STATE_DTYPES, Choice, Run, need
from suites import small_gpt

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from reports.tables import write_table


class Case(NamedTuple):
    """A run, and how its model is called."""

    name: str
    choice: Choice = Choice("AdamW", {}, "default")
    run: Run = Run()
    attention: str = "flash"
    checkpointing: bool = False
    batch: int = 2


BF16 = torch.bfloat16
CASES = (
    Case("adamw"),
    Case("adamw, large batch", batch=8),
    Case("adamw, kept gradients", run=Run(accumulate=True)),
    Case("adamw, checkpointing", checkpointing=True, batch=8),
    Case("adamw, eager attention", attention="eager"),
    Case("adamw, bf16 with masters", run=Run(weights=BF16, masters="float32")),
    Case("adan, bf16 with float32 states", Choice("Adan", {}, "float32"), Run(weights=BF16)),
    Case("adamw, autocast", run=Run(autocast=BF16), batch=8),
    Case("sgd", Choice("SGD", {}, "default")),
    Case("sgd, momentum", Choice("SGD", {"momentum": 0.9}, "default")),
    Case("inference", run=Run(inference=True)),
)


def predicted(case: Case, factory: str, length: int) -> int:
    model = load(f"suites.small_gpt:{factory}")
    found = trace(
        model.make,
        (case.batch, length),
        dtype=case.run.weights,
        autocast=case.run.autocast,
        attention=case.attention,
        checkpointing=case.checkpointing,
        inference=case.run.inference,
    )
    return need(model, case.run, case.choice, found).total


def steps(case: Case, factory: str, length: int, device: str) -> tuple[list[Any], Callable]:
    """Returns what is there before a step, and the step."""
    with torch.device(device):
        model = getattr(small_gpt, factory)().to(case.run.weights)
        tokens = torch.randint(1000, (case.batch, length))
    if case.checkpointing:
        checkpoint_blocks(model)
    casts = partial(torch.autocast, device, case.run.autocast, enabled=bool(case.run.autocast))
    matrices = partial(sdpa_kernel, SDPBackend.MATH)
    attention = matrices if case.attention == "eager" else contextlib.nullcontext
    if case.run.inference:

        def infer() -> None:
            with torch.no_grad(), casts():
                model(tokens)

        return [model, tokens], infer
    options = case.choice.options | {
        "state_dtype": STATE_DTYPES[case.choice.states],
        "master_weights": MASTERS[case.run.masters],
    }
    optimizer = getattr(optim, case.choice.optimizer)(model.parameters(), lr=1e-3, **options)

    def step() -> None:
        optimizer.zero_grad(set_to_none=not case.run.accumulate)
        with casts(), attention():
            loss, output = loss_of(model, tokens)
        loss.backward()
        del loss, output
        optimizer.step()

    return [model, tokens, optimizer], step


def peak_of(function: Callable[[], object]) -> int:
    """The most bytes that torch's allocator on the CPU has handed out at a time in a call."""
    gc.collect()  # what another call has left would be given back in this one, and taken off
    # Not torch.profiler's, which makes objects of all events: seconds, for the trace has them.
    with torch.autograd.profiler.profile(profile_memory=True) as profile:
        function()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(file))
        events = json.loads(file.read_text())["traceEvents"]
    records = [event for event in events if event["name"] == "[memory]"]
    live = peak = 0
    for record in sorted(records, key=lambda each: each["ts"]):
        live += record["args"]["Bytes"]
        peak = max(peak, live)
    return peak


def peak_on_cpu(case: Case, factory: str, length: int) -> int:
    def run() -> None:
        there, step = steps(case, factory, length, "cpu")
        step()
        step()
        del there

    return peak_of(run)


def peak_on_cuda(case: Case, factory: str, length: int) -> int:
    """Measures a third step, for the first makes states. cuBLAS's workspaces are in it."""
    gc.collect()
    torch.cuda.empty_cache()
    there, step = steps(case, factory, length, "cuda")
    step()
    step()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    del there
    return torch.cuda.max_memory_allocated()


def weigh(case: Case, device: str) -> dict[str, Any]:
    """The prediction and the peak, in bytes."""
    factory, length = ("small", 1024) if device == "cuda" else ("tiny", 256)
    measure = peak_on_cuda if device == "cuda" else peak_on_cpu
    said, found = predicted(case, factory, length), measure(case, factory, length)
    return {"name": case.name, "predicted": said, "peak": found, "ratio": round(said / found, 4)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("output", type=Path)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    arguments = parser.parse_args()
    rows = []
    for case in CASES:
        rows.append(weigh(case, arguments.device))
        print(json.dumps(rows[-1]), flush=True)
    is_cuda = arguments.device == "cuda"
    facts = {
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if is_cuda else "cpu",
        "model": "small" if is_cuda else "tiny",
    }
    write_table(arguments.output, facts | {"steps": rows})


if __name__ == "__main__":
    main()
