"""Random and staggered bases belong to their weight, whatever its place in the groups becomes."""

import contextlib
import copy
import functools
import pickle

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch._subclasses import FakeTensorMode
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import fusedstep
from fusedstep import convert, import_state_dict, optim
from support.cases import dealt
from support.low_rank import as_params, assert_same, gradient, saved, weights_of

STEPS, EDIT = 10, 3
#: Weights whose staggered refreshes come at four steps. A random product has less columns.
GAP, SHAPES = 6, [(14, 12), (12, 7, 2), (14, 12), (14, 12)]

OF_GALORE = [
    {"svd": "randomized"},
    {"svd": "power"},
    {"svd": "lazy", "proj_type": "full"},
    {"stagger": True},
    {"svd": "lazy", "stagger": True},
]
ROWS = [
    (optim.APOLLOAdamW, {}),
    (optim.APOLLOAdamW, {"proj_type": "reverse_std", "scale_type": "tensor"}),
    *((optim.GaLoreAdamW, options) for options in OF_GALORE),
    *((optim.GaLoreAdamW8bit, options) for options in OF_GALORE[2:]),
    *((optim.GaLoreAdafactor, options) for options in OF_GALORE),
]
FUSED = pytest.mark.parametrize("fused", [None, False], ids=["fused", "unfused"])


def str_of(value):
    if isinstance(value, tuple):
        return "-".join(map(str_of, value))
    return getattr(value, "__name__", str(value))


def build(cls, options, fused=None):
    groups = [({}, [(3,)]), ({"rank": 2, "update_proj_gap": GAP}, SHAPES)]
    return cls(as_params(groups, torch.float32), fused=fused, **options)


def step(optimizer, first_places, numbers):
    """Gives each weight the gradients of its first place; that of one weight begins as zeros."""
    for number in numbers:
        for weight in weights_of(optimizer):
            place = first_places[weight]
            weight.grad = gradient(weight, number, place) * (place != 3 or number > EDIT)
        optimizer.step()


def by_first_place(*optimizers):
    return {p: place for each in optimizers for place, p in enumerate(weights_of(each))}


def reverse(optimizer):
    optimizer.param_groups[1]["params"].reverse()


def remove(optimizer):
    optimizer.state.pop(optimizer.param_groups[1]["params"].pop(0), None)


def move(optimizer):
    group = optimizer.param_groups[1]
    options = {name: value for name, value in group.items() if name != "params"}
    optimizer.add_param_group(options | {"params": [group["params"].pop(0)]})


def reverse_groups(optimizer):
    optimizer.param_groups.reverse()


EDITS = [reverse, remove, move, reverse_groups]


def on(edit, cls, options, fused, edited, load):
    """Another optimizer of weights in the order of an edited one, which takes over the states."""
    other = build(cls, options, fused)
    edit(other)
    for p, q in zip(weights_of(other), weights_of(edited), strict=True):
        p.data.copy_(q.detach())
    load(other, saved(edited))
    return other


@FUSED
@pytest.mark.parametrize(("row", "edit"), dealt(ROWS, EDITS, 2), ids=str_of)
def test_bases_follow_their_weight_when_groups_are_edited(row, edit, fused):
    """In the run itself, and in one that is resumed, copied, unpickled, converted or offloaded."""
    cls, options = row
    whole, edited = (build(cls, options, fused) for _ in range(2))
    places = by_first_place(whole, edited)
    step(whole, places, range(STEPS))
    right = {places[p]: p.detach() for p in weights_of(whole)}

    step(edited, places, range(EDIT))
    edit(edited)
    step(edited, places, [EDIT])
    go_on = functools.partial(on, edit, cls, options, fused, edited)
    others = {
        "loaded": go_on(lambda other, saved: other.load_state_dict(saved)),
        "imported": go_on(import_state_dict),
        "copied": copy.deepcopy(edited),
        "unpickled": pickle.loads(pickle.dumps(edited)),
    }
    if fused is None:
        others["converted"] = convert(copy.deepcopy(edited))
        others["offloaded"] = fusedstep.offload(copy.deepcopy(edited))
    for how, other in ({"edited": edited} | others).items():
        own = {p: places[q] for p, q in zip(weights_of(other), weights_of(edited), strict=True)}
        step(other, own, range(EDIT + 1, STEPS))
        for p in weights_of(other):
            assert torch.equal(p, right[own[p]]), (how, own[p])


def without_places(state):
    return {name: value for name, value in state.items() if name not in ("place", "turn")}


def unpickled(old):
    """An optimizer that was pickled before there were places in states."""
    old = copy.deepcopy(old)
    for p in old.state:
        old.state[p] = without_places(old.state[p])
    return pickle.loads(pickle.dumps(old))


def read_by(read, cls, options, fused):
    def reader(old):
        dictionary, other = saved(old), build(cls, options, fused)
        states = dictionary["state"]
        dictionary["state"] = {key: without_places(state) for key, state in states.items()}
        for p, q in zip(weights_of(other), weights_of(old), strict=True):
            p.data.copy_(q.detach())
        read(other, dictionary)
        return other

    return reader


@FUSED
@pytest.mark.parametrize(("cls", "options"), ROWS, ids=str_of)
def test_dictionaries_without_places_go_on_as_before(cls, options, fused):
    """By the places that the weights have then."""
    whole, first = (build(cls, options, fused) for _ in range(2))
    places = by_first_place(whole, first)
    step(first, places, range(EDIT))
    readers = [
        read_by(lambda other, saved: other.load_state_dict(saved), cls, options, fused),
        read_by(import_state_dict, cls, options, fused),
        unpickled,
    ]
    others = [reader(first) for reader in readers]
    step(whole, places, range(STEPS))
    for other in others:
        for p, q in zip(weights_of(other), weights_of(first), strict=True):
            assert other.state[p].keys() == first.state[q].keys()
        step(other, by_first_place(other), range(EDIT, STEPS))
        assert_same(weights_of(other), weights_of(whole))


@pytest.mark.parametrize("is_older", [True, False], ids=["without places", "reversed"])
@pytest.mark.parametrize(("cls", "options"), [ROWS[0], ROWS[6], ROWS[-1]], ids=str_of)
def test_distributed_checkpoints_have_places(cls, options, is_older, tmp_path):
    """By names: in another order, or without places, which older checkpoints lack."""
    whole, other = (build(cls, options) for _ in range(2))
    models = [torch.nn.ParameterList(weights_of(each)) for each in (whole, other)]
    places = by_first_place(whole, other)
    step(whole, places, range(EDIT))
    weights, states = get_state_dict(models[0], whole)
    if is_older:
        states["state"] = {key: without_places(state) for key, state in states["state"].items()}
    else:
        reverse(other)
    dcp.save({"model": weights, "optimizer": states}, checkpoint_id=tmp_path, no_dist=True)
    weights, states = get_state_dict(models[1], other)
    planner = dcp.DefaultLoadPlanner(allow_partial_load=is_older)
    dcp.load(
        {"model": weights, "optimizer": states},
        checkpoint_id=tmp_path,
        planner=planner,
        no_dist=True,
    )
    set_state_dict(models[1], other, model_state_dict=weights, optim_state_dict=states)
    for each in (whole, other):
        step(each, places, range(EDIT, STEPS))
    assert_same([*models[1]], [*models[0]])


@pytest.mark.parametrize(
    ("options", "places"),
    [
        ({}, ()),
        ({"svd": "randomized"}, ("place",)),
        ({"svd": "power"}, ("place",)),
        ({"svd": "lazy"}, ("place",)),
        ({"stagger": True}, ("turn",)),
        ({"svd": "lazy", "stagger": True}, ("place", "turn")),
    ],
    ids=str,
)
@pytest.mark.parametrize("cls", dict(ROWS[2:]), ids=str_of)
@FUSED
def test_a_state_has_a_place_where_a_basis_follows_from_it(cls, fused, options, places):
    """And nowhere else: the states of an exact projection are the published ones."""
    optimizer = build(cls, options, fused)
    step(optimizer, by_first_place(optimizer), range(1))
    expected = [(0, 0), *((1, place) for place in range(4))]
    for weight, (group, place) in zip(weights_of(optimizer), expected, strict=True):
        state = optimizer.state[weight]
        assert state.keys() & {"place", "turn"} == (set(places) if weight.dim() > 1 else set())
        if "place" in state:
            assert state["place"].tolist() == [group, place]
        if "turn" in state:
            assert state["turn"].tolist() == [place, 4]


@pytest.mark.parametrize("cls", dict(ROWS[2:]), ids=str_of)
@FUSED
def test_options_that_need_a_place_may_change(cls, fused):
    """Between steps: dictionaries of states that have had a place are read."""
    optimizer = build(cls, {}, fused)
    places = by_first_place(optimizer)
    changes = [
        *({}, {"svd": "lazy"}, {"stagger": True}, {"svd": "power"}),
        *({"svd": "exact"}, {"stagger": False}),
    ]
    for number, change in enumerate(changes):
        for group in optimizer.param_groups:
            group.update(change)
        step(optimizer, places, [number])
        optimizer.load_state_dict(saved(optimizer))
        step(optimizer, places, [number])
    for weight in optimizer.param_groups[1]["params"]:
        assert optimizer.state[weight].keys() >= {"place", "turn", "gap_doublings"}


@FUSED
def test_a_device_is_not_asked_for_the_turn_at_each_step(fused, monkeypatch):
    for cls in (optim.GaLoreAdamW, optim.GaLoreAdafactor):
        optimizer = build(cls, {"stagger": True}, fused)
        places = by_first_place(optimizer)
        step(optimizer, places, range(EDIT + 3))
        known = dict(optimizer._group_strategy.known.turns)
        assert len(known) == len(SHAPES)
        step(optimizer, places, range(EDIT + 3, STEPS))
        assert all(optimizer._group_strategy.known.turns[p] is turn for p, turn in known.items())


WRONG = {
    "nan": torch.nan,
    "infinite": torch.inf,
    "negative": -1.0,
    "a half": 0.5,
}


@FUSED
@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize(
    ("cls", "options", "state"),
    [
        (optim.APOLLOAdamW, {}, "place"),
        (optim.GaLoreAdamW, {"svd": "randomized"}, "place"),
        (optim.GaLoreAdamW, {"stagger": True}, "turn"),
        (optim.GaLoreAdamW, {"svd": "lazy"}, "gap_doublings"),
        (optim.GaLoreAdafactor, {"svd": "lazy"}, "place"),
    ],
    ids=str_of,
)
def test_numbers_that_are_not_whole_are_errors_that_name_the_state(
    cls, options, state, wrong, fused
):
    optimizer = build(cls, options, fused)
    step(optimizer, by_first_place(optimizer), range(1, 3))
    weight, value = weights_of(optimizer)[2], WRONG[wrong]
    dictionary, other = copy.deepcopy(optimizer.state_dict()), build(cls, options, fused)
    dictionary["state"][2][state] = torch.full_like(dictionary["state"][2][state], value)
    text = "must have whole numbers of at least 0"
    with pytest.raises(ValueError, match=f"{state} of parameter 1 of group 1 {text}"):
        other.load_state_dict(dictionary)
    assert not other.state
    optimizer.state[weight][state] = torch.full_like(optimizer.state[weight][state], value)
    before = [p.detach().clone() for p in weights_of(optimizer)]
    with pytest.raises(RuntimeError, match=f"parameter 1 of group 1: the state {state} {text}"):
        step(optimizer, by_first_place(optimizer), [3])
    assert all(map(torch.equal, weights_of(optimizer), before))


@FUSED
@pytest.mark.parametrize("cls", [optim.APOLLOAdamW, optim.GaLoreAdamW, optim.GaLoreAdafactor])
@pytest.mark.parametrize("kind", ["meta", "fake"])
def test_weights_without_values_are_an_error_of_the_step(kind, cls, fused):
    """The optimizer is made all the same; groups without a rank step, as AdamW does."""
    is_meta = kind == "meta"
    device, text = ("meta", "on the meta device") if is_meta else ("cpu", "a FakeTensor")
    with contextlib.nullcontext() if is_meta else FakeTensorMode():
        weights = [torch.nn.Parameter(torch.ones(4, 6, device=device)) for _ in range(2)]
        optimizer = cls([{"params": weights[:1]}, {"params": weights[1:], "rank": 2}], fused=fused)
        weights[0].grad = torch.ones_like(weights[0])
        optimizer.step()
        weights[1].grad = torch.ones_like(weights[1])
        with pytest.raises(RuntimeError, match=f"parameter 0 of group 1: the weight is {text}"):
            optimizer.step()
