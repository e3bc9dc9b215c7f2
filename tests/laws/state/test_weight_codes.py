"""16-bit weights whose float32 value is split, compensated for, or rounded at random."""

import copy
import io

import pytest
import torch

import fusedstep
from fusedstep import optim
from support.cases import CASES, FAMILIES, KINDS, PLAIN, WITH_STATES, first_of_each, thinned
from support.stepping import (
    CHUNK,
    ISAS,
    TEAM,
    as_parameters,
    assert_contents_close,
    assert_same_bits,
    assert_same_contents,
    contents,
    forced_isa,
    make_gradients,
    make_weights,
    run,
    threads,
    train,
)
from support.weight_storages import (
    BF16,
    EACH_WAY,
    KAHAN,
    KNOWN,
    LAYOUTS,
    SPLIT,
    STOCHASTIC,
    WAYS,
    errors_of_steps,
    sgd,
    step,
)

BESIDE = ("master_param", "low_param", "compensation")

SHAPES = ((33, 31), (7,), (2 * CHUNK + 5,), (), (0, 3))

BOTH = pytest.mark.parametrize("fused", [True, False], ids=["native", "imperative"])


def bits(values: torch.Tensor) -> torch.Tensor:
    return values.detach().contiguous().view(torch.int32)


def value_of(optimizer, param) -> torch.Tensor:
    """The float32 value of a split weight."""
    upper = param.detach().contiguous().view(torch.int16).int() << 16
    low = optimizer.state[param]["low_param"].contiguous().int()
    return (upper + low).view(torch.float32)


def from_bits(*words: int) -> torch.Tensor:
    signed = [word - 2**32 if word >= 2**31 else word for word in words]
    return torch.tensor(signed, dtype=torch.int32).view(torch.float32)


# Small steps


@BOTH
@pytest.mark.parametrize("state_dtype", [None, "int8", "int4", "fp8"], ids=str)
@pytest.mark.parametrize("options", [{}, {"master_weights": "float32"}, *WAYS], ids=str)
@pytest.mark.parametrize("case", [case for case in FAMILIES if case.elementwise], ids=str)
def test_small_steps_add_up(case, options, state_dtype, fused):
    """A weight of 1 that moves by 1e-3 a step is at 0.8 after 200; rounded to nearest it stays."""
    param = torch.nn.Parameter(torch.ones(8192, dtype=BF16))
    optimizer = case.optimizer([param], lr=1e-3, fused=fused, state_dtype=state_dtype, **options)
    for _ in range(200):
        step(optimizer, torch.ones_like(param))
    mean = param.double().mean().item()
    assert abs(mean - 0.8) < 0.004 if options else mean == 1


@BOTH
@EACH_WAY
def test_decay_is_inside_of_what_is_rounded(way, fused):
    param = torch.nn.Parameter(torch.ones(8192, dtype=BF16))
    optimizer = optim.AdamW([param], lr=1e-3, weight_decay=1.0, fused=fused, **way)
    for _ in range(200):
        step(optimizer, torch.zeros_like(param))
    assert abs(param.double().mean().item() - 0.999**200) < 0.004


# Split weights are float32 weights


@pytest.mark.parametrize("case", CASES, ids=str)
def test_split_weights_have_the_bits_of_float32_copies(case):
    params, optimizer = run(case, SHAPES, BF16, 20, **SPLIT)
    twins, twin = run(case, SHAPES, BF16, 20, master_weights="float32")
    for param, other in zip(params, twins, strict=True):
        master = twin.state[other]["master_param"]
        assert_same_bits(value_of(optimizer, param), master, "value")
        is_tie = (bits(master) & 0xFFFF) == 0x8000
        same = torch.where(is_tie, other, param)  # ties are rounded away from zero
        assert_same_bits(same, other, "weight")
        for name in case.states:
            assert_same_bits(optimizer.state[param][name], twin.state[other][name], name)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_imperative_split_weights_do_the_same(case):
    params, optimizer = run(case, SHAPES, BF16, 5, fused=False, **SPLIT)
    twins, twin = run(case, SHAPES, BF16, 5, fused=False, master_weights="float32")
    for param, other in zip(params, twins, strict=True):
        assert_same_bits(value_of(optimizer, param), twin.state[other]["master_param"], "value")


@pytest.mark.parametrize("dtype", [BF16, torch.float16], ids=str)
@pytest.mark.parametrize("case", PLAIN, ids=str)
def test_compensated_weights_are_near_float32_copies(case, dtype):
    """The error of the sum of a weight and its compensation is 2^-17 of the weight, or less."""
    if not case.continuous:
        pytest.skip("rounding turns the update of a few elements")
    params, optimizer = run(case, SHAPES, dtype, 20, **KAHAN)
    twins, twin = run(case, SHAPES, dtype, 20, master_weights="float32")
    epsilon = torch.finfo(dtype).eps ** 2
    for param, other in zip(params, twins, strict=True):
        master = twin.state[other]["master_param"]
        value = param.float() + optimizer.state[param]["compensation"].float()
        torch.testing.assert_close(value, master, rtol=40 * epsilon, atol=40 * epsilon)


# The same bits everywhere


@pytest.mark.parametrize("isa", ISAS)
@EACH_WAY
@pytest.mark.parametrize("case", PLAIN, ids=str)
def test_any_isa_and_number_of_threads(case, way, isa):
    shapes = (*SHAPES, (TEAM + 77,))
    expected = contents(run(case, shapes, BF16, 3, **way)[1])
    for count in (1, 3):
        with forced_isa(isa), threads(count):
            assert_same_contents(contents(run(case, shapes, BF16, 3, **way)[1]), expected)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", [BF16, torch.float16], ids=str)
@pytest.mark.parametrize("count", [1, 3, 7, 15, 17, 31, 33, 1023, 1025])
def test_compensation_of_any_isa(dtype, isa, count):
    """Tails too, and numbers of every magnitude."""
    generator = torch.Generator().manual_seed(3)
    exponents = torch.randint(-30, 15, (count,), generator=generator)
    start = (torch.randn(count, generator=generator) * 2.0**exponents).to(dtype)
    found = []
    for name in (isa, "base"):
        _, optimizer = sgd(start, KAHAN, lr=2**-9)
        with forced_isa(name):
            for _ in range(3):
                step(optimizer, start * 0.7)
        found.append(contents(optimizer))
    assert_same_contents(*found)


@pytest.mark.parametrize("state_dtype", [None, "int8"], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@EACH_WAY
@pytest.mark.parametrize("case", PLAIN, ids=str)
def test_any_layout_and_no_byte_around_it(case, way, layout, state_dtype):
    (start,) = make_weights([layout.shape], BF16)
    placed = layout.place(start)
    params = torch.nn.Parameter(placed.view), torch.nn.Parameter(start)
    optimizers = [case.build([param], state_dtype=state_dtype, **way) for param in params]
    for param, optimizer in zip(params, optimizers, strict=True):
        train(optimizer, [param], [1, 2, 3])
    placed.assert_outside_untouched("weight")
    if case.elementwise:
        assert_same_contents(*map(contents, optimizers))
    else:  # the norm is summed in another order
        torch.testing.assert_close(*params, rtol=0.01, atol=0.01)


@pytest.mark.parametrize("layout", LAYOUTS[:2], ids=str)
@EACH_WAY
@pytest.mark.parametrize("case", first_of_each(lambda case: case.elementwise, PLAIN), ids=str)
def test_gradients_of_other_strides(case, way, layout):
    start, rows = make_weights([layout.shape, layout.shape[:1]], BF16)
    placed = layout.place(start)
    params = torch.nn.Parameter(placed.view), torch.nn.Parameter(start)
    optimizers = [case.build([param], **way) for param in params]
    for _ in range(2):
        step(optimizers[0], rows[:, None].expand(layout.shape))
        step(optimizers[1], rows[:, None].expand(layout.shape).clone())
    assert_same_contents(*map(contents, optimizers))


@pytest.mark.parametrize("state_dtype", ["int8", "int4", "fp8"])
@EACH_WAY
@pytest.mark.parametrize("case", WITH_STATES, ids=str)
def test_with_states_in_codes(case, way, state_dtype):
    """Codes of the states are those beside float32 copies where the weights are split."""
    shapes = ((97, 63), (TEAM + 77,), (12,))
    options = {"state_dtype": state_dtype, **way}
    params, optimizer = run(case, shapes, BF16, 3, **options)
    with forced_isa("base"), threads(3):
        other = run(case, shapes, BF16, 3, **options)[1]
    assert_same_contents(contents(other), contents(optimizer))
    if way is SPLIT:
        twins, twin = run(case, shapes, BF16, 3, **options | {"master_weights": True})
        for param, twin_param in zip(params, twins, strict=True):
            master = twin.state[twin_param]["master_param"]
            assert_same_bits(value_of(optimizer, param), master, "value")


def test_a_split_weight_with_int8_states_takes_two_bytes_of_each():
    (param,), optimizer = run(PLAIN[0], [(128, 256)], BF16, 1, state_dtype="int8", **SPLIT)
    state, count = optimizer.state[param], param.numel()
    assert state["low_param"].dtype is torch.int16
    assert state["low_param"].nbytes == 2 * count
    codes = [state[name] for name in PLAIN[0].states]
    assert sum(each.nbytes for each in codes) == len(codes) * count
    assert not state.keys() & {"master_param", "compensation"}


@EACH_WAY
def test_the_imperative_step_has_the_same_bits(way):
    """SGD without momentum rounds nothing else."""
    generator = torch.Generator().manual_seed(5)
    start = torch.randn(70_001, generator=generator).to(BF16)
    found = []
    for fused in (True, False):
        _, optimizer = sgd(start, way, lr=2**-7, fused=fused)
        for factor in (0.3, 0.7, 1.1):
            step(optimizer, start * factor)
        found.append(contents(optimizer))
    assert_same_contents(*found)


# Rounding at random


SHARE = torch.tensor(0.3 * 2**-7).to(BF16).double().item() * 2**7


def correlation(a, b):
    return ((a - SHARE) * (b - SHARE)).mean().item() / (SHARE * (1 - SHARE))


def test_random_rounding_is_unbiased():
    for up in errors_of_steps(3):
        assert abs(up.mean().item() - SHARE) < 4 * (SHARE * (1 - SHARE) / len(up)) ** 0.5


def test_random_rounding_is_unbiased_for_values_of_any_size():
    generator = torch.Generator().manual_seed(11)
    count = 10**6
    exponents = torch.randint(-20, 20, (count,), generator=generator)
    start = (torch.randn(count, generator=generator) * 2.0**exponents).to(BF16)
    grad = (start.float() * torch.rand(count, generator=generator) * 2**-7).to(BF16)
    param, optimizer = sgd(start, STOCHASTIC)
    step(optimizer, grad)
    exact = (start.float() - grad.float()).double()
    unit = 2.0 ** (exact.abs().log2().floor() - 7)
    error = (param.detach().double() - exact) / torch.where(exact == 0, 1.0, unit)
    assert error.abs().max() < 1
    assert abs(error.mean().item()) < 4 * 0.5 / count**0.5


def test_random_numbers_are_independent():
    """From step to step, seed to seed, element to element, and tensor to tensor."""
    first, second = errors_of_steps(2)
    (other_seed,) = errors_of_steps(1, {"seed": 8})
    bound = 4 / len(first) ** 0.5
    assert abs(correlation(first, second)) < bound
    assert abs(correlation(first, other_seed)) < bound
    for distance in (1, 2, 16, 1024, 4096):
        assert abs(correlation(first[distance:], first[:-distance])) < bound
    params = as_parameters([torch.ones(10**6, dtype=BF16)] * 2)
    optimizer = optim.SGD([{"params": params[:1]}, {"params": params[1:]}], lr=1.0, **STOCHASTIC)
    step(optimizer, *[torch.full_like(p, -0.3 * 2**-7) for p in params])
    assert abs(correlation(*[(p.detach() > 1).double() for p in params])) < bound


def test_random_numbers_repeat_by_seed():
    runs = [torch.stack(errors_of_steps(2, {"seed": seed}, 5000)) for seed in (1, 1, 2)]
    assert torch.equal(runs[0], runs[1])
    assert not torch.equal(runs[0], runs[2])


def test_random_numbers_are_known():
    """The same in every process, on every rank and in every later version."""
    (up,) = errors_of_steps(1, count=64)
    assert "".join(str(int(each)) for each in up) == KNOWN


def test_a_tensor_without_a_gradient_does_not_change_the_numbers_of_the_next():
    start = torch.ones(5000, dtype=BF16)
    found = []
    for missing in (False, True):
        params = as_parameters([start, start])
        optimizer = optim.SGD(params, lr=1.0, **STOCHASTIC)
        grad = torch.full_like(start, -0.3 * 2**-7)
        step(optimizer, None if missing else grad, grad)
        found.append(params[1].detach())
    assert torch.equal(*found)
    assert not torch.equal(params[1], torch.ones_like(start))


def test_a_seed_that_changes():
    runs = []
    for seed in (7, 8):
        param, optimizer = sgd(torch.ones(5000, dtype=BF16), STOCHASTIC)
        grad = torch.full_like(param, -0.3 * 2**-7)
        step(optimizer, grad)
        optimizer.param_groups[0]["seed"] = seed
        step(optimizer, grad)
        runs.append(param.detach().clone())
    assert not torch.equal(*runs)


# Special values


@BOTH
@EACH_WAY
def test_special_values(way, fused):
    """NaN and infinities stay, and the largest finite number does."""
    inf, nan, largest = float("inf"), float("nan"), torch.finfo(BF16).max
    start = torch.tensor([inf, -inf, nan, largest, -largest, 0.0, 1e-40, 1.0, 1.0], dtype=BF16)
    param, optimizer = sgd(start, way, fused=fused)
    grad = torch.zeros_like(start)
    grad[-2:] = torch.tensor([nan, inf])
    for _ in range(3):
        step(optimizer, grad.clone())
    expected = start.clone()
    expected[-2:] = torch.tensor([nan, -inf])
    is_nan = expected.isnan()
    assert torch.equal(param.isnan(), is_nan)
    assert torch.equal(param[~is_nan], expected[~is_nan])


@BOTH
@EACH_WAY
def test_overflow_is_that_of_rounding_to_nearest(way, fused):
    largest = torch.finfo(BF16).max
    unit = 2.0**120
    param, optimizer = sgd(torch.full((3 * 1000,), largest, dtype=BF16), way, fused=fused)
    step(optimizer, torch.tensor([-0.49, -0.51, 0.0], dtype=BF16).repeat(1000) * unit)
    expected = torch.tensor([largest, float("inf"), largest], dtype=BF16).repeat(1000)
    assert torch.equal(param, expected)


def test_a_split_value_between_the_largest_weight_and_infinity_is_kept():
    values = from_bits(0x7F7FFFFF, 0xFF7FFFFF, 0x7F7F8000, 0x7F7F7FFF, 0x00000001, 0x807FFFFF)
    weight = torch.nn.Parameter(torch.zeros(len(values), dtype=BF16))
    optimizer = optim.SGD([weight], lr=1.0, **SPLIT | {"master_weights": "float32"})
    step(optimizer, torch.zeros_like(weight))
    with torch.no_grad():
        optimizer.state[weight]["master_param"].copy_(values)
        weight.copy_(values)
    optimizer.param_groups[0]["master_weights"] = "split"
    for _ in range(2):
        step(optimizer, torch.zeros_like(weight))
        found = value_of(optimizer, weight)
        is_tie = (bits(values) & 0xFFFF) == 0x8000
        assert torch.equal(bits(found)[~is_tie], bits(values)[~is_tie])


# Weights that are changed between steps


@BOTH
@pytest.mark.parametrize("new", [0.0, -0.0, float("inf"), float("-inf"), float("nan"), 3.0])
@EACH_WAY
def test_a_weight_that_has_been_changed(way, new, fused):
    """It is what it was set to, but for at most half a unit in the last place."""
    generator = torch.Generator().manual_seed(2)
    start = torch.randn(5000, generator=generator).to(BF16)
    param, optimizer = sgd(start, way, lr=2**-9, fused=fused)
    for _ in range(3):
        step(optimizer, start)
    with torch.no_grad():
        param.fill_(new)
    step(optimizer, torch.zeros_like(param))
    if way is KAHAN and abs(new) == 0:  # the old rounding error is left
        assert param.abs().max() < start.abs().max() * 2**-8
    else:
        assert torch.equal(param.isnan(), torch.full_like(param, new).isnan())
        torch.testing.assert_close(
            param.detach(), torch.full_like(param, new), rtol=2**-8, atol=0, equal_nan=True
        )


# Dictionaries


@BOTH
@EACH_WAY
@pytest.mark.parametrize("case", KINDS, ids=str)
def test_a_checkpoint_goes_on_with_the_same_bits(case, way, fused):
    _, whole = run(case, SHAPES, BF16, 6, fused=fused, **way)
    params, optimizer = run(case, SHAPES, BF16, 3, fused=fused, **way)
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    resumed_params = as_parameters(params)
    resumed = case.build(resumed_params, fused=fused)
    resumed.load_state_dict(torch.load(file, weights_only=True))
    train(resumed, resumed_params, range(4, 7))
    assert_same_contents(contents(resumed), contents(whole))
    copied = copy.deepcopy(optimizer)
    train(copied, copied.param_groups[0]["params"], range(4, 7))
    assert_same_contents(contents(copied), contents(whole))


@pytest.mark.parametrize(
    ("case", "before", "after", "fused"),
    thinned(
        KINDS,
        [{}, {"master_weights": "float32"}, *WAYS],
        [{"master_weights": "float32"}, *WAYS],
        [True, False],
    ),
    ids=str,
)
def test_another_way_in_mid_run(case, before, after, fused):
    """The value goes over, and nothing of the former way is left."""
    params, optimizer = run(case, SHAPES, BF16, 3, fused=fused, **before)
    group = optimizer.param_groups[0]
    for name in ("master_weights", "rounding", "seed"):
        group.pop(name, None)
    group.update(after)
    restarted = case.build(as_parameters(params), fused=fused, **after)
    restarted.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for each in (optimizer, restarted):
        train(each, each.param_groups[0]["params"], [4, 5])
    if case.counts or after is not STOCHASTIC:  # other counts begin with random numbers
        assert_same_contents(contents(restarted), contents(optimizer))
    for param in params:
        kept = {"split": "low_param", "float32": "master_param", "kahan": "compensation"}
        way = after.get("master_weights") or after["rounding"]
        expected = {kept[way]} if way in kept else set()
        assert optimizer.state[param].keys() & set(BESIDE) == expected


def test_a_float32_copy_becomes_split_and_whole_again():
    case = PLAIN[0]
    params, optimizer = run(case, SHAPES, BF16, 6, master_weights="float32")
    others, other = run(case, SHAPES, BF16, 2, master_weights="float32")
    other.param_groups[0]["master_weights"] = "split"
    train(other, others, [3, 4])
    other.param_groups[0]["master_weights"] = True
    train(other, others, [5, 6])
    for param, twin in zip(params, others, strict=True):
        found, expected = (
            o.state[p]["master_param"] for o, p in ((other, twin), (optimizer, param))
        )
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (
            torch.zeros(33, 31),
            "low_param of parameter 0 of group 0 must be int16, not torch.float32",
        ),
        (torch.zeros(3, dtype=torch.int16), r"low_param of .* has the shape \[3\]"),
    ],
    ids=["dtype", "shape"],
)
def test_a_dictionary_with_other_lower_bits(value, text):
    _, optimizer = run(PLAIN[0], SHAPES, BF16, 2, **SPLIT)
    dictionary = copy.deepcopy(optimizer.state_dict())
    dictionary["state"][0]["low_param"] = value
    before = contents(optimizer)
    with pytest.raises(ValueError, match=text):
        optimizer.load_state_dict(dictionary)
    assert_same_contents(contents(optimizer), before)


# Beside other options


@pytest.mark.parametrize("options", [{"max_norm": 0.5}, {"zero_grad": True}], ids=str)
@EACH_WAY
@pytest.mark.parametrize("case", PLAIN, ids=str)
def test_clipping_and_clearing(case, way, options):
    found = []
    for fused in (True, False):
        params, optimizer = run(case, SHAPES, BF16, 3, fused=fused, **way)
        gradients = make_gradients(SHAPES, BF16, 4)
        for param, gradient in zip(params, gradients, strict=True):
            param.grad = gradient
        optimizer.step(**options)
        found.append({k: v for k, v in contents(optimizer).items() if k.split()[0] in case.states})
        if "zero_grad" in options:
            assert not any(param.grad.any() for param in params)
    assert_contents_close(*found, rtol=0.02, atol=0.02)


@EACH_WAY
@pytest.mark.parametrize("case", PLAIN, ids=str)
def test_verify(case, way):
    params, optimizer = run(case, SHAPES, BF16, 3, **way)

    def closure():
        gradients = make_gradients(SHAPES, BF16, 4)
        for param, gradient in zip(params, gradients, strict=True):
            param.grad = gradient
        return torch.zeros(())

    report = fusedstep.verify(optimizer, closure, steps=2)
    assert report.ok, report
    assert not report.rows[0].ulp.keys() & {"low_param", "compensation"}


@EACH_WAY
@pytest.mark.parametrize("case", first_of_each(lambda case: case.elementwise, PLAIN), ids=str)
def test_a_compiled_step(case, way):
    torch._dynamo.reset()
    optimizers = [run(case, SHAPES, BF16, 3, **way)[1] for _ in range(2)]
    compiled = torch.compile(optimizers[0].step, fullgraph=way is not STOCHASTIC)
    for optimizer, take in zip(optimizers, (compiled, optimizers[1].step), strict=True):
        params = optimizer.param_groups[0]["params"]
        for param, gradient in zip(params, make_gradients(SHAPES, BF16, 4), strict=True):
            param.grad = gradient
        take()
    assert_same_contents(*map(contents, optimizers))


@BOTH
@EACH_WAY
@pytest.mark.parametrize("case", PLAIN, ids=str)
def test_wider_weights_of_the_group_are_as_ever(case, way, fused):
    shape = (300, 7)
    dtypes = (torch.float32, BF16, torch.float64)
    params = [torch.nn.Parameter(make_weights([shape], dtype)[0]) for dtype in dtypes]
    twins = as_parameters(params)
    optimizers = case.build(params, fused=fused, **way), case.build(twins, fused=fused)
    for number in (1, 2):
        for optimizer in optimizers:
            step(optimizer, *[make_gradients([shape], dtype, number)[0] for dtype in dtypes])
    for index in (0, 2):
        assert_same_bits(params[index], twins[index], "weight")
        kept = [o.state[p[index]].keys() for o, p in zip(optimizers, (params, twins), strict=True)]
        assert kept[0] == kept[1]


# Refusals


@pytest.mark.parametrize("case", FAMILIES, ids=str)
@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"master_weights": "halves"}, "master_weights must be a bool, 'float32' or 'split'"),
        ({"rounding": "nearest"}, "rounding must be None, 'stochastic' or 'kahan'"),
        ({"rounding": True}, "rounding must be None, 'stochastic' or 'kahan'"),
        ({"rounding": "kahan", "master_weights": True}, "exclude each other"),
        ({"seed": -1}, "seed must be an int from 0"),
        ({"seed": 0.5}, "seed must be an int from 0"),
        ({"seed": 2**63}, "seed must be an int from 0"),
    ],
    ids=str,
)
def test_options_out_of_range(case, options, text):
    params = [torch.nn.Parameter(torch.zeros(3, dtype=BF16))]
    with pytest.raises(ValueError, match=text):
        case.optimizer(params, lr=0.1, **options)
    optimizer = case.optimizer(params, lr=0.1)
    with pytest.raises(ValueError, match=text):
        optimizer.add_param_group({"params": [torch.zeros(3, dtype=BF16)], **options})
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize("way", [SPLIT, STOCHASTIC], ids=str)
@BOTH
def test_float16_weights_are_refused_where_they_cannot_be(way, fused):
    name, value = next(iter(way.items()))
    with pytest.raises(RuntimeError, match=f"{name}='{value}' takes bfloat16 weights, but one is"):
        sgd(torch.zeros(3, dtype=torch.float16), way, fused=fused)


@EACH_WAY
def test_sparse_gradients_are_refused(way):
    param, optimizer = sgd(torch.ones(50, 8, dtype=BF16), way)
    param.grad = torch.sparse_coo_tensor([[3]], torch.ones(1, 8, dtype=BF16), (50, 8))
    name, value = next(iter(way.items()))
    with pytest.raises(RuntimeError, match=f"sparse, but .* by {name}='{value}'"):
        optimizer.step()
    assert param.eq(1).all()


@EACH_WAY
def test_differentiable_steps_are_refused(way):
    name, value = next(iter(way.items()))
    with pytest.raises(RuntimeError, match=f"{name}='{value}' does not support `differentiable`"):
        optim.SGD([torch.zeros(3, dtype=BF16)], differentiable=True, **way)


@pytest.mark.parametrize(
    ("weight", "beside", "text"),
    [
        (torch.float16, torch.int16, "takes bfloat16 weights, but one is float16"),
        (torch.float32, torch.int16, "takes bfloat16 weights, but one is float32"),
        (torch.float32, torch.float32, "a master copy takes a weight of 16 bits"),
    ],
    ids=str,
)
def test_plans_refuse_what_cannot_be(weight, beside, text):
    param = torch.zeros(3, dtype=weight)
    states, steps = [torch.zeros(3, dtype=beside)], [torch.zeros(())]
    plan = torch.ops.fusedstep.plan_new([param], states, steps, True)
    with pytest.raises(RuntimeError, match=text):
        torch.ops.fusedstep.plan_bind(plan, [param], [param.clone()])
    torch.ops.fusedstep.plan_delete(plan)


def test_lower_bits_are_no_state_of_a_rule():
    param = torch.zeros(3, dtype=BF16)
    states = [torch.zeros(3, dtype=torch.int16)]
    plan = torch.ops.fusedstep.plan_new([param], states, [torch.zeros(())])
    with pytest.raises(RuntimeError, match="a state is int16 but the weight is bfloat16"):
        torch.ops.fusedstep.plan_bind(plan, [param], [param.clone()])
    torch.ops.fusedstep.plan_delete(plan)


def test_a_plan_takes_a_place_for_each_weight():
    param = torch.zeros(3, dtype=BF16)
    plan = torch.ops.fusedstep.plan_new([param], [], [torch.zeros(())])
    with pytest.raises(RuntimeError, match="a place for each weight"):
        torch.ops.fusedstep.plan_round_at_random(plan, 0, [0, 1])
    torch.ops.fusedstep.plan_delete(plan)
