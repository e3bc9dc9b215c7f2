"""The native step in the epilogue of the product that projects a gradient."""

import pytest
import torch

from fusedstep._matrix.products import in_tf32
from fusedstep._native import ops
from fusedstep.galore import kernels

needs_hopper = pytest.mark.skipif(
    not torch.cuda.is_available()
    or torch.cuda.get_device_capability() != (9, 0)
    or ops.missing_on("cuda") is not None,
    reason="needs a GPU of compute capability 9.0 and libfusedstep_cuda.so",
)

OPTIONS = {"lr": 0.7, "beta1": 0.8, "beta2": 0.95, "eps": 1e-3}
COUNT, FACTOR = 3, -0.5

#: Sides and ranks around tiles, parts of the long dimension, and clusters.
SHAPES = (
    (4, 4, 1),
    (128, 32, 32),
    (132, 36, 33),
    (516, 260, 64),
    (300, 1000, 129),
    (1000, 300, 96),
    (4096, 256, 200),
    (256, 4096, 31),
)

#: Largest errors of moments and updates, in numbers of about 1.
BOUNDS = {1: 4e-3, 2: 3e-6}


def options(**changed):
    defaults = zip(ops.rule_options["adam"], torch.ops.fusedstep.rule_defaults("adam"), strict=True)
    return list((dict(defaults) | OPTIONS | changed).values())


def example(rows, columns, rank, from_left):
    """A gradient, a basis as [rank, side], two states, and memory for the update."""
    torch.manual_seed(rows + rank)
    side = rows if from_left else columns
    basis = torch.randn(rank, side, dtype=torch.float64) / side**0.5
    shape = (rank, columns) if from_left else (rows, rank)
    states = [torch.randn(shape), torch.rand(shape) + 0.5]
    on_device = [x.float().cuda() for x in (torch.randn(rows, columns), basis, *states)]
    return on_device[0], on_device[1], on_device[2:], torch.empty_like(on_device[2])


def step(grad, basis, states, update, from_left, count):
    torch.ops.fusedstep.projected_step(
        ops.rule_index["adam"],
        options(),
        COUNT,
        grad,
        in_tf32(basis, count),
        states,
        update,
        from_left,
        FACTOR,
    )


def expected(grad, basis, states, from_left):
    """Adam in float64, of a weight that is 0."""
    wide, basis = FACTOR * grad.double(), basis.double()
    low = basis @ wide if from_left else wide @ basis.t()
    beta1, beta2 = OPTIONS["beta1"], OPTIONS["beta2"]
    mean = beta1 * states[0].double() + (1 - beta1) * low
    square = beta2 * states[1].double() + (1 - beta2) * low**2
    root = (square / (1 - beta2**COUNT)).sqrt() + OPTIONS["eps"]
    return mean, square, -OPTIONS["lr"] * mean / (1 - beta1**COUNT) / root


@needs_hopper
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("from_left", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_is_the_product_and_the_step(shape, from_left, count):
    grad, basis, states, update = example(*shape, from_left)
    right = expected(grad, basis, states, from_left)
    step(grad, basis, states, update, from_left, count)
    for found, exact in zip((*states, update), right, strict=True):
        assert (found - exact).abs().max() < BOUNDS[count] * max(1, exact.abs().max())


@needs_hopper
@pytest.mark.parametrize("from_left", [True, False])
def test_every_run_has_the_same_bits(from_left):
    grad, basis, states, update = example(1024, 1024, 100, from_left)
    before, runs = [state.clone() for state in states], []
    for _ in range(20):
        for state, value in zip(states, before, strict=True):
            state.copy_(value)
        step(grad, basis, states, update, from_left, 2)
        runs.append([x.clone() for x in (*states, update)])
    for run in runs[1:]:
        assert all(map(torch.equal, run, runs[0]))


@needs_hopper
def test_rows_of_the_gradient_may_be_apart():
    grad, basis, states, update = example(256, 128, 40, True)
    twins, twin = [state.clone() for state in states], torch.empty_like(update)
    wide = torch.full((256, 256), torch.nan, device="cuda")
    wide[:, :128] = grad
    step(grad, basis, states, update, True, 2)
    step(wide[:, :128], basis, twins, twin, True, 2)
    assert all(map(torch.equal, (*states, update), (*twins, twin)))


@needs_hopper
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, "all bits"])
def test_bad_numbers_stay_bad(bad, count):
    grad, basis, states, update = example(256, 128, 40, False)
    if bad == "all bits":  # the NaN that operations on a GPU have
        grad.view(torch.int32)[7, 5] = 0x7FFFFFFF
    else:
        grad[7, 5] = bad
    step(grad, basis, states, update, False, count)
    assert not states[0][7].isfinite().any()
    others = torch.arange(256, device="cuda") != 7
    assert states[0][others].isfinite().all()


@needs_hopper
@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"grad": torch.zeros(64, 30)}, "multiples of 4"),
        ({"grad": torch.zeros(64, 32).double()}, "float32 matrix"),
        ({"grad": torch.zeros(32, 64).t()}, "rows are contiguous"),
        ({"states": [torch.zeros(64, 8)]}, "as many states"),
        ({"states": [torch.zeros(64, 8), torch.zeros(8, 64)]}, "a state must be contiguous"),
        ({"update": torch.zeros(8, 64).t()}, "the update must be contiguous"),
        ({"basis": torch.zeros(3, 8, 32)}, "the basis must be"),
        ({"basis": torch.zeros(1, 8, 36)}, "the basis must be contiguous, of the shape"),
        ({"rule": ops.rule_index["lion"]}, "an option is missing"),
        ({"options": options(amsgrad=1.0)}, "its options"),
    ],
)
def test_mistakes_are_refused_before_anything_changes(changed, words):
    given = {
        "rule": ops.rule_index["adam"],
        "options": options(),
        "step": COUNT,
        "grad": torch.zeros(64, 32),
        "basis": torch.zeros(1, 8, 32),
        "states": [torch.ones(64, 8), torch.ones(64, 8)],
        "update": torch.ones(64, 8),
        "from_left": False,
        "grad_factor": 1.0,
    } | changed
    if "basis" not in changed:
        given["basis"] = torch.zeros(1, 8, given["grad"].shape[1])
    if words == "its options":
        given["states"] = [torch.ones(64, 8)] * 3
    for name in ("grad", "basis", "update"):
        given[name] = (
            given[name].cuda() if given[name].is_contiguous() else given[name].t().cuda().t()
        )
    given["states"] = [state.cuda() for state in given["states"]]
    before = [state.clone() for state in given["states"]]
    with pytest.raises(RuntimeError, match=words):
        torch.ops.fusedstep.projected_step(*given.values())
    assert all(map(torch.equal, given["states"], before))


@needs_hopper
@pytest.mark.parametrize(
    ("tf32", "bounds"),
    [
        (False, {"mean": 1e-6, "variance": 1e-6, "parameters": 1e-6}),
        (True, {"mean": 1.2e-3, "variance": 1.7e-4, "parameters": 1.2e-3}),
    ],
    ids=["float32", "TF32"],
)
@pytest.mark.parametrize("size", [(512, 256), (256, 512)])
def test_galores_step_is_as_exact_as_published(size, tf32, bounds):
    given = kernels.problem(*size, 64, torch.float32, "cuda")
    allowed = torch.backends.cuda.matmul.allow_tf32
    # pytest's monkeypatch would delete it at the end, for torch keeps it in no dictionary.
    torch.backends.cuda.matmul.allow_tf32 = tf32
    try:
        found = kernels.errors(given, "fused")
    finally:
        torch.backends.cuda.matmul.allow_tf32 = allowed
    for name, bound in bounds.items():
        assert 0 < found[name]["largest"] < bound, name


def test_parts_of_a_matrix_add_up_to_it():
    torch.manual_seed(0)
    matrix = torch.randn(50, 30).t()
    matrix[0, 0], matrix[1, 1] = 0, -3e38
    large, small = in_tf32(matrix, 2)
    assert torch.equal(large + small, matrix)
    assert (large.view(torch.int32) & 0x1FFF == 0).all()
    assert (small.abs() <= 2**-11 * matrix.abs()).all()
    assert torch.equal(in_tf32(matrix, 1)[0], large)
