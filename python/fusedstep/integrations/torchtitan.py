"""torchtitan: names in ``ParamGroupConfig(optimizer_name=...)`` are looked up here first."""

from __future__ import annotations

from collections.abc import Callable

from torch.optim import Optimizer

from fusedstep import optim

_theirs: Callable[[str], Callable[..., Optimizer]] | None = None


def register() -> None:
    """Makes ``OptimizersContainer`` take the classes of this package by their names.

    ``optimizer_name="AdamW"`` makes an ``optim.AdamW`` then; ``"AdamW8bit"`` is a name too.
    ``DistMuon`` and unknown names remain torchtitan's.

    Raises:
        RuntimeError: torchtitan is older than 0.3, which chooses optimizers in another way.
    """
    global _theirs
    if _theirs is not None:
        return
    from torchtitan.components.optimizer import OptimizersContainer

    theirs = getattr(OptimizersContainer, "_resolve_optimizer_factory", None)
    if theirs is None:
        raise RuntimeError("this torchtitan has no table of optimizers: 0.3 or later is needed")

    def resolve(name: str) -> Callable[..., Optimizer]:
        cls = getattr(optim, name, None)
        if isinstance(cls, type) and issubclass(cls, optim.FusedOptimizer):
            return cls
        return theirs(name)

    OptimizersContainer._resolve_optimizer_factory = staticmethod(resolve)
    _theirs = theirs


def unregister() -> None:
    """Makes the names select torchtitan's classes again."""
    global _theirs
    if _theirs is None:
        return
    from torchtitan.components.optimizer import OptimizersContainer

    OptimizersContainer._resolve_optimizer_factory = staticmethod(_theirs)
    _theirs = None
