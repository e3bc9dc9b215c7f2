"""Optimizers for :mod:`torch` whose step is one pass over memory.

What scripts use of :mod:`torch.optim` beside its optimizers is here under the same name, but not in
``__all__``: that holds the optimizers alone. ``FusedOptimizer`` is their base, for annotations, and
``AdamW8bit`` and the like are classes with an option set.
"""

from typing import TYPE_CHECKING

from torch.optim import Optimizer as Optimizer
from torch.optim import lr_scheduler as lr_scheduler
from torch.optim import swa_utils as swa_utils

from fusedstep._api.base import FusedOptimizer as FusedOptimizer
from fusedstep._api.names import in_place_of as _in_place_of
from fusedstep._api.names import names as names
from fusedstep._models.create import create as create
from fusedstep._models.groups import Groups as Groups
from fusedstep._models.groups import groups as groups
from fusedstep.optim.adadelta import Adadelta
from fusedstep.optim.adafactor import Adafactor
from fusedstep.optim.adagrad import Adagrad
from fusedstep.optim.adam import Adam
from fusedstep.optim.adamax import Adamax
from fusedstep.optim.adamw import AdamW
from fusedstep.optim.adan import Adan
from fusedstep.optim.adopt import ADOPT
from fusedstep.optim.apollo import APOLLOAdamW
from fusedstep.optim.asgd import ASGD
from fusedstep.optim.came import CAME
from fusedstep.optim.galore import GaLoreAdamW
from fusedstep.optim.galore_adafactor import GaLoreAdafactor
from fusedstep.optim.lamb import Lamb
from fusedstep.optim.lion import Lion
from fusedstep.optim.low_bit import Adagrad8bit as Adagrad8bit
from fusedstep.optim.low_bit import Adam4bit as Adam4bit
from fusedstep.optim.low_bit import Adam8bit as Adam8bit
from fusedstep.optim.low_bit import AdamFp8 as AdamFp8
from fusedstep.optim.low_bit import AdamW4bit as AdamW4bit
from fusedstep.optim.low_bit import AdamW8bit as AdamW8bit
from fusedstep.optim.low_bit import AdamWFp8 as AdamWFp8
from fusedstep.optim.low_bit import GaLoreAdamW8bit as GaLoreAdamW8bit
from fusedstep.optim.low_bit import Lamb8bit as Lamb8bit
from fusedstep.optim.low_bit import Lion8bit as Lion8bit
from fusedstep.optim.low_bit import RMSprop8bit as RMSprop8bit
from fusedstep.optim.low_bit import SGD8bit as SGD8bit
from fusedstep.optim.muon import Muon
from fusedstep.optim.musgd import MuSGD
from fusedstep.optim.nadam import NAdam
from fusedstep.optim.radam import RAdam
from fusedstep.optim.rmsprop import RMSprop
from fusedstep.optim.rowwise_adagrad import RowWiseAdagrad
from fusedstep.optim.rprop import Rprop
from fusedstep.optim.sgd import SGD
from fusedstep.optim.sparse_adam import SparseAdam

__all__ = [
    "ADOPT",
    "ASGD",
    "CAME",
    "SGD",
    "APOLLOAdamW",
    "Adadelta",
    "Adafactor",
    "Adagrad",
    "Adam",
    "AdamW",
    "Adamax",
    "Adan",
    "GaLoreAdafactor",
    "GaLoreAdamW",
    "Lamb",
    "Lion",
    "MuSGD",
    "Muon",
    "NAdam",
    "RAdam",
    "RMSprop",
    "RowWiseAdagrad",
    "Rprop",
    "SparseAdam",
]

if not TYPE_CHECKING:  # type checkers would take any name for one of this module

    def __getattr__(name):
        advice = "" if name.startswith("_") else _in_place_of(name)
        raise AttributeError(
            f"module {__name__!r} has no attribute {name!r}{advice and f': {advice}'}"
        )
