"""The pages of the documentation, and the code in them."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), ROOT / "cpu_kernels" / "README.md"])
OVERVIEW = ROOT / "docs" / "integrations.md"
INTEGRATIONS = sorted(ROOT.glob("docs/integrations/*.md"))
"""Need frameworks that take seconds to import: tests/frameworks runs them."""


def blocks(page: Path, language: str) -> list[str]:
    return _blocks(page.read_text(), language)


def _blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def run_page(name: str, heading: str | None = None, **given) -> dict:
    """Runs the Python of a page on a framework, or of one of its sections, with the given names.

    Returns its names, and those given to it.
    """
    text = (ROOT / "docs" / "integrations" / f"{name}.md").read_text()
    if heading is not None:
        (text,) = re.findall(rf"^## {heading}\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    names = {"__name__": "__main__"} | given
    exec(compile("\n".join(_blocks(text, "python")), f"{name}.md: {heading}", "exec"), names)
    return names
