import torch

from fusedstep import optim
from reference.adagrad import adagrad
from support.case import Case


def _adagrad(name, **options):
    options = {"lr": 2e-2} | options
    value = options.get("initial_accumulator_value")
    return Case(
        name,
        optim.Adagrad,
        options,
        adagrad,
        ("sum",),
        torch.optim.Adagrad,
        initial={"sum": value} if value else {},
        sparse=not options.get("weight_decay"),
        rosenbrock_lr=0.3,
    )


CASES = (
    _adagrad("adagrad"),
    _adagrad("adagrad-decays", lr_decay=0.1, weight_decay=0.02, eps=1e-6),
    _adagrad("adagrad-accumulator", initial_accumulator_value=0.5),
    _adagrad("adagrad-maximize", maximize=True, lr_decay=0.01),
)
