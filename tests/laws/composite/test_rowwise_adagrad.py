"""Laws of RowWiseAdagrad: its formula, bits, checkpoints, errors, and duplicates in gradients."""

import copy
import types

import pytest
import torch
from torch.distributed.optim import _apply_optimizer_in_backward

import fusedstep
from fusedstep import optim
from fusedstep._native import ops
from reference.rowwise_adagrad import rowwise_adagrad
from support.layouts import Layout
from support.stepping import ISAS, forced_isa, make_gradients, make_weights, threads

pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks")

SHAPES = ((60, 20), (7, 5, 3), (9,), (50, 1), (3, 2100), ())
OPTIONS = (
    {"lr": 1e-2},
    {"lr": 1e-2, "weight_decay": 0.1, "lr_decay": 0.2, "eps": 1e-2, "maximize": True},
    {"lr": 5e-2, "weight_decay": 0.3, "decoupled_weight_decay": True},
)


def as_sparse(grad, step):
    """Rows in disorder, some of them several times, some never; dense where there are no rows."""
    if grad.dim() == 0:
        return grad
    entries = 2 * len(grad) // 3 + 1
    generator = torch.Generator().manual_seed(step)
    rows = torch.randint(len(grad), (entries,), generator=generator)
    return torch.sparse_coo_tensor(rows[None], grad[torch.arange(entries) % len(grad)], grad.shape)


def gradients(shapes, dtype, step, sparse):
    grads = make_gradients(shapes, dtype, step)
    return [as_sparse(grad, step) if sparse else grad for grad in grads]


def steps_of(weights, steps=3, *, sparse=True, **options):
    optimizer = optim.RowWiseAdagrad(weights, **{"fused": True} | options)
    for step in range(steps):
        grads = gradients([weight.shape for weight in weights], weights[0].dtype, step, sparse)
        for weight, grad in zip(weights, grads, strict=True):
            weight.grad = grad
        optimizer.step()
    return optimizer


def as_rows(tensor):
    return tensor.double().reshape(tensor.shape[0] if tensor.dim() else 1, -1)


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("options", OPTIONS, ids=["plain", "L2", "decoupled"])
def test_is_the_formula(options, dtype, fused, sparse):
    first = 0.5
    weights = make_weights(SHAPES, dtype)
    expected = [as_rows(weight.clone()) for weight in weights]
    totals = [torch.full_like(rows[:, :1], first) for rows in expected]
    for step in range(3):
        for i, grad in enumerate(gradients(SHAPES, dtype, step, sparse)):
            is_sparse = grad.is_sparse
            grad = grad.double().coalesce() if is_sparse else grad
            rows = grad.indices()[0] if is_sparse else torch.arange(len(expected[i]))
            values = (grad.values() if is_sparse else grad).double().reshape(len(rows), -1)
            found = rowwise_adagrad(
                expected[i][rows], values, totals[i][rows], step + 1.0, **options
            )
            expected[i][rows], totals[i][rows] = found
    optimizer = steps_of(
        weights, sparse=sparse, fused=fused, initial_accumulator_value=first, **options
    )
    eps = torch.finfo(dtype).eps
    for weight, value, total in zip(weights, expected, totals, strict=True):
        torch.testing.assert_close(as_rows(weight), value, rtol=16 * eps, atol=16 * eps)
        state = optimizer.state[weight]
        assert state["sum"].shape == weight.shape[:1] + (1,) * (weight.dim() - 1)
        torch.testing.assert_close(as_rows(state["sum"]), total, rtol=16 * eps, atol=16 * eps)
        assert state["step"] == 3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("sparse", [False, True])
def test_16_bit_weights_have_float32_sums(dtype, sparse):
    weights, twins = (make_weights(SHAPES, dtype) for _ in range(2))
    ours, theirs = steps_of(weights, sparse=sparse), steps_of(twins, sparse=sparse, fused=False)
    for weight, twin in zip(weights, twins, strict=True):
        assert ours.state[weight]["sum"].dtype is torch.float32
        torch.testing.assert_close(weight, twin, rtol=0.02, atol=0.02)
        # Sums of entries are rounded to 16 bits, at other places than torch's.
        close = {"rtol": 0.01, "atol": 0.01} if sparse else {"rtol": 1e-5, "atol": 1e-5}
        sums = ours.state[weight]["sum"], theirs.state[twin]["sum"]
        torch.testing.assert_close(*sums, **close)


def test_is_adagrad_where_rows_have_one_element():
    weights, others = (make_weights([(50, 1), (9,)], torch.float32) for _ in range(2))
    steps_of(weights)
    adagrad = optim.Adagrad(others, lr=1e-2, fused=True)
    for step in range(3):
        for other, grad in zip(
            others, gradients([(50, 1), (9,)], torch.float32, step, True), strict=True
        ):
            other.grad = grad
        adagrad.step()
    for weight, other in zip(weights, others, strict=True):
        torch.testing.assert_close(weight, other, rtol=1e-6, atol=1e-7)


def test_rows_without_entries_stand_still():
    (weight,) = make_weights([(50, 8)], torch.float32)
    before = weight.clone()
    optimizer = steps_of([weight], 1, lr=0.1, weight_decay=0.5)
    (grad,) = gradients([(50, 8)], torch.float32, 0, True)
    is_there = torch.zeros(50, dtype=torch.bool)
    is_there[grad._indices()[0]] = True
    assert torch.equal(weight[~is_there], before[~is_there])
    assert (weight[is_there] != before[is_there]).any(1).all()
    assert torch.equal(optimizer.state[weight]["sum"][:, 0] != 0, is_there)


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_same_bits_on_every_isa_and_number_of_threads(dtype, isa, sparse):
    shapes = ((3000, 40), (5, 4), (2, 70_000))
    expected, weights = make_weights(shapes, dtype), make_weights(shapes, dtype)
    with threads(1), forced_isa("base"):
        first = steps_of(expected, 2, sparse=sparse, weight_decay=0.1)
    with threads(5), forced_isa(isa):
        second = steps_of(weights, 2, sparse=sparse, weight_decay=0.1)
        assert second._isa() == isa
    assert all(map(torch.equal, weights, expected))
    for weight, other in zip(weights, expected, strict=True):
        assert torch.equal(second.state[weight]["sum"], first.state[other]["sum"])


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize(
    ("shape", "strides"),
    [
        ((60, 20), (20, 1)),
        ((60, 20), (1, 60)),
        ((60, 20), (41, 2)),
        ((3, 2100), (1, 3)),
        ((6, 5, 300), (1500, 1, 5)),
    ],
    ids=str,
)
def test_same_bits_in_every_layout(shape, strides, sparse):
    (values,) = make_weights([shape], torch.float32)
    placed = Layout("", shape, strides, offset=3).place(values)
    steps_of([placed.view], sparse=sparse)
    steps_of([values], sparse=sparse)
    assert torch.equal(placed.view, values)
    placed.assert_outside_untouched("weight")


@pytest.mark.parametrize("zero_grad", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
def test_a_scaled_gradient_is_unscaled_in_place_and_cleared(zero_grad, transposed):
    shape = (40, 30)
    (weight,), (other,) = (make_weights([shape], torch.float32) for _ in range(2))
    (grad,) = make_gradients([shape], torch.float32, 0)
    weight.grad = grad * 8
    if transposed:
        weight.grad = weight.grad.t().contiguous().t()
    other.grad = grad.clone()
    ours, twin = (optim.RowWiseAdagrad([each], fused=True) for each in (weight, other))
    ours.grad_scale, ours.found_inf = torch.tensor(8.0), torch.tensor(0.0)
    ours.step(zero_grad=zero_grad)
    twin.step()
    assert torch.equal(weight, other)
    assert torch.equal(weight.grad, torch.zeros(shape) if zero_grad else grad)


# Duplicates


@pytest.mark.parametrize("rows", [50, 5000, 3_000_000], ids=str)
@pytest.mark.parametrize("name", ["Adagrad", "RowWiseAdagrad", "SparseAdam"])
def test_many_entries_are_summed_alike_on_any_number_of_threads(name, rows):
    """Hot rows, and indices of one to three digits of the sort."""
    entries, columns = 40_000, 3
    generator = torch.Generator().manual_seed(rows)
    index = torch.randint(rows, (entries,), generator=generator)
    index[torch.rand(entries, generator=generator) < 0.4] = rows - 1
    values = torch.randn(entries, columns, generator=generator)
    weights = []
    for n in (1, 2, 3, 7):
        weight = torch.zeros(rows, columns)
        weight.grad = torch.sparse_coo_tensor(index[None], values, weight.shape)
        optimizer = getattr(optim, name)([weight], lr=1.0, eps=1e-6, fused=True)
        with threads(n):
            optimizer.step()
        weights.append(weight)
        assert torch.equal(weight, weights[0]), n

    expected = torch.zeros(rows, columns, dtype=torch.float64).index_add_(0, index, values.double())
    if name == "RowWiseAdagrad":
        moved = -expected / (expected.square().mean(1, keepdim=True).sqrt() + 1e-6)
        torch.testing.assert_close(weights[0].double(), moved, rtol=1e-3, atol=1e-3)
    else:
        assert torch.equal(weights[0].sign(), -expected.sign().float())


def test_long_sums_are_more_exact_than_one_after_another():
    """A row of so many entries is added up in parts."""
    values = torch.full((2**20, 1), 0.1)
    weight = torch.zeros(3, 1)
    weight.grad = torch.sparse_coo_tensor(
        torch.ones(1, len(values), dtype=torch.long), values, (3, 1)
    )
    optimizer = optim.RowWiseAdagrad([weight], fused=True)
    optimizer.step()
    total = optimizer.state[weight]["sum"][1].sqrt().item()
    assert total == pytest.approx(2**20 * 0.1, rel=1e-4)  # else 4 per cent off


# Checkpoints


def test_goes_on_from_a_dictionary(tmp_path):
    weights, others = (make_weights(SHAPES, torch.float32) for _ in range(2))
    steps_of(weights, 3)
    first = steps_of(others, 2)
    torch.save(first.state_dict(), tmp_path / "saved.pt")
    loaded = optim.RowWiseAdagrad(others, fused=True)
    loaded.load_state_dict(torch.load(tmp_path / "saved.pt", weights_only=True))
    for other, grad in zip(others, gradients(SHAPES, torch.float32, 2, True), strict=True):
        other.grad = grad
    loaded.step()
    assert all(map(torch.equal, weights, others))


def torchrecs(params, **options):
    """Stands in for torchrec's class: its module, groups and states."""
    module = types.ModuleType("torchrec.optim.rowwise_adagrad")
    cls = type("RowWiseAdagrad", (torch.optim.Optimizer,), {"__module__": module.__name__})
    defaults = {
        "lr": 1e-2, "lr_decay": 0.0, "eps": 1e-10, "weight_decay": 0.0,
        "initial_accumulator_value": 0.0, "maximize": False,
    }  # fmt: skip
    other = cls(params, defaults | options)
    for param in params:
        other.state[param] = {"step": torch.tensor(2.0), "sum": torch.full((len(param), 1), 0.25)}
    return other


def test_goes_on_from_torchrecs():
    (weight,) = make_weights([(60, 20)], torch.float32)
    other = torchrecs([weight], lr=0.5, lr_decay=0.1)
    converted = fusedstep.convert(other)
    assert type(converted) is optim.RowWiseAdagrad
    assert converted.param_groups[0]["lr"] == 0.5
    loaded = optim.RowWiseAdagrad([weight])
    fusedstep.import_state_dict(loaded, other.state_dict())
    (grad,) = make_gradients([(60, 20)], torch.float32, 0)
    expected, total = rowwise_adagrad(
        weight.double(), grad.double(), torch.full((60, 1), 0.25).double(), 3, lr=0.5, lr_decay=0.1
    )
    for optimizer in (converted, loaded):
        before = weight.clone()
        weight.grad = grad
        optimizer.step()
        torch.testing.assert_close(weight.double(), expected, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(optimizer.state[weight]["sum"].double(), total)
        weight.copy_(before)


def test_goes_on_from_fbgemms_sums():
    (weight,) = make_weights([(60, 20)], torch.float32)
    loaded = optim.RowWiseAdagrad([weight], lr=0.5)
    sums = torch.rand(60)
    groups = [{"params": [0], "lr": 0.25}]
    fusedstep.import_state_dict(
        loaded, {"state": {0: {"momentum1": sums.clone()}}, "param_groups": groups}
    )
    assert loaded.param_groups[0]["lr"] == 0.25
    assert torch.equal(loaded.state[weight]["sum"], sums[:, None])
    (weight.grad,) = make_gradients([(60, 20)], torch.float32, 0)
    loaded.step()
    assert (loaded.state[weight]["sum"] > sums[:, None]).all()


# Training


@pytest.mark.parametrize("name", ["RowWiseAdagrad", "SparseAdam"])
def test_steps_in_the_backward_pass_of_torch(name):
    """torch.distributed.optim's hooks make an optimizer for each weight."""

    def trained(in_backward):
        torch.manual_seed(0)
        tables = [torch.nn.EmbeddingBag(100, 8, mode="sum", sparse=True) for _ in range(2)]
        params = [table.weight for table in tables]
        if in_backward:
            _apply_optimizer_in_backward(getattr(optim, name), params, {"lr": 0.1})
        else:
            optimizer = getattr(optim, name)(params, lr=0.1)
        for _ in range(3):
            bags = torch.randint(100, (16, 6))
            sum(table(bags) for table in tables).square().sum().backward()
            if not in_backward:
                optimizer.step()
                optimizer.zero_grad()
        assert all(param.grad is None for param in params)
        return params

    assert all(map(torch.equal, trained(True), trained(False)))


# Errors


@pytest.mark.parametrize("fused", [True, False])
def test_entries_of_less_than_a_row_are_refused_and_nothing_changes(fused):
    weights = make_weights([(4, 3), (5, 2, 2)], torch.float32)
    optimizer = steps_of(weights, 1, sparse=False, fused=fused)
    before = copy.deepcopy((weights, optimizer.state_dict()["state"]))
    weights[0].grad = torch.ones(4, 3)
    weights[1].grad = torch.ones(5, 2, 2).to_sparse(2)
    with pytest.raises(RuntimeError, match="sparse in 2 dimensions"):
        optimizer.step()
    assert all(map(torch.equal, weights, before[0]))
    for key, state in optimizer.state_dict()["state"].items():
        assert all(torch.equal(value, before[1][key][name]) for name, value in state.items())


@pytest.mark.parametrize("count", [1, 5])
def test_an_index_that_is_out_of_range_is_named(count):
    (weight,) = make_weights([(60, 2)], torch.float32)
    before = weight.clone()
    index = torch.arange(50_000) % 60
    index[40_000:] = torch.arange(70, 10_070)
    weight.grad = torch.sparse_coo_tensor(
        index[None], torch.ones(50_000, 2), (60, 2), check_invariants=False
    )
    with threads(count), pytest.raises(RuntimeError, match="index 70 is out of range"):
        optim.RowWiseAdagrad([weight], fused=True).step()
    assert torch.equal(weight, before)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (torch.Tensor.double, "a state of rows is float64 but has to be float32"),
        (lambda state: state[:-1].clone(), "a number for each of the 60 rows"),
    ],
)
def test_a_state_of_another_form_is_an_error(change, text):
    (weight,) = make_weights([(60, 20)], torch.float32)
    optimizer = steps_of([weight], 1)
    optimizer.state[weight]["sum"] = change(optimizer.state[weight]["sum"])
    before = weight.clone()
    with pytest.raises(RuntimeError, match=f"0 of group 0: .*{text}"):
        optimizer.step()
    assert torch.equal(weight, before)


@pytest.mark.parametrize(("rule", "has_roles"), [("rowwise_adagrad", False), ("sgd", True)])
def test_states_of_a_plan_have_the_roles_of_its_rule(rule, has_roles):
    weight, sums = torch.ones(6, 2), torch.zeros(6, 1 if has_roles else 2)
    plan = torch.ops.fusedstep.plan_new([weight], [sums], [torch.zeros(())])
    if has_roles:
        torch.ops.fusedstep.plan_roles(plan, ops.rule_index["rowwise_adagrad"])
    torch.ops.fusedstep.plan_bind(plan, [weight], [torch.ones(6, 2)])
    options = [*torch.ops.fusedstep.rule_defaults(rule), 0.0]
    if rule == "sgd":
        options[ops.rule_options["sgd"].index("momentum")] = 0.9  # it has a state then
    with pytest.raises(RuntimeError, match="the plan's states are those of another rule"):
        torch.ops.fusedstep.plan_prepare(plan, ops.rule_index[rule], options, 1.0, 0)
    torch.ops.fusedstep.plan_delete(plan)
    assert torch.equal(weight, torch.ones(6, 2))


def test_the_rule_has_one_state_for_each_weight():
    weight = torch.ones(6, 2)
    plan = torch.ops.fusedstep.plan_new([weight], [torch.zeros(6, 1)] * 2, [torch.zeros(())])
    with pytest.raises(RuntimeError, match="has 2 states for each weight, the rule 1"):
        torch.ops.fusedstep.plan_roles(plan, ops.rule_index["rowwise_adagrad"])
    torch.ops.fusedstep.plan_delete(plan)


def test_the_operator_over_lists_steps_rows():
    weights, others = (make_weights(SHAPES, torch.float32) for _ in range(2))
    optimizer = steps_of(others, 1, sparse=False)
    grads = make_gradients(SHAPES, torch.float32, 0)
    sums = [torch.zeros_like(optimizer.state[other]["sum"]) for other in others]
    options = [float(optimizer.defaults[name]) for name in ops.rule_options["rowwise_adagrad"]]
    torch.ops.fusedstep.step(
        weights,
        grads,
        sums,
        [torch.zeros(()) for _ in weights],
        torch.tensor([*options, 0.0], dtype=torch.float64),
        ops.rule_index["rowwise_adagrad"],
    )
    assert all(map(torch.equal, weights, others))
    assert all(map(torch.equal, sums, (optimizer.state[other]["sum"] for other in others)))


def test_unusual_weights_and_options_are_refused_by_name():
    with pytest.raises(ValueError, match="complex parameters: parameter 1 of group 0"):
        optim.RowWiseAdagrad([torch.ones(3), torch.ones(3, dtype=torch.complex64)])
    for name in ("weight_decay", "lr_decay", "initial_accumulator_value", "eps"):
        with pytest.raises(ValueError, match=name if name != "eps" else "epsilon"):
            optim.RowWiseAdagrad([torch.ones(3)], **{name: -1.0})


def test_defaults_are_those_of_the_rule():
    names = torch.ops.fusedstep.rule_options("rowwise_adagrad")
    defaults = torch.ops.fusedstep.rule_defaults("rowwise_adagrad")
    found = optim.RowWiseAdagrad([torch.zeros(3)]).defaults
    assert {name: float(found[name]) for name in names} == dict(zip(names, defaults, strict=True))
