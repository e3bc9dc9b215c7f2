"""DeepSpeed: ZeRO takes optimizers of this package without ``zero_allow_untested_optimizer``."""

from __future__ import annotations

from fusedstep import optim
from fusedstep.optim._create import find

_added: list[type[optim.FusedOptimizer]] = []


def register() -> None:
    """Adds the classes to the optimizers that ZeRO takes: ``ZERO_SUPPORTED_OPTIMIZERS``.

    These are those that update an element by itself. ZeRO makes flat partitions of the weights, of
    which LAMB's trust ratio, or any other norm of a whole weight, is another one. Such classes
    still need ``zero_allow_untested_optimizer``.
    """
    if _added:
        return
    from deepspeed.runtime.zero.utils import ZERO_SUPPORTED_OPTIMIZERS

    for name in optim.names():
        cls = find(name)
        composite = cls._composite or cls._is_composite is not optim.FusedOptimizer._is_composite
        if cls._elementwise and not composite and cls not in ZERO_SUPPORTED_OPTIMIZERS:
            ZERO_SUPPORTED_OPTIMIZERS.append(cls)
            _added.append(cls)


def unregister() -> None:
    """Removes the classes from the list."""
    if not _added:
        return
    from deepspeed.runtime.zero.utils import ZERO_SUPPORTED_OPTIMIZERS

    for cls in _added:
        ZERO_SUPPORTED_OPTIMIZERS.remove(cls)
    _added.clear()
