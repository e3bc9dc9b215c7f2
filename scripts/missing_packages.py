"""Print the requirements of pyproject.toml that this Python does not meet, one a line.

    missing_packages.py [EXTRA ...]

Looks at the project's dependencies and at those of the named extras. Reads package metadata only,
which costs milliseconds, and understands what pyproject.toml uses: `name`, `name[extra]>=1.2` and
`name>=1.2,<1.3`. What a package's own extra needs is not looked for.
"""

from __future__ import annotations

import importlib.metadata
import re
import sys
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    from pip._vendor import tomli as tomllib


def release(version: str) -> tuple[int, ...]:
    """The numbers of a version: "2.11.0+cu130" → (2, 11, 0)."""
    return tuple(int(number) for number in re.findall(r"\d+", version.partition("+")[0]))


def is_met(requirement: str) -> bool:
    name = re.split(r"[\[<>]", requirement)[0].strip()
    try:
        installed = release(importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        return False
    return all(
        installed >= release(version) if sign == ">=" else installed < release(version)
        for sign, version in re.findall(r"(>=|<)([^,]+)", requirement)
    )


def main() -> None:
    pyproject = Path(__file__).resolve().parent.parent / "pyproject.toml"
    project = tomllib.loads(pyproject.read_text(encoding="utf-8"))["project"]
    requirements = list(project["dependencies"])
    for extra in sys.argv[1:]:
        requirements += project["optional-dependencies"][extra]
    print(*(r for r in dict.fromkeys(requirements) if not is_met(r)), sep="\n", end="")


if __name__ == "__main__":
    main()
