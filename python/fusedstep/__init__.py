"""fusedstep: the optimizer step for PyTorch in one pass over memory."""

from fusedstep import optim
from fusedstep._ops import isa, isas

__all__ = ["isa", "isas", "optim"]
