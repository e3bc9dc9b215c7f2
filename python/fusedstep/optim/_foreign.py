"""Options of other libraries: what they are called here, and which values ask for nothing."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Set
from typing import Any, NamedTuple, TypeVar

import torch

_Init = TypeVar("_Init", bound=Callable[..., None])


class Foreign(NamedTuple):
    """An option that other libraries have. A class here may have one of the same name."""

    neutral: tuple[Any, ...] = ()
    """Values that ask for what a class without the option does anyway."""
    ours: Callable[[Any], dict[str, Any]] | None = None
    """Options that say the same, for classes that have them."""
    neutral_in: tuple[str, ...] = ()
    """The classes that the neutral values hold for; all if there are none."""


_DEBIAS = Foreign((True,), lambda on: {} if on else {"debias": False})
_DECOUPLED = Foreign(
    (True,), lambda on: {"decoupled_weight_decay": bool(on)}, ("AdamW", "Adan", "Lamb")
)

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
    "corrected_weight_decay": Foreign((False,)),
    "eps_inside_sqrt": Foreign((False,)),
    "epsilon": Foreign(ours=lambda eps: {"eps": eps}),
    "fp32_optimizer_states": Foreign(
        ours=lambda on: {"state_dtype": torch.float32 if on else None}
    ),
    "grad_averaging": Foreign((True,)),
    "is_paged": Foreign((False,)),
    "learning_rate": Foreign(ours=lambda lr: {"lr": lr}),
    "max_coeff": Foreign((math.inf,), lambda bound: {"max_ratio": bound}),
    "max_unorm": Foreign((0,)),
    "min_8bit_size": Foreign((4096,)),
    "min_coeff": Foreign((0,), lambda bound: {"min_ratio": bound}),
    "optim_bits": Foreign((32,), {8: {"state_dtype": "int8"}}.get),
    "percentile_clipping": Foreign((100,)),
    "set_grad_none": Foreign((True,)),
    "t_alpha": Foreign((None,)),
    "t_beta3": Foreign((None,)),
    "trust_clip": Foreign((False,), lambda on: {"max_ratio": 1.0 if on else math.inf}),
    "use_nvlamb": Foreign((False,), lambda on: {"variant": "nvlamb" if on else "apex"}),
    "weight_decouple": _DECOUPLED,
}


def in_our_words(name: str, value: Any, cls: str, accepted: Set[str]) -> dict[str, Any] | None:
    """The options of a class that say what a foreign one says; None if none do."""
    foreign = FOREIGN[name]
    options = foreign.ours(value) if foreign.ours else None
    if options is not None and options.keys() <= accepted:
        return options
    return {} if value in foreign.neutral and cls in (foreign.neutral_in or (cls,)) else None


def with_advice(init: _Init) -> _Init:
    """Makes a constructor say what to write in place of another library's option."""
    parameters = inspect.signature(init).parameters
    if any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values()):
        return init  # it passes options on to one that says it

    @functools.wraps(init)
    def __init__(self: Any, *args: Any, **options: Any) -> None:  # noqa: N807
        for name, value in options.items():
            if name in FOREIGN and name not in parameters:
                advice = _advice(name, value, type(self).__name__, parameters.keys())
                raise TypeError(
                    f"{init.__qualname__}() got an unexpected keyword argument {name!r}: {advice}"
                )
        init(self, *args, **options)

    return __init__


def _advice(name: str, value: Any, cls: str, accepted: Set[str]) -> str:
    options = in_our_words(name, value, cls, accepted)
    if options is None:
        return f"{name}={value!r} has no counterpart in {cls}"
    if not options:
        return f"leave it out, for {cls} does what {name}={value!r} asks for"
    written = ", ".join(f"{ours}={new!r}" for ours, new in options.items())
    return f"write {written} instead"
