"""Published options of optimizers, each with its source."""

from __future__ import annotations

from typing import Any, NamedTuple

from fusedstep._api.base import FusedOptimizer
from fusedstep._api.names import name_of_class
from fusedstep._state.checks import did_you_mean


class Preset(NamedTuple):
    """Options, and those of the groups without Muon's part."""

    options: dict[str, Any]
    others: dict[str, Any] = {}  # noqa: RUF012 – a default that nobody writes to


#: By the name of the class in lower case, and by name. The docstring of create() has the sources.
PRESETS: dict[str, dict[str, Preset]] = {
    "adamw": {
        "gpt": Preset(
            {"lr": 6e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
            | {"max_grad_norm": 1.0}
        ),
        "llama": Preset(
            {"lr": 3e-4, "betas": (0.9, 0.95), "eps": 1e-5, "weight_decay": 0.1}
            | {"max_grad_norm": 1.0}
        ),
        "bert": Preset(
            {"lr": 1e-4, "betas": (0.9, 0.999), "eps": 1e-6, "weight_decay": 0.01}
            | {"max_grad_norm": 1.0}
        ),
        "finetune": Preset(
            {"lr": 2e-5, "betas": (0.9, 0.999), "eps": 1e-6, "weight_decay": 0.01}
            | {"max_grad_norm": 1.0}
        ),
        "vit": Preset({"lr": 1e-3, "weight_decay": 0.05}),
    },
    "lamb": {"bert-lamb": Preset({"lr": 6.25e-4, "betas": (0.9, 0.999), "weight_decay": 0.01})},
    "sgd": {"resnet": Preset({"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 1e-4})},
    "muon": {
        "gpt": Preset(
            {"lr": 0.02, "momentum": 0.95, "weight_decay": 0.01},
            {"lr": 3e-4, "betas": (0.9, 0.95)},
        )
    },
    "galoreadamw": {
        "llama": Preset({"lr": 0.01, "update_proj_gap": 200, "scale": 0.25, "weight_decay": 0.0})
    },
}


def preset_of(cls: type[FusedOptimizer], preset: str) -> Preset:
    """Returns a preset of a class. One with states in codes has those of its base.

    Raises:
        ValueError: there is none of this name for the class; the text lists those that there are.
    """
    base = cls.__bases__[0] if cls._usual_codes else cls
    own = PRESETS.get(name_of_class(base), {})
    if isinstance(preset, str) and preset in own:
        return own[preset]
    others = [f"{name} has {', '.join(each)}" for name, each in PRESETS.items()]
    known = f"presets of {cls.__name__} are {', '.join(own)}" if own else "it has none"
    near = did_you_mean(str(preset), own)
    raise ValueError(
        f"{cls.__name__} has no preset {preset!r:.40}: {near or known} ({'; '.join(others)})"
    )
