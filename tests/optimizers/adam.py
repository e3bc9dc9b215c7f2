import torch

from fusedstep import optim
from reference.adam import adam
from support.case import DECOUPLED, ELEMENTWISE, LONG_AVERAGES, Case, moments


def _adam(name, long_run=None, **options):
    options = {"lr": 1e-2} | options
    decoupled = options.get("decoupled_weight_decay", False)
    return Case(
        name,
        optim.Adam,
        options,
        adam,
        moments(options),
        torch.optim.Adam,
        decoupled=decoupled,
        tolerances=DECOUPLED if decoupled else ELEMENTWISE,
        long_run=long_run or {},
    )


CASES = (
    _adam("adam"),
    _adam(
        "adam-l2",
        weight_decay=0.02,
        betas=(0.8, 0.95),
        eps=1e-6,
        long_run=LONG_AVERAGES,
    ),
    _adam("adam-amsgrad", amsgrad=True),
    _adam("adam-amsgrad-l2-maximize", amsgrad=True, weight_decay=0.02, maximize=True),
    _adam("adam-decoupled", decoupled_weight_decay=True, weight_decay=0.02),
    _adam("adam-maximize", maximize=True),
)
