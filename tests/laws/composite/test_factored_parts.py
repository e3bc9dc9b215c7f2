"""Laws of the operators that step factored moments in parts, between which sums are exchanged."""

import itertools

import pytest
import torch

from support.stepping import make_gradients, make_weights

#: Matrices of one block and of several, stacks of matrices and vectors.
SHAPES = ((7, 5), (300, 2100), (3, 40), (4, 5, 6, 7), (2, 33, 18), (700,), (1, 9), (9, 1))


def shares(weights):
    """Room for the sums of weights that no other process has a part of, and their sizes."""
    matrices = [weight.shape[:-2].numel() if weight.dim() > 1 else 0 for weight in weights]
    of_rows = [w.shape[:-1].numel() if w.dim() > 1 else 0 for w in weights]
    of_columns = [
        count + (w.numel() // w.shape[-2] if w.dim() > 1 else w.numel())
        for w, count in zip(weights, matrices, strict=True)
    ]
    rows, columns = ([torch.zeros(n).double() for n in each] for each in (of_rows, of_columns))
    sizes = [(w.shape[-2:] if w.dim() > 1 else (1, w.numel()), w.numel()) for w in weights]
    sizes = [number for shape, count in sizes for number in (*shape, count)]
    return rows, columns, torch.zeros(len(weights), 2).double(), sizes


def operands(dtype):
    weights = make_weights(SHAPES, dtype)
    grads = make_gradients(SHAPES, dtype, 1)
    maths = torch.float64 if dtype is torch.float64 else torch.float32
    rows = [torch.ones(w.shape[:-1] if w.dim() > 1 else 0, dtype=maths) for w in weights]
    columns = [w.new_ones((*w.shape[:-2], *w.shape[-1:]), dtype=maths) for w in weights]
    averages = [torch.ones_like(weight, dtype=maths) for weight in weights]
    return weights, grads, rows, columns, averages


NUMBERS = [0.3, 1e-3, 0.1, 1e3, 0.01, 1.0, 1e-3, 0.7, 0.1, 1.0, 0.9, -1.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_the_parts_of_a_step_are_the_step(dtype):
    whole, parts = operands(dtype), operands(dtype)
    shared = shares(parts[0])
    torch.ops.fusedstep.factored_step(*whole, NUMBERS)
    for part in (1, 2, 3, 4):
        before = [weight.clone() for weight in parts[0]]
        torch.ops.fusedstep.factored_part(*parts, *shared, NUMBERS, part)
        assert all(map(torch.equal, parts[0], before)) == (part != 4)
    for found, expected in zip(itertools.chain(*parts), itertools.chain(*whole), strict=True):
        assert torch.equal(found, expected)
    norms = [weight.double().norm() ** 2 for weight in operands(dtype)[0]]
    torch.testing.assert_close(shared[2][:, 0], torch.stack(norms), rtol=1e-5, atol=0)


@pytest.mark.parametrize(
    ("spoil", "text"),
    [
        (lambda rows, columns, norms2, sizes: rows.pop(), "an entry for each weight"),
        (lambda rows, columns, norms2, sizes: sizes.pop(), "an entry for each weight"),
        (lambda rows, columns, norms2, sizes: norms2.resize_(1, 2), "squares of norms must be"),
        (
            lambda rows, columns, norms2, sizes: rows.__setitem__(1, rows[1].float()),
            "sums along rows must be 300 contiguous numbers of float64",
        ),
        (
            lambda rows, columns, norms2, sizes: columns.__setitem__(1, columns[1][1:]),
            "sums along columns must be 2101 contiguous numbers",
        ),
    ],
)
def test_sums_of_another_form_are_refused(spoil, text):
    given = operands(torch.float32)
    shared = shares(given[0])
    spoil(*shared)
    with pytest.raises(RuntimeError, match=text):
        torch.ops.fusedstep.factored_part(*given, *shared, NUMBERS, 1)
    with pytest.raises(RuntimeError, match="no such part"):
        torch.ops.fusedstep.factored_part(*given, *shares(given[0]), NUMBERS, 5)
