"""DeepSpeed: ZeRO takes optimizers of this package, and its configuration selects them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from fusedstep import optim
from fusedstep._api.names import find
from fusedstep.integrations._replaced import Replaced

#: Classes that names of a configuration select, and those of them that ZeRO did not take before.
_selected: list[type[optim.FusedOptimizer]] = []
_added: list[type[optim.FusedOptimizer]] = []

_replaced = Replaced()

#: Options of DeepSpeed's own Adam that choose between its kernels.
_KERNELS = ("torch_adam", "fp32_optimizer_states")


def register() -> None:
    """Makes ``"optimizer": {"type": "AdamW"}`` of a configuration select classes of this package.

    These are those that update an element by itself, by their names in any case; ``"AdamW8bit"`` is
    one too. As in DeepSpeed, ``"Adam"`` decouples weight decay unless ``adam_w_mode`` is false.
    ``params`` are the options of the class. All other names remain DeepSpeed's.

    The same classes are added to the optimizers that ZeRO takes, ``ZERO_SUPPORTED_OPTIMIZERS``, and
    need no ``zero_allow_untested_optimizer``. ZeRO makes flat partitions of the weights, of which
    LAMB's trust ratio, or any other norm of a whole weight, is another one: such classes still need
    it, and ``deepspeed.initialize`` takes them as ``optimizer``.
    """
    if _replaced:
        return
    from deepspeed.runtime.engine import DeepSpeedEngine
    from deepspeed.runtime.zero.utils import ZERO_SUPPORTED_OPTIMIZERS

    methods = {
        "_is_supported_optimizer": _is_supported,
        "_configure_basic_optimizer": _configure,
    }
    _replaced.put(
        *(
            (DeepSpeedEngine, name, functools.partialmethod(ours, getattr(DeepSpeedEngine, name)))
            for name, ours in methods.items()
        )
    )
    for name in optim.names():
        cls = find(name)
        if cls._elementwise and not cls._composite:
            _selected.append(cls)
            if cls not in ZERO_SUPPORTED_OPTIMIZERS:
                ZERO_SUPPORTED_OPTIMIZERS.append(cls)
                _added.append(cls)


def unregister() -> None:
    """Removes the classes from the list, and makes names select DeepSpeed's again."""
    if not _replaced:
        return
    from deepspeed.runtime.zero.utils import ZERO_SUPPORTED_OPTIMIZERS

    for cls in _added:
        if cls in ZERO_SUPPORTED_OPTIMIZERS:
            ZERO_SUPPORTED_OPTIMIZERS.remove(cls)
    _added.clear()
    _selected.clear()
    _replaced.put_back()


def is_registered() -> bool:
    return bool(_replaced)


def _named(name: str) -> type[optim.FusedOptimizer] | None:
    """Returns the class that a configuration's name selects, if it is one of this package."""
    return next((cls for cls in _selected if cls.__name__.lower() == name.lower()), None)


def _is_supported(engine: Any, theirs: Callable[..., bool], name: str) -> bool:
    return _named(name) is not None or theirs(engine, name)


def _configure(engine: Any, theirs: Callable[..., Any], params: Any) -> Any:
    """Makes the optimizer of the configuration."""
    options = dict(engine.optimizer_params() or {})
    cls = _named(engine.optimizer_name())
    if cls is None or "max_grad_norm" in options:  # DeepSpeed refuses the option in any optimizer
        return theirs(engine, params)
    for option in _KERNELS:
        options.pop(option, None)
    decoupled = options.pop("adam_w_mode", True)
    if cls is optim.Adam:
        options["decoupled_weight_decay"] = decoupled
    return cls(params, **options)
