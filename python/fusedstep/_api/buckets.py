"""Buckets of weights, and when the backward pass has all gradients of one."""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.optim.optimizer import Optimizer
from torch.utils.hooks import RemovableHandle

from fusedstep._api.base import FusedOptimizer
from fusedstep._state.checks import name_of
from fusedstep._step.clip import EPSILON
from fusedstep._step.plan import Bucket, same


def check_ours(optimizer: Any) -> FusedOptimizer:
    """Returns it; raises for one of another library, and for an object that has one inside."""
    if isinstance(optimizer, FusedOptimizer):
        return optimizer
    advice = inside(optimizer)
    if not advice and isinstance(optimizer, Optimizer):
        advice = ": fusedstep.convert() makes one of it"
    raise TypeError(
        f"optimizer must be one of fusedstep.optim, not {torch.typename(optimizer)}{advice}"
    )


def inside(wrapper: Any) -> str:
    """Tells where the optimizer is that an object has inside; no text if it has none.

    Accelerate and Lightning wrap optimizers, schedulers hold them, and ``offload()`` moves them.
    """
    if isinstance(getattr(wrapper, "_inner", None), FusedOptimizer):
        return ", which offload() made of one: call this before offload()"
    path, found = "", wrapper
    while True:
        several = getattr(found, "optimizers", None)
        if isinstance(inner := getattr(found, "optimizer", None), Optimizer):
            path, found = f"{path}.optimizer", inner
        elif isinstance(several, (list, tuple)) and several and isinstance(several[0], Optimizer):
            path, found = f"{path}.optimizers[0]", several[0]
        else:
            return path and f", which wraps the optimizer: give its {path}"


def check_arguments(
    optimizer: FusedOptimizer, bucket_cap_mb: float, accumulation_steps: int
) -> None:
    """Raises for an optimizer of another library, and for an argument that is out of range."""
    check_ours(optimizer)
    if isinstance(accumulation_steps, bool) or not isinstance(accumulation_steps, int):
        raise TypeError(f"accumulation_steps must be an int, not {accumulation_steps!r:.40}")
    if accumulation_steps < 1:
        raise ValueError(f"Invalid accumulation_steps value: {accumulation_steps}")
    if not bucket_cap_mb >= 0:
        raise ValueError(f"Invalid bucket_cap_mb value: {bucket_cap_mb}")
    check_free(optimizer.param_groups)


#: All that wait for gradients. No weak reference to a weight is kept: torch swaps no such weight.
_waiting: WeakSet[Arrivals] = WeakSet()


def check_free(groups: list[dict[str, Any]], besides: Arrivals | None = None) -> None:
    """Raises if the backward pass steps a weight already, other than for ``besides``."""
    others = [each for each in _waiting if each is not besides]
    for index, group in enumerate(groups if others else ()):
        for place, weight in enumerate(group["params"]):
            if weight.requires_grad and any(weight in each for each in others):
                raise RuntimeError(
                    f"{name_of(group, index, place)} is stepped in the backward pass already: call "
                    "remove() of what does so"
                )


def name_in(groups: list[dict[str, Any]], weight: Tensor) -> str:
    """Names a weight of these groups in an error."""
    return next(
        name_of(group, index, place)
        for index, group in enumerate(groups)
        for place, each in enumerate(group["params"])
        if each is weight
    )


def buckets_of(groups: list[dict[str, Any]], cap: float) -> Iterator[Bucket]:
    """Divides the weights of each group: as many as have room in so many bytes, one at least."""
    for group in groups:
        number, size = 0, 0.0
        weights: list[Tensor] = []
        for weight in group["params"]:
            if weights and size + weight.nbytes > cap:
                yield Bucket(group, number, weights)
                number, weights, size = number + 1, [], 0.0
            weights.append(weight)
            size += weight.nbytes
        if weights:
            yield Bucket(group, number, weights)


class _Waiting:
    """A bucket, and the number of its trainable weights that have been in too few passes."""

    __slots__ = ("bucket", "missing")

    def __init__(self, bucket: Bucket) -> None:
        self.bucket, self.missing = bucket, 0


class _Seen:
    """The backward passes that a weight has been in since the last step."""

    __slots__ = ("handle", "is_taken", "last", "passes", "waiting")

    def __init__(self) -> None:
        self.handle: RemovableHandle | None = None
        self.waiting: _Waiting
        self.begin()

    def begin(self) -> None:
        self.passes: float = 0
        self.last = 0  # the number of the last of them
        self.is_taken = False

    @classmethod
    def in_mid_pass(cls) -> _Seen:
        """Of a weight that is new, and may have had gradients unseen: the step is waited for."""
        seen = cls()
        seen.passes = -math.inf
        return seen


class Arrivals:
    """Calls a function with each bucket when all its gradients have been in so many passes.

    It sets them to None, or they are added to. Of infinitely many passes complete_all() is the end.
    The weights are those that the groups of an optimizer have, and that are trainable, when a
    backward pass begins.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        cap: float,
        count: float,
        complete: Callable[[Bucket], None],
        *,
        regrouped: Callable[[], None],
        is_final: bool,
        ended: Callable[[], None] | None = None,
    ) -> None:
        """``cap``: the bytes of a bucket.

        ``regrouped`` is called when groups have been edited, before the buckets follow; it may
        raise. ``is_final``: a bucket that is complete takes no more gradients before the step.
        ``ended`` is called at the end of a backward pass that had gradients.
        """
        self._optimizer, self._cap, self._count = optimizer, cap, count
        self._complete, self._regrouped, self._is_final = complete, regrouped, is_final
        self._ended = ended
        # Weights on several devices have their gradients on several threads.
        self._lock = threading.RLock()
        self._task: int | None = None  # autograd's number of the part of a pass that goes on
        self._newest, self._begun = -1, 0  # the largest so far, and the passes since the last step
        self._seen: dict[Tensor, _Seen] = {}
        self._buckets: list[_Waiting] = []
        self._groups: list[dict[str, Any]] = []
        self._weights: list[list[Tensor]] = []
        _waiting.add(self)
        self._regroup(_Seen)

    def __contains__(self, weight: Tensor) -> bool:
        return weight in self._seen

    def look(self) -> None:
        """Follows groups that have been edited, and weights that have been frozen or unfrozen."""
        with self._lock:
            groups = self._optimizer.param_groups
            weights = (same(g["params"], w) for g, w in zip(groups, self._weights, strict=False))
            if not (same([*groups], self._groups) and all(weights)):
                check_free(groups, besides=self)
                self._regrouped()
                self._regroup(_Seen.in_mid_pass)
            self._count_missing()

    def _regroup(self, new: Callable[[], _Seen]) -> None:
        before, self._seen = self._seen, {}
        self._groups = [*self._optimizer.param_groups]
        self._weights = [[*group["params"]] for group in self._groups]
        self._buckets = [_Waiting(each) for each in buckets_of(self._groups, self._cap)]
        for each in self._buckets:
            for weight in each.bucket.weights:
                known = before.pop(weight, None)
                seen = self._seen[weight] = known or new()
                seen.waiting = each
        for seen in before.values():
            _remove(seen.handle)
        if self in _waiting:
            for weight, seen in self._seen.items():
                seen.handle = seen.handle or _registered(weight, self._arrived)

    def _count_missing(self) -> None:
        for each in self._buckets:
            seen = [self._seen[weight] for weight in each.bucket.weights if weight.requires_grad]
            each.missing = sum(one.passes < self._count for one in seen)

    def _arrived(self, weight: Tensor) -> None:
        with self._lock:
            task = torch._C._current_graph_task_id()
            if task != self._task:
                self._follow(task)
            seen = self._seen.get(weight)
            if seen is None:  # it is in no group any more
                return
            if seen.is_taken:
                raise RuntimeError(
                    f"{name_in(self._groups, weight)} has another gradient since its bucket was "
                    "stepped, and before optimizer.step(): give accumulation_steps the number of "
                    "backward passes of a step, or call optimizer.step() after each. Reentrant "
                    "checkpoints do so within one pass: give them use_reentrant=False"
                )
            seen.passes, seen.last = seen.passes + 1, self._begun
            if seen.passes == self._count:
                seen.waiting.missing -= 1
                if seen.waiting.missing == 0 and self._may_take(seen.waiting):
                    self._take(seen.waiting)

    def _follow(self, task: int) -> None:
        """Notes that a backward pass begins, or goes on with another part."""
        self.look()
        self._task = task
        if not _is_nested():
            # The outer pass goes on if its number is smaller: a part that it runs has come before.
            self._begun += task > self._newest
            if self._ended is not None:
                torch.autograd.Variable._execution_engine.queue_callback(self._ended)
        self._newest = max(self._newest, task)

    def _may_take(self, waiting: _Waiting) -> bool:
        """Returns whether this pass has had all gradients of a bucket.

        Of passes more than were announced it may yet have others: the step takes these.
        """
        weights = waiting.bucket.weights
        return not self._is_final or all(
            self._seen[weight].last == self._begun for weight in weights if weight.requires_grad
        )

    def _take(self, waiting: _Waiting) -> None:
        self._complete(waiting.bucket)
        for weight in waiting.bucket.weights:
            seen = self._seen[weight]
            if self._is_final:
                seen.is_taken = True
            else:
                seen.begin()
        if not self._is_final:
            waiting.missing = sum(weight.requires_grad for weight in waiting.bucket.weights)

    def complete_all(self) -> None:
        """Completes the buckets that have any gradients, and begins anew."""
        with self._lock:
            self.look()
            for weight, seen in self._seen.items():
                if weight.grad is not None and seen.passes <= 0:
                    _install_again(weight)
            try:
                for each in self._buckets:
                    if any(weight.grad is not None for weight in each.bucket.weights):
                        self._complete(each.bucket)
            finally:
                self.begin()

    def begin(self) -> None:
        """Begins anew: a step has been taken."""
        with self._lock:
            self._task, self._begun = None, 0
            for seen in self._seen.values():
                seen.begin()

    def forget(self) -> None:
        """Begins anew with the weights that have not been stepped: their gradients are freed."""
        with self._lock:
            self._task, self._begun = None, 0
            for seen in self._seen.values():
                if not seen.is_taken:
                    seen.begin()

    def remove(self) -> None:
        for seen in self._seen.values():
            _remove(seen.handle)
        self._seen, self._buckets = {}, []
        _waiting.discard(self)


def _is_nested() -> bool:
    """Returns whether a node of another backward pass runs this one, as in reentrant checkpoints.

    Only if that node is Python's.
    """
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code is not BackwardCFunction.apply.__code__:
        frame = frame.f_back
    return frame is not None


def _registered(weight: Tensor, hook: Callable[[Tensor], None]) -> RemovableHandle | None:
    """Registers a hook, of a frozen weight too: it may be trainable later."""
    if weight.requires_grad:
        return weight.register_post_accumulate_grad_hook(hook)
    if weight.is_inference() or not (weight.is_floating_point() or weight.is_complex()):
        return None
    weight.requires_grad_(True)
    try:
        return weight.register_post_accumulate_grad_hook(hook)
    finally:
        weight.requires_grad_(False)


def _install_again(weight: Tensor) -> None:
    """Registers the hooks of a weight anew: if torch has swapped it, they are no more called."""
    hooks = weight._post_accumulate_grad_hooks
    weight._post_accumulate_grad_hooks = hooks


def _remove(handle: RemovableHandle | None) -> None:
    if handle is not None:
        handle.remove()


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

    def begin_iteration(self) -> float | Tensor | None:
        """Returns the norm of the iteration that ends; None where nothing is clipped."""
        norms, self._norms = self._norms, []
        if self._limit is None or not norms:
            return None
        first = next((norm for norm in norms if isinstance(norm, Tensor)), None)
        if first is not None:
            dtype, device = first.dtype, first.device
            stacked = torch.stack([torch.as_tensor(x, dtype=dtype, device=device) for x in norms])
            norm = torch.linalg.vector_norm(stacked)
            self._factor = (self._limit / (norm + EPSILON)).clamp(max=1.0)
            return norm
        of_all = math.hypot(*map(float, norms))
        factor = self._limit / (of_all + EPSILON)
        self._factor = 1.0 if factor >= 1 else factor  # NaN of a norm that is
        return of_all
