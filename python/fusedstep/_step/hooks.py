"""Surroundings of a step: hooks, the profiler, and torch.compile."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch._C._dynamo import eval_frame
from torch.autograd import _profiler_enabled
from torch.optim.optimizer import (
    Optimizer,
    _global_optimizer_post_hooks,
    _global_optimizer_pre_hooks,
)

from fusedstep._native import ops
from fusedstep._step.owner import Owner

#: The function that torch.compile has Python call for each frame, or None. A torch that does not
#: tell it is taken to have one.
frame_callback = getattr(eval_frame, "get_eval_frame_callback", lambda: True)


def is_compiling() -> bool:
    """Returns whether torch.compile makes a graph of this code, or looks for such code."""
    return torch.compiler.is_compiling() or frame_callback() is not None


def outside_graphs(method: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a bound method of torch's without the wrapper that hides it from torch.compile.

    The wrapper imports torch._dynamo, which takes seconds: needless where nothing is compiled.
    """
    function: Any = getattr(method, "__func__", None)
    if is_compiling() or getattr(function, "__globals__", None) is not vars(torch._compile):
        return method
    owner: Any = getattr(method, "__self__", None)
    return functools.partial(function.__wrapped__, owner)


def _asks_nothing(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Returns True for ``step(None)`` and ``step(closure=None)``: frameworks mean ``step()``."""
    (closure, *others) = (*args, *kwargs.values())
    return closure is None and not others and (not kwargs or "closure" in kwargs)


def with_hooks(func: Callable[..., Any], own: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps ``step`` as torch does: it calls hooks, and tells the profiler.

    That costs more than a small step, and so is left to those steps that need it. ``own`` is the
    step of this package, which is not even called where the last one can be repeated. Any other
    function, a subclass's or a tracer's, may do more: ``functools.wraps`` makes it look like
    ``own``, but not be it.
    """
    repeats = func is own

    @functools.wraps(func)
    def between_hooks(self: Owner, *args: Any, **kwargs: Any) -> Any:
        """Compares the last step after the hooks, to notice what they have changed."""
        if (
            repeats
            and (not (args or kwargs) or _asks_nothing(args, kwargs))
            and not is_compiling()
            and self._last_step is not None
            and (direct := ops.direct())
            and (not self._store.was_read or self._look_for_holders())
            and direct.repeat(self, self._last_step._replace(empty=()))
        ):
            return None
        return func(self, *args, **kwargs)

    torch_step = Optimizer.profile_hook_step(between_hooks)

    @functools.wraps(func)
    def step(self: Owner, *args: Any, **kwargs: Any) -> Any:
        if (
            repeats
            and (not (args or kwargs) or _asks_nothing(args, kwargs))
            and not torch.compiler.is_compiling()
            and self._last_step is not None
            and (direct := ops.direct())
            and (not self._store.was_read or self._look_for_holders())
            and direct.repeat(self, self._last_step)
        ):
            return None
        if (
            self._optimizer_step_pre_hooks
            or self._optimizer_step_post_hooks
            or _global_optimizer_pre_hooks
            or _global_optimizer_post_hooks
            or is_compiling()
            or _profiler_enabled()
        ):
            return torch_step(self, *args, **kwargs)
        return func(self, *args, **kwargs)

    return step
