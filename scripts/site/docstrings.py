"""The signature and docstring of an optimizer, as the last section of its page."""

from __future__ import annotations

import functools
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator

from fusedstep import optim

TITLES = {"Args:": "Arguments", "Returns:": "Returns", "Raises:": "Raises"}


@functools.cache
def classes() -> dict[str, type]:
    """The classes by the names of their pages, which are those of their modules."""
    found = [getattr(optim, name) for name in optim.__all__]
    return {cls.__module__.rpartition(".")[2]: cls for cls in found}


def section(page: str) -> str:
    """Markdown of the class that a page is about: what the page itself does not say."""
    cls = classes()[page]
    parts = ["\n## API\n", signature(f"fusedstep.optim.{cls.__name__}", cls)]
    parts += fields(inspect.getdoc(cls) or "")
    step = inspect.getdoc(cls.step) or ""
    parts += ["### step\n", signature("optimizer.step", cls.step)]
    parts += [markdown(step.partition("\nArgs:")[0], {}), *fields(step)]
    return "\n".join(parts)


def signature(name: str, of: Callable[..., object]) -> str:
    """The call with its defaults. Types are in the docstring."""
    words = []
    for parameter in inspect.signature(of).parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and "*" not in words:
            words.append("*")
        default = "" if parameter.default is parameter.empty else f"={parameter.default!r}"
        words.append(parameter.name + default)
    lines = textwrap.wrap(", ".join(word for word in words if word != "self"), 72)
    return "\n".join(["```python", f"{name}(", *(f"    {line}" for line in lines), ")", "```\n"])


def fields(doc: str) -> Iterator[str]:
    """The parts of a docstring that have a title: entries are terms and their definitions."""
    found = re.findall(r"^\.\. _(.+):\n? +(\S+)$", doc, re.MULTILINE)
    addresses = {name.replace("\\", ""): address for name, address in found}
    for header, title in TITLES.items():
        body = re.search(rf"^{header}\n((?:    .*\n?|\n)+)", doc, re.MULTILINE)
        if body is None:
            continue
        yield f"\n**{title}**\n"
        text = textwrap.dedent(body[1]).strip()
        if header == "Returns:":  # a text, which has no terms
            yield markdown(" ".join(text.split()), addresses) + "\n"
            continue
        for entry in re.split(r"\n(?=\S)", text):
            term, _, meaning = " ".join(entry.split()).partition(": ")
            name, _, kind = term.partition(" ")
            yield f"`{name}` {kind}\n:   {markdown(meaning, addresses)}\n"


def markdown(text: str, addresses: dict[str, str]) -> str:
    """The markup of docstrings as Markdown."""
    text = text.replace("``", "\0")
    text = re.sub(r":\w+:`~?([^`]+)`", "\0\\1\0", text)
    text = re.sub(r"`([^`]+)`_", lambda match: f"[{match[1]}]({addresses[match[1]]})", text)
    return text.replace("\0", "`")
