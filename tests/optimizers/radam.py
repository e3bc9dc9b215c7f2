import torch

from fusedstep import optim
from reference.radam import radam
from support.case import DECOUPLED, ELEMENTWISE, LONG_AVERAGES, MOMENTS, Case


def _radam(name, long_run=None, **options):
    options = {"lr": 1e-2} | options
    decoupled = options.get("decoupled_weight_decay", False)
    return Case(
        name,
        optim.RAdam,
        options,
        radam,
        MOMENTS,
        torch.optim.RAdam,
        decoupled=decoupled,
        tolerances=DECOUPLED if decoupled else ELEMENTWISE,
        rosenbrock_lr=0.01,
        long_run=long_run or {},
    )


CASES = (
    _radam("radam"),
    _radam(
        "radam-l2-maximize",
        LONG_AVERAGES,
        weight_decay=0.02,
        betas=(0.8, 0.95),
        eps=1e-6,
        maximize=True,
    ),
    _radam("radam-decoupled", decoupled_weight_decay=True, weight_decay=0.02, betas=(0.9, 0.9)),
)
