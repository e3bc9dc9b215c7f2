"""Groups of optimi and of two classes of timm, which mean something else than here.

optimi keeps moments that are debiased: those here times ``1 - beta**step``. timm's Muon has other
coefficients by the names that they have here, and says of each weight who steps it. timm's
Adafactor factors the moments of large matrices alone, and does not scale a given lr by the weight.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from fusedstep import optim
from fusedstep._api.base import FusedOptimizer
from fusedstep._api.saved import REMOVE
from fusedstep._options.shared import own_option
from fusedstep._state.storage import BESIDE

#: optimi's options that are translated, or that choose among its implementations.
_OF_OPTIMI = frozenset(
    {"adam_wd", "beta1", "beta2", "beta3", "dampening", "decouple_lr", "decouple_wd", "foreach"}
    | {"gradient_release", "kahan_sum", "max_lr", "setup", "torch_init", "triton"}
)

#: The beta of each debiased moment, by its place; in Adan that of the square is the third.
_DEBIASED = {"exp_avg": 0, "exp_avg_diff": 1, "exp_avg_sq": -1}

#: Options of timm's Muon that change its steps, with the values that do not.
_TIMM_PLAIN = {"algo": "muon", "conv_mode": "flatten", "safety_factor": 1.0, "scale_eps": False}
_OF_TIMM = frozenset({*_TIMM_PLAIN, "capturable", "fallback_lr_scale", "normalize_spatial"}) | {
    *("use_fallback", "verbose")
}

#: timm's ways to adjust the learning rate that have another name here.
_TIMM_ADJUSTMENTS = {"rms_to_rms": "spectral_unclamped"}

#: timm's coefficients by name.
_TIMM_COEFFICIENTS: dict[str, tuple[tuple[float, float, float], ...]] = {
    "original": ((3.4445, -4.7750, 2.0315),),
    "quintic": (
        (4.0848, -6.8946, 2.9270),
        (3.9505, -6.3029, 2.6377),
        (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    ),
}


def is_of_optimi(group: Mapping[str, Any]) -> bool:
    return {"decouple_lr", "kahan_sum"} <= group.keys()


def is_of_timms_muon(group: Mapping[str, Any]) -> bool:
    return {"ns_coefficients", "safety_factor"} <= group.keys()


def is_of_timms_adafactor(group: Mapping[str, Any]) -> bool:
    return {"eps_scale", "min_dim_size_to_factor"} <= group.keys()


def in_our_options(
    group: Mapping[str, Any], states: list[Any], cls: type[FusedOptimizer]
) -> dict[str, Any]:
    """The group with options of this package; any other as it is.

    Raises:
        ValueError: for options that the class does not do.
    """
    if is_of_optimi(group):
        return _from_optimi(group, cls)
    if is_of_timms_muon(group) and issubclass(cls, optim.Muon):
        return _from_timms_muon(group, states)
    if is_of_timms_adafactor(group) and issubclass(cls, optim.Adafactor):
        return _from_timms_adafactor(group)
    return dict(group)


def in_our_states(
    what: str, weight: Tensor, state: Any, group: Mapping[str, Any], new_group: Mapping[str, Any]
) -> Any:
    """The state of a weight of such a group under our names; any other as it is.

    `what`: the weight in an error. `new_group`: the options to come.

    Raises:
        ValueError: for a weight that the other class steps by another formula.
    """
    if is_of_timms_adafactor(group):
        _check_factored(what, weight.shape, group["min_dim_size_to_factor"])
    if not (isinstance(state, Mapping) and state):
        return state
    if is_of_optimi(group):
        return _state_of_optimi(what, state, group, new_group)
    if is_of_timms_muon(group):
        return {name: value for name, value in state.items() if name != "use_muon"}
    return state


def _from_optimi(group: Mapping[str, Any], cls: type[FusedOptimizer]) -> dict[str, Any]:
    if group.get("gradient_release"):
        raise ValueError(f"gradient_release=True has no counterpart in {cls.__name__}{REMOVE}")
    if issubclass(cls, optim.Adam) and "decouple_wd" not in group:
        raise ValueError(
            f"the dictionary is one of optimi's StableAdamW, whose formula {cls.__name__} has not"
        )
    new = {name: value for name, value in group.items() if name not in _OF_OPTIMI}
    betas = tuple(group[name] for name in ("beta1", "beta2", "beta3") if name in group)
    if betas:
        new["betas"] = betas
    if "dampening" in group:
        new["dampening"] = group["momentum"] if group["dampening"] else 0
    if "adam_wd" in group:
        new["no_prox"] = False  # 0.3.3 does not hand adam_wd=True on to its step
    if "decouple_wd" in group:
        new["weight_decouple"] = bool(group["decouple_wd"] or group["decouple_lr"])
    if group["decouple_lr"]:
        new["weight_decay"] = group["weight_decay"] / group["max_lr"]
    return new


def _state_of_optimi(
    what: str, state: Mapping[str, Any], group: Mapping[str, Any], new_group: Mapping[str, Any]
) -> dict[str, Any]:
    new = {name: value for name, value in state.items() if name not in ("group", "kahan_comp")}
    error = state.get("kahan_comp")
    if isinstance(error, Tensor) and error.is_floating_point() and error.any():
        if own_option(new_group, "rounding") != "kahan":
            raise ValueError(
                f"kahan_comp of {what} is not zero: rounding='kahan' of the optimizer reads it"
            )
        new[BESIDE["kahan"]] = error
    if "momentum" in group:
        return {"momentum_buffer": new["exp_avg"]} if group["momentum"] else {}
    if "prev_grad" in new:
        new["neg_pre_grad"] = new.pop("prev_grad")
    if "eps" in group:  # all but Lion, whose average starts at zero as it does here
        steps = float(state.get("step", group.get("step", 0)))
        betas = new_group["betas"]
        for name, place in _DEBIASED.items():
            if isinstance(new.get(name), Tensor):
                new[name] = new[name] * (1 - float(betas[place]) ** steps)
    return new


def _from_timms_muon(group: Mapping[str, Any], states: list[Any]) -> dict[str, Any]:
    kinds = {s["use_muon"] for s in states if isinstance(s, Mapping) and "use_muon" in s}
    if len(kinds) > 1:
        raise ValueError(
            "a group has weights that timm's Muon steps and others that its AdamW does: load it "
            "into an optimizer over two groups, from a dictionary that was divided in the same way"
        )
    use_muon = bool(kinds.pop()) if kinds else not group.get("use_fallback")
    new = options_of_timms_muon(group, use_muon, REMOVE)
    return new | ({"use_muon": False} if not use_muon else {"use_muon": True} if kinds else {})


def _from_timms_adafactor(group: Mapping[str, Any]) -> dict[str, Any]:
    new = {name: value for name, value in group.items() if name != "min_dim_size_to_factor"}
    new["eps"] = (group["eps"], new.pop("eps_scale"))
    return new if group["relative_step"] else new | {"scale_parameter": False}


def _check_factored(what: str, shape: Sequence[int], least: int) -> None:
    """Raises unless timm's Adafactor factors the moments of a weight as ours does."""
    if len(shape) < 2:
        return
    of_filters = len(shape) > 2 and min(shape[:2]) > least
    if of_filters or min(shape[-2:]) <= least:
        kept = "of the first two dimensions" if of_filters else "of each element"
        raise ValueError(
            f"timm's Adafactor with min_dim_size_to_factor={least} keeps second moments {kept} of "
            f"{what}, of the shape {list(shape)}, where Adafactor has those of rows and columns of "
            "the last two dimensions"
        )


def options_of_timms_muon(
    group: Mapping[str, Any], use_muon: bool, advice: str = ""
) -> dict[str, Any]:
    """The options of a group of timm's Muon for weights that it, or else its AdamW, steps.

    Raises:
        ValueError: for options that Muon here does not do; the text ends with the advice.
    """
    for name, plain in _TIMM_PLAIN.items():
        if group.get(name, plain) != plain:
            raise _none_of_timm(name, group[name], advice)
    coefficients = group["ns_coefficients"]
    if isinstance(coefficients, str):
        if coefficients not in _TIMM_COEFFICIENTS:
            raise _none_of_timm("ns_coefficients", coefficients, advice)
        coefficients = _TIMM_COEFFICIENTS[coefficients]
    adjustment = group["adjust_lr_fn"]
    if adjustment is None:
        raise _none_of_timm("adjust_lr_fn", None, advice)
    new = {name: value for name, value in group.items() if name not in _OF_TIMM}
    new |= {"ns_coefficients": coefficients, "stacked": False}
    new["adjust_lr_fn"] = _TIMM_ADJUSTMENTS.get(adjustment, adjustment)
    if use_muon:
        return new
    if group["nesterov"]:
        raise ValueError(
            "nesterov=True of timm's Muon has NAdamW step what is no matrix, where Muon has AdamW: "
            f"it has a counterpart only in groups of matrices{advice}"
        )
    scale = group.get("fallback_lr_scale", 1.0)
    return new if scale == 1 else new | {"lr": group["lr"] * scale}


def _none_of_timm(name: str, value: Any, advice: str) -> ValueError:
    return ValueError(f"{name}={value!r:.40} of timm has no counterpart in Muon{advice}")
