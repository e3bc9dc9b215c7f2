"""Accelerate: the optimizer of a DeepSpeed configuration is one of this package."""

from __future__ import annotations

import functools
from typing import Any

from fusedstep import optim
from fusedstep.integrations import deepspeed
from fusedstep.integrations._replaced import Replaced

_replaced = Replaced()
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
    global _registered_deepspeed
    if _replaced:
        return
    from accelerate import accelerator

    was_registered = deepspeed.is_registered()
    deepspeed.register()
    try:
        theirs = accelerator.map_pytorch_optim_to_deepspeed
    except AttributeError:
        if not was_registered:
            deepspeed.unregister()
        raise
    _registered_deepspeed = not was_registered

    @functools.wraps(theirs)
    def mapped(optimizer: Any) -> Any:
        is_ours = _replaced and isinstance(optimizer, optim.FusedOptimizer)
        return optimizer if is_ours else theirs(optimizer)

    _replaced.put((accelerator, "map_pytorch_optim_to_deepspeed", mapped))


def unregister() -> None:
    """Undoes what :func:`register` did."""
    if _replaced and _registered_deepspeed:
        deepspeed.unregister()
    _replaced.put_back()
