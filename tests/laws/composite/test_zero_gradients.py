"""A basis of a gradient of zeros is zero, and made anew at the first gradient that is not zero."""

import copy
import itertools
import pickle

import pytest
import torch
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from fusedstep import optim
from fusedstep._matrix.low_rank_bases import Bases
from fusedstep._matrix.projection import LEFT, RIGHT
from reference.galore import galore
from reference.galore_adafactor import galore_adafactor
from support import low_rank
from support.low_rank import (
    OPTIONS,
    SHAPES,
    as_params,
    assert_same,
    by_reference,
    coded_groups,
    projected,
    run,
    saved,
    set_gradients,
    tensors_of,
    weights_of,
)

GAP = 3
UNFUSED = pytest.mark.parametrize("fused", [None, False], ids=["fused", "unfused"])


def weighted(dtype, **options):
    return as_params([(projected(**options), SHAPES)], dtype)


def plain(cls, dtype=torch.float32, options=(), **of_group):
    return lambda fused: cls(weighted(dtype, **of_group), lr=0.01, fused=fused, **dict(options))


def coded(cls, dtype=torch.float32, **options):
    return lambda fused: cls(coded_groups(dtype), lr=0.01, fused=fused, **options)


SVDS = ("exact", "randomized", "power", "lazy")
BUILDS = {
    **{svd: plain(optim.GaLoreAdamW, svd=svd) for svd in SVDS},
    "full": plain(optim.GaLoreAdamW, proj_type="full"),
    "left, float64": plain(optim.GaLoreAdamW, torch.float64, proj_type="left", svd="power"),
    "bfloat16": plain(optim.GaLoreAdamW, torch.bfloat16),
    "split": plain(optim.GaLoreAdamW, torch.bfloat16, {"master_weights": "split"}),
    "float16": plain(optim.GaLoreAdamW, torch.float16, {"master_weights": True}),
    "8 bits": coded(optim.GaLoreAdamW8bit, weight_decay=0.0),
    "4 bits": coded(optim.GaLoreAdamW, torch.bfloat16, state_dtype="int4", svd="power"),
    **{f"Adafactor, {svd}": plain(optim.GaLoreAdafactor, svd=svd) for svd in SVDS},
    "Adafactor, averages": plain(
        optim.GaLoreAdafactor, torch.bfloat16, {"beta1": 0.9}, proj_type="full"
    ),
    "APOLLO": plain(optim.APOLLOAdamW, proj="svd"),
    "APOLLO, tensor": plain(optim.APOLLOAdamW, torch.bfloat16, proj="svd", scale_type="tensor"),
    "APOLLO, 8 bits": coded(optim.APOLLOAdamW, proj="svd", state_dtype="int8"),
}
EACH = pytest.mark.parametrize("build", BUILDS.values(), ids=BUILDS.keys())


@pytest.fixture
def zeros(monkeypatch):
    """The steps whose gradients are zeros."""
    steps: set[int] = set()
    original = low_rank.gradient

    def gradient(like, step, place):
        return original(like, step, place) * (step not in steps)

    monkeypatch.setattr(low_rank, "gradient", gradient)
    return steps


def bases_of(optimizer):
    """The weights of groups with a rank, and their bases by side."""
    for group in optimizer.param_groups:
        if group["rank"] is not None:
            for weight in group["params"]:
                state = optimizer.state[weight]
                yield weight, {side: state[side] for side in (LEFT, RIGHT) if side in state}


def assert_zero(optimizer):
    for _, bases in bases_of(optimizer):
        assert not any(basis.any() for basis in bases.values())


def assert_have_gradients(optimizer):
    """Bases are orthonormal, and keep most that their rank can keep of these gradients."""
    for weight, bases in bases_of(optimizer):
        grad = low = weight.grad.flatten(1).double()
        for side, basis in bases.items():
            columns = basis.double() if side == LEFT else basis.double().T
            rank = torch.eye(columns.shape[1], dtype=torch.float64)
            torch.testing.assert_close(columns.T @ columns, rank, rtol=0, atol=1e-5)
            low = columns.T @ low if side == LEFT else low @ columns
        most = torch.linalg.svdvals(grad)[: columns.shape[1]].square().sum()
        assert low.square().sum() > 0.9 * most


@EACH
@UNFUSED
def test_the_first_gradient_that_is_not_zero_has_a_basis(build, fused, zeros):
    """Zeros at first, and at a refresh: all elements move then.

    From zero: nothing that is added to zero rounds away, however small the move.
    """
    optimizer = build(fused)
    zeros |= {0, 1, GAP, GAP + 1}
    before = [weight.detach().clone() for weight in weights_of(optimizer)]
    run(optimizer, range(2))
    assert_zero(optimizer)
    for weight, old in zip(weights_of(optimizer), before, strict=True):
        assert torch.equal(weight, old)
    with torch.no_grad():
        for weight in weights_of(optimizer):
            weight.zero_()
    run(optimizer, range(2, 3))
    assert_have_gradients(optimizer)
    for weight in weights_of(optimizer):
        assert (weight != 0).all()
    run(optimizer, range(GAP, GAP + 2))
    assert_zero(optimizer)
    run(optimizer, range(GAP + 2, GAP + 3))
    assert_have_gradients(optimizer)


@pytest.mark.parametrize("proj_type", ["std", "left", "full"])
@pytest.mark.parametrize(
    ("cls", "reference", "options"),
    [
        (optim.GaLoreAdamW, galore, OPTIONS),
        (optim.GaLoreAdafactor, galore_adafactor, {"beta1": 0.8, "eps": (1e-6, 0.02)}),
    ],
)
@UNFUSED
def test_steps_are_those_of_the_reference(cls, reference, options, proj_type, fused, zeros):
    zeros |= {0, 1, 2 * GAP, 2 * GAP + 1}
    optimizer = cls(weighted(torch.float64, proj_type=proj_type), **options, fused=fused)
    expected = by_reference(
        reference, weighted(torch.float64, proj_type=proj_type), range(10), **options
    )
    for found, weight in zip(run(optimizer, range(10)), expected, strict=True):
        torch.testing.assert_close(found.detach(), weight, rtol=1e-9, atol=1e-9)


def loaded(optimizer, fresh):
    fresh.load_state_dict(saved(optimizer))
    with torch.no_grad():
        for p, q in zip(weights_of(fresh), weights_of(optimizer), strict=True):
            p.copy_(q)
    return fresh


def id_of(value):
    names = {each: name for name, each in (*BUILDS.items(), *WAYS.items())}
    return names[value]


WAYS = {
    "loaded": loaded,
    "unpickled": lambda optimizer, fresh: pickle.loads(pickle.dumps(optimizer)),
    "copied": lambda optimizer, fresh: copy.deepcopy(optimizer),
}


@pytest.mark.parametrize(
    ("build", "way"),
    list(zip(BUILDS.values(), itertools.cycle(WAYS.values()), strict=False)),
    ids=id_of,
)
@UNFUSED
def test_a_run_that_is_resumed_between_is_the_same(build, way, fused, zeros):
    zeros |= {0, 1, GAP, GAP + 1}
    whole, resumed = build(fused), build(fused)
    run(whole, range(GAP + 3))
    begin = 0
    for step in (1, 2, GAP, GAP + 1, GAP + 2):
        run(resumed, range(begin, step))
        resumed, begin = way(resumed, build(fused)), step
    run(resumed, range(begin, GAP + 3))
    assert_same(tensors_of(resumed), tensors_of(whole))


@EACH
@UNFUSED
def test_a_step_that_fails_changes_nothing_of_it(build, fused, zeros):
    """A weight waits for a gradient, whatever an error kept from being stepped."""
    zeros |= {0, GAP}
    optimizer, other = build(fused), build(fused)
    for step in range(GAP + 2):
        set_gradients(optimizer, step)
        if step in (1, GAP, GAP + 1):
            last = weights_of(optimizer)[-1].grad
            kept = last.clone()
            last.view(-1)[0] = float("nan")
            with pytest.raises(RuntimeError, match="NaN or infinite"):
                optimizer.step()
            last.copy_(kept)
        optimizer.step()
    run(other, range(GAP + 2))
    assert_same(tensors_of(optimizer), tensors_of(other))


def test_a_fresh_optimizer_whose_states_were_asked_for_projects():
    """torch's distributed checkpoints take a step with gradients of zeros for them."""
    model = torch.nn.Linear(12, 8, bias=False)
    optimizer = optim.GaLoreAdamW([projected(params=[model.weight])])
    get_optimizer_state_dict(model, optimizer)
    assert optimizer.state
    assert_zero(optimizer)
    run(optimizer, range(1))
    assert_have_gradients(optimizer)


def test_weights_wait_one_by_one(zeros):
    """A weight that waits keeps no other from its own gap, and has its own from then on."""
    optimizer = optim.GaLoreAdamW(weighted(torch.float32, update_proj_gap=100), **OPTIONS)
    seen = []
    for step in range(8):
        set_gradients(optimizer, step)
        for place, weight in enumerate(weights_of(optimizer)):
            if step < 2 * place:
                weight.grad.zero_()
        optimizer.step()
        bases = [next(iter(found.values())).clone() for _, found in bases_of(optimizer)]
        seen.append(bases)
    for place, each in enumerate(zip(*seen, strict=True)):
        begin = 2 * place
        assert not any(basis.any() for basis in each[:begin])
        assert all(torch.equal(basis, each[begin]) for basis in each[begin:])
        assert each[begin].any()


@EACH
@UNFUSED
def test_a_step_without_a_refresh_looks_at_no_gradient_for_it(build, fused, zeros, monkeypatch):
    """A look would wait for a device. States are looked at once, after they were loaded."""
    optimizer, looks = build(fused), []
    run(optimizer, range(2))
    original = Bases.make

    def looking(self, group, weight, grad, is_due):
        looks.append(is_due)
        return original(self, group, weight, grad, is_due)

    def refused(self):
        raise AssertionError("a look")

    monkeypatch.setattr(Bases, "make", looking)
    with monkeypatch.context() as context:
        context.setattr(torch.Tensor, "any", refused)
        for step in range(2, GAP):
            set_gradients(optimizer, step)
            optimizer.step()
    assert not any(looks)


def test_a_weight_that_is_never_reached_costs_no_decomposition(zeros, monkeypatch):
    (group,) = as_params([(projected(), [(12, 8)])], torch.float64)
    optimizer = optim.GaLoreAdamW([group])
    zeros |= set(range(10))
    monkeypatch.setattr("fusedstep._matrix.galore.bases_of", None)
    run(optimizer, range(10))
    assert_zero(optimizer)
