"""Steps during the backward pass: the memory of gradients is a bucket's, not the model's."""

from __future__ import annotations

from types import TracebackType
from typing import Any

import torch

from fusedstep._api.base import FusedOptimizer
from fusedstep._api.buckets import Arrivals, PreviousNorm, check_arguments
from fusedstep._sharding.dtensor import is_dtensor
from fusedstep._state.checks import name_of
from fusedstep._step.limits import needs_whole_norm
from fusedstep._step.plan import Bucket

__all__ = ["BackwardSteps", "step_in_backward"]


def step_in_backward(
    optimizer: FusedOptimizer,
    *,
    bucket_cap_mb: float = 25.0,
    accumulation_steps: int = 1,
    max_previous_norm: float | None = None,
) -> BackwardSteps:
    """Lets an optimizer step weights as soon as the backward pass has their gradients.

    The weights of each group are divided into buckets, in their order. When all gradients of a
    bucket are there, it is stepped and they are freed. ``optimizer.step()`` is called as ever: it
    steps what is left, weights without a gradient for one that are in a bucket with others, and
    ends the iteration. The weights are those of ordinary steps, bit for bit, but where products of
    several matrices are taken at once (:class:`fusedstep.optim.Muon`).

    With ``max_previous_norm`` gradients are clipped by the norm of the iteration before, since that
    of this one is not known before its last bucket: they are multiplied by
    ``min(1, max_previous_norm / (norm + 1e-6))``, with the norm of all gradients between the last
    two calls of ``optimizer.step()``, before they were clipped. In the first iteration the factor
    is 1.

    Args:
        optimizer: one of :mod:`fusedstep.optim`
        bucket_cap_mb: the size of the gradients of a bucket, in MiB; a larger weight is a bucket
            of its own. 0 steps each weight alone (default: 25)
        accumulation_steps: backward passes whose gradients are added up before a step. Call
            ``optimizer.step()`` after the last of them: a gradient that comes before that, for a
            bucket that has been stepped, is an error out of ``backward()`` (default: 1)
        max_previous_norm: see above (default: None)

    Returns:
        A handle, as :meth:`torch.Tensor.register_hook` returns one: ``remove()`` ends it, as does
        leaving a ``with`` block.

    Raises:
        TypeError: if the optimizer is not one of ours, or ``accumulation_steps`` is no int.
        ValueError: if an argument is out of range.
        RuntimeError: for what needs all gradients at once or other processes' gradients:
            ``max_grad_norm``, ``skip_nonfinite``, ``differentiable``, a second
            ``step_in_backward``, weights that are on several processes and no DTensors
            (DistributedDataParallel averages their gradients after they were stepped), and DTensors
            of optimizers that take norms of weights. At ``optimizer.step()``: for ``max_norm``,
            ``error_if_nonfinite`` and a GradScaler, which learns of infinite gradients when weights
            have been stepped.

    Example::

        >>> optimizer = optim.AdamW(model.parameters())
        >>> fusedstep.step_in_backward(optimizer)
        >>> model(input).sum().backward()  # steps, and frees gradients
        >>> optimizer.step()
    """
    check_arguments(optimizer, bucket_cap_mb, accumulation_steps)
    norm = PreviousNorm(max_previous_norm)
    _refuse(optimizer)
    return BackwardSteps(optimizer, bucket_cap_mb, accumulation_steps, norm)


def _refuse(optimizer: FusedOptimizer) -> None:
    if name := needs_whole_norm(optimizer):
        way = "step_in_backward(…, max_previous_norm=…), or " if name == "max_grad_norm" else ""
        raise RuntimeError(
            f"{name} needs all gradients before the first step: use {way}steps after the backward "
            "pass"
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


class BackwardSteps:
    """The handle of :func:`step_in_backward`."""

    def __init__(
        self,
        optimizer: FusedOptimizer,
        bucket_cap_mb: float,
        accumulation_steps: int,
        norm: PreviousNorm,
    ) -> None:
        self._optimizer, self._norm = optimizer, norm
        self._arrivals = Arrivals(
            optimizer,
            bucket_cap_mb * 2**20,
            accumulation_steps,
            self._step,
            regrouped=self._follow_groups,
            is_final=True,
        )
        self._handles = [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
        ]

    def remove(self) -> None:
        """Ends the steps in the backward pass; gradients that are there stay."""
        self._arrivals.remove()
        for handle in self._handles:
            handle.remove()

    def __enter__(self) -> BackwardSteps:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.remove()

    def _follow_groups(self) -> None:
        _refuse(self._optimizer)
        self._optimizer._forget_plans()  # weights have other places, by which they are rounded

    @torch._disable_dynamo
    def _step(self, bucket: Bucket) -> None:
        with torch.no_grad():
            self._norm.add(self._optimizer._update_bucket(bucket, self._norm.factor))

    def _before_step(
        self, optimizer: FusedOptimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if kwargs.get("max_norm") is not None:
            raise RuntimeError(
                "step(max_norm=…) comes after the steps in the backward pass: use "
                "step_in_backward(…, max_previous_norm=…)"
            )
        if kwargs.get("error_if_nonfinite"):
            raise RuntimeError(
                "step(error_if_nonfinite=True) comes after the steps in the backward pass, which "
                "have taken such a gradient by then"
            )
        if getattr(optimizer, "grad_scale", None) is not None:
            raise RuntimeError(
                "a GradScaler learns of infinite gradients after the steps in the backward pass: "
                "train in bfloat16, or step after the backward pass"
            )
        closure = args[1] if len(args) > 1 else kwargs.get("closure")  # after the optimizer
        if closure is None:
            self._arrivals.complete_all()
            return None

        def closed() -> Any:
            loss = closure()
            self._arrivals.complete_all()
            return loss

        return (optimizer, closed), {
            name: value for name, value in kwargs.items() if name != "closure"
        }

    def _after_step(self, *_: Any) -> None:
        norm = self._norm.begin_iteration()
        if norm is not None:
            self._optimizer._norm = norm
