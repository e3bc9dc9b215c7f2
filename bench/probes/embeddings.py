#!/usr/bin/env python3
"""Time backward pass and step of an embedding table with sparse gradients, beside torch and FBGEMM.

A batch has bags of items, of which a few are seen often. FBGEMM steps inside of its backward pass:
hence the sum of both. Implementations take turns; printed are medians, `--json` keeps them. First
all of an optimizer are stepped on one batch, and their weights compared.
"""

from __future__ import annotations

import argparse
import importlib
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor, nn

from fusedstep import optim
from tables import write_table

Bags = tuple[Tensor, Tensor]
LR, EPS = 0.05, 1e-8


def batch(rows: int, bags: int, items: int, seed: int) -> Bags:
    """Items of all bags, and where each begins."""
    generator = torch.Generator().manual_seed(seed)
    found = (rows * torch.rand(bags * items, generator=generator) ** 4).long()
    return found, torch.arange(0, bags * items, items)


class Table:
    """torch's table with an optimizer for sparse gradients."""

    def __init__(self, start: Tensor, cls: type[torch.optim.Optimizer]) -> None:
        self.module = nn.EmbeddingBag.from_pretrained(
            start.clone(), freeze=False, mode="sum", sparse=True
        )
        self.optimizer = cls(self.module.parameters(), lr=LR, eps=EPS)

    def forward(self, bags: Bags) -> Tensor:
        return self.module(*bags)

    def update(self, output: Tensor, grad: Tensor) -> None:
        output.backward(grad)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def weights(self) -> Tensor:
        return self.module.weight.detach()


class Fbgemm:
    """FBGEMM's table, which steps in the backward pass."""

    def __init__(self, start: Tensor, kind: str) -> None:
        ops = importlib.import_module("fbgemm_gpu.split_table_batched_embeddings_ops_training")
        place = ops.EmbeddingLocation.HOST, ops.ComputeDevice.CPU
        self.module = ops.SplitTableBatchedEmbeddingBagsCodegen(
            [(*start.shape, *place)], optimizer=ops.OptimType[kind], learning_rate=LR, eps=EPS
        )
        self.weights().copy_(start)

    def forward(self, bags: Bags) -> Tensor:
        items, begins = bags
        return self.module(items, torch.cat([begins, torch.tensor([len(items)])]))

    def update(self, output: Tensor, grad: Tensor) -> None:
        output.backward(grad)

    def weights(self) -> Tensor:
        return self.module.split_embedding_weights()[0].detach()


Make = Callable[[Tensor], Any]

#: Implementations of each optimizer, ours first.
KINDS: dict[str, dict[str, Make]] = {
    "RowWiseAdagrad": {
        "ours": lambda start: Table(start, optim.RowWiseAdagrad),
        "FBGEMM": lambda start: Fbgemm(start, "EXACT_ROWWISE_ADAGRAD"),
    },
    "Adagrad": {
        "ours": lambda start: Table(start, optim.Adagrad),
        "torch": lambda start: Table(start, torch.optim.Adagrad),
        "FBGEMM": lambda start: Fbgemm(start, "EXACT_ADAGRAD"),
    },
    "SparseAdam": {
        "ours": lambda start: Table(start, optim.SparseAdam),
        "torch": lambda start: Table(start, torch.optim.SparseAdam),
    },
}


def made(name: str, ways: dict[str, Make], asked: argparse.Namespace) -> dict[str, Any]:
    """The implementations that are there, after a step with the same result."""
    bags = batch(asked.rows, asked.bags, asked.items, 0)
    start = torch.randn(asked.rows, asked.columns, generator=torch.Generator().manual_seed(1))
    grad = torch.randn(asked.bags, asked.columns, generator=torch.Generator().manual_seed(2))
    found: dict[str, Any] = {}
    for way, make in ways.items():
        try:
            table = make(start)
        except ImportError as error:
            print(f"{name}: {way} is left out: {error}")
            continue
        table.update(table.forward(bags), grad)
        if found:
            torch.testing.assert_close(
                table.weights(), found["ours"].weights(), rtol=1e-4, atol=1e-4
            )
        found[way] = table
    return found


def main(argv: list[str] | None = None) -> dict[str, dict[str, float]]:
    """Returns the milliseconds of each implementation of each optimizer."""
    parser = argparse.ArgumentParser(description=__doc__)
    for option, size in {
        "rows": 1_000_000, "columns": 64, "bags": 4096, "items": 20, "rounds": 15
    }.items():  # fmt: skip
        parser.add_argument(f"--{option}", type=int, default=size)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args(argv)
    grad, results = torch.randn(asked.bags, asked.columns), {}
    for name, ways in KINDS.items():
        tables = made(name, ways, asked)
        times: dict[str, list[float]] = {way: [] for way in tables}
        for turn in range(asked.rounds):
            bags = batch(asked.rows, asked.bags, asked.items, turn)
            for way, table in tables.items():
                output = table.forward(bags)
                began = time.perf_counter()
                table.update(output, grad)
                times[way].append((time.perf_counter() - began) * 1e3)
        results[name] = {way: statistics.median(each) for way, each in times.items()}
        print(f"{name:15}", *(f"{way} {ms:.1f} ms" for way, ms in results[name].items()), sep="  ")
    if asked.json:
        sizes = {each: getattr(asked, each) for each in ("rows", "columns", "bags", "items")}
        about = {"torch": torch.__version__, "threads": torch.get_num_threads(), **sizes}
        write_table(asked.json, about | {"ms": results})
    return results


if __name__ == "__main__":
    main()
