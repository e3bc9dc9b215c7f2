"""Options of other libraries: what they are called here, and which values ask for nothing."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Container, Iterable, Mapping, Set
from typing import Any, NamedTuple, TypeVar, cast

import torch

from fusedstep._api.registry import classes
from fusedstep._state.checks import did_you_mean

_Init = TypeVar("_Init", bound=Callable[..., None])


class _Anything:
    """The values of an option that changes no step by itself."""

    def __contains__(self, value: Any) -> bool:
        return True


class Foreign(NamedTuple):
    """An option that other libraries have. A class here may have one of the same name."""

    neutral: Container[Any] = ()
    """Values that ask for what a class without the option does anyway."""
    ours: Callable[[Any], dict[str, Any] | None] | None = None
    """Options that say the same, for classes that have them."""
    neutral_in: tuple[str, ...] = ()
    """The classes that the neutral values hold for; all if there are none."""
    elsewhere: tuple[Any, ...] = ()
    """Values that ask for nothing in all other classes."""
    of_decay: bool = False
    """True if no value asks for anything where there is no weight decay."""
    is_advised: bool = True
    """False for an option of torch's: a constructor without it has torch's text."""


_DEBIAS = Foreign((True,), lambda on: {} if on else {"debias": False})
_DECOUPLED = Foreign(
    (True,),
    lambda on: {"decoupled_weight_decay": bool(on)},
    ("AdamW", "Adan", "APOLLOAdamW", "GaLoreAdamW", "Lamb", "Lion"),
    elsewhere=(False,),
    of_decay=True,
)
_SILENT = Foreign(_Anything())

#: Options of apex, bitsandbytes, DeepSpeed, pytorch_optimizer, timm, torchao and transformers.
FOREIGN: dict[str, Foreign] = {
    "adagrad_w_mode": Foreign((False,)),
    "adam": Foreign((False,)),
    "adam_w_mode": _DECOUPLED,
    "adamw_mode": _DECOUPLED,
    "amsgrad": Foreign((False,)),
    "bias_correction": _DEBIAS,
    "bf16_stochastic_round": Foreign(
        (False,), lambda on: {"rounding": "stochastic"} if on else None
    ),
    "block_wise": Foreign((True, False)),
    "caution": Foreign((False,)),
    "correct_bias": _DEBIAS,
    "clipping_threshold": Foreign((None,)),
    "corrected_weight_decay": Foreign((False,)),
    "decoupled": _DECOUPLED,
    # Classes without it that have Adam's states decouple; the states of others tell them apart.
    "decoupled_weight_decay": _DECOUPLED._replace(elsewhere=(False, True), is_advised=False),
    "eps_inside_sqrt": Foreign((False,)),
    "epsilon": Foreign(ours=lambda eps: {"eps": eps}),
    "fixed_decay": Foreign((False,)),
    "fp32_optimizer_states": Foreign(
        ours=lambda on: {"state_dtype": torch.float32 if on else None}
    ),
    "grad_averaging": Foreign((True,)),
    "is_paged": Foreign((False,)),
    "learning_rate": Foreign(ours=lambda lr: {"lr": lr}),
    "lr_in_momentum": Foreign(),  # of timm's RMSpropTF, whose eps is inside of the root
    "max_coeff": Foreign((math.inf,), lambda bound: {"max_ratio": bound}),
    "max_lr_snapshot": _SILENT,  # read by corrected_weight_decay alone
    "max_unorm": Foreign((0,)),
    "min_8bit_size": Foreign((4096,)),
    "min_coeff": Foreign((0,), lambda bound: {"min_ratio": bound}),
    "optim_bits": Foreign((32,), lambda bits: {"state_dtype": "int8"} if bits == 8 else None),
    "percentile_clipping": Foreign((100,)),
    "safety_factor": Foreign(),  # of timm's Muon, which names other coefficients as ours are named
    "set_grad_none": Foreign((True,)),
    "t_alpha": Foreign((None,)),
    "t_beta3": Foreign((None,)),
    "trust_clip": Foreign((False,), lambda on: {"max_ratio": 1.0 if on else math.inf}),
    "use_nvlamb": Foreign((False,), lambda on: {"variant": "nvlamb" if on else "apex"}),
    "weight_decouple": _DECOUPLED,
}


#: Libraries, by options and states that no other has.
_MAKERS = {
    "beta2_cap": "timm's AdafactorBigVision",
    "d_coef": "prodigyopt",
    "d_numerator": "prodigyopt",
    "eps_scale": "timm's Adafactor",
    "exp_avg_lr_1": "timm's LaProp",
    "is_preconditioning": "heavyball",
    "is_initialized": "heavyball",
    "lr_in_momentum": "timm's RMSpropTF",
    "weight_lr_power": "schedulefree",
}


class _Library(NamedTuple):
    """A library with optimizers whose dictionaries look alike although their formulas differ."""

    name: str
    marks: tuple[frozenset[str], ...]
    """Options of its groups: a group that has all of one set is one of this library."""
    never: frozenset[str]
    """Options that its groups never have, but other groups with the same marks."""
    taken: Mapping[str, tuple[frozenset[str], frozenset[str]]]
    """The classes that have its formula, with options by which such a group is known from the
    library's others: those that it has, and those that it has not."""
    decoupled: frozenset[str] = frozenset()
    """Those of these classes with whose weight decay the formula is another one."""
    like: frozenset[str] = frozenset()
    """The classes for whose dictionaries it may be taken; all classes if there are none."""


_TIMM = {
    "ADOPT": (frozenset({"clip_exp"}), frozenset()),
    "Adafactor": (frozenset({"eps_scale"}), frozenset()),
    "Adan": (frozenset({"no_prox"}), frozenset()),
    **dict.fromkeys(("AdamW", "APOLLOAdamW", "GaLoreAdamW"), (frozenset({"amsgrad"}), frozenset())),
    "Lamb": (frozenset({"trust_clip"}), frozenset()),
    "Lion": (frozenset({"betas"}), frozenset({"eps"})),
    "SGD": (frozenset({"dampening"}), frozenset()),
}
_LOOK_ALIKE = (
    _Library(
        "timm",
        (frozenset({"corrected_weight_decay"}), frozenset({"caution", "dampening"})),
        frozenset(),
        _TIMM,
        decoupled=frozenset({"SGD"}),
    ),
    _Library(
        "timm",
        (frozenset({"caution"}),),
        frozenset({"differentiable", "fused"}),
        _TIMM,
    ),
    _Library(
        "timm's NAdamW",
        (frozenset({"betas", "capturable", "eps", "maximize"}),),
        frozenset({"amsgrad", "differentiable"}),
        {},
        like=frozenset({"Adam", "AdamW"}),
    ),
    _Library(
        "pytorch_optimizer or torch_optimizer",
        (frozenset({"weight_decouple"}), frozenset({"foreach", "step"})),
        frozenset({"caution", "decouple_lr", "differentiable", "fused", "no_prox"}),
        {
            "Adadelta": (frozenset({"rho"}), frozenset()),
            "Adamax": (frozenset({"betas", "eps", "fixed_decay"}), frozenset()),
            "Adan": (frozenset({"max_grad_norm"}), frozenset()),
            "Lion": (frozenset({"betas", "fixed_decay"}), frozenset({"eps"})),
            "SGD": (frozenset({"dampening"}), frozenset()),
        },
    ),
)


def look_alike_of(group: Mapping[str, Any], cls: str) -> str | None:
    """The library, or the optimizer of it, of a group that has not the formula of a class."""
    keys = group.keys()
    for library in _LOOK_ALIKE:
        if keys & library.never or not any(marks <= keys for marks in library.marks):
            continue
        if library.like and cls not in library.like:
            continue
        has, lacks = library.taken.get(cls, (None, frozenset()))
        decays = cls in library.decoupled and bool(group.get("weight_decay", True))
        if decays:
            return f"{library.name}'s {cls}W"
        if has is None or not has <= keys or lacks & keys:
            return library.name
    return None


def maker_of(names: Iterable[Any]) -> str:
    """Words for the library that options or states with these names are of, or no text."""
    makers = sorted({_MAKERS[name] for name in names if name in _MAKERS})
    return f": the dictionary is one of {makers[0]}" if makers else ""


def in_our_words(
    name: str, value: Any, cls: str, accepted: Set[str], decays: bool = True
) -> dict[str, Any] | None:
    """The options of a class that say what a foreign one says; None if none do.

    ``decays``: whether there is weight decay.
    """
    foreign = FOREIGN[name]
    options = foreign.ours(value) if foreign.ours else None
    if options is not None and options.keys() <= accepted:
        return options
    holds = cls in (foreign.neutral_in or (cls,))
    says_nothing = value in (foreign.neutral if holds else foreign.elsewhere)
    return {} if says_nothing or (foreign.of_decay and not decays) else None


def options_of_step(optimizer: type[Any]) -> list[str]:
    """The names of the options of a class's step()."""
    parameters = inspect.signature(optimizer.step).parameters.values()
    return [each.name for each in parameters if each.kind is inspect.Parameter.KEYWORD_ONLY]


def not_of_step(optimizer: Any, unknown: Mapping[str, Any], options: Iterable[str]) -> TypeError:
    """The error of a step() that was given options which it lacks.

    ``options``: those of the constructor.
    """
    name, value = next(iter(unknown.items()))
    cls, known = type(optimizer).__name__, options_of_step(type(optimizer))
    if name == "max_grad_norm":
        advice = f"write max_norm={value!r:.40} instead"
    elif name in options:
        advice = f"it is an option of the constructor and of groups, {name}={value!r:.40}"
    else:
        advice = did_you_mean(name, known) or f"its options are {', '.join(known)}"
    return TypeError(f"{cls}.step() got an unexpected keyword argument {name!r}: {advice}")


def with_advice(init: _Init) -> _Init:
    """Makes a constructor say what to write in place of an option that it lacks.

    Such an option is another library's, one of step(), or has a typo.
    """
    parameters = inspect.signature(init).parameters
    if any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values()):
        return init  # it passes options on to one that says it

    @functools.wraps(init)
    def __init__(self: Any, *args: Any, **options: Any) -> None:  # noqa: N807
        for name, value in options.items():
            if name not in parameters and (advice := _advice(name, value, type(self), parameters)):
                raise TypeError(
                    f"{init.__qualname__}() got an unexpected keyword argument {name!r}: {advice}"
                )
        init(self, *args, **options)

    return cast("_Init", __init__)


def _advice(name: str, value: Any, optimizer: type[Any], parameters: Mapping[str, Any]) -> str:
    """What to write in place of an option that a constructor lacks; no text if nobody knows."""
    if name == "max_norm":
        return f"write max_grad_norm={value!r:.40} instead, or step(max_norm={value!r:.40})"
    if name in options_of_step(optimizer):
        return f"it is an option of step(), step({name}={value!r:.40})"
    if name not in FOREIGN:
        is_of_another = any(name in inspect.signature(each).parameters for each in classes)
        return "" if is_of_another else did_you_mean(name, parameters)
    if not FOREIGN[name].is_advised:
        return ""
    cls = optimizer.__name__
    options = in_our_words(name, value, cls, parameters.keys())
    if options is None:
        return f"{name}={value!r} has no counterpart in {cls}"
    if not options:
        return f"leave it out, for {cls} does what {name}={value!r} asks for"
    written = ", ".join(f"{ours}={new!r}" for ours, new in options.items())
    return f"write {written} instead"
