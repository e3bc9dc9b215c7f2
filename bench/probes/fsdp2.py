#!/usr/bin/env python3
"""Time optimizer steps of shards on any number of processes: ours, and torch's beside them.

    fsdp2.py [--processes N ...] [--weak] [--offloaded] [--only NAME ...] [--json FILE.json]

FSDP2 shards the weights. Steps of this package and of torch take turns, on the same gradients:
bare, and with the norm of the gradients clipped; torch clips by a call of its own. Muon steps the
matrices of the layers alone. GaLoreAdamW projects these. Where torch has the elementwise class,
the weights of both are compared after one step.

Prints a table: medians in milliseconds, of the slowest process, for each number of processes.
``--weak`` gives each process as many layers as one process has. ``--device cpu`` uses gloo.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard

from fusedstep import optim
from fusedstep._sharding.dtensor import local, spread_like

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from reports.tables import write_table

MAX_NORM, RANK = 1.0, 128

#: Layers and widths.
MODELS = {"GPT-2 124 M": (12, 768), "1.3 B": (24, 2048), "tiny": (2, 64)}

#: Milliseconds, by optimizer and by the way of a step.
Times = dict[str, dict[str, float]]


class Block(nn.Module):
    """The weights of one of GPT-2's layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        sizes = (1, 3), (1, 1), (1, 4), (4, 1)
        self.layers = nn.ModuleList(nn.Linear(a * width, b * width) for a, b in sizes)


class Model(nn.Module):
    """The weights of GPT-2, the head tied to the embedding; no step needs what they compute."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(50_257, width), nn.Embedding(1_024, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)


class Setting(NamedTuple):
    """What the processes of a run have in common."""

    mesh: Any
    device: torch.device
    policy: OffloadPolicy
    rounds: int

    @property
    def of_weights(self) -> torch.device:
        is_offloaded = isinstance(self.policy, CPUOffloadPolicy)
        return torch.device("cpu") if is_offloaded else self.device

    def model(self, layers: int, width: int) -> Model:
        """A sharded model with gradients; each process makes its own shards."""
        with torch.device("meta"):
            model = Model(layers, width)
        for block in model.blocks:
            fully_shard(block, mesh=self.mesh, offload_policy=self.policy)
        fully_shard(model, mesh=self.mesh, offload_policy=self.policy)
        model.to_empty(device=self.of_weights)
        torch.manual_seed(self.mesh.get_rank())
        for p in model.parameters():
            shard = local(p.detach())
            shard.normal_(std=0.02)
            p.grad = spread_like(p, torch.randn_like(shard) * 1e-3)
        return model

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def milliseconds(self, step: Callable[[], object]) -> float:
        self.wait()
        dist.barrier()
        self.wait()
        began = time.perf_counter()
        step()
        self.wait()
        return (time.perf_counter() - began) * 1e3

    def medians(self, ways: dict[str, Callable[[], object]]) -> dict[str, float]:
        """Medians of steps that take turns, of the slowest process."""
        times: dict[str, list[float]] = {way: [] for way in ways}
        for turn in range(-2, self.rounds):
            for way, step in ways.items():
                taken = self.milliseconds(step)
                if turn >= 0:
                    times[way].append(taken)
        found = torch.tensor(list(map(statistics.median, times.values())), device=self.device)
        dist.all_reduce(found, dist.ReduceOp.MAX)
        return dict(zip(ways, found.tolist(), strict=True))


def matrices_of(model: Model) -> list[nn.Parameter]:
    return [p for p in model.blocks.parameters() if p.ndim == 2]


def galore(model: Model) -> torch.optim.Optimizer:
    matrices = matrices_of(model)
    known = set(map(id, matrices))
    others = [p for p in model.parameters() if id(p) not in known]
    rank = min(RANK, *(min(p.shape) for p in matrices))
    return optim.GaLoreAdamW([{"params": matrices, "rank": rank}, {"params": others}], lr=1e-4)


def plain(name: str) -> Callable[[Model], torch.optim.Optimizer]:
    return lambda model: getattr(optim, name)(model.parameters(), lr=1e-4)


#: Ours, by name.
OURS: dict[str, Callable[[Model], torch.optim.Optimizer]] = {
    name: plain(name) for name in ("AdamW", "Adagrad", "Adan", "Lamb", "Adafactor")
}
OURS |= {"Muon": lambda model: optim.Muon(matrices_of(model)), "GaLoreAdamW": galore}

#: The best that torch has, by the same names; its fused Adagrad takes no DTensors. Beside
#: Adafactor, whose class of torch has another formula, our own in torch operations.
BESIDE: dict[str, tuple[str, Callable[[Model], torch.optim.Optimizer]]] = {
    "AdamW": (
        "torch fused",
        lambda model: torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True),
    ),
    "Muon": ("torch", lambda model: torch.optim.Muon(matrices_of(model))),
    "Adafactor": (
        "fusedstep, fused=False",
        lambda model: optim.Adafactor(model.parameters(), lr=1e-4, fused=False),
    ),
}


def clipped(model: Model, optimizer: torch.optim.Optimizer) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
    optimizer.step()


def measure(setting: Setting, layers: int, width: int, name: str) -> dict[str, float]:
    """Medians of an optimizer's steps, and of torch's where it has the class."""
    model = setting.model(layers, width)
    ours: Any = OURS[name](model)
    ways = {"fusedstep": ours.step, "fusedstep, clipped": lambda: ours.step(max_norm=MAX_NORM)}
    if name in BESIDE:
        other = setting.model(layers, width)
        way, new = BESIDE[name]
        theirs = new(other)
        ways[way] = theirs.step
        if way == "torch fused":
            ways[f"{way}, clipped"] = lambda: clipped(other, theirs)
            ours.step(max_norm=MAX_NORM)
            clipped(other, theirs)
            for pair in zip(model.parameters(), other.parameters(), strict=True):
                torch.testing.assert_close(*(local(p.detach()) for p in pair), rtol=1e-5, atol=1e-6)
    return setting.medians(ways)


def models_of(asked: argparse.Namespace, processes: int) -> dict[str, tuple[int, int]]:
    """Layers and widths of the models, by the names that the table has."""
    if not asked.weak:
        return {name: MODELS[name] for name in asked.models}
    return {
        f"{name} a process": (processes * layers, width)
        for name, (layers, width) in ((name, MODELS[name]) for name in asked.models)
    }


def process(rank: int, folder: str, processes: int, asked: argparse.Namespace) -> None:
    device = torch.device("cpu")
    torch.set_num_threads(asked.threads or max(1, (os.cpu_count() or 1) // processes))
    if asked.device == "cuda":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
        os.environ["NCCL_NVLS_ENABLE"] = "0"
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        f"file://{folder}/meeting-{processes}",
        rank=rank,
        world_size=processes,
        device_id=device if device.type == "cuda" else None,
    )
    mesh = init_device_mesh(device.type, (processes,))
    policy = CPUOffloadPolicy() if asked.offloaded else OffloadPolicy()
    setting = Setting(mesh, device, policy, asked.rounds)
    found: dict[str, Times] = {}
    for model, (layers, width) in models_of(asked, processes).items():
        for name in asked.only:
            if rank == 0:
                print(f"{processes} processes: {model}, {name}", file=sys.stderr, flush=True)
            found.setdefault(model, {})[name] = measure(setting, layers, width, name)
    if rank == 0:
        text = json.dumps({"threads of each process": torch.get_num_threads(), "ms": found})
        Path(folder, f"{processes}.json").write_text(text)
    dist.barrier()
    os._exit(0)  # gloo's threads now and then outlive their group, and abort


def lines(ms: dict[str, dict[str, Times]]) -> Iterable[list[str]]:
    """The rows of the table; ``ms``: by the number of processes."""
    first = next(iter(ms.values()))
    for model, optimizers in first.items():
        for name, ways in optimizers.items():
            for way in ways:
                times = [f"{each[model][name][way]:.3g}" for each in ms.values()]
                yield [f"{model}, {name}", way, *times]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2], metavar="N")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["GPT-2 124 M"])
    parser.add_argument("--weak", action="store_true", help="layers grow with the processes")
    parser.add_argument("--offloaded", action="store_true", help="by CPUOffloadPolicy")
    parser.add_argument("--only", nargs="+", choices=OURS, default=list(OURS), metavar="NAME")
    parser.add_argument("--threads", type=int, help="of each process; all divide the CPUs if left")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--json", type=Path, metavar="FILE.json")
    asked = parser.parse_args()
    there = torch.cuda.device_count() if asked.device == "cuda" else max(asked.processes)
    if there < max(asked.processes):
        parser.error(f"{max(asked.processes)} processes need as many GPUs, and there are {there}")
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for processes in asked.processes:
            mp.spawn(process, (folder, processes, asked), nprocs=processes)
            found[str(processes)] = json.loads(Path(folder, f"{processes}.json").read_text())
    ms = {processes: each["ms"] for processes, each in found.items()}
    if asked.weak:  # a model has the same name for any number of processes
        assert len({tuple(each) for each in ms.values()}) == 1
    head = ["ms a step", "by", *(f"{processes} processes" for processes in ms)]
    rows = [head, *lines(ms)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        first, by, *times = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        print(first, by, *(cell.strip().rjust(len(cell)) for cell in times), sep="  ")
    if asked.json:
        name = torch.cuda.get_device_name() if asked.device == "cuda" else "cpu"
        about = {"device": name, "torch": torch.__version__, "offloaded": asked.offloaded}
        threads = {n: each["threads of each process"] for n, each in found.items()}
        write_table(asked.json, about | {"threads of each process": threads, "ms": ms})


if __name__ == "__main__":
    main()
