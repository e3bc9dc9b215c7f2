import torch

from fusedstep import optim
from reference.adamax import adamax
from support.case import LONG_AVERAGES, Case


def _adamax(name, long_run=None, **options):
    options = {"lr": 1e-2} | options
    return Case(
        name,
        optim.Adamax,
        options,
        adamax,
        ("exp_avg", "exp_inf"),
        torch.optim.Adamax,
        long_run=long_run or {},
    )


CASES = (
    _adamax("adamax"),
    _adamax("adamax-l2", LONG_AVERAGES, weight_decay=0.02, betas=(0.8, 0.95), eps=1e-6),
    _adamax("adamax-maximize", maximize=True),
)
