"""Buckets of weights, and when the backward pass has all gradients of one."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from fusedstep.optim._base import FusedOptimizer
from fusedstep.optim._checks import name_of
from fusedstep.optim._clip import EPSILON
from fusedstep.optim._plan import Bucket


def check_arguments(
    optimizer: FusedOptimizer, bucket_cap_mb: float, accumulation_steps: int
) -> None:
    """Raises for an optimizer of another library, and for an argument that is out of range."""
    if not isinstance(optimizer, FusedOptimizer):
        raise TypeError(
            f"optimizer must be one of fusedstep.optim, not {type(optimizer).__name__}: pass what "
            "that wraps, or convert() it"
        )
    if isinstance(accumulation_steps, bool) or not isinstance(accumulation_steps, int):
        raise TypeError(f"accumulation_steps must be an int, not {accumulation_steps!r:.40}")
    if accumulation_steps < 1:
        raise ValueError(f"Invalid accumulation_steps value: {accumulation_steps}")
    if not bucket_cap_mb >= 0:
        raise ValueError(f"Invalid bucket_cap_mb value: {bucket_cap_mb}")
    check_free(optimizer.param_groups)


#: Weights that an Arrivals waits for.
_waited_for: WeakIdKeyDictionary = WeakIdKeyDictionary()


def check_free(groups: list[dict[str, Any]]) -> None:
    """Raises if the backward pass steps a weight already."""
    for index, group in enumerate(groups):
        for place, weight in enumerate(group["params"]):
            if weight in _waited_for:
                raise RuntimeError(
                    f"{name_of(group, index, place)} is stepped in the backward pass already: call "
                    "remove() of what does so"
                )


def buckets_of(groups: list[dict[str, Any]], cap: float) -> Iterator[Bucket]:
    """Divides the weights of each group: as many as have room in so many bytes, one at least."""
    for index, group in enumerate(groups):
        number, weights, size = 0, [], 0.0
        for weight in group["params"]:
            if weights and size + weight.nbytes > cap:
                yield Bucket(index, number, weights)
                number, weights, size = number + 1, [], 0.0
            weights.append(weight)
            size += weight.nbytes
        if weights:
            yield Bucket(index, number, weights)


class _Waiting:
    """Counts the backward passes that weights of a bucket have been in since it was complete."""

    def __init__(self, bucket: Bucket) -> None:
        self.bucket = bucket
        # Weights without gradients are not waited for.
        self._first = [0 if weight.requires_grad else math.inf for weight in bucket.weights]
        self.reset()

    def reset(self) -> None:
        self.passes = list(self._first)


class Arrivals:
    """Calls a function with each bucket when all its gradients have been in so many passes.

    It sets them to None, or they are added to. Of infinitely many passes complete_all() is the end.
    """

    def __init__(
        self, buckets: list[Bucket], count: float, complete: Callable[[Bucket], None]
    ) -> None:
        self._count, self._complete = count, complete
        # Weights on several devices have their gradients on several threads.
        self._lock = threading.RLock()
        self._waiting = [_Waiting(bucket) for bucket in buckets]
        self._handles: list[Any] = []
        for each in self._waiting:
            for place, weight in enumerate(each.bucket.weights):
                if weight.requires_grad:
                    hook = self._hook(each, place)
                    self._handles.append(weight.register_post_accumulate_grad_hook(hook))
                    _waited_for[weight] = True

    def _hook(self, waiting: _Waiting, place: int) -> Callable[[Tensor], None]:
        def arrived(weight: Tensor) -> None:
            with self._lock:
                waiting.passes[place] += 1
                if min(waiting.passes) >= self._count:
                    self._complete(waiting.bucket)
                    waiting.reset()

        return arrived

    def complete_all(self) -> None:
        """Completes the buckets that have any gradients, and begins anew."""
        with self._lock:
            for each in self._waiting:
                if any(weight.grad is not None for weight in each.bucket.weights):
                    self._complete(each.bucket)
            self.reset()

    def reset(self) -> None:
        for each in self._waiting:
            each.reset()

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []
        for each in self._waiting:
            for weight in each.bucket.weights:
                _waited_for.pop(weight, None)
        self._waiting = []


class PreviousNorm:
    """The factor that clips gradients by the norm of the iteration before."""

    def __init__(self, limit: float | None) -> None:
        if limit is not None and not limit >= 0:
            raise ValueError(f"Invalid max_previous_norm value: {limit}")
        self._limit = None if limit is None else float(limit)
        self._factor: float | Tensor = 1.0
        self._norms: list[float | Tensor] = []  # of the buckets of this iteration

    @property
    def factor(self) -> float | Tensor | None:
        """None where nothing is clipped."""
        return None if self._limit is None else self._factor

    def add(self, norm: float | Tensor) -> None:
        """Takes the norm of a bucket before it was clipped."""
        if self._limit is not None:
            self._norms.append(norm)

    def begin_iteration(self) -> None:
        norms, self._norms = self._norms, []
        if any(isinstance(norm, Tensor) for norm in norms):
            first = next(norm for norm in norms if isinstance(norm, Tensor))
            dtype, device = first.dtype, first.device
            stacked = torch.stack([torch.as_tensor(x, dtype=dtype, device=device) for x in norms])
            norm = torch.linalg.vector_norm(stacked)
            self._factor = (self._limit / (norm + EPSILON)).clamp(max=1.0)
        elif norms:
            factor = self._limit / (math.hypot(*norms) + EPSILON)
            self._factor = 1.0 if factor >= 1 else factor  # NaN of a norm that is
