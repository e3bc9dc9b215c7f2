#!/usr/bin/env python3
"""Time step(max_norm=..., zero_grad=True) against the separate calls that do the same.

Writes clipping.json beside the other results of this machine, and prints the table.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

import cases
import output
import shapes
import subjects
from machine import this_machine
from report import milliseconds

#: What the gradients are clipped to: they are scaled in every step.
MAX_NORM = 0.5

LISTS = {each.name: each for each in shapes.MODELS}
PLAIN = {case.name: case for case in cases.PLAIN if case.name != "adamw"}


def separate_calls(optimizer: torch.optim.Optimizer, params: list[torch.nn.Parameter]) -> None:
    torch.nn.utils.clip_grad_norm_(params, MAX_NORM)
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)


def contestants(case: cases.Case, shape_list: shapes.ShapeList) -> dict[str, tuple]:
    """By title: the parameters, and what is timed."""

    def ours(call: Callable) -> tuple:
        params = subjects.make(shape_list, torch.float32)
        optimizer = case.build(params)
        return params, lambda: call(optimizer, params)

    found = {
        "bare step": ours(lambda optimizer, _: optimizer.step()),
        "one call": ours(lambda optimizer, _: optimizer.step(max_norm=MAX_NORM, zero_grad=True)),
        "separate calls": ours(separate_calls),
    }
    if case.namesake is not None:
        params = subjects.make(shape_list, torch.float32)
        theirs = case.build_namesake(params, foreach=False, fused=True)
        found["torch fused, separate calls"] = (params, lambda: separate_calls(theirs, params))
    return found


def seconds_of(step: Callable, params: list[torch.nn.Parameter], grads: list) -> float:
    """One step from the same gradients each time: the calls clear them."""
    torch._foreach_copy_([param.grad for param in params], grads)
    began = time.perf_counter()
    step()
    return time.perf_counter() - began


def measure(case: cases.Case, shape_list: shapes.ShapeList, seconds: float) -> dict[str, float]:
    """Milliseconds by title: medians of steps taken in turns."""
    found = contestants(case, shape_list)
    grads = [param.grad.clone() for param in next(iter(found.values()))[0]]
    samples: dict[str, list[float]] = {title: [] for title in found}
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline or len(samples["one call"]) < 3:
        for title, (params, step) in found.items():
            samples[title].append(seconds_of(step, params, grads))
    check({title: params for title, (params, _) in found.items() if title != "bare step"})
    return {title: 1e3 * statistics.median(times[1:]) for title, times in samples.items()}


def check(stepped: dict[str, list[torch.nn.Parameter]]) -> None:
    """After as many steps all ways must have come to the same weights."""
    (first, expected), *others = stepped.items()
    for title, params in others:
        for param, other in zip(params, expected, strict=True):
            torch.testing.assert_close(
                param,
                other,
                rtol=1e-3,
                atol=1e-4,
                msg=lambda text, t=title: f"{first}, {t}: {text}",
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("lists", nargs="*", metavar="LIST", help="default: gpt2 and small")
    parser.add_argument("--seconds", type=float, default=8, help="for each row (default: 8)")
    output.output_arguments(parser)
    arguments = parser.parse_args()
    if unknown := set(arguments.lists) - set(LISTS):
        parser.error(f"no list {', '.join(unknown)}: there are {', '.join(LISTS)}")
    machine, rows = this_machine(), []
    wanted = [
        (case, name) for name in arguments.lists or ("gpt2", "small") for case in PLAIN.values()
    ]
    for case, name in track(wanted, "step, clip and clear", console=Console(stderr=True)):
        rows.append(
            {
                "optimizer": case.name,
                "shapes": name,
                "ms": measure(case, LISTS[name], arguments.seconds),
            }
        )
    folder = output.results_folder(arguments, machine.slug)
    results = {
        "machine": machine.facts(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "rows": rows,
    }
    (folder / "clipping.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    titles = list(dict.fromkeys(title for row in rows for title in row["ms"]))
    table = Table("tensors", "optimizer", *titles, "to bare", "to separate", title="ms")
    for row in rows:
        ms = row["ms"]
        cells = [milliseconds(ms[title]) if title in ms else "–" for title in titles]
        ratios = [f"{ms['one call'] / ms[other]:.2f}" for other in ("bare step", "separate calls")]
        table.add_row(LISTS[row["shapes"]].title, row["optimizer"], *cells, *ratios)
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
