"""What nobody holds is freed at once, by the count of its references: no collector has to run."""

import copy
import gc
import itertools
import pathlib
import pickle
import resource
import sys
import types
import weakref

import pytest
import torch

import fusedstep
from support.cases import CASES, dealt, first_of_each
from support.composites import ROWS as COMPOSED

SHAPE = (12, 8)
#: Rows without states are seldom, and take another way.
ROWS = (*first_of_each(lambda case: (case.optimizer, bool(case.states)), CASES), *COMPOSED)
EACH = pytest.mark.parametrize("row", ROWS, ids=str)
UNFUSED = pytest.mark.parametrize("fused", [None, False], ids=["fused", "unfused"])


@pytest.fixture(autouse=True, scope="module")
def compiler_is_imported():
    """torch imports its compiler at the first `state_dict()`, and holds the frames of that call."""
    torch.optim.SGD([torch.ones(1, requires_grad=True)]).state_dict()


@pytest.fixture(autouse=True)
def no_collector(compiler_is_imported):
    gc.collect(1)  # the last test's objects; older objects take a third of a second
    gc.disable()
    yield
    gc.enable()


def str_of(value):
    if isinstance(value, tuple):
        return "-".join(map(str_of, value))
    return getattr(value, "__name__", str(value))


def new_weight(row):
    weight = torch.nn.Parameter(torch.ones(SHAPE))
    weight.grad = getattr(row, "grad", torch.Tensor.clone)(torch.full(SHAPE, 0.5))
    return weight


def tensors_of(optimizer):
    """All tensors that it holds, in whatever: states, counts, weights, scratch memory."""
    seen, todo = {}, [vars(optimizer)]
    while todo:
        each = todo.pop()
        ends = (type, types.ModuleType, types.FunctionType, str, bytes, int, float)
        if id(each) in seen or isinstance(each, ends):
            continue
        seen[id(each)] = each
        if not isinstance(each, torch.Tensor):
            todo += gc.get_referents(each)
    return [each for each in seen.values() if isinstance(each, torch.Tensor)]


def count_alive(references):
    return sum(reference() is not None for reference in references)


def never(optimizer): ...


def once(optimizer):
    optimizer.step()


def repeatedly(optimizer):
    for _ in range(3):
        optimizer.step()


def clipped(optimizer):
    optimizer.step()
    optimizer.step(max_norm=1.0, zero_grad=True)


def with_a_closure(optimizer):
    optimizer.step(lambda: 1.0)


def saved(optimizer):
    optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.step()


def copied(optimizer):
    optimizer.step()
    copy.deepcopy(optimizer).step()
    pickle.loads(pickle.dumps(optimizer)).step()


def failed(optimizer):
    optimizer.step()
    optimizer.param_groups[0]["lr"] = "much"
    with pytest.raises((TypeError, ValueError)):
        optimizer.step()


def extended(optimizer):
    optimizer.step()
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(SHAPE))]})
    optimizer.step()


USES = [never, once, repeatedly, clipped, with_a_closure, saved, copied, failed, extended]


@pytest.mark.parametrize(("row", "use"), dealt(ROWS, USES, 5), ids=str_of)
@UNFUSED
def test_a_deleted_optimizer_frees_all_that_it_has(row, fused, use):
    optimizer = row.build([new_weight(row)], fused=fused)  # torch holds the first one of a class
    optimizer = row.build([new_weight(row)], fused=fused)
    use(optimizer)
    references = [weakref.ref(optimizer), *map(weakref.ref, tensors_of(optimizer))]
    assert len(references) > 1
    del optimizer
    assert count_alive(references) == 0


def another_list(optimizer, weight):
    kept = optimizer.param_groups[0]["params"][1:]
    optimizer.param_groups[0]["params"] = [weight, *kept]


def in_its_place(optimizer, weight):
    optimizer.param_groups[0]["params"][0] = weight


def another_group(optimizer, weight):
    group = optimizer.param_groups.pop(0)
    optimizer.add_param_group(group | {"params": [weight, *group["params"][1:]]})


def shorter_list(optimizer, weight):
    optimizer.param_groups[0]["params"].pop(0)
    optimizer.step()
    optimizer.param_groups[0]["params"].insert(0, weight)


def list_emptied(optimizer, weight):
    group = optimizer.param_groups[0]
    kept = group["params"][1:]
    group["params"].clear()
    optimizer.step()
    group["params"].extend((weight, *kept))


CHANGES = [another_list, in_its_place, another_group, shorter_list, list_emptied]


def forget_state(optimizer, weight):
    optimizer.state.pop(weight, None)


def clear_states(optimizer, weight):
    optimizer.state.clear()


def step_clipped(optimizer):
    optimizer.step(max_norm=1.0)


#: 13 does not divide their number: the share of a row has several of each kind.
WAYS = list(
    itertools.product(CHANGES, [forget_state, clear_states], [once, repeatedly, step_clipped])
)


@pytest.mark.parametrize(("row", "way"), dealt(ROWS, WAYS, 13), ids=str_of)
@UNFUSED
def test_a_weight_that_has_left_is_freed_at_the_next_step(row, fused, way):
    change, forget, step = way
    weight, gone, held = new_weight(row), [], []
    optimizer = row.build([weight, new_weight(row)], fused=fused)
    for _ in range(4):
        step(optimizer)
        assert count_alive(gone) == 0
        held.append(len(tensors_of(optimizer)))
        forget(optimizer, weight)
        gone.append(weakref.ref(weight))
        weight = new_weight(row)
        change(optimizer, weight)
    assert held[-1] == held[1]


@EACH
@UNFUSED
def test_the_weights_of_a_group_that_is_removed_are_freed_at_the_next_step(row, fused):
    weights = [new_weight(row) for _ in range(2)]
    optimizer = row.build(weights[:1], fused=fused)
    group = optimizer.param_groups[0]
    optimizer.add_param_group(group | {"params": weights[1:]})
    repeatedly(optimizer)
    forget_state(optimizer, weights[1])
    gone = weakref.ref(weights.pop())
    optimizer.param_groups.pop()
    optimizer.step()
    assert gone() is None


def list_shortened(groups):
    groups[1]["params"].pop()


def group_removed(groups):
    groups.pop()


@EACH
@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "alone"])
@pytest.mark.parametrize("remove", [list_shortened, group_removed])
def test_a_weight_that_has_left_an_offloaded_optimizer_is_freed_at_the_next_step(
    row, overlap, remove
):
    weights = [new_weight(row) for _ in range(2)]
    optimizer = row.build(weights[:1])
    group = optimizer.param_groups[0]
    optimizer.add_param_group(group | {"params": weights[1:]})
    optimizer = fusedstep.offload(optimizer, overlap=overlap)
    optimizer.step()
    remove(optimizer.param_groups)
    for _ in range(2):  # it may be in a group again, as long as somebody has it
        weights[0].grad = new_weight(row).grad
        optimizer.step()
        assert len(optimizer._on_cpu) == 2
    copy_of = weakref.ref(optimizer._on_cpu[weights[1]].weight)
    optimizer.state.pop(weights[1], None)
    gone = weakref.ref(weights.pop())
    weights[0].grad = new_weight(row).grad
    optimizer.step()
    assert gone() is None
    assert copy_of() is None
    assert len(optimizer._on_cpu) == 1
    optimizer.remove()


def data_exchanged(optimizer, weight):
    other, grad = optimizer.param_groups[0]["params"][0], weight.grad
    other.data, other.grad = weight.data, grad


def data_grown(optimizer, weight):
    """As a table that grows: all states are made anew."""
    optimizer.state.clear()
    other = optimizer.param_groups[0]["params"][0]
    rows = 16 if len(other) == SHAPE[0] else SHAPE[0]
    kind = {"dtype": torch.float32, "device": "cpu"}
    other.grad = None
    other.data = torch.ones(rows, SHAPE[1], **kind)
    other.grad = weight.grad.new_zeros(other.shape) if weight.grad.is_sparse else other.data * 0.5


def group_added(optimizer, weight):
    """A group comes at the end, and the first one of these goes."""
    group = optimizer.param_groups[0]
    optimizer.add_param_group(group | {"params": [weight]})
    if len(optimizer.param_groups) > 3:
        for each in optimizer.param_groups.pop(1)["params"]:
            optimizer.state.pop(each, None)


EXCHANGES = [another_list, in_its_place, data_exchanged, data_grown, group_added]


def steps_and_exchanges(row, fused, exchange, count):
    """Yields the optimizer after each of so many steps, which an exchange follows."""
    weight = new_weight(row)
    optimizer = row.build([weight, new_weight(row)], fused=fused)
    for _ in range(count):
        optimizer.step()
        yield optimizer
        if exchange in (another_list, in_its_place):
            optimizer.state.pop(weight, None)
        weight = new_weight(row)
        exchange(optimizer, weight)


@pytest.mark.parametrize(("row", "exchange"), dealt(ROWS, EXCHANGES, 5), ids=str_of)
@UNFUSED
def test_many_exchanges_of_weights_take_no_memory(row, fused, exchange):
    """The tensors that the optimizer holds become no more."""
    held = []
    for count, optimizer in enumerate(steps_and_exchanges(row, fused, exchange, 100)):
        if count in (49, 99):
            held.append(len(tensors_of(optimizer)))
    assert held[1] == held[0]


def resident_bytes():
    pages = int(pathlib.Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


@pytest.mark.skipif(sys.platform != "linux", reason="resident memory is read from /proc")
@pytest.mark.parametrize(
    ("name", "exchange"), [("adamw", in_its_place), ("Adafactor", data_exchanged)], ids=str_of
)
@UNFUSED
def test_a_thousand_exchanges_take_no_resident_memory(name, fused, exchange, monkeypatch):
    """Native code and torch hold nothing either: a weight of each would be 28 MiB."""
    monkeypatch.setitem(globals(), "SHAPE", (128, 64))
    row = next(row for row in ROWS if str_of(row).startswith(name))
    resident = []
    for count, _ in enumerate(steps_and_exchanges(row, fused, exchange, 1000)):
        if count in (99, 999):
            resident.append(resident_bytes())
    assert resident[1] - resident[0] < 8 << 20
