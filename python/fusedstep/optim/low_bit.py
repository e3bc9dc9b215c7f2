"""Optimizers under the names that they have where states of 8 and 4 bits come from.

Each is the class that its name begins with, with ``state_dtype`` set: see
:class:`~fusedstep.optim.AdamW`. Recipes pass ``fused`` and ``foreach`` to every optimizer; here
``foreach`` changes nothing.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from fusedstep._api.base import FusedOptimizer
from fusedstep._matrix.transformers_adamw import second_bias
from fusedstep.optim.adagrad import Adagrad
from fusedstep.optim.adam import Adam
from fusedstep.optim.adamw import AdamW
from fusedstep.optim.galore import GaLoreAdamW
from fusedstep.optim.lamb import Lamb
from fusedstep.optim.lion import Lion
from fusedstep.optim.rmsprop import RMSprop
from fusedstep.optim.sgd import SGD

_Class = TypeVar("_Class", bound=type[FusedOptimizer])


def _in_codes(kind: str) -> Callable[[_Class], _Class]:
    """A decorator: the class has its base's constructor, with ``state_dtype`` set."""

    def named(cls: _Class) -> _Class:
        base: Any = cls.__base__

        @functools.wraps(base.__init__)
        def constructor(self: Any, *args: Any, foreach: bool | None = None, **options: Any) -> None:
            base.__init__(self, *args, **({"state_dtype": kind} | options))

        changed: Any = cls
        changed.__init__ = constructor
        cls._usual_codes = kind
        cls.__doc__ = f"""{base.__name__} with states in codes: ``state_dtype="{kind}"``.

    Arguments are those of :class:`{base.__name__}`. ``foreach`` is taken and changes nothing.
    """
        return cls

    return named


@_in_codes("int8")
class Adagrad8bit(Adagrad, is_alias=True): ...


@_in_codes("int8")
class Adam8bit(Adam, is_alias=True): ...


@_in_codes("int8")
class AdamW8bit(AdamW, is_alias=True): ...


@_in_codes("int8")
class Lamb8bit(Lamb, is_alias=True): ...


@_in_codes("int8")
class Lion8bit(Lion, is_alias=True): ...


@_in_codes("int8")
class RMSprop8bit(RMSprop, is_alias=True): ...


@_in_codes("int8")
class SGD8bit(SGD, is_alias=True): ...


@_in_codes("int4")
class Adam4bit(Adam, is_alias=True): ...


@_in_codes("int4")
class AdamW4bit(AdamW, is_alias=True): ...


@_in_codes("fp8")
class AdamFp8(Adam, is_alias=True): ...


@_in_codes("fp8")
class AdamWFp8(AdamW, is_alias=True): ...


class GaLoreAdamW8bit(GaLoreAdamW, is_alias=True):
    """GaLoreAdamW with states in codes, ``state_dtype="int8"``; arguments as galore_torch has them.

    Other defaults than :class:`GaLoreAdamW`'s are those of the published class: ``eps`` is 1e-8,
    ``weight_decay`` 1e-2. ``eps`` is added after the bias of the second moment is corrected, as by
    the kernels of bitsandbytes. The states of fewer than 4,096 numbers are float32; bases always.

    Args:
        amsgrad, args, min_8bit_size, percentile_clipping, block_wise, is_paged: of bitsandbytes;
            others than the defaults are refused
        optim_bits (int): is taken and changes nothing, as in the published class
        foreach (bool): is taken and changes nothing

    The other arguments are those of :class:`GaLoreAdamW`.
    """

    _usual_codes = "int8"
    _rule_values = GaLoreAdamW._rule_values | {"eps_before_bias": False}

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        optim_bits: int = 32,
        args: Any = None,
        min_8bit_size: int = 4096,
        percentile_clipping: int = 100,
        block_wise: bool = True,
        is_paged: bool = False,
        *,
        rank: int | None = None,
        update_proj_gap: int = 200,
        scale: float = 0.25,
        proj_type: str = "std",
        svd: str = "exact",
        stagger: bool = False,
        maximize: bool = False,
        foreach: bool | None = None,
        fused: bool | None = None,
        state_dtype: torch.dtype | str | None = "int8",
        master_weights: bool | str = False,
        rounding: str | None = None,
        seed: int = 0,
        max_grad_norm: float | None = None,
        skip_nonfinite: bool = False,
    ) -> None:
        own = set(inspect.signature(GaLoreAdamW).parameters)
        options = {name: value for name, value in locals().items() if name in own}
        only = {
            "amsgrad": (amsgrad, False),
            "args": (args, None),
            "min_8bit_size": (min_8bit_size, 4096),
            "percentile_clipping": (percentile_clipping, 100),
            "block_wise": (block_wise, True),
            "is_paged": (is_paged, False),
        }
        for name, (value, known) in only.items():
            if value != known:
                raise ValueError(f"{name} must be {known} in GaLoreAdamW8bit, not {value!r:.40}")
        super().__init__(**options | {"foreach": None})

    def _formula(
        self, group: dict[str, Any], weight: Tensor, grad: Tensor, state: dict[str, Tensor]
    ) -> Tensor:
        group = _with_corrected_eps(group, int(state["step"]) + 1)
        return super()._formula(group, weight, grad, state)


def _with_corrected_eps(group: dict[str, Any], count: int) -> dict[str, Any]:
    """A group whose eps is what it is after the correction of the second moment's bias."""
    return group | {"eps": group["eps"] * second_bias(group, count)}
