"""The time of optimizer steps over the parameters of a model, gradients in place."""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any

import torch

from adan_contestants import CONTESTANTS, problem
from gpt2 import GPT2, make_gradients

#: Contestants follow one another so many times, so that what disturbs one disturbs all.
TURNS = 5


@dataclass(frozen=True)
class Effort:
    steps: int
    """Of each contestant, over all turns."""
    seconds: float
    """For each contestant: where the steps take longer, there are fewer of them."""

    @property
    def turns(self) -> int:
        return min(TURNS, self.steps)

    def count(self, milliseconds: float) -> int:
        """Steps in a turn, when each takes about as long as told."""
        affordable = 1e3 * self.seconds / self.turns / max(milliseconds, 1e-6)
        return max(1, min(math.ceil(self.steps / self.turns), int(affordable)))

    def facts(self) -> dict[str, Any]:
        return asdict(self)


def timed(step: Callable[[], object], count: int, device: torch.device) -> float:
    """Milliseconds a step."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(count):
        step()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - began) / count


def turn(model: GPT2, name: str, effort: Effort) -> tuple[float, int]:
    """The milliseconds of a step, and of how many it is the mean.

    The optimizer is made anew: states of all at a time would not fit beside large models.
    """
    device = model.norm.weight.device
    optimizer = CONTESTANTS[name].build(model.parameters())
    for _ in range(2):
        optimizer.step()
    count = effort.count(timed(optimizer.step, 1, device))
    return timed(optimizer.step, count, device), count


def measure(model: GPT2, names: Iterable[str], effort: Effort) -> dict[str, dict[str, Any]]:
    samples: dict[str, list[tuple[float, int]]] = {name: [] for name in names}
    results: dict[str, dict[str, Any]] = {}
    try:
        make_gradients(model)
    except RuntimeError as error:
        return {name: problem(error) for name in samples}
    for _ in range(effort.turns):
        for name, found in samples.items():
            if name in results:
                continue
            try:
                found.append(turn(model, name, effort))
            except RuntimeError as error:
                results[name] = problem(error)
            gc.collect()
    for name, found in samples.items():
        if name not in results:
            times, counts = zip(*found, strict=True)
            results[name] = {
                "ms": statistics.median(times),
                "ms_range": [min(times), max(times)],
                "steps": sum(counts),
            }
    return results
