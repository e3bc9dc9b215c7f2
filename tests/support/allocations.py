"""What a step, or a training, allocates."""

import json

import torch

from fusedstep.memory.activations import loss_of
from probes.memory_of_a_step import peak_of
from support.layouts import Layout
from support.stepping import make_gradients, make_weights

SHAPE = (512, 512)


SMALL = 16_384
"""Bytes: step counts and lists, nothing that grows with a weight of a megabyte."""


def allocated_bytes(optimizer, file) -> int:
    """Sum of the bytes that torch's allocator hands out during a step."""
    # Not torch.profiler's, which makes objects of all events: the trace has them.
    with torch.autograd.profiler.profile(profile_memory=True) as profile:
        optimizer.step()
    profile.export_chrome_trace(str(file))
    events = json.loads(file.read_text())["traceEvents"]
    sizes = [event["args"]["Bytes"] for event in events if event["name"] == "[memory]"]
    return sum(size for size in sizes if size > 0)


def optimizer_with_gradients(case, layouts, **options):
    """An optimizer that has its states and its plan."""
    weights = make_weights([layout.shape for layout in layouts], torch.float32)
    params = [
        torch.nn.Parameter(layout.place(weight).view)
        for layout, weight in zip(layouts, weights, strict=True)
    ]
    optimizer = case.build(params, **options)
    gradients = make_gradients([layout.shape for layout in layouts], torch.float32, 1)
    for param, gradient in zip(params, gradients, strict=True):
        param.grad = gradient
    optimizer.step()
    return optimizer


LAYOUTS = (
    Layout("dense", SHAPE, (512, 1)),
    Layout("transposed", SHAPE, (1, 512)),
    Layout("sliced", SHAPE, (600, 1)),
    Layout("every second column", SHAPE, (1024, 2)),
)


def peak_of_training(way, make, size):
    """The peak of three iterations of a model that trains by a way's lines."""

    def train():
        names = {"model": make(), "lr": 1e-3}
        exec("\n".join(way["lines"]), names)
        model, optimizer = names["model"], names["optimizer"]
        assert next(model.parameters()).dtype is getattr(torch, way["weights"])
        for _ in range(3):
            loss, output = loss_of(model, torch.zeros(size, dtype=torch.long))
            loss.backward()
            del loss, output
            optimizer.step()
            optimizer.zero_grad()
        names.clear()

    return peak_of(train)
