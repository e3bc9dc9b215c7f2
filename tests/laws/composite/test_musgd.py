"""MuSGD: its maths against float64, its parts against SGD, and dictionaries of the original."""

import copy
import functools
import pickle

import pytest
import torch

import fusedstep
from fusedstep import optim
from fusedstep.memory.plan import Choice, state_bytes
from reference.musgd import musgd
from support.matrices import assert_moved_alike, largest_allocation, parameters, step
from support.stepping import WAYS, assert_same_bits

#: Matrices, and filters: [out, in, height, width].
SHAPES = ((24, 8), (8, 24), (24, 8), (6, 3, 3, 3), (16, 4, 5, 1), (3, 8, 12), (8, 8, 1, 1))

NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
DEVICES = ("cpu", pytest.param("cuda", marks=NEEDS_GPU))

WITH_MOMENTUM = {"momentum": 0.9, "nesterov": True, "weight_decay": 0.3}


def make(params, **options):
    """Weights of two dimensions or more in a group with Muon, the others in one without."""
    matrices = [p for p in params if p.ndim > 1]
    others = [p for p in params if p.ndim < 2]
    groups = [{"params": matrices, "use_muon": True}, {"params": others}]
    return optim.MuSGD([g for g in groups if g["params"]], **({"lr": 0.02} | options))


def trained(shapes=SHAPES, dtype=torch.float32, steps=3, build=make, **options):
    params = parameters(shapes, dtype)
    optimizer = build(params, **options)
    for number in range(steps):
        step(optimizer, params, number)
    return params, optimizer


def by_reference(shapes=SHAPES, steps=3, lr=0.02, **options):
    """Weights and states after steps in float64."""
    weights, states = [p.detach().double() for p in parameters(shapes)], [{} for _ in shapes]
    for number in range(steps):
        generator = torch.Generator().manual_seed(100 + number)
        for i, weight in enumerate(weights):
            grad = torch.randn(weight.shape, generator=generator).double()
            weights[i], states[i] = musgd(
                weight, grad, states[i], lr=lr, use_muon=weight.ndim > 1, **options
            )
    return weights, states


# The step


@pytest.mark.parametrize("fused", [None, True, False])
@pytest.mark.parametrize(
    ("options", "reference"),
    [
        ({}, {}),
        (WITH_MOMENTUM, WITH_MOMENTUM),
        ({"momentum": 0.8, "weight_decay": 2.0}, {"momentum": 0.8, "weight_decay": 2.0}),
        ({"nesterov": True, "weight_decay": 0.5}, {"nesterov": True, "weight_decay": 0.5}),
        ({"muon": 0.2, "sgd": 1.0}, {"muon": 0.2, "sgd_factor": 1.0}),
        (
            WITH_MOMENTUM | {"muon": 1.5, "sgd": 0.0},
            WITH_MOMENTUM | {"muon": 1.5, "sgd_factor": 0.0},
        ),
    ],
    ids=lambda options: ", ".join(map(str, options)) or "defaults",
)
def test_steps_as_the_reference(options, reference, fused):
    shapes = (*SHAPES, (7,))
    found, optimizer = trained(shapes, ns_dtype=torch.float32, fused=fused, **options)
    expected, states = by_reference(shapes, **reference)
    assert_moved_alike(found, expected, parameters(shapes), 1e-4)
    for p, state in zip(found, states, strict=True):
        own = {name: each.double() for name, each in optimizer.state[p].items()}
        assert own.keys() == state.keys()
        for name, value in state.items():
            torch.testing.assert_close(own[name], value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("fused", [None, True, False])
@pytest.mark.parametrize("sizes", [(12, 8, 4), [16, 4, 4], (24,)], ids=str)
def test_parts_of_weights_are_matrices(sizes, fused):
    shapes = [(24, 8), (24, 2, 5, 3), (24, 30), (24, 8)]
    options = WITH_MOMENTUM | {"ns_dtype": torch.float32, "fused": fused}
    found, _ = trained(shapes, split_sizes=sizes, **options)
    expected, _ = by_reference(shapes, sizes=sizes, **WITH_MOMENTUM)
    assert_moved_alike(found, expected, parameters(shapes), 1e-4)


def test_products_in_double_are_exact():
    params = [torch.nn.Parameter(p.detach().double()) for p in parameters(SHAPES)]
    optimizer = make(params, ns_dtype=torch.float64, **WITH_MOMENTUM)
    for number in range(3):
        step(optimizer, params, number)
    assert_moved_alike(params, by_reference(**WITH_MOMENTUM)[0], parameters(SHAPES), 1e-12)


def test_a_tiny_update_is_divided_by_its_norm_and_the_eps():
    """Not by the larger of both, as Muon's: a norm of 1e-7 gives half the update."""
    for fused in (None, False):
        weight = torch.nn.Parameter(torch.zeros(1, 1))
        optimizer = make([weight], lr=1.0, muon=1.0, sgd=0.0, ns_dtype=torch.float32, fused=fused)
        weight.grad = torch.full((1, 1), 1e-7)
        optimizer.step()
        s = 0.5
        for _ in range(5):
            s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
        assert weight.item() == pytest.approx(-s, rel=1e-4)


@pytest.mark.parametrize("fused", [None, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_16_bit_weights_are_within_their_error(dtype, fused):
    found, optimizer = trained(dtype=dtype, ns_dtype=torch.float32, fused=fused, **WITH_MOMENTUM)
    assert all(v.dtype is dtype for p in found for v in optimizer.state[p].values())
    expected, _ = by_reference(**WITH_MOMENTUM)
    bound = 0.1 if dtype is torch.bfloat16 else 2e-2  # gradients are rounded too
    assert_moved_alike(found, expected, parameters(SHAPES, dtype), bound)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("of_muon", [False, True], ids=["a group of SGD", "a part of SGD"])
def test_the_part_of_sgd_has_the_bits_of_the_native_rule(of_muon, dtype):
    """Muon's part moves nothing here."""
    params = parameters(SHAPES, dtype)
    group = {"params": params, "use_muon": of_muon}
    optimizer = optim.MuSGD([group], lr=0.02, muon=0.0, sgd=1.0, **WITH_MOMENTUM)
    alone = parameters(SHAPES, dtype)
    sgd = optim.SGD(alone, lr=0.02, fused=True, **WITH_MOMENTUM)
    name = "momentum_buffer_SGD" if of_muon else "momentum_buffer"
    for number in range(3):
        step(optimizer, params, number)
        step(sgd, alone, number)
        for p, q in zip(params, alone, strict=True):
            assert_same_bits(p.detach(), q.detach(), "weight")
            found, expected = optimizer.state[p][name], sgd.state[q]["momentum_buffer"]
            assert_same_bits(found, expected, "state")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("fused", [None, True, False])
def test_each_device_steps_as_the_reference(fused, device):
    """From gradients in other layouts too: channels-last, and transposed."""
    params = [torch.nn.Parameter(p.detach().to(device)) for p in parameters(SHAPES)]
    optimizer = make(params, ns_dtype=torch.float32, fused=fused, **WITH_MOMENTUM)
    for number in range(3):
        generator = torch.Generator().manual_seed(100 + number)
        for p in params:
            grad = torch.randn(p.shape, generator=generator).to(device)
            p.grad = grad.transpose(0, -1).contiguous().transpose(0, -1)
        optimizer.step()
    expected, states = by_reference(**WITH_MOMENTUM)
    assert_moved_alike([p.cpu() for p in params], expected, parameters(SHAPES), 1e-4)
    for p, state in zip(params, states, strict=True):
        for name, value in state.items():
            found = optimizer.state[p][name]
            assert found.device == p.device
            torch.testing.assert_close(found.double().cpu(), value, rtol=1e-4, atol=1e-5)


def test_maximize_takes_the_gradient_negated():
    for fused in (None, False):
        params, twins = parameters(SHAPES), parameters(SHAPES)
        optimizer = make(params, maximize=True, fused=fused, **WITH_MOMENTUM)
        other = make(twins, fused=fused, **WITH_MOMENTUM)
        for number in range(2):
            step(other, twins, number)
            for p, q in zip(params, twins, strict=True):
                p.grad = -q.grad
            optimizer.step()
        for p, q in zip(params, twins, strict=True):
            assert_same_bits(p.detach(), q.detach(), "weight")


def test_a_group_has_factors_of_its_own():
    def build(params, **options):
        groups = [{"params": [p], "use_muon": True} for p in params]
        groups[1] |= {"muon": 0.25, "sgd": 2.0}
        return optim.MuSGD(groups, lr=0.02, ns_dtype=torch.float32, **options)

    shapes = SHAPES[:2]
    found, _ = trained(shapes, build=build, **WITH_MOMENTUM)
    usual, _ = by_reference(shapes, **WITH_MOMENTUM)
    own, _ = by_reference(shapes, muon=0.25, sgd_factor=2.0, **WITH_MOMENTUM)
    assert_moved_alike(found, [usual[0], own[1]], parameters(shapes), 1e-4)


@pytest.mark.parametrize("fused", [None, False])
@pytest.mark.parametrize(
    "own",
    [
        {"rank_fraction": 0.5},
        {"split_heads": 2},
        {"normuon": True},
        {"cautious_decay": "no"},
        {"ns_start": "aol"},
    ],
    ids=str,
)
def test_options_of_muon_alone_are_the_users_own_keys(own, fused):
    built = [
        trained([(24, 8)], fused=fused, **WITH_MOMENTUM, build=functools.partial(in_group, keys))
        for keys in ({}, own)
    ]
    assert_same_bits(*(params[0] for params, _ in built), "weights")
    first, second = (optimizer.state[params[0]] for params, optimizer in built)
    assert {name: x.shape for name, x in first.items()} == {n: x.shape for n, x in second.items()}


def in_group(keys, params, **options):
    return optim.MuSGD([{"params": params, "use_muon": True} | keys], lr=0.02, **options)


def test_factors_are_attributes_as_the_originals():
    params = parameters(SHAPES[:2])
    optimizer = make(params, muon=0.2, ns_dtype=torch.float32)
    assert (optimizer.muon, optimizer.sgd) == (0.2, 0.5)
    optimizer.muon, optimizer.sgd = 1.0, 0.0
    assert (optimizer.muon, optimizer.sgd) == (1.0, 0.0)
    step(optimizer, params, 0)
    expected, _ = by_reference(SHAPES[:2], 1, muon=1.0, sgd_factor=0.0)
    assert_moved_alike(params, expected, parameters(SHAPES[:2]), 1e-4)
    with pytest.raises(ValueError, match="Invalid muon value: -1"):
        optimizer.muon = -1
    assert optimizer.muon == 1.0


def test_a_tensor_of_a_learning_rate_is_read_alone():
    """The original multiplies it by ``sgd`` in place, at every step."""
    lr = torch.tensor(0.02)
    found, _ = trained(lr=lr, ns_dtype=torch.float32, **WITH_MOMENTUM)
    assert lr == torch.tensor(0.02)
    assert_moved_alike(found, by_reference(**WITH_MOMENTUM)[0], parameters(SHAPES), 1e-4)


def test_what_is_not_a_number_stays_in_its_matrix():
    params = parameters([(12, 8)] * 3)
    optimizer = make(params, **WITH_MOMENTUM)
    for p in params:
        p.grad = torch.ones_like(p)
    params[1].grad[2, 3] = float("nan")
    optimizer.step()
    assert params[1].isnan().all()
    assert not params[0].isnan().any()
    assert not params[2].isnan().any()


@pytest.mark.parametrize("fused", [None, False], ids=["together", "one by one"])
@pytest.mark.parametrize("options", WAYS.values(), ids=WAYS)
def test_values_of_bfloat16_weights_are_kept(options, fused):
    """Moves of less than half a unit in the last place add up. Both parts are rounded once."""
    shapes = [(12, 8), (8, 12), (5,)]
    usual = {"lr": 5e-4, "momentum": 0.9, "ns_dtype": torch.float32, "fused": fused}
    start = [p.detach() + p.detach().sign() for p in parameters(shapes, torch.bfloat16)]
    moved = {}
    for name, dtype in (("kept", torch.bfloat16), ("exact", torch.float32)):
        params = [torch.nn.Parameter(p.to(dtype, copy=True)) for p in start]
        optimizer = make(params, **usual, **(options if name == "kept" else {}))
        for _ in range(60):
            for p in params:
                p.grad = torch.ones_like(p).tril_() if p.ndim > 1 else torch.ones_like(p)
            optimizer.step()
        moves = [p.float() - q.float() for p, q in zip(params, start, strict=True)]
        moved[name] = torch.cat([each.detach().flatten() for each in moves])
        if "seed" in options and name == "kept":
            assert all(optimizer.state[p]["step"] == 60 for p in params)
    difference = moved["kept"] - moved["exact"]
    assert difference.norm() / moved["exact"].norm() < (0.4 if "seed" in options else 0.1)


def test_states_in_codes():
    shapes = [(64, 80)] * 2
    options = {"ns_dtype": torch.float32, **WITH_MOMENTUM}
    found, optimizer = trained(shapes, state_dtype="int8", **options)
    for name in ("momentum_buffer", "momentum_buffer_SGD"):
        assert optimizer.state[found[0]][name].dtype is torch.uint8
    assert (optimizer.state[found[0]]["momentum_buffer_SGD_absmax"] > 0).all()
    expected, _ = by_reference(shapes, **WITH_MOMENTUM)
    assert_moved_alike(found, expected, parameters(shapes), 0.05)


def test_weights_without_native_kernels_are_stepped_one_by_one(monkeypatch):
    from fusedstep.optim import musgd as module

    monkeypatch.setattr(module, "why_not_native", lambda *args, **options: "no kernels")
    found, optimizer = trained(ns_dtype=torch.float32, **WITH_MOMENTUM)
    assert_moved_alike(found, by_reference(**WITH_MOMENTUM)[0], parameters(SHAPES), 1e-4)
    assert not list(optimizer._group_strategy.second_steps.plans)
    with pytest.raises(RuntimeError, match="no kernels"):
        make(parameters(SHAPES), fused=True)


def test_a_weight_twice_in_a_group():
    (weight,) = parameters([(12, 8)])
    with pytest.warns(UserWarning, match="duplicate parameters"):
        optimizer = make([weight, weight], ns_dtype=torch.float32)
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    with (
        pytest.warns(UserWarning, match="duplicate parameters"),
        pytest.raises(RuntimeError, match="different Tensors"),
    ):
        make([weight, weight], fused=True)


# Memory


@pytest.mark.parametrize("options", [{}, WITH_MOMENTUM], ids=str)
def test_a_step_allocates_nothing_of_a_weights_size(options):
    params, optimizer = trained([(96, 32), (32, 96), (96, 32)], steps=2, **options)
    assert largest_allocation(lambda: torch.empty(1000)) >= 4000
    assert largest_allocation(optimizer.step) < 32 * 32 * 2
    plans = [plan.handle for plan in optimizer._group_strategy.second_steps.plans]
    optimizer.step()
    assert plans
    assert [plan.handle for plan in optimizer._group_strategy.second_steps.plans] == plans
    del params


@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        (torch.float32, {"state_dtype": "int8"}),
        (torch.bfloat16, {"master_weights": True}),
        (torch.bfloat16, {"state_dtype": torch.float32}),
    ],
    ids=str,
)
def test_no_plan_is_kept_of_values_that_are_made_anew(dtype, options):
    """It would keep their memory."""
    _, optimizer = trained([(96, 64)] * 2, dtype, momentum=0.9, **options)
    assert not list(optimizer._group_strategy.second_steps.plans)


def test_states_that_are_replaced_have_another_plan():
    params, optimizer = trained(ns_dtype=torch.float32, **WITH_MOMENTUM)
    twins, other = trained(ns_dtype=torch.float32, **WITH_MOMENTUM)
    for p in params:
        state = optimizer.state[p]
        state["momentum_buffer_SGD"] = state["momentum_buffer_SGD"].clone()
    for each, weights in ((optimizer, params), (other, twins)):
        step(each, weights, 3)
    for p, q in zip(params, twins, strict=True):
        assert_same_bits(p.detach(), q.detach(), "weight")
        names = other.state[q]
        for name in names:
            assert_same_bits(optimizer.state[p][name], other.state[q][name], name)


def test_the_memory_command_knows_it():
    shapes = (torch.Size([100, 80]), torch.Size([50]))
    for options, expected in (({}, 4 * 8000), ({"momentum": 0.9}, 4 * (2 * 8000 + 50))):
        found = state_bytes(shapes, torch.float32, Choice("MuSGD", options, "default"))
        assert found == (expected, 0)


# Dictionaries and conversions


def of_ultralytics(params, steps=2, **options):
    """The original in the middle of a run, as its trainer makes it: groups, options and states.

    It is not installed. The values are those of the reference, which its tests hold it to.
    """
    weights, states = by_reference([p.shape for p in params], steps, **options)
    usual = {"lr": 0.02, "initial_lr": 0.02, "weight_decay": options["weight_decay"]}
    usual |= {"momentum": options["momentum"], "nesterov": options["nesterov"]}
    groups = [
        {"params": [p for p in params if p.ndim > 1], "use_muon": True, "param_group": "muon"},
        {"params": [p for p in params if p.ndim < 2], "use_muon": False, "param_group": "bias"},
    ]
    cls = type("MuSGD", (torch.optim.Optimizer,), {"__module__": "ultralytics.optim.muon"})
    defaults = {"lr": 1e-3, "momentum": 0.0, "weight_decay": 0.0, "nesterov": False}
    theirs = cls([g | usual for g in groups], defaults | {"use_muon": False})
    theirs.muon, theirs.sgd = options.get("muon", 0.5), options.get("sgd_factor", 0.5)
    with torch.no_grad():
        for p, weight, state in zip(params, weights, states, strict=True):
            p.copy_(weight)
            theirs.state[p] = {name: each.to(p.dtype) for name, each in state.items()}
    return theirs


TRAINERS = WITH_MOMENTUM | {"muon": 0.2, "sgd_factor": 1.0}


@pytest.mark.parametrize("load", ["load_state_dict", "import_state_dict", "convert"])
def test_a_run_of_the_original_goes_on(load):
    shapes = (*SHAPES, (7,))
    params = parameters(shapes)
    theirs = of_ultralytics(params, **TRAINERS)
    if load == "convert":
        ours = fusedstep.convert(theirs, ns_dtype=torch.float32)
        assert type(ours) is optim.MuSGD
        assert (ours.muon, ours.sgd) == (0.2, 1.0)
    else:
        ours = make(params, muon=0.2, sgd=1.0, ns_dtype=torch.float32)
        saved = copy.deepcopy(theirs.state_dict())
        if load == "load_state_dict":
            ours.load_state_dict(saved)
        else:
            fusedstep.import_state_dict(ours, saved)
    assert [group["param_group"] for group in ours.param_groups] == ["muon", "bias"]
    assert [group["initial_lr"] for group in ours.param_groups] == [0.02, 0.02]
    step(ours, params, 2)
    expected, _ = by_reference(shapes, **TRAINERS)
    assert_moved_alike(params, expected, parameters(shapes), 1e-4)


def test_dictionaries_are_the_originals():
    """But for options that it lacks, where they were set."""
    params = parameters((*SHAPES, (7,)))
    theirs = of_ultralytics(params, **WITH_MOMENTUM).state_dict()
    _, ours = trained((*SHAPES, (7,)), steps=2, ns_dtype=torch.float32, **WITH_MOMENTUM)
    found = ours.state_dict()
    assert found["state"].keys() == theirs["state"].keys()
    for key, state in theirs["state"].items():
        assert found["state"][key].keys() == state.keys()
        for name, value in state.items():
            torch.testing.assert_close(found["state"][key][name], value)
    for group, other in zip(found["param_groups"], theirs["param_groups"], strict=True):
        assert group.keys() == other.keys() - {"initial_lr", "param_group"} | {"ns_dtype"}


def test_a_state_without_the_buffer_of_sgd_is_refused():
    params, optimizer = trained(steps=1, **WITH_MOMENTUM)
    saved = optimizer.state_dict()
    del saved["state"][0]["momentum_buffer_SGD"]
    with pytest.raises(ValueError, match="has no momentum_buffer_SGD"):
        make(params).load_state_dict(saved)


def test_copies_keep_the_factors():
    """Pickling takes the attributes from the original, and its next step is an error."""
    params, optimizer = trained(muon=0.2, sgd=1.0, **WITH_MOMENTUM)
    for other in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert (other.muon, other.sgd) == (0.2, 1.0)
        assert not list(other._group_strategy.second_steps.plans)
        weights = [p for group in other.param_groups for p in group["params"]]
        step(other, weights, 3)
        expected, _ = by_reference(SHAPES, 4, muon=0.2, sgd_factor=1.0, **WITH_MOMENTUM)
        assert_moved_alike(weights, expected, parameters(SHAPES), 5e-2)
    del params


def test_momentum_may_begin_later():
    """Buffers begin at zero then, as those of a new weight."""
    for fused in (None, False):
        params, optimizer = trained(steps=1, ns_dtype=torch.float32, fused=fused)
        assert optimizer.state[params[0]].keys() == {"momentum_buffer"}
        for group in optimizer.param_groups:
            group["momentum"] = 0.9
        step(optimizer, params, 1)
        for p in params:
            torch.testing.assert_close(optimizer.state[p]["momentum_buffer_SGD"], p.grad)


# Refusals


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -1}, "Invalid learning rate"),
        ({"momentum": -1}, "Invalid momentum value"),
        ({"weight_decay": -1}, "Invalid weight_decay value"),
        ({"muon": -0.1}, "Invalid muon value: -0.1"),
        ({"sgd": -0.1}, "Invalid sgd value: -0.1"),
        ({"sgd": float("nan")}, "Invalid sgd value: nan"),
        ({"ns_dtype": torch.int8}, "ns_dtype must be None, torch.bfloat16"),
        ({"use_muon": "no"}, "use_muon must not be a text"),
        ({"muon": "half"}, "muon must be a"),
    ],
    ids=str,
)
def test_options_out_of_range(options, message):
    with pytest.raises((ValueError, TypeError), match=message):
        optim.MuSGD(parameters(SHAPES[:1]), **options)
    params = parameters([(12, 8), (8,)])
    optimizer = make(params)
    (name, value), *_ = options.items()
    if name == "lr":  # which no group checks
        return
    optimizer.param_groups[0][name] = value
    with pytest.raises((ValueError, TypeError), match=message):
        step(optimizer, params, 0)
    for p, q in zip(params, parameters([(12, 8), (8,)]), strict=True):
        assert_same_bits(p.detach(), q.detach(), "weight")


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        (torch.ones(3), r"'odd' has the shape \[3\], and Muon steps.*use_muon=False, which SGD"),
        (torch.ones(3, 3, dtype=torch.complex64), "'odd' is complex.*use_muon=False has SGD"),
    ],
    ids=["vector", "complex"],
)
def test_weights_that_are_no_matrices(weight, message):
    named = [("even", torch.nn.Parameter(torch.ones(3, 3))), ("odd", torch.nn.Parameter(weight))]
    with pytest.raises(ValueError, match=message):
        optim.MuSGD(named, use_muon=True)
    optimizer = optim.MuSGD(named)
    for _, p in named:
        p.grad = torch.ones_like(p)
    optimizer.step()
    before = [p.detach().clone() for _, p in named]
    optimizer.param_groups[0]["use_muon"] = True
    with pytest.raises(ValueError, match=message):
        optimizer.step()
    for (_, p), value in zip(named, before, strict=True):
        assert torch.equal(p.detach(), value)


def test_sparse_gradients():
    """Groups of SGD take them as SGD does."""
    (weight,) = parameters([(12, 8)])
    weight.grad = torch.ones(12, 8).to_sparse(1)
    with pytest.raises(RuntimeError, match="sparse gradients in groups with use_muon=True"):
        optim.MuSGD([weight], use_muon=True).step()
    optim.MuSGD([weight], lr=0.5).step()
    torch.testing.assert_close(weight.detach(), parameters([(12, 8)])[0].detach() - 0.5)


@pytest.mark.parametrize("fused", [None, False])
def test_weights_on_the_meta_device(fused):
    """As AdamW's: there are states, of the shapes of the weights."""
    weight = torch.nn.Parameter(torch.ones(4, 6, device="meta"))
    optimizer = optim.MuSGD([{"params": [weight], "use_muon": True}], momentum=0.9, fused=fused)
    for _ in range(2):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
    assert optimizer.state[weight]["momentum_buffer"].shape == weight.shape
