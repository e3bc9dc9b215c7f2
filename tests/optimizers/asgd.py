import torch

from fusedstep import optim
from reference.asgd import asgd
from support.case import DECOUPLED, Case


def _asgd(name, **options):
    numbers = {"eta": options.get("lr", 1e-2), "mu": 1.0}
    return Case(
        name,
        optim.ASGD,
        {"lr": 1e-2} | options,
        asgd,
        ("ax",),
        torch.optim.ASGD,
        numbers=("step", *numbers),
        initial=numbers,
        tolerances=DECOUPLED,
        rosenbrock_lr=1e-3,
    )


CASES = (
    _asgd("asgd"),
    _asgd("asgd-averaged-decay", t0=1.0, lambd=0.5, alpha=0.5, weight_decay=0.02),
    _asgd("asgd-maximize", t0=-1.0, maximize=True),
)
