"""Optimizers for :mod:`torch` whose step is one pass over memory."""

from fusedstep.optim.adagrad import Adagrad
from fusedstep.optim.adam import Adam
from fusedstep.optim.adamw import AdamW
from fusedstep.optim.adan import Adan
from fusedstep.optim.lamb import Lamb

__all__ = ["Adagrad", "Adam", "AdamW", "Adan", "Lamb"]
