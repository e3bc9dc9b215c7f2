"""The iteration of Muon's matrices against float64, in both forms and from both starts."""

import functools

import pytest
import torch

from fusedstep import optim
from fusedstep._matrix import newton_schulz
from fusedstep._matrix.coefficients import coefficients_of
from fusedstep._matrix.newton_schulz import Scratch, orthogonalize
from reference.muon import QUINTIC
from reference.orthogonal import almost_orthogonal, iterated
from support.matrices import error, parameters
from support.stepping import forced_isa

#: Largest relative errors of an iterated matrix, by the dtype of the products, for gradients whose
#: singular values are those of random matrices.
ERRORS = {
    torch.float64: 1e-13,
    torch.float32: 3e-5,
    torch.float16: 1e-2,
    torch.bfloat16: 8e-2,
}


#: Starts of the iteration, and how many times these errors they may have. The AOL start rounds the
#: Gram matrix and the product of the first polynomials once more, and begins with singular values
#: near 1, where the first polynomial of ``polar_express`` is steep.
STARTS = {"norm": 1, "aol": 2.5}


@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("gram", [False, True], ids=["usual form", "Gram form"])
@pytest.mark.parametrize("name", ["quintic", "polar_express"])
@pytest.mark.parametrize("dtype", ERRORS, ids=str)
def test_iterates_singular_values(dtype, name, gram, start, monkeypatch):
    monkeypatch.setattr(newton_schulz, "takes_gram_form", lambda *args: gram)
    generator = torch.Generator().manual_seed(3)
    for count in (1, 3, 5, 8):
        steps = coefficients_of(name, count)
        for shape in ((2, 16, 64), (1, 64, 16), (3, 12, 30)):
            x = torch.randn(shape, generator=generator, dtype=torch.float64)
            x /= torch.linalg.matrix_norm(x)[:, None, None]
            found = orthogonalize(x.to(dtype, copy=True), steps, Scratch(), start == "aol")
            expected = torch.stack([iterated(each, steps, 1e-7, start) for each in x])
            assert error(found, expected) < STARTS[start] * ERRORS[dtype]


def values_down_to(power, generator):
    """A matrix with singular values from 1 to this power of ten."""
    u, _, v = torch.linalg.svd(
        torch.randn(48, 144, generator=generator, dtype=torch.float64), full_matrices=False
    )
    return u @ torch.diag(torch.logspace(0, power, 48, dtype=torch.float64)) @ v


def one_far_above(share, generator):
    """A matrix with one singular value far above all others."""
    return 1 + share * torch.randn(11, 26, generator=generator, dtype=torch.float64)


#: Matrices, and how many times the error of the usual form that of the Gram form may be. Where one
#: value is far above, the usual form is exact to a few units: less than 1e-4 is no divergence.
VALUES_THAT_DIFFER = {
    "to 1e-3": (functools.partial(values_down_to, -3), 5),
    "to 1e-6": (functools.partial(values_down_to, -6), 5),
    "one is 15 times the next": (functools.partial(one_far_above, 0.2), 8),
    "one is 30 times the next": (functools.partial(one_far_above, 0.1), 8),
}


@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("name", ["quintic", "polar_express"])
@pytest.mark.parametrize("what", VALUES_THAT_DIFFER)
@pytest.mark.parametrize("dtype", ERRORS, ids=str)
def test_the_gram_form_errs_about_as_much_where_singular_values_differ(
    dtype, what, name, start, monkeypatch
):
    """What is lost from squares must not grow."""
    generator = torch.Generator().manual_seed(5)
    make, times = VALUES_THAT_DIFFER[what]
    for count in (5, 8):
        steps = coefficients_of(name, count)
        for x in (make(generator) for _ in range(3)):
            expected = iterated(x, steps, 1e-7, start)
            x = (x / x.norm())[None]
            errors = []
            for gram in (False, True):
                monkeypatch.setattr(newton_schulz, "takes_gram_form", lambda *args, g=gram: g)
                found = orthogonalize(x.to(dtype, copy=True), steps, Scratch(), start == "aol")[0]
                errors.append(error(found, expected))
            assert errors[1] < max(STARTS[start] * times * errors[0], 1e-4 * (times > 5))


def orthogonal_rows(generator):
    """Rows of length 1: the Gram matrix is diagonal, and the bound of the AOL start is reached."""
    q, _ = torch.linalg.qr(torch.randn(64, 24, generator=generator, dtype=torch.float64))
    return q.T


def equal_rows(generator):
    return torch.randn(1, 40, generator=generator, dtype=torch.float64).expand(16, 40)


def rows_of_other_sizes(generator):
    sizes = torch.logspace(0, -6, 24, dtype=torch.float64)
    return sizes[:, None] * torch.randn(24, 200, generator=generator, dtype=torch.float64)


#: Matrices, and whether F X has a singular value of 1.
STARTED = {
    "random": (lambda g: torch.randn(48, 144, generator=g, dtype=torch.float64), False),
    "square": (lambda g: torch.randn(40, 40, generator=g, dtype=torch.float64), False),
    "one row": (lambda g: torch.randn(1, 9, generator=g, dtype=torch.float64), True),
    "orthogonal": (orthogonal_rows, True),
    "equal": (equal_rows, True),
    "rows of other sizes": (rows_of_other_sizes, False),
    "to 1e-6": (functools.partial(values_down_to, -6), False),
    "one far above": (functools.partial(one_far_above, 0.01), False),
}


@pytest.mark.parametrize("tall", [False, True], ids=["wide", "tall"])
@pytest.mark.parametrize("what", STARTED)
@pytest.mark.parametrize("dtype", ERRORS, ids=str)
def test_the_aol_start_makes_no_singular_value_larger_than_1(dtype, what, tall):
    """A step that multiplies by 1 leaves F X, in which no row is longer than 1."""
    make, is_reached = STARTED[what]
    x = make(torch.Generator().manual_seed(5))
    x = (x.mT if tall and x.shape[0] != x.shape[1] else x).contiguous()[None]
    x /= torch.linalg.matrix_norm(x)[:, None, None]
    before = torch.linalg.matrix_norm(x.to(dtype).double(), 2).item()
    step = 1.0, 1e-30, 1e-30  # torch 2.11 has NaN for products of bfloat16 times 0 on a CPU
    found = orthogonalize(x.to(dtype, copy=True), [step], Scratch(), True).double()
    largest = torch.linalg.matrix_norm(found, 2).item()
    assert largest <= 1 + 4 * torch.finfo(dtype).eps
    assert largest >= (1 if is_reached else before) * (1 - 8 * torch.finfo(dtype).eps)
    expected = almost_orthogonal(x.to(dtype).double())
    assert error(found, expected) < 4 * torch.finfo(dtype).eps


@pytest.mark.parametrize("fused", [None, False], ids=["fused", "unfused"])
@pytest.mark.parametrize("dtype", ERRORS, ids=str)
def test_rows_of_zeros_stay_zeros_under_the_aol_start(dtype, fused):
    """The others are as if there were none; rows far below the others stay short."""
    generator = torch.Generator().manual_seed(6)
    grad = torch.randn(12, 40, generator=generator)
    grad[3] = 0
    grad[5] *= 1e-8
    param = torch.nn.Parameter(torch.zeros(12, 40, dtype=torch.float64))
    grad = grad.double()
    options = {"momentum": 0.0, "weight_decay": 0.0, "fused": fused, "ns_dtype": dtype}
    optimizer = optim.Muon([param], lr=1.0, ns_start="aol", ns_steps=4, **options)
    param.grad = grad
    optimizer.step()
    found = param.detach()
    assert found.isfinite().all()
    assert not found[3].any()
    assert found[5].norm() < 0.01
    rest = [i for i in range(12) if i not in (3, 5)]
    expected = iterated(grad[rest], [QUINTIC] * 4, 1e-7, "aol")
    # The short row is there, with 1e-8 of the size of the others.
    assert error(-found[rest], expected) < max(2 * STARTS["aol"] * ERRORS[dtype], 1e-7)


@pytest.mark.parametrize("fused", [None, False], ids=["fused", "unfused"])
def test_no_update_at_all_moves_nothing_under_the_aol_start(fused):
    params = parameters([(8, 24), (24, 8)])
    optimizer = optim.Muon(params, ns_start="aol", weight_decay=0.0, fused=fused)
    for p in params:
        p.grad = torch.zeros_like(p)
    optimizer.step()
    assert all(p.equal(q) for p, q in zip(params, parameters([(8, 24), (24, 8)]), strict=True))


def of_aol(params, **options):
    return optim.Muon(params, ns_start="aol", **options)


@pytest.mark.parametrize("exponent", [-13, 13])
@pytest.mark.parametrize("fused", [None, False], ids=["fused", "unfused"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("build", [optim.Muon, optim.MuSGD, of_aol], ids=lambda each: each.__name__)
def test_gradients_of_any_size_move_a_weight_alike_in_float16(build, dtype, fused, exponent):
    """Norms beyond 65,504 and numbers below 6e-5 are not those of float16."""
    generator = torch.Generator().manual_seed(8)
    grad = torch.randn(96, 120, generator=generator).clamp(-3, 3).to(dtype)
    moves = []
    for factor in (1.0, 2.0**exponent):
        param = torch.nn.Parameter(torch.zeros(96, 120, dtype=dtype))
        options = {"momentum": 0.0, "weight_decay": 0.0, "nesterov": False, "fused": fused}
        options |= {"use_muon": True, "sgd": 0.0} if build is optim.MuSGD else {"eps": 0.0}
        optimizer = build([param], ns_dtype=torch.float16, lr=1.0, **options)
        param.grad = grad * factor
        optimizer.step()
        moves.append(param.detach().double())
    assert moves[0].norm() > 1
    assert error(moves[1], moves[0]) < 0.02


def test_the_gram_form_is_for_long_matrices_and_whole_float32(monkeypatch):
    takes = newton_schulz.takes_gram_form
    five, one = coefficients_of("quintic", 5), coefficients_of("quintic", 1)
    for dtype in ERRORS:
        assert takes((3, 10, 40), dtype, five)
        assert takes((40, 10), dtype, five)
        assert not takes((10, 10), dtype, five)
        assert not takes((10, 40), dtype, one)
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "high")
    assert not takes((10, 40), torch.float32, five)
    assert takes((10, 40), torch.float16, five)


def test_polar_express_takes_singular_values_to_one():
    """The coefficients are those of the paper: from 1e-3 on eight steps leave nothing to do."""
    s = torch.logspace(-3, 0, 500, dtype=torch.float64)
    for a, b, c in coefficients_of("polar_express", 10):
        s = a * s + b * s**3 + c * s**5
    assert (s - 1).abs().max() < 1e-6


@pytest.mark.parametrize("gram", [False, True], ids=["usual form", "Gram form"])
def test_a_polynomial_without_a_fifth_power_in_16_bits(gram, monkeypatch):
    """torch's product of bfloat16 that is taken times 0 may be anything."""
    monkeypatch.setattr(newton_schulz, "takes_gram_form", lambda *args: gram)
    steps = coefficients_of((1.5, -0.5, 0.0), 3)
    x = torch.randn(2, 32, 80, generator=torch.Generator().manual_seed(0)).double()
    x /= torch.linalg.matrix_norm(x, keepdim=True)
    expected = torch.stack([iterated(each, steps, 1e-7) for each in x])
    with forced_isa("avx2"):  # which has no native products
        found = orthogonalize(x.bfloat16(), steps, Scratch())
    assert error(found, expected) < 3e-2


def test_coefficients_of_each_step():
    steps = ((1, 2, 3), (4, 5, 6))
    assert coefficients_of(steps, 3) == [(1, 2, 3), (4, 5, 6), (4, 5, 6)]
    assert coefficients_of([0.5, 2, 1], 2) == [(0.5, 2, 1)] * 2
    assert coefficients_of("quintic", 2) == [QUINTIC] * 2
    assert len(set(coefficients_of("polar_express", 5))) == 5
