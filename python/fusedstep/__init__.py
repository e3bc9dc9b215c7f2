"""fusedstep: the optimizer step for PyTorch in one pass over memory.

>>> from fusedstep import optim
>>> optimizer = optim.Lamb(model.parameters(), lr=1e-2)
"""

from typing import TYPE_CHECKING

from fusedstep import optim
from fusedstep._native import libraries as _libraries
from fusedstep._native.ops import isa, isas
from fusedstep._version import __version__
from fusedstep.backward import step_in_backward
from fusedstep.convert import convert, import_state_dict
from fusedstep.doctor import doctor
from fusedstep.gain import compare
from fusedstep.offload import offload
from fusedstep.verify import verify

__all__ = [
    "__version__",
    "compare",
    "convert",
    "doctor",
    "import_state_dict",
    "isa",
    "isas",
    "offload",
    "optim",
    "step_in_backward",
    "verify",
]

cmake_prefix_path: str
"""The folder for CMake's ``CMAKE_PREFIX_PATH``, by which a C++ program finds fusedstep.

The program adds ``torch.utils.cmake_prefix_path`` too. An ``AttributeError`` says what to do where
this fusedstep was built without its CMake package.
"""

if not TYPE_CHECKING:  # else any name would be one of this module

    def __getattr__(name: str) -> str:
        if name == "cmake_prefix_path":
            return _libraries.cmake_prefix_path()
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
