"""Events between steps: those in the backward pass, and offloaded ones, follow as plain ones do."""

import importlib
import json

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import fusedstep
from fusedstep import optim
from fuzz import events, oracle, properties, run, shrink
from support.buckets import (
    ALONE,
    PAIRS,
    WHOLE,
    Net,
    assert_same,
    backward,
    batches,
    of_class,
    two_groups,
)
from support.cases import COMPOSITES, PLAIN, first_of_each

CLASSES = first_of_each(lambda case: case.optimizer, PLAIN)
IN_BACKWARD = {"offload": False, "overlap": True}
OVERLAPPED = {"offload": True, "overlap": True}
AFTER = {"offload": True, "overlap": False}
MODES = {"in backward": IN_BACKWARD, "offload": OVERLAPPED, "offload, no overlap": AFTER}
ALL = [1, 2, 3]  # weights: the first two are of one group


def step(*changes, passes=(ALL,), between=(), before_step=()):
    """A step with changes before its first pass, before its second one, and before the step."""
    of_pass = [list(changes), *[list(between) for _ in passes[1:]]]
    return {
        "changes": [],
        "passes": [{"weights": w, "changes": c} for w, c in zip(passes, of_pass, strict=True)],
        "before_step": list(before_step),
    }


def change(do, weight=1, **options):
    """A change of `events`, with what most of them need."""
    given = {"group": 0, "to": None, "factor": 0.5, "replaced": False}
    return {"do": do, "weight": weight} | given | options


TWO = (ALL, ALL)
#: Steps by what happens in them, with as many passes as are announced.
EVENTS = {
    "unfrozen": [step(change("freeze")), step(), step()],
    "frozen and unfrozen": [step(), step(change("freeze", 2)), step(change("freeze", 2))],
    "data edited": [step(), step(change("data")), step(change("data", 3))],
    "data exchanged": [step(), step(change("exchange")), step()],
    "states cleared": [step(), step(), step(change("reset")), step()],
    "states replaced": [step(), step(), step(change("reset", replaced=True)), step()],
    "state dropped": [step(), step(), step(change("drop")), step()],
    "groups reversed": [step(change("groups")), step(), step(change("groups"))],
    "weights reordered": [step(change("order")), step(), step(change("order"))],
    "weight moved": [step(change("go", to=1)), step(), step(change("go", to=0))],
    "weight removed": [step(change("go")), step(), step(change("go"))],
    "group removed": [step(change("out")), step(), step(change("out"))],
    "loaded": [step(), step(change("load")), step(change("groups"), change("load"))],
    "unfrozen, two passes": [step(change("freeze"), passes=TWO), step(passes=TWO)],
    "frozen in the first pass": [step(passes=TWO, between=[change("freeze")])],
    "moved between passes": [step(passes=TWO, between=[change("go", to=1), change("groups")])],
}
#: Passes more than are announced, of weights whose bucket has not been stepped.
LOSSES = [step(passes=([1], [1, 2, 3])), step(passes=([2], [1, 2])), step(passes=([3], [1], [2]))]
#: Those that come when steps in the backward pass have been taken.
LATER = {
    "a second pass": [step(passes=TWO), step()],
    "edited before the step": [step(before_step=[change("data")]), step()],
    "group removed before the step": [step(before_step=[change("out")]), step(change("out"))],
    "zeroed between passes": [step(passes=TWO, between=[change("zero_grad")]), step()],
}


def case_of(row, steps, mode, passes=1):
    shapes = {1: [3, 2], 2: [4], 3: [2]}
    weights = [{"id": i, "dtype": "float32", "shape": shape} for i, shape in shapes.items()]
    weights[0]["frozen"] = steps[0]["passes"][0]["changes"][:1] == [change("freeze")]
    return {
        "seed": 3,
        "row": row.name,
        "mode": mode | {"cap": WHOLE, "passes": passes, "kept": {}},
        "options": {},
        "groups": [
            {"options": {"lr": 0.1}, "weights": weights[:2]},
            {"options": {"lr": 0.01}, "weights": weights[2:]},
        ],
        "steps": [{"n": n} | step for n, step in enumerate(steps, 1)],
        "settings": [[0, 1]],
    }


def assert_passes(name, case):
    try:
        events.check(case, may_refuse=False)
    except run.CaseError as error:
        pytest.fail(f"{name}, {case['mode']}: {error}")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("row", CLASSES, ids=str)
def test_events_change_what_they_change_of_the_plain_optimizer(row, mode):
    for name, steps in EVENTS.items():
        passes = max(len(each["passes"]) for each in steps)
        assert_passes(name, case_of(row, steps, MODES[mode], passes))
    assert_passes("losses of other weights", case_of(row, LOSSES, MODES[mode]))


@pytest.mark.parametrize("passes", [1, None])
@pytest.mark.parametrize("row", CLASSES, ids=str)
def test_gradients_that_are_kept_are_those_of_the_step(row, passes):
    modes = (AFTER,) if passes else (AFTER, OVERLAPPED)
    for name, steps in LATER.items():
        for mode in modes:
            assert_passes(name, case_of(row, steps, mode, passes))


PLACES = {
    name: EVENTS[name] for name in ("groups reversed", "weights reordered", "weight moved")
} | {
    "another reordered": [step(passes=([2],)), step(change("go", to=0), passes=([2],)), step()],
    "reordered beside one without a gradient": [
        *[step(passes=([2, 3],))] * 2,
        step(change("order"), passes=([2, 3],)),
        step(passes=([2, 3],)),
    ],
}


@pytest.mark.parametrize("mode", ["plain", *MODES])
@pytest.mark.parametrize("event", [*PLACES])
def test_random_numbers_follow_the_places_of_weights(event, mode):
    """Stochastic rounding is that of torch operations, whichever plans there were."""
    row = next(case for case in CLASSES if case.optimizer is optim.SGD)
    case = case_of(row, PLACES[event], MODES.get(mode, IN_BACKWARD))
    case["mode"] |= {"cap": ALONE, "kept": {"rounding": "stochastic", "seed": 2}}
    for group in case["groups"]:
        for weight in group["weights"]:
            weight |= {"dtype": "bfloat16", "shape": [64]}
    plain = events.Training(case | {"options": {"fused": False}}, None)
    other = events.Training(case, None if mode == "plain" else case["mode"])
    for each in case["steps"]:
        plain.take(each)
        other.take(each)
        assert_same(list(other.weights.values()), list(plain.weights.values()))
    other.end()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "cls", [each for each in COMPOSITES if each is not optim.SparseAdam], ids=lambda c: c.__name__
)
def test_events_of_optimizers_of_matrices(cls, mode):
    def trained(mode):
        model = Net()
        model.layers[0].weight.requires_grad_(False)
        optimizer = of_class(cls, model)
        if mode is not None:
            optimizer = begun(optimizer, mode, bucket_cap_mb=WHOLE)[0]
        model.layers[0].weight.requires_grad_(True)
        for n, batch in enumerate(batches(4)):
            backward(model, batch)
            optimizer.step()
            optimizer.zero_grad()
            model.layers[1].weight.data.mul_(0.9)
            if n == 1:
                optimizer.param_groups.reverse()
            if n == 2:
                optimizer.state.clear()
        return [p.detach() for p in model.parameters()]

    torch.testing.assert_close(trained(MODES[mode]), trained(None), rtol=2e-2, atol=2e-4)


def begun(optimizer, mode, **options):
    """The optimizer to step, and the handle that ends it."""
    if mode["offload"]:
        optimizer = fusedstep.offload(optimizer, overlap=mode["overlap"], **options)
        return optimizer, optimizer
    return optimizer, fusedstep.step_in_backward(optimizer, **options)


def of_sgd(mode, count=1, **options):
    """Weights of zeros, and their optimizer with a learning rate of 1."""
    weights = [nn.Parameter(torch.zeros(3)) for _ in range(count)]
    return *weights, begun(optim.SGD(weights, lr=1.0), mode, **options)[0]


@pytest.mark.parametrize("mode", [IN_BACKWARD, OVERLAPPED], ids=["in backward", "offload"])
def test_a_second_gradient_of_a_stepped_bucket_is_refused(mode):
    for _ in range(20):  # it once depended on what came first
        a, b, optimizer = of_sgd(mode, 2)
        (a + b).sum().backward()
        with pytest.raises(RuntimeError, match=r"parameter \d of group 0 .*accumulation_steps"):
            (10 * a * a + 10 * b * b + a + b).sum().backward()
        assert a.tolist() == b.tolist() == [-1, -1, -1]
        assert a.grad is not None or b.grad is not None
        optimizer.step()
        optimizer.zero_grad()
        (a + b).sum().backward()  # the next iteration
        optimizer.step()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("layers", [("in",), ("in", "out"), ("in", "in"), ("in", "in", "out")])
def test_gradients_in_pieces_are_added_or_refused(layers, mode):
    """Reentrant checkpoints have a part of the backward pass each."""

    def trained(mode, **options):
        model = Net()
        optimizer = optim.SGD(model.parameters(), lr=0.1)
        if mode is not None:
            optimizer = begun(optimizer, mode, **options)[0]
        for batch in batches(3):
            x = model.layers[1](batch)
            for place in layers:
                layer = model.layers[0]
                x = checkpoint(layer, x, use_reentrant=True) if place == "in" else layer(x)
            model.layers[2](x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return list(model.parameters())

    expected = trained(None)
    if len(layers) > 1 and MODES[mode]["overlap"]:
        # A weight may come back from the other thread between a piece's forward and backward pass:
        # autograd refuses the second before a gradient of the weight is there.
        texts = ["use_reentrant=False", "modified by an inplace operation"]
        text = "|".join(texts if MODES[mode]["offload"] else texts[:1])
        with pytest.raises(RuntimeError, match=text):
            trained(MODES[mode], bucket_cap_mb=ALONE)
    else:
        assert_same(trained(MODES[mode], bucket_cap_mb=ALONE), expected)
    if MODES[mode]["offload"]:
        assert_same(trained(MODES[mode], accumulation_steps=None), expected)


@pytest.mark.parametrize("mode", MODES)
def test_buckets_are_stepped_in_the_backward_pass_after_events(mode):
    """Gradients are freed there, those of weights that were frozen at first as well."""
    model = Net()
    model.layers[0].weight.requires_grad_(False)
    groups = two_groups(model)
    optimizer, handle = begun(optim.AdamW(groups), MODES[mode], bucket_cap_mb=PAIRS)
    model.layers[0].weight.requires_grad_(True)
    model.unused.requires_grad_(False)
    for n, batch in enumerate(batches(3)):
        backward(model, batch)
        assert not model.grads()
        optimizer.step()
        if n == 0:
            optimizer.param_groups.reverse()
        if n == 1:
            optimizer.param_groups[0]["params"].reverse()
    handle.remove()
    backward(model, batches(1)[0])
    assert len(model.grads()) == 8


def test_groups_that_are_added_are_stepped_in_the_backward_pass():
    a, b = (nn.Parameter(torch.zeros(3)) for _ in range(2))
    optimizer = optim.SGD([a], lr=1.0)
    fusedstep.step_in_backward(optimizer)
    optimizer.add_param_group({"params": [b], "lr": 10.0})
    for _ in range(2):
        (a + b).sum().backward()
        optimizer.step()
    assert [a[0].item(), b[0].item()] == [-2, -20]
    (a + b).sum().backward()
    assert [a[0].item(), b[0].item(), b.grad] == [-3, -30, None]
    with pytest.raises(RuntimeError, match="parameter 0 of group 0 is stepped in the backward"):
        fusedstep.step_in_backward(optim.SGD([b]))
    optimizer.param_groups.append({**optimizer.param_groups[0], "differentiable": True})
    with pytest.raises(RuntimeError, match="`differentiable`"):
        (a + b).sum().backward()


@pytest.mark.parametrize("mode", [OVERLAPPED, AFTER], ids=["offload", "offload, no overlap"])
def test_changes_that_a_copy_cannot_follow_are_refused(mode):
    a, b, optimizer = of_sgd(mode, 2, bucket_cap_mb=ALONE)
    optimizer.param_groups[0]["params"].append(nn.Parameter(torch.zeros(3)))
    for call in (lambda: (a + b).sum().backward(), optimizer.step, optimizer.state_dict):
        with pytest.raises(RuntimeError, match="parameter 2 of group 0 has not been offloaded"):
            call()
    optimizer.param_groups[0]["params"].pop()
    optimizer.zero_grad()
    a.data = torch.zeros(4)
    with pytest.raises(RuntimeError, match=r"parameter 0 of group 0 has another shape.*remove\(\)"):
        (a.sum() + b.sum()).backward()
    assert a.tolist() == [0, 0, 0, 0]
    assert a.grad.tolist() == [1, 1, 1, 1]


def test_the_state_is_a_view():
    a, b, optimizer = of_sgd(AFTER, 2)
    states = optimizer.state
    assert len(states) == 0
    assert a not in states
    assert states.get(a) is None
    assert states.pop(a, 1) == 1
    optimizer.param_groups[0]["momentum"] = 0.5
    (a + b).sum().backward()
    optimizer.step()
    assert [*states] == [a, b]
    assert states[a]["momentum_buffer"].tolist() == [1, 1, 1]
    states[b] = {"momentum_buffer": torch.zeros(3)}
    del states[a]
    assert [*states] == [b]
    states[a]["momentum_buffer"] = torch.ones(3)  # a new state, as in torch's
    assert states.setdefault(a, {}) is states[a]
    b_state = states[b]
    optimizer.state = {b: b_state}
    assert str(states).count("momentum_buffer") == len(states) == 1
    assert states[b] is b_state
    with pytest.raises(KeyError):
        states[nn.Parameter(torch.zeros(1))]


@pytest.mark.parametrize("mode", MODES)
def test_weights_are_swapped(mode):
    """As torch does it where its switch says so, and always with DTensors of an FSDP2 model."""
    model = Net()
    optimizer, _ = begun(optim.AdamW(model.parameters()), MODES[mode], bucket_cap_mb=ALONE)
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        for dtype in (torch.float64, torch.float32):
            model.to(dtype)
            assert {p.dtype for p in model.parameters()} == {dtype}
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    before = [p.detach().clone() for p in model.parameters()]
    for batch in batches(2):
        backward(model, batch)
        optimizer.step()
    backward(model, batch)
    assert not model.grads()  # hooks of swapped weights are registered anew
    assert not any(map(torch.equal, before[1:], list(model.parameters())[1:]))


def test_cases_of_events_have_everything_in_them():
    drawn = [events.draw(seed) for seed in range(300)]
    assert drawn == [json.loads(json.dumps(case)) for case in drawn]
    assert {case["row"] for case in drawn} == {row.name for row in PLAIN}
    steps = [step for case in drawn for step in case["steps"]]
    passes = [each for step in steps for each in step["passes"]]
    changed = [*(step["before_step"] for step in steps), *(each["changes"] for each in passes)]
    assert {change["do"] for changes in changed for change in changes} == {*events.CHANGES}
    for case in drawn:
        assert case["mode"]["overlap"] or case["mode"]["offload"]
    assert {case["mode"]["passes"] for case in drawn} == {None, 1, 2, 3}
    assert {case["mode"]["cap"] for case in drawn} == {*events.CAPS}


@pytest.mark.parametrize("seed", range(4))
def test_random_events(seed):
    for number in range(5):
        events.check(events.draw(1000 + 5 * seed + number))


def test_a_wrong_step_is_seen_and_made_small(monkeypatch):
    """A learning rate that has changed, for one."""
    case = next(case for case in map(events.draw, range(99)) if case["mode"]["offload"])
    case["steps"][0]["changes"] = [change("lr", group=group) for group in range(3)]
    events.check(case)
    module = importlib.import_module("fusedstep.offload")
    monkeypatch.setattr(module.OffloadedOptimizer, "_pass_options_on", lambda _: None)

    def fails(case):
        try:
            properties.check(case, oracle.Tally())
        except run.CaseError as error:
            return error.kind == "value"
        return False

    assert fails(case)
    small = shrink.shrink(case, fails)
    assert len(small["steps"]) == 1
    assert fails(small)
