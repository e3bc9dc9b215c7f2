import torch

from fusedstep import optim
from reference.adam import adamw
from support.case import DECOUPLED, Case, moments


def _adamw(name, **options):
    options = {"lr": 1e-2} | options
    return Case(
        name,
        optim.AdamW,
        options,
        adamw,
        moments(options),
        torch.optim.AdamW,
        decoupled=True,
        tolerances=DECOUPLED,
    )


CASES = (
    _adamw("adamw"),
    _adamw("adamw-amsgrad-maximize", amsgrad=True, maximize=True, weight_decay=0.1),
)
