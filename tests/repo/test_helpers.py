"""The suite's own instruments: each sees what it is there to see."""

import pytest
import torch

from support import stepping
from support.cases import PLAIN
from support.layouts import GRADIENT_LAYOUTS, WEIGHT_LAYOUTS
from support.stepping import (
    FEW,
    Reference,
    assert_same_bits,
    assert_within,
    make_gradients,
    make_weights,
    threads,
)

LAYOUTS_WITH_ELEMENTS = [layout for layout in WEIGHT_LAYOUTS if 0 not in layout.shape]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS_WITH_ELEMENTS, ids=str)
def test_a_byte_beside_a_view_is_seen(layout, dtype):
    (value,) = make_weights([layout.shape], dtype)
    placed = layout.place(value)
    placed.view.add_(1)
    placed.assert_outside_untouched("view")
    one_before = placed.view.storage_offset() - 1
    placed.view.as_strided((1,), (1,), one_before).fill_(0)
    with pytest.raises(AssertionError, match="1 elements outside"):
        placed.assert_outside_untouched("view")


@pytest.mark.parametrize("layout", LAYOUTS_WITH_ELEMENTS, ids=str)
def test_layouts_hold_their_values(layout):
    (value,) = make_weights([layout.shape], torch.float32)
    placed = layout.place(value)
    assert placed.view.stride() == layout.strides
    assert_same_bits(placed.view, value, "weight")
    for name, strides in GRADIENT_LAYOUTS.items():
        if "expanded" not in name:
            layout_of_gradient = type(layout)(name, layout.shape, strides(layout))
            assert_same_bits(layout_of_gradient.place(value).view, value, name)


def test_bits_tell_what_values_do_not():
    assert_same_bits(torch.tensor([float("nan")]), torch.tensor([float("nan")]), "NaN")
    with pytest.raises(pytest.fail.Exception, match="1 of 2 elements differ"):
        assert_same_bits(torch.tensor([1.0, -0.0]), torch.tensor([1.0, 0.0]), "zeros")


def test_nan_is_within_no_bound():
    nan, one = torch.tensor([float("nan")]), torch.ones(1)
    for pair in ((nan, one), (one, nan), (nan, nan)):
        with pytest.raises(pytest.fail.Exception):
            assert_within(*pair, torch.full((1,), float("inf")), "NaN")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_made_values_do_not_depend_on_threads(dtype):
    results = []
    for count in (1, 2, 7):
        with threads(count):
            stepping._gradients.cache_clear()
            results += make_gradients([(129, 1024)], dtype, step=1)
    assert_same_bits(results[1], results[0], "two threads")
    assert_same_bits(results[2], results[0], "seven threads")


@pytest.mark.parametrize("case", PLAIN, ids=str)
def test_a_reference_notices_one_wrong_element(case):
    """An update that is missing for a single element, in the weight or in a state.

    The second, for no state is zero after it.
    """
    (weight,) = make_weights([(40, 50)], torch.float32)
    reference = Reference(case, weight)
    for step in (1, 2):
        before = reference.weight.float()
        reference.step(*make_gradients([(40, 50)], torch.float32, step))
    state = {name: value.float() for name, value in reference.kept.items()}
    updated = reference.weight.float()
    reference.check(updated, state, "right")
    wrong, count = updated.clone(), 1
    if not case.continuous:  # one more than may have turned in two steps
        count = 1 + int(2 * FEW * wrong.numel())
    moved = tuple((updated != before).nonzero()[:count].T)  # a rule may leave others where they are
    wrong[moved] = before[moved]
    with pytest.raises(pytest.fail.Exception, match=f"weight: {count} of 2000"):
        reference.check(wrong, state, "wrong weight")
    for name in case.states:
        damaged = state[name].clone()
        damaged[tuple(damaged.nonzero()[7])] *= 1 + 1e-5
        with pytest.raises(pytest.fail.Exception, match=f"{name}: 1 of 2000"):
            reference.check(updated, state | {name: damaged}, "wrong state")
