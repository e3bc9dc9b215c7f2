"""Muon: its step against float64 and torch's class, its memory, and the options of a step."""

import copy
import functools
import inspect
import io
import pickle

import pytest
import torch

import fusedstep
from fusedstep import optim
from fusedstep._matrix import muon_steps
from fusedstep._matrix.coefficients import coefficients_of
from fusedstep.memory.plan import Choice, state_bytes
from reference.muon import QUINTIC
from reference.orthogonal import iterated
from support.matrices import assert_moved_alike, error, largest_allocation, parameters, step
from support.muon import by_reference, trained
from support.stepping import WAYS


def test_arguments_and_defaults_are_torchs_in_its_order():
    theirs, ours = (
        inspect.signature(cls).parameters.values() for cls in (torch.optim.Muon, optim.Muon)
    )
    own = [each for each in ours if each.kind is not inspect.Parameter.KEYWORD_ONLY]
    assert [(each.name, each.default) for each in own] == [
        (each.name, each.default) for each in theirs
    ]


# The step


@pytest.mark.parametrize("fused", [None, False], ids=["together", "one by one"])
@pytest.mark.parametrize(
    ("options", "reference"),
    [
        ({}, {}),
        ({"nesterov": False, "momentum": 0.8}, {"nesterov": False, "momentum": 0.8}),
        (
            {"weight_decay": 0.0, "ns_steps": 3},
            {"weight_decay": 0.0, "coefficients": [QUINTIC] * 3},
        ),
        ({"adjust_lr_fn": "match_rms_adamw"}, {"adjust": "rms"}),
        ({"adjust_lr_fn": "spectral_unclamped"}, {"adjust": "spectral"}),
        ({"adjust_lr_fn": "original", "eps": 1e3}, {"eps": 1e3}),
        (
            {"ns_coefficients": "polar_express"},
            {"coefficients": coefficients_of("polar_express", 5)},
        ),
        ({"ns_coefficients": (2, -1.5, 0.5)}, {"coefficients": [(2, -1.5, 0.5)] * 5}),
        ({"cautious_decay": True, "weight_decay": 5.0}, {"cautious": True, "weight_decay": 5.0}),
        ({"normuon": True}, {"beta2": 0.95}),
        ({"ns_start": "norm"}, {}),
        ({"ns_start": "aol"}, {"iterate": functools.partial(iterated, start="aol")}),
        (
            {"ns_start": "aol", "ns_steps": 4, "normuon": True, "eps": 1e3},
            {
                "iterate": functools.partial(iterated, start="aol"),
                "coefficients": [QUINTIC] * 4,
                "beta2": 0.95,
                "eps": 1e3,
            },
        ),
        (
            {"normuon": True, "beta2": 0.6, "cautious_decay": True, "weight_decay": 5.0},
            {"beta2": 0.6, "cautious": True, "weight_decay": 5.0},
        ),
    ],
    ids=lambda options: ", ".join(map(str, options)) or "defaults",
)
def test_steps_as_the_reference(options, reference, fused):
    found, _ = trained(optim.Muon, ns_dtype=torch.float32, fused=fused, **options)
    assert_moved_alike(found, by_reference(**reference), parameters(), 1e-4)


def test_products_in_double_are_exact():
    params = parameters(dtype=torch.float64)
    optimizer = optim.Muon(params, lr=0.02, ns_dtype=torch.float64)
    for number in range(3):
        step(optimizer, params, number)
    assert_moved_alike(params, by_reference(), parameters(), 1e-12)


def test_maximize_takes_the_gradient_negated():
    params = parameters()
    optimizer = optim.Muon(params, lr=0.02, maximize=True, ns_dtype=torch.float32)
    generator = torch.Generator().manual_seed(100)
    for p in params:
        p.grad = -torch.randn(p.shape, generator=generator)
    optimizer.step()
    assert_moved_alike(params, by_reference(steps=1), parameters(), 1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_one_by_one_is_what_torch_computes(dtype):
    """The same operations: but for the last bits, and the dtype of products."""
    options = {"momentum": 0.9, "adjust_lr_fn": "match_rms_adamw", "weight_decay": 0.2}
    expected, theirs = trained(torch.optim.Muon, dtype=dtype, **options)
    found, ours = trained(optim.Muon, dtype=dtype, fused=False, ns_dtype=torch.bfloat16, **options)
    bound = 6e-2 if dtype is torch.bfloat16 else 1e-5
    assert_moved_alike(found, expected, parameters(dtype=dtype), bound)
    for p, q in zip(found, expected, strict=True):
        torch.testing.assert_close(
            ours.state[p]["momentum_buffer"], theirs.state[q]["momentum_buffer"]
        )


def test_together_is_within_the_error_of_bfloat16_of_one_by_one():
    expected, _ = trained(optim.Muon, fused=False, ns_dtype=torch.bfloat16)
    found, _ = trained(optim.Muon, ns_dtype=torch.bfloat16)
    assert_moved_alike(found, expected, parameters(), 5e-2)
    assert any((a != b).any() for a, b in zip(found, expected, strict=True))


def test_small_batches_give_the_same(monkeypatch):
    shapes = [(12, 8)] * 5
    expected, _ = trained(optim.Muon, shapes, ns_dtype=torch.float32)
    monkeypatch.setitem(fusedstep._matrix.arrangement._AT_ONCE, "cpu", 200)
    found, optimizer = trained(optim.Muon, shapes, ns_dtype=torch.float32)
    assert max(each.numel() for each in optimizer._group_strategy.scratch.tensors()) == 192
    assert_moved_alike(found, expected, parameters(shapes), 1e-5)


@pytest.mark.parametrize("normuon", [False, True])
@pytest.mark.parametrize("fused", [None, False], ids=["together", "one by one"])
@pytest.mark.parametrize(
    ("shape", "options", "blocks"),
    [
        ((3, 8, 12), {}, list),
        ((3, 8, 12), {"stacked": False}, lambda w: [w.view(3, 96)]),
        ((6, 3, 2, 2), {}, lambda w: [w.view(6, 12)]),
        ((2, 3, 8, 4), {"stacked": True}, lambda w: list(w.view(6, 8, 4))),
        ((24, 8), {"split_heads": 3}, lambda w: list(w.view(3, 8, 8))),
        ((2, 12, 8), {"split_heads": 2}, lambda w: list(w.view(4, 6, 8))),
        ((24, 8), {"split_sizes": (12, 8, 4)}, lambda w: w.split((12, 8, 4))),
        ((24, 8), {"split_sizes": [16, 4, 4]}, lambda w: w.split((16, 4, 4))),
        ((24, 8), {"split_sizes": (4, 16, 4)}, lambda w: w.split((4, 16, 4))),
        ((24, 8), {"split_sizes": (24,)}, lambda w: [w]),
        (
            (2, 12, 8),
            {"split_sizes": (8, 2, 2)},
            lambda w: [block for each in w for block in each.split((8, 2, 2))],
        ),
        (
            (6, 3, 2, 2),
            {"split_sizes": (1, 5)},
            lambda w: w.view(6, 12).split((1, 5)),
        ),
        (
            (24, 8),
            {"split_sizes": (16, 8), "split_heads": 2},
            lambda w: w.split((8, 8, 4, 4)),
        ),
    ],
    ids=[
        *("stack", "flattened", "convolution", "stacks", "heads", "heads of a stack"),
        *("sizes", "sizes of which two are one", "two around another", "one size"),
        *("sizes of a stack", "sizes of a convolution", "sizes and heads"),
    ],
)
def test_weights_are_matrices(shape, options, blocks, fused, normuon):
    shapes = [shape, shape]
    options = options | {"ns_dtype": torch.float32, "fused": fused, "normuon": normuon}
    found, _ = trained(optim.Muon, shapes, **options)
    expected = by_reference(shapes, blocks=blocks, beta2=0.95 if normuon else None)
    assert_moved_alike(found, expected, parameters(shapes), 1e-4)


@pytest.mark.parametrize("fused", [None, False], ids=["together", "one by one"])
def test_rows_of_normuon_have_one_size(fused):
    """The first average is in proportion to its own squares: all rows come out alike."""
    options = {"weight_decay": 0.0, "ns_dtype": torch.float64, "fused": fused}
    moves = []
    for normuon in (False, True):
        found, optimizer = trained(
            optim.Muon, [(24, 8)], torch.float64, steps=1, normuon=normuon, **options
        )
        moves.append(found[0].detach() - parameters([(24, 8)], torch.float64)[0].detach())
    sizes = moves[1].norm(dim=1)
    torch.testing.assert_close(sizes, sizes.mean().expand(24), rtol=1e-8, atol=0)
    assert moves[0].norm(dim=1).std() > 0.05 * sizes.mean()
    torch.testing.assert_close(moves[1].norm(), moves[0].norm(), rtol=1e-8, atol=0)
    assert optimizer.state[found[0]]["second_momentum_buffer"].shape == (24, 1)


@pytest.mark.parametrize("fused", [None, False], ids=["together", "one by one"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_run_of_normuon_goes_on_from_its_dictionary(dtype, fused):
    shapes, options = [(24, 8), (3, 8, 12)], {"normuon": True, "fused": fused, "lr": 0.02}
    whole, _ = trained(optim.Muon, shapes, dtype, steps=4, **options)
    params, first = trained(optim.Muon, shapes, dtype, steps=2, **options)
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    file.seek(0)
    optimizer = optim.Muon(params, **options)
    optimizer.load_state_dict(torch.load(file, weights_only=True))
    for p in params:
        assert {value.dtype for value in optimizer.state[p].values()} == {torch.float32}
    for number in (2, 3):
        step(optimizer, params, number)
    assert all(torch.equal(p, q) for p, q in zip(params, whole, strict=True))


def test_normuon_takes_no_dtensors(monkeypatch):
    weight = torch.nn.Parameter(torch.ones(3, 3))
    monkeypatch.setattr("fusedstep._matrix.muon_groups.is_dtensor", lambda tensor: True)
    with pytest.raises(ValueError, match="'w' is a DTensor, of whose rows normuon=True keeps no"):
        optim.Muon([("w", weight)], normuon=True)


def test_normuon_of_codes_and_of_a_group():
    shapes = [(64, 80)] * 2
    options = {"ns_dtype": torch.float32, "normuon": True}
    found, optimizer = trained(optim.Muon, shapes, state_dtype="int8", **options)
    state = optimizer.state[found[0]]
    assert state["momentum_buffer"].dtype is torch.uint8
    assert state["second_momentum_buffer"].dtype is torch.float32
    assert_moved_alike(found, by_reference(shapes, beta2=0.95), parameters(shapes), 0.05)
    params = parameters([(24, 8), (24, 8)])
    optimizer = optim.Muon([{"params": params[:1], "normuon": True}, {"params": params[1:]}])
    step(optimizer, params, 0)
    assert ["second_momentum_buffer" in optimizer.state[p] for p in params] == [True, False]
    assert "normuon" not in optimizer.param_groups[1]


def test_weights_of_other_strides():
    expected, _ = trained(optim.Muon, [(24, 8), (6, 3, 2, 2)], ns_dtype=torch.float32)
    (matrix, filters) = parameters([(24, 8), (6, 3, 2, 2)])
    params = [
        torch.nn.Parameter(matrix.detach().t().contiguous().t()),
        torch.nn.Parameter(filters.detach().to(memory_format=torch.channels_last)),
    ]
    optimizer = optim.Muon(params, lr=0.02, ns_dtype=torch.float32)
    for number in range(3):
        step(optimizer, params, number)
    for found, other in zip(params, expected, strict=True):
        assert not found.is_contiguous()
        torch.testing.assert_close(found, other)


def test_a_weight_without_elements_and_one_without_a_gradient():
    params = [*parameters([(8, 8), (0, 4)]), torch.nn.Parameter(torch.ones(4, 4))]
    optimizer = optim.Muon(params, lr=0.02)
    for p in params[:2]:
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert (params[2] == 1).all()
    assert params[2] not in optimizer.state


@pytest.mark.parametrize("make", [optim.Muon, optim.MuSGD])
@pytest.mark.parametrize("fused", [None, False], ids=["together", "one by one"])
def test_matrices_without_columns_or_rows(make, fused):
    params = parameters([(3, 0), (0, 4), (2, 3, 0)])
    optimizer = make([{"params": params, "use_muon": True}], fused=fused, momentum=0.9)
    for number in range(2):
        step(optimizer, params, number)
    assert [p.shape for p in params] == [(3, 0), (0, 4), (2, 3, 0)]


def test_what_is_not_a_number_stays_in_its_matrix():
    params = parameters([(12, 8)] * 3)
    optimizer = optim.Muon(params, lr=0.02)
    for p in params:
        p.grad = torch.ones_like(p)
    params[1].grad[2, 3] = float("nan")
    optimizer.step()
    assert params[1].isnan().all()
    assert not params[0].isnan().any()
    assert not params[2].isnan().any()


def test_a_gradient_of_zeros_moves_by_the_decay_alone():
    params = parameters([(12, 8)])
    optimizer = optim.Muon(params, lr=0.5, weight_decay=0.25)
    params[0].grad = torch.zeros_like(params[0])
    optimizer.step()
    torch.testing.assert_close(params[0], parameters([(12, 8)])[0] * 0.875)


@pytest.mark.parametrize("fused", [None, False], ids=["together", "one by one"])
def test_bfloat16_without_nesterov_leaves_the_average_alone(fused):
    """torch normalises it in place, for its bfloat16() is the average itself."""
    (weight,), optimizer = trained(
        optim.Muon, [(12, 8)], torch.bfloat16, steps=1, nesterov=False, fused=fused
    )
    average = optimizer.state[weight]["momentum_buffer"]
    assert average.dtype is torch.bfloat16
    torch.testing.assert_close(average, weight.grad * 0.05, rtol=0.01, atol=1e-3)


def test_clipping_scaling_and_closures():
    shapes = [(12, 8), (8,)]

    def make(params, **options):
        groups = [{"params": params[:1]}, {"params": params[1:], "use_muon": False}]
        return optim.Muon(groups, lr=0.02, ns_dtype=torch.float32, **options)

    params = parameters(shapes)
    optimizer = make(params, max_grad_norm=0.5)
    by_hand = parameters(shapes)
    other = make(by_hand)
    for p, q in zip(params, by_hand, strict=True):
        p.grad = torch.ones_like(p) * 64
        q.grad = torch.ones_like(q)
    norm = torch.nn.utils.clip_grad_norm_(by_hand, 0.5)
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(64.0), torch.tensor(0.0)
    assert optimizer.step(lambda: 7.0) == 7.0
    other.step()
    for p, q in zip(params, by_hand, strict=True):
        torch.testing.assert_close(p, q)
    assert norm == pytest.approx(104**0.5)
    before = [p.detach().clone() for p in params]
    optimizer.found_inf = torch.tensor(1.0)
    optimizer.step()
    assert all((p == q).all() for p, q in zip(params, before, strict=True))
    del optimizer.found_inf, optimizer.grad_scale
    found = optimizer.step(max_norm=1.0, zero_grad="none")
    assert found.item() == pytest.approx(104**0.5)  # the scale was taken out of .grad
    assert params[0].grad is None


@pytest.mark.parametrize("fused", [None, False], ids=["together", "one by one"])
@pytest.mark.parametrize("options", WAYS.values(), ids=WAYS)
def test_values_of_bfloat16_weights_are_kept(options, fused):
    """Moves of less than half a unit in the last place add up, as those of float32 weights do."""
    shapes = [(12, 8), (8, 12)]
    options = options | {"lr": 2e-3, "weight_decay": 0.0, "ns_dtype": torch.float32, "fused": fused}
    start = [p.detach() + p.detach().sign() for p in parameters(shapes, torch.bfloat16)]
    moved = {}
    for name, dtype in (("kept", torch.bfloat16), ("exact", torch.float32)):
        params = [torch.nn.Parameter(p.to(dtype, copy=True)) for p in start]
        own = ("master_weights", "rounding", "seed") if name == "exact" else ()
        chosen = {k: v for k, v in options.items() if k not in own}
        optimizer = optim.Muon(params, **chosen)
        for _ in range(100):
            for p in params:
                p.grad = torch.ones_like(p).tril_()
            optimizer.step()
        moves = [p.float() - q.float() for p, q in zip(params, start, strict=True)]
        moved[name] = torch.cat([each.detach().flatten() for each in moves])
        if name == "kept":
            states = [optimizer.state[p]["momentum_buffer"].dtype for p in params]
            assert states == [torch.float32] * 2
    assert error(moved["kept"], moved["exact"]) < (0.4 if "seed" in options else 0.1)


def test_states_in_codes():
    shapes = [(64, 80)] * 2
    found, optimizer = trained(optim.Muon, shapes, state_dtype="int8", ns_dtype=torch.float32)
    assert optimizer.state[found[0]]["momentum_buffer"].dtype is torch.uint8
    assert_moved_alike(found, by_reference(shapes), parameters(shapes), 0.05)


def test_steps_under_torch_compile_and_a_dispatch_mode():
    from torch.utils._python_dispatch import TorchDispatchMode

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    expected, _ = trained(optim.Muon, steps=1)
    params = parameters()
    optimizer = optim.Muon(params, lr=0.02)
    with Mode():
        step(optimizer, params, 0)
    assert all((p == q).all() for p, q in zip(params, expected, strict=True))


def test_cautious_decay_of_float64_weights_is_exact():
    weight = torch.nn.Parameter(torch.ones(4, 4, dtype=torch.float64))
    optimizer = optim.Muon([weight], lr=0.01, weight_decay=0.6, cautious_decay=True, fused=False)
    weight.grad = torch.zeros_like(weight)
    optimizer.step()
    assert (weight - (1 - 0.01 * 0.6)).abs().max() < 1e-15


# Memory


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"ns_dtype": torch.bfloat16},
        {"ns_dtype": torch.float32},
        {"nesterov": False},
        {"ns_start": "aol"},
        {"ns_start": "aol", "ns_dtype": torch.float32},
        {"ns_start": "aol", "ns_dtype": torch.float16},
    ],
    ids=str,
)
def test_a_step_allocates_nothing_of_a_weights_size(options):
    params, optimizer = trained(optim.Muon, [(96, 32), (32, 96), (96, 32)], steps=2, **options)
    scratch = [each.data_ptr() for each in optimizer._group_strategy.scratch.tensors()]
    assert largest_allocation(lambda: torch.empty(1000)) >= 4000
    assert largest_allocation(optimizer.step) < 32 * 32 * 2
    assert [each.data_ptr() for each in optimizer._group_strategy.scratch.tensors()] == scratch
    del params


CHANGES = {
    "nothing": lambda params, optimizer: None,
    "a learning rate": lambda params, optimizer: optimizer.param_groups[0].update(lr=0.5),
    "an option": lambda params, optimizer: optimizer.param_groups[0].update(
        adjust_lr_fn="match_rms_adamw"
    ),
    "a start": lambda params, optimizer: optimizer.param_groups[0].update(ns_start="aol"),
    "a fraction": lambda params, optimizer: optimizer.param_groups[0].update(rank_fraction=0.5),
    "sizes of parts": lambda params, optimizer: optimizer.param_groups[0].update(
        split_sizes=(6, 2)
    ),
    "two options": lambda params, optimizer: optimizer.param_groups[0].update(
        split_heads=2, adjust_lr_fn="original"
    ),
    "a gradient": lambda params, optimizer: setattr(params[1], "grad", params[1].grad.clone()),
    "no gradient": lambda params, optimizer: setattr(params[1], "grad", None),
    "memory": lambda params, optimizer: setattr(params[1], "data", params[1].data.clone()),
    "a state": lambda params, optimizer: optimizer.state[params[1]].update(
        momentum_buffer=torch.ones_like(params[1])
    ),
    "all states": lambda params, optimizer: optimizer.load_state_dict(optimizer.state_dict()),
    "its weights": lambda params, optimizer: optimizer.param_groups[0].update(
        params=[torch.nn.Parameter(params[0].detach()), *params[1:]]
    ),
}


@pytest.mark.parametrize("cls", [optim.Muon, optim.MuSGD])
@pytest.mark.parametrize("change", CHANGES)
def test_batches_are_kept_while_nothing_changes(change, cls, monkeypatch):
    """The step after is that of an optimizer that has kept nothing."""
    shapes, arranged = [(8, 8), (8, 8), (8, 24)], []
    original = muon_steps.arrange
    monkeypatch.setattr(muon_steps, "arrange", lambda *of: arranged.append(1) or original(*of))
    options = {"use_muon": True, "momentum": 0.9, "ns_dtype": torch.float32}
    params = parameters(shapes)
    optimizer = cls(params, lr=0.02, **options)
    for number in range(3):
        if number == 2:
            CHANGES[change](params, optimizer)
        twin = copy.deepcopy(optimizer)
        pairs = list(zip(*[x.param_groups[0]["params"] for x in (optimizer, twin)], strict=True))
        for p, q in pairs:
            fill = torch.randn(p.shape, generator=torch.Generator().manual_seed(number))
            if p.grad is None and number != 2:
                p.grad = torch.empty_like(p)
            if p.grad is not None:
                p.grad.copy_(fill)
                q.grad = p.grad.clone()
        arranged.clear()
        optimizer.step()
        is_first = number == 0 or (number == 2 and change not in ("nothing", "a learning rate"))
        assert len(arranged) == is_first
        twin.step()
        for p, q in pairs:
            assert (p == q).all()
            state, other = optimizer.state[p], twin.state[q]
            assert state.keys() == other.keys()
            assert all(state[name].equal(other[name]) for name in state)


def test_the_memory_command_knows_it():
    """Matrices have one state, vectors AdamW's two and a count."""
    shapes = (torch.Size([100, 80]), torch.Size([50]))
    found = state_bytes(shapes, torch.float32, Choice("Muon", {}, "default"))
    assert found == (4 * 8000 + 2 * 4 * 50 + 4, 0)


def test_copies_have_no_scratch():
    params, optimizer = trained(optim.Muon, steps=2)
    for other in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert not other._group_strategy.scratch.tensors()
    step(optimizer, params, 2)
    expected, _ = trained(optim.Muon)
    for found, other in zip(params, expected, strict=True):
        assert (found == other).all()
