"""Optimizer steps made of oneDNN's primitives, through onednn/optimizers.h."""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np
import torch

from cases import Case

NAME = "libfusedstep_onednn.so"

#: Rows of the case table that are written in oneDNN's primitives: the plain ones, without decay.
ONEDNN_CASES = ("lamb", "adagrad", "adam")


class _Hyper(ctypes.Structure):
    _fields_ = [(name, ctypes.c_double) for name in ("beta1", "beta2", "eps")]


class OneDnn:
    """libfusedstep_onednn.so. Import torch first, so that they share one OpenMP."""

    def __init__(self, folder: Path) -> None:
        self._library = library = ctypes.CDLL(str(folder / NAME))
        pointer = ctypes.c_void_p
        library.fusedstep_onednn_new.restype = pointer
        library.fusedstep_onednn_new.argtypes = [
            ctypes.c_char_p, pointer, ctypes.c_int64, pointer, pointer,
        ]  # fmt: skip
        library.fusedstep_onednn_delete.argtypes = [pointer]
        library.fusedstep_onednn_step.argtypes = [pointer, ctypes.c_double]
        library.fusedstep_onednn_error.restype = ctypes.c_char_p

    def build(self, case: Case, params: list[torch.nn.Parameter]) -> OneDnnOptimizer:
        return OneDnnOptimizer(self._library, case, params)


class OneDnnOptimizer:
    """A plain row's optimizer over contiguous fp32 weights whose gradients stay where they are.

    Raises:
        RuntimeError: what oneDNN has to say, if it refuses.
    """

    def __init__(self, library: ctypes.CDLL, case: Case, params: list[torch.nn.Parameter]) -> None:
        defaults = case.build(params, fused=False).defaults
        beta1, beta2 = defaults.get("betas", (0.0, 0.0))
        hyper = _Hyper(beta1, beta2, defaults["eps"])
        self._library = library
        self._lr = defaults["lr"]
        self._operands = [
            [p, p.grad, *(torch.zeros_like(p, requires_grad=False) for _ in case.states)]
            for p in params
        ]
        addresses = np.array([t.data_ptr() for row in self._operands for t in row], dtype=np.uint64)
        elements = np.array([p.numel() for p in params], dtype=np.int64)
        self._handle = library.fusedstep_onednn_new(
            case.name.encode(), ctypes.byref(hyper), len(params),
            elements.ctypes.data, addresses.ctypes.data,
        )  # fmt: skip
        if not self._handle:
            self._fail()

    def step(self) -> None:
        if self._library.fusedstep_onednn_step(self._handle, self._lr) != 0:
            self._fail()

    def set_lr(self, lr: float) -> None:
        self._lr = lr

    def _fail(self) -> None:
        raise RuntimeError(f"oneDNN: {self._library.fusedstep_onednn_error().decode()}")

    def __del__(self) -> None:
        if getattr(self, "_handle", None):
            self._library.fusedstep_onednn_delete(self._handle)
