"""Law: the norm of gradients that have no plan is exact, in any layout and for any threads."""

import itertools
import math

import pytest
import torch

WIDE = torch.randn(300, 520, generator=torch.Generator().manual_seed(0))

GRADIENTS = {
    "in order": [WIDE],
    "transposed, a vector, a number": [WIDE.t(), WIDE[0], WIDE[0, 0]],
    "with gaps": [WIDE[::2, 1::3]],
    "expanded": [WIDE[:3, :1].expand(3, 700)],
    "overlapping": [WIDE.as_strided((40, 40), (20, 1))],
    "without elements": [WIDE[:0], WIDE[:, :0]],
    "of all dtypes": [WIDE.bfloat16(), WIDE.half(), WIDE.double(), WIDE],
    "negated": [torch._neg_view(WIDE)],
    "squares beyond float32": [torch.full((1000,), 1e30), torch.full((1000,), 1e-30)],
    "infinite": [torch.tensor([1.0, math.inf])],
}


@pytest.mark.parametrize("grads", GRADIENTS.values(), ids=GRADIENTS)
def test_the_sum_of_squares_is_exact_and_has_the_same_bits_for_any_threads(grads):
    values = itertools.chain(*(grad.double().flatten().tolist() for grad in grads))
    exact = math.fsum(value**2 for value in values)
    found = set()
    before = torch.get_num_threads()
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        found.add(torch.ops.fusedstep.grads_norm2(grads))
    torch.set_num_threads(before)
    (only,) = found
    assert only == pytest.approx(exact, rel=1e-14)


def test_other_dtypes_are_refused():
    with pytest.raises(
        RuntimeError, match="gradient must be float32, float64, bfloat16 or float16"
    ):
        torch.ops.fusedstep.grads_norm2([torch.ones(3, dtype=torch.complex64)])
