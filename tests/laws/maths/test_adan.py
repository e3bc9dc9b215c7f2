"""Adan: the published algorithm, its four ways to run, its clipping and its restart."""

import copy
import inspect
import math

import pytest
import torch

import fusedstep
from fusedstep import optim
from fusedstep._state.codes import BLOCKS
from reference.adan import adan
from support.foreign import count_in_the_group, dressed
from support.stepping import (
    CHUNK,
    as_parameters,
    assert_contents_close,
    assert_same_bits,
    assert_same_contents,
    contents,
    make_gradients,
    make_weights,
    train,
)

SHAPES = ((33, 31), (7,), (), (5, 4), (CHUNK + 77,), (6,), (0,))
NAMES = ("exp_avg", "exp_avg_sq", "exp_avg_diff", "neg_pre_grad")
WAYS = {
    "together": {"foreach": True, "fused": True},
    "one by one": {"foreach": False, "fused": True},
    "lists of tensors": {"foreach": True, "fused": False},
    "imperative": {"foreach": False, "fused": False},
}
OPTIONS = [
    {},
    {"weight_decay": 0.1},
    {"weight_decay": 0.1, "no_prox": True},
    {"maximize": True, "betas": (0.8, 0.7, 0.95), "eps": 1e-3},
]

by_way = pytest.mark.parametrize("way", WAYS)


def build(params, way, **options):
    """Makes an optimizer with two groups, which are clipped together."""
    groups = [{"params": params[:3]}, {"params": params[3:]}]
    return optim.Adan(groups, **({"lr": 0.01} | WAYS[way] | options))


def after_steps(way, steps=5, dtype=torch.float64, **options):
    params = as_parameters(make_weights(SHAPES, dtype))
    optimizer = build(params, way, **options)
    train(optimizer, params, range(1, steps + 1))
    return params, optimizer


# ---- The algorithm -------------------------------------------------------------------------------


def single_tensor_kernel(weight, grad, state, step, *, lr, betas=(0.98, 0.92, 0.99), eps=1e-8):
    """The formula of its authors' fused kernel for single float32 tensors.

    It takes a variance about the mean difference for the square, corrects no bias of it, and
    updates elements by fours only.
    """
    beta1, beta2, _ = betas
    _, new = adan(weight, grad, state, step, betas=betas)
    square = new["exp_avg_sq"] - new["exp_avg_diff"] ** 2 / beta2
    update = new["exp_avg"] / (1 - beta1**step)
    update += beta2 * new["exp_avg_diff"] / (1 - beta2**step)
    moved = (weight - lr * update / (square.sqrt() + eps)).flatten()
    whole = weight.numel() // 4 * 4
    return torch.cat([moved[:whole], weight.flatten()[whole:]]).view_as(weight), new


def largest_error(formula, way, steps=10):
    """Our largest error, as a share of the largest distance that a weight has gone."""
    shapes = ((7,), (33, 31))
    expected = make_weights(shapes, torch.float64)
    params, states = as_parameters(make_weights(shapes, torch.float32)), [{} for _ in shapes]
    before = [param.detach().clone() for param in params]
    optimizer = optim.Adan(params, lr=0.01, **WAYS[way])
    for step in range(1, steps + 1):
        gradients = make_gradients(shapes, torch.float32, step)
        for i, gradient in enumerate(gradients):
            params[i].grad = gradient
            expected[i], states[i] = formula(
                expected[i], gradient.double(), states[i], step, lr=0.01
            )
        optimizer.step()
    return max(
        ((param - right).abs() / (right - start).abs().max()).max().item()
        for param, right, start in zip(params, expected, before, strict=True)
    )


@by_way
def test_is_the_published_algorithm_and_not_the_single_tensor_kernel(way):
    assert largest_error(adan, way) < 1e-4
    assert not largest_error(single_tensor_kernel, way) < 0.1


@pytest.mark.parametrize("count", [*range(1, 18), CHUNK - 1, CHUNK + 1])
@by_way
def test_every_element_is_updated(way, count):
    param = torch.nn.Parameter(torch.ones(count))
    optimizer = optim.Adan([param], lr=0.25, **WAYS[way])
    param.grad = torch.ones(count)
    optimizer.step()
    torch.testing.assert_close(param.detach(), torch.full((count,), 0.75))


@pytest.mark.parametrize("options", [*OPTIONS, {"max_grad_norm": 20.0}], ids=str)
def test_all_ways_agree(options):
    """Natively to the bit where elements know nothing of one another: a norm is a sum over all.

    What is updated at one go is added up by itself, so the last bit of the norm depends on it.
    """
    found = {way: contents(after_steps(way, **options)[1]) for way in WAYS}
    if "max_grad_norm" not in options:
        assert_same_contents(found["one by one"], found["together"])
    assert_contents_close(found["one by one"], found["together"], rtol=1e-13, atol=1e-15)
    for way in ("lists of tensors", "imperative"):
        assert_contents_close(found[way], found["together"], rtol=1e-12, atol=1e-14)


def test_what_is_updated_at_one_go():
    for way, plans in {"together": 2, "one by one": len(SHAPES)}.items():
        _, optimizer = after_steps(way)
        assert len(optimizer._plans) == plans
        assert optimizer._isa() == fusedstep.isa()
    params, optimizer = after_steps("together", steps=3)
    for group in optimizer.param_groups:
        group["foreach"] = False
    train(optimizer, params, [4])
    assert len({id(plan) for plan in optimizer._plans.values()}) == len(SHAPES)
    for group in optimizer.param_groups:
        group["foreach"] = None  # says nothing: together
    train(optimizer, params, [5])
    assert_same_contents(contents(optimizer), contents(after_steps("together")[1]))


# ---- The first step ------------------------------------------------------------------------------


@by_way
def test_the_first_difference_is_zero_whatever_the_state_holds(way):
    params = as_parameters(make_weights(SHAPES, torch.float32))
    optimizer = build(params, way)
    for param in params:
        optimizer.state[param] = {name: torch.zeros_like(param) for name in NAMES}
        optimizer.state[param]["neg_pre_grad"] += 9.0
        optimizer.state[param]["step"] = torch.zeros(())
    train(optimizer, params, [1])
    for param in params:
        assert not optimizer.state[param]["exp_avg_diff"].any()
        assert_same_bits(optimizer.state[param]["neg_pre_grad"], -param.grad, "neg_pre_grad")
    _, fresh = after_steps(way, steps=1, dtype=torch.float32)
    assert_same_contents(contents(optimizer), contents(fresh))
    train(optimizer, params, [2])
    assert all(optimizer.state[p]["exp_avg_diff"].any() for p in params if p.numel())


@by_way
def test_a_weight_that_comes_later_has_a_first_step_of_its_own(way):
    params = as_parameters(make_weights(SHAPES, torch.float64))
    optimizer = build(params, way)
    for step in (1, 2, 3):
        for index, gradient in enumerate(make_gradients(SHAPES, torch.float64, step)):
            params[index].grad = None if index == 1 and step < 3 else gradient
        optimizer.step()
    assert not optimizer.state[params[1]]["exp_avg_diff"].any()
    assert optimizer.state[params[0]]["exp_avg_diff"].any()
    (weight,) = make_weights(SHAPES, torch.float64)[1:2]
    expected, _ = adan(weight, make_gradients(SHAPES, torch.float64, 3)[1], {}, 1, lr=0.01)
    torch.testing.assert_close(params[1].detach(), expected, rtol=1e-14, atol=1e-15)


@by_way
def test_gradients_that_are_not_finite_spoil_only_their_elements(way):
    param = torch.nn.Parameter(torch.ones(20))
    optimizer = optim.Adan([param], **WAYS[way])
    for bad in (math.inf, math.nan, 1.0):
        param.grad = torch.ones(20)
        param.grad[3] = bad
        optimizer.step()
        assert (~param.isfinite()).nonzero().flatten().tolist() == [3]


# ---- Restart -------------------------------------------------------------------------------------


@by_way
def test_a_restart_begins_anew(way):
    params, optimizer = after_steps(way, dtype=torch.float32)
    states = [optimizer.state[p][name] for p in params for name in ("step", *NAMES)]
    plans = dict(optimizer._plans)
    optimizer.restart_opt()
    fresh_params = as_parameters(params)
    fresh = build(fresh_params, way)
    train(optimizer, params, [6, 7])
    train(fresh, fresh_params, [6, 7])
    assert_same_contents(contents(optimizer), contents(fresh))
    # In place: a captured graph goes on with them.
    after = [optimizer.state[p][name] for p in params for name in ("step", *NAMES)]
    assert all(now is before for now, before in zip(after, states, strict=True))
    assert optimizer._plans == plans


@pytest.mark.parametrize("kind", BLOCKS)
def test_a_restart_of_codes_begins_anew(kind):
    """The code 0 stands for no zero: codes, as their absmax, are those of a new state."""
    params = as_parameters([torch.linspace(-1, 1, 5000), torch.ones(7)])
    optimizer = optim.Adan(params, lr=0.01, fused=True, state_dtype=kind)
    train(optimizer, params, [1, 2])
    optimizer.restart_opt()
    fresh_params = as_parameters(params)
    fresh = optim.Adan(fresh_params, lr=0.01, fused=True, state_dtype=kind)
    fresh._store.create(fresh.param_groups[0], fresh_params, True, fresh.param_groups)
    assert_same_contents(contents(optimizer), contents(fresh))
    train(optimizer, params, [6, 7])
    train(fresh, fresh_params, [6, 7])
    assert_same_contents(contents(optimizer), contents(fresh))


@by_way
def test_a_restart_before_the_first_step_is_none(way):
    params = as_parameters(make_weights(SHAPES, torch.float32))
    optimizer = build(params, way)
    optimizer.restart_opt()
    train(optimizer, params, range(1, 6))
    _, expected = after_steps(way, dtype=torch.float32)
    assert_same_contents(contents(optimizer), contents(expected))


# ---- Clipping ------------------------------------------------------------------------------------


def clipped(gradients, max_grad_norm, eps):
    """As its authors' code: `eps` is added to the norm."""
    norm = math.sqrt(sum(gradient.square().sum().item() for gradient in gradients))
    factor = min(max_grad_norm / (norm + eps), 1.0)
    return [gradient * factor for gradient in gradients], factor


@pytest.mark.parametrize("mixed", [False, True], ids=["one way", "mixed groups"])
@by_way
def test_clips_the_norm_of_all_groups(way, mixed):
    options = {"max_grad_norm": 20.0, "eps": 0.5}
    params = as_parameters(make_weights(SHAPES, torch.float64))
    others = as_parameters(params)
    optimizer = build(params, way, **options)
    twin = build(others, way, eps=0.5)
    if mixed:
        for each in (optimizer, twin):
            each.param_groups[1]["fused"] = not WAYS[way]["fused"]
    factors = []
    for step in range(1, 6):
        gradients = [g * 2.0 ** (1 - 2 * step) for g in make_gradients(SHAPES, torch.float64, step)]
        smaller, factor = clipped(gradients, **options)
        factors.append(factor)
        for param, other, whole, part in zip(params, others, gradients, smaller, strict=True):
            param.grad, other.grad = whole.clone(), part
        optimizer.step()
        twin.step()
        assert_contents_close(contents(optimizer), contents(twin), rtol=1e-12, atol=1e-14)
        for param, whole in zip(params, gradients, strict=True):
            assert_same_bits(param.grad, whole, "gradient")
    assert factors[0] < 1 == factors[-1]


def test_eps_is_part_of_the_norm():
    """A gradient of norm 3 is clipped to 4 / (3 + 2)."""
    param = torch.nn.Parameter(torch.zeros(9, dtype=torch.float64))
    optimizer = optim.Adan([param], max_grad_norm=4.0, eps=2.0)
    param.grad = torch.ones_like(param)
    optimizer.step()
    assert optimizer.state[param]["neg_pre_grad"][0].item() == -0.8


@by_way
def test_max_norm_clips_before(way):
    optimizers = [after_steps(way, steps=2, max_grad_norm=9.0)[1] for _ in range(2)]
    for optimizer, argument in zip(optimizers, ({"max_norm": 12.0}, {}), strict=True):
        params = [param for group in optimizer.param_groups for param in group["params"]]
        for param, gradient in zip(params, make_gradients(SHAPES, torch.float64, 3), strict=True):
            param.grad = gradient
        if not argument:
            torch.nn.utils.clip_grad_norm_(params, 12.0)
        optimizer.step(**argument)
    assert_contents_close(*map(contents, optimizers), rtol=1e-12, atol=1e-14)


def test_norms_that_differ_between_groups():
    groups = [{"params": [torch.zeros(3)]}, {"params": [torch.zeros(3)], "max_grad_norm": 2.0}]
    with pytest.raises(ValueError, match="max_grad_norm must be the same in all groups"):
        optim.Adan(groups, max_grad_norm=1.0)


# ---- Dictionaries of others ----------------------------------------------------------------------

AUTHORS = {"max_grad_norm": 20.0, "no_prox": True, "foreach": True, "fused": False}
TIMM = {"no_prox": True, "caution": False, "foreach": None}
OTHERS = {"adan": AUTHORS, "timm": TIMM}


def from_elsewhere(package):
    """An optimizer of another library after three steps, ours for six, and the weights after three.

    The options of ours include those that the other has.
    """
    given = {"max_grad_norm": 0.0} | OTHERS[package]
    ours = {"weight_decay": 0.1, **{k: given[k] for k in ("max_grad_norm", "no_prox")}}
    params, source = after_steps("together", steps=3, **ours)
    other = dressed(source, package, "Adan", OTHERS[package], count_in_the_group)
    return params, other, contents(after_steps("together", steps=6, **ours)[1])


@pytest.mark.parametrize("package", OTHERS)
def test_converts_its_authors_and_timms(package):
    params, other, expected = from_elsewhere(package)
    optimizer = fusedstep.convert(other)
    assert type(optimizer) is optim.Adan
    train(optimizer, params, [4, 5, 6])
    assert optimizer._isa() == fusedstep.isa()
    assert_same_contents(contents(optimizer), expected)


@pytest.mark.parametrize("package", OTHERS)
def test_imports_dictionaries_of_its_authors_and_timms(package):
    params, other, expected = from_elsewhere(package)
    optimizer = build(params, "together")
    fusedstep.import_state_dict(optimizer, copy.deepcopy(other.state_dict()))
    assert "step" not in optimizer.param_groups[0]
    train(optimizer, params, [4, 5, 6])
    assert_same_contents(contents(optimizer), expected)


def test_loads_dictionaries_of_its_authors():
    """Their options come along, as with torch's: here that of torch operations."""
    params, other, expected = from_elsewhere("adan")
    optimizer = build(params, "together")
    optimizer.load_state_dict(copy.deepcopy(other.state_dict()))
    assert all("step" not in group for group in optimizer.param_groups)
    assert [group["fused"] for group in optimizer.param_groups] == [False, False]
    for group in optimizer.param_groups:
        group["fused"] = True
    train(optimizer, params, [4, 5, 6])
    assert_same_contents(contents(optimizer), expected)


def test_a_restart_of_its_authors_before_the_first_gradient():
    """Leaves zeros, but no gradient that was before."""
    params, other, _ = from_elsewhere("adan")
    for group in other.param_groups:
        group["step"] = 0
        for param in group["params"]:
            other.state[param] = {name: torch.zeros_like(param) for name in NAMES[:3]}
    optimizer = fusedstep.convert(other)
    fresh_params = as_parameters(params)
    fresh = build(fresh_params, "together", weight_decay=0.1, **AUTHORS | {"fused": True})
    train(optimizer, params, [1, 2])
    train(fresh, fresh_params, [1, 2])
    assert_same_contents(contents(optimizer), contents(fresh))


def test_refuses_the_states_of_another_optimizer():
    params = as_parameters(make_weights(SHAPES, torch.float32))
    adam = optim.Adam(params)
    train(adam, params, [1])
    with pytest.raises(ValueError, match="has no exp_avg_diff, neg_pre_grad: it is not one of Ad"):
        fusedstep.import_state_dict(optim.Adan(params), adam.state_dict())


def test_refuses_another_formula_of_timm():
    _, other, _ = from_elsewhere("timm")
    other.param_groups[0]["caution"] = True
    with pytest.raises(ValueError, match="caution=True has no counterpart in Adan"):
        fusedstep.convert(other)


# ---- Options -------------------------------------------------------------------------------------


def test_has_its_authors_arguments():
    parameters = inspect.signature(optim.Adan).parameters
    positional = {
        name: p.default
        for name, p in parameters.items()
        if p.kind is not inspect.Parameter.KEYWORD_ONLY
    }
    assert list(positional.items()) == [
        ("params", inspect.Parameter.empty),
        ("lr", 1e-3),
        ("betas", (0.98, 0.92, 0.99)),
        ("eps", 1e-8),
        ("weight_decay", 0.0),
        ("max_grad_norm", 0.0),
        ("no_prox", False),
        ("foreach", True),
        ("fused", None),  # theirs is True, and refuses what has no kernels
    ]
    unset = {"params", "state_dtype", "master_weights", "rounding", "seed", "skip_nonfinite"}
    defaults = {name: p.default for name, p in parameters.items() if name not in unset}
    assert optim.Adan([torch.zeros(3)]).defaults == defaults


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"max_grad_norm": -1.0}, "Invalid Max grad norm: -1.0"),
        ({"max_grad_norm": math.nan}, "Invalid Max grad norm: nan"),
        ({"lr": -1.0}, "Invalid learning rate: -1.0"),
        ({"eps": -1.0}, "Invalid epsilon value: -1.0"),
        ({"betas": (1.0, 0.9, 0.9)}, "Invalid beta parameter at index 0: 1.0"),
        ({"betas": (0.9, -0.1, 0.9)}, "Invalid beta parameter at index 1: -0.1"),
        ({"betas": (0.9, 0.9, 1.0)}, "Invalid beta parameter at index 2: 1.0"),
        ({"weight_decay": -1.0}, "Invalid weight_decay value: -1.0"),
    ],
    ids=str,
)
def test_options_out_of_range(options, text):
    """Texts are its authors', except for weight_decay, which they do not check."""
    with pytest.raises(ValueError, match=f"^{text}$"):
        optim.Adan([torch.zeros(3)], **options)
