"""Ways to make one and the same step: what the columns of the benchmark's tables are.

An implementation is built over weights with their gradients in place and then stepped.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch.nn import Parameter

import cases
from cases import Case
from fusedstep import _ops
from onednn_library import ONEDNN_CASES, OneDnn
from rows import MIXED, PLAIN, Purpose, Row


class UnavailableError(Exception):
    """This machine or build has no such implementation of this step."""


def told(error: BaseException) -> str:
    """An error in one line."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__


class Stepper(Protocol):
    def step(self) -> object: ...

    def set_lr(self, lr: float) -> None: ...


class OfTorch:
    """A torch.optim.Optimizer."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self.step = optimizer.step

    def set_lr(self, lr: float) -> None:
        for group in self._optimizer.param_groups:
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(lr)
            else:
                group["lr"] = lr


#: The slack of what works 1 - 0.999 out in float: four of its digits are lost.
FLOAT_CORRECTION = 1e-3

Build = Callable[[Row, list[Parameter]], Stepper]


@dataclass(frozen=True)
class Implementation:
    name: str
    title: str
    exists: Callable[[Row], bool]
    """Whether there is such an implementation of the row's step anywhere, worth its time."""
    build: Build
    """Raises UnavailableError."""
    formula: str | None = None
    """The row of the case table whose formula it has, where that is not the timed row's own."""
    slack: float = 0.0
    """Of the check: of the largest move of a weight."""
    in_graph: bool = False
    """Whether what is timed is the step captured in a CUDA graph."""

    def formula_of(self, row: Row) -> Case:
        return row.case if self.formula is None else case_named(self.formula)


def case_named(name: str) -> Case:
    return next(case for case in cases.CASES if case.name == name)


def _has_namesake(row: Row) -> bool:
    """torch's states have the weight's precision."""
    return row.case.namesake is not None and row.precision != MIXED


def _has_slow_namesake(row: Row) -> bool:
    return _has_namesake(row) and row.purpose == Purpose.LIST


def _can_be_compiled(row: Row) -> bool:
    """Each tensor has a piece of code, which is compiled at the first step."""
    few = row.shape_list.name in ("matrix", "resnet50", "contiguous", "transposed")
    return few and row.case in PLAIN and _has_slow_namesake(row)


def _namesake(**options: bool) -> Build:
    return lambda row, params: OfTorch(row.case.build_namesake(params, **options))


class _Compiled(OfTorch):
    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(optimizer)
        self.step = torch.compile(optimizer.step)

    def set_lr(self, lr: float) -> None:
        """Not taken: another rate would be compiled anew."""


def _compiled(row: Row, params: list[Parameter]) -> Stepper:
    return _Compiled(row.case.build_namesake(params, foreach=True))


def _unfused(row: Row, params: list[Parameter]) -> Stepper:
    return OfTorch(row.case.build(params, fused=False, **row.options))


def _fused(**options: bool) -> Build:
    def build(row: Row, params: list[Parameter]) -> Stepper:
        if _ops.missing:
            raise UnavailableError(_ops.missing)
        return OfTorch(row.case.build(params, fused=True, **row.options, **options))

    return build


def _can_keep_grad(row: Row) -> bool:
    has_option = "keep_grad" in inspect.signature(row.case.optimizer).parameters
    return has_option and not row.case.modes.get("keep_grad", False)


def _has_unfused(row: Row) -> bool:
    return row.purpose == Purpose.LIST


UNFUSED = Implementation("unfused", "ours unfused", _has_unfused, _unfused)
FOR_LOOP = Implementation(
    "for_loop", "torch for-loop", _has_slow_namesake, _namesake(foreach=False)
)
FOREACH = Implementation("foreach", "torch foreach", _has_slow_namesake, _namesake(foreach=True))
TORCH_FUSED = Implementation(
    "torch_fused", "torch fused", _has_namesake, _namesake(foreach=False, fused=True)
)
COMPILED = Implementation(
    "compiled", "torch compiled", _can_be_compiled, _compiled, slack=FLOAT_CORRECTION
)
KEEP_GRAD = Implementation(
    "fused_keep_grad", "ours, keep_grad", _can_keep_grad, _fused(keep_grad=True)
)
FUSED = Implementation("fused", "ours fused", lambda row: True, _fused())


def all_implementations(onednn: OneDnn | None) -> tuple[Implementation, ...]:
    """Of `./run.sh bench`, in the order of the table: the baseline first, ours last."""

    def build_onednn(row: Row, params: list[Parameter]) -> Stepper:
        if onednn is None:
            raise UnavailableError("built without oneDNN")
        if not all(p.dtype == torch.float32 and p.is_contiguous() for p in params):
            raise UnavailableError("oneDNN's row takes contiguous fp32 tensors")
        return onednn.build(row.case, params)

    of_onednn = Implementation(
        "onednn", "oneDNN", lambda row: row.case.name in ONEDNN_CASES, build_onednn
    )
    return (UNFUSED, FOR_LOOP, FOREACH, TORCH_FUSED, of_onednn, KEEP_GRAD, FUSED)
