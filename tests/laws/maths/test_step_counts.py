"""Law: a count ends with its state, and random numbers and bases go on where float32 does not."""

import copy
import io
import itertools
import pickle
from itertools import chain

import pytest
import torch

from fusedstep import optim
from fusedstep._matrix import low_rank_bases
from fusedstep._state.counts import read_count
from support.cases import first_of_each
from support.stepping import WAYS, as_parameters, assert_same_contents, contents
from support.subjects import FIRST, SUBJECTS, built, steps

STOCHASTIC = WAYS["stochastic"]
ROUNDED = [subject for subject in SUBJECTS if STOCHASTIC.items() <= subject.options.items()]


def cleared(state):
    state.clear()


def dropped(state):
    for weight in list(state):
        del state[weight]


def emptied(state):
    for weight in list(state):
        state[weight] = {}


@pytest.mark.parametrize("drop", [cleared, dropped, emptied], ids=lambda each: each.__name__)
@pytest.mark.parametrize("subject", [*ROUNDED, *FIRST], ids=str)
def test_a_count_ends_with_its_state(subject, drop):
    params, optimizer = built(subject, "cpu")
    steps(subject, optimizer, params, [1, 2])
    fresh_params = as_parameters(params)
    fresh = subject.build(fresh_params)
    drop(optimizer.state)
    steps(subject, optimizer, params, [3, 4])
    steps(subject, fresh, fresh_params, [3, 4])
    assert_same_contents(contents(optimizer), contents(fresh))


def sgd(**options):
    weight = torch.nn.Parameter(torch.ones(9, dtype=torch.bfloat16))
    weight.grad = torch.full_like(weight, 0.01)
    return weight, optim.SGD([weight], lr=0.1, dampening=0.5, **options)


@pytest.mark.parametrize("fused", [None, False])
@pytest.mark.parametrize("rounding", [None, "stochastic"])
def test_a_count_begins_with_moments_that_come_later(rounding, fused):
    weight, optimizer = sgd(rounding=rounding, fused=fused)
    for _ in range(3):
        optimizer.step()
    fresh_weight, fresh = sgd(rounding=rounding, fused=fused, momentum=0.9)
    fresh_weight.data.copy_(weight)
    optimizer.param_groups[0]["momentum"] = 0.9
    optimizer.step()
    fresh.step()
    assert_same_contents(contents(optimizer), contents(fresh))


@pytest.mark.parametrize("fused", [None, False])
@pytest.mark.parametrize("momentum", [0, 0.9])
def test_a_count_goes_on_while_weights_are_not_rounded_at_random(momentum, fused):
    weight, optimizer = sgd(rounding="stochastic", fused=fused, momentum=momentum)
    for rounding in ("stochastic", "stochastic", None, "stochastic"):
        optimizer.param_groups[0]["rounding"] = rounding
        optimizer.step()
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert optimizer.state[weight]["step"] == 4


def as_a_dictionary(optimizer):
    weights = [torch.nn.Parameter(p.detach().clone()) for p in optimizer.param_groups[0]["params"]]
    own = {name: optimizer.param_groups[0].get(name, False) for name in ("use_muon",)}
    other = type(optimizer)([{"params": weights} | {k: v for k, v in own.items() if v}])
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    return other


COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda optimizer: pickle.loads(pickle.dumps(optimizer)),
    "dictionary": as_a_dictionary,
}
#: Roundings, each with the weights that have a gradient: both, or the second one. Two more steps of
#: each kind follow a copy. Where rounding at random begins later, a copy counts from there: no
#: dictionary has a count of steps before.
SEQUENCES = {
    "off": ([("stochastic", 2), ("stochastic", 2)], [None]),
    "off, a step before": ([("stochastic", 2), (None, 2)], [None, "stochastic"]),
    "off for one": ([("stochastic", 2), (None, 1), ("stochastic", 1)], ["stochastic", None]),
    "kahan for one": ([("stochastic", 2), ("kahan", 1)], ["stochastic", "kahan"]),
}
WITHOUT_COUNTS = {
    "SGD": (optim.SGD, {}),
    "SGD with momentum": (optim.SGD, {"momentum": 0.9, "dampening": 0.5}),
    "Lion": (optim.Lion, {}),
    "RMSprop": (optim.RMSprop, {}),
    "Muon": (optim.Muon, {}),
    "MuSGD": (optim.MuSGD, {"momentum": 0.9}),
    "MuSGD of a matrix": (optim.MuSGD, {"momentum": 0.9, "use_muon": True}),
}


@pytest.mark.parametrize("fused", [None, False])
@pytest.mark.parametrize("sequence", SEQUENCES)
@pytest.mark.parametrize("made", COPIES)
@pytest.mark.parametrize("name", WITHOUT_COUNTS)
def test_a_copy_goes_on_as_its_original(name, made, sequence, fused):
    """What no dictionary has, and plans of steps before, change neither counts nor states."""
    cls, options = WITHOUT_COUNTS[name]
    options = dict(options)
    group = {"use_muon": True} if options.pop("use_muon", False) else {}
    shapes = (4, 6), (5, 3)
    weights = [torch.nn.Parameter(torch.ones(s, dtype=torch.bfloat16)) for s in shapes]
    optimizer = cls([{"params": weights} | group], lr=0.1, fused=fused, **options)

    def step(optimizer, rounding, count):
        (group,) = optimizer.param_groups
        group["rounding"] = rounding
        for i, p in enumerate(group["params"]):
            p.grad = torch.full_like(p, 0.01) if i >= len(weights) - count else None
        optimizer.step()

    before, after = SEQUENCES[sequence]
    for rounding, count in before:
        step(optimizer, rounding, count)
    other = COPIES[made](optimizer)
    for rounding in after:
        for count in (2, 1, 2):
            for each in (optimizer, other):
                step(each, rounding, count)
            assert_same_contents(contents(other), contents(optimizer))


@pytest.mark.parametrize("fused", [None, False])
@pytest.mark.parametrize("cls", [optim.Muon, optim.MuSGD])
def test_a_count_of_one_rule_stays_in_steps_of_another(cls, fused):
    """AdamW's count goes with its moments, which stay beside Muon's average."""
    weight = torch.ones(2, 2, requires_grad=True)
    weight.grad = torch.ones(2, 2)
    optimizer = cls([{"params": [weight], "use_muon": False}], lr=0.1, fused=fused)
    (group,) = optimizer.param_groups
    for _ in range(3):
        optimizer.step()
    before = optimizer.state[weight].get("step")
    group["use_muon"] = True
    optimizer.step()
    assert optimizer.state[weight].get("step") == before


LAST = 2**24
"""From here on float32 lacks integers."""
COUNTED = [
    subject
    for subject in (*ROUNDED, *FIRST)
    if subject in ROUNDED
    or subject.optimizer not in (optim.Lion, optim.SGD, optim.Muon, optim.MuSGD)
]


def set_counts(optimizer, count):
    for state in optimizer.state.values():
        state["step"].fill_(count)


def counts(optimizer):
    return {read_count(state["step"]) for state in optimizer.state.values()}


def through_a_file(optimizer):
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    optimizer.load_state_dict(torch.load(file))
    return optimizer


def replaced(optimizer):
    for state in optimizer.state.values():
        state["step"] = torch.tensor(float(LAST), dtype=torch.float32)
    return optimizer


@pytest.mark.parametrize("subject", COUNTED, ids=str)
def test_counts_go_on_past_what_float32_has(subject):
    params, optimizer = built(subject, "cpu")
    steps(subject, optimizer, params, [1])
    set_counts(optimizer, LAST - 2)
    steps(subject, optimizer, params, [2, 3, 4])
    assert counts(optimizer) == {LAST + 1}
    for event in (through_a_file, copy.deepcopy, lambda each: pickle.loads(pickle.dumps(each))):
        before = counts(optimizer).pop()
        optimizer = event(optimizer)
        params = optimizer.param_groups[0]["params"]
        steps(subject, optimizer, params, [5, 6])
        assert counts(optimizer) == {before + 2}
    params[0].grad = params[0].grad.clone()
    optimizer.step()
    optimizer.step()
    assert counts(optimizer) == {LAST + 9}
    assert {state["step"].item() for state in optimizer.state.values()} == {LAST + 8}
    steps(subject, replaced(optimizer), params, [7, 8, 9])
    assert counts(optimizer) == {LAST + 3}


@pytest.mark.parametrize("fused", [None, False])
def test_counts_that_float32_has_are_taken_over(fused):
    weight, optimizer = sgd(rounding="stochastic", fused=fused)
    optimizer.step()
    dictionary = optimizer.state_dict()
    dictionary["state"][0]["step"] = torch.tensor(2.0**24 + 6, dtype=torch.float32)
    optimizer.load_state_dict(dictionary)
    for _ in range(3):
        optimizer.step()
    assert read_count(optimizer.state[weight]["step"]) == LAST + 9


#: One subject of each class that rounds at random, and options with which a step is small.
SMALL = first_of_each(lambda each: (each.optimizer, each.options.get("fused")), ROUNDED)


@pytest.mark.parametrize("subject", SMALL, ids=str)
def test_other_numbers_are_drawn_past_what_float32_has(subject):
    weight = torch.nn.Parameter(torch.ones(64, 64, dtype=torch.bfloat16))
    weight.grad = torch.ones_like(weight)
    optimizer = subject.build([weight])
    optimizer.step()
    set_counts(optimizer, LAST)
    optimizer.param_groups[0]["lr"] = 1.0 if subject.optimizer is optim.Adadelta else 1e-3
    found = []
    for _ in range(12):
        with torch.no_grad():
            weight.fill_(1.0)
        optimizer.step()
        found.append(weight.detach() - weight.min() > 0)
    differing = [not torch.equal(one, other) for one, other in itertools.pairwise(found)]
    assert all(differing)


PROJECTED = [
    subject
    for subject in SUBJECTS
    if "update_proj_gap" in subject.of_group and subject.options.keys() == {"fused"}
]


@pytest.mark.parametrize("subject", PROJECTED, ids=str)
def test_bases_are_made_anew_past_what_float32_has(subject, monkeypatch):
    gap, drawn = 3, []
    subject = subject._replace(of_group=subject.of_group | {"update_proj_gap": gap})
    key_of_draws = low_rank_bases.key_of_draws
    monkeypatch.setattr(
        low_rank_bases, "key_of_draws", lambda *of: drawn.append(of[1]) or key_of_draws(*of)
    )

    def bases(optimizer):
        states = [state.items() for state in optimizer.state.values()]
        kept = [value for name, value in chain(*states) if name.startswith("projector")]
        return [value.clone() for value in kept] or [torch.tensor(drawn[-1])]

    def changes(count):
        params, optimizer = built(subject, "cpu")
        steps(subject, optimizer, params, [1])
        set_counts(optimizer, count)
        found = []
        for number in range(2, 10):
            steps(subject, optimizer, params, [number])
            found.append(bases(optimizer))
        return [all(map(torch.equal, *pair)) for pair in itertools.pairwise(found)]

    expected = [True, True, False, True, True, False, True]
    assert changes(gap) == expected
    assert changes(gap * (LAST // gap + 1)) == expected
