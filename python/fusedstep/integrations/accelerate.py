"""Accelerate: the optimizer of a DeepSpeed configuration is one of this package."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from fusedstep import optim
from fusedstep.integrations import deepspeed

_theirs: Callable[[Any], Any] | None = None
_registered_deepspeed = False


def register() -> None:
    """Registers :mod:`fusedstep.integrations.deepspeed`, and keeps ours where DeepSpeed offloads.

    Accelerate has one option for an optimizer: ``"optimizer"`` in DeepSpeed's configuration, with
    an ``accelerate.utils.DummyOptim`` in the script. It selects the classes of this package then.
    Everywhere else ``prepare()`` takes the optimizer itself.

    With ``offload_optimizer`` Accelerate makes a ``DeepSpeedCPUAdam`` of any optimizer that
    ``prepare()`` is given, of a ``Lamb`` too, and keeps its learning rate and weight decay alone.
    After this ours are passed on. DeepSpeed takes them with ``zero_force_ds_cpu_optimizer: false``.
    """
    global _theirs, _registered_deepspeed
    if _theirs is not None:
        return
    from accelerate import accelerator

    _registered_deepspeed = not deepspeed.is_registered()
    deepspeed.register()
    theirs = accelerator.map_pytorch_optim_to_deepspeed

    @functools.wraps(theirs)
    def mapped(optimizer: Any) -> Any:
        return optimizer if isinstance(optimizer, optim.FusedOptimizer) else theirs(optimizer)

    accelerator.map_pytorch_optim_to_deepspeed = mapped
    _theirs = theirs


def unregister() -> None:
    """Undoes what :func:`register` did."""
    global _theirs
    if _theirs is None:
        return
    from accelerate import accelerator

    accelerator.map_pytorch_optim_to_deepspeed = _theirs
    _theirs = None
    if _registered_deepspeed:
        deepspeed.unregister()
