"""Searches for the ways to train that fit into a memory, and writes the lines of code of each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from fusedstep import optim
from fusedstep.memory.activations import Activations
from fusedstep.memory.model import Model, with_adapters
from fusedstep.memory.plan import (
    MASTERS,
    NO_SCRATCH,
    STATE_DTYPES,
    Choice,
    Need,
    Run,
    Scratch,
    has_rank,
    kinds,
    need,
)
from fusedstep.memory.scratch import is_composite, rehearse

#: How many ways are shown.
SHOWN = 5

#: The optimizers that are searched if none is named.
OPTIMIZERS = (
    Choice("AdamW", {}, "default"),
    Choice("Adafactor", {"relative_step": False, "scale_parameter": False}, "default"),
    Choice("GaLoreAdamW", {"svd": "randomized"}, "default"),
)

#: Ranks of LoRA's adapters, from the best.
_ADAPTERS = (64, 16, 8)

#: What a way gives up. The best way is the one whose sum is the least.
_COSTS = {
    "checkpointing": 1,
    "split": 1,
    "backward": 2,
    "int8": 2,
    "stochastic": 3,
    "int4": 4,
    "lower rank": 1,
    "Adafactor": 4,
    "rank": 5,
    "offload": 10,
    "adapters": 12,
}


class Given(NamedTuple):
    """What the user has asked for. None, and no optimizers or states, leave it to the search."""

    optimizers: tuple[Choice, ...] = ()
    weights: torch.dtype | None = None
    masters: str | None = None
    states: tuple[str, ...] = ()
    rank: int | None = None
    adapters: int | None = None
    checkpointing: bool = False
    bucket_cap_mb: float = 25.0


class Way(NamedTuple):
    """A way to train a model."""

    model: Model
    choice: Choice
    run: Run
    cost: int
    adapters: int | None = None
    """The rank of LoRA's adapters."""
    checkpointing: bool = False
    is_offloaded: bool = False

    @property
    def family(self) -> tuple[str, bool, bool]:
        return self.choice.optimizer, self.adapters is not None, self.is_offloaded

    @property
    def title(self) -> str:
        name, run = self.choice.optimizer, self.run
        options = [str(v) for k, v in self.choice.options.items() if k == "rounding"]
        options += [f"rank {v}" for k, v in self.choice.options.items() if k == "rank"]
        options += [run.masters] * (run.masters != "none")
        options += [f"{self.choice.states} states"] * (self.choice.states != "default")
        name = f"{name} ({', '.join(options)})" if options else name
        name = f"LoRA of rank {self.adapters} by {name}" if self.adapters else name
        name = f"offload of {name}" if self.is_offloaded else name
        parts = [name, str(run.weights).removeprefix("torch.")]
        parts += ["step_in_backward"] * (run.bucket is not None and not self.is_offloaded)
        parts += ["checkpointing"] * self.checkpointing
        parts += [f"fully_shard on {run.ranks}"] * (run.zero > 0)
        return ", ".join(parts)


class Fit(NamedTuple):
    """A way, with what it needs."""

    way: Way
    need: Need
    host: int
    """Bytes of the host's memory, where the optimizer is offloaded."""


class Found(NamedTuple):
    """The best ways that fit, from the best on; the smallest way; what was not searched."""

    best: list[Fit]
    smallest: Fit
    notes: list[str]


Trace = Callable[[Model, Run, bool], Activations | None]


def search(model: Model, run: Run, given: Given, limit: int, trace: Trace) -> Found:
    """Returns the best way of each family that fits into so many bytes.

    Args:
        model (Model): what is trained
        run (Run): what the search leaves as it is
        given (Given): what the user has asked for
        limit (int): bytes on each GPU
        trace (Callable): the activations of a model in a run, with checkpointing or without
    """
    notes: list[str] = []
    traced: dict[Any, Activations | None] = {}
    steps: dict[Any, Scratch] = {}

    def whole(way: Way) -> Fit:
        """With activations, and with what a step takes."""
        run, scratch = way.run, NO_SCRATCH
        of_passes = way.adapters, run.weights, run.bucket, way.checkpointing
        if of_passes not in traced:
            traced[of_passes] = trace(way.model, run, way.checkpointing)
        if not way.is_offloaded:
            of_step = repr(way.choice), way.adapters, run.weights, run.masters, run.bucket
            if of_step not in steps:
                steps[of_step] = rehearse(way.model, run, way.choice)
            scratch = steps[of_step]
        return _fit(way, traced[of_passes], scratch)

    ways = sorted(_ways(model, run, given, notes), key=lambda way: way.cost)
    least = [_fit(way, None, NO_SCRATCH) for way in ways]
    best: dict[Any, Fit] = {}
    for way, bare in zip(ways, least, strict=True):
        if way.family not in best and bare.need.total <= limit:
            found = whole(way)
            if found.need.total <= limit:
                best[way.family] = found
    smallest = None
    for bare in sorted(least, key=lambda each: each.need.total)[:4] if not best else ():
        if smallest is None or bare.need.total < smallest.need.total:
            found = whole(bare.way)
            if smallest is None or found.need.total < smallest.need.total:
                smallest = found
    shown = sorted(best.values(), key=lambda each: each.way.cost)[:SHOWN]
    return Found(shown, smallest or min(shown, key=lambda each: each.need.total), notes)


def _fit(way: Way, activations: Activations | None, scratch: Scratch) -> Fit:
    model, run = way.model, way.run
    found = need(model, run, way.choice, activations, scratch)
    if not way.is_offloaded:
        return Fit(way, found, 0)
    # Copies of weights and gradients in pinned memory, which torch rounds up to a power of two.
    sizes = (shape.numel() * run.of_trained.itemsize for shape in model.trained)
    copies = 2 * sum(1 << (size - 1).bit_length() for size in sizes if size)
    return Fit(way, found._replace(masters=0, states=0), copies + found.masters + found.states)


def _ways(model: Model, run: Run, given: Given, notes: list[str]) -> Iterator[Way]:
    optimizers = given.optimizers or OPTIMIZERS
    for choice in optimizers:
        yield from _full(model, run, given, choice)
    if not run.zero:
        yield from _offloaded(model, run, given, optimizers[0])
    for place, rank in enumerate([given.adapters] if given.adapters else _ADAPTERS):
        try:
            adapted = with_adapters(model, rank)
        except ValueError as error:
            notes.append(str(error))
            return
        cost = _COSTS["adapters"] + place * _COSTS["lower rank"]
        choice = optimizers[0]._replace(options=_ranked(optimizers[0], rank, given))
        for narrow, weights in enumerate(_dtypes(given)):
            trained = run._replace(weights=weights, trained=torch.float32)
            way = Way(adapted, choice, trained, cost + narrow, rank)
            yield from _checkpointed(way, given)


def _ranked(choice: Choice, rank: int, given: Given) -> dict[str, Any]:
    return choice.options | ({"rank": given.rank or max(rank // 4, 1)} if _may_rank(choice) else {})


def _may_rank(choice: Choice) -> bool:
    return has_rank(choice.optimizer) and "rank" not in choice.options


def _dtypes(given: Given) -> list[torch.dtype]:
    return [given.weights] if given.weights else [torch.float32, torch.bfloat16]


def _checkpointed(way: Way, given: Given) -> Iterator[Way]:
    """A way without checkpoints of activations, and with them where the model has blocks."""
    if not given.checkpointing:
        yield way
    if given.checkpointing or way.model.stacks:
        yield way._replace(checkpointing=True, cost=way.cost + _COSTS["checkpointing"])


def _kept(weights: torch.dtype, given: Given) -> list[tuple[str, dict[str, Any]]]:
    """How weights keep their values, from the best: masters, and options."""
    if given.masters and (weights.itemsize <= 2 or given.masters == "none"):
        return [(given.masters, {})]
    if weights is torch.bfloat16:
        return [("split", {}), ("none", {"rounding": "stochastic"})]
    return [("float32" if weights is torch.float16 else "none", {})]


def _full(model: Model, run: Run, given: Given, choice: Choice) -> Iterator[Way]:
    """The ways in which all weights are trained where they are."""
    cls = getattr(optim, choice.optimizer)
    may_be_early = not run.accumulate and not (
        run.zero and (is_composite(choice) or not cls._elementwise)
    )
    ranks: list[int | None] = [None]
    if _may_rank(choice):
        ranks = [given.rank] if given.rank else _ranks(model)
    cost = _COSTS.get(choice.optimizer, 0) + _COSTS["rank"] * has_rank(choice.optimizer)
    for weights in _dtypes(given):
        for masters, rounding in _kept(weights, given):
            by_run = run._replace(weights=weights, masters=masters)
            kept = _COSTS.get(masters, 0) + _COSTS.get(str(rounding.get("rounding")), 0)
            for place, rank in enumerate(ranks):
                options = choice.options | rounding | ({"rank": rank} if rank else {})
                ranked = choice._replace(options=options)
                for states in kinds(ranked, by_run, given.states):
                    for bucket in (None, given.bucket_cap_mb * 2**20) if may_be_early else (None,):
                        whole = cost + kept + place * _COSTS["lower rank"]
                        whole += _COSTS.get(states, 0) + _COSTS["backward"] * (bucket is not None)
                        each = by_run._replace(bucket=bucket)
                        way = Way(model, ranked._replace(states=states), each, whole)
                        yield from _checkpointed(way, given)


def _ranks(model: Model) -> list[int | None]:
    """A quarter of the side that most matrices have at least, and 128."""
    sides = [min(shape[0], shape[1:].numel()) for shape in model.trained if len(shape) > 1]
    most = max(sides, key=sides.count, default=4) // 4
    return [most, 128] if most > 128 else [max(most, 1)]


def _offloaded(model: Model, run: Run, given: Given, choice: Choice) -> Iterator[Way]:
    for narrow, weights in enumerate(_dtypes(given)):
        masters = next((kept for kept, _ in _kept(weights, given)), "none")
        # A bucket is copied while the next one is filled.
        bucket = given.bucket_cap_mb * 2**20
        each = run._replace(weights=weights, masters=masters, bucket=bucket, buckets=2)
        options = _ranked(choice, 512, given)
        for states in kinds(choice._replace(options=options), each, given.states):
            cost = _COSTS["offload"] + narrow + _COSTS.get(states, 0)
            way = Way(model, Choice(choice.optimizer, options, states), each, cost)
            yield from _checkpointed(way._replace(is_offloaded=True), given)


def code(way: Way) -> list[str]:
    """The lines of code of a way. They take ``model`` and a learning rate ``lr``."""
    model, run, choice = way.model, way.run, way.choice
    is_early = run.bucket is not None
    found = ["import torch"]
    found += ["from peft import LoraConfig, get_peft_model"] if way.adapters else []
    found += ["import fusedstep"] if is_early else []
    found += ["from fusedstep import optim", ""]
    if run.weights is not torch.float32:
        found.append(f"model.to({run.weights})")
    if way.checkpointing:
        found += _lines_of_checkpoints(model)
    if way.adapters:
        config = f'LoraConfig(r={way.adapters}, target_modules="all-linear")'
        found.append(f"model = get_peft_model(model, {config})")
    if run.zero:
        found.append("from torch.distributed.fsdp import fully_shard")
        for stack in model.stacks:
            found += [f'for block in model.get_submodule("{stack}"):', "    fully_shard(block)"]
        found.append(f"fully_shard(model{', reshard_after_forward=False' * (run.zero == 2)})")
    params = "model.parameters()"
    options = {name: _written(value) for name, value in choice.options.items() if name != "rank"}
    if (rank := choice.options.get("rank")) and has_rank(choice.optimizer):
        found += [
            "weights = [p for p in model.parameters() if p.requires_grad]",
            "matrices = [p for p in weights "
            f"if p.ndim > 1 and min(p.shape[0], p[0].numel()) > {rank}]",
            "others = [p for p in weights if all(p is not each for each in matrices)]",
        ]
        params = f'[{{"params": matrices, "rank": {rank}}}, {{"params": others}}]'
    elif way.adapters:
        params = "[p for p in model.parameters() if p.requires_grad]"
    if choice.states != "default":
        options["state_dtype"] = _written(STATE_DTYPES[choice.states])
    if run.masters != "none":
        options["master_weights"] = _written(MASTERS[run.masters])
    given = "".join(f", {name}={value}" for name, value in options.items())
    made = f"optim.{choice.optimizer}({params}, lr=lr{given})"
    cap = "" if run.bucket in (None, 25 * 2**20) else f"{run.bucket / 2**20:g}"
    cap = cap and f", bucket_cap_mb={cap}"
    if way.is_offloaded:
        return [*found, f"optimizer = fusedstep.offload({made}{cap})"]
    found.append(f"optimizer = {made}")
    return found + [f"fusedstep.step_in_backward(optimizer{cap})"] * is_early


def _written(value: Any) -> str:
    if isinstance(value, str):
        return f'"{value}"'
    return str(value) if isinstance(value, torch.dtype) else repr(value)


def _lines_of_checkpoints(model: Model) -> list[str]:
    if model.is_transformers:
        options = '{"use_reentrant": False}'
        return [f"model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={options})"]
    found = ["from functools import partial", "from torch.utils.checkpoint import checkpoint"]
    for stack in model.stacks:
        found += [
            f'for block in model.get_submodule("{stack}"):',
            "    block.forward = partial(checkpoint, block.forward, use_reentrant=False)",
        ]
    return found
