"""Muon: its maths against float64, torch's class, and what it refuses."""

import copy
import functools
import inspect
import io
import pickle

import pytest
import torch

import fusedstep
from fusedstep import optim
from fusedstep._matrix import batches, newton_schulz
from fusedstep._matrix.newton_schulz import Scratch, coefficients_of, orthogonalize
from fusedstep.memory.plan import Choice, state_bytes
from reference.muon import QUINTIC, muon
from reference.orthogonal import almost_orthogonal, iterated
from support.matrices import SHAPES, assert_moved_alike, error, largest_allocation, parameters, step
from support.stepping import WAYS, forced_isa

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


def trained(make, shapes=SHAPES, dtype=torch.float32, steps=3, **options):
    params = parameters(shapes, dtype)
    optimizer = make(params, **({"lr": 0.02} | options))
    for number in range(steps):
        step(optimizer, params, number)
    return params, optimizer


def by_reference(shapes=SHAPES, steps=3, blocks=lambda w: [w], **options):
    """Weights after steps in float64; ``blocks`` are the matrices of a weight, as views."""
    weights = [p.detach().double() for p in parameters(shapes)]
    states = [[{} for _ in blocks(w)] for w in weights]
    for number in range(steps):
        generator = torch.Generator().manual_seed(100 + number)
        for weight, kept in zip(weights, states, strict=True):
            grad = torch.randn(weight.shape, generator=generator).double()
            for i, (block, g) in enumerate(zip(blocks(weight), blocks(grad), strict=True)):
                new, kept[i] = muon(block, g, kept[i], **({"lr": 0.02} | options))
                block.copy_(new)
    return weights


# The iteration


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


def test_arguments_and_defaults_are_torchs_in_its_order():
    theirs, ours = (
        inspect.signature(cls).parameters.values() for cls in (torch.optim.Muon, optim.Muon)
    )
    own = [each for each in ours if each.kind is not inspect.Parameter.KEYWORD_ONLY]
    assert [(each.name, each.default) for each in own] == [
        (each.name, each.default) for each in theirs
    ]


# The step


@pytest.mark.parametrize("fused", [None, False], ids=["together", "one by one"])
@pytest.mark.parametrize(
    ("options", "reference"),
    [
        ({}, {}),
        ({"nesterov": False, "momentum": 0.8}, {"nesterov": False, "momentum": 0.8}),
        (
            {"weight_decay": 0.0, "ns_steps": 3},
            {"weight_decay": 0.0, "coefficients": [QUINTIC] * 3},
        ),
        ({"adjust_lr_fn": "match_rms_adamw"}, {"adjust": "rms"}),
        ({"adjust_lr_fn": "spectral_unclamped"}, {"adjust": "spectral"}),
        ({"adjust_lr_fn": "original", "eps": 1e3}, {"eps": 1e3}),
        (
            {"ns_coefficients": "polar_express"},
            {"coefficients": coefficients_of("polar_express", 5)},
        ),
        ({"ns_coefficients": (2, -1.5, 0.5)}, {"coefficients": [(2, -1.5, 0.5)] * 5}),
        ({"cautious_decay": True, "weight_decay": 5.0}, {"cautious": True, "weight_decay": 5.0}),
        ({"normuon": True}, {"beta2": 0.95}),
        ({"ns_start": "norm"}, {}),
        ({"ns_start": "aol"}, {"iterate": functools.partial(iterated, start="aol")}),
        (
            {"ns_start": "aol", "ns_steps": 4, "normuon": True, "eps": 1e3},
            {
                "iterate": functools.partial(iterated, start="aol"),
                "coefficients": [QUINTIC] * 4,
                "beta2": 0.95,
                "eps": 1e3,
            },
        ),
        (
            {"normuon": True, "beta2": 0.6, "cautious_decay": True, "weight_decay": 5.0},
            {"beta2": 0.6, "cautious": True, "weight_decay": 5.0},
        ),
    ],
    ids=lambda options: ", ".join(map(str, options)) or "defaults",
)
def test_steps_as_the_reference(options, reference, fused):
    found, _ = trained(optim.Muon, ns_dtype=torch.float32, fused=fused, **options)
    assert_moved_alike(found, by_reference(**reference), parameters(), 1e-4)


def test_products_in_double_are_exact():
    params = parameters(dtype=torch.float64)
    optimizer = optim.Muon(params, lr=0.02, ns_dtype=torch.float64)
    for number in range(3):
        step(optimizer, params, number)
    assert_moved_alike(params, by_reference(), parameters(), 1e-12)


def test_maximize_takes_the_gradient_negated():
    params = parameters()
    optimizer = optim.Muon(params, lr=0.02, maximize=True, ns_dtype=torch.float32)
    generator = torch.Generator().manual_seed(100)
    for p in params:
        p.grad = -torch.randn(p.shape, generator=generator)
    optimizer.step()
    assert_moved_alike(params, by_reference(steps=1), parameters(), 1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_one_by_one_is_what_torch_computes(dtype):
    """The same operations: but for the last bits, and the dtype of products."""
    options = {"momentum": 0.9, "adjust_lr_fn": "match_rms_adamw", "weight_decay": 0.2}
    expected, theirs = trained(torch.optim.Muon, dtype=dtype, **options)
    found, ours = trained(optim.Muon, dtype=dtype, fused=False, ns_dtype=torch.bfloat16, **options)
    bound = 6e-2 if dtype is torch.bfloat16 else 1e-5
    assert_moved_alike(found, expected, parameters(dtype=dtype), bound)
    for p, q in zip(found, expected, strict=True):
        torch.testing.assert_close(
            ours.state[p]["momentum_buffer"], theirs.state[q]["momentum_buffer"]
        )


def test_together_is_within_the_error_of_bfloat16_of_one_by_one():
    expected, _ = trained(optim.Muon, fused=False, ns_dtype=torch.bfloat16)
    found, _ = trained(optim.Muon, ns_dtype=torch.bfloat16)
    assert_moved_alike(found, expected, parameters(), 5e-2)
    assert any((a != b).any() for a, b in zip(found, expected, strict=True))


def test_small_batches_give_the_same(monkeypatch):
    shapes = [(12, 8)] * 5
    expected, _ = trained(optim.Muon, shapes, ns_dtype=torch.float32)
    monkeypatch.setitem(fusedstep._matrix.arrangement._AT_ONCE, "cpu", 200)
    found, optimizer = trained(optim.Muon, shapes, ns_dtype=torch.float32)
    assert max(each.numel() for each in optimizer._scratch.tensors()) == 192
    assert_moved_alike(found, expected, parameters(shapes), 1e-5)


@pytest.mark.parametrize("normuon", [False, True])
@pytest.mark.parametrize("fused", [None, False], ids=["together", "one by one"])
@pytest.mark.parametrize(
    ("shape", "options", "blocks"),
    [
        ((3, 8, 12), {}, list),
        ((3, 8, 12), {"stacked": False}, lambda w: [w.view(3, 96)]),
        ((6, 3, 2, 2), {}, lambda w: [w.view(6, 12)]),
        ((2, 3, 8, 4), {"stacked": True}, lambda w: list(w.view(6, 8, 4))),
        ((24, 8), {"split_heads": 3}, lambda w: list(w.view(3, 8, 8))),
        ((2, 12, 8), {"split_heads": 2}, lambda w: list(w.view(4, 6, 8))),
        ((24, 8), {"split_sizes": (12, 8, 4)}, lambda w: w.split((12, 8, 4))),
        ((24, 8), {"split_sizes": [16, 4, 4]}, lambda w: w.split((16, 4, 4))),
        ((24, 8), {"split_sizes": (4, 16, 4)}, lambda w: w.split((4, 16, 4))),
        ((24, 8), {"split_sizes": (24,)}, lambda w: [w]),
        (
            (2, 12, 8),
            {"split_sizes": (8, 2, 2)},
            lambda w: [block for each in w for block in each.split((8, 2, 2))],
        ),
        (
            (6, 3, 2, 2),
            {"split_sizes": (1, 5)},
            lambda w: w.view(6, 12).split((1, 5)),
        ),
        (
            (24, 8),
            {"split_sizes": (16, 8), "split_heads": 2},
            lambda w: w.split((8, 8, 4, 4)),
        ),
    ],
    ids=[
        *("stack", "flattened", "convolution", "stacks", "heads", "heads of a stack"),
        *("sizes", "sizes of which two are one", "two around another", "one size"),
        *("sizes of a stack", "sizes of a convolution", "sizes and heads"),
    ],
)
def test_weights_are_matrices(shape, options, blocks, fused, normuon):
    shapes = [shape, shape]
    options = options | {"ns_dtype": torch.float32, "fused": fused, "normuon": normuon}
    found, _ = trained(optim.Muon, shapes, **options)
    expected = by_reference(shapes, blocks=blocks, beta2=0.95 if normuon else None)
    assert_moved_alike(found, expected, parameters(shapes), 1e-4)


@pytest.mark.parametrize("fused", [None, False], ids=["together", "one by one"])
def test_rows_of_normuon_have_one_size(fused):
    """The first average is in proportion to its own squares: all rows come out alike."""
    options = {"weight_decay": 0.0, "ns_dtype": torch.float64, "fused": fused}
    moves = []
    for normuon in (False, True):
        found, optimizer = trained(
            optim.Muon, [(24, 8)], torch.float64, steps=1, normuon=normuon, **options
        )
        moves.append(found[0].detach() - parameters([(24, 8)], torch.float64)[0].detach())
    sizes = moves[1].norm(dim=1)
    torch.testing.assert_close(sizes, sizes.mean().expand(24), rtol=1e-8, atol=0)
    assert moves[0].norm(dim=1).std() > 0.05 * sizes.mean()
    torch.testing.assert_close(moves[1].norm(), moves[0].norm(), rtol=1e-8, atol=0)
    assert optimizer.state[found[0]]["second_momentum_buffer"].shape == (24, 1)


@pytest.mark.parametrize("fused", [None, False], ids=["together", "one by one"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_run_of_normuon_goes_on_from_its_dictionary(dtype, fused):
    shapes, options = [(24, 8), (3, 8, 12)], {"normuon": True, "fused": fused, "lr": 0.02}
    whole, _ = trained(optim.Muon, shapes, dtype, steps=4, **options)
    params, first = trained(optim.Muon, shapes, dtype, steps=2, **options)
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    file.seek(0)
    optimizer = optim.Muon(params, **options)
    optimizer.load_state_dict(torch.load(file, weights_only=True))
    for p in params:
        assert {value.dtype for value in optimizer.state[p].values()} == {torch.float32}
    for number in (2, 3):
        step(optimizer, params, number)
    assert all(torch.equal(p, q) for p, q in zip(params, whole, strict=True))


def test_normuon_takes_no_dtensors(monkeypatch):
    weight = torch.nn.Parameter(torch.ones(3, 3))
    monkeypatch.setattr("fusedstep._matrix.muon_groups.is_dtensor", lambda tensor: True)
    with pytest.raises(ValueError, match="'w' is a DTensor, of whose rows normuon=True keeps no"):
        optim.Muon([("w", weight)], normuon=True)


def test_normuon_of_codes_and_of_a_group():
    shapes = [(64, 80)] * 2
    options = {"ns_dtype": torch.float32, "normuon": True}
    found, optimizer = trained(optim.Muon, shapes, state_dtype="int8", **options)
    state = optimizer.state[found[0]]
    assert state["momentum_buffer"].dtype is torch.uint8
    assert state["second_momentum_buffer"].dtype is torch.float32
    assert_moved_alike(found, by_reference(shapes, beta2=0.95), parameters(shapes), 0.05)
    params = parameters([(24, 8), (24, 8)])
    optimizer = optim.Muon([{"params": params[:1], "normuon": True}, {"params": params[1:]}])
    step(optimizer, params, 0)
    assert ["second_momentum_buffer" in optimizer.state[p] for p in params] == [True, False]
    assert "normuon" not in optimizer.param_groups[1]


def test_weights_of_other_strides():
    expected, _ = trained(optim.Muon, [(24, 8), (6, 3, 2, 2)], ns_dtype=torch.float32)
    (matrix, filters) = parameters([(24, 8), (6, 3, 2, 2)])
    params = [
        torch.nn.Parameter(matrix.detach().t().contiguous().t()),
        torch.nn.Parameter(filters.detach().to(memory_format=torch.channels_last)),
    ]
    optimizer = optim.Muon(params, lr=0.02, ns_dtype=torch.float32)
    for number in range(3):
        step(optimizer, params, number)
    for found, other in zip(params, expected, strict=True):
        assert not found.is_contiguous()
        torch.testing.assert_close(found, other)


def test_a_weight_without_elements_and_one_without_a_gradient():
    params = [*parameters([(8, 8), (0, 4)]), torch.nn.Parameter(torch.ones(4, 4))]
    optimizer = optim.Muon(params, lr=0.02)
    for p in params[:2]:
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert (params[2] == 1).all()
    assert params[2] not in optimizer.state


@pytest.mark.parametrize("what", ["dropped", "of another rule"])
def test_moments_of_adamw_that_begin_anew_have_a_count_that_does(what):
    (weight, other), options = parameters([(8, 8)] * 2), {"lr": 0.02, "use_muon": False}
    optimizer = optim.Muon([weight], **options)
    for number in range(3):
        step(optimizer, [weight], number)
    if what == "dropped":
        del optimizer.state[weight]
    else:
        optimizer.param_groups[0]["use_muon"] = True
        del optimizer.state[weight]
        step(optimizer, [weight], 3)
        optimizer.param_groups[0]["use_muon"] = False
    other.data.copy_(weight)
    fresh = optim.Muon([other], **options)
    step(optimizer, [weight], 4)
    step(fresh, [other], 4)
    assert optimizer.state[weight]["step"] == fresh.state[other]["step"] == 1
    assert torch.equal(weight, other)


@pytest.mark.parametrize("make", [optim.Muon, optim.MuSGD])
@pytest.mark.parametrize("fused", [None, False], ids=["together", "one by one"])
def test_matrices_without_columns_or_rows(make, fused):
    params = parameters([(3, 0), (0, 4), (2, 3, 0)])
    optimizer = make([{"params": params, "use_muon": True}], fused=fused, momentum=0.9)
    for number in range(2):
        step(optimizer, params, number)
    assert [p.shape for p in params] == [(3, 0), (0, 4), (2, 3, 0)]


def test_what_is_not_a_number_stays_in_its_matrix():
    params = parameters([(12, 8)] * 3)
    optimizer = optim.Muon(params, lr=0.02)
    for p in params:
        p.grad = torch.ones_like(p)
    params[1].grad[2, 3] = float("nan")
    optimizer.step()
    assert params[1].isnan().all()
    assert not params[0].isnan().any()
    assert not params[2].isnan().any()


def test_a_gradient_of_zeros_moves_by_the_decay_alone():
    params = parameters([(12, 8)])
    optimizer = optim.Muon(params, lr=0.5, weight_decay=0.25)
    params[0].grad = torch.zeros_like(params[0])
    optimizer.step()
    torch.testing.assert_close(params[0], parameters([(12, 8)])[0] * 0.875)


@pytest.mark.parametrize("fused", [None, False], ids=["together", "one by one"])
def test_bfloat16_without_nesterov_leaves_the_average_alone(fused):
    """torch normalises it in place, for its bfloat16() is the average itself."""
    (weight,), optimizer = trained(
        optim.Muon, [(12, 8)], torch.bfloat16, steps=1, nesterov=False, fused=fused
    )
    average = optimizer.state[weight]["momentum_buffer"]
    assert average.dtype is torch.bfloat16
    torch.testing.assert_close(average, weight.grad * 0.05, rtol=0.01, atol=1e-3)


# Memory


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"ns_dtype": torch.bfloat16},
        {"ns_dtype": torch.float32},
        {"nesterov": False},
        {"ns_start": "aol"},
        {"ns_start": "aol", "ns_dtype": torch.float32},
        {"ns_start": "aol", "ns_dtype": torch.float16},
    ],
    ids=str,
)
def test_a_step_allocates_nothing_of_a_weights_size(options):
    params, optimizer = trained(optim.Muon, [(96, 32), (32, 96), (96, 32)], steps=2, **options)
    scratch = [each.data_ptr() for each in optimizer._scratch.tensors()]
    assert largest_allocation(lambda: torch.empty(1000)) >= 4000
    assert largest_allocation(optimizer.step) < 32 * 32 * 2
    assert [each.data_ptr() for each in optimizer._scratch.tensors()] == scratch
    del params


CHANGES = {
    "nothing": lambda params, optimizer: None,
    "a learning rate": lambda params, optimizer: optimizer.param_groups[0].update(lr=0.5),
    "an option": lambda params, optimizer: optimizer.param_groups[0].update(
        adjust_lr_fn="match_rms_adamw"
    ),
    "a start": lambda params, optimizer: optimizer.param_groups[0].update(ns_start="aol"),
    "a fraction": lambda params, optimizer: optimizer.param_groups[0].update(rank_fraction=0.5),
    "sizes of parts": lambda params, optimizer: optimizer.param_groups[0].update(
        split_sizes=(6, 2)
    ),
    "two options": lambda params, optimizer: optimizer.param_groups[0].update(
        split_heads=2, adjust_lr_fn="original"
    ),
    "a gradient": lambda params, optimizer: setattr(params[1], "grad", params[1].grad.clone()),
    "no gradient": lambda params, optimizer: setattr(params[1], "grad", None),
    "memory": lambda params, optimizer: setattr(params[1], "data", params[1].data.clone()),
    "a state": lambda params, optimizer: optimizer.state[params[1]].update(
        momentum_buffer=torch.ones_like(params[1])
    ),
    "all states": lambda params, optimizer: optimizer.load_state_dict(optimizer.state_dict()),
    "its weights": lambda params, optimizer: optimizer.param_groups[0].update(
        params=[torch.nn.Parameter(params[0].detach()), *params[1:]]
    ),
}


@pytest.mark.parametrize("cls", [optim.Muon, optim.MuSGD])
@pytest.mark.parametrize("change", CHANGES)
def test_batches_are_kept_while_nothing_changes(change, cls, monkeypatch):
    """The step after is that of an optimizer that has kept nothing."""
    shapes, arranged = [(8, 8), (8, 8), (8, 24)], []
    original = batches.arrange
    monkeypatch.setattr(batches, "arrange", lambda *of: arranged.append(1) or original(*of))
    options = {"use_muon": True, "momentum": 0.9, "ns_dtype": torch.float32}
    params = parameters(shapes)
    optimizer = cls(params, lr=0.02, **options)
    for number in range(3):
        if number == 2:
            CHANGES[change](params, optimizer)
        twin = copy.deepcopy(optimizer)
        pairs = list(zip(*[x.param_groups[0]["params"] for x in (optimizer, twin)], strict=True))
        for p, q in pairs:
            fill = torch.randn(p.shape, generator=torch.Generator().manual_seed(number))
            if p.grad is None and number != 2:
                p.grad = torch.empty_like(p)
            if p.grad is not None:
                p.grad.copy_(fill)
                q.grad = p.grad.clone()
        arranged.clear()
        optimizer.step()
        is_first = number == 0 or (number == 2 and change not in ("nothing", "a learning rate"))
        assert len(arranged) == is_first
        twin.step()
        for p, q in pairs:
            assert (p == q).all()
            state, other = optimizer.state[p], twin.state[q]
            assert state.keys() == other.keys()
            assert all(state[name].equal(other[name]) for name in state)


def test_the_memory_command_knows_it():
    """Matrices have one state, vectors AdamW's two and a count."""
    shapes = (torch.Size([100, 80]), torch.Size([50]))
    found = state_bytes(shapes, torch.float32, Choice("Muon", {}, "default"))
    assert found == (4 * 8000 + 2 * 4 * 50 + 4, 0)


def test_copies_have_no_scratch():
    params, optimizer = trained(optim.Muon, steps=2)
    for other in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert not other._scratch.tensors()
    step(optimizer, params, 2)
    expected, _ = trained(optim.Muon)
    for found, other in zip(params, expected, strict=True):
        assert (found == other).all()


# Groups of AdamW


@pytest.mark.parametrize("fused", [None, True, False])
def test_other_groups_are_adamw(fused):
    shapes = [(12, 8), (8,), (16, 8)]
    options = {"lr": 3e-3, "betas": (0.8, 0.9), "eps": 1e-3, "weight_decay": 0.3}

    def make(params, **_):
        groups = [{"params": params[:1]}, {"params": params[1:], "use_muon": False, **options}]
        return optim.Muon(groups, lr=0.02, fused=fused)

    found, optimizer = trained(make, shapes)
    expected, theirs = trained(lambda params, **_: torch.optim.AdamW(params[1:], **options), shapes)
    for p, q in zip(found[1:], expected[1:], strict=True):
        torch.testing.assert_close(p, q)
        assert optimizer.state[p].keys() == theirs.state[q].keys()
        assert optimizer.state[p]["step"] == 3
    alone, _ = trained(optim.Muon, shapes[:1], fused=fused)
    assert (found[0] == alone[0]).all()
    assert optimizer.state[found[0]].keys() == {"momentum_buffer"}
    assert bool(optimizer._plans) == (fused is not False)


def test_defaults_of_adamw_are_those_of_the_class():
    vector = torch.nn.Parameter(torch.ones(3))
    group = {"params": [vector], "use_muon": False}
    found = optim.Muon([group]).param_groups[0]
    assert (found["eps"], found["betas"], found["weight_decay"]) == (1e-8, (0.9, 0.999), 0.1)
    other = optim.Muon([group], betas=(0.5, 0.6), adamw_eps=0.25, eps=0.75, lr=2)
    found = other.param_groups[0]
    assert (found["eps"], found["betas"], found["lr"]) == (0.25, (0.5, 0.6), 2)
    other.add_param_group({"params": [torch.nn.Parameter(torch.ones(3, 3))]})
    assert other.param_groups[1]["eps"] == 0.75


# Dictionaries and conversions


def test_dictionaries_go_to_torchs_and_back():
    expected, _ = trained(torch.optim.Muon, steps=4)
    params, theirs = trained(torch.optim.Muon, steps=2)
    ours = optim.Muon(params, fused=False, ns_dtype=torch.bfloat16)
    ours.load_state_dict(copy.deepcopy(theirs.state_dict()))
    step(ours, params, 2)
    back = torch.optim.Muon(params)
    back.load_state_dict(copy.deepcopy(ours.state_dict()))
    step(back, params, 3)
    for found, other in zip(params, expected, strict=True):
        torch.testing.assert_close(found, other, rtol=0, atol=1e-5)
    assert optim.Muon(params).param_groups[0].keys() == back.param_groups[0].keys() - {
        "fused",
        "ns_dtype",
    }


@pytest.mark.parametrize("load", ["load_state_dict", "import_state_dict", "convert"])
def test_a_run_goes_on_from_its_dictionary(load):
    def make(params, **_):
        groups = [{"params": params[:2]}, {"params": params[2:], "use_muon": False}]
        return optim.Muon(groups, lr=0.02, ns_coefficients="polar_express")

    shapes = [(12, 8), (8, 12), (8,)]
    expected, _ = trained(make, shapes, steps=4)
    params, optimizer = trained(make, shapes, steps=2)
    if load == "convert":
        optimizer = fusedstep.convert(optimizer)
    else:
        saved, optimizer = copy.deepcopy(optimizer.state_dict()), make(params)
        if load == "load_state_dict":
            optimizer.load_state_dict(saved)
        else:
            fusedstep.import_state_dict(optimizer, saved)
    for number in (2, 3):
        step(optimizer, params, number)
    for found, other in zip(params, expected, strict=True):
        assert (found == other).all()
    assert optimizer.state[params[2]]["step"] == 4


def test_dictionaries_of_others_are_refused():
    params = parameters([(12, 8)])
    (others, adamw) = trained(torch.optim.AdamW, [(12, 8)])
    with pytest.raises(ValueError, match="AdamW"):
        optim.Muon(params).load_state_dict(adamw.state_dict())
    _, ours = trained(optim.Muon, [(12, 8)])
    with pytest.raises(ValueError, match="Muon"):
        optim.AdamW(others).load_state_dict(ours.state_dict())
    saved = ours.state_dict()
    del saved["state"][0]["momentum_buffer"]
    saved["state"][0]["sum"] = torch.ones(12, 8)
    with pytest.raises(ValueError, match="has no momentum_buffer"):
        optim.Muon(params).load_state_dict(saved)


def test_the_count_of_adamw_must_be_there():
    vector = parameters([(8,)])
    group = {"use_muon": False}
    _, ours = trained(lambda params, **_: optim.Muon([group | {"params": params}]), [(8,)])
    saved = ours.state_dict()
    del saved["state"][0]["step"]
    with pytest.raises(ValueError, match="has no step"):
        optim.Muon([group | {"params": vector}]).load_state_dict(saved)


def test_convert_goes_on_from_torchs():
    params, theirs = trained(torch.optim.Muon, steps=2, momentum=0.8)
    ours = fusedstep.convert(theirs, fused=False)
    assert type(ours) is optim.Muon
    assert ours.param_groups[0]["momentum"] == 0.8
    ours.param_groups[0]["ns_dtype"] = torch.bfloat16
    step(ours, params, 2)
    expected, _ = trained(torch.optim.Muon, momentum=0.8)
    for found, other in zip(params, expected, strict=True):
        torch.testing.assert_close(found, other, rtol=0, atol=1e-5)


# Options of steps


def test_clipping_scaling_and_closures():
    shapes = [(12, 8), (8,)]

    def make(params, **options):
        groups = [{"params": params[:1]}, {"params": params[1:], "use_muon": False}]
        return optim.Muon(groups, lr=0.02, ns_dtype=torch.float32, **options)

    params = parameters(shapes)
    optimizer = make(params, max_grad_norm=0.5)
    by_hand = parameters(shapes)
    other = make(by_hand)
    for p, q in zip(params, by_hand, strict=True):
        p.grad = torch.ones_like(p) * 64
        q.grad = torch.ones_like(q)
    norm = torch.nn.utils.clip_grad_norm_(by_hand, 0.5)
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(64.0), torch.tensor(0.0)
    assert optimizer.step(lambda: 7.0) == 7.0
    other.step()
    for p, q in zip(params, by_hand, strict=True):
        torch.testing.assert_close(p, q)
    assert norm == pytest.approx(104**0.5)
    before = [p.detach().clone() for p in params]
    optimizer.found_inf = torch.tensor(1.0)
    optimizer.step()
    assert all((p == q).all() for p, q in zip(params, before, strict=True))
    del optimizer.found_inf, optimizer.grad_scale
    found = optimizer.step(max_norm=1.0, zero_grad="none")
    assert found.item() == pytest.approx(104**0.5)  # the scale was taken out of .grad
    assert params[0].grad is None


@pytest.mark.parametrize("fused", [None, False], ids=["together", "one by one"])
@pytest.mark.parametrize("options", WAYS.values(), ids=WAYS)
def test_values_of_bfloat16_weights_are_kept(options, fused):
    """Moves of less than half a unit in the last place add up, as those of float32 weights do."""
    shapes = [(12, 8), (8, 12)]
    options = options | {"lr": 2e-3, "weight_decay": 0.0, "ns_dtype": torch.float32, "fused": fused}
    start = [p.detach() + p.detach().sign() for p in parameters(shapes, torch.bfloat16)]
    moved = {}
    for name, dtype in (("kept", torch.bfloat16), ("exact", torch.float32)):
        params = [torch.nn.Parameter(p.to(dtype, copy=True)) for p in start]
        own = ("master_weights", "rounding", "seed") if name == "exact" else ()
        chosen = {k: v for k, v in options.items() if k not in own}
        optimizer = optim.Muon(params, **chosen)
        for _ in range(100):
            for p in params:
                p.grad = torch.ones_like(p).tril_()
            optimizer.step()
        moves = [p.float() - q.float() for p, q in zip(params, start, strict=True)]
        moved[name] = torch.cat([each.detach().flatten() for each in moves])
        if name == "kept":
            states = [optimizer.state[p]["momentum_buffer"].dtype for p in params]
            assert states == [torch.float32] * 2
    assert error(moved["kept"], moved["exact"]) < (0.4 if "seed" in options else 0.1)


def test_states_in_codes():
    shapes = [(64, 80)] * 2
    found, optimizer = trained(optim.Muon, shapes, state_dtype="int8", ns_dtype=torch.float32)
    assert optimizer.state[found[0]]["momentum_buffer"].dtype is torch.uint8
    assert_moved_alike(found, by_reference(shapes), parameters(shapes), 0.05)


def test_steps_under_torch_compile_and_a_dispatch_mode():
    from torch.utils._python_dispatch import TorchDispatchMode

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    expected, _ = trained(optim.Muon, steps=1)
    params = parameters()
    optimizer = optim.Muon(params, lr=0.02)
    with Mode():
        step(optimizer, params, 0)
    assert all((p == q).all() for p, q in zip(params, expected, strict=True))


# Refusals


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ns_coefficients": "quartic"}, "ns_coefficients must be one of 'quintic', 'polar_expr"),
        ({"ns_coefficients": (1.0, 2.0)}, "ns_coefficients must be three numbers"),
        ({"ns_coefficients": ()}, "ns_coefficients must be three numbers"),
        ({"ns_coefficients": ((1, 2, 3), (1, 2))}, "ns_coefficients must be three numbers"),
        ({"ns_coefficients": (1, 2, float("nan"))}, "ns_coefficients must be three numbers"),
        ({"ns_coefficients": None}, "ns_coefficients must be three numbers"),
        ({"adjust_lr_fn": "rms"}, "adjust_lr_fn must be None, 'original', 'match_rms_adamw' or"),
        ({"ns_steps": 100}, "ns_steps must be an int from 0 to 99, not 100"),
        ({"ns_steps": 2.5}, "ns_steps must be an int"),
        ({"ns_start": "spectral"}, "ns_start must be 'norm' or 'aol', not 'spectral'"),
        ({"ns_start": None}, "ns_start must be 'norm' or 'aol', not None"),
        ({"ns_start": "aol", "ns_steps": 0}, "ns_start='aol' needs ns_steps of at least 1"),
        ({"ns_dtype": torch.int8}, "ns_dtype must be None, torch.bfloat16"),
        ({"split_heads": 0}, "split_heads must be an int of at least 1"),
        ({"split_heads": 5}, "parameter 0 of group 0 has matrices of 24 rows, which split_heads=5"),
        ({"split_sizes": 24}, "split_sizes must be None or a tuple of ints of at least 1, not 24"),
        (
            {"split_sizes": ()},
            r"split_sizes must be None or a tuple of ints of at least 1, not \(\)",
        ),
        ({"split_sizes": "abc"}, "split_sizes must be None or a tuple of ints"),
        ({"split_sizes": (16, 0, 8)}, "split_sizes must be None or a tuple of ints"),
        ({"split_sizes": (16, -8, 16)}, "split_sizes must be None or a tuple of ints"),
        ({"split_sizes": (16, 8.0)}, "split_sizes must be None or a tuple of ints"),
        ({"split_sizes": (23, True)}, "split_sizes must be None or a tuple of ints"),
        (
            {"split_sizes": (16, 4)},
            r"has matrices of 24 rows, of which split_sizes=\(16, 4\) has 20",
        ),
        (
            {"split_sizes": (16, 5, 3), "split_heads": 2},
            r"split_heads=2 does not divide each of split_sizes=\(16, 5, 3\)",
        ),
        ({"lr": -1}, "Invalid learning rate"),
        ({"momentum": -1}, "Invalid momentum value"),
        ({"weight_decay": -1}, "Invalid weight_decay value"),
        ({"betas": (1.0, 0.5)}, "Invalid beta parameter at index 0"),
        ({"adamw_eps": -1}, "Invalid adamw_eps value"),
        ({"beta2": 1.0}, "Invalid beta2 value: 1.0"),
        ({"beta2": -0.1}, "Invalid beta2 value: -0.1"),
    ],
    ids=str,
)
def test_options_out_of_range(options, message):
    with pytest.raises(ValueError, match=message):
        optim.Muon(parameters(SHAPES[:1]), **options)
    with pytest.raises((ValueError, TypeError)):
        optim.Muon(parameters(SHAPES[:1])).add_param_group(
            {"params": [torch.nn.Parameter(torch.ones(24, 8))], "use_muon": "no"} | options
        )


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        (torch.ones(3), r"'odd' has the shape \[3\], and Muon steps matrices.*use_muon=False"),
        (torch.ones(()), r"'odd' has the shape \[\], and Muon steps matrices"),
        (torch.ones(3, 3, dtype=torch.complex64), "'odd' is complex"),
    ],
    ids=["vector", "number", "complex"],
)
def test_weights_that_are_no_matrices(weight, message):
    named = [("even", torch.nn.Parameter(torch.ones(3, 3))), ("odd", torch.nn.Parameter(weight))]
    with pytest.raises(ValueError, match=message):
        optim.Muon(named)
    optimizer = optim.Muon(named[:1])
    with pytest.raises(ValueError, match=message):
        optimizer.add_param_group({"params": named[1:]})
    assert len(optimizer.param_groups) == 1
    optimizer.add_param_group({"params": named[1:], "use_muon": False})
    optimizer.param_groups[1]["use_muon"] = True
    for _, p in named:
        p.grad = torch.ones_like(p)
    with pytest.raises(ValueError, match=message):
        optimizer.step()
    assert (named[0][1] == 1).all()


@pytest.mark.parametrize("name", ["ns_coefficients", "adjust_lr_fn", "split_sizes", "ns_start"])
def test_a_bad_option_at_a_step_changes_nothing(name):
    params = parameters([(12, 8), (8,)])
    groups = [{"params": params[1:], "use_muon": False}, {"params": params[:1]}]
    optimizer = optim.Muon(groups)
    optimizer.param_groups[1][name] = "other"
    with pytest.raises(ValueError, match=name):
        step(optimizer, params, 0)
    assert all((p == q).all() for p, q in zip(params, parameters([(12, 8), (8,)]), strict=True))
    groups = [{"params": params[1:], "use_muon": False}, {"params": params[:1]}]
    with pytest.raises(ValueError, match=f"group 1 of the dictionary: {name}"):
        optim.Muon(groups).load_state_dict(optimizer.state_dict())


def test_sparse_gradients():
    (weight,) = parameters([(12, 8)])
    weight.grad = torch.ones(12, 8).to_sparse()
    with pytest.raises(RuntimeError, match="Muon does not support sparse gradients"):
        optim.Muon([weight]).step()


def test_no_group_steps_if_a_state_of_another_is_wrong():
    weights = [torch.nn.Parameter(torch.randn(4, 6)) for _ in range(2)]
    optimizer = optim.Muon([{"params": [weight]} for weight in weights])
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    optimizer.step()
    optimizer.state[weights[1]]["momentum_buffer"] = torch.zeros(3, 3)
    before = weights[0].detach().clone()
    with pytest.raises(RuntimeError, match="parameter 0 of group 1: the state momentum_buffer"):
        optimizer.step()
    assert torch.equal(weights[0].detach(), before)


def test_cautious_decay_of_float64_weights_is_exact():
    weight = torch.nn.Parameter(torch.ones(4, 4, dtype=torch.float64))
    optimizer = optim.Muon([weight], lr=0.01, weight_decay=0.6, cautious_decay=True, fused=False)
    weight.grad = torch.zeros_like(weight)
    optimizer.step()
    assert (weight - (1 - 0.01 * 0.6)).abs().max() < 1e-15
