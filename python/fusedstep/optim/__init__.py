"""Optimizers for :mod:`torch` whose step is one pass over memory.

What scripts use of :mod:`torch.optim` beside its optimizers is here under the same name.
"""

from torch.optim import Optimizer, lr_scheduler, swa_utils

from fusedstep.optim.adagrad import Adagrad
from fusedstep.optim.adam import Adam
from fusedstep.optim.adamw import AdamW
from fusedstep.optim.adan import Adan
from fusedstep.optim.lamb import Lamb

__all__ = [
    "Adagrad",
    "Adam",
    "AdamW",
    "Adan",
    "Lamb",
    "Optimizer",
    "lr_scheduler",
    "swa_utils",
]
