"""step(max_norm=..., zero_grad=...) and a GradScaler's scale against the separate calls."""

import numpy
import pytest
import torch

import fusedstep
from support.cases import DTYPES, KINDS, LOW_PRECISION, PLAIN, thinned
from support.one_pass import MODES, SHAPES, build, params_of, set_gradients
from support.stepping import (
    CHUNK,
    TEAM,
    as_parameters,
    assert_contents_close,
    assert_same_bits,
    assert_same_contents,
    contents,
    make_gradients,
    make_weights,
)


def assert_same_step(optimizer, twin, dtype, rounds=False):
    """The norms may differ in the last bit of float32: so may what is multiplied with them.

    `rounds`: the separate calls round the multiplied gradients to the dtype, the step does not.
    """
    epsilon = torch.finfo(dtype).eps
    rtol = 40 * epsilon if rounds else 16 * epsilon
    assert_contents_close(contents(optimizer), contents(twin), rtol=rtol, atol=4 * epsilon)


@pytest.mark.parametrize(
    ("case", "max_norm", "mode"), thinned(KINDS, [0.5, 1e6, 0.0, float("inf")], MODES), ids=str
)
def test_clips_as_the_separate_calls_do(case, max_norm, mode):
    optimizer, twin = build(case, torch.float32, mode)
    norm = optimizer.step(max_norm=max_norm)
    expected = torch.nn.utils.clip_grad_norm_(params_of(twin), max_norm)
    twin.step()
    torch.testing.assert_close(norm, expected.double(), rtol=1e-5, atol=0)
    assert_same_step(optimizer, twin, torch.float32)
    for param, other in zip(params_of(optimizer), params_of(twin), strict=True):
        torch.testing.assert_close(param.grad, other.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("case", "max_norm", "mode"), thinned(PLAIN, [0.5, 1e6], MODES), ids=str)
def test_clips_by_an_option_as_by_the_separate_call(case, max_norm, mode):
    """Frameworks call step() without arguments."""
    optimizer, twin = build(case, torch.float32, mode)
    before = [param.grad.clone() for param in params_of(optimizer)]
    for group in optimizer.param_groups:
        group["max_grad_norm"] = max_norm
        group["keep_grad"] = True  # an option of Lamb
    optimizer.step()
    torch.nn.utils.clip_grad_norm_(params_of(twin), max_norm)
    twin.step()
    assert_same_step(optimizer, twin, torch.float32)
    for param, grad in zip(params_of(optimizer), before, strict=True):
        assert_same_bits(param.grad, grad, "gradient")


@pytest.mark.parametrize("case", PLAIN, ids=str)
def test_such_an_option_is_one_number(case):
    params = as_parameters(make_weights(SHAPES[:2], torch.float32))
    for bad in (-1.0, float("nan")):
        with pytest.raises(ValueError, match=r"Invalid (max_grad_norm value|Max grad norm)"):
            case.build(params, max_grad_norm=bad)
    groups = [{"params": params[:1], "max_grad_norm": 2.0}, {"params": params[1:]}]
    with pytest.raises(ValueError, match=r"max_grad_norm must be the same in all groups"):
        case.build(groups)


@pytest.mark.parametrize("case", PLAIN, ids=str)
def test_such_an_option_outlives_a_dictionary_without_it(case):
    params = as_parameters(make_weights(SHAPES, torch.float32))
    dictionary = case.build(params).state_dict()
    for group in dictionary["param_groups"]:
        group.pop("max_grad_norm", None)
    optimizer = case.build(params, max_grad_norm=2.0, master_weights=True)
    optimizer.load_state_dict(dictionary)
    has_key = "max_grad_norm" in case.build(params).defaults  # its dictionaries always have it
    assert has_key or optimizer.param_groups[0]["max_grad_norm"] == 2.0
    assert optimizer.param_groups[0]["master_weights"]


@pytest.mark.parametrize(
    ("case", "zero_grad", "mode"), thinned(PLAIN, [False, True], MODES), ids=str
)
def test_clips_with_a_closure_and_returns_what_that_returned(case, zero_grad, mode):
    optimizer, twin = build(case, torch.float32, mode)
    assert optimizer.step(lambda: 2.5, max_norm=0.5, zero_grad=zero_grad) == 2.5
    twin.step(max_norm=0.5, zero_grad=zero_grad)
    assert_same_contents(contents(optimizer), contents(twin))


@pytest.mark.parametrize(
    ("case", "dtype", "zero_grad"), thinned(KINDS, DTYPES, [True, "none"]), ids=str
)
def test_clips_and_clears(case, dtype, zero_grad):
    optimizer, twin = build(case, dtype, "fused")
    before = [param.grad.data_ptr() for param in params_of(optimizer)]
    optimizer.step(max_norm=0.5, zero_grad=zero_grad)
    torch.nn.utils.clip_grad_norm_(params_of(twin), 0.5)
    twin.step()
    assert_same_step(optimizer, twin, dtype, rounds=dtype in LOW_PRECISION)
    for param, address in zip(params_of(optimizer), before, strict=True):
        if zero_grad == "none":
            assert param.grad is None
        else:
            assert param.grad.data_ptr() == address
            assert not param.grad.any()


@pytest.mark.parametrize(
    ("case", "zero_grad", "mode"), thinned(KINDS, [True, "none"], MODES), ids=str
)
def test_clearing_alone_changes_no_bit_of_the_step(case, zero_grad, mode):
    optimizer, twin = build(case, torch.float32, mode)
    assert optimizer.step(zero_grad=zero_grad) is None
    twin.step()
    assert_same_contents(contents(optimizer), contents(twin))
    for param in params_of(optimizer):
        assert param.grad is None if zero_grad == "none" else not param.grad.any()


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "unfused"])
@pytest.mark.parametrize("true", [1, numpy.True_])
@pytest.mark.parametrize("case", PLAIN, ids=str)
def test_what_is_true_clears(case, true, fused):
    param = torch.nn.Parameter(torch.ones(5))
    param.grad = torch.ones(5)
    case.build([param], fused=fused).step(zero_grad=true)
    assert not param.grad.any()


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "unfused"])
@pytest.mark.parametrize("case", PLAIN, ids=str)
def test_clearing_takes_a_gradient_out_of_its_graph(case, fused):
    param = torch.nn.Parameter(torch.ones(5))
    (param**3).sum().backward(create_graph=True)
    grad = param.grad
    case.build([param], fused=fused).step(zero_grad=True)
    assert param.grad is grad
    assert not grad.requires_grad
    assert not grad.any()


@pytest.mark.parametrize("case", PLAIN, ids=str)
def test_the_norm_has_the_same_bits_for_any_isa_and_thread_count(case):
    norms, shapes = set(), (*SHAPES, (TEAM + CHUNK,))
    for isa in fusedstep.isas():
        for threads in (1, 2, 3):
            optimizer, _ = build(case, torch.float32, "two groups", shapes=shapes)
            before = torch.get_num_threads()
            torch.set_num_threads(threads)
            fusedstep._native.ops.force_isa(isa)
            norms.add(optimizer.step(max_norm=1.0).item())
            fusedstep._native.ops.force_isa(None)
            torch.set_num_threads(before)
    assert len(norms) == 1


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("zero_grad", [False, True])
@pytest.mark.parametrize("case", PLAIN, ids=str)
def test_a_gradient_that_weights_share_is_scaled_and_cleared_once(case, zero_grad, grouped):
    def build_shared():
        params = as_parameters(make_weights([(50,)] * 3, torch.float32))
        shared = make_gradients([(50,)], torch.float32, 1)[0]
        params[0].grad, params[1].grad = shared, shared
        params[2].grad = torch.full((), 2.0).expand(50)
        split = [{"params": params[:1]}, {"params": params[1:]}]
        return params, case.build(split if grouped else params)

    params, optimizer = build_shared()
    norm = optimizer.step(max_norm=1.0, zero_grad=zero_grad)
    twins, twin = build_shared()
    factor = 1.0 / (norm.item() + 1e-6)
    clipped = [param.grad * factor for param in twins]
    for param, gradient in zip(twins, clipped, strict=True):
        param.grad = gradient.clone()
    twin.step()
    assert_same_step(optimizer, twin, torch.float32)
    for param, gradient in zip(params, clipped, strict=True):
        torch.testing.assert_close(param.grad, gradient * (not zero_grad), rtol=1e-6, atol=0)


@pytest.mark.parametrize("case", PLAIN, ids=str)
def test_norms_that_are_not_finite(case):
    for bad in (float("inf"), float("nan")):
        optimizer, twin = build(case, torch.float32, "fused")
        for each in (optimizer, twin):
            params_of(each)[0].grad[3, 3] = bad
        norm = optimizer.step(max_norm=1.0)
        expected = torch.nn.utils.clip_grad_norm_(params_of(twin), 1.0)
        twin.step()
        assert_same_bits(norm.float(), expected, "norm")
        for mine, theirs in zip(params_of(optimizer), params_of(twin), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("case", PLAIN, ids=str)
@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"max_norm": -1.0}, "Invalid max_norm value: -1.0"),
        ({"max_norm": float("nan")}, "Invalid max_norm value: nan"),
        ({"zero_grad": "all"}, "zero_grad must be"),
        ({"zero_grad": None}, "zero_grad must be"),
    ],
)
def test_bad_arguments_change_nothing(case, arguments, text):
    optimizer, _ = build(case, torch.float32, "fused")
    before = contents(optimizer)
    with pytest.raises(ValueError, match=text):
        optimizer.step(**arguments)
    assert_same_contents(contents(optimizer), before)


# ---- GradScaler ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("case", "arguments", "mode"),
    thinned(KINDS, [{}, {"max_norm": 0.5}, {"zero_grad": True}], MODES),
    ids=str,
)
def test_a_scalers_gradients_are_unscaled_in_the_step(case, arguments, mode):
    scale = 1024.0
    optimizer, twin = build(case, torch.float32, mode)
    set_gradients(optimizer, torch.float32, 2, scale)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    scaler.scale(torch.zeros(()))
    scaler.step(optimizer, **arguments)
    twin.step(**arguments)
    assert_same_contents(contents(optimizer), contents(twin))
    for param, other in zip(params_of(optimizer), params_of(twin), strict=True):
        assert_same_bits(param.grad, other.grad, "gradient")
    assert not hasattr(optimizer, "grad_scale")


@pytest.mark.parametrize(("case", "mode"), thinned(KINDS, MODES), ids=str)
def test_a_scaler_skips_a_step_with_an_infinite_gradient(case, mode):
    optimizer, _ = build(case, torch.float32, mode)
    params_of(optimizer)[2].grad[7] = float("inf")
    before = contents(optimizer)
    grads = [param.grad.clone() for param in params_of(optimizer)]
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.zeros(()))
    scaler.step(optimizer)
    scaler.update()
    assert_same_contents(contents(optimizer), before)
    assert scaler.get_scale() == 2.0
    if optimizer._step_supports_amp_scaling:
        for param, grad in zip(params_of(optimizer), grads, strict=True):
            assert_same_bits(param.grad, grad, "gradient")


@pytest.mark.parametrize("case", PLAIN, ids=str)
def test_gradients_that_were_unscaled_before_are_not_unscaled_again(case):
    optimizer, twin = build(case, torch.float32, "fused")
    set_gradients(optimizer, torch.float32, 2, 8.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.zeros(()))
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    twin.step()
    assert_same_contents(contents(optimizer), contents(twin))


@pytest.mark.parametrize("case", PLAIN, ids=str)
def test_a_skipped_step_still_clears(case):
    optimizer, _ = build(case, torch.float32, "fused")
    optimizer.found_inf = torch.ones(())
    before = contents(optimizer)
    norm = optimizer.step(max_norm=1.0, zero_grad=True)
    assert norm.item() == float("inf")
    assert_same_contents(contents(optimizer), before)
    assert not any(param.grad.any() for param in params_of(optimizer))
