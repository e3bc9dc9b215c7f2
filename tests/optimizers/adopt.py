from dataclasses import replace

import torch

from fusedstep import optim
from reference.adopt import adopt
from support.case import DECOUPLED, ELEMENTWISE, MOMENTS, Case


def _adopt(name, **options):
    """The first square is the whole state: an error of the gradient counts twice."""
    options = {"lr": 1e-2} | options
    decoupled = options.get("decoupled_weight_decay", False)
    usual = DECOUPLED if decoupled else ELEMENTWISE
    twice = {each: replace(usual[each], state=2) for each in (torch.float32, torch.float64)}
    return Case(
        name,
        optim.ADOPT,
        options,
        adopt,
        MOMENTS,
        nearest=torch.optim.Adam,
        decoupled=decoupled,
        bounded=() if options.get("clip_exp", 0) is None else ("exp_avg",),
        tolerances=usual | twice,
    )


CASES = (
    _adopt("adopt"),
    _adopt("adopt-l2-maximize", weight_decay=0.02, betas=(0.8, 0.95), clip_exp=0.5, maximize=True),
    _adopt(
        "adopt-decoupled", decoupled_weight_decay=True, weight_decay=0.02, clip_exp=None, eps=0.5
    ),
)
