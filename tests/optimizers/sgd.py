import torch

from fusedstep import optim
from reference.sgd import sgd
from support.case import Case


def _sgd(name, **options):
    options = {"lr": 2e-3} | options
    buffered = "momentum" in options
    return Case(
        name,
        optim.SGD,
        options,
        sgd,
        ("momentum_buffer",) if buffered else (),
        torch.optim.SGD,
        numbers=(),
        rosenbrock_lr=1e-3,
        sparse=not (buffered or options.get("weight_decay")),
    )


CASES = (
    _sgd("sgd"),
    _sgd("sgd-decay", weight_decay=0.02),
    _sgd("sgd-momentum", momentum=0.5),
    _sgd("sgd-dampening-decay", momentum=0.8, dampening=0.3, weight_decay=0.02),
    _sgd("sgd-nesterov", momentum=0.8, nesterov=True),
    _sgd("sgd-nesterov-decay", momentum=0.6, nesterov=True, weight_decay=0.02),
    _sgd("sgd-maximize", momentum=0.5, dampening=0.25, weight_decay=0.02, maximize=True),
)
