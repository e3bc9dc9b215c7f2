"""The memory that a step takes beside the states: measured in steps of small weights."""

from __future__ import annotations

import gc
import math

import torch

from fusedstep.backward import step_in_backward
from fusedstep.memory.model import Model
from fusedstep.memory.plan import (
    NO_SCRATCH,
    Choice,
    Run,
    Scratch,
    build,
    largest_bucket,
    state_bytes,
)

#: Weights of more elements are scaled down.
_ELEMENTS = 2**18

#: The least rank that a rank is scaled down to: bases have some more columns while they are made.
_RANK = 16


def rehearse(model: Model, run: Run, choice: Choice) -> Scratch:
    """Steps small weights on the CPU, and tells what their optimizer takes beside its states.

    The weights have the model's shapes, each divided by one number. Of a large model each shape is
    there once, and but for the largest one twice: what more of them take follows. Elementwise
    steps take nothing.
    """
    if not is_composite(choice):
        return NO_SCRATCH
    shapes = model.trained
    if model.trained_elements <= _ELEMENTS:
        return _measured(shapes, run, choice, 1)
    once = tuple(sorted(dict.fromkeys(shapes), key=torch.Size.numel))
    twice = once + once[:-1]
    elements, more = (sum(map(torch.Size.numel, each)) for each in (once, once[:-1]))
    divisor = max(math.isqrt(elements // _ELEMENTS), 1)
    if rank := choice.options.get("rank"):
        divisor = max(min(divisor, rank // _RANK), 1)
    found = _measured(once, run, choice, divisor)
    if not more:
        return found
    other = _measured(twice, run, choice, divisor)
    times = (model.trained_elements - elements) / more
    kept, taken = (round(a + times * (b - a)) for a, b in zip(found, other, strict=True))
    return Scratch(kept, taken if run.bucket is None else found.taken)  # of one bucket at a time


def is_composite(choice: Choice) -> bool:
    """Returns whether an optimizer steps by matrix products or factored moments."""
    return bool(
        build([torch.empty(1, device="meta", dtype=torch.float32)], choice, "none")._composite
    )


def _divided(shape: torch.Size, divisor: int) -> torch.Size:
    if len(shape) < 2:
        return torch.Size(max(size // divisor**2, 1) for size in shape)
    rows, columns, *others = shape
    return torch.Size([max(rows // divisor, 1), max(columns // divisor, 1), *others])


def _measured(shapes: tuple[torch.Size, ...], run: Run, choice: Choice, divisor: int) -> Scratch:
    """Bytes beside states and gradients: after two steps, and at the highest beyond these."""
    shapes = tuple(_divided(shape, divisor) for shape in shapes)
    if rank := choice.options.get("rank"):
        choice = choice._replace(options=choice.options | {"rank": max(rank // divisor, 1)})
    bucket = math.inf if run.bucket is None else run.bucket / divisor**2
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        weights = [torch.randn(shape, dtype=run.of_trained, device="cpu") for shape in shapes]
        gradients = [torch.randn_like(weight) for weight in weights]
    optimizer = build(weights, choice, run.masters)
    found = [p for group in optimizer.param_groups for p in group["params"]]
    by_shape: dict[torch.Size, list[torch.Tensor]] = {}
    for gradient in gradients:
        by_shape.setdefault(gradient.shape, []).append(gradient)
    gradients = [by_shape[p.shape].pop() for p in found]
    if run.bucket is not None:
        step_in_backward(optimizer, bucket_cap_mb=bucket / 2**20)
    gc.collect()  # what is freed in between would be taken off
    with torch.autograd.profiler.profile(profile_memory=True) as profile:
        for _ in range(2):
            torch.autograd.backward(found, gradients)
            optimizer.step()
            optimizer.zero_grad()
    events = [each for each in profile.kineto_results.events() if each.name() == "[memory]"]
    live = peak = 0
    for event in sorted(events, key=lambda each: each.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    states = sum(state_bytes(shapes, run.of_trained, choice, run.masters))
    taken = peak - live - largest_bucket(shapes, run.of_trained, bucket)
    return Scratch(divisor**2 * max(live - states, 0), divisor**2 * max(taken, 0))
