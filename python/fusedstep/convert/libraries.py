"""Optimizers of other libraries, and the class here that goes on for each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from fusedstep import optim
from fusedstep._api.base import FusedOptimizer
from fusedstep._api.buckets import inside
from fusedstep._api.registry import classes
from fusedstep._sharding.dtensor import local
from fusedstep._state.codes import LEAST_ELEMENTS
from fusedstep.optim import low_bit

#: A class here, and the options that it needs to be the other one.
_Successor = tuple[type[FusedOptimizer], dict[str, Any]]


def successor(optimizer: Optimizer) -> _Successor:
    """The class that goes on for an optimizer, with its options. Raises TypeError if none does."""
    ours = set(classes)
    namesakes = {
        getattr(torch.optim, cls.__name__): cls
        for cls in classes
        if hasattr(torch.optim, cls.__name__) and issubclass(cls, FusedOptimizer)
    }
    cls = type(optimizer)
    is_low_bit = getattr(low_bit, cls.__name__, None) is cls
    if issubclass(cls, FusedOptimizer) and (cls in ours or is_low_bit):
        return cls, {}
    if cls in namesakes:
        return namesakes[cls], {}
    relative = _RELATIVES.get((cls.__module__.partition(".")[0], cls.__name__))
    if relative:
        return relative(optimizer)

    what = f"optimizer is a {cls.__module__}.{cls.__qualname__}"
    if advice := inside(optimizer):
        raise TypeError(f"{what}{advice}")
    known = sorted(f"torch.optim.{namesake.__name__}" for namesake in namesakes)
    known += sorted(
        f"{package}'{'s' * (package[-1] != 's')} {name}" for package, name in _RELATIVES
    )
    parents = [parent for parent in cls.__mro__ if parent in ours or parent in namesakes]
    why = f" (what it adds to {parents[0].__name__} would be lost)" if parents else ""
    raise TypeError(f"{what}{why}. Taken are the classes of fusedstep.optim, {', '.join(known)}")


def in_groups_of_storage(optimizer: Any) -> list[dict[str, Any]]:
    """The groups of an optimizer, with all weights of a group in codes, or none.

    torchao keeps float32 states of large weights that are no whole number of its blocks. Where a
    group has others in codes, such weights get a group of their own, after all groups.
    """
    groups: list[dict[str, Any]] = []
    apart: list[dict[str, Any]] = []
    for group in optimizer.param_groups:
        odd = [p for p in group["params"] if _is_odd(optimizer, p)]
        if not odd or len(odd) == len(_large(group["params"])):
            groups.append(group)
            continue
        for target, is_odd in ((groups, False), (apart, True)):
            places = [
                i for i, p in enumerate(group["params"]) if any(p is q for q in odd) is is_odd
            ]
            lists = {key: group[key] for key in ("params", "param_names") if key in group}
            part = {key: [members[i] for i in places] for key, members in lists.items()}
            target.append(group | part)
    return groups + apart


def storage_of(optimizer: Any, group: dict[str, Any]) -> dict[str, Any]:
    """The ``state_dtype`` of such a group, where it is not the one of the optimizer."""
    return {"state_dtype": None} if any(_is_odd(optimizer, p) for p in group["params"]) else {}


def _large(weights: list[Tensor]) -> list[Tensor]:
    return [p for p in weights if local(p).numel() >= LEAST_ELEMENTS]


def _is_odd(optimizer: Any, weight: Tensor) -> bool:
    """Returns whether torchao keeps numbers of a weight that could be in codes here."""
    if not type(optimizer).__module__.startswith("torchao."):
        return False
    block = getattr(optimizer, "block_size", 1)
    return bool(_large([weight])) and local(weight).numel() % block > 0


def _adan(optimizer: Any) -> _Successor:
    return optim.Adan, {}


def _adam(optimizer: Any) -> _Successor:
    return (optim.AdamW if optimizer.adam_w_mode else optim.Adam), {}


def _apex_adagrad(optimizer: Any) -> _Successor:
    if optimizer.adagrad_w_mode:
        raise ValueError("the optimizer's adagrad_w_mode=True has no counterpart in Adagrad")
    return optim.Adagrad, {}


def _deepspeed_adagrad(optimizer: Any) -> _Successor:
    # It adds the decay to what it squares, but not to what it divides by the root.
    if any(group["weight_decay"] for group in optimizer.param_groups):
        raise ValueError("DeepSpeedCPUAdagrad's weight_decay has no counterpart in Adagrad")
    return optim.Adagrad, {}


def _low_rank(optimizer: Any) -> _Successor:
    """GaLore's and APOLLO's packages call their classes AdamW, and APOLLO's has GaLore's too."""
    is_apollo = type(optimizer).__module__ == "apollo_torch.apollo"
    return (optim.APOLLOAdamW if is_apollo else optim.GaLoreAdamW), {}


def _musgd(optimizer: Any) -> _Successor:
    return optim.MuSGD, {"muon": optimizer.muon, "sgd": optimizer.sgd}


def _torchao(cls: type[FusedOptimizer], kind: str) -> Callable[[Any], _Successor]:
    def relative(optimizer: Any) -> _Successor:
        rounding = {"rounding": "stochastic"} if optimizer.bf16_stochastic_round else {}
        return cls, {"state_dtype": kind} | rounding

    return relative


#: Arguments of bitsandbytes that change a formula, with the values that do not.
_BITSANDBYTES_PLAIN = {"max_unorm": 0, "skip_zeros": False, "percentile_clipping": 100}


def _bitsandbytes(cls: type[FusedOptimizer]) -> Callable[[Any], _Successor]:
    def relative(optimizer: Any) -> _Successor:
        arguments, name = optimizer.args, type(optimizer).__name__
        if cls is optim.Lamb:
            raise ValueError(
                f"bitsandbytes' {name} has no trust ratio as Lamb has it: with 8-bit states it "
                "steps as AdamW does. Make the optimizer that you want, and load the states by "
                "fusedstep.import_state_dict"
            )
        for argument, plain in _BITSANDBYTES_PLAIN.items():
            if (value := getattr(arguments, argument, plain)) != plain:
                raise ValueError(
                    f"the optimizer's {argument}={value} has no counterpart in {cls.__name__}"
                )
        is_8bit = arguments.optim_bits == 8
        return cls, {"state_dtype": "int8" if is_8bit else torch.float32}

    return relative


#: By package and name.
_RELATIVES: dict[tuple[str, str], Callable[[Any], _Successor]] = {
    ("adan", "Adan"): _adan,
    ("apollo_torch", "AdamW"): _low_rank,
    ("apex", "FusedAdam"): _adam,
    ("apex", "FusedAdagrad"): _apex_adagrad,
    **{
        ("bitsandbytes", f"{prefix}{name}{bits}"): _bitsandbytes(cls)
        for name, cls, prefixes in (
            ("Adagrad", optim.Adagrad, ("",)),
            ("Adam", optim.Adam, ("", "Paged")),
            ("AdamW", optim.AdamW, ("", "Paged")),
            ("LAMB", optim.Lamb, ("",)),
            ("Lion", optim.Lion, ("", "Paged")),
            ("RMSprop", optim.RMSprop, ("",)),
            ("SGD", optim.SGD, ("",)),
        )
        for prefix in prefixes
        for bits in ("", "8bit", "32bit")
    },
    ("came_pytorch", "CAME"): lambda optimizer: (optim.CAME, {}),
    ("deepspeed", "FusedAdam"): _adam,
    ("deepspeed", "DeepSpeedCPUAdam"): _adam,
    ("deepspeed", "DeepSpeedCPUAdagrad"): _deepspeed_adagrad,
    ("galore_torch", "AdamW"): _low_rank,
    ("galore_torch", "AdamW8bit"): lambda optimizer: (low_bit.GaLoreAdamW8bit, {}),
    ("galore_torch", "Adafactor"): lambda optimizer: (optim.GaLoreAdafactor, {}),
    ("timm", "Adan"): _adan,
    ("timm", "Adopt"): lambda optimizer: (optim.ADOPT, {}),
    ("torchrec", "RowWiseAdagrad"): lambda optimizer: (optim.RowWiseAdagrad, {}),
    **{
        ("torchao", f"{cls.__name__}{suffix}"): _torchao(cls, kind)
        for cls in (optim.Adam, optim.AdamW)
        for suffix, kind in (("8bit", "int8"), ("4bit", "int4"), ("Fp8", "fp8"))
    },
    ("transformers", "Adafactor"): lambda optimizer: (optim.Adafactor, {}),
    ("ultralytics", "MuSGD"): _musgd,
}
