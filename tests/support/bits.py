"""Records the bits that steps leave behind, to prove that a change of the code changes none.

A record has a digest for every row of the case table, dtype, instruction set and kind of operands,
of the weights, of each state and of the gradients. The tests hold all of these to laws; a record
holds them to another commit.
"""

import argparse
import hashlib
import inspect
import itertools
import json
import os
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# Threads that wait for one another must not spin: others have the CPUs, too.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch
from torch import Tensor

import fusedstep
from support.cases import CASES, DTYPES, LOW_PRECISION, Case
from support.layouts import WEIGHT_LAYOUTS
from support.stepping import bits, forced_isa, make_gradients, make_weights

STEPS = 4
OTHER_LR_AT = 3

# Less than a vector up to several chunks.
DENSE = ((), (0,), (1,), (33,), (61, 3), (129, 150), (32_773,))
LAYOUTS = {layout.name: layout for layout in WEIGHT_LAYOUTS}


@dataclass(frozen=True)
class Kind:
    layouts: tuple[str, ...] = ()
    """Names of layouts. Without any the weights are dense, of the shapes above."""
    like_weights: bool = False
    """Gradients have the strides of their weights; otherwise they are contiguous."""
    options: dict[str, Any] = field(default_factory=dict)
    step_options: dict[str, Any] = field(default_factory=dict)
    dtypes: tuple[torch.dtype, ...] = DTYPES
    devices: tuple[str, ...] = ("cpu", "cuda")


STRIDED = ("sliced columns", "every second column", "narrow rows")
KINDS = {
    "contiguous": Kind(),
    "transposed": Kind(("transposed", "channels-last"), like_weights=True),
    "strided": Kind(STRIDED),
    "clipped": Kind(step_options={"max_norm": 0.5}),
    "float32-states": Kind(options={"state_dtype": torch.float32}, dtypes=LOW_PRECISION),
    "master-weights": Kind(options={"master_weights": True}, dtypes=LOW_PRECISION),
    "master-weights-strided": Kind(STRIDED, options={"master_weights": True}, dtypes=LOW_PRECISION),
    # The step count is on the device, and so the numbers of a step are prepared there.
    "capturable": Kind(options={"capturable": True}, devices=("cuda",)),
}


def place(values: Tensor, layout: str | None, device: str) -> Tensor:
    return LAYOUTS[layout].place(values).to(device).view if layout else values.to(device)


def digests(case: Case, dtype: torch.dtype, device: str, kind: Kind) -> dict[str, str]:
    """Digests of all weights, of all states of a name and of all gradients after some steps."""
    layouts = kind.layouts or (None,) * len(DENSE)
    shapes = tuple(LAYOUTS[name].shape for name in kind.layouts) or DENSE
    weights = make_weights(shapes, dtype)
    params = [
        torch.nn.Parameter(place(weight, layout, device))
        for weight, layout in zip(weights, layouts, strict=True)
    ]
    optimizer = case.build(params, **kind.options)
    for step in range(1, STEPS + 1):
        if step == OTHER_LR_AT:
            optimizer.param_groups[0]["lr"] *= 0.5
        gradients = make_gradients(shapes, dtype, step)
        for param, gradient, layout in zip(params, gradients, layouts, strict=True):
            param.grad = place(gradient, layout if kind.like_weights else None, device)
        optimizer.step(**kind.step_options)
    parts = defaultdict(hashlib.sha256)
    for param in params:
        for name, tensor in {
            "weight": param, "gradient": param.grad, **optimizer.state[param]
        }.items():  # fmt: skip
            parts[name].update(f"{tensor.dtype} {tuple(tensor.shape)} ".encode())
            parts[name].update(bits(tensor).cpu().numpy().tobytes())
    return {name: part.hexdigest()[:16] for name, part in parts.items()}


def isas(device: str) -> Iterator[str]:
    """Names what runs the kernels, and has it run them until the next is asked for."""
    if device != "cpu":
        yield device
        return
    for isa in fusedstep.isas():
        with forced_isa(isa):
            yield isa


def exists(case: Case, dtype: torch.dtype, device: str, kind: Kind) -> bool:
    options = inspect.signature(case.optimizer).parameters
    return dtype in kind.dtypes and device in kind.devices and kind.options.keys() <= options.keys()


def record(device: str) -> dict[str, str]:
    found = {}
    for isa in isas(device):
        for case, dtype, (name, kind) in itertools.product(CASES, DTYPES, KINDS.items()):
            if exists(case, dtype, device, kind):
                key = f"{case}/{str(dtype).removeprefix('torch.')}/{isa}/{name}"
                for part, digest in digests(case, dtype, device, kind).items():
                    found[f"{key}/{part}"] = digest
    return found


def compare(found: dict[str, str], baseline: dict[str, str]) -> list[str]:
    """Says what of the baseline is missing or different."""
    missing = [f"missing    {key}" for key in baseline if key not in found]
    both = [key for key in baseline if key in found]
    return missing + [f"different  {key}" for key in both if found[key] != baseline[key]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("out", type=Path, help="the JSON file to write")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--compare", type=Path, metavar="BASELINE", help="an earlier record")
    arguments = parser.parse_args()
    found = record(arguments.device)
    arguments.out.write_text(json.dumps(found, indent=0) + "\n")
    print(f"{len(found)} digests in {arguments.out}")
    if arguments.compare:
        baseline = json.loads(arguments.compare.read_text())
        if problems := compare(found, baseline):
            sys.exit("\n".join(problems))
        print(f"the same bits as the {len(baseline)} of {arguments.compare}")


if __name__ == "__main__":
    main()
