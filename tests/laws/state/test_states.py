"""Law: states survive everything that happens to them, from state_dict to memory that moves."""

import copy
import functools
import gc
import io
import pickle
import weakref

import pytest
import torch

from support.cases import (
    CASES,
    DTYPES,
    KINDS,
    LOW_PRECISION,
    NAMESAKE_CHOICES,
    NUMBERS,
    PLAIN,
    WITH_NAMESAKE,
    WITH_STATES,
)
from support.stepping import (
    CHUNK,
    as_parameters,
    assert_contents_close,
    assert_counts,
    assert_same_bits,
    assert_same_contents,
    contents,
    make_gradients,
    make_weights,
    run,
    train,
)

SHAPES = ((), (33, 31), (CHUNK + 5,))


def transfer(case, dtype, source_options, target_options, through=lambda dictionary: dictionary):
    """Three steps, a new optimizer with the state_dict of the first, and three steps more."""
    params, source = run(case, SHAPES, dtype, steps=3, **source_options)
    target_params = as_parameters(params)
    target = case.build(target_params, **target_options)
    target.load_state_dict(through(source.state_dict()))
    # Loading takes over the options too.
    assert target.param_groups[0]["fused"] == source.param_groups[0]["fused"]
    for group in target.param_groups:
        group["fused"] = target_options.get("fused", True)
    train(target, target_params, range(4, 7))
    return target


def through_a_file(dictionary):
    file = io.BytesIO()
    torch.save(dictionary, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", KINDS, ids=str)
def test_state_dict_mid_run(case, dtype):
    _, whole = run(case, SHAPES, dtype, steps=6)
    for through in (lambda dictionary: dictionary, copy.deepcopy, through_a_file):
        resumed = transfer(case, dtype, {}, {}, through)
        assert_same_contents(contents(resumed), contents(whole))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_state_dict_between_fused_and_imperative(case):
    _, whole = run(case, SHAPES, torch.float32, steps=6)
    for source, target in ((True, False), (False, True)):
        resumed = transfer(case, torch.float32, {"fused": source}, {"fused": target})
        assert_contents_close(contents(resumed), contents(whole), rtol=1e-5, atol=1e-6)


def test_state_dict_between_fused_and_imperative_sees_a_lost_state():
    """The control of the test above: without the states the run ends elsewhere."""
    case = PLAIN[0]
    _, whole = run(case, SHAPES, torch.float32, steps=6)
    params, _ = run(case, SHAPES, torch.float32, steps=3)
    forgetful = case.build(params)
    train(forgetful, params, range(4, 7))
    with pytest.raises(AssertionError):
        assert_contents_close(contents(forgetful), contents(whole), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("to_torch", [True, False], ids=["to torch", "from torch"])
@pytest.mark.parametrize("fused", [True, False], ids=["fused", "unfused"])
@pytest.mark.parametrize(("case", "options"), NAMESAKE_CHOICES, ids=str)
def test_state_dict_from_and_to_the_namesake(case, fused, options, to_torch):
    """Through a file, with the options of the loading optimizer put back."""
    params = as_parameters(make_weights(SHAPES, torch.float32))
    namesake = case.namesake(params, **case.options, **options)
    optimizer = case.build(params, fused=fused)
    first, second = (optimizer, namesake) if to_torch else (namesake, optimizer)
    train(first, params, range(1, 4))
    flags = {name: second.param_groups[0].get(name) for name in ("foreach", "fused")}
    second.load_state_dict(through_a_file(first.state_dict()))
    second.param_groups[0].update(flags)
    train(second, params, range(4, 7))
    _, whole = run(case, SHAPES, torch.float32, steps=6)
    assert_contents_close(contents(second), contents(whole), rtol=1e-5, atol=1e-6)


NEWER_OPTIONS = (
    "foreach", "maximize", "differentiable", "fused", "capturable", "amsgrad",
    "decoupled_weight_decay", "keep_grad",
)  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=str)
def test_older_dictionaries(case):
    """They lack options, and their steps are numbers."""

    def age(dictionary):
        dictionary = copy.deepcopy(dictionary)
        for group in dictionary["param_groups"]:
            for name in set(NEWER_OPTIONS) - case.options.keys() - case.modes.keys():
                group.pop(name, None)
        for state in dictionary["state"].values():
            if case.counts:
                state["step"] = int(state["step"])
        return dictionary

    _, whole = run(case, SHAPES, torch.float32, steps=6)
    params, optimizer = run(case, SHAPES, torch.float32, steps=3, fused=None)
    resumed_params = as_parameters(params)
    resumed = case.build(resumed_params, fused=None)
    resumed.load_state_dict(age(optimizer.state_dict()))
    train(resumed, resumed_params, range(4, 7))
    assert_same_contents(contents(resumed), contents(whole))
    missing = optimizer.param_groups[0].keys() - resumed.param_groups[0].keys()
    assert not missing, f"not in {case.optimizer.__name__}._later_options: {missing}"


@pytest.mark.parametrize("case", WITH_NAMESAKE, ids=str)
def test_state_dict_has_the_keys_of_the_namesake(case):
    def keys(optimizer, params):
        train(optimizer, params, [1])
        dictionary = optimizer.state_dict()
        return [set(state) for state in dictionary["state"].values()], {
            name for group in dictionary["param_groups"] for name in group
        }

    params, others = (as_parameters(make_weights(SHAPES, torch.float32)) for _ in range(2))
    states, options = keys(case.build(params, fused=None), params)
    assert (states, options) == keys(case.build_namesake(others), others)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", KINDS, ids=str)
def test_states_have_the_names_and_types_of_the_row(case, dtype):
    params, optimizer = run(case, SHAPES, dtype, steps=1)
    for param in params:
        state = optimizer.state[param]
        assert set(state) == {*case.numbers, *case.states}
        for name in case.numbers:
            assert (state[name].dtype, state[name].shape) == (torch.float32, ())
        for name in case.states:
            assert (state[name].dtype, state[name].shape) == (dtype, param.shape)
            assert not state[name].requires_grad


def copy_deeply(optimizer, params):
    return copy.deepcopy((optimizer, params))


def pickle_and_unpickle(optimizer, params):
    return pickle.loads(pickle.dumps((optimizer, params)))


@pytest.mark.parametrize("duplicate", [copy_deeply, pickle_and_unpickle])
@pytest.mark.parametrize("case", KINDS, ids=str)
def test_copies_step_on_independently(case, duplicate):
    params, optimizer = run(case, SHAPES, torch.float32, steps=3)
    for param in params:
        param.grad = None
    copied, copied_params = duplicate(optimizer, params)
    frozen = contents(optimizer)
    train(copied, copied_params, range(4, 7))
    assert_same_contents(contents(optimizer), frozen, "original")
    train(optimizer, params, range(4, 7))
    assert_same_contents(contents(copied), contents(optimizer), "copy")


# Events between two steps, each given the optimizer and its parameters. The values stay what they
# were, so a run with such an event is the same as one without.


def move_weights(optimizer, params):
    for param in params:
        param.data = param.data.clone()


def set_weights_to_other_storages(optimizer, params):
    for param in params:
        with torch.no_grad():
            param.set_(param.detach().clone())


def move_weights_into_one_buffer(optimizer, params):
    buffer = torch.cat([param.data.reshape(-1) for param in params])
    for param, piece in zip(params, buffer.split([param.numel() for param in params]), strict=True):
        param.data = piece.view_as(param)


def lay_weights_out_otherwise(optimizer, params):
    for param in params:
        if param.dim() == 2:
            param.data = param.data.t().contiguous().t()


def replace_states(optimizer, params):
    for param in params:
        for name, value in optimizer.state[param].items():
            optimizer.state[param][name] = value.clone()


def replace_states_by_strided_ones(optimizer, params):
    for param in params:
        for name, value in optimizer.state[param].items():
            if name not in NUMBERS:
                wide = torch.zeros(*value.shape, 2, dtype=value.dtype)
                wide[..., 0] = value
                optimizer.state[param][name] = wide[..., 0]


def replace_the_state_of_one(optimizer, params):
    optimizer.state[params[1]] = copy.deepcopy(optimizer.state[params[1]])


def move_states(optimizer, params):
    for param in params:
        for value in optimizer.state[param].values():
            value.data = value.data.clone()


def replace_numbers(optimizer, params):
    for param in params:
        state = optimizer.state[param]
        for name in NUMBERS & state.keys():
            state[name] = torch.tensor(state[name].item())


def reload_own_state_dict(optimizer, params):
    optimizer.load_state_dict(optimizer.state_dict())


def regroup(optimizer, params):
    """The same weights in the other order."""
    optimizer.param_groups[0]["params"].reverse()


EVENTS = [
    move_weights,
    set_weights_to_other_storages,
    move_weights_into_one_buffer,
    lay_weights_out_otherwise,
    replace_states,
    replace_states_by_strided_ones,
    replace_the_state_of_one,
    move_states,
    replace_numbers,
    reload_own_state_dict,
    regroup,
]


@functools.cache
def undisturbed(case, dtype):
    return run(case, SHAPES, dtype, steps=5)


@pytest.mark.parametrize("event", EVENTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", KINDS, ids=str)
def test_a_plan_survives(case, dtype, event):
    whole_params, whole = undisturbed(case, dtype)
    params, optimizer = run(case, SHAPES, dtype, steps=2)
    event(optimizer, params)
    train(optimizer, params, [3, 4])
    event(optimizer, params)
    train(optimizer, params, [5])
    reordered = not case.elementwise and event is lay_weights_out_otherwise
    for param, whole_param in zip(params, whole_params, strict=True):
        if reordered:
            # Norms over another memory order: each of three steps may differ by the ratio's unit.
            unit = 8 * torch.finfo(dtype).eps
            torch.testing.assert_close(param, whole_param, rtol=unit, atol=unit)
            continue
        assert_same_bits(param, whole_param, "weight")
        for name in (*case.states, *case.numbers):
            assert_same_bits(optimizer.state[param][name], whole.state[whole_param][name], name)


@pytest.mark.parametrize("case", [case for case in CASES if case.states], ids=str)
def test_values_written_into_states_count(case):
    """In place or replaced: the next step starts from what the state holds."""
    for in_place in (True, False):
        results = []
        for fused in (True, False):
            params, optimizer = run(case, SHAPES, torch.float32, steps=2, fused=fused)
            for param in params:
                for name, value in optimizer.state[param].items():
                    new = torch.full_like(value, 9.0 if name == "step" else 0.25)
                    if in_place:
                        value.copy_(new)
                    else:
                        optimizer.state[param][name] = new
            train(optimizer, params, [3])
            results.append(contents(optimizer))
            assert_counts(case, optimizer, params, [10] * len(params))
        assert_contents_close(*results, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("case", KINDS, ids=str)
def test_a_state_that_was_cleared_starts_anew(case):
    params, optimizer = run(case, SHAPES, torch.float32, steps=2)
    fresh_params = as_parameters(params)
    fresh = case.build(fresh_params)
    optimizer.state.clear()
    train(optimizer, params, [3])
    train(fresh, fresh_params, [3])
    assert_same_contents(contents(optimizer), contents(fresh))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", KINDS, ids=str)
def test_weights_written_between_steps_count(case, dtype):
    pairs = [run(case, SHAPES, dtype, steps=2, fused=fused) for fused in (True, False)]
    for params, optimizer in pairs:
        with torch.no_grad():
            for param in params:
                param.fill_(0.5)
        train(optimizer, params, [3])
    if dtype not in LOW_PRECISION:
        assert_contents_close(*(contents(o) for _, o in pairs), rtol=1e-5, atol=1e-6)
    for params, _ in pairs:
        assert all((param - 0.5).abs().max() < 0.3 for param in params)


@pytest.mark.parametrize("case", PLAIN, ids=str)
def test_gradient_at_the_same_address_with_other_strides(case):
    """Only the strides tell the second gradient from the first."""
    (value,) = make_weights([(40, 40)], torch.float32)
    param, other = as_parameters([value, value])
    optimizer, twin = case.build([param]), case.build([other])
    for step in range(1, 5):
        (values,) = make_gradients([(40, 40)], torch.float32, step)
        if step == 1:
            memory = values.clone()
        memory.copy_(values)
        param.grad = memory.t() if step % 2 else memory
        other.grad = param.grad.clone(memory_format=torch.contiguous_format)
        optimizer.step()
        twin.step()
        if case.elementwise:
            assert_same_bits(param, other, f"weight after step {step}")
        torch.testing.assert_close(param, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("case", WITH_STATES, ids=str)
def test_states_are_placed_apart(case):
    """Large states start at different offsets in a page, wherever they come from."""

    def offsets(optimizer, param):
        return [optimizer.state[param][name].data_ptr() % 4096 for name in case.states]

    params, optimizer = run(case, [(1024, 1024)], torch.float32, steps=1)
    loaded_params = as_parameters(params)
    loaded = case.build(loaded_params)
    loaded.load_state_dict(optimizer.state_dict())
    train(loaded, loaded_params, [2])
    for each, (param,) in ((optimizer, params), (loaded, loaded_params)):
        found = [param.data_ptr() % 4096, *offsets(each, param)]
        assert len(set(found)) == len(found), found


def test_forgotten_optimizers_free_their_states():
    """All at once: to collect garbage takes half a second beside all that tests have imported."""
    states = []
    for case in WITH_STATES:
        params, optimizer = run(case, SHAPES, torch.float32, steps=2)
        values = [value for param in params for value in optimizer.state[param].values()]
        states += [(case.name, weakref.ref(value)) for value in values]
    del optimizer, values
    gc.collect()
    assert {name for name, state in states if state() is not None} == set()


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("case", PLAIN, ids=str)
def test_weights_may_be_exchanged_before_the_first_step(case, fused):
    """As Accelerate exchanges them when FSDP2 has made DTensors of a model's."""

    def exchanged(weights):
        optimizer = case.build(as_parameters(make_weights(SHAPES, torch.float32)), fused=fused)
        params = optimizer.param_groups[0]["params"] = as_parameters(weights)
        return params, optimizer

    weights = make_weights(SHAPES, torch.float32)
    params = as_parameters(weights)
    expected = case.build(params, fused=fused)
    others, optimizer = exchanged(weights)
    train(expected, params, [1])
    train(optimizer, others, [1])
    loaded_params, loaded = exchanged(others)
    loaded.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(expected, params, [2])
    train(loaded, loaded_params, [2])
    assert_same_contents(contents(loaded), contents(expected))
