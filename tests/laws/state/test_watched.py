"""Steps look at states that code outside may hold, and stop once nobody does."""

import copy
import weakref

import pytest
import torch

import fusedstep
from fusedstep._api import state as _watched
from fusedstep._native import ops
from support.cases import WITH_STATES, dealt
from support.repeated import build, set_grads
from support.stepping import assert_same_contents, contents

pytestmark = pytest.mark.skipif(ops.bind is None, reason="built without Python's headers")


def test_states_are_not_read_by_a_dictionary_of_none():
    """Accelerate reads a new optimizer's dictionary and loads it again."""
    optimizer, params = build(WITH_STATES[0])
    optimizer.load_state_dict(optimizer.state_dict())
    set_grads(params, 1)
    optimizer.step()
    assert not optimizer._store.was_read
    optimizer.state_dict()
    assert optimizer._store.was_read


def hold_nothing(optimizer):
    optimizer.state_dict()


def hold_the_dictionary(optimizer):
    return optimizer.state_dict()


def hold_the_state(optimizer):
    return optimizer.state


def hold_the_states_of_a_weight(optimizer):
    return list(optimizer.state.values())[-1]


def hold_a_tensor(optimizer):
    return list(list(optimizer.state.values())[-1].values())[-1]


def hold_weakly(optimizer):
    return weakref.ref(hold_a_tensor(optimizer))


def hold_its_memory(optimizer):
    return hold_a_tensor(optimizer).detach()


def hold_as_an_array(optimizer):
    return hold_a_tensor(optimizer).numpy()


def hold_by_autograd(optimizer):
    weight = torch.ones((), requires_grad=True)
    return (weight * hold_a_tensor(optimizer)).sum()


HOLDERS = [value for name, value in globals().items() if name.startswith("hold_")]


@pytest.mark.parametrize(
    ("case", "hold"),
    dealt(WITH_STATES, HOLDERS, 3),
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_steps_look_at_states_that_were_read_until_nobody_holds_them(case, hold):
    optimizer, params = build(case)

    def take_steps(count):
        for seed in range(count):
            set_grads(params, seed)
            optimizer.step()

    take_steps(2)
    held = hold(optimizer)
    take_steps(100)
    assert optimizer._store.was_read == (hold is not hold_nothing)
    del held
    take_steps(100)
    assert not optimizer._store.was_read
    assert optimizer.state
    assert optimizer._store.was_read


def test_a_loaded_state_is_looked_at_until_nobody_holds_it():
    optimizer, params = build(WITH_STATES[0])
    set_grads(params, 1)
    optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
    assert optimizer._store.was_read
    for _ in range(30):
        optimizer.step()
    assert not optimizer._store.was_read


@pytest.fixture(params=[torch.float64, torch.bfloat16, torch.float16, "meta"], ids=str)
def default(request):
    """Sets a default dtype or device for weights' first look at their states in the process."""
    _watched._holders_of_unread_states.cache_clear()
    if isinstance(request.param, torch.dtype):
        torch.set_default_dtype(request.param)
    else:
        torch.set_default_device(request.param)
    yield request.param
    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)


@pytest.mark.parametrize("case", WITH_STATES, ids=str)
def test_the_look_at_holders_follows_no_default(case, default):
    params = [torch.nn.Parameter(torch.ones(3, dtype=torch.float32, device="cpu"))]
    optimizer = case.build(params, lr=0.01)
    params[0].grad = torch.ones_like(params[0])
    optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
    for _ in range(60):
        optimizer.step()
    assert not optimizer._store.was_read


@pytest.mark.parametrize("hook", ["pre", "post"])
def test_a_hook_of_a_dictionary_may_keep_the_states(hook):
    optimizer, params = build(WITH_STATES[0])
    kept = []
    register = getattr(optimizer, f"register_state_dict_{hook}_hook")
    register(lambda optimizer, *_: kept.append(optimizer.state))
    optimizer.state_dict()
    set_grads(params, 1)
    optimizer.step()
    assert optimizer._store.was_read


class Delegates:
    """A wrapper that takes the class of its optimizer, as Lightning Fabric's."""

    def __init__(self, inner):
        self.inner = inner
        self._take_class(inner)

    def _take_class(self, inner):
        self.__class__ = type("Wrapped", (type(self), type(inner)), {})

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def step(self, *arguments, **options):
        return self.inner.step(*arguments, **options)


class Copies(Delegates):
    """A wrapper that has the attributes of its optimizer too, as Fabric's before 2.1."""

    def __init__(self, inner):
        vars(self).update(vars(inner))
        super().__init__(inner)


def replace_states(optimizer, old):
    for state in optimizer.state.values():
        for name, value in state.items():
            state[name] = torch.full_like(value, 2)


def replace_memory(optimizer, old):
    for state in optimizer.state.values():
        for value in state.values():
            old.append(value.detach())  # a step that does not see this is to fail, not to crash
            value.data = value.data + 1


def clear_states(optimizer, old):
    optimizer.state.clear()


@pytest.mark.parametrize("wrap", [Delegates, Copies])
@pytest.mark.parametrize("case", WITH_STATES, ids=str)
def test_a_dictionary_loaded_through_a_wrapper_is_the_one_that_steps(case, wrap):
    found = []
    for through in (lambda optimizer: optimizer, wrap):
        inner, params = build(case)
        optimizer = through(inner)
        for seed in range(5):
            if seed == 2:
                saved = copy.deepcopy(optimizer.state_dict())
            if seed == 4:
                optimizer.load_state_dict(saved)
            set_grads(params, seed)
            optimizer.step()
        assert optimizer.state[params[0]] is inner.state[params[0]]
        found.append(contents(inner))
    assert_same_contents(*found)


@pytest.mark.parametrize("change", [replace_states, replace_memory, clear_states])
@pytest.mark.parametrize("wrap", [Delegates, Copies])
@pytest.mark.parametrize("case", WITH_STATES, ids=str)
def test_what_is_done_to_states_through_a_wrapper_is_noticed(case, wrap, change):
    found = []
    for through in (lambda optimizer: optimizer, wrap):
        inner, params = build(case)
        optimizer, old = through(inner), []
        for seed in range(6):
            if seed == 4:
                change(optimizer, old)
            set_grads(params, seed)
            optimizer.step()
        found.append(contents(inner))
    assert_same_contents(*found)


@pytest.mark.parametrize("wrap", [Delegates, Copies])
def test_a_wrapper_is_verified_offloaded_and_stepped_in_backward(wrap):
    found = []
    for through in (lambda optimizer: optimizer, wrap):
        for use in (fusedstep.offload, fusedstep.step_in_backward, fusedstep.verify):
            inner, params = build(WITH_STATES[0])
            optimizer = through(inner)
            stepped = use(optimizer)
            stepped = stepped if use is fusedstep.offload else optimizer
            for _ in range(3):
                sum((p * p).sum() for p in params).backward()
                stepped.step()
                stepped.zero_grad()
            found += [[p.detach() for p in params]]
    for expected, result in zip(found[:3], found[3:], strict=True):
        for each, other in zip(expected, result, strict=True):
            assert torch.equal(each, other)
