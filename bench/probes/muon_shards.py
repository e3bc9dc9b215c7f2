"""Times steps of Muon of matrices that two GPUs have shards of: ours, torch's, and of whole ones.

    PYTHONPATH=bench/probes:python python bench/probes/muon_shards.py --json OUT.json

Whole matrices are stepped by both GPUs at once, each by itself, as copies are. Medians in
milliseconds of steps that take turns, by the slower process. With `--device cpu` by gloo.
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
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from fusedstep import optim

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from reports.tables import write_table

PROCESSES = 2

#: Layers and widths of models, with the four matrices of each layer: query, key and value; their
#: projection; the two of the feed-forward part.
MODELS = {"GPT-2 124 M": (12, 768), "1.3 B": (24, 2048), "tiny": (12, 64)}


def weights_of(name: str, device: torch.device, mesh: Any) -> list[torch.nn.Parameter]:
    """Whole weights with gradients, or shards of them over a mesh."""
    layers, width = MODELS[name]
    shapes = [(3, 1), (1, 1), (4, 1), (1, 4)] * layers
    torch.manual_seed(0)
    weights = []
    for rows, columns in shapes:
        shape = rows * width, columns * width
        tensors = [torch.randn(shape, device=device) * scale for scale in (0.02, 1e-3)]
        if mesh is not None:
            tensors = [distribute_tensor(each, mesh, [Shard(0)]) for each in tensors]
        weights.append(torch.nn.Parameter(tensors[0]))
        weights[-1].grad = tensors[1]
    return weights


def milliseconds(steps: dict[str, Any], device: torch.device, rounds: int) -> dict[str, float]:
    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()

    found: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(-3, rounds):
        for name, step in steps.items():
            wait()
            dist.barrier()
            wait()
            began = time.perf_counter()
            step()
            wait()
            if turn >= 0:
                found[name].append(1e3 * (time.perf_counter() - began))
    medians = torch.tensor([statistics.median(each) for each in found.values()], device=device)
    dist.all_reduce(medians, dist.ReduceOp.MAX)
    return {n: float(f"{each:.4g}") for n, each in zip(found, medians.tolist(), strict=True)}


def measure(asked: argparse.Namespace, name: str, device: torch.device) -> dict[str, float]:
    mesh = init_device_mesh(device.type, (PROCESSES,))
    whole = optim.Muon(weights_of(name, device, None))
    shards = optim.Muon(weights_of(name, device, mesh))
    theirs = torch.optim.Muon(weights_of(name, device, mesh))
    steps = {"whole": whole.step, "shards": shards.step, "torch, shards": theirs.step}
    return milliseconds(steps, device, asked.rounds)


def process(rank: int, folder: str, asked: argparse.Namespace) -> None:
    device, backend = torch.device(asked.device), "gloo"
    if device.type == "cuda":
        device, backend = torch.device("cuda", rank), "nccl"
        torch.cuda.set_device(device)
        os.environ["NCCL_NVLS_ENABLE"] = "0"
    else:
        torch.set_num_threads(1)
    dist.init_process_group(
        backend,
        f"file://{folder}/meeting",
        rank=rank,
        world_size=PROCESSES,
        device_id=device if device.type == "cuda" else None,
    )
    rows = {name: measure(asked, name, device) for name in asked.models}
    if rank == 0:
        about = {"processes": PROCESSES, "device": asked.device, "torch": torch.__version__}
        if device.type == "cuda":
            about["name"] = torch.cuda.get_device_name()
        results = about | {"ms": rows}
        print(json.dumps(results, indent=1))
        if asked.json:
            write_table(asked.json, results)
    dist.barrier()
    os._exit(0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--models", nargs="*", choices=MODELS, default=list(MODELS)[:2])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(process, (folder, asked), nprocs=PROCESSES)


if __name__ == "__main__":
    main()
