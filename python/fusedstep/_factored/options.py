"""Adafactor's options: torch's and transformers', and the variant that they tell."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from fusedstep._options.kinds import (
    Flag,
    Number,
    NumberTuple,
    Option,
    Options,
    check_number,
    is_pair,
)
from fusedstep._options.shared import SHARED

#: transformers' names for options that torch's class has too.
RENAMED = {"clip_threshold": "d", "decay_rate": "beta2_decay"}

#: The learning rate where none is given, and the largest relative step.
LR = 1e-2

#: Options that torch's class lacks, with their values where a group has no such key.
_BEYOND_TORCH: dict[str, Any] = {
    "beta1": None,
    "scale_parameter": True,
    "relative_step": True,
    "warmup_init": False,
    "max_relative_step": LR,
    "variant": "torch",
}

#: The options of a group, by torch's names; a dictionary may lack those that torch's class lacks.
ADAFACTOR: Options = {
    **SHARED,
    "foreach": Flag(before=None, moot_elsewhere=True),
    "beta2_decay": Number(least=None),
    "eps": NumberTuple(count=None),
    "d": Number(),
    "weight_decay": Number(),
    "beta1": Number(may_be_none=True, always_saved=False),
    "scale_parameter": Flag(),
    "relative_step": Flag(),
    "warmup_init": Flag(),
    "max_relative_step": Number(always_saved=False),
    "variant": Option(),
}


def option_of(group: dict[str, Any], name: str) -> Any:
    return group.get(name, _BEYOND_TORCH[name])


def is_torchs(group: dict[str, Any]) -> bool:
    return option_of(group, "variant") == "torch"


def is_transformers(group: dict[str, Any]) -> bool:
    return option_of(group, "variant") == "transformers"


def averages(group: dict[str, Any]) -> bool:
    """Returns whether updates are averaged."""
    return option_of(group, "beta1") is not None


def _first_eps_of_rule(group: dict[str, Any]) -> float:
    """The first eps, or a number in the place of that of the weight's dtype."""
    given = group["eps"][0]
    if given is None:
        return -1.0 if is_torchs(group) else 1e-30
    return given


#: Hyper-parameters of the native rule, of a group.
FACTORED_RULE: dict[str, Any] = {
    "eps1": _first_eps_of_rule,
    "eps2": lambda group: group["eps"][1],
    "beta1": lambda group: option_of(group, "beta1") or 0.0,
    "averages": averages,
    "is_torchs": is_torchs,
    "scale_parameter": lambda group: option_of(group, "scale_parameter"),
    "relative_step": lambda group: option_of(group, "relative_step"),
    "warmup_init": lambda group: option_of(group, "warmup_init"),
    "max_relative_step": lambda group: option_of(group, "max_relative_step"),
}


def reads_lr(options: dict[str, Any]) -> bool:
    """Returns whether the step size follows from lr; transformers' relative steps do not."""
    return is_torchs(options) or not option_of(options, "relative_step")


def by_torchs_names(given: dict[str, Any]) -> dict[str, Any]:
    """Options of either class by torch's names, without those that are None for not given."""
    options = {name: value for name, value in given.items() if name not in RENAMED}
    for name, ours in RENAMED.items():
        if given.get(name) is not None:
            options[ours] = given[name]
    for name in _BEYOND_TORCH.keys() - {"beta1"}:
        if name in options and options[name] is None:
            del options[name]
    if "lr" in options and options["lr"] is None:  # transformers' way to ask for relative steps
        options["lr"] = LR
    return options


def of_a_variant(given: dict[str, Any]) -> dict[str, Any]:
    """Returns the options of a constructor or a dictionary with ``variant`` filled in.

    The variant is "transformers" if any option is set that torch's Adafactor lacks.
    """
    own = (*RENAMED, *_BEYOND_TORCH.keys() - {"variant"})
    is_torchs = all(given.get(name) is None for name in own)
    return {"variant": "torch" if is_torchs else "transformers"} | by_torchs_names(given)


def as_set(options: dict[str, Any], defaults: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The options without what torch's class lacks and what has not been set.

    ``defaults``: those of an optimizer, in whose place a group has to say it all the same.
    """
    kept = _BEYOND_TORCH.keys() & (defaults or {}).keys()
    found = {
        name: value
        for name, value in options.items()
        if name in kept or name not in _BEYOND_TORCH or value != _BEYOND_TORCH[name]
    }
    if "variant" in options and found.keys() & _BEYOND_TORCH.keys():
        found["variant"] = options["variant"]  # else a dictionary is taken for the other class's
    return found


def check_adafactor_options(options: dict[str, Any]) -> None:
    """Raises the first of the options that only this class has that is out of range."""
    eps, variant = options["eps"], option_of(options, "variant")
    if variant not in ("torch", "transformers"):
        raise ValueError(f"variant must be 'torch' or 'transformers', not {variant!r:.40}")
    if not is_pair(eps):
        raise TypeError(f"eps must be (eps1, eps2), not {eps!r:.40}")
    least_d = 1 if variant == "torch" else 0
    for name, text, value, least in (
        ("lr", "Learning rate should be >= 0", options["lr"], 0),
        ("eps[0]", "epsilon1 should be >= 0", eps[0], 0),
        ("eps[1]", "epsilon2 should be >= 0", eps[1], 0),
        ("d", f"Clipping threshold d should be >= {least_d}", options["d"], least_d),
        ("weight_decay", "weight_decay should be >= 0", options["weight_decay"], 0),
    ):
        if value is None and name == "eps[0]":
            continue
        _check_one_number(name, value)
        if not value >= least:
            raise ValueError(f"{text} but is: {value}")
    check_number("beta2_decay", options["beta2_decay"])
    if not options["beta2_decay"] <= 0:
        raise ValueError(f"beta2_decay should be <= 0 but is: {options['beta2_decay']}")
    beta1 = option_of(options, "beta1")
    if beta1 is not None:
        check_number("beta1", beta1)
        if not 0 <= beta1 < 1:
            raise ValueError(f"Invalid beta1 value: {beta1}")
    if option_of(options, "warmup_init") and not option_of(options, "relative_step"):
        raise ValueError("warmup_init=True requires relative_step=True")
    bound = option_of(options, "max_relative_step")
    check_number("max_relative_step", bound)
    if not bound >= 0:
        raise ValueError(f"max_relative_step should be >= 0 but is: {bound}")
    if bound != LR and variant == "torch":
        raise ValueError("max_relative_step is lr with variant='torch': give lr")


def _check_one_number(name: str, value: Any) -> None:
    check_number(name, value)
    if isinstance(value, Tensor) and value.numel() != 1:
        raise ValueError(f"Tensor {name} must be 1-element")


def check_given_lr(options: dict[str, Any]) -> None:
    """Raises if a constructor is given an lr that no step would read, as transformers' class."""
    _check_one_number("lr", options["lr"])
    if options["lr"] != LR and not reads_lr(options):
        raise ValueError(
            "lr is not read by relative steps of variant='transformers': give max_relative_step "
            "for another upper bound, or relative_step=False for steps of lr"
        )
