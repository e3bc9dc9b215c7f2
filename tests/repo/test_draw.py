"""A draw has every law, and of its combinations those that it says."""

import itertools
from types import SimpleNamespace

import pytest

from support.cases import CASES, FAMILIES
from support.draw import PLAIN_ROWS, SHARE, drawn, parameters

LAYOUTS = tuple(range(40))
DTYPES = ("float32", "bfloat16", "float16")


def item(name, marks=(), **params):
    values = "-".join(map(str, params.values()))
    found = SimpleNamespace(nodeid=f"{name}[{values}]" if params else name)
    found.iter_markers = lambda kind: iter(marks)
    if params:
        found.callspec = SimpleNamespace(params=params)
    return Item(found)


class Item:
    """Has a hash, as the items of pytest."""

    def __init__(self, of):
        vars(self).update(vars(of))


def combinations(name="test_a", marks=()):
    rows = itertools.product(CASES, LAYOUTS, DTYPES)
    return [item(name, marks, case=case, layout=a, dtype=b) for case, a, b in rows]


def of(items, name):
    return {parameters(each)[name] for each in items}


@pytest.mark.parametrize("text", ["a", "b", "c"])
def test_a_draw_has_plain_rows_and_each_value(text):
    items = combinations()
    kept = drawn(items, text)
    assert kept == [each for each in items if each in kept]
    assert of(kept, "case") >= {*PLAIN_ROWS, *FAMILIES}
    assert of(kept, "layout") == {*LAYOUTS}
    assert of(kept, "dtype") == {*DTYPES}
    of_families = [each for each in items if each.callspec.params["case"] in FAMILIES]
    assert {*kept} >= {*of_families}
    others = len(items) - len(of_families)
    assert len(kept) - len(of_families) == pytest.approx(others / SHARE, rel=0.2)


def test_another_text_draws_other_combinations():
    items = combinations()
    first, again, other = (drawn(items, text) for text in ("a", "a", "b"))
    assert first == again
    assert first != other
    few = items[-400:]
    all_of_many = {each for number in range(12 * SHARE) for each in drawn(few, f"{number}")}
    assert all_of_many == {*few}


def test_a_draw_has_every_function_and_each_value_of_one_parameter():
    items = [item("test_a"), item("test_b"), *(item("test_c", subject=i) for i in range(99))]
    items += [item("test_d", case=case) for case in CASES if case not in PLAIN_ROWS]
    kept = drawn(items, "a")
    assert kept[:101] == items[:101]
    assert "test_d" in kept[-1].nodeid
    assert len(kept) < len(items)


def test_values_are_told_apart_by_what_they_equal():
    pairs = itertools.product(range(64), range(64))
    items = [item("test_a", case=None, a={"lr": a}, b=[b]) for a, b in pairs]
    assert len(drawn(items, "a")) < len(items) / 4


@pytest.mark.parametrize("values", [{}, {"dtype": "float32"}], ids=str)
def test_combinations_that_are_marked_are_whole(values):
    items = combinations(marks=[SimpleNamespace(kwargs=values)])
    marked = [each for each in items if values.items() <= parameters(each).items()]
    kept = drawn(items, "a")
    assert {*kept} >= {*marked}
    assert (len(kept) == len(items)) == (not values)
