"""GaLore's projectors: how they are made, when, and what is saved of them."""

import warnings

import pytest
import torch

from fusedstep import convert, import_state_dict, optim
from fusedstep._matrix import subspace
from fusedstep._matrix.projection import LEFT, RIGHT
from reference.codes import MAPS
from support.low_rank import (
    OPTIONS,
    as_params,
    assert_same,
    coded_groups,
    gradient,
    groups,
    projected,
    run,
    saved,
    set_gradients,
    tensors_of,
    weights_of,
)

SVDS = ("exact", "randomized", "power", "lazy")

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
    exact = subspace.bases_of(grad, rank, sides, "exact", None, 0)
    bases = subspace.bases_of(grad, rank, sides, svd, None, 7)
    bases = subspace.bases_of(grad, rank, sides, svd, bases, 8)
    for side, basis in bases.items():
        assert basis.shape == exact[side].shape
        gram = basis.T @ basis if side == LEFT else basis @ basis.T
        torch.testing.assert_close(gram, torch.eye(rank, dtype=torch.float64))
    # The share of the exact one's energy: without power steps the random product keeps 0.96.
    assert energy(grad, bases) > 0.999 * energy(grad, exact)
    assert energy(grad, exact) < 0.99


def test_singular_vectors_come_in_their_order():
    """Adam is not the same in another basis of the same subspace."""
    grad = matrix(30, 20, decay=0.6)
    exact = subspace.bases_of(grad, 4, (LEFT, RIGHT), "exact", None, 0)
    found = subspace.bases_of(grad, 4, (LEFT, RIGHT), "randomized", None, 0)
    for cosines in (exact[LEFT].T @ found[LEFT], exact[RIGHT] @ found[RIGHT].T):
        torch.testing.assert_close(
            cosines.abs(), torch.eye(4, dtype=torch.float64), atol=1e-6, rtol=0
        )


def test_a_power_step_stays_near_its_basis():
    """Moments of the last basis mean the same in the next one: no vector changes its sign."""
    grad = matrix(30, 20, decay=0.6)
    last = subspace.bases_of(grad, 4, (LEFT,), "exact", None, 0)
    found = subspace.bases_of(grad, 4, (LEFT,), "power", last, 0)
    torch.testing.assert_close(found, last, rtol=0, atol=1e-9)


def test_random_numbers_follow_from_the_key_alone():
    like = torch.empty(0)
    first = subspace.gaussian((3, 4), 2**63 + 5, like)
    torch.manual_seed(1)
    assert torch.equal(subspace.gaussian((3, 4), 2**63 + 5, like), first)
    assert not torch.equal(subspace.gaussian((3, 4), 6, like), first)


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
    """The number of bases that each step makes."""
    made, counts = [], []
    original = subspace.bases_of

    def counting(*args):
        made.append(1)
        return original(*args)

    monkeypatch.setattr("fusedstep._matrix.galore.bases_of", counting)
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
    exact = subspace.bases_of(grad, 3, (LEFT, RIGHT), "exact", None, 0)
    refused = {torch.float32}

    def fails(matrix, **options):
        if matrix.dtype in refused:
            raise torch.linalg.LinAlgError("linalg.svd: did not converge")
        return original(matrix, **options)

    monkeypatch.setattr(torch.linalg, "svd", fails)
    subspace._warn.cache_clear()
    for how in ("float64", "Gram matrix"):
        with pytest.warns(UserWarning, match=how):
            found = subspace.bases_of(grad, 3, (LEFT, RIGHT), "exact", None, 0)
        for a, b in zip(found.values(), exact.values(), strict=True):
            assert a.dtype is torch.float32
            torch.testing.assert_close(a.abs(), b.abs(), rtol=0, atol=1e-4)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            subspace.bases_of(grad, 3, (RIGHT,), "exact", None, 0)
        refused.add(torch.float64)
    monkeypatch.setattr(torch.linalg, "eigh", lambda matrix: fails(matrix))
    with pytest.raises(RuntimeError, match=r"no decomposition .* succeeded: linalg\.svd"):
        subspace.bases_of(grad, 3, (RIGHT,), "exact", None, 0)


# ---- What is saved -------------------------------------------------------------------------------


def assert_goes_on(build, steps):
    """A run that is resumed after three steps ends as a whole run. Returns what was resumed."""
    whole, first, second = build(), build(), build()
    run(whole, range(steps))
    run(first, range(3))
    second.load_state_dict(saved(first))
    with torch.no_grad():
        for p, q in zip(weights_of(second), weights_of(first), strict=True):
            p.copy_(q)
    run(second, range(3, steps))
    assert_same(weights_of(second), weights_of(whole))
    assert_same(tensors_of(second), tensors_of(whole))
    return second


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("svd", SVDS)
def test_a_resumed_run_is_the_same(svd, fused):
    """From a file that holds tensors and numbers only; the published projectors are objects."""

    def build():
        options = {"svd": svd, "stagger": True, "update_proj_gap": 4}
        return optim.GaLoreAdamW(groups(torch.float32, **options), **OPTIONS, fused=fused)

    assert_goes_on(build, 9)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize(
    ("cls", "options"),
    [
        (optim.GaLoreAdamW8bit, {}),
        (optim.GaLoreAdamW, {"state_dtype": "int4", "svd": "power"}),
        (optim.APOLLOAdamW, {"state_dtype": "fp8"}),
        (optim.GaLoreAdafactor, {"beta1": 0.9, "svd": "lazy"}),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_resumed_run_of_other_states_is_the_same(cls, options, dtype, fused):
    def build():
        return cls(coded_groups(dtype), lr=0.01, fused=fused, **options)

    second = assert_goes_on(build, 7)
    is_coded = any(value.itemsize == 1 for value in second.state[weights_of(second)[0]].values())
    assert is_coded == (cls is not optim.GaLoreAdafactor)


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
    """A projector as galore_torch pickles it, as far as it is read."""

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


def published(optimizer, name, defaults, state_of):
    """An optimizer of galore_torch with the weights, options and states of one of ours."""
    theirs = type(name, (torch.optim.Optimizer,), {"__module__": f"galore_torch.{name.lower()}"})
    groups = []
    for group in optimizer.param_groups:
        own = {"rank", "update_proj_gap", "scale", "proj_type"} if group["rank"] else set()
        groups.append({name: group[name] for name in (*own, "params", "lr", "weight_decay")})
    made = theirs(groups, defaults)
    for p, state in optimizer.state.items():
        bases = [state[side] for side in (LEFT, RIGHT) if side in state]
        made.state[p] = state_of(state) | {"step": int(state["step"])}
        if bases:
            made.state[p]["projector"] = Projector(bases[0])
    return made


def test_the_published_8_bit_class_is_converted():
    """Its moments are those of bitsandbytes: codes, a map of their values, and absmax."""
    whole, ours = (optim.GaLoreAdamW8bit(coded_groups(), lr=0.01) for _ in range(2))
    run(whole, range(4))
    run(ours, range(2))

    def state_of(state):
        found = {}
        for number, name in enumerate(("exp_avg", "exp_avg_sq"), 1):
            found[f"state{number}"] = state[name]
            if f"{name}_absmax" in state:
                found[f"qmap{number}"] = MAPS["int8", number == 1][0].float()
                found[f"absmax{number}"] = state[f"{name}_absmax"].flatten()
        return found

    defaults = {"betas": (0.9, 0.999), "eps": 1e-8}
    converted = convert(published(ours, "AdamW8bit", defaults, state_of))
    assert type(converted) is optim.GaLoreAdamW8bit
    assert converted.state[weights_of(converted)[0]]["exp_avg"].dtype is torch.uint8
    run(converted, range(2, 4))
    assert_same(weights_of(converted), weights_of(whole))


def test_the_published_adafactor_is_converted():
    options = {"beta1": 0.8, "weight_decay": 0.1, "clip_threshold": 0.7}
    whole, ours = (optim.GaLoreAdafactor(groups(), **options) for _ in range(2))
    run(whole, range(4))
    run(ours, range(2))

    def state_of(state):
        names = ("exp_avg_sq", "exp_avg_sq_row", "exp_avg_sq_col", "exp_avg")
        return {name: state[name] for name in names if name in state} | {"RMS": 0.3}

    defaults = {
        "eps": (1e-30, 1e-3), "clip_threshold": 0.7, "decay_rate": -0.8, "beta1": 0.8,
        "scale_parameter": True, "relative_step": True, "warmup_init": False,
    }  # fmt: skip
    converted = convert(published(ours, "Adafactor", defaults, state_of))
    assert type(converted) is optim.GaLoreAdafactor
    run(converted, range(2, 4))
    assert_same(weights_of(converted), weights_of(whole))
