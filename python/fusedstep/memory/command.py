"""The command line: ``python -m fusedstep memory MODEL``."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

import torch

from fusedstep.memory.activations import Activations, trace
from fusedstep.memory.model import Model, load
from fusedstep.memory.plan import MASTERS, STATE_DTYPES, Choice, Run, accepted, choices, need
from fusedstep.memory.report import Row, as_json, bars, plot, size, table

_DTYPES = {name: getattr(torch, name) for name in ("float32", "float64", "bfloat16", "float16")}

#: Short names of dtypes.
_SHORT = {"fp32": "float32", "fp64": "float64", "bf16": "bfloat16", "fp16": "float16"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="a parameter count (124M), a Hugging Face config.json, or package.module:factory",
    )
    add = parser.add_argument_group("the optimizer").add_argument
    add(
        "--optimizer",
        action="append",
        default=[],
        metavar="NAME[:OPTION=VALUE,...]",
        help="an optimizer to compare, as SGD:momentum=0.9; may be repeated (default: all)",
    )
    add(
        "--states",
        action="append",
        default=[],
        type=lambda text: _SHORT.get(text, text),
        choices=[kind for kind in STATE_DTYPES if accepted(states=kind)],
        help="a dtype of the states; may be repeated (default: all that the optimizer accepts)",
    )
    add(
        "--masters",
        default="none",
        choices=[kind for kind in MASTERS if accepted(masters=kind)],
        help="master weights (default: none)",
    )
    add(
        "--rank",
        type=_positive,
        default=128,
        metavar="R",
        help="of the projections of GaLore and APOLLO (default: 128)",
    )
    add = parser.add_argument_group("the run").add_argument
    add(
        "--weights",
        type=_dtype,
        default="float32",
        metavar="DTYPE",
        help="their dtype: float32, bfloat16, float16 or float64, or fp32, bf16, fp16 or fp64 "
        "(default: float32)",
    )
    add(
        "--gradients",
        type=_dtype,
        metavar="DTYPE",
        help="their dtype (default: that of the weights)",
    )
    add(
        "--autocast",
        type=_dtype,
        metavar="DTYPE",
        help="the dtype that autocast computes in: bfloat16 or float16",
    )
    add("--inference", action="store_true", help="only a forward")
    add("--accumulate", action="store_true", help="gradients are kept from backward to backward")
    add("--zero", type=int, default=0, choices=range(4), help="stage of ZeRO (default: 0)")
    add("--ranks", type=_positive, default=1, metavar="N", help="processes (default: 1)")
    add = parser.add_argument_group("activations, of a config.json or a factory").add_argument
    add("--batch", type=_positive, metavar="N", help="samples on each rank")
    add("--sequence", type=_positive, metavar="N", help="tokens in a sample")
    add("--input", type=_shape, metavar="NxNxN", help="the shape of a batch that is no tokens")
    add("--checkpointing", action="store_true", help="blocks are computed again in the backward")
    add(
        "--attention",
        default="flash",
        choices=("flash", "eager"),
        help="flash keeps no matrix of attention for the backward, eager does (default: flash)",
    )
    add = parser.add_argument_group("the report").add_argument
    add("--fit", type=_bytes, metavar="24GiB", help="tell which choices fit into so much memory")
    add("--json", action="store_true", help="print JSON")
    add("--plot", type=Path, metavar="FILE.svg", help="draw the bars into a file, by matplotlib")


def run(arguments: argparse.Namespace) -> None:
    """Prints what a run needs.

    Raises:
        ValueError: if an argument cannot be followed; the text names it.
    """
    plan = Run(
        weights=_DTYPES[arguments.weights],
        gradients=_DTYPES.get(arguments.gradients),
        masters=arguments.masters,
        autocast=_DTYPES.get(arguments.autocast),
        inference=arguments.inference,
        accumulate=arguments.accumulate,
        zero=arguments.zero,
        ranks=arguments.ranks,
        rank=arguments.rank,
    )
    if plan.autocast and plan.autocast.itemsize > 2:
        raise ValueError(f"--autocast must be bfloat16 or float16, not {arguments.autocast}")
    if plan.masters != "none" and plan.weights.itemsize > 2:
        raise ValueError("--masters needs --weights bfloat16 or float16")
    if plan.zero and plan.ranks == 1:
        raise ValueError("--zero needs --ranks")
    model = load(arguments.model, arguments.attention)
    activations = _activations(arguments, model, plan)
    left_out: list[str] = []
    rows = _rows(arguments, model, plan, activations, left_out)
    facts = _facts(arguments, model, activations) | ({"left_out": left_out} if left_out else {})
    if arguments.plot:
        plot(arguments.plot, model.name, rows, arguments.fit)
    if arguments.json:
        print(as_json(facts, rows, arguments.fit))
        return
    text = f"{model.name}: {model.parameters:,} parameters"
    if model.frozen:
        text += f", {model.frozen:,} of them frozen"
    if activations:
        text += f"; activations at their highest: {size(activations.highest)}"
    if plan.ranks > 1:
        text += f"; on each of {plan.ranks} ranks, ZeRO {plan.zero}"
    print(f"{text}\n\n{table(rows, arguments.fit, plan.inference)}")
    if not plan.inference:
        print(f"\n{bars(rows, arguments.fit)}")
    for each in left_out:
        print(f"left out: {each}")


def _rows(
    arguments: argparse.Namespace,
    model: Model,
    plan: Run,
    activations: Activations | None,
    left_out: list[str],
) -> list[Row]:
    chosen = choices(arguments.optimizer, arguments.states, plan, left_out)
    if plan.inference:
        chosen = iter([Choice("none", {}, "default")])
    stages = [stage for stage in range(4) if stage != plan.zero] if plan.ranks > 1 else []
    rows = [
        Row(
            choice,
            need(model, plan, choice, activations),
            {
                stage: need(model, plan._replace(zero=stage), choice, activations).total
                for stage in stages
            },
        )
        for choice in chosen
    ]
    return sorted(rows, key=lambda row: row.need.total)


def _activations(arguments: argparse.Namespace, model: Model, plan: Run) -> Activations | None:
    if not (arguments.batch or arguments.input):
        for name in ("sequence", "checkpointing"):
            if getattr(arguments, name):
                raise ValueError(f"--{name} needs --batch")
        return None
    if model.make is None:
        given = "--batch" if arguments.batch else "--input"
        raise ValueError(f"{given}: a parameter count does not tell the activations")
    if arguments.batch and arguments.input:
        raise ValueError("--batch and --input exclude each other")
    if arguments.batch and not arguments.sequence:
        raise ValueError("--batch needs --sequence")
    try:
        return trace(
            model.make,
            arguments.input or (arguments.batch, arguments.sequence),
            tokens=not arguments.input,
            dtype=plan.weights,
            autocast=plan.autocast,
            attention=arguments.attention,
            checkpointing=arguments.checkpointing,
            inference=plan.inference,
        )
    except Exception as error:  # whatever the model's own code raises
        first = str(error).strip().splitlines()
        text = f"{type(error).__name__}: {first[0] if first else ''}"
        raise ValueError(
            f"the activations of MODEL {model.name} cannot be found: {text}. Leave out --batch "
            "and --input to see weights, states and gradients"
        ) from error


def _facts(
    arguments: argparse.Namespace, model: Model, activations: Activations | None
) -> dict[str, Any]:
    given = {
        name: value
        for name, value in vars(arguments).items()
        if name not in ("model", "optimizer", "states", "json", "plot", "command", "fit")
    }
    return {
        "model": model.name,
        "parameters": model.parameters,
        "trained": model.trained_elements,
        "arguments": given,
        "highest_activations": activations.highest if activations else None,
    } | ({"limit": arguments.fit} if arguments.fit else {})


def _dtype(text: str) -> str:
    name = _SHORT.get(text, text)
    if name not in _DTYPES:
        known = ", ".join(f"{long} ({short})" for short, long in _SHORT.items())
        raise argparse.ArgumentTypeError(f"must be one of {known}, not {text!r}")
    return name


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a number above 0, not {text!r}")
    return int(text)


def _shape(text: str) -> tuple[int, ...]:
    return tuple(_positive(each) for each in text.lower().split("x"))


def _bytes(text: str) -> int:
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*(?:([KMGT])(i?)B?|B)", text, re.IGNORECASE)
    if not match:
        raise argparse.ArgumentTypeError(f"must be a size as 24GiB or 24GB, not {text!r}")
    power = " KMGT".index(match[2].upper()) if match[2] else 0
    return int(float(match[1]) * (1024 if match[3] else 1000) ** power)
