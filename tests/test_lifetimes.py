"""What nobody holds is freed at once, by the count of its references: no collector has to run."""

import copy
import gc
import pickle
import types
import weakref

import pytest
import torch

from cases import CASES, dealt, first_of_each
from test_composites import ROWS as COMPOSED

SHAPE = (12, 8)
#: Rows without states are seldom, and take another way.
ROWS = (*first_of_each(lambda case: (case.optimizer, bool(case.states)), CASES), *COMPOSED)
UNFUSED = pytest.mark.parametrize("fused", [None, False], ids=["fused", "unfused"])


@pytest.fixture(autouse=True)
def no_collector():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


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


@pytest.mark.parametrize(
    ("row", "use"), dealt(ROWS, USES, 3), ids=lambda value: getattr(value, "__name__", str(value))
)
@UNFUSED
def test_a_deleted_optimizer_frees_all_that_it_has(row, fused, use):
    optimizer = row.build([new_weight(row)], fused=fused)  # torch holds the first one of a class
    optimizer = row.build([new_weight(row)], fused=fused)
    use(optimizer)
    references = [weakref.ref(optimizer), *map(weakref.ref, tensors_of(optimizer))]
    assert len(references) > 1
    del optimizer
    assert count_alive(references) == 0
