"""bfloat16 and float16 weights with float32 states."""

import copy

import pytest
import torch

import fusedstep
from support.cases import CASES, KINDS, LOW_PRECISION, PLAIN, WITH_STATES
from support.stepping import (
    CHUNK,
    TEAM,
    Reference,
    as_parameters,
    assert_counts,
    assert_same_bits,
    assert_same_contents,
    assert_within,
    contents,
    forced_isa,
    make_gradients,
    make_weights,
    threads,
    train,
)

SHAPES = ((33, 31), (7,), (2 * CHUNK + 5,), (), (0, 3))


def run_wide(case, dtype, steps=3, shapes=SHAPES, **overrides):
    params = as_parameters(make_weights(shapes, dtype))
    optimizer = case.build(params, state_dtype=torch.float32, **overrides)
    train(optimizer, params, range(1, steps + 1))
    return params, optimizer


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("dtype", LOW_PRECISION, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_states_are_float32_and_as_exact(case, dtype, fused):
    """The states are those of the reference from the same weights, to float32's precision.

    The terms of their sums are about one, and may cancel: hence the absolute tolerance. Gradients
    divided by the root of their mean square are larger.
    """
    of_moves = 1e-7 * (1 - case.betas[-1]) ** -0.5 if case.buffers_moves else 1e-7
    params = as_parameters(make_weights(SHAPES, dtype))
    optimizer = case.build(params, state_dtype=torch.float32, fused=fused)
    for step in range(1, 6):
        before = [param.detach().clone() for param in params]
        states = [copy.deepcopy(optimizer.state[param]) for param in params]
        train(optimizer, params, [step])
        gradients = make_gradients(SHAPES, dtype, step)
        for param, weight, state, gradient in zip(params, before, states, gradients, strict=True):
            assert param.dtype is dtype
            reference = Reference(case, weight.float())
            reference.state = {name: state[name].double() for name in state if name != "step"}
            reference.steps = step - 1
            reference.step(gradient)
            for name in case.states:
                now = optimizer.state[param][name]
                assert now.dtype is torch.float32
                atol = of_moves if name == "momentum_buffer" else 1e-7
                torch.testing.assert_close(
                    now.double(), reference.state[name], rtol=1e-5, atol=atol
                )
            bound = torch.finfo(dtype).eps * reference.weight.abs() + 1e-6
            assert_within(param, reference.weight, bound, "weight", **reference.jumps)


@pytest.mark.parametrize("master_weights", [False, True])
@pytest.mark.parametrize("dtype", LOW_PRECISION, ids=str)
@pytest.mark.parametrize("case", KINDS, ids=str)
def test_same_bits_for_every_isa_and_thread_count(case, dtype, master_weights):
    shapes = (*SHAPES, (TEAM + CHUNK,))

    def found():
        return contents(run_wide(case, dtype, shapes=shapes, master_weights=master_weights)[1])

    with forced_isa("base"), threads(1):
        expected = found()
    for isa in fusedstep.isas():
        for count in (1, 3):
            with forced_isa(isa), threads(count):
                assert_same_contents(found(), expected)


@pytest.mark.parametrize("dtype", LOW_PRECISION, ids=str)
@pytest.mark.parametrize("case", PLAIN, ids=str)
def test_strided_weights(case, dtype):
    (start,) = make_weights([(40, 33)], dtype)
    (gradient,) = make_gradients([(40, 33)], dtype, 1)
    strided = torch.zeros(33, 80, dtype=dtype)[:, ::2].t()
    strided.copy_(start)
    results = []
    for weight in (start.clone(), strided):
        param = torch.nn.Parameter(weight)
        param.grad = gradient
        optimizer = case.build([param], state_dtype=torch.float32)
        optimizer.step()
        results.append(param)
    if case.elementwise:
        assert_same_bits(results[1], results[0], "weight")
    torch.testing.assert_close(results[1], results[0])


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("case", WITH_STATES, ids=str)
def test_wider_weights_keep_their_own_dtype(case, fused):
    for dtype in (torch.float32, torch.float64):
        params, optimizer = run_wide(case, dtype, fused=fused)
        for param in params:
            for name in case.states:
                assert optimizer.state[param][name].dtype is dtype


@pytest.mark.parametrize("dtype", LOW_PRECISION, ids=str)
@pytest.mark.parametrize("case", [case for case in KINDS if case.states], ids=str)
def test_a_model_cast_in_mid_run_goes_on_with_its_states(case, dtype):
    params = as_parameters(make_weights(SHAPES, torch.float32))
    optimizer = case.build(params)
    train(optimizer, params, [1, 2])
    states = [optimizer.state[param][case.states[0]] for param in params]
    for param in params:
        param.grad = None
        param.data = param.data.to(dtype)
    train(optimizer, params, [3])
    for param, state in zip(params, states, strict=True):
        assert param.dtype is dtype
        assert optimizer.state[param][case.states[0]] is state
    assert_counts(case, optimizer, params, [3] * len(params))


@pytest.mark.parametrize("case", PLAIN, ids=str)
@pytest.mark.parametrize("bad", [torch.float64, torch.bfloat16, "float32"], ids=str)
def test_other_dtypes_are_refused(case, bad):
    with pytest.raises(ValueError, match="state_dtype must be None"):
        case.build(as_parameters(make_weights(SHAPES, torch.float32)), state_dtype=bad)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("dtype", LOW_PRECISION, ids=str)
@pytest.mark.parametrize("case", [case for case in KINDS if case.states], ids=str)
def test_loaded_states_stay_float32(case, dtype, fused):
    """torch casts them to the weight's dtype. Hooks see the dictionary first, as with torch."""
    _, whole = run_wide(case, dtype, steps=6, fused=fused)
    params, optimizer = run_wide(case, dtype, steps=3, fused=fused)
    resumed_params = as_parameters(params)
    resumed = case.build(resumed_params, fused=fused)
    seen = []
    resumed.register_load_state_dict_pre_hook(lambda _, loaded: seen.append(loaded["wrapped"]))
    resumed.register_load_state_dict_pre_hook(lambda _, loaded: loaded["wrapped"])
    resumed.register_load_state_dict_post_hook(
        lambda self: seen.append(self.state[resumed_params[0]][case.states[0]].dtype)
    )
    dictionary = copy.deepcopy(optimizer.state_dict())
    resumed.load_state_dict({"wrapped": dictionary})
    assert seen == [dictionary, torch.float32]
    train(resumed, resumed_params, range(4, 7))
    assert_same_contents(contents(resumed), contents(whole))


@pytest.mark.parametrize("case", WITH_STATES, ids=str)
def test_a_float32_checkpoint_of_a_model_in_16_bits(case):
    """In groups, with weights that have no state; float64 states become float32 as well."""
    shapes = ((3,), (4,), (5,), (6,))
    params = as_parameters(make_weights(shapes, torch.float32))
    optimizer = case.build([{"params": params[:2]}, {"params": params[2:]}])
    for param in (params[0], params[3]):
        param.grad = torch.ones_like(param)
    optimizer.step()
    dtypes = (torch.bfloat16, torch.float16, torch.float64, torch.float16)
    cast = [torch.nn.Parameter(p.detach().to(d)) for p, d in zip(params, dtypes, strict=True)]
    loaded = case.build([{"params": cast[:2]}, {"params": cast[2:]}])
    dictionary = copy.deepcopy(optimizer.state_dict())
    for name in case.states:
        dictionary["state"][0][name] = dictionary["state"][0][name].double()
    loaded.load_state_dict(dictionary)
    for param, original in ((cast[0], params[0]), (cast[3], params[3])):
        for name in case.states:
            assert_same_bits(loaded.state[param][name], optimizer.state[original][name], name)


@pytest.mark.parametrize("case", WITH_STATES, ids=str)
def test_other_states_take_the_dtype_of_the_weight(case):
    for saved, dtype in ((torch.bfloat16, torch.float32), (torch.float32, torch.float64)):
        params = as_parameters(make_weights(SHAPES, saved))
        optimizer = case.build(params)
        train(optimizer, params, [1])
        cast = [torch.nn.Parameter(param.detach().to(dtype)) for param in params]
        loaded = case.build(cast)
        loaded.load_state_dict(optimizer.state_dict())
        train(loaded, cast, [2])
        for param in cast:
            assert {loaded.state[param][name].dtype for name in case.states} == {dtype}
