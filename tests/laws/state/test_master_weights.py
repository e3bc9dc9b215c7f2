"""bfloat16 and float16 weights that are rounded from a float32 copy."""

import copy
import inspect

import pytest
import torch

import fusedstep
from fusedstep import optim
from support.cases import CASES, KINDS, LOW_PRECISION, PLAIN, WITH_STATES, first_of_each
from support.layouts import Layout
from support.stepping import (
    CHUNK,
    as_parameters,
    assert_contents_close,
    assert_same_bits,
    assert_same_contents,
    contents,
    make_gradients,
    make_weights,
    run,
    train,
)

SHAPES = ((33, 31), (7,), (2 * CHUNK + 5,), (), (0, 3))


def run_mastered(case, dtype, steps=3, **overrides):
    return run(case, SHAPES, dtype, steps, master_weights=True, **overrides)


def run_in_float32(case, dtype, steps, **overrides):
    """Runs from the same weights, with the same gradients, in float32."""
    params = as_parameters(weight.float() for weight in make_weights(SHAPES, dtype))
    optimizer = case.build(params, **overrides)
    for step in range(1, steps + 1):
        for param, gradient in zip(params, make_gradients(SHAPES, dtype, step), strict=True):
            param.grad = gradient.float()
        optimizer.step()
    return params, optimizer


def master_of(optimizer, param):
    return optimizer.state[param]["master_param"]


def states(optimizer):
    """Without the weights: what is a unit apart in float32 may round to neighbours."""
    return {k: v for k, v in contents(optimizer).items() if not k.startswith("weight")}


@pytest.mark.parametrize("dtype", LOW_PRECISION, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_copy_has_the_bits_of_a_float32_weight(case, dtype):
    params, optimizer = run_mastered(case, dtype, steps=5)
    twins, twin = run_in_float32(case, dtype, steps=5)
    for param, other in zip(params, twins, strict=True):
        assert_same_bits(master_of(optimizer, param), other, "copy")
        assert_same_bits(param, other.to(dtype), "weight")
        for name in case.states:
            assert_same_bits(optimizer.state[param][name], twin.state[other][name], name)


@pytest.mark.parametrize("dtype", LOW_PRECISION, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_imperative_step_does_the_same(case, dtype):
    params, optimizer = run_mastered(case, dtype, steps=5, fused=False)
    twins, _ = run_in_float32(case, dtype, steps=5, fused=False)
    for param, other in zip(params, twins, strict=True):
        assert_same_bits(master_of(optimizer, param), other, "copy")
        assert_same_bits(param, other.to(dtype), "weight")


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("dtype", LOW_PRECISION, ids=str)
@pytest.mark.parametrize("case", PLAIN, ids=str)
def test_a_weight_that_has_been_changed_is_taken_as_it_is(case, dtype, fused):
    """Loaded, clamped or decayed by hand; what is left alone goes on."""
    params, optimizer = run_mastered(case, dtype, fused=fused)
    param, fresh = params[0], copy.deepcopy(optimizer)
    fresh_param = fresh.param_groups[0]["params"][0]
    with torch.no_grad():
        for weight in (param, fresh_param):
            weight[::2] *= 1.5
        master = master_of(fresh, fresh_param)
        master[::2] = fresh_param[::2].float()
    assert not torch.equal(master_of(optimizer, param), master)
    for each in (optimizer, fresh):
        train(each, each.param_groups[0]["params"], [4])
    assert_same_contents(contents(optimizer), contents(fresh))


LAYOUTS = (
    Layout("transposed", (40, 33), (1, 40)),
    Layout("every second column", (40, 33), (66, 2)),
    Layout("sliced", (40, 33), (50, 1), offset=3),
)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("dtype", LOW_PRECISION, ids=str)
@pytest.mark.parametrize("case", PLAIN, ids=str)
def test_any_layout_and_no_byte_around_it(case, dtype, layout):
    (start,) = make_weights([layout.shape], dtype)
    placed = layout.place(start)
    params = torch.nn.Parameter(placed.view), torch.nn.Parameter(start)
    optimizers = [case.build([param], master_weights=True) for param in params]
    for param, optimizer in zip(params, optimizers, strict=True):
        train(optimizer, [param], [1, 2, 3])
    placed.assert_outside_untouched("weight")
    masters = [master_of(*pair) for pair in zip(optimizers, params, strict=True)]
    if case.elementwise:
        assert_same_bits(*masters, "copy")
    torch.testing.assert_close(*masters)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("case", PLAIN, ids=str)
def test_wider_weights_of_the_group_have_no_copy(case, fused):
    shape = (300, 7)
    dtypes = (torch.bfloat16, torch.float32, torch.float16, torch.float64)
    params = [torch.nn.Parameter(make_weights([shape], dtype)[0]) for dtype in dtypes]
    twins = as_parameters(params)
    optimizer = case.build(params, master_weights=True, fused=fused)
    alone = [case.build([twin], master_weights=True, fused=fused) for twin in twins]
    for step in (1, 2):
        for param, twin in zip(params, twins, strict=True):
            (param.grad,) = make_gradients([shape], param.dtype, step)
            twin.grad = param.grad.clone()
        optimizer.step()
        for each in alone:
            each.step()
    for param, twin, other in zip(params, twins, alone, strict=True):
        has_copy = param.dtype in LOW_PRECISION
        assert ("master_param" in optimizer.state[param]) is has_copy
        assert_same_bits(param, twin, "weight")
        assert optimizer.state[param].keys() == other.state[twin].keys()


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("dtype", LOW_PRECISION, ids=str)
@pytest.mark.parametrize("case", KINDS, ids=str)
def test_a_checkpoint_keeps_the_copy(case, dtype, fused):
    _, whole = run_mastered(case, dtype, steps=6, fused=fused)
    params, optimizer = run_mastered(case, dtype, steps=3, fused=fused)
    resumed_params = as_parameters(params)
    resumed = case.build(resumed_params, fused=fused)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert resumed.param_groups[0]["master_weights"]
    train(resumed, resumed_params, range(4, 7))
    assert_same_contents(contents(resumed), contents(whole))


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("state_dtype", [None, torch.float32], ids=str)
@pytest.mark.parametrize("case", WITH_STATES, ids=str)
def test_asked_for_in_mid_run(case, state_dtype, fused):
    """A group asks for masters later, or an older dictionary had none: states are only widened."""
    params, optimizer = run(case, SHAPES, torch.bfloat16, 3, state_dtype=state_dtype, fused=fused)
    before = contents(optimizer)
    optimizer.param_groups[0]["master_weights"] = True
    train(optimizer, params, [4])
    wide = as_parameters(before[f"weight {i}"].float() for i in range(len(params)))
    twin = case.build(wide, fused=fused)
    for index, param in enumerate(wide):
        for name in (*case.numbers, *case.states):
            twin.state[param][name] = before[f"{name} {index}"].float()
    for param, gradient in zip(wide, make_gradients(SHAPES, torch.bfloat16, 4), strict=True):
        param.grad = gradient.float()
    twin.step()
    for param, other in zip(params, wide, strict=True):
        assert_same_bits(master_of(optimizer, param), other, "copy")


@pytest.mark.parametrize("options", [{"max_norm": 0.5}, {"zero_grad": True}], ids=str)
@pytest.mark.parametrize("case", PLAIN, ids=str)
def test_clipping_and_clearing(case, options):
    """As an imperative step, within the roundings of its norm."""
    found = []
    for fused in (True, False):
        params, optimizer = run_mastered(case, torch.bfloat16, fused=fused)
        gradients = make_gradients(SHAPES, torch.bfloat16, 4)
        for param, gradient in zip(params, gradients, strict=True):
            param.grad = gradient
        optimizer.step(**options)
        found.append(states(optimizer))
        if "zero_grad" in options:
            assert not any(param.grad.any() for param in params)
    assert_contents_close(*found, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("case", PLAIN, ids=str)
def test_an_imperative_step_that_can_be_followed(case):
    """Autograd follows it."""
    _, optimizer = run_mastered(case, torch.bfloat16, fused=False)
    followed = copy.deepcopy(optimizer)
    followed.param_groups[0]["differentiable"] = True
    for each in (optimizer, followed):
        with torch.no_grad():
            train(each, each.param_groups[0]["params"], [4])
    assert_contents_close(states(followed), states(optimizer), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("case", PLAIN, ids=str)
def test_verify(case):
    params, optimizer = run_mastered(case, torch.bfloat16)

    def closure():
        gradients = make_gradients(SHAPES, torch.bfloat16, 4)
        for param, gradient in zip(params, gradients, strict=True):
            param.grad = gradient
        return torch.zeros(())

    report = fusedstep.verify(optimizer, closure, steps=2)
    assert report.ok, report
    assert "master_param" in report.rows[0].ulp


@pytest.mark.parametrize("case", first_of_each(lambda case: case.elementwise, PLAIN), ids=str)
def test_a_compiled_step(case):
    torch._dynamo.reset()
    optimizers = [run_mastered(case, torch.bfloat16)[1] for _ in range(2)]
    compiled = torch.compile(optimizers[0].step, fullgraph=True)
    for optimizer, step in zip(optimizers, (compiled, optimizers[1].step), strict=True):
        params = optimizer.param_groups[0]["params"]
        for param, gradient in zip(params, make_gradients(SHAPES, torch.bfloat16, 4), strict=True):
            param.grad = gradient
        step()
    assert_same_contents(*map(contents, optimizers))


def test_a_plan_refuses_copies_of_other_weights():
    weight = torch.zeros(3)
    states = [torch.zeros(3), torch.zeros(3)]
    plan = torch.ops.fusedstep.plan_new([weight], states, [torch.zeros(())], True)
    with pytest.raises(RuntimeError, match="a master copy takes a weight of 16 bits"):
        torch.ops.fusedstep.plan_bind(plan, [weight], [weight.clone()])
    torch.ops.fusedstep.plan_delete(plan)


def test_sparse_gradients_touch_only_the_copies_of_their_rows():
    table = torch.nn.Parameter(torch.ones(50, 8, dtype=torch.bfloat16))
    twin = torch.nn.Parameter(table.detach().clone())
    optimizers = [optim.Adagrad([each], master_weights=True) for each in (table, twin)]
    rows, entries = torch.tensor([[3, 7, 3]]), torch.full((3, 8), 0.5, dtype=torch.bfloat16)
    for step in (1, 2):
        table.grad = torch.sparse_coo_tensor(rows, entries * step, (50, 8))
        twin.grad = table.grad.to_dense()
        for optimizer in optimizers:
            optimizer.step()
    touched = (master_of(optimizers[0], table) != 1).any(dim=1).nonzero().flatten()
    assert touched.tolist() == [3, 7]
    assert_same_bits(master_of(optimizers[0], table), master_of(optimizers[1], twin), "copy")
    assert_same_bits(table, twin, "weight")


@pytest.mark.parametrize(
    "option",
    [{"master_weights": True}, {"master_weights": "split"}, {"rounding": "kahan"}],
    ids=str,
)
@pytest.mark.parametrize("name", optim.__all__)
def test_the_text_says_where_the_option_changes_nothing(name, option):
    cls = getattr(optim, name)
    if option.keys() - inspect.signature(cls).parameters.keys():
        pytest.skip("it has no such option")
    wide = {"params": [torch.zeros(4, 4)]}
    mixed = {"params": [torch.zeros(4, 4), torch.zeros(4, 4, dtype=torch.bfloat16)]}
    ((key, value),) = option.items()
    note = f"Group 1: {key}={value!r} changes nothing, for no weight of the group has 16 bits"
    told = repr(cls([mixed, wide], **option))
    assert told.endswith(f"\n{note}\n)")
    assert "Group 0:" not in told
    assert told.replace(f"{note}\n", "") == torch.optim.Optimizer.__repr__(
        cls([mixed, wide], **option)
    )
    assert "changes nothing" not in repr(cls([{"params": [torch.zeros(4, 4)]}]))
