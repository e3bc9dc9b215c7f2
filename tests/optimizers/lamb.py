import math

import torch

from fusedstep import optim
from reference.lamb import lamb
from reference.lamb_variants import lamb_variant
from support.case import DECOUPLED_WITH_NORMS, MOMENTS, WITH_NORMS, Case


def _lamb(name, modes=None, **options):
    options = {"lr": 1e-2} | options
    return Case(
        name,
        optim.Lamb,
        options,
        lamb,
        MOMENTS,
        nearest=torch.optim.Adam,
        modes=modes or {},
        elementwise=False,
        tolerances=WITH_NORMS,
    )


def _lamb_variant(name, **options):
    """Named after the variant. The laws are about one weight, and so know no norm over several.

    laws/maths/test_lamb_variants.py has what clipping by that norm does. Where a row has an eps, it
    is for the first step: without decay all elements of its update are as large, and the roundings
    in torch's sum of their squares, for the norm in an imperative step, all go to one side.
    """
    variant = name.split("-")[1]
    options = {"lr": 1e-2, "variant": variant} | options
    if variant in ("apex", "nvlamb", "timm"):
        options["max_grad_norm"] = math.inf
    decoupled = options.get("decoupled_decay", False)
    return Case(
        name,
        optim.Lamb,
        options,
        lamb_variant,
        MOMENTS,
        nearest=torch.optim.Adam,
        elementwise=False,
        decoupled=decoupled,
        tolerances=DECOUPLED_WITH_NORMS if decoupled else WITH_NORMS,
    )


CASES = (
    _lamb("lamb"),
    _lamb("lamb-decay", weight_decay=0.02),
    _lamb("lamb-maximize", weight_decay=0.01, betas=(0.8, 0.95), eps=1e-6, maximize=True),
    _lamb("lamb-keep_grad", weight_decay=0.02, modes={"keep_grad": True}),
    _lamb_variant("lamb-apex"),
    _lamb_variant("lamb-apex-no_decay", weight_decay=0.0),
    _lamb_variant("lamb-nvlamb"),
    _lamb_variant("lamb-nvlamb-no_decay", weight_decay=0.0, eps=0.01),
    _lamb_variant("lamb-timm-decoupled", decoupled_decay=True, weight_decay=0.05, eps=0.01),
    _lamb_variant(
        "lamb-timm-no_decay", weight_decay=0.0, eps=0.01, always_adapt=True, max_ratio=1.0
    ),
    _lamb_variant("lamb-deepspeed"),
    _lamb_variant("lamb-deepspeed-decay", weight_decay=0.02, min_ratio=0.4, max_ratio=0.5),
    _lamb_variant("lamb-cybertron", eps=0.01),
    _lamb_variant("lamb-cybertron-decay", weight_decay=0.02),
)
