"""The version: CMakeLists.txt holds it in a source tree, the metadata in an installed package."""

import re
from importlib import metadata
from pathlib import Path


def _find() -> str:
    cmake = Path(__file__).parents[2] / "CMakeLists.txt"
    if cmake.is_file():
        found = re.search(r"project\(\s*fusedstep\s+VERSION\s+([\d.]+)", cmake.read_text())
        if found:
            return found[1]
    try:
        return metadata.version("fusedstep")
    except metadata.PackageNotFoundError:
        return "unknown"


__version__ = _find()
