"""Steps that repeat the last one: whatever has changed since, they are as steps from the start."""

import copy
import dataclasses
import functools
from collections import defaultdict
from itertools import chain

import pytest
import torch
from torch.nn import Parameter
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fusedstep._api.base import FusedOptimizer
from fusedstep._native import ops
from support.cases import CASES, NUMBERS, PLAIN, WITH_COUNTS, WITH_STATES, first_of_each, thinned
from support.repeated import build, move, set_grads
from support.stepping import assert_same_contents, contents

pytestmark = pytest.mark.skipif(ops.bind is None, reason="built without Python's headers")

# Rows without states are seldom, and take another way.
ROWS = first_of_each(lambda case: (case.optimizer, bool(case.states)), CASES)
WITH_DECAY = [case for case in ROWS if case.has("weight_decay")]
EACH = pytest.mark.parametrize("case", ROWS, ids=str)
EACH_WITH_STATES = pytest.mark.parametrize("case", WITH_STATES, ids=str)


class Told:
    """Answers of ``repeat``, in their order."""

    def __init__(self, monkeypatch):
        self.answers = []
        direct = ops.bind.repeat

        def repeat(*arguments):
            self.answers.append(direct(*arguments))
            return self.answers[-1]

        monkeypatch.setattr(ops.bind, "repeat", repeat)


@pytest.fixture
def told(monkeypatch):
    return Told(monkeypatch)


def keep(optimizer, params): ...


def move_grads(optimizer, params):
    set_grads(params, 9, move=True)


def change_lr(optimizer, params):
    for group in optimizer.param_groups:
        group["lr"] *= 0.5


def freeze(optimizer, params):
    params[1].requires_grad_(False)


# Changes after which a step can be repeated.
SMALL = [keep, move_grads, change_lr, freeze]


def use_tensor_lr(optimizer, params):
    optimizer.param_groups[0]["lr"] = torch.tensor(0.02)


def use_whole_lr(optimizer, params):
    optimizer.param_groups[0]["lr"] = 1


def change_decay(optimizer, params):
    optimizer.param_groups[1]["weight_decay"] = 0.3


def maximize(optimizer, params):
    optimizer.param_groups[0]["maximize"] = True


def use_twin(optimizer, params):
    optimizer.param_groups[0]["fused"] = False


def drop_grad(optimizer, params):
    params[1].grad = None


def drop_all_grads(optimizer, params):
    for p in params[3:]:
        p.grad = None


def replace_memory(optimizer, params):
    params[0].data = params[0].data.clone()


def transpose(optimizer, params):
    params[0].data = params[0].data.t().contiguous().t()


def transpose_grad(optimizer, params):
    params[0].grad = params[0].grad.t().contiguous().t()


def reorder(optimizer, params):
    group = optimizer.param_groups[0]
    group["params"][:] = group["params"][::-1]


def drop_param(optimizer, params):
    del optimizer.param_groups[0]["params"][1]


def add_param(optimizer, params):
    params.append(Parameter(torch.ones(5)))
    optimizer.param_groups[0]["params"].append(params[-1])


def add_group(optimizer, params):
    params.append(Parameter(torch.ones(5)))
    optimizer.add_param_group({"params": [params[-1]]})


def drop_group(optimizer, params):
    optimizer.param_groups.pop()


def replace_state(optimizer, params):
    of_weight = optimizer.state[params[0]]
    for name, value in of_weight.items():
        of_weight[name] = value.clone()


def replace_state_memory(optimizer, params):
    for value in optimizer.state[params[0]].values():
        value.data = value.data + 1


def replace_step_memory(optimizer, params):
    step = optimizer.state[params[2]]["step"]
    step.data = step.data + 10


def share_states(optimizer, params):
    for of_weight in optimizer.state.values():
        for value in of_weight.values():
            value.share_memory_()


def write_states(optimizer, params):
    for value in optimizer.state[params[2]].values():
        value.add_(1)


def forget_states(optimizer, params):
    optimizer.state = defaultdict(dict)


def forget_state(optimizer, params):
    del optimizer.state[params[0]]


def reload(optimizer, params):
    optimizer.load_state_dict(optimizer.state_dict())


def use_scaler(optimizer, params):
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(4.0), torch.tensor(0.0)


def find_inf(optimizer, params):
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(4.0), torch.tensor(1.0)


def double_all(optimizer, params):
    for p in params:
        p.grad = None
        p.data = p.data.double()
        for name, value in optimizer.state[p].items():
            optimizer.state[p][name] = value if name in NUMBERS else value.double()


# Changes after which a step can not be repeated: options, gradients, weights.
LARGE = [
    use_tensor_lr,
    use_whole_lr,
    maximize,
    use_twin,
    drop_grad,
    drop_all_grads,
    replace_memory,
    transpose,
    transpose_grad,
    reorder,
    drop_param,
    add_param,
    add_group,
    drop_group,
    reload,
    use_scaler,
    find_inf,
    double_all,
]
# The same of states.
OF_STATES = [replace_state, replace_state_memory, share_states, forget_states, forget_state]


def subjects(*pairs):
    """Each of some rows with each of some changes."""
    return pytest.mark.parametrize(
        ("case", "change"),
        [
            pytest.param(case, change, id=f"{case}-{change.__name__}")
            for rows, changes in pairs
            for case in rows
            for change in changes
        ],
    )


def run(case, change, **options):
    """Two steps, the change, and three steps more."""
    optimizer, params = build(case, **options)
    for seed in (1, 2):
        set_grads(params, seed)
        optimizer.step()
    if change in (drop_grad, drop_all_grads, transpose_grad):
        set_grads(params, 3)
        change(optimizer, params)
    else:
        change(optimizer, params)
        set_grads(params, 3)
    for seed in (3, 4, 5):
        optimizer.step()
        for name in {"grad_scale", "found_inf"} & vars(optimizer).keys():
            delattr(optimizer, name)
        set_grads(params, seed + 1)
    return optimizer


@subjects(
    (ROWS, [*SMALL, *LARGE]),
    (WITH_DECAY, [change_decay]),
    (WITH_STATES, [*OF_STATES, write_states]),
    (WITH_COUNTS, [replace_step_memory]),
)
def test_a_step_after_a_change_is_as_from_the_start(case, change, monkeypatch):
    repeated = run(case, change)
    monkeypatch.setattr(ops, "bind", None)
    expected = run(case, change)
    assert_same_contents(contents(repeated), contents(expected))
    versions = [[p._version for p in group["params"]] for group in repeated.param_groups]
    assert versions == [[p._version for p in group["params"]] for group in expected.param_groups]


@subjects((ROWS, [*SMALL, *LARGE]), (WITH_DECAY, [change_decay]), (WITH_STATES, OF_STATES))
def test_what_a_step_is_repeated_over(case, change, told):
    run(case, change)
    assert told.answers[0] is True
    assert (told.answers == [True] * 4) == (change in SMALL)


# Enough for the host's threads to share the look at them.
MANY = 1000


def step_many(case, change, index):
    """A step of many tensors, a change to the states of one, and another step."""
    params = [Parameter(each) for each in torch.arange(float(MANY)).repeat(3, 1).T.contiguous()]
    optimizer = case.build(params)
    assert not optimizer.state  # from now on somebody has it
    for p, grad in zip(params, torch.ones(MANY, 3), strict=True):
        p.grad = grad
    for _ in range(3):
        optimizer.step()
    for name, value in optimizer.state[params[index]].items():
        change(name, value)
    optimizer.step()
    found = {"weights": torch.stack(params)}
    for name in optimizer.state[params[0]]:
        found[name] = torch.stack([optimizer.state[p][name] for p in params])
    return {name: value.detach() for name, value in found.items()}


def move_count(name, value):
    if name == "step":
        value.data = value.data + 10


def move_moments(name, value):
    if name not in NUMBERS:
        value.data = value.data + 1


@pytest.mark.parametrize(
    ("case", "change", "index", "threads"),
    thinned(
        WITH_STATES,
        [move, move_count, move_moments],
        [0, 700, MANY - 1],
        [1, 2, 5],
        whole=WITH_STATES[:1],
    ),
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_one_moved_state_of_many_is_found(case, change, index, threads, told, monkeypatch):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        repeated = step_many(case, change, index)
        assert told.answers == [True, True, change is move_count]
        monkeypatch.setattr(ops, "bind", None)
        assert_same_contents(repeated, step_many(case, change, index))
    finally:
        torch.set_num_threads(before)


def by_name(optimizer):
    return list(optimizer.state.values())


def by_dictionary(optimizer):
    return list(optimizer.state_dict()["state"].values())


def by_pickling(optimizer):
    return list(optimizer.__getstate__()["state"].values())


def by_copy(optimizer):
    return list(copy.copy(optimizer).state.values())


def by_hook(optimizer):
    found = []
    optimizer.register_state_dict_post_hook(
        lambda _, dictionary: found.extend(dictionary["state"].values())
    )
    optimizer.state_dict()
    return found


def by_closure_over_steps(optimizer):
    found = []
    handle = optimizer.register_step_post_hook(
        lambda stepped, *_: found.extend(stepped.state.values())
    )
    optimizer.step()
    handle.remove()
    return found


def by_lists(optimizer):
    found = []
    for group in optimizer.param_groups:
        lists = [[] for _ in range(8)]  # more than there are states
        optimizer._init_group(group, *lists)
        found += [{index: state} for index, state in enumerate(chain(*lists[2:]))]
    return found


def by_loading(optimizer):
    optimizer.load_state_dict(optimizer.state_dict())
    return by_name(optimizer)


def by_setting(optimizer):
    state = defaultdict(dict)
    optimizer.state = state
    optimizer.step()
    return list(state.values())


def by_making_anew(optimizer):
    state = defaultdict(dict)
    groups = optimizer.param_groups
    optimizer.__setstate__({"state": state, "param_groups": groups})
    optimizer.step()
    return list(state.values())


ROUTES = [
    by_name,
    by_dictionary,
    by_pickling,
    by_copy,
    by_hook,
    by_closure_over_steps,
    by_lists,
    by_loading,
    by_setting,
    by_making_anew,
]


def step_with_states_held(case, route):
    """Takes hold of the states by a route, and moves them some steps later."""
    optimizer, params = build(case)
    for seed in (1, 2):
        set_grads(params, seed)
        optimizer.step()
    held = route(optimizer)
    for seed in (3, 4, 5):
        set_grads(params, seed)
        optimizer.step()
    old = []  # a step that does not see the change is to fail, not to crash
    for value in chain.from_iterable(of_weight.values() for of_weight in held):
        old.append(value.detach())
        value.data = value.data + 1
    optimizer.step()
    return contents(optimizer)


@pytest.mark.parametrize("route", ROUTES)
@EACH_WITH_STATES
def test_states_may_move_whoever_has_got_at_them(case, route, monkeypatch):
    repeated = step_with_states_held(case, route)
    monkeypatch.setattr(ops, "bind", None)
    assert_same_contents(repeated, step_with_states_held(case, route))


@EACH_WITH_STATES
def test_training_lets_no_state_out(case):
    optimizer, params = build(case)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    for seed in (1, 2, 3):
        set_grads(params, seed)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    params.append(Parameter(torch.ones(5)))
    optimizer.add_param_group({"params": params[-1]})
    set_grads(params, 4)
    optimizer.step(max_norm=1.0, zero_grad=True)
    assert not optimizer._store.was_read
    assert optimizer.state
    assert optimizer._store.was_read


@EACH
def test_frozen_weights_do_not_hinder(case, told):
    optimizer, params = build(case)
    for seed in (1, 2, 3):
        set_grads(params, seed)
        params[1].grad = params[4].grad = None
        optimizer.step()
    assert told.answers == [True, True]


def test_options_in_a_list_may_change_in_place(told):
    def stepped(betas):
        optimizer, params = build(next(case for case in PLAIN if case.has("betas")))
        for number in range(3):
            for group in optimizer.param_groups:
                if number == 0:
                    group["betas"] = betas(0)
                elif isinstance(group["betas"], list):
                    group["betas"][0] = betas(number)[0]
                else:
                    group["betas"] = betas(number)
            set_grads(params, number)
            optimizer.step()
        return optimizer

    in_place = stepped(lambda number: [0.9 - number / 10, 0.999])
    assert told.answers == []
    anew = stepped(lambda number: (0.9 - number / 10, 0.999))
    assert_same_contents(contents(in_place), contents(anew))


def loss():
    return 2.0


@pytest.mark.parametrize(
    ("arguments", "options", "is_repeat"),
    [
        ((None,), {}, True),
        ((), {"closure": None}, True),
        ((loss,), {}, False),
        ((), {"closure": loss}, False),
        ((None,), {"max_norm": 1.0}, False),
        ((), {"max_norm": 1.0}, False),
        ((), {"zero_grad": True}, False),
        ((), {"max_norm": None}, False),
    ],
    ids=[
        "None",
        "closure=None",
        "loss",
        "closure=loss",
        "None and norm",
        "norm",
        "clear",
        "no norm",
    ],
)
@EACH
def test_a_step_without_a_closure_is_repeated(case, arguments, options, is_repeat, told):
    """Accelerate, the Trainer and torchtitan call it in these ways."""
    optimizer, params = build(case)
    for seed in (1, 2, 3):
        set_grads(params, seed)
        optimizer.step(*arguments, **options)
    assert told.answers == ([True, True] if is_repeat else [])


@pytest.mark.parametrize("everywhere", [False, True])
def test_hooks_are_called(everywhere):
    optimizer, params = build(PLAIN[0])
    calls = []
    for number in range(4):
        set_grads(params, number)
        optimizer.step()
        if number == 1:
            register = (
                register_optimizer_step_pre_hook
                if everywhere
                else optimizer.register_step_post_hook
            )
            handle = register(lambda *_: calls.append(1))
    handle.remove()
    set_grads(params, 5)
    optimizer.step()
    assert len(calls) == 2


def counts(base, wraps=lambda step: lambda override: override):
    """Returns a subclass that overrides the step; ``wraps`` returns what decorates it."""

    class Counting(base):
        @wraps(base.step)
        def step(self, *arguments, **options):
            self.calls = getattr(self, "calls", 0) + 1
            return super().step(*arguments, **options)

    return Counting


def counts_and_wraps(base):
    return counts(base, functools.wraps)


def is_traced(base):
    """Replaces the step of a class, as a tracer does."""
    direct = base.step

    @functools.wraps(direct)
    def step(self, *arguments, **options):
        self.calls = getattr(self, "calls", 0) + 1
        return direct(self, *arguments, **options)

    base.step = step
    return base


@pytest.mark.parametrize("first", [False, True], ids=["before", "after an instance of the base"])
@pytest.mark.parametrize("change", [counts, counts_and_wraps, is_traced])
@EACH
def test_a_step_of_another_is_called_at_each_step(case, change, first):
    namespace = {"step": FusedOptimizer.step}  # which no instance has had wrapped
    base = type(case.optimizer.__name__, (case.optimizer,), namespace)
    if first:
        build(dataclasses.replace(case, optimizer=base))
    optimizer, params = build(dataclasses.replace(case, optimizer=change(base)))
    for seed in (1, 2, 3):
        set_grads(params, seed)
        optimizer.step()
    assert optimizer.calls == 3


@pytest.mark.parametrize("cls", [torch.Tensor, Parameter], ids=lambda cls: cls.__name__)
def test_a_class_may_get_a_gradient_of_its_own(cls, told, monkeypatch):
    (ours, params), (theirs, others) = build(PLAIN[0]), build(PLAIN[0])
    for seed in (1, 2):
        for optimizer, its in ((ours, params), (theirs, others)):
            set_grads(its, seed)
            optimizer.step()
    assert told.answers[-2:] == [True, True]
    of_torch = torch.Tensor.grad.__get__
    for p in others:
        p.grad = 1 - p.grad
    theirs.step()
    monkeypatch.setattr(cls, "grad", property(lambda p: 1 - of_torch(p)), raising=False)
    ours.step()
    monkeypatch.undo()
    assert_same_contents(contents(ours), contents(theirs))


def wrong_shape(optimizer, params):
    params[0].grad.data = torch.ones(31, 33)


def wrong_dtype(optimizer, params):
    params[0].grad.data = torch.ones(33, 31, dtype=torch.float64)


def shared_weights(optimizer, params):
    params[1].data = params[0].data.view(-1)[:7]


def expanded_weight(optimizer, params):
    params[1].data = torch.ones(1).expand(7)


def wrong_state(optimizer, params):
    name = next(name for name in optimizer.state[params[1]] if name not in NUMBERS)
    optimizer.state[params[1]][name].data = torch.ones(8)


@subjects(
    (ROWS, [wrong_shape, wrong_dtype, shared_weights, expanded_weight]),
    (WITH_STATES, [wrong_state]),
)
def test_what_is_wrong_is_found_before_anything_has_changed(case, change):
    optimizer, params = build(case)
    for seed in (1, 2):
        set_grads(params, seed)
        optimizer.step()
    set_grads(params, 3)
    change(optimizer, params)
    others = [params[2], *optimizer.state[params[2]].values(), params[3]]
    before, versions = [tensor.clone() for tensor in others], [p._version for p in params]
    with pytest.raises(RuntimeError):
        optimizer.step()
    assert all(map(torch.equal, others, before))
    assert [p._version for p in params] == versions


def test_gradients_that_come_to_share_memory_are_kept(monkeypatch):
    def stepped():
        optimizer, params = build(next(case for case in PLAIN if case.has("keep_grad")))
        for group, keep_grad in zip(optimizer.param_groups, (True, False), strict=True):
            group["keep_grad"] = keep_grad
        for seed in (1, 2, 3):
            set_grads(params, seed, move=True)
            if seed == 3:
                params[3].grad = params[0].grad[2, 3]
            optimizer.step()
        return contents(optimizer), params[0].grad

    repeated, grad = stepped()
    monkeypatch.setattr(ops, "bind", None)
    expected, expected_grad = stepped()
    assert_same_contents(repeated, expected)
    assert torch.equal(grad, expected_grad)


@pytest.mark.parametrize("arguments", [(), (1,), (1, ()), (1, [])], ids=str)
def test_other_arguments_are_refused(arguments):
    with pytest.raises(TypeError):
        ops.bind.repeat(*arguments)
