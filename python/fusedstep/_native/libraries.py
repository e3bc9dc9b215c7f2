"""Finds the native libraries: beside one another, the CUDA kernels also in fusedstep-cuda."""

from __future__ import annotations

import importlib.util
import os
from importlib import metadata
from pathlib import Path

from fusedstep._version import __version__

#: The folder of the package.
_PACKAGE = Path(__file__).parents[1]

OPERATORS, BINDING, CUDA = "libfusedstep.so", "_bind.abi3.so", "libfusedstep_cuda.so"


def library_path(name: str = OPERATORS) -> Path:
    """The path at which a native library is looked for.

    ``FUSEDSTEP_LIBRARY`` is that of the operators, and its folder that of the others. The CUDA
    kernels are taken from the package ``fusedstep_cuda`` if they are not there.
    """
    override = os.environ.get("FUSEDSTEP_LIBRARY")
    operators = Path(override) if override else _PACKAGE / "lib" / OPERATORS
    path = operators if name == OPERATORS else operators.with_name(name)
    if name == CUDA and not path.is_file() and (folder := _cuda_package()):
        return folder / "lib" / CUDA
    return path


def why_not_cuda() -> str | None:
    """The reason why the library of the CUDA kernels is not to be loaded; None if it may be."""
    path = library_path(CUDA)
    if not path.is_file():
        return (
            f"fusedstep's CUDA library was not found at {path}. Install the package fusedstep-cuda "
            f"{__version__}, or build fusedstep where nvcc is, with a torch for CUDA: "
            "`pip install .`, or `./run.sh build` in the source tree."
        )
    if path.parent.parent == _cuda_package():
        theirs = metadata.version("fusedstep-cuda")
        if theirs != __version__:
            return (
                f"fusedstep-cuda is version {theirs}, but fusedstep is {__version__}: install "
                f"fusedstep-cuda {__version__}."
            )
    return None


def cmake_prefix_path() -> str:
    """The folder for CMake's ``CMAKE_PREFIX_PATH``, in which ``find_package(fusedstep)`` looks."""
    folder = _PACKAGE / "share" / "cmake"
    if not (folder / "fusedstep" / "fusedstepTargets.cmake").is_file():
        raise AttributeError(
            f"fusedstep has no cmake_prefix_path: its CMake package was not found in {folder}. "
            "Install fusedstep with `pip install .`, or build it with `./run.sh build` in the "
            "source tree."
        )
    return str(folder)


def _cuda_package() -> Path | None:
    """The folder of the installed package ``fusedstep_cuda``, which is not imported."""
    spec = importlib.util.find_spec("fusedstep_cuda")
    return Path(spec.origin).parent if spec and spec.origin else None
