#!/usr/bin/env python3
"""Time the calls that engines make of an optimizer for a small tensor, beside torch's fused AdamW.

Megatron's and torchao's offload have an optimizer for each parameter, and Megatron's hooks around
its step. DeepSpeed's ZeRO exchanges the groups of one optimizer, or a group's weights. Prints the
medians of rounds taken in turns, on one thread, in microseconds a call; `--json` keeps them.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from fusedstep import optim

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from reports.tables import write_table

TENSORS, ELEMENTS, ROUNDS = 200, 1_000, 100

CLASSES = {
    "fusedstep": optim.AdamW,
    "torch": lambda params: torch.optim.AdamW(params, fused=True),
}


def new_weights() -> list[torch.nn.Parameter]:
    weights = [torch.nn.Parameter(torch.ones(ELEMENTS)) for _ in range(TENSORS)]
    for weight in weights:
        weight.grad = torch.full_like(weight, 0.01)
    return weights


def one_each(make: Callable, prepare: Callable) -> Iterator[None]:
    optimizers = [make([weight]) for weight in new_weights()]
    for number, optimizer in enumerate(optimizers):
        prepare(optimizer, number)
    while True:
        for optimizer in optimizers:
            optimizer.step()
        yield


def scheduled(make: Callable) -> Iterator[None]:
    optimizers = [make([weight]) for weight in new_weights()]
    for number in range(ROUNDS * 2):
        for optimizer in optimizers:
            optimizer.param_groups[0]["lr"] = 1e-3 / (1 + number)
            optimizer.step()
        yield


def groups_copied(make: Callable) -> Iterator[None]:
    optimizers = [make([weight]) for weight in new_weights()]
    for optimizer in optimizers:
        optimizer.register_step_post_hook(hook)
    while True:
        for optimizer in optimizers:
            optimizer.param_groups = [group.copy() for group in optimizer.param_groups]
        for optimizer in optimizers:
            optimizer.step()
        yield


def groups_exchanged(make: Callable) -> Iterator[None]:
    optimizer = make([{"params": [weight]} for weight in new_weights()])
    groups = optimizer.param_groups
    while True:
        for group in groups:
            optimizer.param_groups = [group]
            optimizer.step()
            optimizer.param_groups = groups
        yield


def weights_exchanged(make: Callable) -> Iterator[None]:
    weights = new_weights()
    optimizer = make(weights)
    while True:
        for weight in weights:
            optimizer.param_groups[0]["params"] = [weight]
            optimizer.step()
            optimizer.param_groups[0]["params"] = []
        yield


def hook(optimizer, args, kwargs) -> None:
    pass


WAYS = {
    "an optimizer for each": lambda make: one_each(make, lambda optimizer, number: None),
    "an optimizer for each, a new lr": scheduled,
    "an optimizer for each, a hook": lambda make: one_each(
        make, lambda optimizer, number: optimizer.register_step_post_hook(hook)
    ),
    "an optimizer for each, a hook, groups copied (Megatron)": groups_copied,
    "groups exchanged (ZeRO 1, 2)": groups_exchanged,
    "weights exchanged (ZeRO 3)": weights_exchanged,
}


def microseconds(rounds: Iterator[None]) -> float:
    began = time.perf_counter()
    next(rounds)
    return (time.perf_counter() - began) * 1e6 / TENSORS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    found = {}
    print(f"{'µs a call':34} {' '.join(f'{name:>10}' for name in CLASSES)}")
    for way, begin in WAYS.items():
        subjects = [begin(make) for make in CLASSES.values()]
        for _ in range(5):
            for rounds in subjects:
                microseconds(rounds)
        times = [[microseconds(rounds) for rounds in subjects] for _ in range(ROUNDS)]
        medians = [statistics.median(each) for each in zip(*times, strict=True)]
        found[way] = dict(zip(CLASSES, medians, strict=True))
        print(f"{way:34} {' '.join(f'{median:10.2f}' for median in medians)}")
    if asked.json:
        about = {"torch": torch.__version__, "threads": 1, "weights": f"{TENSORS} of {ELEMENTS}"}
        write_table(asked.json, about | {"us": found})


if __name__ == "__main__":
    main()
