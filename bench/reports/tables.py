"""Tables and plots of results as files: compact JSON with four significant digits, lean SVG.

tables.py FILE ...      writes JSON and SVG of other programs so
"""

from __future__ import annotations

import json
import math
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SVG = "http://www.w3.org/2000/svg"
XLINK = "http://www.w3.org/1999/xlink"


def rounded(value: Any) -> Any:
    """Four digits of each number: runs differ by more."""
    if isinstance(value, dict):
        return {key: rounded(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [rounded(each) for each in value]
    return float(f"{value:.4g}") if isinstance(value, float) and math.isfinite(value) else value


def write_table(file: Path, results: dict[str, Any]) -> None:
    """Writes results as the tables in bench/results are."""
    text = json.dumps(rounded(results), separators=(",", ":"), ensure_ascii=False)
    file.write_text(text + "\n", encoding="utf-8")


def write_plot(file: Path, figure: Figure) -> None:
    """Draws a figure into an SVG file, the same at each run, with its text as text."""
    from matplotlib import rc_context

    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "fusedstep"}):
        figure.savefig(file, format="svg", metadata={"Date": None})
    file.write_text(lean(file.read_text(encoding="utf-8")), encoding="utf-8")


def lean(svg: str) -> str:
    """Makes a quarter of matplotlib's SVG, which looks the same.

    Groups and names that nothing refers to go, a style is written once, as a class, and numbers
    have two decimals, 1/100 of a point.
    """
    ElementTree.register_namespace("", SVG)
    ElementTree.register_namespace("xlink", XLINK)
    root = ElementTree.fromstring(svg)
    for metadata in root.findall(f"{{{SVG}}}metadata"):
        root.remove(metadata)
    used = dict.fromkeys(re.findall(r"(?:url\(|href=.)#(\w+)", svg))
    names = {name: f"n{number}" for number, name in enumerate(used)}
    classes: dict[str, str] = {}
    for each in root.iter():
        _shorten(each, names, classes)
    _unwrap(root)
    style = root.find(f".//{{{SVG}}}style")
    if style is not None:
        style.text = (style.text or "") + "".join(f".{c}{{{s}}}" for s, c in classes.items())
    return ElementTree.tostring(root, encoding="unicode").replace("><", ">\n<") + "\n"


def _shorten(each: ElementTree.Element, names: dict[str, str], classes: dict[str, str]) -> None:
    style = re.sub(r"\s*([:;,])\s*", r"\1", each.attrib.pop("style", ""))
    style = re.sub("'DejaVu Sans',[^;]*", "'DejaVu Sans',Verdana,sans-serif", style)
    if style:
        each.set("class", classes.setdefault(style, f"c{len(classes)}"))
    for key, value in each.items():
        value = re.sub(r"#(\w+)", lambda name: f"#{names.get(name[1], name[1])}", value)
        value = re.sub(r"-?\d+\.\d+", lambda n: f"{float(n[0]):.2f}".rstrip("0").rstrip("."), value)
        each.set(key, _path(value) if key == "d" else value)
    if not (name := names.get(each.get("id", ""))):
        each.attrib.pop("id", None)
    else:
        each.set("id", name)
    if re.match(r"rotate\(-?0[ )]", each.get("transform", "")):
        del each.attrib["transform"]
    if not (each.text or "").strip():
        each.text = None
    each.tail = None


def _path(text: str) -> str:
    """A command is left out where it is that of the point before."""
    found, implied = "", ""
    for command, numbers in re.findall(r"([A-Za-z])([^A-Za-z]*)", text):
        found += (" " if command == implied else command) + " ".join(numbers.split())
        implied = "L" if command == "M" else command
    return found


def _unwrap(parent: ElementTree.Element) -> None:
    """Puts what a group without attributes has into the group's place."""
    for each in list(parent):
        _unwrap(each)
    children = []
    for each in parent:
        bare = each.tag == f"{{{SVG}}}g" and not each.attrib
        children += list(each) if bare else [each]
    parent[:] = children


if __name__ == "__main__":
    for name in sys.argv[1:]:
        file = Path(name)
        text = file.read_text(encoding="utf-8")
        if file.suffix == ".svg":
            file.write_text(lean(text), encoding="utf-8")
        else:
            write_table(file, json.loads(text))
