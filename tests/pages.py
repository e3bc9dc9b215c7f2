"""The pages of the documentation, and the code in them."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), ROOT / "cpu_kernels" / "README.md"])
INTEGRATIONS = ROOT / "docs" / "integrations.md"
"""Needs frameworks that take seconds to import: tests/frameworks runs it, section by section."""


def blocks(page: Path, language: str) -> list[str]:
    return _blocks(page.read_text(), language)


def _blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def run_section(heading: str, **given) -> dict:
    """Runs the Python of a section of integrations.md; returns its names, and those given to it."""
    text = INTEGRATIONS.read_text()
    (section,) = re.findall(rf"^## {heading}\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    code = "\n".join(_blocks(section, "python"))
    names = {"__name__": "__main__"} | given
    exec(compile(code, f"{INTEGRATIONS.name}: {heading}", "exec"), names)
    return names
