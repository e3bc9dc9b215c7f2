"""timm: ``create_optimizer_v2(model, "fusedlamb")`` and ``--opt fusedlamb``."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from fusedstep import optim
from fusedstep._api.names import find
from fusedstep.convert.groups import options_of_timms_muon
from fusedstep.integrations._groups import Groups, listed, made_by, take_over, weights_of

if TYPE_CHECKING:
    from timm.optim import OptimInfo

#: Options that timm's optimizer of the same name has under other names or with other defaults, and
#: those that the rate which timm gives every optimizer needs.
_OPTIONS: dict[str, dict[str, Any]] = {
    "adopt": {"clip_exp": 0.333},
    "galoreadafactor": {"relative_step": False},
    "lamb": {"variant": "timm"},
}

#: timm's defaults of Muon that are others here.
_MUON: dict[str, Any] = {
    "lr": 0.02,
    "weight_decay": 0.0,
    "nesterov": False,
    "ns_coefficients": "quintic",
    "adjust_lr_fn": "match_rms_adamw",
    "eps": 1e-7,
    "betas": (0.9, 0.95),
}
#: Options of timm's LAMB that Lamb has under another name, or not.
_LAMB: dict[str, Any] = {
    "bias_correction": True,
    "grad_averaging": True,
    "trust_clip": False,
    "caution": False,
    "corrected_weight_decay": False,
}
#: timm's defaults of Adafactor's two eps.
_EPS, _EPS_SCALE = 1e-30, 1e-3
#: The shortest side of a matrix that timm's Muon steps, and how often the other may be as long.
_LEAST_SIDE, _LARGEST_RATIO = 4, 128

#: What a name stands for, and what it stood for before, by the name.
_replaced: dict[str, tuple[OptimInfo, OptimInfo | None]] = {}


def register() -> None:
    """Registers the names of :func:`fusedstep.optim.names` with ``fused`` in front of them.

    Left out are classes that take sparse gradients alone, and those without the ``weight_decay``
    that timm gives every optimizer: Rprop.

    So ``create_optimizer_v2(model, "fusedadamw")`` makes an ``optim.AdamW``; ``"fusedsgd"``,
    ``"fusedadam"``, ``"fusedadamw"`` and ``"fusedlamb"`` are no longer apex's. Defaults are those
    that timm gives its own optimizer of the name: ``"fusedsgd"`` has ``nesterov=True``, and
    ``"fusedlamb"`` is ``variant="timm"``. ``"fusedmuon"`` takes the options of timm's Muon too, and
    has AdamW step the weights that it gives to AdamW: each group is divided. Checkpoints of timm's
    optimizer of the name can be loaded.
    """
    if _replaced:
        return
    from timm.optim import OptimInfo
    from timm.optim._optim_factory import default_registry

    known = default_registry.list_optimizers()
    for name in optim.names():
        cls = find(name)
        theirs: dict[str, Any] = {}
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
            opt_class=_in_timms_words(cls),
            description=f"fusedstep.optim.{cls.__name__}",
            has_eps="eps" in accepted,
            has_momentum="momentum" in accepted,
            has_betas="betas" in accepted or cls is optim.Adafactor,
            num_betas=len(accepted["betas"].default) if "betas" in accepted else 2,
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


def _in_timms_words(cls: type[optim.FusedOptimizer]) -> type[optim.FusedOptimizer]:
    """Returns a class that takes timm's options, and loads what timm's class has saved."""

    def make(params: Iterable[Any], **options: Any) -> optim.FusedOptimizer:
        given = groups = listed(params)
        if cls is optim.Muon:
            options = _MUON | options
            groups, options = _groups_of_muon(given, options)
        elif cls is optim.Adafactor:
            options = _options_of_adafactor(options)
        optimizer = cls(groups, **options)
        take_over(optimizer, weights_of(given))
        if cls in (optim.Adan, optim.Lamb):
            optimizer.register_state_dict_post_hook(_add_timms_words)
            optimizer.register_load_state_dict_pre_hook(_remove_timms_words)
        return optimizer

    return made_by(cls, make)


def _add_timms_words(optimizer: Optimizer, saved: dict[str, Any]) -> dict[str, Any]:
    """A dictionary with what timm's Adan and LAMB read, which count steps in groups."""
    groups = []
    for group in saved["param_groups"]:
        counts = [saved["state"].get(key, {}).get("step") for key in group["params"]]
        steps = max((int(count) for count in counts if count is not None), default=0)
        words: dict[str, Any] = {"step": steps} if steps else {}
        if isinstance(optimizer, optim.Lamb):
            words = {
                name: torch.tensor(float(count), dtype=torch.float32, device="cpu")
                for name, count in words.items()
            }
            words |= _LAMB | {
                "bias_correction": bool(group["debias"]),
                "trust_clip": group["max_ratio"] == 1,
            }
        groups.append(group | words)
    return {**saved, "param_groups": groups}


def _remove_timms_words(optimizer: Optimizer, saved: dict[str, Any]) -> dict[str, Any]:
    """A dictionary without what _add_timms_words() has added; one of timm has been translated."""
    added = {"step"} | (_LAMB.keys() if isinstance(optimizer, optim.Lamb) else set())
    groups = [
        {name: value for name, value in group.items() if name not in added}
        for group in saved["param_groups"]
    ]
    return {**saved, "param_groups": groups}


def _options_of_adafactor(options: dict[str, Any]) -> dict[str, Any]:
    """Returns our options for timm's: a given lr is not scaled; without one steps are relative."""
    for name, plain in (("caution", False), ("min_dim_size_to_factor", None)):
        if options.pop(name, plain) != plain:
            raise ValueError(f"{name} of timm has no counterpart in Adafactor")
    new = {"variant": "transformers"} | options
    if options.get("lr") is not None:
        new |= {"relative_step": False, "scale_parameter": False}
    eps, least = new.pop("eps", _EPS), new.pop("eps_scale", _EPS_SCALE)
    new["eps"] = eps if isinstance(eps, (list, tuple)) else (eps, least)
    if (betas := new.pop("betas", None)) is not None:
        new["beta1"] = betas[0]
    return new


def _groups_of_muon(groups: Groups, options: dict[str, Any]) -> tuple[Groups, dict[str, Any]]:
    """Returns the groups of Muon and of AdamW, and the options of the constructor."""
    if options.pop("capturable", False):
        raise ValueError("capturable=True of timm has no counterpart in Muon")
    halves = []
    for group in groups:
        for use_muon in (True, False):
            members = [each for each in group["params"] if _uses_muon(group, each) is use_muon]
            if members:
                words = options_of_timms_muon(options | group, use_muon)
                own = {name: words[name] for name in words if name in {*group, "lr", "eps"}}
                halves.append(own | {"use_muon": use_muon, "params": members})
    words = options_of_timms_muon(options, use_muon=True)
    return halves, {"adamw_eps": options["eps"]} | words


def _uses_muon(group: dict[str, Any], member: Any) -> bool:
    """Returns whether timm's Muon would step a weight itself."""
    if group.get("use_fallback") or "use_muon" in group:
        return not group.get("use_fallback") and bool(group["use_muon"])
    weight: Tensor = member if isinstance(member, Tensor) else member[1]
    shape = weight.shape
    if len(shape) < 2 or 1 in shape[:2]:
        return False
    sides = shape[0], math.prod(shape[1:])
    return min(sides) >= _LEAST_SIDE and max(sides) <= _LARGEST_RATIO * min(sides)
