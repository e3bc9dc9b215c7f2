"""The differences between a page in the repository and the same page on the site.

- Links out of docs/ lead to pages and pictures that are taken into the site, or to the repository.
- Formulas become MathML, which browsers show without a script.
- The page of an optimizer ends with its time beside others', its signature and its docstring.
- Tables of many columns are smaller. A picture leads to itself, where it can be enlarged.
  Instead of a picture of other libraries' times a narrow screen shows bars of some times.
"""

from __future__ import annotations

import html
import os
import re
import sys
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
OPTIMIZERS = sorted((DOCS / "optimizers").glob("*.md"))
sys.path[:0] = [str(Path(__file__).parent), str(ROOT / "python")]

import docstrings  # noqa: E402  this and the next are found by the line above
import figures  # noqa: E402

LINK = re.compile(r"(\]\(|^\[[^\]]+\]: )([^)\s]+)", re.MULTILINE)
TIMES = re.compile(r"^!\[[^\]]*\]\(([^)\s]*peers-times\.svg)\)$", re.MULTILINE)
FENCE = re.compile(r"(^ *```.*?^ *```$)", re.MULTILINE | re.DOTALL)


ITEM = re.compile(r"^(?:\d\.|-) .*\n(?:(?: {2,3}.*)?\n)+", re.MULTILINE)
INDENT = re.compile(r"(?<=\n) {2,3}(?=\S)")


def item(match: re.Match[str]) -> str:
    """Indents the text of a list's item by four spaces; after a paragraph the next needs a line."""
    text = INDENT.sub("    ", match[0])
    return f"{text}\n" if "\n\n" in text else text


def on_config(config: MkDocsConfig) -> None:
    (menu,) = (part for part in config.nav if "Optimizers" in part)
    menu["Optimizers"] = [f"optimizers/{page.name}" for page in OPTIMIZERS]


# ---- Pages of other folders -----------------------------------------------------------------


def on_files(files: Files, config: MkDocsConfig) -> None:
    """Adds pages of the navigation, results that pages link to, and the pictures of both."""
    pages = pages_of(config.nav)
    missing = sorted({file.src_uri for file in files.documentation_pages()} - set(pages))
    if missing:
        raise PluginError(f"mkdocs.yml, nav: has no line for {', '.join(missing)}")
    for page in pages:
        if page not in files.src_uris and (ROOT / page).is_file():
            files.append(File.generated(config, page, abs_src_path=str(ROOT / page)))
    waiting = files.documentation_pages()
    for file in waiting:
        source = Path(file.abs_src_path)
        for link in links(source.read_text(encoding="utf-8")):
            target = (source.parent / link).resolve()
            if not target.is_file() or target.is_relative_to(DOCS):
                continue
            uri = target.relative_to(ROOT).as_posix()
            result = uri.startswith("bench/results/") and target.suffix == ".md"
            if (result or target.suffix in (".svg", ".png")) and uri not in files.src_uris:
                files.append(File.generated(config, uri, abs_src_path=str(target)))
                if result:
                    waiting.append(files.src_uris[uri])


def pages_of(nav: Any) -> list[str]:
    """The pages that the navigation or a part of it names."""
    if isinstance(nav, str):
        return [nav]
    parts = nav.values() if isinstance(nav, dict) else nav
    return [page for part in parts for page in pages_of(part)]


def links(text: str) -> list[str]:
    """The files that text links to, code left out."""
    found = [match[1] for part in FENCE.split(text)[::2] for match in LINK.findall(part)]
    return [link.partition("#")[0] for link in found if "://" not in link and link[0] != "#"]


# ---- From Markdown to HTML ------------------------------------------------------------------


def on_page_markdown(text: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    source = Path(page.file.abs_src_path)
    folder = Path(page.file.src_uri).parent

    def led(match: re.Match[str]) -> str:
        path, mark, anchor = match[2].partition("#")
        target = (source.parent / path).resolve()
        if target == DOCS / "optimizers":  # a folder, whose first page shows the menu of all
            target = OPTIMIZERS[0]
        if "://" in path or not path or not target.exists():
            return match[0]
        uri = target.relative_to(DOCS if target.is_relative_to(DOCS) else ROOT).as_posix()
        file = files.src_uris.get(uri)
        if file is not None and file.abs_src_path == str(target):
            return f"{match[1]}{os.path.relpath(uri, folder)}{mark}{anchor}"
        kind = "tree" if target.is_dir() else "blob"
        return f"{match[1]}{config.repo_url}/{kind}/main/{uri}{mark}{anchor}"

    def with_bars(match: re.Match[str]) -> str:
        return f"{match[0]}\n\n{figures.narrow(source.parent / match[1])}"

    text = ITEM.sub(item, text)
    text = TIMES.sub(with_bars, text)
    parts = FENCE.split(text)
    parts[::2] = [LINK.sub(led, part) for part in parts[::2]]
    if folder == Path("optimizers"):
        name = page.file.name
        parts += [figures.section(name, config.repo_url), docstrings.section(name)]
    return "".join(parts)


def on_page_content(content: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    if page.is_homepage:
        page.meta["hide"] = ["navigation"]
    content = FORMULA.sub(formula, content)
    if wrong := re.search(r"<m\w+>[^<]*(\\\w+)", content):
        raise PluginError(f"{page.file.src_uri}: a formula has {wrong[1]}, which is not known")
    content = re.sub("<table>.*?</table>", narrower, content, flags=re.DOTALL)
    return re.sub(r'<img [^>]*src="([^"]+)"[^>]*>', r'<a href="\1">\g<0></a>', content)


def narrower(table: re.Match[str]) -> str:
    many = table[0].count("</th>") > 9
    return f'<div class="many">{table[0]}</div>' if many else table[0]


# ---- Formulas -------------------------------------------------------------------------------

FORMULA = re.compile(
    r'<(?P<tag>span|div) class="arithmatex">\\[(\[](?P<latex>.*?)\\[)\]]</(?P=tag)>', re.DOTALL
)
ALIGNED = re.compile(r"\\begin\{aligned\}(.*)\\end\{aligned\}", re.DOTALL)


def formula(match: re.Match[str]) -> str:
    latex, tag = html.unescape(match["latex"]).strip(), match["tag"]
    if aligned := ALIGNED.fullmatch(latex):
        inside = lines(aligned[1])
    else:
        inside = mathml(latex, "block" if tag == "div" else "inline")
    return f'<{tag} class="formula">{inside}</{tag}>'


def lines(latex: str) -> str:
    """Returns an aligned formula as a table of formulas: not all browsers align MathML's own."""
    rows = ""
    for line in latex.split(r"\\"):
        cells = [mathml(cell, "inline") if cell.strip() else "" for cell in line.split("&")]
        rows += f"<tr>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"
    return f'<table class="aligned">{rows}</table>'


def mathml(latex: str, display: str) -> str:
    """An empty name in front of a relation keeps the space that it has between two terms."""
    inside = re.sub(r"</?math[^>]*>", "", convert(latex.strip())).replace(r"\_", "_")
    inside = re.sub(r"^<mrow>(?=<mo>&#x(02190|0003D);)", "<mrow><mi></mi>", inside)
    return f'<math display="{display}" displaystyle="true">{inside}</math>'
