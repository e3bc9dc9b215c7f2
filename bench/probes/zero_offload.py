#!/usr/bin/env python3
"""Time steps of DeepSpeed's ZeRO-3 with the optimizer on the CPU: its DeepSpeedCPUAdam, and ours.

    PYTHONPATH=bench:python python bench/probes/zero_offload.py [--processes N] [--json FILE.json]

Both train a GPT of 354 million bfloat16 weights with float32 masters and moments in turns, on the
same batches. The losses of both are compared. Prints medians of `engine.step()` and of a whole
iteration in milliseconds. Needs deepspeed, and a compiler for its operator.
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
from small_gpt import SmallGPT

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tables import write_table

VOCABULARY, LENGTH, BATCH = 50304, 256, 4
SIZES = {
    "354M": {"layers": 24, "width": 1024, "heads": 16},
    "tiny": {"layers": 2, "width": 64, "heads": 2},
}
OPTIONS = {"lr": 1e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


def engine_of(name: str, size: str) -> Any:
    import deepspeed
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    torch.manual_seed(0)
    model = SmallGPT(**SIZES[size], vocabulary=VOCABULARY, length=LENGTH)
    cls = optim.AdamW if name == "fusedstep" else DeepSpeedCPUAdam
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
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def trained(engine: Any, tokens: torch.Tensor) -> tuple[float, float, float]:
    """The loss of an iteration, and the milliseconds of its step and of all of it."""
    synchronize()
    dist.barrier()
    began = time.perf_counter()
    scores = engine(tokens[:, :-1])
    loss = F.cross_entropy(scores.flatten(0, 1).float(), tokens[:, 1:].flatten())
    engine.backward(loss)
    synchronize()
    dist.barrier()
    step = time.perf_counter()
    engine.step()
    synchronize()
    ended = time.perf_counter()
    return loss.item(), (ended - step) * 1e3, (ended - began) * 1e3


def process(rank: int, folder: str, asked: argparse.Namespace) -> None:
    torch.set_num_threads(asked.threads)
    has_gpu = torch.cuda.is_available()
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(asked.processes)}
    os.environ["NCCL_NVLS_ENABLE"] = "0"
    if has_gpu:
        torch.cuda.set_device(rank)
    meeting = f"file://{folder}/meeting"
    backend = "cpu:gloo,cuda:nccl" if has_gpu else "gloo"
    dist.init_process_group(backend, meeting, rank=rank, world_size=asked.processes)
    names = sorted(("DeepSpeedCPUAdam", "fusedstep"), reverse=asked.ours_first)
    engines = {name: engine_of(name, asked.size) for name in names}
    times: dict[str, list[tuple[float, float, float]]] = {name: [] for name in engines}
    for number in range(asked.rounds + 2):
        generator = torch.Generator().manual_seed(number * asked.processes + rank)
        tokens = torch.randint(VOCABULARY, (BATCH, LENGTH + 1), generator=generator)
        # An engine runs after the other one in one round, and after itself in the next.
        for name in sorted(engines, reverse=number % 2 == 1):
            times[name].append(trained(engines[name], tokens.to(engines[name].device)))
    for one, other in zip(*times.values(), strict=True):
        assert abs(one[0] - other[0]) < 0.02 * one[0], (one, other)
    if rank == 0:
        results = {
            "device": torch.cuda.get_device_name() if has_gpu else "CPU",
            "processes": asked.processes,
            "threads of each process": asked.threads,
            "made first": names[0],
            "torch": torch.__version__,
            "ms": {
                name: {
                    "step": statistics.median(each[1] for each in found[2:]),
                    "iteration": statistics.median(each[2] for each in found[2:]),
                }
                for name, found in times.items()
            },
        }
        print(json.dumps(results, indent=1), flush=True)
        if asked.json:
            write_table(asked.json, results)
    dist.barrier()
    os._exit(0)  # gloo's threads now and then outlive their group, and abort


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--threads", type=int, default=12, help="of each process")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--ours-first", action="store_true", help="of the engines that are made")
    parser.add_argument("--size", choices=SIZES, default="354M")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(process, (folder, asked), nprocs=asked.processes)


if __name__ == "__main__":
    main()
