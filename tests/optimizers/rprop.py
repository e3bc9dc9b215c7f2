import torch

from fusedstep import optim
from reference.rprop import rprop
from support.case import Case


def _rprop(name, **options):
    options = {"lr": 2**-7} | options  # which any dtype holds: it is a state's first value
    return Case(
        name,
        optim.Rprop,
        options,
        rprop,
        ("prev", "step_size"),
        torch.optim.Rprop,
        initial={"step_size": options["lr"]},
        continuous=False,
        long_run={"step_sizes": (1e-6, 1e-2)},
    )


CASES = (
    _rprop("rprop"),
    _rprop("rprop-bounds", etas=(0.25, 1.5), step_sizes=(2e-3, 0.03)),
    _rprop("rprop-maximize", maximize=True, etas=(0.8, 1.1)),
)
