"""Law: Adagrad updates the rows that a sparse gradient has, as the dense step would, no others.

On a CUDA device too, to the bits of the dense step on the CPU.
"""

import copy

import pytest
import torch

from fusedstep import optim
from support.cases import CASES, DTYPES, LOW_PRECISION
from support.cuda_device import assert_reported, needs_cuda
from support.layouts import Layout
from support.stepping import (
    ISAS,
    as_parameters,
    assert_contents_close,
    assert_same_bits,
    assert_same_contents,
    contents,
    forced_isa,
    make_gradients,
    make_weights,
    threads,
)

pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks")

SPARSE_CASES = tuple(case for case in CASES if case.sparse)
PLAIN = next(case for case in SPARSE_CASES if case.optimizer is optim.Adagrad)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=needs_cuda)])
def device(request):
    return request.param


SHAPE = (60, 20)
TABLES = (
    Layout("contiguous", SHAPE, (20, 1)),
    Layout("transposed", SHAPE, (1, 60)),
    Layout("sliced rows", SHAPE, (60, 1), offset=7),
    Layout("sliced columns", SHAPE, (33, 1), offset=5),
    Layout("every second column", SHAPE, (40, 2)),
    Layout("long rows", (5, 3000), (3001, 1)),
    Layout("one dimension", (60,), (3,)),
    Layout("three dimensions", (60, 5, 4), (5, 1, 300)),
    Layout("one row", (1, 20), (20, 1)),
    Layout("empty rows", (6, 0), (1, 1)),
    Layout("empty", (0, 6), (6, 1)),
)

# Rows that the entries of a gradient are for, in a table of n rows.
INDICES = {
    "none": lambda n: [],
    "one": lambda n: [n // 2][: min(n, 1)],
    "all": lambda n: list(range(n)),
    "some, in disorder": lambda n: sorted(range(0, n, 2), key=lambda row: row * 37 % 61),
    "some several times": lambda n: [row * row % n for row in range(2 * n)],
}


def sparse(rows, values, shape):
    """A gradient whose entry i is for row rows[i], not coalesced."""
    index = torch.tensor(rows, dtype=torch.int64).reshape(1, -1)
    return torch.sparse_coo_tensor(index, values, shape, check_invariants=True)


def gradient(rows, shape, dtype, step):
    (values,) = make_gradients([(len(rows), *shape[1:])], dtype, step)
    return sparse(rows, values, shape)


def dense(grad):
    """The same gradient, its entries added one by one."""
    total = torch.zeros(grad.shape, dtype=grad.dtype)
    for index, value in zip(grad._indices().T.tolist(), grad._values(), strict=True):
        total[tuple(index)] += value
    return total


def is_native(optimizer):
    return len(optimizer._plans) == len(optimizer.param_groups)


def subjects(shapes, dtype, device="cpu"):
    """Weights on a device, and the same on the CPU."""
    weights = make_weights(shapes, dtype)
    return as_parameters([weight.to(device) for weight in weights]), as_parameters(weights)


def step_both(optimizer, params, twin, twins, grads, **arguments):
    """A step with sparse gradients, and one of another optimizer with the same as dense ones."""
    for param, other, grad in zip(params, twins, grads, strict=True):
        param.grad = grad.clone().to(param.device)
        other.grad = dense(grad) if grad.is_sparse else grad.clone()
    return optimizer.step(**arguments), twin.step(**arguments)


def found(optimizer):
    """Contents of an optimizer on any device."""
    return {name: value.cpu() for name, value in contents(optimizer).items()}


def assert_as_made(states, initial=0.0):
    """No step has changed these."""
    for name, value in states.items():
        assert (value == (0.0 if name.startswith("step") else initial)).all(), name


def assert_only_made_states(after, before):
    """A step that does nothing may have made the states that it would have needed."""
    assert_as_made({name: after.pop(name) for name in after.keys() - before.keys()})
    assert_same_contents(after, before)


# Against the dense step


@pytest.mark.parametrize("rows", INDICES)
@pytest.mark.parametrize("table", TABLES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", SPARSE_CASES, ids=str)
def test_same_bits_as_the_dense_step(case, dtype, table, rows, device):
    (value,) = make_weights([table.shape], dtype)
    placed = table.place(value).to(device)
    params, twins = [torch.nn.Parameter(placed.view)], as_parameters([value])
    optimizer, twin = case.build(params), case.build(twins)
    rows = INDICES[rows](table.shape[0])
    others = [row for row in range(table.shape[0]) if row not in rows]
    for step in (1, 2):
        grad = gradient(rows, table.shape, dtype, step)
        step_both(optimizer, params, twin, twins, [grad])
        assert_same_contents(found(optimizer), contents(twin), f"step {step}")
        placed.assert_outside_untouched("weight")
    weight, state = params[0].detach().cpu(), optimizer.state[params[0]]
    assert_same_bits(weight[others], value[others], "other rows of the weight")
    for name in case.states:
        initial = torch.full_like(value, case.initial.get(name, 0.0))
        assert_same_bits(state[name].cpu()[others], initial[others], f"of {name}")
    assert is_native(optimizer)


@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradients_with_several_sparse_dimensions(dtype, dims, device):
    shape = (7, 6, 5)
    params, twins = subjects([shape], dtype, device)
    optimizer, twin = PLAIN.build(params), PLAIN.build(twins)
    for step in (1, 2):
        (values,) = make_gradients([(9, *shape[dims:])], dtype, step)
        index = torch.stack([torch.arange(9) ** 2 % size for size in shape[:dims]])
        grad = torch.sparse_coo_tensor(index, values, shape, check_invariants=True)
        step_both(optimizer, params, twin, twins, [grad])
    assert_same_contents(found(optimizer), contents(twin))


@pytest.mark.parametrize("shape", [(60, 64), (3, 9000), (50, 8, 5)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_that_begin_where_vectors_do(dtype, shape, device):
    params, twins = subjects([shape], dtype, device)
    optimizer, twin = PLAIN.build(params), PLAIN.build(twins)
    for step in (1, 2):
        grad = gradient([2, 0, 2, 1, 2], shape, dtype, step)
        step_both(optimizer, params, twin, twins, [grad])
    assert_same_contents(found(optimizer), contents(twin))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("isa", ISAS)
def test_same_bits_for_every_isa_and_thread_count(isa, dtype):
    shape = (3000, 40)
    grads = [gradient([i * i % 2000 for i in range(2500)], shape, dtype, step) for step in (1, 2)]
    trained = []
    for isa_name, count in ((isa, 1), (isa, 2), (isa, 7), ("base", 1)):
        params = as_parameters(make_weights([shape], dtype))
        optimizer = PLAIN.build(params)
        with forced_isa(isa_name), threads(count):
            for params[0].grad in grads:
                optimizer.step()
            assert optimizer._isa() == isa_name
        trained.append(contents(optimizer))
    for other in trained[1:]:
        assert_same_contents(other, trained[0])


@pytest.mark.parametrize("shape", [SHAPE, (60, 64)])
@pytest.mark.parametrize("dtype", LOW_PRECISION, ids=str)
def test_float32_states(dtype, shape, device):
    params, twins = subjects([shape], dtype, device)
    optimizer, twin = (PLAIN.build(each, state_dtype=torch.float32) for each in (params, twins))
    for step in (1, 2, 3):
        grad = gradient([3, 1, 3, 50], shape, dtype, step)
        step_both(optimizer, params, twin, twins, [grad])
    assert optimizer.state[params[0]]["sum"].dtype is torch.float32
    assert_same_contents(found(optimizer), contents(twin))


# Against torch


@pytest.mark.parametrize("options", [{}, {"fused": True}, {"fused": False}], ids=str)
@pytest.mark.parametrize("reduction", ["sum", "square"])
def test_embeddings_train_as_with_torch(options, reduction, device):
    """The gradient of a plain sum is one number, expanded."""

    def trained(optimizer_class, device="cpu", **options):
        torch.manual_seed(0)
        words = torch.nn.Embedding(100, 8, sparse=True).to(device)
        bags = torch.nn.EmbeddingBag(50, 8, mode="sum", sparse=True).to(device)
        head = torch.nn.Linear(8, 3).to(device)
        groups = [
            {"params": [*words.parameters(), *head.parameters()]},
            {"params": bags.parameters(), "lr": 0.1, "eps": 1e-6},
        ]
        optimizer = optimizer_class(
            groups, lr=0.05, lr_decay=0.01, initial_accumulator_value=0.5, **options
        )
        for _ in range(5):
            optimizer.zero_grad()
            picked, bagged = torch.randint(100, (16, 4)), torch.randint(50, (16, 6))
            hidden = words(picked.to(device)).sum(1) + bags(bagged.to(device))
            output = head(hidden) if reduction == "square" else hidden
            (output.square() if reduction == "square" else output).sum().backward()
            optimizer.step()
        return found(optimizer)

    expected, close = trained(torch.optim.Adagrad), 2e-6 if device == "cpu" else 2e-5
    ours = trained(optim.Adagrad, device, **options)
    # torch's constructor makes the states; ours makes those of weights that get a gradient.
    assert (reduction == "sum") == (expected.keys() > ours.keys())
    assert_as_made({name: expected.pop(name) for name in expected.keys() - ours.keys()}, 0.5)
    assert_contents_close(ours, expected, rtol=close, atol=close)


@pytest.mark.parametrize("fused", [True, False])
def test_float64_is_torchs_float64(fused, device):
    """The formula, with no room for rounding."""
    params, others = subjects([SHAPE], torch.float64, device)
    optimizer = optim.Adagrad(params, lr_decay=0.1, initial_accumulator_value=0.5, fused=fused)
    namesake = torch.optim.Adagrad(others, lr_decay=0.1, initial_accumulator_value=0.5)
    for step in (1, 2, 3):
        grad = gradient([3, 1, 3, 50], SHAPE, torch.float64, step)
        params[0].grad, others[0].grad = grad.to(device), grad.clone()
        optimizer.step()
        namesake.step()
    assert_contents_close(found(optimizer), contents(namesake), rtol=1e-14, atol=1e-14)


# With other weights and over time


def test_dense_and_sparse_gradients_in_one_group(device):
    shapes = (SHAPE, (33, 31), SHAPE, (9,))
    params, twins = subjects(shapes, torch.float32, device)
    optimizer, twin = PLAIN.build(params), PLAIN.build(twins)
    for step in (1, 2, 3):
        grads = make_gradients(shapes, torch.float32, step)
        grads[0] = gradient([3, 1, 3, 50], SHAPE, torch.float32, step)
        grads[2] = gradient([step] * step, SHAPE, torch.float32, step)
        step_both(optimizer, params, twin, twins, grads)
        assert_same_contents(found(optimizer), contents(twin), f"step {step}")
        assert all(state["step"].item() == step for state in optimizer.state.values())
    assert is_native(optimizer)


def test_gradients_become_sparse_and_dense_again(device):
    params, twins = subjects([SHAPE], torch.float32, device)
    optimizer, twin = PLAIN.build(params), PLAIN.build(twins)
    for step, rows in enumerate([[1, 1], None, [], list(range(60)), None, [59], []]):
        if rows is None:
            (grad,) = make_gradients([SHAPE], torch.float32, step)
        else:
            grad = gradient(rows, SHAPE, torch.float32, step)
        step_both(optimizer, params, twin, twins, [grad])
        assert_same_contents(found(optimizer), contents(twin), f"step {step}")


def test_coalesced_gradients(device):
    params, twins = subjects([SHAPE], torch.float32, device)
    optimizer, twin = PLAIN.build(params), PLAIN.build(twins)
    for step in (1, 2, 3):
        grad = gradient([3, 1, 3, 50][:-step], SHAPE, torch.float32, step).coalesce()
        step_both(optimizer, params, twin, twins, [grad])
        assert params[0].grad.is_coalesced()
        assert_same_contents(found(optimizer), contents(twin), f"step {step}")


def test_a_gradient_called_coalesced_that_is_in_disorder():
    """torch takes its word; entries for the same row are added all the same, on the CPU."""
    params, twins = subjects([SHAPE], torch.float32)
    optimizer, twin = PLAIN.build(params), PLAIN.build(twins)
    grad = gradient([9, 3, 9, 1], SHAPE, torch.float32, 1)._coalesced_(True)
    step_both(optimizer, params, twin, twins, [grad])
    assert_same_contents(contents(optimizer), contents(twin))


def test_versions_are_raised_and_gradients_left_alone(device):
    params, _ = subjects([SHAPE], torch.float32, device)
    optimizer = PLAIN.build(params)
    params[0].grad = gradient([3, 1, 3], SHAPE, torch.float32, 1).to(device)
    before, version = params[0].grad.clone(), params[0]._version
    optimizer.step()
    assert params[0]._version > version
    assert_same_bits(params[0].grad._values(), before._values(), "gradient")
    assert torch.equal(params[0].grad._indices(), before._indices())


# Clipping, clearing, scaling


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("arguments", [{"max_norm": 0.5}, {"max_norm": 1e6}, {}], ids=str)
@pytest.mark.parametrize("zero_grad", [False, True, "none"])
def test_clips_and_clears(fused, arguments, zero_grad, device):
    shapes = (SHAPE, (33, 31))
    params, twins = subjects(shapes, torch.float32, device)
    optimizer, twin = PLAIN.build(params, fused=fused), PLAIN.build(twins)
    for step in (1, 2):
        grads = make_gradients(shapes, torch.float32, step)
        grads[0] = gradient([3, 1, 3, 50], SHAPE, torch.float32, step)
        norm, expected = step_both(
            optimizer, params, twin, twins, grads, zero_grad=zero_grad, **arguments
        )
        if arguments:
            torch.testing.assert_close(norm.cpu(), expected, rtol=1e-6, atol=0)
        assert_contents_close(found(optimizer), contents(twin), rtol=2e-6, atol=1e-6)
        if zero_grad == "none":
            assert params[0].grad is None
        elif zero_grad:
            assert params[0].grad.is_sparse
            assert params[0].grad._nnz() == 0
        else:
            assert params[0].grad._nnz() == 4
            torch.testing.assert_close(dense(params[0].grad.cpu()), twins[0].grad)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("zero_grad", [False, True])
def test_a_gradient_that_weights_share_is_scaled_once(fused, zero_grad, device):
    params, _ = subjects([SHAPE] * 2, torch.float32, device)
    grad = gradient([3, 1], SHAPE, torch.float32, 1)
    before = dense(grad)
    params[0].grad = params[1].grad = grad.to(device)
    norm = PLAIN.build(params, fused=fused).step(max_norm=0.5, zero_grad=zero_grad)
    expected = before * 0 if zero_grad else before * (0.5 / norm.cpu().float())
    for param in params:
        torch.testing.assert_close(dense(param.grad.cpu()), expected)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("bad", [False, True])
def test_a_scalers_gradients(fused, bad, device):
    params, twins = subjects([SHAPE], torch.float32, device)
    optimizer, twin = PLAIN.build(params, fused=fused), PLAIN.build(twins, fused=fused)
    grad = gradient([3, 1, 3], SHAPE, torch.float32, 1)
    params[0].grad, twins[0].grad = (grad * 1024.0).to(device), grad.clone()
    if bad:
        params[0].grad._values()[1] = float("inf")
    before = found(optimizer)
    scaler = torch.amp.GradScaler(device, init_scale=1024.0)
    scaler.scale(torch.zeros((), device=device))
    scaler.step(optimizer)
    scaler.update()
    if bad:
        assert_only_made_states(found(optimizer), before)
        return
    twin.step()
    if fused or device == "cpu":  # torch's operations round otherwise on a GPU
        assert_same_contents(found(optimizer), contents(twin))
    else:
        assert_contents_close(found(optimizer), contents(twin), rtol=2e-6, atol=1e-6)
    assert_same_bits(params[0].grad._values().cpu(), grad._values(), "gradient")


# Errors


def unchecked(index, values=2):
    """Without torch's checks, as when they are off."""

    def spoil(optimizer, param):
        index_tensor = torch.tensor([index], device=param.device)
        ones = torch.ones(values, 20, device=param.device)
        param.grad = torch.sparse_coo_tensor(index_tensor, ones, SHAPE, check_invariants=False)

    return spoil


def another_shape(optimizer, param):
    param.data = param.data[:-1].clone()


def another_dtype(optimizer, param):
    param.data = param.data.double()


def weight_decay(optimizer, param):
    optimizer.param_groups[-1]["weight_decay"] = 0.1


ERRORS = {
    "an index that is too large": (unchecked([3, 60]), "gradient's index 60 is out of range"),
    "a negative index": (unchecked([-1, 3]), "gradient's index -1 is out of range"),
    "another shape": (
        another_shape,
        r"gradient's shape \[60, 20\] is not the weight's, \[59, 20\]",
    ),
    "another dtype": (another_dtype, "gradient is float32 but the weight is float64"),
    "weight decay": (
        weight_decay,
        "weight_decay option is not compatible with sparse gradients",
    ),
}


@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("name", ERRORS)
def test_nothing_changes_by_an_error(name, warm, device):
    spoil, text = ERRORS[name]
    params, _ = subjects([(5,), SHAPE, SHAPE], torch.float32, device)
    optimizer = PLAIN.build([{"params": params[:2]}, {"params": params[2:]}])
    params[0].grad = torch.ones(5, device=device)
    for param in params[1:]:
        param.grad = gradient([3, 1, 3], SHAPE, torch.float32, 1).to(device)
    if warm:
        optimizer.step()
    spoil(optimizer, params[2])
    before, versions = contents(optimizer), [param._version for param in params]
    values = copy.deepcopy(params[1].grad._values())
    with pytest.raises(RuntimeError, match=text):
        optimizer.step()
    assert_only_made_states(contents(optimizer), before)
    assert_same_bits(params[1].grad._values(), values, "gradient")
    assert versions == [param._version for param in params]


def test_an_index_of_many_entries_is_looked_at_to_the_end(device):
    params, _ = subjects([SHAPE], torch.float32, device)
    optimizer = PLAIN.build(params)
    unchecked([row % 60 for row in range(4999)] + [60], 5000)(optimizer, params[0])
    with pytest.raises(RuntimeError, match="index 60 is out of range"):
        optimizer.step()


# On a device


@needs_cuda
def test_coalesced_gradients_are_bound_without_waiting():
    params, _ = subjects([SHAPE], torch.float32, "cuda")
    optimizer = PLAIN.build(params)
    for step in (1, 2, 3):
        params[0].grad = gradient([3, 1, 3], SHAPE, torch.float32, step).to("cuda").coalesce()
        torch.cuda.set_sync_debug_mode("error" if step > 1 else "default")
        try:
            optimizer.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert is_native(optimizer)


@needs_cuda
def test_an_index_that_was_not_looked_at_is_an_error_of_the_device(subprocess_environment):
    """torch says of such a gradient that it is coalesced."""
    code = """
import torch
from fusedstep import optim
weight = torch.nn.Parameter(torch.ones(60, 20, device="cuda"))
index, values = torch.tensor([[3, 60]], device="cuda"), torch.ones(2, 20, device="cuda")
grad = torch.sparse_coo_tensor(index, values, (60, 20), check_invariants=False)
weight.grad = grad._coalesced_(True)
optimizer = optim.Adagrad([weight])
try:
    for _ in range(100_000):
        optimizer.step()
except RuntimeError as error:
    print("reported:", error)
"""
    assert_reported(code, subprocess_environment)
