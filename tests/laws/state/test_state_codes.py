"""States in codes of 8 and 4 bits: ``state_dtype="int8"``, ``"int4"`` and ``"fp8"``."""

import copy
import io
import itertools
import math
import pickle

import pytest
import torch

import fusedstep
from fusedstep import optim
from fusedstep._api import registry
from fusedstep._state.codes import storage_index
from fusedstep.optim import low_bit
from reference.codes import MAPS, NOT_NEGATIVE, nearest, rounds_by_step, values
from support.cases import CASES, KINDS, LOW_PRECISION, PLAIN, dealt, thinned
from support.layouts import GRADIENT_LAYOUTS, WEIGHT_LAYOUTS, Placed
from support.stepping import (
    CHUNK,
    TEAM,
    as_parameters,
    assert_same_bits,
    assert_same_contents,
    contents,
    forced_isa,
    make_gradients,
    make_weights,
    threads,
    train,
)

KINDS_OF_CODES = ("int8", "int4", "fp8")
DTYPES = (torch.float32, *LOW_PRECISION)
CODED = pytest.mark.parametrize("kind", KINDS_OF_CODES)
WITH_STATES = [case for case in KINDS if case.states]

#: Ends within a block, a chunk and a byte; one tensor too small for codes.
SHAPES = ((65, 67), (7,), (2 * CHUNK + 5,), (4096,))


def is_signed(name):
    return name not in NOT_NEGATIVE


def is_coded(value):
    return value.dtype in (torch.uint8, torch.float8_e4m3fn)


def start(case, kind, dtype=torch.float32, steps=3, shapes=SHAPES, **overrides):
    params = as_parameters(make_weights(shapes, dtype))
    optimizer = case.build(params, state_dtype=kind, **overrides)
    train(optimizer, params, range(1, steps + 1))
    return params, optimizer


def decoded(optimizer, param, name, kind):
    """A state as float64 numbers, by the reference."""
    state = optimizer.state[param]
    if not is_coded(state[name]):
        return state[name].double()
    return values(state[name], state[f"{name}_absmax"], kind, is_signed(name), param.shape)


def encode(numbers, kind, name, step=0):
    return torch.ops.fusedstep.encode_state(
        numbers.contiguous(), storage_index(kind), is_signed(name), step
    )


# The codes

#: The smallest codes, which numbers of one sign get although zero may be nearer: negative ones in
#: the signed map of int8, positive ones in the unsigned maps.
NO_ZERO = {("int8", True): 0.55e-6, ("int8", False): 3.3e-7, ("fp8", False): 4.4e-6}


@pytest.mark.parametrize("isa", fusedstep.isas())
@pytest.mark.parametrize(("kind", "signed"), MAPS)
def test_a_number_gets_the_nearest_code(kind, signed, isa):
    torch.manual_seed(0)
    numbers = torch.randn(5003) * torch.logspace(-9, 0, 5003)
    numbers[256:768] = 0
    numbers = numbers if signed else numbers.abs()
    with forced_isa(isa):
        codes, absmax = torch.ops.fusedstep.encode_state(numbers, storage_index(kind), signed)
        found = torch.ops.fusedstep.decode_state(codes, absmax, numbers.shape, signed)
    distance, largest = nearest(numbers, kind, signed)
    assert_same_bits(absmax, largest.float(), "absmax")
    reference = values(codes, absmax, kind, signed, numbers.shape)
    torch.testing.assert_close(found.double(), reference, rtol=1e-6, atol=0)
    scale = largest.repeat_interleave(MAPS[kind, signed][1])[: len(numbers)]
    smallest = scale * NO_ZERO.get((kind, signed), 0)
    assert torch.all((reference - numbers).abs() <= distance + smallest + 1e-6 * scale)
    assert torch.all(found[256:768] == 0)


@pytest.mark.parametrize(("kind", "signed"), [of for of in MAPS if of[0] != "int4"])
def test_every_code_is_that_of_its_value(kind, signed):
    codes = torch.arange(256, dtype=torch.uint8)
    if kind == "fp8":
        codes = codes[((codes & 127) != 127) & (signed | (codes < 128))].view(torch.float8_e4m3fn)
    absmax = torch.ones(1)
    found = torch.ops.fusedstep.decode_state(codes, absmax, codes.shape, signed)
    expected = values(codes, absmax, kind, signed, codes.shape)
    torch.testing.assert_close(found.double(), expected, rtol=5e-7, atol=0)
    again, _ = torch.ops.fusedstep.encode_state(found, storage_index(kind), signed)
    zero = {"int8": 127 if signed else 0, "fp8": 128}[kind]  # minus zero of fp8 becomes zero
    same = (again.view(torch.uint8) == codes.view(torch.uint8)) | (codes.view(torch.uint8) == zero)
    assert torch.all(same)


@pytest.mark.parametrize("isa", fusedstep.isas())
def test_a_negative_number_does_not_become_zero_in_int8(isa):
    numbers = torch.tensor([1.0, -1e-9, 1e-9, -0.0, 0.0] * 20)
    with forced_isa(isa):
        codes, absmax = torch.ops.fusedstep.encode_state(numbers, storage_index("int8"), True)
    found = values(codes, absmax, "int8", True, numbers.shape).view(20, 5)
    assert torch.all(found[:, 1] < 0)
    assert torch.all(found[:, 1] > -1e-6)
    assert torch.all(found[:, 2:] == 0)


def test_fp8_is_rounded_as_torch_rounds_it():
    torch.manual_seed(0)
    numbers = torch.randn(400, 256)
    codes, absmax = torch.ops.fusedstep.encode_state(numbers.flatten(), storage_index("fp8"), True)
    shares = (numbers * (1 / (absmax[:, None] / 448))).flatten()
    expected = shares.to(torch.float8_e4m3fn)
    # Near the middle between two codes either is right.
    distances = [(each.float() - shares).abs() for each in (codes, expected)]
    torch.testing.assert_close(*distances, rtol=1e-5, atol=0)


# Steps


@CODED
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_step_is_that_of_float32_states(case, dtype, kind):
    """From the numbers that the codes stand for, and its new states are rounded to codes."""
    params, optimizer = start(case, kind, dtype, steps=2)
    twins = as_parameters(params)
    twin = case.build(twins, state_dtype=torch.float32)
    train(twin, twins, [1])
    with torch.no_grad():
        for param, other in zip(params, twins, strict=True):
            other.copy_(param)
            for name, value in twin.state[other].items():
                if name not in case.states:
                    value.copy_(optimizer.state[param][name])
                    continue
                state = optimizer.state[param]
                is_small = param.numel() < 4096
                assert is_coded(state[name]) != is_small
                value.copy_(
                    state[name]
                    if is_small
                    else torch.ops.fusedstep.decode_state(
                        state[name], state[f"{name}_absmax"], param.shape, is_signed(name)
                    )
                )
    if not case.counts:  # an optimizer that counts for itself has to count as far
        twin._store._counts.update(
            {q: optimizer._store._counts[p].clone() for p, q in zip(params, twins, strict=True)}
        )
    train(optimizer, params, [3])
    train(twin, twins, [3])
    for param, other in zip(params, twins, strict=True):
        if case.elementwise:
            assert_same_bits(param, other, "weight")
        else:
            torch.testing.assert_close(param, other)
        for name in case.states:
            new = twin.state[other][name]
            if param.numel() < 4096:
                assert_same_bits(optimizer.state[param][name], new, name)
                continue
            step = 3 if case.counts and rounds_by_step(case.states) else 0
            codes, absmax = encode(new, kind, name, step)
            assert_same_bits(optimizer.state[param][name], codes, name)
            assert_same_bits(optimizer.state[param][f"{name}_absmax"], absmax, f"{name}_absmax")


@pytest.mark.parametrize(
    ("case", "dtype", "kind"),
    [
        *itertools.product(WITH_STATES, (torch.float32, torch.bfloat16), KINDS_OF_CODES),
        *((case, torch.float16, kind) for case, kind in dealt(WITH_STATES, KINDS_OF_CODES, 3)),
    ],
    ids=str,
)
def test_same_bits_for_every_isa_and_thread_count(case, dtype, kind):
    shapes = (*SHAPES, (TEAM + CHUNK + 3,))

    def found():
        return contents(start(case, kind, dtype, shapes=shapes)[1])

    with forced_isa("base"), threads(1):
        expected = found()
    for isa in fusedstep.isas():
        for count in (1, 3):
            with forced_isa(isa), threads(count):
                assert_same_contents(found(), expected)


@pytest.mark.parametrize(
    ("case", "kind", "dtype", "layout", "of_gradient"),
    [
        (case, kind, dtype, *layouts)
        for rows, kind, dtype in (
            ([case for case in PLAIN if case.states], "int8", torch.float32),
            (PLAIN[:2], "int4", torch.bfloat16),
            (PLAIN[:2], "fp8", torch.float16),
        )
        for case, layouts in dealt(rows, itertools.product(WEIGHT_LAYOUTS, GRADIENT_LAYOUTS), 8)
    ],
    ids=str,
)
def test_any_layout(case, kind, dtype, layout, of_gradient):
    """Blocks follow the weight by rows and columns, so that its layout changes no bit."""
    (weight,) = make_weights([layout.shape], dtype)
    gradients = [make_gradients([layout.shape], dtype, step)[0] for step in (1, 2)]
    strides = GRADIENT_LAYOUTS[of_gradient](layout)
    placed = Placed(weight, layout.strides, layout.offset)
    plain, strided = torch.nn.Parameter(weight.clone()), torch.nn.Parameter(placed.view)
    optimizers = [case.build([p], state_dtype=kind) for p in (plain, strided)]
    for values_of in gradients:
        for dim, stride in enumerate(strides):
            if stride == 0 and values_of.shape[dim] > 0:
                values_of = values_of.narrow(dim, 0, 1).expand(layout.shape)
        at = Placed(values_of, strides)
        plain.grad, strided.grad = values_of.contiguous(), at.view
        for optimizer in optimizers:
            optimizer.step()
        at.assert_outside_untouched("gradient")
    placed.assert_outside_untouched("weight")
    if case.elementwise:
        assert_same_contents(contents(optimizers[1]), contents(optimizers[0]))
    else:
        torch.testing.assert_close(strided, plain)


@CODED
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", [c for c in KINDS if c.continuous], ids=str)
def test_torch_operations_do_the_same(case, dtype, kind):
    """The states are those of the native step but for codes whose numbers lie between two."""
    (params, optimizer), (others, twin) = (
        start(case, kind, dtype, steps=1, fused=fused) for fused in (True, False)
    )
    for param, other in zip(params, others, strict=True):
        torch.testing.assert_close(param, other)
        for name in case.states:
            found, expected = (
                decoded(*of, name, kind) for of in ((optimizer, param), (twin, other))
            )
            difference, largest = (found - expected).abs(), found.abs().amax()
            step = {"int8": 0.015, "int4": 0.25, "fp8": 0.07}[kind]
            assert torch.all(difference <= step * largest + 1e-6)
            if dtype is torch.float32:
                assert (difference > 1e-5 * largest).double().mean() < 0.01


@CODED
@pytest.mark.parametrize("case", WITH_STATES, ids=str)
def test_master_weights_beside_codes(case, kind):
    params, optimizer = start(case, kind, torch.bfloat16, master_weights=True)
    for param in params:
        master = optimizer.state[param]["master_param"]
        assert master.dtype is torch.float32
        assert_same_bits(param, master.to(torch.bfloat16), "weight")
        for name in case.states:
            assert is_coded(optimizer.state[param][name]) == (param.numel() >= 4096)


@CODED
@pytest.mark.parametrize("case", WITH_STATES, ids=str)
def test_float64_and_small_weights_have_no_codes(case, kind):
    _, optimizer = start(case, kind, torch.float64)
    _, plain = start(case, None, torch.float64)
    assert_same_contents(contents(optimizer), contents(plain))
    params, optimizer = start(case, kind, shapes=((63, 65), (4095,)))
    assert not any(is_coded(v) for p in params for v in optimizer.state[p].values())


@CODED
@pytest.mark.parametrize("case", WITH_STATES, ids=str)
def test_clipped_scaled_and_cleared_gradients(case, kind):
    params, optimizer = start(case, kind, steps=2)
    others, other = start(case, kind, steps=2)
    for each in (params, others):
        for param, gradient in zip(each, make_gradients(SHAPES, torch.float32, 3), strict=True):
            param.grad = gradient
    norm = torch.nn.utils.clip_grad_norm_(others, 0.5)
    other.step()
    torch.testing.assert_close(optimizer.step(max_norm=0.5, zero_grad=True).float(), norm)
    assert all(torch.all(param.grad == 0) for param in params)
    for param, expected in zip(params, others, strict=True):
        torch.testing.assert_close(param, expected)


@CODED
@pytest.mark.parametrize("case", WITH_STATES, ids=str)
def test_a_scaler_divides_and_skips(case, kind):
    params, optimizer = start(case, kind, steps=1, fused=True)
    others, other = start(case, kind, steps=1, fused=True)
    before = contents(optimizer)
    optimizer.grad_scale = torch.tensor(4.0)
    for found_inf in (1.0, 0.0):
        optimizer.found_inf = torch.tensor(found_inf)
        gradients = make_gradients(SHAPES, torch.float32, 2)
        for param, gradient in zip(params, gradients, strict=True):
            param.grad = 4 * gradient
        optimizer.step()
        if found_inf:
            assert_same_contents(contents(optimizer), before)
    train(other, others, [2])
    assert_same_contents(contents(optimizer), contents(other))


@CODED
@pytest.mark.parametrize("case", [c for c in WITH_STATES if c.elementwise], ids=str)
def test_blocks_do_not_depend_on_the_block_before(case, kind):
    """Zeros, small and large numbers, one that is infinite, and a block that is not whole."""
    block = MAPS[kind, True][1]
    scales = (0, 1, 1e-6, math.inf, 1, 0, 0, math.inf, 1e6)
    for rest in (0, 1, block // 2, block - 1):
        shape = (len(scales) * 4 * block + rest,)

        def found(shape=shape):
            (param,) = params = as_parameters(make_weights([shape], torch.float32))
            optimizer = case.build(params, state_dtype=kind)
            for step in (1, 2):
                (param.grad,) = make_gradients([shape], torch.float32, step)
                for i, part in enumerate(param.grad.split(block)):
                    scale = scales[i % len(scales)]
                    if math.isinf(scale):
                        part[i % len(part)] = scale if step == 2 else 0
                    else:
                        part.mul_(scale)
                optimizer.step()
            return contents(optimizer)

        with forced_isa("base"), threads(1):
            expected = found()
        for isa in fusedstep.isas():
            with forced_isa(isa), threads(1):
                assert_same_contents(found(), expected, f"{isa}, {rest}:")


@CODED
@pytest.mark.parametrize("bad", [float("nan"), -float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("case", [c for c in WITH_STATES if c.elementwise], ids=str)
def test_a_number_that_is_none_damages_its_block_only(case, bad, kind):
    params, optimizer = start(case, kind, steps=2, shapes=((2 * CHUNK,),))
    others, other = start(case, kind, steps=2, shapes=((2 * CHUNK,),))
    at, block = CHUNK + 300, MAPS[kind, True][1]
    damaged = torch.arange(2 * CHUNK) // block == at // block
    for step in (3, 4):
        (gradient,) = make_gradients([(2 * CHUNK,)], torch.float32, step)
        others[0].grad = gradient.clone()
        if step == 3:
            gradient[at] = bad
        params[0].grad = gradient
        optimizer.step()
        other.step()
        # The sign of NaN is 0: only NaN itself is sure to be kept.
        signs = case.states[:1] if math.isnan(bad) else ()
        for name in (case.states if case.continuous else signs) if step == 3 else ():
            if name in case.bounded and math.isinf(bad):
                continue
            assert not decoded(optimizer, params[0], name, kind)[damaged].isfinite().any()
    assert_same_bits(params[0][~damaged], others[0][~damaged], "weight")
    for name in case.states:
        found, expected = (
            decoded(optimizer, params[0], name, kind),
            decoded(other, others[0], name, kind),
        )
        assert torch.equal(found[~damaged], expected[~damaged])


@CODED
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("case", [c for c in WITH_STATES if not c.elementwise], ids=str)
def test_a_number_that_is_none_damages_one_weight_where_there_are_norms(case, bad, kind):
    """Its states in one block, all of the weight through its norm, and no other weight."""
    shapes = ((2 * CHUNK,), (2 * CHUNK,))
    params, optimizer = start(case, kind, steps=2, shapes=shapes)
    others, other = start(case, kind, steps=2, shapes=shapes)
    at, block = CHUNK + 300, MAPS[kind, True][1]
    damaged = torch.arange(2 * CHUNK) // block == at // block
    for each, its in ((others, other), (params, optimizer)):
        for param, gradient in zip(each, make_gradients(shapes, torch.float32, 3), strict=True):
            param.grad = gradient
        if its is optimizer:
            each[0].grad[at] = bad
        its.step()
    for name in case.states:
        found, expected = (
            decoded(of, each[0], name, kind) for of, each in ((optimizer, params), (other, others))
        )
        assert not found[damaged].isfinite().any()
        assert torch.equal(found[~damaged], expected[~damaged])
    assert params[0].isnan().all()
    assert_same_bits(params[1], others[1], "weight")
    for name, value in other.state[others[1]].items():
        assert_same_bits(optimizer.state[params[1]][name], value, name)


def test_a_sparse_gradient_is_refused():
    table = torch.nn.Parameter(torch.ones(600, 8))
    optimizer = optim.Adagrad([table], state_dtype="int8", fused=True)
    table.grad = torch.sparse_coo_tensor([[1, 3]], torch.ones(2, 8), (600, 8))
    with pytest.raises(RuntimeError, match=r"sparse, but a state is quantised.*state_dtype"):
        optimizer.step()
    assert torch.all(table == 1)


@CODED
def test_groups_of_their_own(kind):
    """An embedding may keep float32 states, as recipes ask for."""
    table, matrix = as_parameters(make_weights(((100, 50), (64, 64)), torch.float32))
    groups = [{"params": [table], "state_dtype": None}, {"params": [matrix]}]
    optimizer = optim.AdamW(groups, state_dtype=kind)
    train(optimizer, [table, matrix], [1, 2])
    assert optimizer.state[table]["exp_avg"].dtype is torch.float32
    assert is_coded(optimizer.state[matrix]["exp_avg"])


@pytest.mark.parametrize(
    ("case", "kind"), dealt([c for c in PLAIN if c.states], KINDS_OF_CODES, 3), ids=str
)
def test_a_compiled_step_has_the_same_bits(case, kind):
    torch._dynamo.reset()
    params, optimizer = start(case, kind, steps=1)
    others, other = start(case, kind, steps=1)
    step = torch.compile(lambda: other.step(), backend="eager")
    for number in (2, 3, 4):
        if number == 4:  # what the graph was made for changes
            optimizer.param_groups[0]["state_dtype"] = other.param_groups[0]["state_dtype"] = None
        train(optimizer, params, [number])
        for param, gradient in zip(
            others, make_gradients(SHAPES, torch.float32, number), strict=True
        ):
            param.grad = gradient
        step()
        assert_same_contents(contents(other), contents(optimizer))


@CODED
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", [c for c in WITH_STATES if c.continuous], ids=str)
def test_verify_starts_from_what_codes_stand_for(case, dtype, kind):
    params, optimizer = start(case, kind, dtype)
    report = fusedstep.verify(optimizer, steps=2)
    train(optimizer, params, [4, 5])
    assert report.ok, report
    assert {what for row in report.rows for what in row.ulp} >= {"weight"}


@CODED
@pytest.mark.parametrize("case", [c for c in WITH_STATES if c.continuous], ids=str)
def test_verify_begins_before_there_are_states(case, kind):
    params, optimizer = start(case, kind, steps=0)
    report = fusedstep.verify(optimizer, steps=2)
    train(optimizer, params, [1, 2])
    assert report.ok, report


# Names of other libraries

#: GaLoreAdamW's has more of its own: tests/laws/composite/test_galore.py.
NAMES = {name for name in vars(low_bit) if name[-3:] in ("bit", "Fp8")} - {"GaLoreAdamW8bit"}


@pytest.mark.parametrize("name", sorted(NAMES))
def test_a_name_is_the_class_with_its_option(name):
    cls, base = getattr(optim, name), getattr(low_bit, name).__mro__[1]
    kind = {"8bit": "int8", "4bit": "int4"}.get(name[-4:], "fp8")
    options = {"momentum": 0.9} if base is optim.SGD else {}
    found = []
    for make, more in ((cls, {"fused": True, "foreach": True}), (base, {"state_dtype": kind})):
        params = as_parameters(make_weights(SHAPES, torch.float32))
        optimizer = make(params, lr=1e-3, **options, **more)
        train(optimizer, params, [1, 2])
        found.append(contents(optimizer))
    assert_same_contents(*found)
    # torch.save() takes float8 tensors, plain pickle does not.
    again = copy.deepcopy(optimizer) if kind == "fp8" else pickle.loads(pickle.dumps(optimizer))
    assert again.param_groups[0]["state_dtype"] == kind
    assert issubclass(cls, base)
    assert cls.__name__ == name
    assert cls not in registry.classes


# Dictionaries


@pytest.mark.parametrize(
    ("case", "dtype", "kind", "fused"),
    thinned(WITH_STATES, [torch.float32, torch.bfloat16], KINDS_OF_CODES, [True, False]),
    ids=str,
)
def test_saved_and_loaded_in_mid_run(case, dtype, kind, fused):
    _, whole = start(case, kind, dtype, steps=6, fused=fused)
    params, optimizer = start(case, kind, dtype, steps=3, fused=fused)
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    resumed_params = as_parameters(params)
    resumed = case.build(resumed_params, state_dtype=kind, fused=fused)
    resumed.load_state_dict(saved)
    train(resumed, resumed_params, range(4, 7))
    assert_same_contents(contents(resumed), contents(whole))


@CODED
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", WITH_STATES, ids=str)
def test_float32_states_become_codes_and_back(case, dtype, kind):
    params, optimizer = start(case, torch.float32, dtype)
    dictionary = optimizer.state_dict()
    before = {
        (param, name): optimizer.state[param][name].clone()
        for param in params
        for name in case.states
    }
    dictionary["param_groups"][0]["state_dtype"] = kind
    optimizer.load_state_dict(dictionary)
    for param in params:
        for name in case.states if param.numel() >= 4096 else ():
            codes, absmax = encode(before[param, name], kind, name)
            assert_same_bits(optimizer.state[param][name], codes, name)
            assert_same_bits(optimizer.state[param][f"{name}_absmax"], absmax, name)
    train(optimizer, params, [4])
    expected = {(p, n): decoded(optimizer, p, n, kind) for p in params for n in case.states}
    dictionary = optimizer.state_dict()
    dictionary["param_groups"][0]["state_dtype"] = torch.float32
    optimizer.load_state_dict(dictionary)
    for (param, name), numbers in expected.items():
        found = optimizer.state[param][name]
        assert found.dtype is torch.float32
        assert f"{name}_absmax" not in optimizer.state[param]
        torch.testing.assert_close(found.double(), numbers, rtol=1e-6, atol=0)
    train(optimizer, params, [5])


CHANGES = ((None, "int8"), ("int8", None), ("int8", "int4"), ("fp8", torch.float32))


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize(("before", "after"), CHANGES, ids=str)
@pytest.mark.parametrize("case", [c for c in PLAIN if c.states], ids=str)
def test_a_group_that_asks_for_other_states(case, before, after, fused):
    """The next step converts them, as loading a dictionary with this option does."""
    params, optimizer = start(case, before, fused=fused)
    others, other = start(case, before, fused=fused)
    dictionary = other.state_dict()
    dictionary["param_groups"][0]["state_dtype"] = after
    other.load_state_dict(dictionary)
    optimizer.param_groups[0]["state_dtype"] = after
    for each, weights in ((optimizer, params), (other, others)):
        train(each, weights, [4, 5])
    assert_same_contents(contents(optimizer), contents(other))
    now = contents(optimizer)
    optimizer.param_groups[0]["state_dtype"] = "int9"
    with pytest.raises(ValueError, match="state_dtype must be None"):
        train(optimizer, params, [6])
    assert_same_contents(contents(optimizer), now)


@CODED
@pytest.mark.parametrize("case", WITH_STATES, ids=str)
def test_a_plain_dictionary_becomes_codes(case, kind):
    """The optimizer's own option holds for a dictionary without one."""
    _, plain = start(case, None)
    params = as_parameters(make_weights(SHAPES, torch.float32))
    optimizer = case.build(params, state_dtype=kind)
    optimizer.load_state_dict(plain.state_dict())
    assert is_coded(optimizer.state[params[0]][case.states[0]])
    train(optimizer, params, [4])


@CODED
@pytest.mark.parametrize("fused", [True, False])
def test_absmax_and_packed_codes_have_rows(kind, fused):
    """So that they can be cut with the weight; they are flat where a row is no multiple."""
    block = 128 if kind == "int4" else 256
    shapes = ((16, 2, 256), (64, 80), (71, 67), (4096,))
    blocks = ((16, 512 // block), (5120 // block,), (-(-71 * 67 // block),), (4096 // block,))
    packed = ((16, 256), (64, 40), (-(-71 * 67 // 2),), (2048,))
    params = as_parameters(make_weights(shapes, torch.float32))
    optimizer = optim.AdamW(params, lr=0.1, state_dtype=kind, fused=fused)
    train(optimizer, params, (1, 2))
    flat = copy.deepcopy(optimizer.state_dict())
    for param, index, rows, halves in zip(params, range(4), blocks, packed, strict=True):
        for name in ("exp_avg", "exp_avg_sq"):
            state = optimizer.state[param]
            assert state[name].shape == (halves if kind == "int4" else param.shape)
            assert state[f"{name}_absmax"].shape == rows
            for each in (name, f"{name}_absmax"):
                if each != name or kind == "int4":
                    flat["state"][index][each] = state[each].flatten()
    before = contents(optimizer)
    optimizer.load_state_dict(flat)
    assert_same_contents(contents(optimizer), before)


@CODED
@pytest.mark.parametrize("case", [c for c in PLAIN if c.states], ids=str)
def test_truncated_dictionaries_are_refused(case, kind):
    params, optimizer = start(case, kind)
    before = contents(optimizer)
    name = case.states[0]

    def broken(change):
        dictionary = copy.deepcopy(optimizer.state_dict())
        change(dictionary["state"][0])
        return dictionary

    def cut_codes(state):
        state[name] = state[name].flatten()[:-1]

    def cut_absmax(state):
        state[f"{name}_absmax"] = state[f"{name}_absmax"][:-1]

    def drop_absmax(state):
        del state[f"{name}_absmax"]

    for change, text in (
        (cut_codes, f"{name} of parameter 0 of group 0 has codes of the shape"),
        (cut_absmax, f"{name} of parameter 0 of group 0_absmax has|absmax.* has .* numbers"),
        (drop_absmax, "absmax.* must be a dense tensor"),
    ):
        with pytest.raises(ValueError, match=text):
            optimizer.load_state_dict(broken(change))
        assert_same_contents(contents(optimizer), before)
    train(optimizer, params, [4])


@pytest.mark.parametrize("value", ["int16", "float32", "true", 8, True])
@pytest.mark.parametrize("case", PLAIN, ids=str)
def test_other_values_are_refused(case, value):
    params = as_parameters(make_weights(SHAPES, torch.float32))
    with pytest.raises(ValueError, match=r"state_dtype must be None, torch\.float32 or one of"):
        case.build(params, state_dtype=value)
    optimizer = case.build(params)
    dictionary = optimizer.state_dict()
    dictionary["param_groups"][0]["state_dtype"] = value
    with pytest.raises(ValueError, match="state_dtype must be None"):
        optimizer.load_state_dict(dictionary)


@pytest.mark.parametrize("case", PLAIN, ids=str)
def test_autograd_does_not_go_through_codes(case):
    params = as_parameters(make_weights(SHAPES, torch.float32))
    with pytest.raises(RuntimeError, match=r"state_dtype.* do not support `differentiable`"):
        case.build(params, state_dtype="int8", differentiable=True, fused=None)
