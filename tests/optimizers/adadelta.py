import torch

from fusedstep import optim
from reference.adadelta import adadelta
from support.case import SQUARED_UPDATE, Case


def _adadelta(name, **options):
    options = {"lr": 1e-2} | options
    return Case(
        name,
        optim.Adadelta,
        options,
        adadelta,
        ("square_avg", "acc_delta"),
        torch.optim.Adadelta,
        tolerances=SQUARED_UPDATE,
        rosenbrock_lr=1.0,
    )


CASES = (
    _adadelta("adadelta"),
    _adadelta("adadelta-l2", weight_decay=0.02, rho=0.8, eps=1e-4),
    _adadelta("adadelta-maximize", maximize=True),
)
