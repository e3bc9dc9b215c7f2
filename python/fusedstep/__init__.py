"""fusedstep: the optimizer step for PyTorch in one pass over memory.

>>> from fusedstep import optim
>>> optimizer = optim.Lamb(model.parameters(), lr=1e-2)
"""

from fusedstep import optim
from fusedstep._ops import isa, isas
from fusedstep._version import __version__
from fusedstep.backward import step_in_backward
from fusedstep.convert import convert, import_state_dict
from fusedstep.doctor import doctor
from fusedstep.verify import verify

__all__ = [
    "__version__",
    "convert",
    "doctor",
    "import_state_dict",
    "isa",
    "isas",
    "optim",
    "step_in_backward",
    "verify",
]
