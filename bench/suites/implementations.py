"""Ways to make one and the same step: the columns of the benchmark's tables.

An implementation is built over weights with their gradients in place and then stepped. One is
everything that the benchmark knows of another library's optimizer.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from fusedstep._native import ops as _ops
from suites.rows import BAGS, BFLOAT16, FLOAT32, MIXED, NAMED, PLAIN, Purpose, Row
from suites.subjects import MAX_NORM, bags_of
from support.cases import Case


class UnavailableError(Exception):
    """This machine or build has no such implementation of this step."""


def told(error: BaseException) -> str:
    """An error in one line."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__


class Stepper:
    """An optimizer, and how it is stepped."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, step: Callable[[], object] | None = None
    ) -> None:
        self.optimizer = optimizer
        self.step = step or optimizer.step

    def take(self, grad: Tensor) -> None:
        """Before a step, the gradient of a table."""
        self.optimizer.param_groups[0]["params"][0].grad = grad

    def set_lr(self, lr: float) -> None:
        for group in self.optimizer.param_groups:
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(lr)
            else:
                group["lr"] = lr


#: The slack of what computes 1 - 0.999 in float: four of its digits are lost.
FLOAT_CORRECTION = 1e-3

#: The slack of states in 8 bits, whose rounding may move a weight as far as its largest move.
EIGHT_BITS = 1.0

#: pytorch_optimizer's LAMB: no correction for bias, the norm of the weight clamped, and eps added
#: to the norm of the update.
WITHOUT_BIAS_CORRECTION = "lamb-cybertron"
EPS_IN_NORM = 1e-2

#: Options that an optimizer of Adam's kind is given outright, as defaults differ.
ADAM = ("lr", "betas", "eps", "weight_decay")

Build = Callable[[Row, list[Parameter]], Stepper]


@dataclass(frozen=True)
class Implementation:
    name: str
    title: str
    build: Build
    """Raises UnavailableError."""
    exists: Callable[[Row], bool] = lambda row: True
    """Tells if there is such an implementation of the row's step anywhere, worth its time."""
    formula: str | None = None
    """The row of the case table whose formula it has, where that is not the timed row's own."""
    slack: float = 0.0
    """The check allows so much of the largest move of a weight."""
    in_graph: bool = False
    """The step is timed as a replay of a CUDA graph."""
    max_norm: float = math.inf
    """The norm that it clips gradients to."""
    uses_up_grads: bool = False
    """A step leaves other gradients than it found."""
    process: str = "torch"
    """The process that it is measured in, with ours: a library's has the name of its package."""

    def formula_of(self, row: Row) -> Case:
        return row.case if self.formula is None else NAMED[self.formula]


def accepts(optimizer: type, option: str) -> bool:
    return option in inspect.signature(optimizer).parameters


def said(row: Row, *names: str) -> dict[str, Any]:
    """The row's hyper-parameters of these names."""
    defaults = row.case.build([Parameter()], fused=False).defaults
    return {name: defaults[name] for name in names}


def optimizer_class(name: str) -> Callable[..., torch.optim.Optimizer]:
    """Class by a name as "timm.optim.Lamb": a library is imported only where it is measured."""
    module, _, attribute = name.rpartition(".")
    return getattr(importlib.import_module(module), attribute)


# ---- torch's and ours ----------------------------------------------------------------------------


def _has(*options: str, purposes: tuple[Purpose, ...] = tuple(Purpose)) -> Callable[[Row], bool]:
    """If torch has such an optimizer with these options. Its states have the weight's precision."""

    def exists(row: Row) -> bool:
        namesake = row.case.namesake
        if namesake is None or row.precision == MIXED or row.purpose not in purposes:
            return False
        return all(accepts(namesake, option) for option in options)

    return exists


def _namesake(row: Row, params: list[Parameter], **options: bool) -> Stepper:
    optimizer = row.case.build_namesake(params, **options)
    # torch has CUDA kernels for Adagrad, which its class refuses to use.
    if hasattr(optimizer, "_need_device_dtype_check_for_fused"):
        optimizer._need_device_dtype_check_for_fused = False
    return Stepper(optimizer)


class _Compiled(Stepper):
    def set_lr(self, lr: float) -> None:
        """Not taken: another rate would be compiled anew."""


def _compiled(row: Row, params: list[Parameter]) -> Stepper:
    optimizer = row.case.build_namesake(params, foreach=True)
    return _Compiled(optimizer, torch.compile(optimizer.step))


def _can_be_compiled(row: Row) -> bool:
    """Each tensor has a piece of code, which is compiled at the first step."""
    few = row.shape_list.name in ("matrix", "resnet50", "contiguous", "transposed")
    return few and row.precision == FLOAT32 and row.case in PLAIN and _has("foreach")(row)


def _ours(row: Row, params: list[Parameter], **options: Any) -> Stepper:
    missing = _ops.missing_on(params[0].device.type)
    if missing and options.get("fused", True):
        raise UnavailableError(missing)
    return Stepper(row.case.build(params, **row.options, **options))


def _can_keep_grad(row: Row) -> bool:
    return accepts(row.case.optimizer, "keep_grad") and not row.case.modes.get("keep_grad", False)


SLOW = (Purpose.LIST, Purpose.SIZE)
UNFUSED = Implementation(
    "unfused", "ours unfused", partial(_ours, fused=False), lambda row: row.purpose in SLOW
)
FOR_LOOP = Implementation("for_loop", "torch for-loop", _namesake, _has(purposes=SLOW))
FOREACH = Implementation(
    "foreach", "torch foreach", partial(_namesake, foreach=True), _has("foreach", purposes=SLOW)
)
COMPILED = Implementation(
    "compiled", "torch compiled", _compiled, _can_be_compiled, slack=FLOAT_CORRECTION,
    process="compiled",
)  # fmt: skip
TORCH_FUSED = Implementation(
    "torch_fused", "torch fused", partial(_namesake, fused=True), _has("fused")
)
KEEP_GRAD = Implementation(
    "fused_keep_grad", "ours, keep_grad", partial(_ours, keep_grad=True), _can_keep_grad
)
FUSED = Implementation("fused", "ours fused", _ours)
CUDA_FUSED = replace(TORCH_FUSED, slack=FLOAT_CORRECTION)
_IN_GRAPH = {"slack": FLOAT_CORRECTION, "in_graph": True}
TORCH_GRAPH = Implementation(
    "torch_graph", "torch fused, graph", partial(_namesake, fused=True, capturable=True),
    _has("fused", "capturable"), **_IN_GRAPH,
)  # fmt: skip
GRAPH = Implementation(
    "graph", "ours, graph", partial(_ours, capturable=True),
    lambda row: accepts(row.case.optimizer, "capturable"), **_IN_GRAPH,
)  # fmt: skip


# ---- Other libraries' ----------------------------------------------------------------------------


def _library(name: str, *options: str, **more: Any) -> Build:
    """The optimizer of that name, with the row's options of these names and some of its own."""
    return lambda row, params: Stepper(
        optimizer_class(name)(params, **said(row, *(options or ADAM)), **more)
    )


def _deepspeed(name: str, *options: str, **more: Any) -> Build:
    library = partial(_library, f"deepspeed.ops.{name}", *options, **more)
    return lambda row, params: library(fp32_optimizer_states=row.precision != BFLOAT16)(row, params)


def _pytorch_optimizer(row: Row, params: list[Parameter]) -> Stepper:
    options = dict(NAMED[WITHOUT_BIAS_CORRECTION].options)
    del options["variant"]
    lamb = optimizer_class("pytorch_optimizer.Lamb")
    return Stepper(lamb(params, adam_debias=True, **options))


def _of_library(
    name: str,
    title: str,
    builds: dict[str, Build],
    precisions: tuple = (FLOAT32,),
    purposes: tuple = (Purpose.LIST,),
    **more: Any,
) -> Implementation:
    """The optimizers of a library, by the names of the rows' own."""

    def exists(row: Row) -> bool:
        return row.case.name in builds and row.precision in precisions and row.purpose in purposes

    return Implementation(
        name, title, lambda row, params: builds[row.case.name](row, params), exists,
        process=name.removesuffix("_8bit").removesuffix("_lamb"), **more,
    )  # fmt: skip


def _apex_has(row: Row) -> bool:
    """Its Adam alone knows bf16, and keeps states in fp32 then."""
    return row.case.name in _APEX and row.precision == (
        MIXED if row.case.name == "adamw" else FLOAT32
    )


_DEEPSPEED = {
    "adam": _deepspeed("adam.DeepSpeedCPUAdam", adamw_mode=False),
    "adamw": _deepspeed("adam.DeepSpeedCPUAdam", adamw_mode=True),
    "adagrad": _deepspeed("adagrad.DeepSpeedCPUAdagrad", "lr", "eps"),
}
_DEEPSPEED_CUDA = {
    "adam": _library("deepspeed.ops.adam.FusedAdam", adam_w_mode=False),
    "adamw": _library("deepspeed.ops.adam.FusedAdam", adam_w_mode=True),
}
# LAMB as in the paper, here and below: adapted without decay too, and gradients are not clipped.
_APEX = {
    "adam": _library("apex.optimizers.FusedAdam", adam_w_mode=False),
    "adamw": _library("apex.optimizers.FusedAdam", adam_w_mode=True),
    "adagrad": _library("apex.optimizers.FusedAdagrad", "lr", "eps"),
    "lamb": _library("apex.optimizers.FusedLAMB", use_nvlamb=True, max_grad_norm=math.inf),
}
_TIMM = {"lamb": _library("timm.optim.Lamb", always_adapt=True, max_grad_norm=None)}
# Corrects the rate for bias, not the moments, and clamps the ratio.
_DEEPSPEED_LAMB = {"lamb": _library("deepspeed.ops.lamb.FusedLamb", max_coeff=10.0, min_coeff=0.01)}

TIMM = _of_library("timm", "timm", _TIMM)
CPU_LIBRARIES = (
    _of_library("deepspeed", "DeepSpeed", _DEEPSPEED, (FLOAT32, BFLOAT16, MIXED),
                (Purpose.LIST, Purpose.THREADS), slack=FLOAT_CORRECTION),
    TIMM,
    _of_library("pytorch_optimizer", "pytorch_optimizer", {"lamb": _pytorch_optimizer},
                formula=WITHOUT_BIAS_CORRECTION, slack=EPS_IN_NORM),
    _of_library("torchao_8bit", "torchao 8-bit", {"adamw": _library("torchao.optim.AdamW8bit")},
                slack=EIGHT_BITS),
    _of_library("torchao", "torchao", {"adamw": _library("torchao.optim._AdamW")},
                slack=FLOAT_CORRECTION),
    _of_library("bitsandbytes_8bit", "bitsandbytes 8-bit",
                {"adamw": _library("bitsandbytes.optim.AdamW8bit")}, slack=EIGHT_BITS),
    _of_library("bitsandbytes", "bitsandbytes",
                {"adamw": _library("bitsandbytes.optim.AdamW32bit")}, (FLOAT32, MIXED)),
)  # fmt: skip
CUDA_LIBRARIES = (
    replace(_of_library("apex", "apex", _APEX, slack=FLOAT_CORRECTION), exists=_apex_has),
    # Its states have the weight's precision.
    _of_library("deepspeed", "DeepSpeed", _DEEPSPEED_CUDA, (FLOAT32, BFLOAT16),
                slack=FLOAT_CORRECTION),
    _of_library("deepspeed_lamb", "DeepSpeed, its formula", _DEEPSPEED_LAMB,
                formula="lamb-deepspeed", slack=FLOAT_CORRECTION),
    TIMM,
)  # fmt: skip


# ---- Clipping, sparse gradients, Adan over sizes -------------------------------------------------


def _separate_calls(row: Row, params: list[Parameter], build: Build = _ours) -> Stepper:
    stepper = build(row, params)

    def separate() -> None:
        torch.nn.utils.clip_grad_norm_(params, MAX_NORM)
        stepper.step()
        stepper.optimizer.zero_grad(set_to_none=False)

    return Stepper(stepper.optimizer, separate)


def _one_call(row: Row, params: list[Parameter]) -> Stepper:
    optimizer = _ours(row, params).optimizer
    return Stepper(optimizer, partial(optimizer.step, max_norm=MAX_NORM, zero_grad=True))


_CLIPS = {"max_norm": MAX_NORM, "uses_up_grads": True}
CLIPPING = (
    replace(FUSED, name="bare", title="bare step", uses_up_grads=True),
    Implementation("separate", "separate calls", _separate_calls, **_CLIPS),
    Implementation("torch_separate", "torch fused, separate calls",
                   partial(_separate_calls, build=TORCH_FUSED.build), TORCH_FUSED.exists, **_CLIPS),
    Implementation("fused", "one call", _one_call, **_CLIPS),
)  # fmt: skip


def _dense(row: Row, params: list[Parameter]) -> Stepper:
    params[0].grad = torch.zeros_like(params[0])
    return _ours(row, params)


class _Backward(Stepper):
    """A table that is looked up in bags, before a step; the step is the backward pass."""

    def __init__(self, look_up: Callable[..., Tensor]) -> None:
        self._look_up = look_up

    def take(self, grad: Tensor) -> None:
        *bags, self._grad = bags_of(grad)
        self._output = self._look_up(*bags)

    def step(self) -> None:
        self._output.backward(self._grad)


class _BackwardAndStep(_Backward):
    def __init__(self, stepper: Stepper, table: Parameter) -> None:
        bag = torch.nn.functional.embedding_bag
        super().__init__(lambda items, begins: bag(items, table, begins, mode="sum", sparse=True))
        self.optimizer = stepper.optimizer

    def step(self) -> None:
        super().step()
        self.optimizer.step()
        self.optimizer.zero_grad()


def _over_tables(implementation: Implementation) -> Implementation:
    def build(row: Row, params: list[Parameter]) -> Stepper:
        stepper = implementation.build(row, params)
        return _BackwardAndStep(stepper, params[0]) if row.gradient == BAGS else stepper

    return replace(implementation, build=build)


_FBGEMM = {"adagrad": "EXACT_ADAGRAD", "rowwise_adagrad": "EXACT_ROWWISE_ADAGRAD"}


class _Fbgemm(_Backward):
    """FBGEMM's table, which steps in its backward pass. The weight becomes a view of it."""

    def __init__(self, row: Row, params: list[Parameter]) -> None:
        ops = importlib.import_module("fbgemm_gpu.split_table_batched_embeddings_ops_training")
        shape_and_place = (*params[0].shape, ops.EmbeddingLocation.HOST, ops.ComputeDevice.CPU)
        numbers = said(row, "lr", "eps")
        self._table = ops.SplitTableBatchedEmbeddingBagsCodegen(
            [shape_and_place],
            optimizer=ops.OptimType[_FBGEMM[row.case.name]],
            learning_rate=numbers["lr"],
            eps=numbers["eps"],
        )
        (weight,) = self._table.split_embedding_weights()
        params[0].data = weight.detach().copy_(params[0].data)
        super().__init__(self._look_up_in_table)

    def _look_up_in_table(self, items: Tensor, begins: Tensor) -> Tensor:
        return self._table(items, torch.cat([begins, begins.new_tensor([len(items)])]))

    def set_lr(self, lr: float) -> None:
        self._table.set_learning_rate(lr)


EMBEDDING = (
    _over_tables(UNFUSED),
    _over_tables(replace(FOR_LOOP, name="torch", title="torch")),
    Implementation(
        "dense", "ours, dense gradient", _dense,
        lambda row: row.case.optimizer._takes_dense and row.gradient != BAGS,
    ),
    _over_tables(replace(FUSED, title="ours")),
)  # fmt: skip
FBGEMM = Implementation(
    "fbgemm", "FBGEMM", _Fbgemm,
    lambda row: row.gradient == BAGS and row.case.name in _FBGEMM,
    process="fbgemm_gpu_cpu",
)  # fmt: skip


def _adam(row: Row, params: list[Parameter], **options: bool) -> Stepper:
    return Stepper(NAMED["adam"].build_namesake(params, **options))


def _authors(row: Row, params: list[Parameter], **options: bool) -> Stepper:
    packages = ("adan", "fused_adan")
    if not (params[0].is_cuda and all(map(importlib.util.find_spec, packages))):
        raise UnavailableError("adan and fused_adan cannot be imported, or this is a CPU")
    return _library("adan.Adan", "lr", "betas", "eps", fused=True, **options)(row, params)


def _of_adan(name: str, title: str, build: Any, **options: bool) -> Implementation:
    formula = "adam" if build is _adam else None
    build = partial(build, **options)
    return Implementation(name, title, build, formula=formula, slack=FLOAT_CORRECTION)


ADAN = (
    _of_adan("adam_for_loop", "Adam, for-loop", _adam),
    _of_adan("adam_foreach", "Adam, foreach", _adam, foreach=True),
    _of_adan("adam_fused", "Adam, fused", _adam, fused=True),
    _of_adan("adan_for_loop", "Adan, for-loop", _ours, foreach=False, fused=False),
    _of_adan("adan_foreach", "Adan, foreach", _ours, foreach=True, fused=False),
    _of_adan("adan_single", "Adan, fused single", _ours, foreach=False),
    _of_adan("adan_multi", "Adan, fused multi", _ours, foreach=True),
    _of_adan("authors_single", "authors' fused single", _authors, foreach=False),
    _of_adan("authors_multi", "authors' fused multi", _authors, foreach=True),
)
