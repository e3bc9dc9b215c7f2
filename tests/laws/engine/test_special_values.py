"""Law: NaN, infinities and denormals do what they do in torch's for-loop."""

import contextlib

import pytest
import torch

from fusedstep import optim
from support.cases import (
    CASES,
    DTYPES,
    KINDS,
    LOW_PRECISION,
    PLAIN,
    WITH_NAMESAKE,
    dealt,
    parameters_of,
)
from support.stepping import (
    CHUNK,
    ISAS,
    TEAM,
    as_parameters,
    assert_same_contents,
    contents,
    forced_isa,
    make_gradients,
    make_weights,
    threads,
)

SHAPES = ((70,), (33, 31), (CHUNK + 5,))
NAN, INF = float("nan"), float("inf")


def poison(gradients, values):
    """The special values at the start, in a tail and across the seam of two chunks."""
    for gradient in gradients:
        flat = gradient.view(-1)
        for position, value in enumerate(values):
            flat[position * 9] = value
            flat[-1 - position] = value
    for position, value in enumerate(values):
        gradients[-1][CHUNK - 2 + position] = value


def train_with_special_gradients(optimizer, params, values, steps=4):
    """Special gradients at the second step only: later ones show what stays in the states."""
    for step in range(1, steps + 1):
        gradients = make_gradients([param.shape for param in params], params[0].dtype, step)
        if step == 2:
            poison(gradients, values)
        for param, gradient in zip(params, gradients, strict=True):
            param.grad = gradient
        optimizer.step()


def assert_same_kind(actual, expected, what):
    """NaN and infinities are in the same places, and have the same signs."""
    assert torch.equal(actual.isnan(), expected.isnan()), f"{what}: NaN elsewhere"
    for infinite in (torch.isposinf, torch.isneginf):
        assert torch.equal(infinite(actual), infinite(expected)), f"{what}: infinity elsewhere"


def check_special_gradients(case, build_twin, dtype, values):
    weights = make_weights(SHAPES, dtype)
    params, twins = as_parameters(weights), as_parameters(weights)
    optimizer, twin = case.build(params), build_twin(twins)
    train_with_special_gradients(optimizer, params, values)
    train_with_special_gradients(twin, twins, values)
    actual, expected = contents(optimizer), contents(twin)
    for name, tensor in expected.items():
        assert_same_kind(actual[name], tensor, name)
        rtol = 16 * torch.finfo(dtype).eps
        torch.testing.assert_close(
            actual[name], tensor, rtol=rtol, atol=rtol, equal_nan=True, msg=lambda m, n=name: n + m
        )


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("case", PLAIN, ids=str)
def test_the_norm_of_float16_gradients_may_be_beyond_their_range(case, fused):
    param = torch.nn.Parameter(torch.ones(12, 8, dtype=torch.float16))
    param.grad = torch.full_like(param, 1e4)
    norm = case.build([param], fused=fused).step(max_norm=0.5)
    assert norm.item() == pytest.approx(1e4 * param.numel() ** 0.5, rel=1e-12)
    assert param.isfinite().all()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", WITH_NAMESAKE, ids=str)
def test_nan_and_inf_spread_as_in_torch(case, dtype, isa):
    with forced_isa(isa):
        check_special_gradients(case, case.build_namesake, dtype, (NAN, INF, -INF))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("values", [(NAN,), (INF,), (-INF,)], ids=str)
@pytest.mark.parametrize("case", [case for case in CASES if not case.elementwise], ids=str)
def test_nan_and_inf_spread_through_norms(case, dtype, values, isa):
    with forced_isa(isa):
        check_special_gradients(case, lambda params: case.build(params, fused=False), dtype, values)


DENORMAL = (
    ({}, 20.0, 1e-44),
    ({"lr": 0.0}, 20.0, 1e-44),
    ({"lr": 100.0}, 20.0, 1e-44),
    ({"variant": "cybertron"}, 1.0, 2e-43),
    ({"variant": "nvlamb", "weight_decay": 0.0}, 1.0, 2e-44),
    ({"eps": 1e30}, 1e3, 3e-10),  # the update itself is denormal
)


@pytest.mark.parametrize("isa", [*ISAS, "torch operations"])
@pytest.mark.parametrize("options", DENORMAL, ids=lambda options: str(options[0]))
def test_lamb_ratios_beyond_float32(options, isa):
    """Only the element with a gradient moves: by lr times the norm if float32 has the factor."""
    options, scale, value = options
    native = isa != "torch operations"
    with forced_isa(isa) if native else contextlib.nullcontext():
        for keep_grad in (False, True):
            param = torch.nn.Parameter(torch.full((1000,), scale))
            twin = torch.nn.Parameter(torch.full((1000,), scale, dtype=torch.float64))
            param.grad = torch.zeros(1000)
            param.grad[7] = value
            twin.grad = param.grad.double()
            optim.Lamb([param], fused=native, keep_grad=keep_grad, **options).step()
            optim.Lamb([twin], fused=True, **options).step()
            expected = twin.detach()
            if options.get("eps") == 1e30 or options.get("lr") == 100.0:  # the factor is bounded
                assert torch.isfinite(param).all()
                expected[7] = param[7].item()
            torch.testing.assert_close(param.detach().double(), expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("case", KINDS, ids=str)
def test_a_tensor_with_nan_leaves_others_alone(case):
    """Two steps: the first of some optimizers moves no weight."""
    weights = make_weights(SHAPES, torch.float32)
    params, clean = as_parameters(weights), as_parameters(weights)
    optimizer, of_clean = case.build(params), case.build(clean)
    for step in (1, 2):
        gradients = make_gradients(SHAPES, torch.float32, step)
        for param, clean_param, gradient in zip(params, clean, gradients, strict=True):
            param.grad, clean_param.grad = gradient.clone(), gradient
        params[1].grad[3, 3] = NAN
        optimizer.step()
        of_clean.step()
    # A sign, which is 0 of NaN, keeps it from the weight.
    spoilt = [params[1]] if case.continuous else optimizer.state[params[1]].values()
    assert any(value.isnan().any() for value in spoilt)
    assert torch.equal(params[0], clean[0])
    assert torch.equal(params[2], clean[2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("case", WITH_NAMESAKE, ids=str)
def test_squares_overflow_and_underflow_as_in_torch(case, dtype):
    """Gradients whose squares are beyond the dtype on either side."""
    largest = torch.finfo(dtype).max ** 0.6
    check_special_gradients(
        case, case.build_namesake, dtype, (largest, -largest, 1 / largest, -1 / largest, 0.0)
    )


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("where", [slice(None), slice(3, None, 16), slice(-5, None)], ids=str)
@pytest.mark.parametrize(("of_weight", "of_gradient"), [(1e-25, 1), (1e25, 1), (1, 1e-30)])
@pytest.mark.parametrize("case", [case for case in CASES if not case.elementwise], ids=str)
def test_norms_of_numbers_whose_squares_no_float_holds(case, of_weight, of_gradient, where, isa):
    shapes = ((70,), (CHUNK + 5,), (4 * CHUNK,))
    weights, gradients = (
        make_weights(shapes, torch.float32),
        make_gradients(shapes, torch.float32, 1),
    )
    for weight, gradient in zip(weights, gradients, strict=True):
        weight[where] *= of_weight
        gradient[where] *= of_gradient
    params = as_parameters(weights)
    twins = as_parameters([weight.double() for weight in weights])
    for param, twin, gradient in zip(params, twins, gradients, strict=True):
        param.grad, twin.grad = gradient.clone(), gradient.double()
    with forced_isa(isa):
        case.build(params).step()
    case.build(twins, fused=False).step()
    for param, twin in zip(params, twins, strict=True):
        largest = twin.abs().max().item()
        torch.testing.assert_close(param.double(), twin, rtol=1e-5, atol=1e-6 * largest)


def denormal_trajectory(case, dtype, flush, count):
    """Weights, and gradients, of which a part is below the smallest normal number.

    Only the steps are taken in the mode: a thread that starts later would have it from its starter.
    """
    shapes = ((70,), (10 * TEAM + CHUNK + 5,))  # so much that other threads come in time for it
    tiny = torch.finfo(dtype).smallest_normal
    params = as_parameters(make_weights(shapes, dtype))
    optimizer = case.build(params, lr=1e-3)
    with torch.no_grad():
        for param in params:
            param[::2] *= tiny / 4
    for step in range(1, 4):
        for param, gradient in zip(params, make_gradients(shapes, dtype, step), strict=True):
            param.grad = gradient
            param.grad[::4] *= 0
            param.grad[1::4] *= tiny / 4
        with threads(count, started=True):
            torch.set_flush_denormal(flush)
            optimizer.step()
            torch.set_flush_denormal(False)
    return contents(optimizer)


@pytest.mark.parametrize(
    ("case", "option"),
    [
        (case, option)
        for case in PLAIN
        for option in ("lr", "eps", "weight_decay")
        if case.namesake and {"fused", option} <= parameters_of(case.namesake).keys()
    ],
    ids=str,
)
def test_options_beyond_float32_do_what_they_do_in_torchs_fused_step(case, option):
    """They are in torch's ranges: its for-loop raises midway, and its fused step does not."""

    def stepped(cls):
        param = torch.nn.Parameter(torch.tensor([1.0, 2.0, 0.0]))
        param.grad = torch.tensor([0.5, 0.0, 0.0])
        cls([param], fused=True, **(case.options | {option: 1e300})).step()
        return param.detach()

    weight, expected = stepped(case.optimizer), stepped(case.namesake)
    assert_same_kind(weight, expected, "weight")
    assert expected.isfinite().all() == (option == "eps")


@pytest.mark.parametrize(("case", "dtype"), dealt(KINDS, DTYPES, len(DTYPES)), ids=str)
def test_threads_share_the_denormal_mode_of_the_caller(case, dtype):
    results = []
    for flush in (False, True):
        with forced_isa("base"):
            expected = denormal_trajectory(case, dtype, flush, 1)
        results.append(expected)
        for count in (1, 3):
            actual = denormal_trajectory(case, dtype, flush, count)
            assert_same_contents(actual, expected, f"flush {flush}, {count} threads:")
    if dtype not in LOW_PRECISION:
        # The mode matters here, or equal results would say nothing.
        kept, flushed = (result["weight 1"] for result in results)
        assert not torch.equal(kept, flushed)


@pytest.mark.parametrize("case", KINDS, ids=str)
def test_the_caller_keeps_its_denormal_mode(case):
    tiny = torch.tensor([1e-40])
    for flush in (False, True):
        with threads(3, started=True):
            torch.set_flush_denormal(flush)
            (param,) = as_parameters(make_weights([(TEAM,)], torch.float32))
            param.grad = torch.ones_like(param)
            case.build([param]).step()
        assert ((tiny * 0.5).item() == 0) == flush
