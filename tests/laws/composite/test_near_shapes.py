"""Matrices of near shapes that Muon takes through products together, with zeros around them."""

import pytest
import torch

from fusedstep import optim
from fusedstep._matrix import arrangement, rows
from fusedstep._matrix.coefficients import coefficients_of
from fusedstep._matrix.near_shapes import joined, newton_schulz_operations
from fusedstep._matrix.newton_schulz import takes_gram_form
from support.stepping import assert_same_bits

#: Wide and tall ones, one shape twice, a stack, and long ones, convolutions among them.
WIDE, TALL = ((24, 30), (20, 28), (2, 22, 26), (24, 30)), ((30, 24), (28, 20))
SHAPES = (*WIDE, *TALL, (8, 3, 3, 3), (6, 2, 3, 4), (4, 90))


@pytest.fixture(params=[True, False], ids=["joined", "apart"])
def joins(request, monkeypatch):
    monkeypatch.setattr(arrangement, "_CALLS", {"cpu": 1 << 26 if request.param else 0})
    return request.param


def trained(shapes=SHAPES, dtype=torch.float32, steps=3, **options):
    torch.manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(shape).to(dtype)) for shape in shapes]
    options = {"lr": 0.02, "ns_dtype": torch.float64, "stacked": None} | options
    optimizer = optim.Muon(params, **options)
    for _ in range(steps):
        for p in params:
            p.grad = torch.randn(p.shape).to(dtype)
        optimizer.step()
    return params, optimizer


def batches(monkeypatch):
    """The shapes that go through the iteration."""
    seen, iterate = [], rows.orthogonalize
    spied = lambda x, *rest: (seen.append(tuple(x.shape)), iterate(x, *rest))[1]  # noqa: E731
    monkeypatch.setattr(rows, "orthogonalize", spied)
    return seen


def test_batches_are_padded_to_the_largest_sides(joins, monkeypatch):
    seen = batches(monkeypatch)
    trained(steps=1)
    wide, tall, long = (5, 24, 30), (2, 30, 24), (3, 8, 90)
    assert seen == [wide, tall, long] if joins else len(seen) == 8


def test_no_matrix_is_padded_whose_shorter_side_is_scaled(joins, monkeypatch):
    """Zeros may make a tall matrix a wide one, whose rows would be scaled for its columns."""
    seen = batches(monkeypatch)
    trained(steps=1, ns_start="aol")
    assert len(seen) == 8


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"adjust_lr_fn": "match_rms_adamw", "nesterov": False},
        {"cautious_decay": True, "weight_decay": 0.5, "maximize": True},
        {"ns_coefficients": "polar_express", "ns_steps": 8},
        {"ns_start": "aol"},
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_steps_are_those_of_each_alone(joins, dtype, options):
    """In double products the order of sums is all that differs; averages have the same bits."""
    params, optimizer = trained(dtype=dtype, **options)
    expected, unfused = trained(dtype=dtype, fused=False, **options)
    bound = {torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
    for p, other in zip(params, expected, strict=True):
        torch.testing.assert_close(p, other, rtol=bound, atol=bound)
        average, its = optimizer.state[p], unfused.state[other]
        torch.testing.assert_close(average, its, rtol=bound, atol=bound)


def test_averages_keep_their_bits(monkeypatch):
    found = []
    for saved in (1 << 26, 0):
        monkeypatch.setattr(arrangement, "_CALLS", {"cpu": saved})
        params, optimizer = trained()
        found.append([optimizer.state[p]["momentum_buffer"] for p in params])
    for one, other in zip(*found, strict=True):
        assert_same_bits(one, other, "momentum_buffer")


def test_what_is_not_a_number_stays_in_its_matrix():
    torch.manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(shape)) for shape in SHAPES]
    optimizer = optim.Muon(params, lr=0.02)
    for value in (torch.nan, torch.inf):
        for p in params:
            p.grad = torch.randn(p.shape)
        params[1].grad[0, 0] = value
        optimizer.step()
        assert params[1].isnan().any()
        assert not any(p.isnan().any() for p in (params[0], *params[2:]))


@pytest.mark.parametrize("options", [{"normuon": True}, {"split_heads": 2}], ids=str)
def test_rows_with_moments_and_heads_are_not_padded(options, monkeypatch):
    seen = batches(monkeypatch)
    trained(((24, 30), (20, 28)), steps=1, **options)
    heads = options.get("split_heads", 1)
    assert set(seen) == {(heads, 24 // heads, 30), (heads, 20 // heads, 28)}


def test_parts_of_one_shape_go_through_products_together(monkeypatch):
    seen = batches(monkeypatch)
    trained(((24, 30), (24, 28), (24, 30)), steps=1, split_sizes=(12, 6, 6))
    assert seen == [(2, 12, 30), (4, 6, 30), (1, 12, 28), (2, 6, 28)]


# The choice


QUINTIC = coefficients_of("quintic", 5)


def choice(counts, most=1 << 22, saved=1 << 26, dtype=torch.bfloat16):
    return joined(
        counts,
        most,
        saved,
        lambda shape: newton_schulz_operations(shape, 5),
        lambda shape: takes_gram_form(shape, dtype, QUINTIC),
    )


def test_shapes_are_joined_where_zeros_add_fewer_operations_than_calls_take():
    near = {(100, 120): 1, (96, 120): 1}
    added = newton_schulz_operations((100, 120), 5) - newton_schulz_operations((96, 120), 5)
    assert choice(near, saved=added) == [[(100, 120)], [(96, 120)]]
    assert choice(near, saved=added + 1) == [[(100, 120), (96, 120)]]
    assert choice({(100, 120): 1, (96, 120): 3}, saved=3 * added) == [[(100, 120)], [(96, 120)]]


def test_joined_shapes_have_so_many_elements_at_most():
    near = {(100, 120): 2, (96, 120): 1}
    assert choice(near, most=3 * 100 * 120) == [[(100, 120), (96, 120)]]
    assert choice(near, most=3 * 100 * 120 - 1) == [[(100, 120)], [(96, 120)]]


def test_shapes_of_other_forms_and_sides_stay_apart():
    assert choice({(12, 16): 1, (16, 12): 1}) == [[(12, 16)], [(16, 12)]]
    long, square = (10, 200), (12, 12)
    forms = [takes_gram_form(shape, torch.bfloat16, QUINTIC) for shape in (long, square)]
    assert forms == [True, False]
    assert len(choice({long: 1, square: 1})) == 2


def test_the_order_of_weights_does_not_matter():
    shapes = [(10 + i % 7, 20 + i % 5) for i in range(20)]
    counts = dict.fromkeys(shapes, 1)
    backwards = dict.fromkeys(reversed(shapes), 1)
    assert choice(counts) == choice(backwards)
    assert sorted(shape for shapes in choice(counts) for shape in shapes) == sorted(counts)


def test_operations_are_those_of_the_products():
    """A Gram matrix, its square, and a product of that and the matrix, each step."""
    rows, columns = 6, 10
    one = rows * rows * columns + rows**3 + rows * rows * columns
    assert newton_schulz_operations((rows, columns), 5) == 5 * 2 * one
    assert newton_schulz_operations((columns, rows), 5) == 5 * 2 * one
