"""Plots as files: what a lean SVG leaves out, no viewer shows."""

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

pytest.importorskip("matplotlib")

import matplotlib
from matplotlib.figure import Figure

from reports import tables

SVG = "{http://www.w3.org/2000/svg}"
LINK = "{http://www.w3.org/1999/xlink}href"
ROOT = Path(__file__).parents[2]


def points(path: str) -> list[tuple[str, list[float]]]:
    """The commands of a path, a line's repeated for each of its points."""
    found = []
    for command, text in re.findall(r"([A-Za-z])([^A-Za-z]*)", path):
        numbers = [float(number) for number in text.split()]
        size = {"M": 2, "L": 2, "Q": 4, "C": 6}.get(command, max(len(numbers), 1))
        for start in range(0, max(len(numbers), 1), size):
            repeated = "L" if command == "M" and start else command
            found.append((repeated, numbers[start : start + size]))
    return found


def shown(svg: str) -> list[tuple]:
    """Returns what is drawn, in its order: kind or text, styles and places around it, points."""
    root = ElementTree.fromstring(svg)
    sheet = dict(re.findall(r"\.(\w+)\{([^}]*)\}", root.find(f".//{SVG}style").text))
    named = {each.get("id"): each for each in root.iter() if each.get("id")}
    found = []

    def styles(each):
        style = each.get("style") or sheet.get(each.get("class", ""), "")
        style = re.sub("font-family:[^;]*", "", style.replace(": ", ":").replace("; ", ";"))
        return [style] if style else []

    def walk(each, around):
        place = [each.get(key) for key in ("x", "y") if each.get(key)]
        move = re.sub(r"rotate\(-?0 [^)]*\)", "", each.get("transform", ""))
        clip = named.get(re.sub(r"url\(#(\w+)\)", r"\1", each.get("clip-path", "")))
        outer = [*around, *styles(each), *re.findall(r"[a-z]+|-?[\d.]+", move)]
        if clip is not None:
            outer += [clip[0].get(key) for key in ("x", "y", "width", "height")]
        if each.tag == f"{SVG}path":
            found.append(("path", outer, points(each.get("d"))))
        elif each.tag == f"{SVG}use":
            walk(named[each.get(LINK)[1:]], [*outer, *place])
        elif each.tag in (f"{SVG}text", f"{SVG}tspan") and each.text:
            found.append((each.text.strip(), [*outer, *place], []))
        for child in each:
            if child.tag != f"{SVG}defs":
                walk(child, outer)

    walk(root, [])
    return found


def same(one: object, other: object) -> bool:
    """Equal, numbers to a hundredth."""
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    try:
        return abs(float(one) - float(other)) <= 0.0051
    except ValueError:
        return one == other


def test_a_lean_plot_shows_the_same(tmp_path):
    figure = Figure(layout="constrained")
    left, right = figure.subplots(1, 2)
    left.loglog([1, 10, 100], [3, 0.3, 70], "o--", label="a & b")
    left.legend()
    right.bar(["one", "two"], [1, 2 / 3], color=["#8c8c8c", "#1f77b4"])
    right.set_title("x < y")
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        figure.savefig(tmp_path / "drawn.svg")
    drawn = (tmp_path / "drawn.svg").read_text()
    lean = tables.lean(drawn)
    before, after = shown(drawn), shown(lean)
    assert {"a & b", "x < y", "two"} <= {each[0] for each in after}
    assert len(before) == len(after) > 50
    for one, other in zip(before, after, strict=True):
        assert same(one, other), (one, other)
    assert len(lean) < 0.45 * len(drawn)


@pytest.mark.parametrize(
    "file", [*ROOT.glob("bench/results/*/*.svg"), *ROOT.glob("docs/**/*.svg")], ids=lambda f: f.name
)
def test_the_plots_of_pages_are_lean(file):
    text = file.read_text()
    assert tables.lean(text) == text, f"python bench/reports/tables.py {file}"
