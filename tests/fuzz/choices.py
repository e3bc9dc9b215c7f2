"""Draws a case from a seed. A case is plain data, as JSON has it: `./run.sh fuzz --case` takes it.

    seed, row, options, groups: [{options, weights: [weight]}], steps: [step], settings
    weight      id, dtype, shape; strides, offset, values if they are not the usual ones
    step        n, changes: [{do, …}], grads: {id: gradient}, call: {…}
    gradient    how (new, refill, keep, none, share), strides, offset, values, of
    settings    [[instruction set, threads]]: the first is compared with float64, the others with it

What is not given is the default: contiguous memory, ordinary numbers, a plain `step()`.
"""

from __future__ import annotations

import inspect
import math
import random
from typing import Any

from fuzz.memory import DTYPES, overlaps
from support.cases import PLAIN
from support.layouts import contiguous_strides

ROWS = {row.name: row for row in PLAIN}

MOST_COUNT = 2**24 - 200
"""Step counts are float32, and stand still at 2^24."""

#: Values that an option may have, by its name.
BY_NAME: dict[str, tuple] = {
    "lr": (1e-3, 1e-2, 0.1, 0.0, 1.0, {"tensor": 0.02}),
    "alpha": (0.99, 0.9, 0.5, 0.0),
    "momentum": (0.0, 0.0, 0.9, 0.3),
    "dampening": (0.0, 0.5),
    "eps": (1e-8, 1e-6, 1e-3, 1e-10),
    "weight_decay": (0.0, 0.0, 0.01, 0.3),
    "rho": (0.9, 0.99, 0.5),
    "etas": ([0.5, 1.2], [0.25, 2.0]),
    "step_sizes": ([1e-6, 50.0], [1e-3, 0.1]),
    "lr_decay": (0.0, 0.01, 0.5),
    "initial_accumulator_value": (0.0, 0.1, 2.0),
    "max_grad_norm": (0.1, 1.0, 100.0),
    "max_weight_norm": (math.inf, 10.0, 0.5),
    "min_ratio": (0.0, 0.01, 0.5),
    "max_ratio": (math.inf, 1.0, 10.0),
    "variant": ("paper", "apex", "nvlamb", "timm", "deepspeed", "cybertron"),
    "debias": (True, False, "lr"),
    "state_dtype": (None, "float32"),
    "rounding": (None,),
    "seed": (0, 7, 2**63 - 1),
    "fused": (None, True),
    "differentiable": (False,),
}
BETAS = (0.9, 0.99, 0.999, 0.5, 0.0)

#: Arguments that are set together: ways to keep states and weights in fewer bits.
WAYS = ("state_dtype", "master_weights", "rounding", "seed")
CODES = ("int8", "int4", "fp8")
#: Ways for weights in bfloat16, or of more than 16 bits.
BFLOAT16_WAYS = ({"master_weights": "split"}, {"rounding": "kahan"}, {"rounding": "stochastic"})

#: Options without a value that is the same for all groups, or that the states depend on.
ONLY_AT_FIRST = {"variant", "max_grad_norm", "skip_nonfinite", "differentiable", *WAYS}

#: Arguments that a constructor needs beside an option that is set.
NEEDS = {"nesterov": {"momentum": 0.9, "dampening": 0.0}}

#: Options that are None unless given, and then True or False.
FLAGS = {"decoupled_decay", "always_adapt"}


def values_of(name: str, default: Any) -> tuple:
    """Values that an option may have: by its name, else by the kind of its default."""
    if name in BY_NAME:
        return BY_NAME[name]
    if name == "foreach":  # true asks for torch operations, but where it is the default
        return (True, False) if default else (None, False)
    if isinstance(default, bool) or name in FLAGS:
        return (False, True)
    if isinstance(default, float):
        return (default, 2 * default + 1, default / 2)
    raise LookupError(f"tests/fuzz/choices.py has no values for the option {name!r}")


def options_of(row: Any) -> dict[str, Any]:
    """The options of an optimizer with their defaults."""
    parameters = inspect.signature(row.optimizer).parameters
    return {name: each.default for name, each in parameters.items() if name != "params"}


def draw(seed: int) -> dict[str, Any]:
    """The case of a seed: the same each time."""
    return _Chooser(seed).case()


class _Chooser:
    def __init__(self, seed: int):
        self._seed = seed
        self._random = random.Random(seed)
        self._next_id = 0

    def _chance(self, share: float) -> bool:
        return self._random.random() < share

    def _one_of(self, *choices: Any) -> Any:
        return self._random.choice(choices)

    def case(self) -> dict[str, Any]:
        self._row = ROWS[self._one_of(*ROWS)]
        self._defaults = options_of(self._row)
        self._elements = self._one_of(300, 3_000, 20_000, 60_000)
        several = self._one_of(1, 1, 1, 2, 3)
        count = self._one_of(*[self._random.randint(1, 4)] * 5, self._random.randint(5, 150))
        self._dtypes = [self._one_of(*DTYPES)] if self._chance(0.6) else [*DTYPES]
        options = self._options(self._defaults, 0.5) | self._ways()
        for name in NEEDS.keys() & options.keys():
            options |= NEEDS[name] if options[name] else {}
        groups = [self._group(max(1, count // several)) for _ in range(several)]
        groups[0]["options"] = {}
        self._weights = [weight for group in groups for weight in group["weights"]]
        self._groups = len(groups)
        self._known: dict[int, dict] = {}
        steps = [self._step(n) for n in range(1, 1 + self._random.randint(1, 9))]
        settings = [[self._random.randrange(3), self._random.randint(1, 5)] for _ in range(2)]
        return {
            "seed": self._seed,
            "row": self._row.name,
            "options": options,
            "groups": groups,
            "steps": steps,
            "settings": [[0, self._random.randint(1, 5)], *settings],
        }

    # Options

    def _options(self, names: Any, share: float) -> dict[str, Any]:
        return {name: self._option(name) for name in names if self._chance(share)}

    def _option(self, name: str) -> Any:
        if name == "betas":
            return [self._one_of(*BETAS) for _ in self._defaults["betas"]]
        return self._one_of(*values_of(name, self._defaults[name]))

    def _ways(self) -> dict[str, Any]:
        """Codes for the states, or a way to keep more of a weight than it has bits for."""
        if self._chance(0.6) or "state_dtype" not in self._defaults:
            return {}
        found = {"state_dtype": self._one_of(*CODES)} if self._chance(0.6) else {}
        if not found or self._chance(0.4):
            self._dtypes = self._one_of(["bfloat16"], ["bfloat16", "float32"])
            found |= {"master_weights": False} | self._one_of(*BFLOAT16_WAYS)
        return found

    def _later_option(self) -> tuple[str, Any]:
        names = [name for name in self._defaults if name not in ONLY_AT_FIRST]
        name = self._one_of("lr", *names)
        return name, self._option(name)

    # Memory

    def _group(self, count: int) -> dict[str, Any]:
        later = [name for name in self._defaults if name not in ONLY_AT_FIRST]
        return {
            "options": self._options(later, 0.2),
            "weights": [self._weight(self._elements // count) for _ in range(count)],
        }

    def _weight(self, most: int) -> dict[str, Any]:
        self._next_id += 1
        shape = self._shape(most)
        weight = {"id": self._next_id, "dtype": self._one_of(*self._dtypes), "shape": shape}
        weight |= self._layout(shape)
        if self._chance(0.3):
            weight["values"] = self._one_of("wide", "holes", "equal", "zero")
        return weight

    def _shape(self, most: int) -> list[int]:
        kind = self._random.random()
        if kind < 0.05:
            return self._one_of([], [1], [1, 1], [0], [3, 0], [0, 2])
        if kind < 0.35:
            return [self._random.randint(1, max(1, most))]
        shape = []
        for _ in range(self._one_of(2, 2, 2, 3, 4, 5)):
            shape.append(min(self._random.randint(1, self._one_of(4, 40, 400)), max(1, most)))
            most //= shape[-1]
        self._random.shuffle(shape)
        return shape

    def _layout(self, shape: list[int], usual: float = 0.5) -> dict[str, Any]:
        """Memory without overlaps: in any order, with gaps, or interleaved."""
        if self._chance(usual):
            return {}
        order = [*range(len(shape))]
        if self._chance(0.6):
            self._random.shuffle(order)
        gaps, steps = [0] * len(shape), [1] * len(shape)
        if self._chance(0.6):
            gaps = [self._one_of(0, 0, 1, 5) for _ in shape]
            steps = [self._one_of(1, 1, 2, 3) for _ in shape]
        strides, extent = [0] * len(shape), 1
        for dim in reversed(order):
            strides[dim] = extent * steps[dim]
            extent *= max(shape[dim], 1) * steps[dim] + gaps[dim]
        if self._chance(0.15) and math.prod(shape) <= 2_000:  # dimensions that do not nest
            other = [self._random.randint(1, 2 * math.prod(shape) + 1) for _ in shape]
            strides = strides if overlaps(shape, other) else other
        if extent > 20 * math.prod(shape) + 1_000:
            return {}
        return {"strides": strides, "offset": self._one_of(0, 0, 1, 3)}

    def _gradient(self, weight: dict[str, Any]) -> dict[str, Any]:
        shape, known = weight["shape"], self._known.get(weight["id"])
        kind = self._random.random()
        if known and kind < 0.6:
            return {"how": "refill"} | self._values()
        if kind < 0.65:
            return {"how": "none"}
        if known and kind < 0.7:
            return {"how": "keep"}
        alike = [
            other["id"]
            for other in self._weights
            if other["id"] != weight["id"]
            and (other["dtype"], other["shape"]) == (weight["dtype"], shape)
        ]
        if alike and kind < 0.72:
            return {"how": "share", "of": self._one_of(*alike)}
        gradient = {"how": "new"} | self._values()
        if kind < 0.85:
            like = {key: weight[key] for key in ("strides", "offset") if key in weight}
            gradient |= like if self._chance(0.7) else {}
        else:
            gradient |= self._layout(shape, 0.1)
            if self._chance(0.3):  # expanded, or sliding windows
                strides = gradient.get("strides", contiguous_strides(shape))
                gradient["strides"] = [self._one_of(s, s, 0, min(s, 1)) for s in strides]
        self._known[weight["id"]] = gradient
        return gradient

    def _values(self) -> dict[str, str]:
        if self._chance(0.7):
            return {}
        return {"values": self._one_of("wide", "holes", "equal", "zero")}

    # Steps

    def _step(self, n: int) -> dict[str, Any]:
        many = len(self._weights) > 20
        step: dict[str, Any] = {"n": n, "changes": [], "grads": {}, "call": {}}
        if n > 1 and self._chance(0.4):
            step["changes"] = [self._change() for _ in range(self._random.randint(1, 3))]
        apart = random.Random(f"order {self._seed} {n}")  # a seed draws all else as it did before
        if n > 1 and apart.random() < 0.2:
            step["changes"].append({"do": ORDER, "group": apart.randrange(self._groups)})
        for weight in self._weights:
            gradient = self._gradient(weight)
            if many and n > 1 and gradient["how"] == "refill":
                gradient = {"how": "keep"} if self._chance(0.5) else gradient
            step["grads"][str(weight["id"])] = gradient
        if self._chance(0.3):
            step["call"] = self._call()
        return step

    def _call(self) -> dict[str, Any]:
        call: dict[str, Any] = {}
        if self._chance(0.4):
            call["max_norm"] = self._one_of(0.0, 0.01, 1.0, 100.0)
        if self._chance(0.2):
            call["closure"] = self._one_of("none", "loss")
        if self._chance(0.4):
            call["zero_grad"] = self._one_of(True, "none")
        if self._chance(0.4):
            call["scale"] = self._one_of(1.0, 2.0, 65536.0, 3.0)
            call["found_inf"] = self._chance(0.3)
        return call

    def _change(self) -> dict[str, Any]:
        weight = self._one_of(*self._weights)
        change: dict[str, Any] = {"do": self._one_of(*CHANGES)}
        kind = change["do"]
        if kind == "option":
            name, value = self._later_option()
            return change | {"group": self._random.randrange(self._groups), "name": name,
                             "value": value}  # fmt: skip
        if kind == "group":
            group = self._group(self._random.randint(1, 3))
            self._weights += group["weights"]
            self._groups += 1
            return change | {"of": group}
        if kind in ("load", "copy", "pickle", "zero_grad"):
            if kind == "copy":
                self._known.clear()
            return change
        change["weight"] = weight["id"]
        if kind in ("layout", "place_state"):
            change |= self._layout(weight["shape"], 0.2)
        elif kind == "count":
            change["value"] = self._one_of(0, 1, 10, 1000, 10**6, MOST_COUNT)
        elif kind in ("weight", "scale_state"):
            change["factor"] = self._one_of(0.5, 2.0, 0.0, 1.25)
        return change


#: The change that reverses the weights of a group.
ORDER = "order"

#: Other changes that may happen between steps; `run.py` has a function for each.
CHANGES = (
    "option", "option", "option", "layout", "data", "weight", "place_state", "scale_state",
    "drop_state", "drop_states", "count", "load", "copy", "pickle", "group", "freeze", "zero_grad",
)  # fmt: skip
