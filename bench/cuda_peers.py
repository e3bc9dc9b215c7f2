"""Steps of weights on a CUDA device beside other libraries': the rows, and what is compared."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from torch.nn import Parameter

import cases
import cuda
import implementations
import peer_optimizers
import rows
import shapes
from implementations import FLOAT_CORRECTION, Implementation, OfTorch
from peer_optimizers import ADAM, optimizer_class, said
from rows import BFLOAT16, FLOAT32, MIXED, Row

#: Its LAMB corrects the rate for bias, not the moments, and clamps the ratio.
DEEPSPEED_LAMB = "lamb-deepspeed"


def beside_peers() -> Iterator[Row]:
    """What takes longest comes last."""
    named = {case.name: case for case in cases.PLAIN}
    lists = {each.name: each for each in shapes.MODELS}
    gpt2, large = lists["gpt2"], lists.pop("gpt2-large")
    for shape_list in lists.values():
        yield from _in_fp32(named, shape_list)
    yield from (Row(named["adamw"], gpt2, precision) for precision in (BFLOAT16, MIXED))
    yield Row(named["adagrad"], gpt2, BFLOAT16)
    yield from _in_fp32(named, large)


def _in_fp32(named: dict[str, cases.Case], shape_list: shapes.ShapeList) -> Iterator[Row]:
    yield from (Row(named[name], shape_list) for name in ("adam", "adagrad", "lamb"))


def _can_be_compiled(row: Row) -> bool:
    """Each tensor has a piece of code, which is compiled at the first step."""
    few = row.shape_list.name in ("matrix", "resnet50", "gpt2")
    return few and row.case.namesake is not None and row.precision == FLOAT32


def _apex_has(row: Row) -> bool:
    """Its Adam alone knows bf16, and keeps states in fp32 then."""
    return row.precision == (MIXED if row.case.name == "adamw" else FLOAT32)


def _apex(row: Row, params: list[Parameter]) -> OfTorch:
    """LAMB as in the paper: adapted without decay too, and gradients are not clipped."""
    match row.case.name:
        case "lamb":
            lamb = optimizer_class("apex.optimizers.FusedLAMB")
            options = said(row, *ADAM)
            return OfTorch(lamb(params, use_nvlamb=True, max_grad_norm=math.inf, **options))
        case "adagrad":
            adagrad = optimizer_class("apex.optimizers.FusedAdagrad")
            return OfTorch(adagrad(params, **said(row, "lr", "eps")))
        case name:
            adam = optimizer_class("apex.optimizers.FusedAdam")
            return OfTorch(adam(params, adam_w_mode=name == "adamw", **said(row, *ADAM)))


def _deepspeed_has_adam(row: Row) -> bool:
    """Its states have the weight's precision."""
    return row.case.name in ("adam", "adamw") and row.precision != MIXED


def _deepspeed_adam(row: Row, params: list[Parameter]) -> OfTorch:
    adam, mode = optimizer_class("deepspeed.ops.adam.FusedAdam"), row.case.name == "adamw"
    return OfTorch(adam(params, adam_w_mode=mode, **said(row, *ADAM)))


def _is_lamb(row: Row) -> bool:
    return row.case.name == "lamb" and row.precision == FLOAT32


def _deepspeed_lamb(row: Row, params: list[Parameter]) -> OfTorch:
    lamb = optimizer_class("deepspeed.ops.lamb.FusedLamb")
    return OfTorch(lamb(params, max_coeff=10.0, min_coeff=0.01, **said(row, *ADAM)))


#: Turns that each takes in timing: there are many.
TURNS = 5

IMPLEMENTATIONS = {
    each.name: each
    for each in (
        implementations.FOR_LOOP,
        implementations.FOREACH,
        cuda.IMPLEMENTATIONS["torch_fused"],
        cuda.IMPLEMENTATIONS["torch_graph"],
        replace(implementations.COMPILED, exists=_can_be_compiled),
        Implementation("apex", "apex", _apex_has, _apex, slack=FLOAT_CORRECTION),
        Implementation(
            "deepspeed", "DeepSpeed", _deepspeed_has_adam, _deepspeed_adam, slack=FLOAT_CORRECTION
        ),
        Implementation(
            "deepspeed_lamb", "DeepSpeed, its formula", _is_lamb, _deepspeed_lamb,
            formula=DEEPSPEED_LAMB, slack=FLOAT_CORRECTION,
        ),
        peer_optimizers.PEERS["timm"],
        cuda.IMPLEMENTATIONS["fused"],
        cuda.IMPLEMENTATIONS["graph"],
    )
}  # fmt: skip
"""In the order of the tables, ours last."""

PROCESSES = {
    "torch": ("for_loop", "foreach", "torch_fused", "torch_graph", "graph"),
    "apex": ("apex",),
    "deepspeed": ("deepspeed", "deepspeed_lamb"),
    "timm": ("timm",),
    "compiled": ("compiled",),
}
"""What is compared with ours, in the same process: a library has one of its own."""


def of_process(name: str) -> dict[str, Implementation]:
    """What a process measures: its peers, and ours."""
    return {each: IMPLEMENTATIONS[each] for each in (*PROCESSES[name], "fused")}


def peers_of(name: str, row: Row) -> list[str]:
    """Those of a process that have a row's step."""
    return [each for each in PROCESSES[name] if IMPLEMENTATIONS[each].exists(row)]


def rows_of(name: str, pattern: str) -> list[Row]:
    return [row for row in rows.matching(beside_peers(), pattern) if peers_of(name, row)]
