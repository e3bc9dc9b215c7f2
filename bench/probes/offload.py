"""Trains a GPT of 1.3 billion weights on one GPU, with its AdamW on the CPU.

    PYTHONPATH=bench:python:build/low-bit python bench/probes/offload.py --json OUT.json

Kinds: `none`, forward and backward pass without an optimizer; `ours`, fusedstep.offload, with steps
during the backward pass and, as `after`, behind it; `torchao`, its CPUOffloadOptimizer with torch's
fused AdamW. Each runs in a process of its own. With ``--processes N`` so many processes train at
once, each a model of its own on its own GPU, and share the memory and the cores of the host: the
figures are those of the slowest process.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import fusedstep
from fusedstep import optim
from suites.small_gpt import SmallGPT

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from reports.tables import write_table

VOCABULARY, LENGTH = 50304, 1024
SIZES = {
    "1.3B": {"layers": 24, "width": 2048, "heads": 16},
    "tiny": {"layers": 2, "width": 64, "heads": 2},
}

#: The dtype of the weights and the options of ours, by the name of the run.
OURS: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "float32": (torch.float32, {}),
    "bf16, float32 masters": (torch.bfloat16, {"master_weights": "float32"}),
    "bf16, split": (torch.bfloat16, {"master_weights": "split"}),
    "bf16, split, int8": (
        torch.bfloat16,
        {"master_weights": "split", "state_dtype": "int8", "fused": False},
    ),
}

ALL = ("none", "torchao", "ours", "after")


def of_torchao(weights: list[Tensor]) -> torch.optim.Optimizer:
    from torchao.optim import CPUOffloadOptimizer

    return CPUOffloadOptimizer(weights, torch.optim.AdamW, offload_gradients=True, fused=True)


def measure(asked: argparse.Namespace) -> dict[str, Any]:
    """Trains on one batch; returns figures of an iteration."""
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    dtype, options = OURS[asked.weights]
    if asked.threads:
        torch.set_num_threads(asked.threads)
    with torch.device("cuda"):
        model = SmallGPT(**SIZES[asked.size], vocabulary=VOCABULARY, length=LENGTH).to(dtype)
    for block in model.blocks:
        forward = block.forward
        block.forward = lambda x, forward=forward: checkpoint(forward, x, use_reentrant=False)
    weights, optimizer = list(model.parameters()), None
    if asked.kind == "torchao":
        optimizer = of_torchao(weights)
    elif asked.kind != "none":
        optimizer = fusedstep.offload(
            optim.AdamW(weights, **options),
            overlap=asked.kind == "ours",
            bucket_cap_mb=asked.bucket,
        )
    tokens = torch.randint(VOCABULARY, (asked.batch, LENGTH + 1), device="cuda")
    times, passes = [], []
    begun, passed = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(asked.iterations + 2):
        torch.cuda.synchronize()
        start = time.perf_counter()
        begun.record()
        with torch.autocast("cuda", torch.bfloat16):
            scores = model(tokens[:, :-1])
            loss = F.cross_entropy(scores.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        passed.record()
        if optimizer is None:
            for p in weights:
                p.grad = None
        else:
            optimizer.step()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
        passes.append(begun.elapsed_time(passed))
    seconds = statistics.median(times[2:])
    return {
        "kind": asked.kind,
        "weights": asked.weights,
        "threads": torch.get_num_threads(),
        "ms": 1e3 * seconds,
        "ms_of_passes": statistics.median(passes[2:]),
        "tokens_per_second": asked.batch * LENGTH / seconds,
        # With memory that is free but for a copy from it that is under way.
        "peak_bytes": torch.cuda.memory_stats()["active_bytes.all.peak"],
        "parameters": sum(p.numel() for p in weights),
        "loss": loss.item(),
    }


def slowest(command: list[str], processes: int) -> dict[str, Any]:
    """Runs a command at once in processes that have a GPU each; raises what one of them told."""
    runs = [
        subprocess.Popen(
            command,
            env=os.environ | {"CUDA_VISIBLE_DEVICES": str(number)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in range(processes)
    ]
    told = [run.communicate() for run in runs]
    for run, (_, error) in zip(runs, told, strict=True):
        if run.returncode:
            raise RuntimeError(error[-800:])
    found: list[dict[str, Any]] = [json.loads(text.splitlines()[-1]) for text, _ in told]
    return max(found, key=lambda row: row["ms"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--size", choices=SIZES, default="1.3B")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--bucket", type=float, default=64.0, help="MiB")
    parser.add_argument("--iterations", type=int, default=5)
    parser.add_argument("--threads", type=int, default=0, help="of a step; torch's number if 0")
    parser.add_argument("--processes", type=int, default=1, metavar="N", help="of them, at once")
    parser.add_argument("--kind", choices=ALL, help="this one alone, in this process")
    parser.add_argument("--weights", choices=OURS, default="float32")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", default="", help="kinds and weights with this in their name")
    asked = parser.parse_args()
    if asked.kind:
        print(json.dumps(measure(asked)))
        return
    wanted = [(kind, "float32") for kind in ALL] + [("none", "bf16, float32 masters")]
    wanted += [("torchao", "bf16, float32 masters")]
    wanted += [("ours", name) for name in OURS if name != "float32"]
    wanted += [("after", "bf16, float32 masters")]
    rows = []
    for kind, weights in wanted:
        if asked.only not in f"{kind}, {weights}":
            continue
        command = [sys.executable, __file__, "--kind", kind, "--weights", weights]
        command += ["--size", asked.size, "--batch", str(asked.batch)]
        command += ["--iterations", str(asked.iterations), "--bucket", str(asked.bucket)]
        command += ["--threads", str(asked.threads)]
        try:
            rows.append(slowest(command, asked.processes))
        except RuntimeError as error:
            print(f"{kind}, {weights}: {error}", flush=True)
            continue
        row = rows[-1]
        print(
            f"{kind:7} {weights:22} {row['ms']:9.1f} ms, {row['ms_of_passes']:9.1f} of them until "
            f"the passes are done, {row['tokens_per_second']:9,.0f} tokens/s "
            f"{row['peak_bytes'] / 2**30:6.2f} GiB",
            flush=True,
        )
        if asked.json:
            about = {"device": torch.cuda.get_device_name(), "batch": asked.batch}
            about |= {"length": LENGTH, "bucket_mb": asked.bucket, "processes": asked.processes}
            about |= {"torchao": importlib.metadata.version("torchao")}
            write_table(asked.json, about | {"rows": rows})


if __name__ == "__main__":
    main()
