"""GaLoreAdamW: its formula, its projectors, and what the published one gets wrong."""

import inspect
import io
import re
import warnings

import pytest
import torch

from fusedstep import convert, import_state_dict, optim
from fusedstep.optim import _low_rank, _subspace
from fusedstep.optim._projection import LEFT, RIGHT
from low_rank import as_params, by_reference, gradient, run, set_gradients, weights_of
from reference.galore import galore

OPTIONS = {"lr": 0.02, "betas": (0.8, 0.95), "eps": 1e-4, "weight_decay": 0.1}
#: Tall, wide, square, and of more dimensions.
SHAPES = [(12, 7), (6, 15), (8, 8), (5, 4, 3)]
PLAIN = ({"betas": (0.7, 0.9), "weight_decay": 0.3, "lr": 0.05}, [(9,), (), (3, 4)])
SVDS = ("exact", "randomized", "power", "lazy")


def projected(**options):
    return {"rank": 3, "update_proj_gap": 3, "scale": 0.5} | options


def groups(dtype=torch.float64, shapes=SHAPES, **options):
    return as_params([PLAIN, (projected(**options), shapes)], dtype)


def saved(optimizer):
    """A state dictionary as a file gives it back."""
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def tensors_of(optimizer):
    """All that a step may change."""
    states = [value for state in optimizer.state.values() for value in state.values()]
    return [t.detach().clone() for t in (*weights_of(optimizer), *states)]


def assert_same(a, b):
    assert len(a) == len(b)
    assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


# ---- The formula ---------------------------------------------------------------------------------


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("proj_type", ["std", "reverse_std", "left", "right", "full"])
def test_is_the_published_formula(proj_type, fused):
    """With betas, eps and decay of every group, of which the published trainers drop some."""
    for options in ({}, {"correct_bias": False, "maximize": True}):
        optimizer = optim.GaLoreAdamW(
            groups(proj_type=proj_type), **OPTIONS, **options, fused=fused
        )
        expected = by_reference(galore, groups(proj_type=proj_type), range(7), **OPTIONS, **options)
        for found, weight in zip(run(optimizer, range(7)), expected, strict=True):
            torch.testing.assert_close(found.detach(), weight, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("fused", [True, False])
def test_float32_is_near_the_formula(fused):
    optimizer = optim.GaLoreAdamW(groups(torch.float32), **OPTIONS, fused=fused)
    expected = by_reference(galore, groups(torch.float32), range(5), **OPTIONS)
    for found, weight in zip(run(optimizer, range(5)), expected, strict=True):
        torch.testing.assert_close(found.detach(), weight.float(), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_every_weight_counts_its_own_steps(dtype, fused):
    """Gradients that are missing at some steps: the numbers of a step follow from the count."""

    def skips(step, place):
        return (step + place) % 3 == 1

    optimizer = optim.GaLoreAdamW(groups(dtype), **OPTIONS, fused=fused)
    expected = by_reference(galore, groups(dtype), range(8), skips, **OPTIONS)
    bound = 1e-9 if dtype is torch.float64 else 0.04
    for found, weight in zip(run(optimizer, range(8), skips), expected, strict=True):
        torch.testing.assert_close(found.detach().double(), weight, rtol=bound, atol=bound)


def test_a_decay_that_leaves_nothing():
    (group,) = as_params([({}, [(3, 4)])], torch.float64)
    optimizer = optim.GaLoreAdamW([group], lr=0.5, weight_decay=2.0)
    assert run(optimizer, range(2))[0].abs().max() < 1e-14


def test_a_learning_rate_that_changes_is_followed():
    """A step of plain groups is not repeated with the numbers of the last one."""
    runs = []
    for fused in (True, False):
        optimizer = optim.GaLoreAdamW(groups(rank=None), **OPTIONS, fused=fused)
        for step in range(4):
            optimizer.param_groups[0]["lr"] = 0.01 * (step + 1)
            set_gradients(optimizer, step)
            optimizer.step()
        runs.append(weights_of(optimizer))
    for a, b in zip(*runs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("fused", [True, False])
def test_clipping(fused):
    norm = 0.3
    optimizer = optim.GaLoreAdamW(groups(), **OPTIONS, fused=fused)
    clipped = optim.GaLoreAdamW(groups(), **OPTIONS, fused=fused)
    for step in range(4):
        set_gradients(optimizer, step)
        set_gradients(clipped, step)
        torch.nn.utils.clip_grad_norm_(weights_of(clipped), norm)
        assert optimizer.step(max_norm=norm) > norm
        clipped.step()
        for p, q in zip(weights_of(optimizer), weights_of(clipped), strict=True):
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-12, atol=1e-12)
            torch.testing.assert_close(p, q, rtol=1e-9, atol=1e-9)


def test_steps_under_a_dispatch_mode_are_the_same():
    class Sees(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    optimizer, other = (optim.GaLoreAdamW(groups(), **OPTIONS, fused=True) for _ in range(2))
    run(optimizer, range(2))
    with Sees():
        run(other, range(2))
    assert_same(weights_of(optimizer), weights_of(other))


# ---- 16 bits -------------------------------------------------------------------------------------

WAYS = [
    {},
    {"master_weights": True},
    {"master_weights": "split"},
    {"rounding": "kahan"},
    {"rounding": "stochastic"},
]


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_bfloat16_weights_have_float32_states(way, fused):
    optimizer = optim.GaLoreAdamW(groups(torch.bfloat16), **OPTIONS, fused=fused, **way)
    expected = by_reference(galore, groups(torch.bfloat16), range(4), **OPTIONS)
    for found, weight in zip(run(optimizer, range(4)), expected, strict=True):
        torch.testing.assert_close(found.detach().double(), weight, rtol=0.02, atol=0.02)
    for p in optimizer.param_groups[1]["params"]:
        state = optimizer.state[p]
        assert {state[name].dtype for name in ("exp_avg", "exp_avg_sq", "step")} == {torch.float32}
        assert all(state[name].dtype is torch.float32 for name in (LEFT, RIGHT) if name in state)


@pytest.mark.parametrize("way", [{"master_weights": True}, {"master_weights": "split"}], ids=str)
def test_moves_too_small_for_bfloat16_add_up(way):
    (group,) = as_params([(projected(), [(16, 8)])], torch.bfloat16)
    optimizer = optim.GaLoreAdamW([group], lr=1e-4, **way)
    (weight,) = group["params"]
    start, value = weight.detach().clone(), weight.detach().double()
    optimizer.zero_grad()
    weight.grad = gradient(weight, 1, 1)
    for _ in range(100):
        optimizer.step()
    reference, state = value, {}
    for step in range(1, 101):
        reference, state = galore(
            reference, weight.grad.double(), state, step, lr=1e-4, **projected()
        )
    assert not torch.equal(weight, start)
    torch.testing.assert_close(weight.double(), reference, rtol=2**-8, atol=1e-4)


# ---- Projectors ----------------------------------------------------------------------------------


def matrix(rows, columns, decay=0.9):
    generator = torch.Generator().manual_seed(5)
    u, s, vh = torch.linalg.svd(
        torch.randn(rows, columns, generator=generator, dtype=torch.float64), full_matrices=False
    )
    return (u * (s * decay ** torch.arange(len(s)))) @ vh


def energy(grad, bases):
    """The part of the squared norm that a projection keeps."""
    low = bases[LEFT].T @ grad if LEFT in bases else grad
    low = low @ bases[RIGHT].T if RIGHT in bases else low
    return (low.norm() / grad.norm()).item() ** 2


@pytest.mark.parametrize("sides", [(LEFT,), (RIGHT,), (LEFT, RIGHT)], ids=str)
@pytest.mark.parametrize("shape", [(60, 40), (40, 60)])
@pytest.mark.parametrize("svd", ["randomized", "power"])
def test_a_cheaper_basis_keeps_the_energy(svd, shape, sides):
    grad, rank = matrix(*shape), 10
    exact = _subspace.bases_of(grad, rank, sides, "exact", None, 0)
    bases = _subspace.bases_of(grad, rank, sides, svd, None, 7)
    bases = _subspace.bases_of(grad, rank, sides, svd, bases, 8)
    for side, basis in bases.items():
        assert basis.shape == exact[side].shape
        gram = basis.T @ basis if side == LEFT else basis @ basis.T
        torch.testing.assert_close(gram, torch.eye(rank, dtype=torch.float64))
    # Of the exact one's: without power steps the random product keeps 0.96.
    assert energy(grad, bases) > 0.999 * energy(grad, exact)
    assert energy(grad, exact) < 0.99


def test_singular_vectors_come_in_their_order():
    """Adam is not the same in another basis of the same subspace."""
    grad = matrix(30, 20, decay=0.6)
    exact = _subspace.bases_of(grad, 4, (LEFT, RIGHT), "exact", None, 0)
    found = _subspace.bases_of(grad, 4, (LEFT, RIGHT), "randomized", None, 0)
    for cosines in (exact[LEFT].T @ found[LEFT], exact[RIGHT] @ found[RIGHT].T):
        torch.testing.assert_close(
            cosines.abs(), torch.eye(4, dtype=torch.float64), atol=1e-6, rtol=0
        )


def test_a_power_step_stays_near_its_basis():
    """Moments of the last basis mean the same in the next one: no vector changes its sign."""
    grad = matrix(30, 20, decay=0.6)
    last = _subspace.bases_of(grad, 4, (LEFT,), "exact", None, 0)
    found = _subspace.bases_of(grad, 4, (LEFT,), "power", last, 0)
    torch.testing.assert_close(found, last, rtol=0, atol=1e-9)


def test_random_numbers_follow_from_the_key_alone():
    like = torch.empty(0)
    first = _subspace.gaussian((3, 4), 2**63 + 5, like)
    torch.manual_seed(1)
    assert torch.equal(_subspace.gaussian((3, 4), 2**63 + 5, like), first)
    assert not torch.equal(_subspace.gaussian((3, 4), 6, like), first)


@pytest.mark.parametrize("seed", [0, 1])
def test_the_seed_changes_random_bases(seed):
    runs = []
    for each in (0, seed):
        optimizer = optim.GaLoreAdamW(groups(svd="randomized"), **OPTIONS, seed=each)
        runs.append(run(optimizer, range(2))[3])
    assert torch.equal(*runs) == (seed == 0)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("svd", SVDS)
def test_ways_to_a_basis_train_alike(svd, fused):
    """Gradients of few large singular values: the bases nearly agree."""
    options = {"svd": svd, "rank": 5}
    optimizer = optim.GaLoreAdamW(groups(**options), **OPTIONS, fused=fused)
    exact = optim.GaLoreAdamW(groups(rank=5), **OPTIONS, fused=fused)
    start = [p.detach().clone() for p in weights_of(exact)]
    found, expected = run(optimizer, range(3)), run(exact, range(3))
    for a, b, c in zip(found, expected, start, strict=True):
        assert (a - b).norm() <= 0.05 * (c - b).norm()


def bases_made(monkeypatch, optimizer, steps, gradients=set_gradients):
    """How many bases each step makes."""
    made, counts = [], []
    original = _subspace.bases_of

    def counting(*args):
        made.append(1)
        return original(*args)

    monkeypatch.setattr("fusedstep.optim.galore.bases_of", counting)
    for step in range(steps):
        gradients(optimizer, step)
        optimizer.step()
        counts.append(len(made))
        made.clear()
    return counts


def test_bases_are_made_at_the_gap(monkeypatch):
    optimizer = optim.GaLoreAdamW(groups())
    assert bases_made(monkeypatch, optimizer, 8) == [4, 0, 0, 4, 0, 0, 4, 0]


def test_staggered_refreshes(monkeypatch):
    """After the first step no step has more than its share."""
    optimizer = optim.GaLoreAdamW(groups(update_proj_gap=8, stagger=True))
    assert bases_made(monkeypatch, optimizer, 17) == [4, *[0, 1, 0, 1, 0, 1, 0, 1] * 2]


def test_lazy_refreshes_become_rare_while_the_basis_rests(monkeypatch):
    (group,) = as_params([(projected(svd="lazy"), [(12, 8)])], torch.float64)
    optimizer = optim.GaLoreAdamW([group])
    (weight,) = group["params"]
    made = bases_made(monkeypatch, optimizer, 50, lambda o, step: set_gradients(o, 0))
    assert [step for step, count in enumerate(made) if count] == [0, 3, 6, 12, 24, 48]
    assert optimizer.state[weight]["gap_doublings"] == 4

    basis = optimizer.state[weight][RIGHT].clone()
    turned = gradient(weight, 1, 1)
    turned -= turned @ basis.T @ basis
    made = bases_made(monkeypatch, optimizer, 54, lambda o, step: weight.grad.copy_(turned))
    assert [50 + step for step, count in enumerate(made) if count] == [96, 99, 102]
    assert optimizer.state[weight]["gap_doublings"] == 2


def test_a_decomposition_that_fails_falls_back_and_says_so_once(monkeypatch):
    original, grad = torch.linalg.svd, matrix(12, 9).float()
    exact = _subspace.bases_of(grad, 3, (LEFT, RIGHT), "exact", None, 0)
    refused = {torch.float32}

    def fails(matrix, **options):
        if matrix.dtype in refused:
            raise torch.linalg.LinAlgError("linalg.svd: did not converge")
        return original(matrix, **options)

    monkeypatch.setattr(torch.linalg, "svd", fails)
    _subspace._warn.cache_clear()
    for how in ("float64", "Gram matrix"):
        with pytest.warns(UserWarning, match=how):
            found = _subspace.bases_of(grad, 3, (LEFT, RIGHT), "exact", None, 0)
        for a, b in zip(found.values(), exact.values(), strict=True):
            assert a.dtype is torch.float32
            torch.testing.assert_close(a.abs(), b.abs(), rtol=0, atol=1e-4)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            _subspace.bases_of(grad, 3, (RIGHT,), "exact", None, 0)
        refused.add(torch.float64)
    monkeypatch.setattr(torch.linalg, "eigh", lambda matrix: fails(matrix))
    with pytest.raises(RuntimeError, match=r"no decomposition .* succeeded: linalg\.svd"):
        _subspace.bases_of(grad, 3, (RIGHT,), "exact", None, 0)


# ---- What is saved -------------------------------------------------------------------------------


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("svd", SVDS)
def test_a_resumed_run_is_the_same(svd, fused):
    """From a file that holds tensors and numbers only; the published projectors are objects."""

    def build():
        options = {"svd": svd, "stagger": True, "update_proj_gap": 4}
        return optim.GaLoreAdamW(groups(torch.float32, **options), **OPTIONS, fused=fused)

    whole, first, second = build(), build(), build()
    run(whole, range(9))
    run(first, range(3))
    second.load_state_dict(saved(first))
    with torch.no_grad():
        for p, q in zip(weights_of(second), weights_of(first), strict=True):
            p.copy_(q)
    run(second, range(3, 9))
    assert_same(weights_of(second), weights_of(whole))
    assert_same(tensors_of(second), tensors_of(whole))


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda state: state.pop(RIGHT), "parameter 0 of group 1 has no projector_right"),
        (
            lambda state: state.update({RIGHT: torch.zeros(2, 7)}),
            r"projector_right of parameter 0 of group 1 has the shape \[2, 7\], but must have "
            r"\[3, 7\]",
        ),
        (
            lambda state: state.update(exp_avg=torch.zeros(12, 7)),
            r"exp_avg of parameter 0 of group 1 has the shape \[12, 7\], but must have \[12, 3\]",
        ),
    ],
)
def test_a_dictionary_that_does_not_fit_is_refused(change, error):
    optimizer = optim.GaLoreAdamW(groups(), **OPTIONS)
    run(optimizer, range(2))
    dictionary = saved(optimizer)
    change(dictionary["state"][3])
    before = tensors_of(optimizer)
    with pytest.raises(ValueError, match=error):
        optimizer.load_state_dict(dictionary)
    assert_same(tensors_of(optimizer), before)


def test_a_dictionary_is_not_one_of_adam():
    optimizer = optim.GaLoreAdamW(groups())
    run(optimizer, range(1))
    adam = optim.AdamW(groups(rank=None))
    with pytest.raises(ValueError, match="looks like one of GaLoreAdamW"):
        adam.load_state_dict(optimizer.state_dict())


def test_a_rank_cannot_change_beside_states():
    optimizer = optim.GaLoreAdamW(groups())
    run(optimizer, range(1))
    optimizer.param_groups[1]["rank"] = 2
    before = tensors_of(optimizer)
    with pytest.raises(RuntimeError, match=r"exp_avg of parameter 0 of group 1 is .* new"):
        run(optimizer, range(1))
    assert_same(tensors_of(optimizer), before)


class Projector:
    """What galore_torch pickles, as far as it is read."""

    def __init__(self, ortho_matrix):
        self.ortho_matrix = ortho_matrix


def published_dictionary(optimizer):
    """The dictionary of one of ours in the published form."""
    dictionary = optimizer.state_dict()
    for state in dictionary["state"].values():
        state["step"] = int(state["step"])
        bases = [state.pop(side) for side in (LEFT, RIGHT) if side in state]
        if bases:
            state["projector"] = Projector(bases if len(bases) == 2 else bases[0])
    kept = {"params", "lr", "betas", "eps", "weight_decay", "correct_bias"}
    for group in dictionary["param_groups"]:
        own = {"rank", "update_proj_gap", "scale", "proj_type"} if group["rank"] else set()
        for name in group.keys() - kept - own:
            del group[name]
    return dictionary


@pytest.mark.parametrize("proj_type", ["std", "full"])
def test_published_projectors_are_read(proj_type):
    whole, first, second = (
        optim.GaLoreAdamW(groups(proj_type=proj_type), **OPTIONS) for _ in range(3)
    )
    run(whole, range(5))
    run(first, range(2))
    import_state_dict(second, published_dictionary(first))
    with torch.no_grad():
        for p, q in zip(weights_of(second), weights_of(first), strict=True):
            p.copy_(q)
    run(second, range(2, 5))
    assert_same(weights_of(second), weights_of(whole))


def test_the_published_class_is_converted():
    """By name: it is AdamW in galore_torch.adamw."""
    module = {"__module__": "galore_torch.adamw"}
    published = type("AdamW", (torch.optim.Optimizer,), module)
    ours = optim.GaLoreAdamW(groups(torch.bfloat16), **OPTIONS)
    whole = optim.GaLoreAdamW(groups(torch.bfloat16), **OPTIONS)
    run(whole, range(4))
    run(ours, range(2))
    given = published_dictionary(ours)
    params = weights_of(ours)
    theirs = published(
        [g | {"params": [params[i] for i in g["params"]]} for g in given["param_groups"]],
        {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-6, "weight_decay": 0.0, "correct_bias": True},
    )
    theirs.state.update({params[i]: state for i, state in given["state"].items()})
    converted = convert(theirs)
    assert type(converted) is optim.GaLoreAdamW
    run(converted, range(2, 4))
    assert_same(weights_of(converted), weights_of(whole))


# ---- Bad input -----------------------------------------------------------------------------------

BAD = [
    ({"rank": 8}, [(12, 7)], ValueError, r"parameter 0 of group 1 is a matrix \[12, 7\].*rank=8"),
    ({"rank": 7}, [(12, 8), (3, 2, 3)], ValueError, r"parameter 1 of group 1 is a matrix \[3, 6\]"),
    ({}, [(12, 7), (9,)], ValueError, "parameter 1 of group 1 has 1 dimensions"),
    ({}, [()], ValueError, "parameter 0 of group 1 has 0 dimensions"),
    ({}, [(0, 4)], ValueError, "parameter 0 of group 1 is a matrix"),
    ({"rank": 0}, [(12, 7)], ValueError, "Invalid rank value: 0"),
    ({"rank": 2.5}, [(12, 7)], TypeError, "rank must be an int, not 2.5"),
    ({"rank": True}, [(12, 7)], TypeError, "rank must be an int, not True"),
    ({"update_proj_gap": 0}, [(12, 7)], ValueError, "Invalid update_proj_gap value: 0"),
    ({"scale": -1.0}, [(12, 7)], ValueError, "Invalid scale value: -1.0"),
    ({"proj_type": "up"}, [(12, 7)], ValueError, "proj_type must be one of 'std', .* not 'up'"),
    ({"svd": "fast"}, [(12, 7)], ValueError, "svd must be one of 'exact', .* not 'fast'"),
]


@pytest.mark.parametrize(("options", "shapes", "error", "text"), BAD)
def test_bad_options_are_named_and_add_no_group(options, shapes, error, text):
    plain, bad = groups(shapes=shapes, **options)
    with pytest.raises(error, match=text):
        optim.GaLoreAdamW([plain, bad])
    optimizer = optim.GaLoreAdamW([plain])
    with pytest.raises(error, match=text):
        optimizer.add_param_group(bad)
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize("option", ["rank", "update_proj_gap", "scale", "proj_type", "svd"])
def test_options_of_a_constructor_are_checked(option):
    with pytest.raises((TypeError, ValueError), match=option):
        optim.GaLoreAdamW([torch.zeros(4, 4)], **{option: "half"})


def test_named_parameters_are_named():
    named = [("head", torch.zeros(3, requires_grad=True))]
    with pytest.raises(ValueError, match="parameter 'head' has 1 dimensions"):
        optim.GaLoreAdamW(named, rank=2)


def test_complex_and_sharded_weights_are_refused(monkeypatch):
    with pytest.raises(ValueError, match=r"parameter 0 of group 0 is torch\.complex64"):
        optim.GaLoreAdamW([torch.zeros(4, 4, dtype=torch.complex64)], rank=2)
    monkeypatch.setattr("fusedstep.optim._projection.is_dtensor", lambda p: p.shape == (4, 5))
    with pytest.raises(ValueError, match="parameter 1 of group 0 is a DTensor"):
        optim.GaLoreAdamW([torch.zeros(4, 4), torch.zeros(4, 5)], rank=2)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("steps", [0, 1], ids=["refresh", "between"])
@pytest.mark.parametrize("fused", [True, False])
def test_a_gradient_that_is_not_finite_is_named_before_anything_moves(fused, steps, bad):
    optimizer = optim.GaLoreAdamW(groups(), **OPTIONS, fused=fused)
    run(optimizer, range(steps))
    set_gradients(optimizer, 5)
    before = tensors_of(optimizer)
    optimizer.param_groups[1]["params"][2].grad[1, 1] = bad
    with pytest.raises(RuntimeError, match="gradient of parameter 2 of group 1 has elements that"):
        optimizer.step()
    after = tensors_of(optimizer)
    assert_same(after[: len(before)], before)
    assert not any(state.any() for state in after[len(before) :])  # made, and still 0
    run(optimizer, range(steps, 4))
    fresh = optim.GaLoreAdamW(groups(), **OPTIONS, fused=fused)
    assert_same(weights_of(optimizer), run(fresh, range(4)))


def test_large_gradients_are_finite():
    """Their sum is not."""
    (group,) = as_params([(projected(), [(16, 8)])], torch.float32)
    optimizer = optim.GaLoreAdamW([group], fused=True)
    (weight,) = group["params"]
    weight.grad = torch.full_like(weight, 3e37)
    weight.grad[0] = 1e37
    optimizer._check_finite(group, weight, weight.grad)


def test_a_low_rank_gradient_that_overflows_is_named():
    (group,) = as_params([(projected(), [(200, 100)])], torch.float16)
    optimizer = optim.GaLoreAdamW([group], fused=True)
    (weight,) = group["params"]
    weight.grad = torch.full_like(weight, 3e4)
    with pytest.raises(RuntimeError, match="low-rank gradient of parameter 0 of group 0 overflows"):
        optimizer.step()


def test_sparse_gradients_are_refused():
    optimizer = optim.GaLoreAdamW(groups())
    weight = optimizer.param_groups[1]["params"][0]
    weight.grad = torch.zeros_like(weight).to_sparse()
    with pytest.raises(RuntimeError, match="GaLoreAdamW does not support sparse gradients"):
        optimizer.step()


# ---- What the published one gets wrong -----------------------------------------------------------


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("shape", [(6, 15), (15, 6), (8, 8)])
def test_reverse_std_takes_a_rank_of_the_smaller_side(shape, fused):
    """galore_torch chooses the side to go back by from the low-rank shape, which is square then."""
    options = projected(rank=min(shape), proj_type="reverse_std")
    groups = [as_params([(options, [shape])], torch.float64) for _ in range(2)]
    optimizer = optim.GaLoreAdamW(groups[0], **OPTIONS, fused=fused)
    (expected,) = by_reference(galore, groups[1], range(3), **OPTIONS)
    (found,) = run(optimizer, range(3))
    torch.testing.assert_close(found.detach(), expected, rtol=1e-9, atol=1e-9)


def test_reverse_std_refuses_a_rank_over_the_smaller_side():
    """galore_torch takes (64, 256) with rank 128, and fails in its first step."""
    with pytest.raises(ValueError, match=r"matrix \[64, 256\], whose rank is at most 64: rank=128"):
        optim.GaLoreAdamW([torch.zeros(64, 256)], rank=128, proj_type="reverse_std")


def test_positional_arguments_are_the_published_ones():
    names = list(inspect.signature(optim.GaLoreAdamW).parameters)
    assert names[:6] == ["params", "lr", "betas", "eps", "weight_decay", "correct_bias"]
    defaults = optim.GaLoreAdamW([torch.zeros(3)]).defaults
    assert {name: defaults[name] for name in names[1:6]} == {
        "lr": 1e-3,
        "betas": (0.9, 0.999),
        "eps": 1e-6,
        "weight_decay": 0.0,
        "correct_bias": True,
    }
    optimizer = optim.GaLoreAdamW([torch.zeros(3)], 0.1, (0.5, 0.6), 0.2, 0.3, False)
    assert [optimizer.param_groups[0][name] for name in names[1:6]] == [
        0.1, (0.5, 0.6), 0.2, 0.3, False,
    ]  # fmt: skip


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_bases_stay_on_the_device_of_the_weight():
    """galore_torch's `.to(device.type)` loses the index of the device."""
    weight = torch.nn.Parameter(torch.randn(12, 8, device="cuda:1", dtype=torch.bfloat16))
    optimizer = optim.GaLoreAdamW([weight], rank=3)
    weight.grad = torch.randn_like(weight)
    optimizer.step()
    assert optimizer.state[weight][RIGHT].device == weight.device


# ---- Memory --------------------------------------------------------------------------------------


def allocated(optimizer):
    """The largest piece of memory that torch hands out during a step."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(
        activities=activities, profile_memory=True, acc_events=True
    ) as profile:
        optimizer.step()
    return max(event.self_cpu_memory_usage for event in profile.events())


@pytest.mark.parametrize("proj_type", ["std", "reverse_std", "full"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_step_between_refreshes_allocates_nothing_of_weight_size(dtype, proj_type):
    shapes, options = [(256, 128), (128, 256)], {"rank": 4, "svd": "randomized"}
    found = {}
    for fused in (True, False):
        (group,) = as_params([(projected(proj_type=proj_type, **options), shapes)], dtype)
        optimizer = optim.GaLoreAdamW([group], **OPTIONS, fused=fused)
        run(optimizer, range(1))
        found[fused] = allocated(optimizer)
    assert found[True] <= 256 * 128 * dtype.itemsize // 8
    assert found[False] >= 256 * 128 * 4  # the control: the formula allocates updates


def test_a_weight_has_one_scratch_memory():
    """Whatever weights it has been stepped together with."""
    optimizer = optim.GaLoreAdamW(groups(), fused=True)
    run(optimizer, range(8), lambda step, place: (step + place) % 3 == 1)
    weights = [p for scratch in optimizer._scratch.values() for p in scratch.weights]
    assert 0 < len(weights) == len(set(weights))


# ---- Its pages -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["GaLoreAdamW", "APOLLOAdamW"])
def test_is_documented(name, repository):
    text = inspect.getdoc(getattr(optim, name))
    assert text.startswith(f"Implements the {name} algorithm")
    assert re.search(r"::\n\n(    .*\n)*    w = .*\blr\b", text)
    assert "https://arxiv.org" in text
    for option in inspect.signature(getattr(optim, name)).parameters:
        assert re.search(rf"\b{option}\b", text), option
    for page in ("CHANGELOG.md", "README.md", "docs/README.md", "docs/choosing.md"):
        assert name in (repository / page).read_text(), page
    page = (repository / f"docs/optimizers/{name.removesuffix('AdamW').lower()}.md").read_text()
    for option in inspect.signature(getattr(optim, name)).parameters:
        assert f"`{option}`" in page, option


def test_the_shared_part_knows_no_class_by_name():
    assert "galore" not in inspect.getsource(_low_rank.LowRankSteps).lower()
