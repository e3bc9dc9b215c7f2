"""Loads the native libraries, and names their operators."""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import warnings
import weakref
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch.utils._mode_utils import no_dispatch

from fusedstep._native.libraries import BINDING, CUDA, library_path, why_not_cuda

#: Devices that there are native kernels for, and the dtypes they update.
DEVICES = ("cpu", "cuda")
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)

_HOW_TO_BUILD = (
    "Build it with `cmake --preset release && cmake --build --preset release` in the source tree, "
    "install the package with `pip install .`, or set FUSEDSTEP_LIBRARY to the path of "
    "libfusedstep.so."
)


def _load() -> str | None:
    """Loads the library; returns None, or why its kernels cannot be used."""
    path = library_path()
    if not path.is_file():
        return f"fusedstep's native library was not found at {path}. {_HOW_TO_BUILD}"
    try:
        torch.ops.load_library(path)
    except OSError as error:
        cause = error.__cause__ or error
        return f"fusedstep's native library could not be loaded ({cause}). {_HOW_TO_BUILD}"
    torch.ops.fusedstep.isa()  # an impossible FUSEDSTEP_ISA is an error now, not at the first step
    return None


#: Reason why no native kernels can be used; None when those of the CPU can.
missing: str | None = _load()


@functools.cache
def missing_on(device: str) -> str | None:
    """The reason why native kernels of a kind of device cannot be used; None when they can."""
    if missing or device == "cpu":
        return missing
    if reason := why_not_cuda():
        return reason
    try:
        torch.ops.load_library(library_path(CUDA))
    except OSError as error:
        return f"fusedstep's CUDA library could not be loaded ({error.__cause__ or error})."
    return _driver_is_too_old(*_cuda_versions())


def _cuda_versions() -> tuple[int, int]:
    """The versions of the loaded library's CUDA runtime and of the driver, 13000 for 13.0."""
    runtime, driver = ctypes.c_int(), ctypes.c_int()
    library = ctypes.CDLL(str(library_path(CUDA)))
    library.fusedstep_cuda_versions(ctypes.byref(runtime), ctypes.byref(driver))
    return runtime.value, driver.value


def _driver_is_too_old(runtime: int, driver: int) -> str | None:
    """The reason why a driver cannot run kernels; None if it can, or if there is no driver."""
    if not driver or driver // 1000 >= runtime // 1000:
        return None
    return (
        f"fusedstep's CUDA library was compiled by CUDA {runtime // 1000}, and the driver of this "
        f"machine knows CUDA {driver // 1000}.{driver % 1000 // 10}. Install a newer driver, or "
        "compile fusedstep with that CUDA."
    )


def _load_bind() -> ModuleType | None:
    """The module that reads lists of tensors fast; None if not built, or torch lacks its table."""
    path = library_path(BINDING)
    if missing or not path.is_file():
        return None
    spec = importlib.util.spec_from_file_location("fusedstep._bind", path)
    if spec is None:  # a file that this Python does not take for a module
        return None
    try:
        return importlib.util.module_from_spec(spec)
    except (ImportError, AttributeError):
        return None


#: ``bind.plan_bind(plan, weights, grads, look_at_states)`` does what the operator ``plan_bind``
#: does, and returns True; or returns False, and the operator has to. ``bind.prepare``,
#: ``bind.plans_step`` and ``bind.plans_aliasing_grads`` do what operators do, ``bind.same(a, b)``
#: and ``bind.is_state(state, values)`` compare objects. None if there is no such module.
bind = _load_bind()


def direct() -> ModuleType | None:
    """``bind``, unless a mode is there to see operators: a tracer's, or that of fake tensors."""
    return None if torch._C._len_torch_dispatch_stack() else bind


#: Names of the hyper-parameters of each rule, in their order.
rule_options: dict[str, tuple[str, ...]] = (
    {}
    if missing
    else {
        rule: tuple(torch.ops.fusedstep.rule_options(rule)) for rule in torch.ops.fusedstep.rules()
    }
)

#: The number of each rule, by which operators of a step know it. torch 2.11 leaks memory for each
#: text that an operator of its stable ABI is given.
rule_index: dict[str, int] = {rule: index for index, rule in enumerate(rule_options)}

#: Names of the states of each rule that may be negative.
signed_states: dict[str, frozenset[str]] = {
    rule: frozenset(torch.ops.fusedstep.rule_signed_states(rule)) for rule in rule_options
}


def prepare_step(
    rule: str, plan: int, options: tuple[Any, ...], grad_factor: float, grads: int
) -> None:
    """Does what may fail in a step over what was bound to a plan, and changes nothing yet.

    ``options`` are the rule's hyper-parameters and, last, whether to maximize.

    Raises:
        MemoryError: there is no memory for what the step needs.
    """
    if module := direct():
        module.prepare(rule, plan, options, grad_factor, grads)
    else:
        numbers = list(map(float, options))
        torch.ops.fusedstep.plan_prepare.default(
            plan, rule_index[rule], numbers, grad_factor, grads
        )


def raise_memory_error(error: RuntimeError) -> None:
    """Raises a MemoryError if an operator had no memory. torch 2.15 has a RuntimeError for that."""
    if str(error).startswith(("std::bad_alloc", "there is no memory")):
        raise MemoryError(str(error)) from None


def take_steps(plans: list[int]) -> None:
    """Takes the steps that have been prepared."""
    (direct() or torch.ops.fusedstep).plans_step(plans)


def _plan_delete(plan: int) -> None:
    with torch._C.DisableTorchFunction(), no_dispatch():
        torch.ops.fusedstep.plan_delete(plan)


class _HeldPlan:
    def __init__(self, plan: int) -> None:
        weakref.finalize(self, _plan_delete, plan)


#: Returns an object that frees a plan when it dies. No mode sees that: plans are collected while
#: graphs are traced, too.
hold_plan: Callable[[int], Any] = bind.hold_plan if bind else _HeldPlan


#: The error of a second thread, as the library says it.
IS_STEPPED = "another thread is stepping this optimizer"


def check_idle(plan: int) -> None:
    """Raises a RuntimeError if another thread is in a step over a plan. No mode sees that."""
    with torch._C.DisableTorchFunction(), no_dispatch():
        torch.ops.fusedstep.plan_check_idle(plan)


def plans_aliasing_grads(plans: list[int]) -> list[int]:
    """The gradients that no step over the plans writes: pairs of a plan's and a tensor's index."""
    return (direct() or torch.ops.fusedstep).plans_aliasing_grads(plans)


@functools.cache
def warn_missing(device: str) -> None:
    """Says once in a process that optimizers of weights there run without native kernels."""
    warnings.warn(f"{missing_on(device)} Until then the slower fused=False is used.", stacklevel=2)


def isa() -> str:
    """Name of the instruction set that the kernels use now: ``'base'``, ``'avx2'`` or ``'avx512'``.

    Raises:
        RuntimeError: without the native library.
    """
    _require()
    return torch.ops.fusedstep.isa()


def isas() -> tuple[str, ...]:
    """Names of the instruction sets that this CPU runs, best first.

    Raises:
        RuntimeError: without the native library.
    """
    _require()
    return tuple(torch.ops.fusedstep.isas())


def product_isa() -> str:
    """Name of the level whose kernels multiply bfloat16 matrices now: ``'amx'``, ``'avx512bf16'``.

    Empty where the products are torch's: the CPU has neither, another instruction set is forced, or
    there is no native library.
    """
    return "" if missing else torch.ops.fusedstep.product_isa()


def product_isas() -> tuple[str, ...]:
    """Names of the levels with kernels for bfloat16 products that this CPU runs, best first.

    Raises:
        RuntimeError: without the native library.
    """
    _require()
    return tuple(torch.ops.fusedstep.product_isas())


def force_isa(name: str | None) -> None:
    """Makes the kernels use the named instruction set from now on; None goes back to the best.

    Raises:
        RuntimeError: without the native library.
        ValueError: this CPU does not run it, or there is no such instruction set.
    """
    _require()
    try:
        torch.ops.fusedstep.force_isa(name or "")
    except RuntimeError as error:  # newer torches have no other type for what an operator throws
        raise ValueError(str(error)) from None


def capabilities() -> dict[str, str]:
    """Facts about the build of the native library, as ``{key: value}``; empty without it."""
    if missing:
        return {}
    return dict(fact.split("=", 1) for fact in torch.ops.fusedstep.capabilities())


def _require() -> None:
    if missing:
        raise RuntimeError(missing)
