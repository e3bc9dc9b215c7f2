"""Steps of other libraries: implementations whose packages peer_packages.py installs."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import Parameter

from implementations import (
    COMPILED,
    FLOAT_CORRECTION,
    FOR_LOOP,
    FOREACH,
    FUSED,
    TORCH_FUSED,
    UNFUSED,
    Build,
    Implementation,
    OfTorch,
    Stepper,
    case_named,
)
from rows import BFLOAT16, FLOAT32, MIXED, Purpose, Row

ADAM = ("lr", "betas", "eps", "weight_decay")

#: What rounding states to 8 bits may do to a weight in the steps of the check, of its largest move.
EIGHT_BITS = 1.0

#: pytorch_optimizer's LAMB: no correction for bias, the norm of the weight clamped, and eps added
#: to the norm of the update.
WITHOUT_BIAS_CORRECTION = "lamb-cybertron"
EPS_IN_NORM = 1e-2


def said(row: Row, *names: str) -> dict[str, Any]:
    """The row's hyper-parameters of these names, said outright: defaults differ."""
    defaults = row.case.build([Parameter()], fused=False).defaults
    return {name: defaults[name] for name in names}


def optimizer_class(name: str) -> Callable[..., torch.optim.Optimizer]:
    """By a name as "timm.optim.Lamb": a library is imported where it is measured only."""
    module, _, attribute = name.rpartition(".")
    return getattr(importlib.import_module(module), attribute)


def _deepspeed_has(row: Row) -> bool:
    cases = ("adam", "adamw", "adagrad")
    return row.purpose in (Purpose.LIST, Purpose.THREADS) and row.case.name in cases


def _deepspeed(row: Row, params: list[Parameter]) -> Stepper:
    states = {"fp32_optimizer_states": row.precision != BFLOAT16}
    if row.case.name == "adagrad":
        adagrad = optimizer_class("deepspeed.ops.adagrad.DeepSpeedCPUAdagrad")
        return OfTorch(adagrad(params, **said(row, "lr", "eps"), **states))
    adam, mode = optimizer_class("deepspeed.ops.adam.DeepSpeedCPUAdam"), row.case.name == "adamw"
    return OfTorch(adam(params, adamw_mode=mode, **said(row, *ADAM), **states))


def _is_lamb(row: Row) -> bool:
    return row.case.name == "lamb" and row.precision == FLOAT32 and row.purpose == Purpose.LIST


def _timm(row: Row, params: list[Parameter]) -> Stepper:
    """As in the paper: adapted without decay too, and gradients are not clipped."""
    lamb = optimizer_class("timm.optim.Lamb")
    return OfTorch(lamb(params, always_adapt=True, max_grad_norm=None, **said(row, *ADAM)))


def _pytorch_optimizer(row: Row, params: list[Parameter]) -> Stepper:
    options = dict(case_named(WITHOUT_BIAS_CORRECTION).options)
    del options["variant"]
    return OfTorch(optimizer_class("pytorch_optimizer.Lamb")(params, adam_debias=True, **options))


def _is_adamw(row: Row) -> bool:
    return row.case.name == "adamw" and row.precision == FLOAT32


def _is_adamw_with_fp32_states(row: Row) -> bool:
    return row.case.name == "adamw" and row.precision in (FLOAT32, MIXED)


def _adamw(name: str) -> Build:
    return lambda row, params: OfTorch(optimizer_class(name)(params, **said(row, *ADAM)))


PEERS = {
    peer.name: peer
    for peer in (
        UNFUSED,
        FOR_LOOP,
        FOREACH,
        COMPILED,
        TORCH_FUSED,
        Implementation(
            "deepspeed", "DeepSpeed", _deepspeed_has, _deepspeed, slack=FLOAT_CORRECTION
        ),
        Implementation("timm", "timm", _is_lamb, _timm),
        Implementation(
            "pytorch_optimizer", "pytorch_optimizer", _is_lamb, _pytorch_optimizer,
            formula=WITHOUT_BIAS_CORRECTION, slack=EPS_IN_NORM,
        ),
        Implementation(
            "torchao_8bit", "torchao 8-bit", _is_adamw, _adamw("torchao.optim.AdamW8bit"),
            slack=EIGHT_BITS,
        ),
        Implementation(
            "torchao", "torchao", _is_adamw, _adamw("torchao.optim._AdamW"),
            slack=FLOAT_CORRECTION,
        ),
        Implementation(
            "bitsandbytes_8bit", "bitsandbytes 8-bit", _is_adamw,
            _adamw("bitsandbytes.optim.AdamW8bit"), slack=EIGHT_BITS,
        ),
        Implementation(
            "bitsandbytes", "bitsandbytes", _is_adamw_with_fp32_states,
            _adamw("bitsandbytes.optim.AdamW32bit"),
        ),
        FUSED,
    )
}  # fmt: skip
"""In the order of the tables: the baseline first, ours last."""
