import torch

from fusedstep import optim
from reference.rmsprop import rmsprop
from support.case import Case


def _rmsprop(name, long_run=None, **options):
    options = {"lr": 1e-3} | options  # its first step is ten times as long
    states = {
        "square_avg": True,
        "momentum_buffer": options.get("momentum", 0) > 0,
        "grad_avg": options.get("centered", False),
    }
    return Case(
        name,
        optim.RMSprop,
        options,
        rmsprop,
        tuple(state for state, is_there in states.items() if is_there),
        torch.optim.RMSprop,
        buffers_moves=True,
        long_run=long_run or {},
    )


CASES = (
    _rmsprop("rmsprop"),
    _rmsprop("rmsprop-momentum", momentum=0.5, maximize=True),
    _rmsprop("rmsprop-centered", centered=True, alpha=0.95, eps=1e-6),
    _rmsprop(
        "rmsprop-centered-l2-momentum",
        {"alpha": 0.99, "eps": 0.01},
        centered=True,
        alpha=0.8,
        weight_decay=0.02,
        momentum=0.5,
    ),
)
