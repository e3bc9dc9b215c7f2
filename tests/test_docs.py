"""The pages: their Python runs, and their links lead somewhere."""

import re
from pathlib import Path

import pytest

from pages import INTEGRATIONS, PAGES, ROOT, blocks


def named(pages):
    return [pytest.param(page, id=str(page.relative_to(ROOT))) for page in pages]


def anchors(page: Path) -> set[str]:
    """The names that GitHub gives to headings."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


WITH_EXAMPLES = [page for page in PAGES if blocks(page, "python") and page != INTEGRATIONS]


@pytest.mark.parametrize("page", named(WITH_EXAMPLES))
def test_examples_run(page):
    exec(compile("\n".join(blocks(page, "python")), str(page), "exec"), {"__name__": "__main__"})


def test_every_section_on_a_framework_is_run():
    headings = re.findall(r"^## (.+)$", INTEGRATIONS.read_text(), re.MULTILINE)
    tests = "".join(path.read_text() for path in (ROOT / "tests" / "frameworks").glob("*.py"))
    assert sorted(headings) == sorted(re.findall(r'run_section\(\s*"(.+?)"', tests))


@pytest.mark.parametrize("page", named(PAGES))
def test_links_lead_somewhere(page):
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link
