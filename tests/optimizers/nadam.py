import torch

from fusedstep import optim
from reference.nadam import nadam
from support.case import DECOUPLED, MOMENTS, TWO_ADDITIONS, Case


def _nadam(name, long_run=None, **options):
    options = {"lr": 1e-2} | options
    decoupled = options.get("decoupled_weight_decay", False)
    return Case(
        name,
        optim.NAdam,
        options,
        nadam,
        MOMENTS,
        torch.optim.NAdam,
        numbers=("step", "mu_product"),
        initial={"mu_product": 1.0},
        decoupled=decoupled,
        tolerances=DECOUPLED if decoupled else TWO_ADDITIONS,
        long_run=long_run or {},
    )


CASES = (
    _nadam("nadam"),
    _nadam(
        "nadam-l2-maximize",
        {"weight_decay": 0.2},
        weight_decay=0.02,
        momentum_decay=0.1,
        eps=1e-6,
        maximize=True,
    ),
    _nadam("nadam-decoupled", decoupled_weight_decay=True, weight_decay=0.02, betas=(0.8, 0.95)),
)
