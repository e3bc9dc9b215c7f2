"""Times Muon's iteration of matrices of near shapes: one by one, and padded to one shape.

    python bench/probes/muon_padding.py [--device cuda] [--json OUT.json]

32 matrices whose sides differ by up to a share of the largest: 5 steps, each matrix in products of
its own, and all in one batch with zeros up to the largest, which leave the other elements what they
are; and a step of Muon with near shapes apart, which batches those of one shape, and joined as it
does. ``shapes`` is the number of different ones: sides are whole, so that some of the 32 may be
alike. Milliseconds are medians, those of the iteration without the copies that padding needs.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from fusedstep._matrix import arrangement
from fusedstep._matrix.coefficients import coefficients_of
from fusedstep._matrix.newton_schulz import Scratch, orthogonalize, usual_dtype
from fusedstep.optim import Muon

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from probes.galore import milliseconds
from reports.tables import write_table

COUNT, REPEATS = 32, 10
APART = {"_CALLS": {}, "_CALLS_ELSEWHERE": 0}
#: The largest matrix, and the share of its sides by which others are smaller.
LARGEST, SPREADS = ((128, 128), (128, 1152), (768, 768), (768, 3072)), (0.1, 0.4)


def step_of(matrices: list[torch.Tensor], **choice: Any) -> Callable[[], object]:
    """A step of Muon, with the module's choice of what is joined or another one."""
    params = [torch.nn.Parameter(x[0].float()) for x in matrices]
    for p in params:
        p.grad = torch.randn_like(p)
    optimizer = Muon(params)

    def step() -> None:
        with ExitStack() as changed:
            for name, value in choice.items():
                changed.enter_context(patch.object(arrangement, name, value))
            optimizer.step()

    return step


def measured(largest: tuple[int, int], spread: float, device: str) -> dict[str, object]:
    dtype, scratch = usual_dtype(torch.device(device)), Scratch()
    steps = coefficients_of("quintic", 5)
    shares = [1 - spread * place / (COUNT - 1) for place in range(COUNT)]
    each = [
        torch.randn(1, *(max(int(side * share), 1) for side in largest), device=device, dtype=dtype)
        for share in shares
    ]
    for x in each:
        x /= torch.linalg.matrix_norm(x)[:, None, None]
    padded = torch.zeros(COUNT, *largest, device=device, dtype=dtype)
    for x, place in zip(each, padded, strict=True):
        place[: x.shape[1], : x.shape[2]] = x[0]
    times = {
        "one by one": lambda: [orthogonalize(x.clone(), steps, scratch) for x in each],
        "padded": lambda: orthogonalize(padded.clone(), steps, scratch),
    }
    times |= {"steps apart": step_of(each, **APART), "steps joined": step_of(each)}
    ms = {name: milliseconds(run, device, REPEATS) for name, run in times.items()}
    shapes = len({x.shape for x in each})
    return {"largest": list(largest), "spread": spread, "shapes": shapes, "ms": ms}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    torch.manual_seed(0)
    found = []
    for largest in LARGEST:
        for spread in SPREADS:
            found.append(measured(largest, spread, given.device))
            print(found[-1], flush=True)
    if given.json:
        write_table(given.json, {"device": given.device, "rows": found})


if __name__ == "__main__":
    main()
