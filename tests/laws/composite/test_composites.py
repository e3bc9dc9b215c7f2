"""Laws that take no shape of a weight for granted, for the optimizers that have no row."""

import contextlib
import copy
import inspect
import pickle
import re
import threading
from typing import NamedTuple

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fusedstep import optim
from fusedstep._step.plan import Bucket
from support.cases import COMPOSITES, PRODUCTS, WITH_COUNTS, WITH_STATES
from support.composites import DENSE, MODES, ROWS, SHAPE, WITHOUT_PLAN, stepped, values_of
from support.negated import WAYS, negated, negated_at_once
from support.stepping import assert_same_bits, assert_same_contents, contents

pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks")


EACH = pytest.mark.parametrize("row", ROWS, ids=str)


def first_state(optimizer, param):
    return next(name for name in optimizer.state[param] if name != "step")


class Mode(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def test_every_composite_has_these_laws():
    assert {row.optimizer for row in ROWS} == COMPOSITES.keys()


@pytest.mark.parametrize(
    "option", [{"state_dtype": "int8"}, {"master_weights": True}, {"rounding": "kahan"}], ids=str
)
@EACH
def test_a_group_takes_the_storage_that_the_constructor_takes(row, option):
    (name,) = option
    param = torch.nn.Parameter(torch.ones(SHAPE, dtype=torch.bfloat16))
    group = {"params": [param]} | row.of_group | option
    if name in inspect.signature(row.optimizer).parameters:
        assert row.optimizer([group]).param_groups[0][name] == option[name]
        return
    with pytest.raises(ValueError, match=f"{row.optimizer.__name__} has no option '{name}'"):
        row.optimizer([group])
    optimizer = row.build([torch.nn.Parameter(torch.ones(SHAPE))])
    with pytest.raises(ValueError, match=f"has no option '{name}'"):
        optimizer.add_param_group(group)
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize("way", ["step", "under a mode", "compiled"])
@pytest.mark.parametrize("is_first", [True, False], ids=["first step", "later step"])
@pytest.mark.parametrize(
    ("row", "option"),
    [
        pytest.param(row, option, id=f"{row}-{option}")
        for row in ROWS
        for option in ({"state_dtype": "int8"}, {"master_weights": True})
        if not option.keys() & inspect.signature(row.optimizer).parameters
    ],
)
def test_storage_that_the_class_lacks_is_an_error_of_the_step(row, option, is_first, way):
    """The option may be set at any time: nothing has changed after the error."""
    (name,) = option
    (params, optimizer), (_, expected) = (
        stepped(row, steps=0 if is_first else 3) for _ in range(2)
    )
    step = optimizer.step
    if way == "compiled":
        step = torch.compile(optimizer.step, backend="eager")
    optimizer.param_groups[0].update(option)
    text, mode = f"{row.optimizer.__name__} has no option '{name}'", contextlib.nullcontext()
    with pytest.raises(ValueError, match=text), Mode() if way == "under a mode" else mode:
        step()
    assert_same_contents(contents(optimizer), contents(expected))
    with pytest.raises(ValueError, match=f"has no option '{name}'"):
        row.build(params).load_state_dict(optimizer.state_dict())
    del optimizer.param_groups[0][name]
    optimizer.step()
    expected.step()
    assert_same_contents(contents(optimizer), contents(expected))


@EACH
def test_none_for_a_closure(row):
    (_, expected), (_, optimizer) = stepped(row), stepped(row)
    expected.step()
    assert optimizer.step(None) is None
    assert_same_contents(contents(optimizer), contents(expected))


@MODES
@EACH
def test_max_norm_clips_and_is_returned(row, fused):
    (params, expected), (_, optimizer) = stepped(row, fused=fused), stepped(row, fused=fused)
    norm = (len(params) * values_of(2).double().square().sum()) ** 0.5
    for param in params:
        param.grad = row.grad(values_of(2) * (0.5 / (norm + 1e-6)).float())
    expected.step()
    found = optimizer.step(max_norm=0.5)
    assert found.dtype is torch.float64
    torch.testing.assert_close(found, norm, rtol=1e-6, atol=0)
    for name, value in contents(expected).items():
        torch.testing.assert_close(contents(optimizer)[name], value, rtol=1e-4, atol=1e-6, msg=name)
    assert optimizer.step(lambda: 7.0, max_norm=0.5) == 7.0


@MODES
@EACH
def test_the_norm_of_float16_gradients_may_be_beyond_their_range(row, fused):
    param = torch.nn.Parameter(torch.ones(SHAPE, dtype=torch.float16))
    optimizer = row.build([param], fused=fused, **{row.rate: 0.1})
    param.grad = row.grad(torch.full(SHAPE, 1e4, dtype=torch.float16))
    norm = optimizer.step(max_norm=0.5)
    assert norm.item() == pytest.approx(1e4 * param.numel() ** 0.5, rel=1e-12)
    assert param.isfinite().all()
    assert not torch.equal(param, torch.ones_like(param))


@MODES
@EACH
def test_the_option_max_grad_norm_is_the_argument(row, fused):
    (_, expected), (_, optimizer) = stepped(row, 0, fused=fused), stepped(row, 0, fused=fused)
    expected.step(max_norm=0.5)
    assert "max_grad_norm" not in optimizer.param_groups[0]
    _, clipping = stepped(row, 0, fused=fused, max_grad_norm=0.5)
    clipping.step()
    optimizer.step()
    seen, unclipped = contents(clipping), contents(optimizer)
    for name, value in contents(expected).items():
        torch.testing.assert_close(seen[name], value, rtol=1e-5, atol=1e-7, msg=name)
    assert any(not torch.allclose(unclipped[name], value) for name, value in seen.items())


@pytest.mark.parametrize("row", WITHOUT_PLAN, ids=str)
def test_a_bucket_is_clipped_by_a_factor_of_a_device(row):
    """The factor of the iteration before is a tensor where other buckets step on a GPU."""
    (_, expected), (_, optimizer) = stepped(row), stepped(row)
    factors = 0.25, torch.tensor(0.25, dtype=torch.float64)
    for each, clip in zip((expected, optimizer), factors, strict=True):
        group = each.param_groups[0]
        with torch.no_grad():
            each._update_bucket(Bucket(group, 0, group["params"]), clip)
    assert_same_contents(contents(optimizer), contents(expected))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("max_norm", [0.5, 1e3])
@pytest.mark.parametrize("row", DENSE, ids=str)
def test_max_norm_clips_on_a_gpu_as_on_the_cpu(row, max_norm):
    optimizers = []
    for device in ("cpu", "cuda"):
        params = [torch.nn.Parameter(values_of(100 + i).to(device)) for i in range(3)]
        optimizer = row.build(params)
        for step in range(3):
            for param in params:
                param.grad = values_of(step).to(device)
            norm = optimizer.step(max_norm=max_norm)
        optimizers.append((optimizer, params, norm.cpu()))
    (_, cpu, norm), (_, there, found) = optimizers
    torch.testing.assert_close(found, norm, rtol=1e-12, atol=0)
    most = 2e-2 if row.optimizer in (optim.Muon, optim.MuSGD) else 1e-4  # products in 16 bits
    for param, twin in zip(cpu, there, strict=True):
        torch.testing.assert_close(twin.detach().cpu(), param.detach(), rtol=most, atol=most)


@EACH
def test_fused_takes_meta_weights_that_get_memory_before_the_first_step(row):
    with torch.device("meta"):
        model = torch.nn.Linear(*reversed(SHAPE), bias=False)
    optimizer = row.build(model.parameters(), fused=True)
    if row in DENSE:
        model.weight.grad = torch.empty(SHAPE, device="meta")
        with pytest.raises(RuntimeError, match=r"float32 and meta|kernels on meta"):
            optimizer.step()
        model.weight.grad = None
    model.to_empty(device="cpu")
    optimizer.param_groups[0]["params"] = list(model.parameters())
    with torch.no_grad():
        model.weight.copy_(values_of(100))
    model.weight.grad = row.grad(values_of(0))
    optimizer.step()
    (param,), expected = stepped(row, 0, count=1, fused=True)
    expected.step()
    assert_same_bits(model.weight.detach(), param.detach(), "weight")


@EACH
def test_a_copy_and_a_dictionary_go_on_with_the_same_bits(row):
    params, optimizer = stepped(row)
    twins = [torch.nn.Parameter(param.detach().clone()) for param in params]
    loaded = row.build(twins)
    loaded.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    copies = (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer)))
    for each in (optimizer, loaded, *copies):
        for param in each.param_groups[0]["params"]:
            param.grad = row.grad(values_of(2))
        each.step()
    for each in (loaded, *copies):
        assert_same_contents(contents(each), contents(optimizer))


# After two ordinary steps


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("make", [negated, negated_at_once])
@EACH
def test_a_gradient_is_taken_by_its_values(row, make, way):
    (params, optimizer), (others, expected) = stepped(row), stepped(row)
    for param, other in zip(params, others, strict=True):
        unusual = make(values_of(2))
        param.grad, other.grad = row.grad(unusual), row.grad(values_of(2))
        if row in DENSE:
            param.grad = unusual
    WAYS[way](optimizer)
    WAYS[way](expected)
    for param, other in zip(params, others, strict=True):
        torch.testing.assert_close(param, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("operand", ["weight", "state"])
@EACH
def test_a_negated_weight_or_state_is_an_error(row, operand, way):
    params, optimizer = stepped(row, fused=True)
    name = first_state(optimizer, params[1])
    if operand == "weight":
        params[1].data = negated_at_once(params[1].detach().clone())
    else:
        optimizer.state[params[1]][name] = negated_at_once(optimizer.state[params[1]][name].clone())
    before = [param.detach() + 0 for param in params]
    with pytest.raises(RuntimeError, match=r"negated view|state is a neg"):
        WAYS[way](optimizer)
    for param, values in zip(params, before, strict=True):
        assert_same_bits(param.detach() + 0, values, "weight")


@pytest.mark.parametrize("operand", ["weight", "gradient", "state"])
@EACH
def test_memory_that_was_taken_away_is_an_error(row, operand):
    params, optimizer = stepped(row)
    if operand == "gradient" and row not in DENSE:
        pytest.skip("its memory is that of its values")
    state = optimizer.state[params[1]][first_state(optimizer, params[1])]
    operands = {"weight": params[1], "gradient": params[1].grad, "state": state}
    before = params[0].detach().clone()
    operands[operand].untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match=f"{operand} has no memory"):
        optimizer.step()
    assert_same_bits(params[0].detach(), before, "weight")


@pytest.mark.parametrize("count", [-1.0, float("nan")])
@pytest.mark.parametrize("row", [row for row in ROWS if row.counts], ids=str)
def test_a_negative_step_count_is_an_error(row, count):
    params, optimizer = stepped(row)
    optimizer.state[params[1]]["step"].fill_(count)
    before = params[0].detach().clone()
    with pytest.raises(RuntimeError, match="the step count must be at least 0"):
        optimizer.step()
    assert_same_bits(params[0].detach(), before, "weight")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("row", DENSE, ids=str)
def test_a_gradient_in_the_memory_of_a_weight_is_an_error(row, way):
    own, other = "0 of .* its own weight in another layout", "0 of .* with the weight of .* 1 of"
    for gradient, text in (
        (lambda first, second: first.view(-1).as_strided(SHAPE, (1, SHAPE[0])), own),
        (lambda first, second: second, other),
        (lambda first, second: second.view(-1)[:1].expand(SHAPE), other),
    ):
        params, optimizer = stepped(row)
        before = [param.detach().clone() for param in params]
        params[0].grad = gradient(*(param.detach() for param in params))
        with pytest.raises(RuntimeError, match=text):
            WAYS[way](optimizer)
        for param, values in zip(params, before, strict=True):
            assert_same_bits(param.detach(), values, "weight")


MEMORY = (2 * SHAPE[0], 2 * SHAPE[1])
SHARED = {
    "rows": lambda m: (m[: SHAPE[0], : SHAPE[1]], m[SHAPE[0] // 2 :][: SHAPE[0], : SHAPE[1]]),
    "transposed": lambda m: (m[: SHAPE[0], : SHAPE[1]], m[: SHAPE[1], : SHAPE[0]].t()),
    "scattered": lambda m: (m[: SHAPE[0], : SHAPE[1]], m[::2, ::2]),
}
APART = {
    "rows": lambda m: m[:, : SHAPE[1]].chunk(2),
    "columns": lambda m: m[: SHAPE[0]].chunk(2, dim=1),
    "interleaved": lambda m: (m[::2, ::2], m[1::2, ::2]),
}


def stepped_in_one_memory(row, views, steps, **options):
    """As ``stepped``, with weights that are then views of the memory returned first."""
    params, optimizer = stepped(row, steps, **options)
    memory = torch.randn(MEMORY)
    for param, view in zip(params, views(memory), strict=True):
        param.data = view
    return memory, params, optimizer


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("views", SHARED)
@EACH
def test_weights_that_share_memory_are_named_before_anything_changes(row, views, steps):
    memory, _, optimizer = stepped_in_one_memory(row, SHARED[views], steps)
    values, before = memory.clone(), contents(optimizer)
    with pytest.raises(RuntimeError, match="of group 0: the weight shares memory with another"):
        optimizer.step()
    assert_same_bits(memory, values, "memory")
    found = contents(optimizer)
    assert_same_contents({name: found[name] for name in before}, before)


@pytest.mark.parametrize("views", SHARED)
@pytest.mark.parametrize(
    "row", [row for row in ROWS if row.optimizer is not optim.APOLLOAdamW], ids=str
)
def test_unfused_steps_take_weights_that_share_memory_in_turn(row, views):
    """Not APOLLO: its bases follow a weight's place among others."""
    memory, params, optimizer = stepped_in_one_memory(row, SHARED[views], 0, fused=False)
    values = memory.clone()
    optimizer.step()
    for param in params:
        other = torch.nn.Parameter(values.as_strided(SHAPE, param.stride(), param.storage_offset()))
        other.grad = param.grad
        row.build([other], fused=False).step()
    assert_same_bits(memory, values, "memory")
    optimizer.param_groups[0]["fused"] = None
    with pytest.raises(RuntimeError, match="shares memory with another"):
        optimizer.step()


@pytest.mark.parametrize("views", APART)
@EACH
def test_weights_in_different_parts_of_one_memory(row, views):
    memory, params, optimizer = stepped_in_one_memory(row, APART[views], 0)
    twins, expected = stepped(row, 0)
    values = memory.clone()
    for twin, part in zip(twins, APART[views](values), strict=True):
        twin.data = part.clone()
    for each in (optimizer, expected):
        each.step()
    for param, twin in zip(params, twins, strict=True):
        torch.testing.assert_close(param, twin, rtol=1e-5, atol=1e-6)
    for part, param in zip(APART[views](values), params, strict=True):
        part.copy_(param.detach())
    assert_same_bits(memory, values, "memory around the weights")


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate")
@pytest.mark.parametrize("row", [row for row in DENSE if row.optimizer is optim.Muon], ids=str)
def test_a_weight_twice_in_a_group_moves_twice(row):
    """In turn: two threads would write it."""
    once, twice = (torch.nn.Parameter(values_of(100)) for _ in range(2))
    steps = {"ns_dtype": torch.float32, "lr": 0.1}
    expected, optimizer = row.build([once], **steps), row.build([twice, twice], **steps)
    for _ in range(2):
        once.grad = twice.grad = values_of(0)
        expected.step()
        expected.step()
        optimizer.step()
    torch.testing.assert_close(twice, once, rtol=1e-5, atol=1e-6)
    states = (
        each.state[p]["momentum_buffer"] for each, p in ((optimizer, twice), (expected, once))
    )
    torch.testing.assert_close(*states, rtol=0, atol=0)


@pytest.mark.parametrize("operand", ["weight", "state"])
@EACH
def test_an_operand_that_overlaps_itself_is_an_error(row, operand):
    params, optimizer = stepped(row)
    state = optimizer.state[params[1]]
    name = next((name for name, value in state.items() if value.shape == SHAPE), None)
    if operand == "state" and name is None:
        pytest.skip("no state has the shape of the weight")
    overlapping = torch.randn(2 * SHAPE[0] * SHAPE[1]).as_strided(SHAPE, (SHAPE[1] // 2, 1))
    if operand == "weight":
        params[1].data = overlapping
    else:
        state[name] = overlapping
    before = contents(optimizer)
    with pytest.raises(RuntimeError, match=f"1 of group 0: .* {operand} overlaps itself in memory"):
        optimizer.step()
    assert_same_contents(contents(optimizer), before)


@pytest.mark.parametrize("row", DENSE, ids=str)
def test_a_gradient_that_is_its_own_weight(row):
    """Right, or an error: Adafactor's operation reads gradients after it has written weights."""
    (params, optimizer), (others, expected) = stepped(row), stepped(row)
    for param, other in zip(params, others, strict=True):
        param.grad, other.grad = param.detach(), other.detach().clone()
    if row.optimizer in (optim.Adafactor, optim.GaLoreAdafactor):
        with pytest.raises(RuntimeError, match="0 of group 0: the gradient shares memory with the"):
            optimizer.step()
        return
    optimizer.step()
    expected.step()
    assert_same_contents(contents(optimizer), contents(expected))


@pytest.mark.parametrize("loads", [False, True])
@pytest.mark.parametrize("row", WITHOUT_PLAN, ids=str)
def test_a_second_thread_during_a_step_gets_an_error(row, loads, monkeypatch):
    (_, optimizer), (_, expected) = stepped(row), stepped(row)
    dictionary, update, errors = copy.deepcopy(optimizer.state_dict()), optimizer._update_all, []

    def elsewhere():
        try:
            optimizer.load_state_dict(dictionary) if loads else optimizer.step()
        except RuntimeError as error:
            errors.append(str(error))

    def update_beside(*options):
        worker = threading.Thread(target=elsewhere)
        worker.start()
        worker.join()
        return update(*options)

    monkeypatch.setattr(optimizer, "_update_all", update_beside)
    optimizer.step()
    assert errors == ["another thread is stepping this optimizer"]
    expected.step()
    assert_same_contents(contents(optimizer), contents(expected))
    monkeypatch.undo()
    optimizer.load_state_dict(dictionary)
    optimizer.step()


@EACH
def test_a_model_that_has_become_double(row):
    model = torch.nn.Linear(*reversed(SHAPE), bias=False)
    optimizer = row.build([("weight", model.weight)])
    model.weight.grad = row.grad(values_of(0))
    optimizer.step()
    model.double()
    model.weight.grad = row.grad(values_of(1).double())
    before = model.weight.detach().clone()
    with pytest.raises(RuntimeError, match=r"'weight'.*float32.*load_state_dict\(optimizer\.st"):
        optimizer.step()
    assert_same_bits(model.weight.detach(), before, "weight")
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.step()
    assert not torch.equal(model.weight.detach(), before)


@EACH
def test_a_dictionary_of_adamw_is_refused(row):
    params, optimizer = stepped(row)
    other = torch.optim.AdamW(params)
    before = contents(optimizer)
    with pytest.raises(ValueError, match=r"has (no )?\w+.*: it is not one of .*AdamW"):
        optimizer.load_state_dict(other.state_dict())
    assert_same_contents(contents(optimizer), before)


#: Options of groups and of the constructor, for classes with moments of rows and columns.
FACTORED = {
    "Adafactor": (optim.Adafactor, {}, {}),
    "Adafactor of transformers": (optim.Adafactor, {}, {"variant": "transformers"}),
    "GaLoreAdafactor": (optim.GaLoreAdafactor, {"rank": 2}, {}),
    "GaLoreAdafactor without a rank": (optim.GaLoreAdafactor, {}, {}),
    "CAME": (optim.CAME, {}, {}),
}


#: Classes whose states are means of rows or columns, without a rank: none fits no elements.
MEANS = {name: row for name, row in FACTORED.items() if name != "GaLoreAdafactor"} | {
    "NorMuon": (optim.Muon, {}, {"normuon": True}),
    "RowWiseAdagrad": (optim.RowWiseAdagrad, {}, {}),
}


@MODES
@pytest.mark.parametrize("shape", [(0, 6), (8, 0), (3, 0, 5), (0,)], ids=str)
@pytest.mark.parametrize("name", MEANS)
def test_states_of_a_weight_without_elements_are_numbers(name, shape, fused):
    cls, of_group, options = MEANS[name]
    if name == "NorMuon" and len(shape) == 1:
        of_group = {"use_muon": False}
    empty = torch.nn.Parameter(torch.empty(shape))
    optimizer = cls([{"params": [empty]} | of_group], fused=fused, **options)
    for _ in range(2):
        empty.grad = torch.empty(shape)
        optimizer.step()
    assert optimizer.state[empty].get("step", 2) == 2  # no count of NorMuon's is a state
    assert all(state.isfinite().all() for state in optimizer.state[empty].values())


@MODES
@pytest.mark.parametrize("shape", [(6, 4), (4,)], ids=str)
@pytest.mark.parametrize("keeps", [0.0, 1e-9, 1e-4])
@pytest.mark.parametrize("name", FACTORED)
def test_moments_that_keep_nothing_are_those_of_the_last_gradient(name, keeps, shape, fused):
    cls, of_group, options = FACTORED[name]
    if of_group and len(shape) < 2:
        pytest.skip("vectors are not projected")
    rate = {"betas": (0.9, keeps, keeps)} if cls is optim.CAME else {"decay_rate": -keeps}
    moved = []
    for dtype in (torch.float32, torch.float64):
        weight = torch.nn.Parameter(torch.ones(shape, dtype=dtype))
        options_of = {"lr": 1e-2, **options, **rate, "fused": fused}
        if name == "Adafactor":
            options_of |= {"eps": (1e-30, 1e-3), "variant": "torch"}
        optimizer = cls([{"params": [weight]} | of_group], **options_of)
        for size in (1.0, 1e-5):
            values = torch.randn(shape, generator=torch.Generator().manual_seed(3))
            weight.grad = (size * values).to(dtype)
            optimizer.step()
        moved.append(weight.detach())
    torch.testing.assert_close(moved[0].double(), moved[1], rtol=0, atol=2e-6)


@pytest.mark.parametrize("fused", [None, False])
@pytest.mark.parametrize("name", PRODUCTS)
def test_no_step_follows_autocast(name, fused):
    cls, of_group, options = PRODUCTS[name]
    ends = []
    for follows in (False, True):
        weight = torch.nn.Parameter(torch.ones(8, 4))
        optimizer = cls([{"params": [weight]} | of_group], lr=0.1, fused=fused, **options)
        for step in range(3):
            weight.grad = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
            with torch.autocast("cpu", torch.bfloat16, enabled=follows):
                optimizer.step()
        ends.append(weight.detach())
    assert_same_bits(*ends, "weight")


@pytest.mark.parametrize("cls", [optim.SGD, optim.Lion])
def test_a_count_of_no_state_that_a_step_in_inference_mode_made_goes_on(cls):
    first, second = params = [torch.nn.Parameter(torch.ones(3)) for _ in range(2)]
    optimizer = cls(params, lr=0.5, fused=False)
    second.grad = torch.ones(3)
    with torch.inference_mode():
        optimizer.step()
    first.grad = torch.ones(3)
    optimizer.step()
    assert (first[0], second[0]) == (0.5, 0.0)


@pytest.mark.parametrize("modes", ["IO", "OIO", "OOIOO", "OIIO"])
@MODES
@EACH
def test_steps_in_inference_mode(row, fused, modes):
    """As steps outside of it, with states and memory that steps outside go on with."""
    (others, expected), (params, optimizer) = (stepped(row, 0, 3, fused=fused) for _ in range(2))
    for step, mode in enumerate(modes):
        for place, pair in enumerate(zip(params, others, strict=True)):
            for param in pair:
                skips = mode == "I" and place == 1
                param.grad = None if skips else row.grad(values_of(step))
        expected.step()
        with torch.inference_mode(mode == "I"):
            optimizer.step()
    assert_same_contents(contents(optimizer), contents(expected))


@MODES
@pytest.mark.parametrize("row", DENSE, ids=str)
def test_a_weight_that_shrinks_is_refused_with_states_as_they_were(row, fused):
    """Also where the shorter side is another one then."""
    params, optimizer = stepped(row, 2, fused=fused)
    params[1].grad = None
    params[1].data = params[1].data[:4]
    params[1].grad = row.grad(values_of(3)[:4])
    before = copy.deepcopy(contents(optimizer))
    with pytest.raises(RuntimeError, match=r"parameter 1 of group 0|of the list"):
        optimizer.step()
    assert_same_contents(contents(optimizer), before)


LOW_RANK = [row for row in DENSE if "rank" in row.of_group]


@pytest.mark.parametrize("row", LOW_RANK, ids=str)
def test_a_nested_weight_of_a_group_with_a_rank_is_named(row):
    parts = [torch.ones(12, 8), torch.ones(4, 8)]
    nested = torch.nested.nested_tensor(parts, layout=torch.jagged)
    with pytest.raises(ValueError, match="parameter 1 of group 0 is a nested tensor"):
        row.build([torch.nn.Parameter(torch.ones(12, 8)), torch.nn.Parameter(nested)])


class WrongNumber(NamedTuple):
    """A step count that a user has put into a state, or a mistake.

    ``text``: of the error. None where a step in torch operations takes the number as a count.
    """

    made: object
    text: str | None = "the state 'step', the step count, must be one real number"


WRONG_NUMBERS = {
    "int64": WrongNumber(lambda step: step.long(), None),
    "int32": WrongNumber(lambda step: step.int(), None),
    "float64": WrongNumber(lambda step: step.double(), None),
    "bfloat16": WrongNumber(lambda step: step.bfloat16(), None),
    "shape [1]": WrongNumber(lambda step: step.reshape(1), None),
    "bool": WrongNumber(lambda step: step.bool()),
    "complex": WrongNumber(lambda step: step.to(torch.complex64)),
    "two": WrongNumber(lambda step: torch.ones(2)),
    "meta": WrongNumber(lambda step: step.to("meta")),
    "sparse": WrongNumber(lambda step: step.reshape(1).to_sparse()),
    "no tensor": WrongNumber(lambda step: 1, "API has changed, `state_steps` argument"),
    "negative": WrongNumber(lambda step: -step, "step count must be at least 0"),
}


@pytest.mark.parametrize("fused", [None, False])
@pytest.mark.parametrize("wrong", WRONG_NUMBERS)
@pytest.mark.parametrize("row", [row for row in (*ROWS, *WITH_COUNTS) if row.counts], ids=str)
def test_a_wrong_count_is_an_error_that_names_its_weight_or_is_taken_as_a_number(row, wrong, fused):
    is_composite, (made, text) = row in ROWS, WRONG_NUMBERS[wrong]
    params = [torch.nn.Parameter(values_of(i)) for i in range(3)]
    optimizer = row.build(params, fused=fused)

    def set_grads(params, number):
        for p in params:
            p.grad = row.grad(values_of(number)) if is_composite else values_of(number)

    set_grads(params, 0)
    optimizer.step()
    expected = copy.deepcopy(optimizer)
    others = expected.param_groups[0]["params"]
    set_grads(params, 1)
    set_grads(others, 1)
    optimizer.state[params[1]]["step"] = made(optimizer.state[params[1]]["step"])
    before = copy.deepcopy([dict(optimizer.state[p]) for p in params])
    error = None
    try:
        optimizer.step()
    except RuntimeError as found:
        error = str(found)
    if error is None:
        assert text is None
        expected.step()
        for p, q in zip(params, others, strict=True):
            torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)
            assert float(optimizer.state[p]["step"]) == 2
        return
    assert text or fused is None  # native kernels do not convert the number
    text = text or "the step count must be one float32 number"
    assert re.search(text if "state_steps" in text else f"parameter 1 of group 0: .*{text}", error)
    assert all(map(torch.equal, params, others))
    for p, state in zip(params, before, strict=True):
        for name in state.keys() - {"step"}:
            assert torch.equal(optimizer.state[p][name], state[name])


@pytest.mark.parametrize("row", [row for row in (*ROWS, *WITH_COUNTS) if row.counts], ids=str)
def test_a_negative_count_is_an_error_under_a_dispatch_mode_too(row):
    (param,) = params = [torch.nn.Parameter(values_of(0))]
    optimizer = row.build(params, fused=False)
    param.grad = row.grad(values_of(1)) if row in ROWS else values_of(1)
    optimizer.step()
    optimizer.state[param]["step"] = torch.tensor(-3.0)
    before = param.detach().clone()
    with Mode(), pytest.raises(RuntimeError, match="step count must be at least 0"):
        optimizer.step()
    assert torch.equal(param, before)


@MODES
@pytest.mark.parametrize("wrong", [1, None, "text"], ids=str)
@pytest.mark.parametrize("row", [*ROWS, *WITH_STATES], ids=str)
def test_a_state_that_is_no_tensor_is_an_error_that_names_it(row, wrong, fused):
    params = [torch.nn.Parameter(values_of(i)) for i in range(2)]
    optimizer = row.build(params, fused=fused)
    for number in range(2):
        for p in params:
            p.grad = row.grad(values_of(number)) if row in ROWS else values_of(number)
        if number == 0:
            optimizer.step()
    name = next(name for name in optimizer._states if name in optimizer.state[params[1]])
    optimizer.state[params[0]]["the user's own"] = optimizer.state[params[1]][name] = wrong
    before = [p.detach().clone() for p in params]
    with pytest.raises(
        RuntimeError, match=f"parameter 1 of group 0: the state '{name}' is a .*, no"
    ):
        optimizer.step()
    assert all(map(torch.equal, params, before))


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate")
@EACH
def test_a_weight_that_is_twice_in_a_group_takes_two_steps(row):
    """As with torch's classes, which warn of the group."""
    found = []
    for fused in (None, False):
        twice, once = (torch.nn.Parameter(values_of(i)) for i in range(2))
        optimizer = row.build([twice, once, twice], fused=fused)
        for number in range(3):
            for p in (twice, once):
                p.grad = row.grad(values_of(number))
            optimizer.step()
        if row.counts:
            assert [float(optimizer.state[p]["step"]) for p in (twice, once)] == [6, 3]
        found.append((twice.detach(), once.detach()))
    for p, q in zip(*found, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)
