#!/usr/bin/env python3
"""Time optimizer steps of FSDP2 on two GPUs, with CPU offload or without: GPT-2 124 M.

    fsdp2.py [--on-gpu] [--threads N] [--only NAME ...] [--output FILE.json]

Steps of this package and of torch are taken in turns, on the same gradients: bare, and with the
gradients' norm clipped. torch clips by a call of its own, whose norm gloo sums. The first steps of
both are compared. Prints medians in milliseconds and writes them as JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard

from fusedstep import optim

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from reports.tables import write_table

PROCESSES, ROUNDS, MAX_NORM, WIDTH = 2, 25, 1.0, 768

#: torch's fused Adagrad takes no DTensors.
PEERS = {"Adam": torch.optim.Adam, "AdamW": torch.optim.AdamW}

NAMES = ("AdamW", "Adam", "Adagrad", "Adan", "Lamb", "Adafactor")

#: Timed with ``fused=False`` as well.
BY_TORCH = ("Adafactor",)


class Block(nn.Module):
    """The weights of one of GPT-2's layers. What they compute does not matter to a step."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        sizes = (1, 3), (1, 1), (1, 4), (4, 1)
        self.layers = nn.ModuleList(nn.Linear(a * WIDTH, b * WIDTH) for a, b in sizes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        qkv, out, up, down = self.layers
        x = x + out(qkv(self.norms[0](x))[..., :WIDTH])
        return x + down(up(self.norms[1](x)).relu())


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(50_257, WIDTH), nn.Embedding(1_024, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(12)))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        places = torch.arange(tokens.shape[-1], device=tokens.device)
        return self.norm(self.blocks(self.tokens(tokens) + self.places(places)))


def subject(
    cls: type, mesh: Any, policy: OffloadPolicy, **options: Any
) -> tuple[Model, torch.optim.Optimizer]:
    """A sharded model with gradients, and its optimizer."""
    torch.manual_seed(0)
    model = Model()
    if not isinstance(policy, CPUOffloadPolicy):
        model.to(mesh.device_type)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, offload_policy=policy)
    fully_shard(model, mesh=mesh, offload_policy=policy)
    tokens = torch.arange(2 * 64, device=mesh.device_type).view(2, 64)
    model(tokens).square().mean().backward()
    return model, cls(model.parameters(), lr=1e-4, **options)


def torch_clips(model: Model, optimizer: torch.optim.Optimizer) -> None:
    torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
    optimizer.step()


def milliseconds(step: Any) -> float:
    torch.cuda.synchronize()
    dist.barrier()
    torch.cuda.synchronize()
    began = time.perf_counter()
    step()
    torch.cuda.synchronize()
    return (time.perf_counter() - began) * 1e3


def measure(mesh: Any, policy: OffloadPolicy, name: str, theirs: Any, rows: dict[str, Any]) -> None:
    """Adds the medians of an optimizer's steps to the rows; torch's where it has the class."""
    model, ours = subject(getattr(optim, name), mesh, policy)
    ways = {
        "fusedstep": ours.step,
        "fusedstep, clipped": lambda: ours.step(max_norm=MAX_NORM),
    }
    if theirs is not None:
        their_model, their_optimizer = subject(theirs, mesh, policy, fused=True)
        ways["torch fused"] = their_optimizer.step
        ways["torch fused, clipped"] = lambda: torch_clips(their_model, their_optimizer)
        ours.step(max_norm=MAX_NORM)
        torch_clips(their_model, their_optimizer)
        for weight, other in zip(model.parameters(), their_model.parameters(), strict=True):
            torch.testing.assert_close(weight.to_local(), other.to_local(), rtol=1e-5, atol=1e-6)
    if name in BY_TORCH:
        _, by_torch = subject(getattr(optim, name), mesh, policy, fused=False)
        ways["fusedstep, fused=False"] = by_torch.step
    times: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(ROUNDS):
        for way, step in ways.items():
            times[way].append(milliseconds(step))
    rows[name] = {way: float(f"{statistics.median(each):.4g}") for way, each in times.items()}


def process(
    rank: int, folder: str, threads: int, on_gpu: bool, output: Path | None, names: Sequence[str]
) -> None:
    torch.set_num_threads(threads)
    torch.cuda.set_device(rank)
    os.environ["NCCL_NVLS_ENABLE"] = "0"
    dist.init_process_group(
        "cpu:gloo,cuda:nccl",
        f"file://{folder}/meeting",
        rank=rank,
        world_size=PROCESSES,
        device_id=torch.device("cuda", rank),
    )
    mesh = init_device_mesh("cuda", (PROCESSES,))
    rows: dict[str, Any] = {}
    policy = OffloadPolicy() if on_gpu else CPUOffloadPolicy()
    for name in names:
        measure(mesh, policy, name, PEERS.get(name), rows)
    if rank == 0:
        results = {
            "device": f"{PROCESSES} x {torch.cuda.get_device_name()}",
            "torch": torch.__version__,
            "threads of each process": threads,
            "weights": "GPT-2 124 M, sharded over two processes, on the "
            + ("GPUs" if on_gpu else "CPU"),
            "ms": rows,
        }
        print(json.dumps(results, indent=1))
        if output is not None:
            write_table(output, results)
    dist.barrier()
    os._exit(0)  # gloo's threads now and then outlive their group, and abort


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", choices=NAMES, default=NAMES, metavar="NAME")
    parser.add_argument("--threads", type=int, default=12, help="of each process (default: 12)")
    parser.add_argument("--on-gpu", action="store_true", help="without offload")
    parser.add_argument("--output", type=Path, metavar="FILE.json")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        given = arguments.threads, arguments.on_gpu, arguments.output, arguments.only
        mp.spawn(process, (folder, *given), nprocs=PROCESSES)


if __name__ == "__main__":
    main()
