"""Ways to make one and the same step: what the columns of the benchmark's table are.

An implementation is built over weights with their gradients in place and then stepped.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from cases import Case
from fusedstep import _ops
from onednn_library import ONEDNN_CASES, OneDnn


class UnavailableError(Exception):
    """This machine or build has no such implementation of this step."""


class Stepper(Protocol):
    def step(self) -> object: ...

    def set_lr(self, lr: float) -> None: ...


class _Optimizer:
    """A torch.optim.Optimizer."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self.step = optimizer.step

    def set_lr(self, lr: float) -> None:
        for group in self._optimizer.param_groups:
            group["lr"] = lr


@dataclass(frozen=True)
class Implementation:
    name: str
    title: str
    exists: Callable[[Case], bool]
    """Whether there is such an implementation of the row's optimizer anywhere."""
    build: Callable[[Case, list[torch.nn.Parameter]], Stepper]
    """Raises UnavailableError."""


def _has_namesake(case: Case) -> bool:
    return case.namesake is not None


def _namesake(**options: bool) -> Callable[[Case, list[torch.nn.Parameter]], Stepper]:
    return lambda case, params: _Optimizer(case.build_namesake(params, **options))


def _unfused(case: Case, params: list[torch.nn.Parameter]) -> Stepper:
    return _Optimizer(case.build(params, fused=False))


def _fused(**options: bool) -> Callable[[Case, list[torch.nn.Parameter]], Stepper]:
    def build(case: Case, params: list[torch.nn.Parameter]) -> Stepper:
        if _ops.missing:
            raise UnavailableError(_ops.missing)
        return _Optimizer(case.build(params, fused=True, **options))

    return build


def _can_keep_grad(case: Case) -> bool:
    has_option = "keep_grad" in inspect.signature(case.optimizer).parameters
    return has_option and not case.modes.get("keep_grad", False)


def all_implementations(onednn: OneDnn | None) -> tuple[Implementation, ...]:
    """In the order of the table: the baseline first, ours last."""

    def build_onednn(case: Case, params: list[torch.nn.Parameter]) -> Stepper:
        if onednn is None:
            raise UnavailableError("built without oneDNN")
        if not all(p.dtype == torch.float32 and p.is_contiguous() for p in params):
            raise UnavailableError("oneDNN's row takes contiguous fp32 tensors")
        return onednn.build(case, params)

    return (
        Implementation("unfused", "ours unfused", lambda case: True, _unfused),
        Implementation("for_loop", "torch for-loop", _has_namesake, _namesake(foreach=False)),
        Implementation("foreach", "torch foreach", _has_namesake, _namesake(foreach=True)),
        Implementation(
            "torch_fused", "torch fused", _has_namesake, _namesake(foreach=False, fused=True)
        ),
        Implementation("onednn", "oneDNN", lambda case: case.name in ONEDNN_CASES, build_onednn),
        Implementation(
            "fused_keep_grad", "ours, keep_grad", _can_keep_grad, _fused(keep_grad=True)
        ),
        Implementation("fused", "ours fused", lambda case: True, _fused()),
    )
