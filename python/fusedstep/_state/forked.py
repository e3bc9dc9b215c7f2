"""Runs torch operations in pieces too small for threads: OpenMP hangs in a child of fork()."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from torch import Tensor

from fusedstep._sharding.dtensor import local

#: Torch shares elementwise operations over this many elements or more among threads.
_SHARED_ELEMENTS = 32768

_is_child = False


def _note_child() -> None:
    global _is_child
    _is_child = True


os.register_at_fork(after_in_child=_note_child)


def in_pieces(operation: Callable[..., Any], *tensors: Tensor) -> Tensor:
    """Calls an operation that changes the first of some tensors of one shape element by element.

    In a child of fork(), which has none of torch's threads, it is called for parts of them.

    Returns:
        The first of the tensors.
    """
    if _is_child:
        _by_halves(operation, [t._values() if t.is_sparse else local(t) for t in tensors])
    else:
        operation(*tensors)
    return tensors[0]


def _by_halves(operation: Callable[..., Any], tensors: list[Tensor]) -> None:
    first = tensors[0]
    if first.numel() < _SHARED_ELEMENTS:
        operation(*tensors)
        return
    dim = max(range(first.dim()), key=first.size)
    for half in zip(*(tensor.tensor_split(2, dim) for tensor in tensors), strict=True):
        _by_halves(operation, list(half))
