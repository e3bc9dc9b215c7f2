import torch

from fusedstep import optim
from reference.adan import adan
from support.case import DECOUPLED, MOMENTS_AND_DIFFERENCES, TWO_ADDITIONS, Case


def _adan(name, modes=None, **options):
    """Squares the gradient plus beta2 of its difference from the last one, with 0 < beta2 < 1."""
    options = {"lr": 1e-2} | options
    return Case(
        name,
        optim.Adan,
        options,
        adan,
        MOMENTS_AND_DIFFERENCES,
        nearest=torch.optim.Adam,
        modes=modes or {},
        decoupled=True,
        tolerances=DECOUPLED if options.get("weight_decay") else TWO_ADDITIONS,
        squares=3.0,
    )


CASES = (
    _adan("adan"),
    _adan("adan-decoupled", weight_decay=0.02, betas=(0.8, 0.7, 0.95), eps=1e-6),
    _adan("adan-decoupled-no_prox", weight_decay=0.05, no_prox=True),
    _adan("adan-maximize", maximize=True),
    _adan("adan-one_by_one", modes={"foreach": False}),
)
