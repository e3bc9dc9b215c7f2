import torch

from fusedstep import optim
from reference.lion import lion
from support.case import DECOUPLED, Case


def _lion(name, **options):
    return Case(
        name,
        optim.Lion,
        {"lr": 1e-2} | options,
        lion,
        ("exp_avg",),
        nearest=torch.optim.Adam,
        numbers=(),
        continuous=False,
        decoupled=True,
        tolerances=DECOUPLED,
    )


CASES = (
    _lion("lion"),
    _lion("lion-decay", weight_decay=0.02, betas=(0.8, 0.95)),
    _lion("lion-maximize", maximize=True, weight_decay=0.1),
)
