"""Times steps of GaLore and APOLLO on GPT-2 (124 M) between two refreshes, and refreshes.

    python bench/probes/galore.py [--device cuda] [--layers 2] [--json OUT.json]

Steps, median ms: ``GaLoreAdamW`` with products and a native step in between, the same by its
formula in torch operations, as the published optimizer has it, the products alone, and what has no
rank alone: weights of one dimension and the embeddings are AdamW in the same step. ``refreshed``:
steps that make all bases anew. ``APOLLO``: ``APOLLOAdamW`` in place of it, by native passes and by
its formula. On a GPU each row has a second one, ``queued``: a step of a number that are waited for
together, and there are steps in TF32; on a CPU with AMX there are steps in high precision.

Refreshes of one projector [4096, 4096], or of what ``--side`` says: ms by way, and the part of the
gradient's squared norm that the projection keeps, by that of the exact one. The gradient is that of
a layer of a small network on random sequences of a Markov chain.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fusedstep import optim
from fusedstep._matrix.projection import RIGHT
from fusedstep._matrix.subspace import bases_of
from fusedstep._native import ops

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from reports.tables import write_table

WIDTH, VOCABULARY, CONTEXT, RANK = 768, 50257, 1024, 128


def shapes(layers: int) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
    """The matrices of the layers, and all other weights."""
    d = WIDTH
    matrices = [(3 * d, d), (d, d), (4 * d, d), (d, 4 * d)] * layers
    vectors = [(3 * d,), (d,), (4 * d,), (d,), *[(d,)] * 4] * layers
    embeddings = [(VOCABULARY, d), (CONTEXT, d)] if layers == 12 else []
    return matrices, [*embeddings, *vectors, (d,), (d,)]


def milliseconds(run: Callable[[], object], device: str, repeats: int, together: int = 1) -> float:
    """The median time of a run. ``together``: runs that are queued before they are waited for."""
    wait = torch.cuda.synchronize if torch.device(device).type == "cuda" else lambda: None
    times = []
    for index in range(repeats + 2):
        wait()
        start = time.perf_counter()
        for _ in range(together):
            run()
        wait()
        if index > 1:
            times.append(1e3 * (time.perf_counter() - start) / together)
    return float(f"{statistics.median(times):.4g}")


def parameters(sizes: list[tuple[int, ...]], device: str) -> list[torch.nn.Parameter]:
    found = [torch.nn.Parameter(0.02 * torch.randn(size, device=device)) for size in sizes]
    for param in found:
        param.grad = 1e-3 * torch.randn_like(param)
    return found


def steps(layers: int, device: str, repeats: int) -> dict[str, float]:
    matrices, others = shapes(layers)
    found = {}

    def note(name: str, run: Callable[[], object]) -> None:
        found[name] = milliseconds(run, device, repeats)
        if torch.device(device).type == "cuda" and not name.startswith("refreshed"):
            found[f"{name}, queued"] = milliseconds(run, device, repeats, together=10)

    def time(
        name: str,
        sizes: list[tuple[int, ...]],
        fused: bool,
        cls: Callable[..., torch.optim.Optimizer] = optim.GaLoreAdamW,
        **of_projection: Any,
    ) -> None:
        low = {"rank": RANK, "update_proj_gap": 10**9} | of_projection
        groups = [{"params": parameters(others, device)}]
        if sizes:
            groups.append({"params": parameters(sizes, device)} | low)
        note(name, cls(groups, lr=1e-3, weight_decay=0.1, fused=fused).step)

    time("hybrid", matrices, fused=True, svd="randomized")
    time("formula", matrices, fused=False, svd="randomized")
    note("products", products(matrices, device))
    time("without rank", [], fused=True)
    for svd in ("randomized", "power"):
        time(f"refreshed, {svd}", matrices, fused=True, update_proj_gap=1, svd=svd)
    time("APOLLO", matrices, True, optim.APOLLOAdamW)
    time("APOLLO, formula", matrices, False, optim.APOLLOAdamW)
    return found


def products(sizes: list[tuple[int, ...]], device: str) -> Callable[[], None]:
    operands = []
    for rows, columns in sizes:
        weight, grad = (torch.randn(rows, columns, device=device) for _ in range(2))
        if rows >= columns:
            basis = torch.randn(RANK, columns, device=device)
            low = torch.empty(rows, RANK, device=device)
            operands.append((weight, grad, basis.t(), low, low, basis))
        else:
            basis = torch.randn(rows, RANK, device=device)
            low = torch.empty(RANK, columns, device=device)
            operands.append((weight, basis.t(), grad, low, basis, low))

    def run() -> None:
        for weight, a, b, low, c, d in operands:
            torch.mm(a, b, out=low)
            weight.addmm_(c, d, beta=0.999, alpha=1e-6)

    return run


def gradient(side: int, device: str) -> Tensor:
    """The gradient of a layer [side, side] after a backward pass over some thousand tokens."""
    torch.manual_seed(0)
    states, tokens = 256, 4096
    chain = torch.softmax(3 * torch.randn(states, states, device=device), 1)
    rows = [torch.randint(states, (tokens // 16,), device=device)]
    for _ in range(15):
        rows.append(torch.multinomial(chain[rows[-1]], 1).squeeze(1))
    sequence = torch.stack(rows, 1)
    layer = torch.nn.Linear(side, side, bias=False, device=device)
    model = torch.nn.Sequential(
        torch.nn.Embedding(states, side, device=device),
        torch.nn.LayerNorm(side, device=device),
        layer,
        torch.nn.GELU(),
        torch.nn.Linear(side, states, device=device),
    )
    noisy = model[1](model[0](sequence[:, :-1]) + 0.3 * torch.randn(1, 15, side, device=device))
    loss = torch.nn.functional.cross_entropy(
        model[2:](noisy).flatten(0, 1), sequence[:, 1:].flatten()
    )
    (grad,) = torch.autograd.grad(loss, layer.weight)
    return grad


def refreshes(side: int, device: str, exact: bool) -> dict[str, dict[str, float]]:
    grad, found = gradient(side, device), {}
    last = bases_of(grad, RANK, (RIGHT,), "randomized", None, 1)
    for way in ("randomized", "power", *(["exact"] if exact else [])):
        bases: dict[str, Tensor] = {}

        def refresh(way: str = way, bases: dict[str, Tensor] = bases) -> None:
            bases.update(bases_of(grad, RANK, (RIGHT,), way, last, 2))

        if way == "exact":
            start = time.perf_counter()
            refresh()
            taken = 1e3 * (time.perf_counter() - start)
        else:
            taken = milliseconds(refresh, device, 3)
        kept = ((grad @ bases[RIGHT].t()).norm() / grad.norm()).item() ** 2
        found[way] = {"ms": float(f"{taken:.4g}"), "energy": round(kept, 5)}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument(
        "--side", type=int, default=4096, help="of the refreshed projector; 0: none"
    )
    parser.add_argument("--no-exact", action="store_true", help="leave out the full decomposition")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    found = {"layers": given.layers, "rank": RANK, "threads": torch.get_num_threads()}
    with torch.no_grad():
        found["steps"] = steps(given.layers, given.device, given.repeats)
        is_gpu = torch.device(given.device).type == "cuda"
        if is_gpu or ops.product_isa() == "amx":
            torch.set_float32_matmul_precision("high")
            name = "steps in TF32" if is_gpu else "steps in high precision"
            found[name] = steps(given.layers, given.device, given.repeats)
            torch.set_float32_matmul_precision("highest")
    print(json.dumps(found, indent=1))
    if given.side:
        found["refreshes"] = refreshes(given.side, given.device, not given.no_exact)
        print(json.dumps(found["refreshes"], indent=1))
    if given.json:
        write_table(given.json, found)


if __name__ == "__main__":
    main()
