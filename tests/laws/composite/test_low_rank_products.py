"""The native products of low rank, many shapes in one call, against float64."""

import pytest
import torch

from fusedstep._matrix.products import add_back_all, project_all
from fusedstep._matrix.projection import LEFT
from fusedstep._native import ops

needs_hopper = pytest.mark.skipif(
    not (torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)),
    reason="needs a GPU of compute capability 9.0",
)
needs_amx = pytest.mark.skipif(ops.product_isa() != "amx", reason="needs a CPU with AMX")

#: Rows, columns and depth around words, parts of the depth, and tiles.
SHAPES = [
    (4, 4, 4),
    (128, 128, 32),
    (132, 36, 100),
    (36, 260, 768),
    (768, 128, 3072),
    (8, 2304, 12),
]

#: How the operands lie in memory: by rows, or by columns.
FORMS = [(True, False), (True, True), (False, True)]

#: Copies of all shapes in each form: more products than a launch has room for.
COPIES = 16

#: Precisions by the numbers that the operator knows them by.
HIGHEST, HIGH, MEDIUM = range(3)

#: Devices and precisions that are taken, and their largest errors by the product's norm.
TAKEN = [
    pytest.param("cuda", HIGHEST, 1e-6, marks=needs_hopper),
    pytest.param("cuda", HIGH, 1e-3, marks=needs_hopper),
    pytest.param("cpu", HIGH, 2e-5, marks=needs_amx),
    pytest.param("cpu", MEDIUM, 6e-3, marks=needs_amx),
]


def matrix(rows, columns, by_rows, generator, device):
    """A matrix of a larger one, whose other elements are NaN."""
    shape = (rows, columns) if by_rows else (columns, rows)
    wide = torch.full((shape[0] + 1, shape[1] + 8), torch.nan, device=device)
    part = wide[: shape[0], 4 : shape[1] + 4]
    part.copy_(torch.randn(shape, generator=generator))
    return part if by_rows else part.t()


def examples(copies=COPIES, device="cuda"):
    generator = torch.Generator().manual_seed(copies)
    found = []
    for rows, columns, depth in SHAPES * copies:
        for a_by_rows, b_by_rows in FORMS:
            a = matrix(rows, depth, a_by_rows, generator, device)
            b = matrix(depth, columns, b_by_rows, generator, device)
            found.append((a, b, matrix(rows, columns, True, generator, device)))
    return found


def take(products, alpha, beta, precision):
    a, b, c = (list(operands) for operands in zip(*products, strict=True))
    return torch.ops.fusedstep.low_rank_products(a, b, c, alpha, beta, precision)


@pytest.mark.parametrize(("device", "precision", "bound"), TAKEN)
@pytest.mark.parametrize("adds", [False, True])
def test_are_products(adds, device, precision, bound):
    products = examples(COPIES if device == "cuda" else 2, device)
    alpha = [0.5 + index for index in range(len(products))]
    beta = [0.25 if adds else 0.0] * len(products)
    if not adds:
        for _, _, c in products:
            c.fill_(torch.nan)  # nothing is read of what is overwritten
    before = [c.clone() for _, _, c in products]
    assert take(products, alpha, beta, precision)
    for (a, b, c), old, factor in zip(products, before, alpha, strict=True):
        exact = factor * (a.double() @ b.double())
        if adds:
            exact += 0.25 * old.double()
        assert torch.linalg.norm(c - exact) < bound * torch.linalg.norm(exact)
        around = c.as_strided((c.shape[0], 4), c.stride(), c.storage_offset() - 4)
        assert around.isnan().all()


@pytest.mark.parametrize(("device", "precision", "bound"), TAKEN)
def test_every_run_has_the_same_bits(device, precision, bound):
    products = examples(4, device)
    ones, zeros = [1.0] * len(products), [0.0] * len(products)
    runs = []
    for _ in range(5):
        assert take(products, ones, zeros, precision)
        runs.append([c.clone() for _, _, c in products])
    for run in runs[1:]:
        assert all(map(torch.equal, run, runs[0]))


@pytest.mark.parametrize(("device", "precision", "bound"), TAKEN)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, "all bits"])
def test_bad_numbers_stay_bad(bad, device, precision, bound):
    products = examples(2, device)
    for a, _, _ in products:
        if bad == "all bits":  # the NaN that operations on a GPU have
            a[3, 1] = torch.tensor(0x7FFFFFFF, dtype=torch.int32).view(torch.float32).item()
        else:
            a[3, 1] = bad
    assert take(products, [1.0] * len(products), [0.0] * len(products), precision)
    for _, _, c in products:
        assert not c[3].isfinite().any()
        assert c[:3].isfinite().all()


def changed(name):
    products = examples(2)
    a, b, c = products[1]
    if name == "by columns":
        products[1] = a.t().contiguous().t(), b.t().contiguous().t(), c
    elif name == "result by columns":
        products[1] = a, b, c.t().contiguous().t()
    elif name == "no words":
        products[1] = a, b, torch.empty(c.numel() + 1, device="cuda")[1:].view(c.shape)
    elif name == "odd side":
        products[1] = a, b[:, :-1], c[:, :-1]
    elif name == "shared results":
        products.append((a[1:], b, c[1:]))
    elif name == "few":
        return products[:1]
    else:
        shapes = (4096, 8192), (8192, 128), (4096, 128)
        products[1] = tuple(torch.randn(shape, device="cuda") for shape in shapes)
    return products


@needs_hopper
@pytest.mark.parametrize(
    "name",
    ["by columns", "result by columns", "no words", "odd side", "shared results", "few", "long"],
)
def test_what_torch_does_as_well_is_left_to_torch(name):
    products = changed(name)
    before = [c.clone() for _, _, c in products]
    assert not take(products, [1.0] * len(products), [0.0] * len(products), HIGH)
    assert all(torch.equal(c, old) for (_, _, c), old in zip(products, before, strict=True))


def test_products_on_the_cpu_in_the_highest_precision_are_torchs():
    products = examples(1, "cpu")
    assert not take(products, [1.0] * len(products), [0.0] * len(products), HIGHEST)


def test_wrong_operands_are_refused():
    a, b, c = examples(1, "cpu")[0]
    for wrong, words in (
        ((a.double(), b, c), "a must be a float32 matrix"),
        ((a, b.double(), c), "b must be a float32 matrix, on the device"),
        ((a, b[:2], c), "shape of the product"),
        ((a[0], b, c), "a must be a float32 matrix"),
    ):
        with pytest.raises(RuntimeError, match=words):
            take([wrong], [1.0], [0.0], HIGH)
    with pytest.raises(RuntimeError, match="as many"):
        take([(a, b, c)], [], [0.0], HIGH)
    with pytest.raises(RuntimeError, match="precision must be 0"):
        take([(a, b, c)], [1.0], [0.0], 3)


@pytest.mark.parametrize(
    ("device", "precision"),
    [
        pytest.param("cuda", "highest", marks=needs_hopper),
        ("cpu", "high"),
        ("cpu", "medium"),
    ],
)
def test_weights_without_elements_are_stepped_beside_others(device, precision):
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        grads = [torch.randn(shape, device=device) for shape in ((8, 12), (0, 12), (16, 12))]
        from_left = [{LEFT: torch.randn(len(grad), 4, device=device)} for grad in grads]
        low = [torch.full((4, 12), torch.nan, device=device) for _ in grads]
        project_all(grads, from_left, low, None, 1.0)
        for found, grad, bases in zip(low, grads, from_left, strict=True):
            torch.testing.assert_close(found, bases[LEFT].t() @ grad, rtol=2e-2, atol=0.2)
        assert not low[1].any()  # this process's part of a sum
        weights = list(map(torch.zeros_like, grads))
        if add_back_all(weights, low, from_left, 0.5, 2.0):
            for weight, found, bases in zip(weights, low, from_left, strict=True):
                torch.testing.assert_close(weight, 2 * bases[LEFT] @ found, rtol=2e-2, atol=0.5)
    finally:
        torch.set_float32_matmul_precision(before)
