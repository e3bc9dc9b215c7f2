"""The command line: ``python -m fusedstep memory MODEL``."""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path
from typing import Any

import torch

from fusedstep.memory.activations import Activations, trace
from fusedstep.memory.fit import Given, search
from fusedstep.memory.model import Model, load
from fusedstep.memory.plan import (
    MASTERS,
    STATE_DTYPES,
    Choice,
    Run,
    accepted,
    choices,
    need,
    parse,
)
from fusedstep.memory.report import (
    Row,
    as_json,
    bars,
    code_of_ways,
    label,
    named,
    plot,
    size,
    table,
    table_of_ways,
    ways_as_json,
)

DTYPES = {name: getattr(torch, name) for name in ("float32", "float64", "bfloat16", "float16")}

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
        type=lambda text: _SHORT.get(text, text),
        choices=[kind for kind in MASTERS if accepted(masters=kind)],
        help="master weights (default: none)",
    )
    add(
        "--rank",
        type=positive,
        metavar="R",
        help="of the projections of GaLore and APOLLO (default: 128; --fit tries a quarter of the "
        "matrices too)",
    )
    add = parser.add_argument_group("the run").add_argument
    add(
        "--weights",
        type=dtype,
        metavar="DTYPE",
        help="their dtype: float32, bfloat16, float16 or float64, or fp32, bf16, fp16 or fp64 "
        "(default: float32; --fit tries bfloat16 too)",
    )
    add(
        "--gradients",
        type=dtype,
        metavar="DTYPE",
        help="their dtype (default: that of the weights)",
    )
    add(
        "--autocast",
        type=dtype,
        metavar="DTYPE",
        help="the dtype that autocast computes in: bfloat16 or float16",
    )
    add("--inference", action="store_true", help="only a forward")
    add("--accumulate", action="store_true", help="gradients are kept from backward to backward")
    add("--zero", type=int, default=0, choices=range(4), help="stage of ZeRO (default: 0)")
    add("--ranks", type=positive, default=1, metavar="N", help="processes (default: 1)")
    add = parser.add_argument_group("activations, of a config.json or a factory").add_argument
    add("--batch", type=positive, metavar="N", help="samples on each rank")
    add("--sequence", type=positive, metavar="N", help="tokens in a sample")
    add("--input", type=_shape, metavar="NxNxN", help="the shape of a batch that is no tokens")
    add("--checkpointing", action="store_true", help="blocks are computed again in the backward")
    add(
        "--attention",
        default="flash",
        choices=("flash", "eager"),
        help="flash keeps no matrix of attention for the backward, eager does (default: flash)",
    )
    add = parser.add_argument_group(
        "--fit: search for the best ways that fit, and print their lines of code"
    ).add_argument
    add(
        "--fit",
        type=_bytes,
        metavar="SIZE",
        help="the memory of each GPU. 24GiB is 24 * 1024**3 bytes, 24GB is 24 * 1000**3, which is "
        "22.4 GiB: a card that is sold with 24 GB has 24 GiB. What other arguments say is kept, "
        "all else is searched",
    )
    add(
        "--headroom",
        type=_bytes,
        default=2**30,
        metavar="SIZE",
        help="left of --fit for the CUDA context, for workspaces of libraries, and for unused "
        "parts of the allocator's blocks (default: 1GiB)",
    )
    add("--lora", type=positive, metavar="R", help="rank of LoRA's adapters (default: 64, 16, 8)")
    add(
        "--bucket-cap-mb",
        type=float,
        default=25.0,
        metavar="MIB",
        help="of step_in_backward and offload (default: 25)",
    )
    add = parser.add_argument_group("the report").add_argument
    add("--json", action="store_true", help="print JSON")
    add("--plot", type=Path, metavar="FILE.svg", help="draw the bars into a file, by matplotlib")


def run(arguments: argparse.Namespace) -> None:
    """Prints what a run needs.

    Raises:
        ValueError: if an argument cannot be followed; the text names it.
    """
    plan = Run(
        weights=DTYPES[arguments.weights or "float32"],
        gradients=DTYPES.get(arguments.gradients),
        masters=arguments.masters or "none",
        autocast=DTYPES.get(arguments.autocast),
        inference=arguments.inference,
        accumulate=arguments.accumulate,
        zero=arguments.zero,
        ranks=arguments.ranks,
        rank=arguments.rank or 128,
    )
    if plan.autocast and plan.autocast.itemsize > 2:
        raise ValueError(f"--autocast must be bfloat16 or float16, not {arguments.autocast}")
    if plan.masters != "none" and plan.weights.itemsize > 2 and not arguments.fit:
        raise ValueError("--masters needs --weights bfloat16 or float16")
    if plan.zero and plan.ranks == 1:
        raise ValueError("--zero needs --ranks")
    model = load(arguments.model, arguments.attention)
    if arguments.fit:
        _run_fit(arguments, model, plan)
    else:
        _run_table(arguments, model, plan)


def _run_table(arguments: argparse.Namespace, model: Model, plan: Run) -> None:
    activations = _activations(arguments, model, plan, arguments.checkpointing)
    left_out: list[str] = []
    rows = _rows(arguments, model, plan, activations, left_out)
    highest = activations.highest if activations else None
    facts = _facts(arguments, model) | {"highest_activations": highest}
    facts |= {"left_out": left_out} if left_out else {}
    if arguments.plot:
        plot(arguments.plot, model.name, named(rows), None)
    if arguments.json:
        print(as_json(facts, rows))
        return
    text = _title(model, plan)
    if activations:
        text += f"; activations at their highest: {size(activations.highest)}"
    print(f"{text}\n\n{table(rows, plan.inference)}")
    if not plan.inference:
        print(f"\n{bars(named(rows), None)}")
    for each in left_out:
        print(f"left out: {each}")


def _run_fit(arguments: argparse.Namespace, model: Model, plan: Run) -> None:
    for name in ("inference", "gradients"):
        if getattr(arguments, name):
            raise ValueError(f"--fit does not take --{name}")
    if plan.zero == 1:
        raise ValueError("--fit shards by fully_shard: --zero 2 or 3, not 1")
    if plan.ranks > 1 and not plan.zero:
        plan = plan._replace(zero=3)
    parsed = [Choice(*parse(text), "default") for text in arguments.optimizer]
    for choice in parsed:
        list(choices([label(choice)], [], plan._replace(masters="none")))
    given = Given(
        tuple(parsed),
        weights=DTYPES.get(arguments.weights),
        masters=arguments.masters,
        states=tuple(arguments.states),
        rank=arguments.rank,
        adapters=arguments.lora,
        checkpointing=arguments.checkpointing,
        bucket_cap_mb=arguments.bucket_cap_mb,
    )
    _activations_given(arguments, model)
    is_shown = sys.stderr.isatty()

    def trace_of(adapted: Model, run: Run, checkpointing: bool) -> Activations | None:
        if is_shown:
            print(".", end="", file=sys.stderr, flush=True)
        return _activations(arguments, adapted, run, checkpointing)

    found = search(model, plan, given, arguments.fit - arguments.headroom, trace_of)
    if is_shown:
        print(file=sys.stderr)
    shown = found.best or [found.smallest]
    if arguments.plot:
        needs = {fit.way.title: fit.need for fit in shown}
        plot(arguments.plot, model.name, needs, arguments.fit)
    if arguments.json:
        facts = {"limit": arguments.fit, "headroom": arguments.headroom}
        print(ways_as_json(_facts(arguments, model) | facts, found))
        return
    print(_title(model, plan))
    into = f"{size(arguments.fit)} with {size(arguments.headroom)} left (--headroom)"
    if found.best:
        print(f"\nThese fit into {into}, the best first:\n")
    else:
        print(f"\nNothing fits into {into}. The smallest way:\n")
    print(table_of_ways(shown))
    if not (arguments.batch or arguments.input):
        more = "--batch and --sequence" if model.make else "a config.json, --batch and --sequence"
        print(f"\nActivations are not in it: give {more}.")
    for note in found.notes:
        print(f"\nNot searched: {note}.")
    print(f"\nCode, for a model and a learning rate lr:\n\n{code_of_ways(shown)}")


def _title(model: Model, plan: Run) -> str:
    text = f"{model.name}: {model.parameters:,} parameters"
    if model.frozen:
        text += f", {model.frozen:,} of them frozen"
    if plan.ranks > 1:
        text += f"; on each of {plan.ranks} ranks, ZeRO {plan.zero}"
    return text


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


def _activations_given(arguments: argparse.Namespace, model: Model) -> bool:
    """Returns whether the shape of a batch is given; raises what is wrong with it."""
    if not (arguments.batch or arguments.input):
        for name in ("sequence", "checkpointing"):
            if getattr(arguments, name):
                raise ValueError(f"--{name} needs --batch")
        return False
    if model.make is None:
        given = "--batch" if arguments.batch else "--input"
        raise ValueError(f"{given}: a parameter count does not tell the activations")
    if arguments.batch and arguments.input:
        raise ValueError("--batch and --input exclude each other")
    if arguments.batch and not arguments.sequence:
        raise ValueError("--batch needs --sequence")
    return True


def _activations(
    arguments: argparse.Namespace, model: Model, plan: Run, checkpointing: bool
) -> Activations | None:
    if not _activations_given(arguments, model):
        return None
    assert model.make is not None
    try:
        return trace(
            model.make,
            arguments.input or (arguments.batch, arguments.sequence),
            tokens=not arguments.input,
            dtype=plan.weights,
            autocast=plan.autocast,
            attention=arguments.attention,
            checkpointing=checkpointing,
            inference=plan.inference,
            trained=plan.trained,
            bucket=plan.bucket,
        )
    except Exception as error:  # whatever the model's own code raises
        first = str(error).strip().splitlines()
        text = f"{type(error).__name__}: {first[0] if first else ''}"
        raise ValueError(
            f"the activations of MODEL {model.name} cannot be found: {text}. Leave out --batch "
            "and --input to see weights, states and gradients"
        ) from error


def _facts(arguments: argparse.Namespace, model: Model) -> dict[str, Any]:
    hidden = ("model", "optimizer", "states", "json", "plot", "command", "fit", "headroom")
    return {
        "model": model.name,
        "parameters": model.parameters,
        "trained": model.trained_elements,
        "arguments": {k: value for k, value in vars(arguments).items() if k not in hidden},
    }


def dtype(text: str) -> str:
    name = _SHORT.get(text, text)
    if name not in DTYPES:
        known = ", ".join(f"{long} ({short})" for short, long in _SHORT.items())
        raise argparse.ArgumentTypeError(f"must be one of {known}, not {text!r}")
    return name


def positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a number above 0, not {text!r}")
    return int(text)


def _shape(text: str) -> tuple[int, ...]:
    return tuple(positive(each) for each in text.lower().split("x"))


def _bytes(text: str) -> int:
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*(?:([KMGT])(i?)B?|B)", text, re.IGNORECASE)
    if not match:
        raise argparse.ArgumentTypeError(f"must be a size as 24GiB or 24GB, not {text!r}")
    power = " KMGT".index(match[2].upper()) if match[2] else 0
    return int(float(match[1]) * (1024 if match[3] else 1000) ** power)
