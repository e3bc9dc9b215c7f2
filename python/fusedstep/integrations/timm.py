"""timm: ``create_optimizer_v2(model, "fusedlamb")`` and ``--opt fusedlamb``."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from fusedstep import optim
from fusedstep.optim._create import find

if TYPE_CHECKING:
    from timm.optim import OptimInfo

#: Options that timm's optimizer of the same name has under other names, and those that the rate
#: which timm gives every optimizer needs.
_OPTIONS: dict[str, dict[str, Any]] = {
    "galoreadafactor": {"relative_step": False},
    "lamb": {"variant": "timm"},
}

#: What a name stands for, and what it stood for before, by the name.
_replaced: dict[str, tuple[OptimInfo, OptimInfo | None]] = {}


def register() -> None:
    """Registers the names of :func:`fusedstep.optim.names` with ``fused`` in front of them.

    Left out are classes that take sparse gradients alone, and those without the ``weight_decay``
    that timm gives every optimizer: Rprop.

    So ``create_optimizer_v2(model, "fusedadamw")`` makes an ``optim.AdamW``; ``"fusedsgd"``,
    ``"fusedadam"``, ``"fusedadamw"`` and ``"fusedlamb"`` are no longer apex's. Defaults are those
    that timm gives its own optimizer of the name: ``"fusedsgd"`` has ``nesterov=True``, and
    ``"fusedlamb"`` is ``variant="timm"``.
    """
    if _replaced:
        return
    from timm.optim import OptimInfo
    from timm.optim._optim_factory import default_registry

    known = default_registry.list_optimizers()
    for name in optim.names():
        cls, theirs = find(name), {}
        accepted = inspect.signature(cls).parameters
        if not cls._takes_dense or "weight_decay" not in accepted:
            continue
        if name in known:
            theirs = default_registry.get_optimizer_info(name).defaults or {}
        defaults = {option: value for option, value in theirs.items() if option in accepted}
        fused = f"fused{name}"
        replaced = default_registry.get_optimizer_info(fused) if fused in known else None
        info = OptimInfo(
            name=fused,
            opt_class=cls,
            description=f"fusedstep.optim.{cls.__name__}",
            has_eps="eps" in accepted,
            has_momentum="momentum" in accepted,
            has_betas="betas" in accepted,
            num_betas=cls._betas,
            defaults=defaults | _OPTIONS.get(name, {}),
        )
        # register() would warn that apex's are overwritten.
        default_registry._optimizers[fused] = info
        _replaced[fused] = info, replaced


def unregister() -> None:
    """Removes the names, and registers apex's again; what others have registered since stays."""
    if not _replaced:
        return
    from timm.optim._optim_factory import default_registry

    known = default_registry._optimizers
    for name, (ours, former) in _replaced.items():
        if known.get(name) is not ours:
            continue
        if former is None:
            del known[name]
        else:
            known[name] = former
    _replaced.clear()
