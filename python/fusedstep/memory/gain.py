"""The command line: ``python -m fusedstep gain MODEL``."""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from pathlib import Path
from typing import Any

import torch

from fusedstep import optim
from fusedstep.gain import Gain, notes_of, time_steps, ways_of
from fusedstep.memory.activations import loss_of
from fusedstep.memory.command import DTYPES, dtype, positive
from fusedstep.memory.model import Model, load
from fusedstep.memory.plan import Choice, build, parse

#: Steps of more weights than so many are timed on a part of them.
_ELEMENTS = 2**23

#: Steps that are timed if nobody says how many, and the seconds after which no more are.
_ROUNDS, _SECONDS = 5, 15

#: Iterations of the model that are timed, after one that is not.
_ITERATIONS = 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        metavar="MODEL",
        nargs="?",
        default="124M",
        help="as of the command memory: a parameter count, a Hugging Face config.json, or "
        "package.module:factory (default: 124M)",
    )
    add = parser.add_argument
    add(
        "--optimizer",
        default="AdamW",
        metavar="NAME[:OPTION=VALUE,...]",
        help="as Lion:weight_decay=0.1 (default: AdamW)",
    )
    add("--weights", type=dtype, default="float32", metavar="DTYPE", help="(default: float32)")
    add("--device", help="of the steps (default: cuda if there is one, else cpu)")
    add(
        "--rounds",
        type=positive,
        help=f"steps that are timed (default: {_ROUNDS}, or fewer: as many as {_SECONDS} seconds "
        "have room for)",
    )
    add(
        "--iteration-ms",
        type=float,
        metavar="X",
        help="what an iteration of your training takes today, in milliseconds",
    )
    add(
        "--batch",
        type=positive,
        metavar="N",
        help="samples: iterations of the model are timed, where --iteration-ms is not given",
    )
    add("--sequence", type=positive, default=128, metavar="N", help="tokens (default: 128)")
    add("--json", action="store_true", help="print JSON")
    add("--plot", type=Path, metavar="FILE.svg", help="draw the times, by matplotlib")


def run(arguments: argparse.Namespace) -> None:
    """Prints what a training gains.

    Raises:
        ValueError: if an argument cannot be followed; the text names it.
    """
    if arguments.iteration_ms is not None and not arguments.iteration_ms > 0:
        raise ValueError(f"--iteration-ms must be above 0, not {arguments.iteration_ms:g}")
    device = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.empty(1, device=device, dtype=torch.float32)
    except (AssertionError, RuntimeError) as error:
        raise ValueError(f"--device {device}: {str(error).splitlines()[0]}") from None
    model, weights = load(arguments.model), DTYPES[arguments.weights]
    if arguments.batch and model.make is None:
        raise ValueError("--batch: a parameter count has no iterations: give --iteration-ms")
    name, options = parse(arguments.optimizer)
    choice = Choice(name, options, "default")
    try:
        build([torch.empty(1, device="meta", dtype=weights)], choice, "none")
    except (RuntimeError, TypeError, ValueError) as error:
        raise ValueError(f"--optimizer {arguments.optimizer}: {error}") from None
    shapes, factor = _part(model)

    def made() -> list[Any]:
        found = []
        for shape in shapes:
            weight = torch.nn.Parameter(torch.ones(shape, dtype=weights, device=device))
            weight.grad = torch.full_like(weight, 1e-3, requires_grad=False)
            found.append(weight)
        return getattr(optim, name)._grouped(found)

    told = _Progress()
    timed = ways_of(getattr(optim, name), made, options)
    notes = notes_of(timed)
    seconds = math.inf if arguments.rounds else _SECONDS
    ms = time_steps(timed, arguments.rounds or _ROUNDS, told.rounds, seconds)
    ms = {way: factor * each for way, each in ms.items()}
    gain = Gain(name, ms, arguments.iteration_ms, notes)
    if gain.iteration_ms is None and arguments.batch:
        passes = _passes(model, weights, device, (arguments.batch, arguments.sequence), told)
        gain = Gain(name, ms, passes + ms[gain.other], notes)
    told.end()
    if arguments.plot:
        _plot(arguments.plot, model, gain)
    if arguments.json:
        print(json.dumps(_facts(arguments, model, device, factor, gain), indent=2))
        return
    print(
        f"{model.name}: {model.parameters:,} parameters, {arguments.weights}, on {_named(device)}"
    )
    if factor != 1:
        print(f"Timed on a part of the weights, and multiplied by {factor:.1f}.")
    print(f"\n{gain}")
    if gain.share is None:
        print("Give --iteration-ms, or --batch with a config.json or a factory, for its share.")
    elif arguments.iteration_ms is None:
        print(f"An iteration took {gain.iteration_ms:.1f} ms here.")


def _part(model: Model) -> tuple[list[torch.Size], float]:
    """Shapes of weights, evenly chosen, and by what their times are multiplied."""
    trained = model.trained
    every = -(-model.trained_elements // _ELEMENTS)
    shapes = [shape for shape in trained[::every] if shape.numel() <= 2 * _ELEMENTS]
    elements = sum(shape.numel() for shape in shapes)
    if not elements:  # few weights, and large ones
        rows = max(_ELEMENTS // trained[0][1:].numel(), 1)
        shapes = [torch.Size([rows, *trained[0][1:]])]
        elements = shapes[0].numel()
    return shapes, model.trained_elements / elements


def _passes(
    model: Model, weights: torch.dtype, device: str, size: tuple[int, int], told: _Progress
) -> float:
    """Milliseconds of a forward and a backward of the model: the fastest of some."""
    assert model.make is not None
    try:
        with torch.device(device), torch.random.fork_rng(devices=()):
            module = model.make().to(weights).train()
            tokens = torch.zeros(size, dtype=torch.long, device=device)
        found = []
        for index in range(_ITERATIONS + 1):
            started = time.perf_counter()
            loss, _ = loss_of(module, tokens)
            loss.backward()
            module.zero_grad()
            float(loss.detach())  # waits for the device
            if device.startswith("cuda"):
                torch.cuda.synchronize(device)
            found.append(1000 * (time.perf_counter() - started))
            told.iterations(index + 1, _ITERATIONS + 1)
    except Exception as error:  # whatever the model's own code raises
        first = str(error).strip().splitlines()
        raise ValueError(
            f"an iteration of MODEL {model.name} cannot be timed: {type(error).__name__}: "
            f"{first[0] if first else ''}. Give --iteration-ms"
        ) from error
    return min(found[1:])


class _Progress:
    """A line on a terminal that shows how far it has come."""

    def rounds(self, done: int, of: int) -> None:
        self._show(f"steps: round {done} of {of}")

    def iterations(self, done: int, of: int) -> None:
        self._show(f"iterations of the model: {done} of {of}")

    def end(self) -> None:
        self._show("")

    def _show(self, text: str) -> None:
        if sys.stderr.isatty():
            print(f"\r{text:<50}\r{text}", end="", file=sys.stderr, flush=True)


def _named(device: str) -> str:
    if device.startswith("cuda"):
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"the CPU with {threads} thread{'s' * (threads > 1)}"


def _facts(
    arguments: argparse.Namespace, model: Model, device: str, factor: float, gain: Gain
) -> dict[str, Any]:
    return {
        "model": model.name,
        "parameters": model.parameters,
        "optimizer": arguments.optimizer,
        "weights": arguments.weights,
        "device": _named(device),
        "torch": torch.__version__,
        "multiplied_by": factor,
        "ms": gain.ms,
        "fastest_other": gain.other,
        "saved_ms": gain.saved_ms,
        "iteration_ms": gain.iteration_ms,
        "share": gain.share,
        "sentence": gain.sentence(),
        "notes": gain.notes,
    }


def _plot(path: Path, model: Model, gain: Gain) -> None:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError("--plot needs matplotlib: pip install matplotlib") from None
    figure = Figure(figsize=(8, 1.5 + 0.5 * len(gain.ms)), layout="constrained")
    axes = figure.subplots()
    names = list(gain.ms)[::-1]
    bars = axes.barh(names, [gain.ms[name] for name in names])
    axes.bar_label(bars, fmt="%.2f")
    title = f"{gain.optimizer}, {model.name}\n{gain.sentence()}"
    axes.set(xlabel="milliseconds a step", title=title)
    figure.savefig(path)
