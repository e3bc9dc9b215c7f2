"""torchtitan: names in ``ParamGroupConfig(optimizer_name=...)`` are looked up here first."""

from __future__ import annotations

from collections.abc import Callable

from torch.optim import Optimizer

from fusedstep import optim
from fusedstep.integrations._replaced import Replaced

_replaced = Replaced()


def register() -> None:
    """Makes ``OptimizersContainer`` take the classes of this package by their names.

    ``optimizer_name="AdamW"`` makes an ``optim.AdamW`` then; ``"AdamW8bit"`` is a name too.
    ``DistMuon`` and unknown names remain torchtitan's.

    Raises:
        RuntimeError: torchtitan is older than 0.3, which chooses optimizers in another way.
    """
    if _replaced:
        return
    from torchtitan.components.optimizer import OptimizersContainer

    theirs = getattr(OptimizersContainer, "_resolve_optimizer_factory", None)
    if theirs is None:
        raise RuntimeError("this torchtitan has no table of optimizers: 0.3 or later is needed")

    def resolve(name: str) -> Callable[..., Optimizer]:
        cls = getattr(optim, name, None) if _replaced else None
        if isinstance(cls, type) and issubclass(cls, optim.FusedOptimizer):
            return cls
        return theirs(name)

    _replaced.put((OptimizersContainer, "_resolve_optimizer_factory", staticmethod(resolve)))


def unregister() -> None:
    """Makes the names select torchtitan's classes again."""
    _replaced.put_back()
