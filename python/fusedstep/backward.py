"""Steps during the backward pass: the memory of gradients is a bucket's, not the model's."""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from fusedstep.optim._base import FusedOptimizer
from fusedstep.optim._checks import name_of
from fusedstep.optim._clip import EPSILON
from fusedstep.optim._dtensor import is_dtensor
from fusedstep.optim._plan import Bucket

__all__ = ["BackwardSteps", "step_in_backward"]


def step_in_backward(
    optimizer: FusedOptimizer,
    *,
    bucket_cap_mb: float = 25.0,
    accumulation_steps: int = 1,
    max_previous_norm: float | None = None,
) -> BackwardSteps:
    r"""Lets an optimizer step weights as soon as the backward pass has their gradients.

    The weights of each group are divided into buckets, in their order. When all gradients of a
    bucket are there, it is stepped and they are freed. ``optimizer.step()`` is called as ever: it
    steps what is left, weights without a gradient for one that are in a bucket with others, and
    ends the iteration. The weights are those of ordinary steps, bit for bit, but where products of
    several matrices are taken at once (:class:`fusedstep.optim.Muon`).

    With ``max_previous_norm`` gradients are clipped by the norm of the iteration before, since that
    of this one is not known before its last bucket: they are multiplied by

    .. math::
        \min\left(1, \frac{\text{max\_previous\_norm}}{\lVert g_{t-1} \rVert + 10^{-6}}\right)

    where :math:`g_{t-1}` are all gradients between the last two calls of ``optimizer.step()``,
    before they were clipped. In the first iteration the factor is 1.

    Args:
        optimizer: one of :mod:`fusedstep.optim`
        bucket_cap_mb: the size of the gradients of a bucket, in MiB; a larger weight is a bucket
            of its own. 0 steps each weight alone (default: 25)
        accumulation_steps: backward passes whose gradients are added up before a step. Call
            ``optimizer.step()`` after the last of them (default: 1)
        max_previous_norm: see above (default: None)

    Returns:
        A handle, as :meth:`torch.Tensor.register_hook` returns one: ``remove()`` ends it, as does
        leaving a ``with`` block.

    Raises:
        TypeError: if the optimizer is not one of ours, or ``accumulation_steps`` is no int.
        ValueError: if an argument is out of range.
        RuntimeError: for what needs all gradients at once or other processes' gradients:
            ``max_grad_norm``, ``differentiable``, a second ``step_in_backward``, weights that are
            on several processes and no DTensors (DistributedDataParallel averages their gradients
            after they were stepped), and DTensors of optimizers that take norms of weights. At
            ``optimizer.step()``: for ``max_norm`` and for a GradScaler, which learns of infinite
            gradients when weights have been stepped.

    Example::

        >>> optimizer = optim.AdamW(model.parameters())
        >>> fusedstep.step_in_backward(optimizer)
        >>> model(input).sum().backward()  # steps, and frees gradients
        >>> optimizer.step()
    """
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
    if max_previous_norm is not None and not max_previous_norm >= 0:
        raise ValueError(f"Invalid max_previous_norm value: {max_previous_norm}")
    _refuse(optimizer)
    buckets = list(_buckets(optimizer, bucket_cap_mb * 2**20))
    return BackwardSteps(optimizer, buckets, accumulation_steps, max_previous_norm)


def _refuse(optimizer: FusedOptimizer) -> None:
    if optimizer in _steps_in_backward:
        raise RuntimeError("this optimizer steps in the backward pass already")
    if optimizer._max_grad_norm() < math.inf:
        raise RuntimeError(
            "max_grad_norm needs all gradients before the first step: use "
            "step_in_backward(…, max_previous_norm=…), or steps after the backward pass"
        )
    apart = torch.distributed.is_available() and torch.distributed.is_initialized()
    apart = apart and torch.distributed.get_world_size() > 1
    for index, group in enumerate(optimizer.param_groups):
        if group.get("differentiable"):
            raise RuntimeError("step_in_backward does not support `differentiable`")
        for place, weight in enumerate(group["params"]):
            name = name_of(group, index, place)
            if is_dtensor(weight):
                if optimizer._composite or not optimizer._elementwise:
                    raise RuntimeError(
                        f"{name} is a DTensor, and {type(optimizer).__name__} takes norms or "
                        "products of whole weights, for which all processes would have to step in "
                        "one order"
                    )
            elif apart:
                raise RuntimeError(
                    f"{name} is not sharded, and there are other processes: their gradients are "
                    "added by DistributedDataParallel after those of this one have been stepped. "
                    "Use fully_shard, or steps after the backward pass"
                )


def _buckets(optimizer: FusedOptimizer, cap: float) -> Iterator[Bucket]:
    """Divides the weights of each group: as many as have room, one at least."""
    for index, group in enumerate(optimizer.param_groups):
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
    """How many backward passes the weights of a bucket have been in since it was stepped."""

    def __init__(self, bucket: Bucket) -> None:
        self.bucket = bucket
        # Weights without gradients are not waited for.
        self._first = [0 if weight.requires_grad else math.inf for weight in bucket.weights]
        self.reset()

    def reset(self) -> None:
        self.passes = list(self._first)

    def is_complete(self, count: int) -> bool:
        return min(self.passes) >= count


class BackwardSteps:
    """The handle of :func:`step_in_backward`."""

    def __init__(
        self,
        optimizer: FusedOptimizer,
        buckets: list[Bucket],
        accumulation_steps: int,
        max_previous_norm: float | None,
    ) -> None:
        self._optimizer, self._count = optimizer, accumulation_steps
        self._max_norm = None if max_previous_norm is None else float(max_previous_norm)
        self._clip: float | Tensor = 1.0
        self._norms: list[float | Tensor] = []  # of the buckets that this iteration has stepped
        # Weights on several devices have their gradients on several threads.
        self._lock = threading.RLock()
        self._waiting = [_Waiting(bucket) for bucket in buckets]
        self._handles: list[Any] = []
        for each in self._waiting:
            for place, weight in enumerate(each.bucket.weights):
                if weight.requires_grad:
                    hook = self._hook(each, place)
                    self._handles.append(weight.register_post_accumulate_grad_hook(hook))
        self._handles.append(optimizer.register_step_pre_hook(self._before_step))
        self._handles.append(optimizer.register_step_post_hook(self._after_step))
        _steps_in_backward.add(optimizer)

    def remove(self) -> None:
        """Ends the steps in the backward pass; gradients that are there stay."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        _steps_in_backward.discard(self._optimizer)

    def __enter__(self) -> BackwardSteps:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.remove()

    def _hook(self, waiting: _Waiting, place: int) -> Callable[[Tensor], None]:
        def arrived(weight: Tensor) -> None:
            with self._lock:
                waiting.passes[place] += 1
                if waiting.is_complete(self._count):
                    self._step(waiting)

        return arrived

    @torch._disable_dynamo
    def _step(self, waiting: _Waiting) -> None:
        clip = None if self._max_norm is None else self._clip
        with torch.no_grad():
            norm = self._optimizer._update_bucket(waiting.bucket, clip)
        waiting.reset()
        if clip is not None:
            self._norms.append(norm)

    def _step_the_rest(self) -> None:
        with self._lock:
            for each in self._waiting:
                if any(weight.grad is not None for weight in each.bucket.weights):
                    self._step(each)

    def _before_step(
        self, optimizer: FusedOptimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if kwargs.get("max_norm") is not None:
            raise RuntimeError(
                "step(max_norm=…) comes after the steps in the backward pass: use "
                "step_in_backward(…, max_previous_norm=…)"
            )
        if getattr(optimizer, "grad_scale", None) is not None:
            raise RuntimeError(
                "a GradScaler learns of infinite gradients after the steps in the backward pass: "
                "train in bfloat16, or step after the backward pass"
            )
        closure = args[1] if len(args) > 1 else kwargs.get("closure")  # after the optimizer
        if closure is None:
            self._step_the_rest()
            return None

        def closed() -> Any:
            loss = closure()
            self._step_the_rest()
            return loss

        return (optimizer, closed), {
            name: value for name, value in kwargs.items() if name != "closure"
        }

    def _after_step(self, *_: Any) -> None:
        """Begins an iteration."""
        for each in self._waiting:
            each.reset()
        if self._max_norm is None:
            return
        norms, self._norms = self._norms, []
        if any(isinstance(norm, Tensor) for norm in norms):
            device = next(norm.device for norm in norms if isinstance(norm, Tensor))
            stacked = torch.stack([torch.as_tensor(norm, device=device) for norm in norms])
            norm = torch.linalg.vector_norm(stacked)
            self._clip = (self._max_norm / (norm + EPSILON)).clamp(max=1.0)
        elif norms:
            factor = self._max_norm / (math.hypot(*norms) + EPSILON)
            # Of a norm that is NaN, NaN.
            self._clip = 1.0 if factor >= 1 else factor


_steps_in_backward: weakref.WeakSet[FusedOptimizer] = weakref.WeakSet()
