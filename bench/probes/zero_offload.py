#!/usr/bin/env python3
"""Time iterations of DeepSpeed's ZeRO-3 with the optimizer on the CPU: DeepSpeedCPUAdam, and ours.

    PYTHONPATH=bench:python python bench/probes/zero_offload.py [--processes N] [--json FILE.json]

An engine trains a GPT of 354 million bfloat16 weights with float32 masters and moments, alone in
its processes, as engines do. Runs with either optimizer take turns, each first in every second
pair, on the same batches; their losses are compared. Prints medians of each part of an iteration in
milliseconds. Needs deepspeed, and a compiler for its operator.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F

from fusedstep import optim
from suites.small_gpt import SmallGPT

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from reports.tables import write_table

LENGTH, BATCH = 256, 4
SIZES = {
    "354M": {"layers": 24, "width": 1024, "heads": 16, "vocabulary": 50304},
    "tiny": {"layers": 2, "width": 64, "heads": 2, "vocabulary": 512},
}
OPTIONS = {"lr": 1e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}

THEIRS, OURS = "DeepSpeedCPUAdam", "fusedstep"

#: Rounds before those that count: operators are compiled and states made in them.
FIRST_ROUNDS = 2


class Subject:
    """An engine, and the parts that its last iterations took, in milliseconds."""

    def __init__(self, name: str, size: str) -> None:
        import deepspeed
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        torch.manual_seed(0)
        model = SmallGPT(**SIZES[size], length=LENGTH)
        cls = optim.AdamW if name == OURS else DeepSpeedCPUAdam
        config = {
            "train_micro_batch_size_per_gpu": BATCH,
            "bf16": {"enabled": True},
            "zero_optimization": {
                "stage": 3,
                "offload_optimizer": {"device": "cpu", "pin_memory": torch.cuda.is_available()},
            },
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
        }
        optimizer = cls(model.parameters(), **OPTIONS)
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
        self.engine = engine
        self.times: dict[str, list[float]] = {}
        self._in_optimizer = 0.0
        # The only method of ZeRO that calls the optimizer, on the CPU and to its end.
        self._call_optimizer, engine.optimizer._optimizer_step = (
            engine.optimizer._optimizer_step,
            self._timed_step,
        )

    def _timed_step(self, sub_group: int) -> None:
        began = time.perf_counter()
        self._call_optimizer(sub_group)
        self._in_optimizer += time.perf_counter() - began

    def train(self, tokens: torch.Tensor) -> float:
        """Takes an iteration; returns its loss.

        The host's times of forward and backward are without the GPU's work that is left; that of
        `passes` is with it, and with the other process's.
        """
        self._in_optimizer = 0.0
        moments = [synchronized()]
        scores = self.engine(tokens[:, :-1])
        loss = F.cross_entropy(scores.flatten(0, 1).float(), tokens[:, 1:].flatten())
        moments.append(time.perf_counter())
        self.engine.backward(loss)
        moments.append(time.perf_counter())
        moments.append(synchronized())
        self.engine.step()
        moments.append(synchronized())
        began, forward, backward, passes, ended = moments
        for part, seconds in {
            "forward, host": forward - began,
            "backward, host": backward - forward,
            "passes": passes - began,
            "optimizer": self._in_optimizer,
            "rest of step": ended - passes - self._in_optimizer,
            "iteration": ended - began,
        }.items():
            self.times.setdefault(part, []).append(seconds * 1e3)
        return loss.item()

    def medians(self) -> dict[str, float]:
        return {part: statistics.median(each) for part, each in self.times.items()}


def synchronized() -> float:
    """The time at which all processes, and their GPUs, have come here."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    dist.barrier()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def process(rank: int, folder: str, name: str, asked: argparse.Namespace) -> None:
    torch.set_num_threads(asked.threads)
    has_gpu = torch.cuda.is_available()
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(asked.processes)}
    os.environ["NCCL_NVLS_ENABLE"] = "0"
    if has_gpu:
        torch.cuda.set_device(rank)
    meeting = f"file://{folder}/meeting"
    backend = "cpu:gloo,cuda:nccl" if has_gpu else "gloo"
    dist.init_process_group(backend, meeting, rank=rank, world_size=asked.processes)
    subject = Subject(name, asked.size)
    losses, shape = [], (BATCH, LENGTH + 1)
    for number in range(FIRST_ROUNDS + asked.rounds):
        generator = torch.Generator().manual_seed(number * asked.processes + rank)
        tokens = torch.randint(SIZES[asked.size]["vocabulary"], shape, generator=generator)
        if number == FIRST_ROUNDS:
            subject.times.clear()
        losses.append(subject.train(tokens.to(subject.engine.device)))
    if rank == 0:
        about = {
            "device": torch.cuda.get_device_name() if has_gpu else "CPU",
            "deepspeed": sys.modules["deepspeed"].__version__,
        }
        found = {"about": about, "ms": subject.medians(), "losses": losses}
        write_table(Path(folder, "found.json"), found)
    dist.barrier()
    os._exit(0)  # gloo's threads now and then outlive their group, and abort


def medians(runs: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Medians of the runs with each optimizer."""
    return {
        name: {
            part: statistics.median(run[part] for run in runs if run["engine"] == name)
            for part in runs[0]
            if part != "engine"
        }
        for name in dict.fromkeys(run["engine"] for run in runs)
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--threads", type=int, default=12, help="of each process")
    parser.add_argument("--rounds", type=int, default=12, help="of a run (default: 12)")
    parser.add_argument("--pairs", type=int, default=4, help="of runs (default: 4)")
    parser.add_argument("--size", choices=SIZES, default="354M")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    results: dict[str, Any] = {
        "processes": asked.processes,
        "threads of each process": asked.threads,
        "torch": torch.__version__,
        "ms by run": [],
    }
    expected = None
    for number in range(asked.pairs):
        for name in (THEIRS, OURS) if number % 2 == 0 else (OURS, THEIRS):
            with tempfile.TemporaryDirectory() as folder:
                mp.spawn(process, (folder, name, asked), nprocs=asked.processes)
                found = json.loads(Path(folder, "found.json").read_text(encoding="utf-8"))
            expected = expected or found["losses"]
            torch.testing.assert_close(found["losses"], expected, rtol=0.02, atol=0)
            results |= found["about"]
            results["ms by run"].append({"engine": name, **found["ms"]})
            results["ms"] = medians(results["ms by run"])
            print(name, {part: round(ms, 1) for part, ms in found["ms"].items()}, flush=True)
            if asked.json:
                write_table(asked.json, results)
    for part, theirs in results["ms"][THEIRS].items():
        ours = results["ms"][OURS][part]
        print(f"{part:16} {theirs:8.1f} {ours:8.1f} {ours / theirs:6.3f}")


if __name__ == "__main__":
    main()
