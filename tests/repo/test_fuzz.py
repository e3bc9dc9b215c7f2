"""The property fuzz itself: it draws the same cases again, passes, and sees what is planted."""

import copy
import dataclasses
import json
import subprocess
import sys
from collections import Counter
from types import SimpleNamespace

import pytest
import torch

from fuzz import choices, composites, oracle, projections, properties, run, shrink
from fuzz.__main__ import main as fuzz_main
from fuzz.bounded import Arithmetic, Bounded, judge
from fuzz.memory import DTYPES, Area, overlaps
from support.cases import PLAIN
from support.layouts import WEIGHT_LAYOUTS

SEED = 20_000


def test_a_seed_has_one_case():
    drawn = [choices.draw(seed) for seed in range(60)]
    assert drawn == [choices.draw(seed) for seed in range(60)]
    assert len({json.dumps(case) for case in drawn}) == 60
    assert all(json.loads(json.dumps(case)) == case for case in drawn)


def test_cases_have_everything_in_them():
    drawn = [choices.draw(seed) for seed in range(600)]
    steps = [step for case in drawn for step in case["steps"]]
    changes = [change for step in steps for change in step["changes"]]
    gradients = [gradient for step in steps for gradient in step["grads"].values()]
    weights = [w for case in drawn for group in case["groups"] for w in group["weights"]]
    assert {case["row"] for case in drawn} == {row.name for row in PLAIN}
    drawn_changes = {change["do"] for change in changes}
    assert drawn_changes == set(run.CHANGES) == {*choices.CHANGES, choices.ORDER}
    assert {gradient["how"] for gradient in gradients} == {"new", "refill", "keep", "none", "share"}
    assert {weight["dtype"] for weight in weights} == set(DTYPES)
    called = {name for step in steps for name in step["call"]}
    assert called == {"max_norm", "zero_grad", "closure", "scale", "found_inf"}
    assert max(sum(len(g["weights"]) for g in case["groups"]) for case in drawn) > 140
    assert any(0 in weight["shape"] for weight in weights)
    ways = {(name, case["options"].get(name)) for case in drawn for name in choices.WAYS}
    assert {("state_dtype", kind) for kind in choices.CODES} < ways
    assert {way for each in choices.BFLOAT16_WAYS for way in each.items()} < ways
    assert any(overlaps([3, 5], g["strides"]) for g in gradients if len(g.get("strides", ())) == 2)
    for row in PLAIN:
        mine = [case for case in drawn if case["row"] == row.name]
        assert {name for case in mine for name in case["options"]} == set(choices.options_of(row))


@pytest.mark.parametrize("row", PLAIN, ids=str)
def test_every_option_has_values(row):
    for name, default in choices.options_of(row).items():
        assert name == "betas" or len(choices.values_of(name, default)) >= 1
    with pytest.raises(LookupError, match="'warmup'"):
        choices.values_of("warmup", None)


def test_random_cases_pass():
    tally = oracle.Tally()
    for seed in range(SEED, SEED + 12):
        run.check(choices.draw(seed), tally)
    assert tally.elements > 100_000
    assert tally.vague < 0.05 * tally.elements


ONCE_REFUSED = {
    "an initial value that float16 rounds": {
        "seed": 34,
        "row": "adagrad",
        "options": {"initial_accumulator_value": 0.1},
        "groups": [{"options": {}, "weights": [{"id": 1, "dtype": "float16", "shape": [6]}]}],
        "steps": [{"n": 1, "changes": [], "grads": {}, "call": {}}],
    },
    "squares of float64 that are equal": {
        "seed": 15250520,
        "row": "lamb",
        "options": {},
        "groups": [{"options": {}, "weights": [{"id": 1, "dtype": "float64", "shape": [51029]}]}],
        "steps": [
            {"n": 2, "changes": [], "grads": {"1": {"how": "new", "values": "equal"}}, "call": {}}
        ],
    },
}


def _first_steps_of_sgd(changes):
    """A step that found_inf skips, another, and after some changes a step that is taken."""
    skipped = {"scale": 2.0, "found_inf": True}
    momentum = {"momentum": 0.9, "dampening": 0.5}
    return {
        "seed": 3,
        "row": "sgd",
        "options": momentum,
        "groups": [{"options": {}, "weights": [{"id": 1, "dtype": "float32", "shape": [6]}]}],
        "steps": [
            {"n": 1, "changes": [], "grads": {}, "call": skipped},
            {"n": 2, "changes": [], "grads": {}, "call": skipped},
            {"n": 3, "changes": changes, "grads": {}, "call": {}},
            {"n": 4, "changes": [], "grads": {}, "call": {}},
        ],
    }


ONCE_REFUSED |= {
    "a first step after a skipped one": _first_steps_of_sgd([]),
    "a first step after a skipped one and a larger buffer": _first_steps_of_sgd(
        [{"do": "scale_state", "weight": 1, "factor": 2.0}]
    ),
    "a step after a skipped one that was loaded": _first_steps_of_sgd([{"do": "load"}]),
    "a step after a skipped one that was copied": _first_steps_of_sgd([{"do": "copy"}]),
}


def _steps_from_zero(row, seed, shape, of_group):
    """A step in operations of torch over bfloat16 that moves a weight from zero."""
    return {
        "seed": seed,
        "row": row,
        "options": {"fused": False},
        "groups": [
            {"options": of_group, "weights": [{"id": 1, "dtype": "bfloat16", "shape": shape}]}
        ],
        "steps": [
            {"n": 4, "changes": [], "grads": {}, "call": {}},
            {
                "n": 6,
                "changes": [{"do": "weight", "weight": 1, "factor": 0.0}],
                "grads": {},
                "call": {},
            },
        ],
    }


ONCE_REFUSED |= {
    "roundings of AdamW between 16 bits": _steps_from_zero(
        "muon", 777192, [16, 36], {"use_muon": False}
    ),
    "roundings of transformers' AdamW between 16 bits": _steps_from_zero(
        "galore", 20261780, [60, 50], {"lr": 0.1}
    ),
    "roundings of SGD between 16 bits": _steps_from_zero(
        "musgd", 1, [60, 50], {"use_muon": False, "momentum": 0.9, "nesterov": True, "lr": 0.1}
    ),
}


def _first_step_of_float16(row, seed, of_group):
    """A step in operations of torch, where a second moment is zero and so is float16's eps."""
    weights = [{"id": 2, "dtype": "float16", "shape": [430]}]
    return {
        "seed": seed,
        "row": row,
        "options": {"fused": False},
        "groups": [{"options": of_group, "weights": weights}],
        "steps": [{"n": 3, "changes": [], "grads": {}, "call": {}}],
    }


ONCE_REFUSED |= {
    "an eps of AdamW that float16 rounds to zero": _first_step_of_float16(
        "muon", 29002168, {"use_muon": False}
    ),
    "an eps of transformers' AdamW that float16 rounds to zero": _first_step_of_float16(
        "galore", 29002168, {"eps": 1e-8}
    ),
    "codes of NorMuon's moments, which are not negative": {
        "seed": 119002492,
        "row": "muon",
        "options": {"state_dtype": "int8"},
        "groups": [
            {
                "options": {"normuon": True},
                "weights": [{"id": 1, "dtype": "bfloat16", "shape": [15, 274, 1]}],
            }
        ],
        "steps": [{"n": 2, "changes": [], "grads": {}, "call": {}}],
    },
}


def _steps_of_galore_adafactor(seed, weight, steps, of_group=None, **options):
    return {
        "seed": seed,
        "row": "galore_adafactor",
        "options": options,
        "groups": [{"options": of_group or {}, "weights": [{"id": 1} | weight]}],
        "steps": [{"n": n, "changes": [], "call": {}} | step for n, step in steps.items()],
    }


_DECAY = {"do": "option", "group": 0, "name": "weight_decay", "value": 0.3}

ONCE_REFUSED |= {
    "relative steps that overflow": _steps_of_galore_adafactor(
        89001780,
        {"dtype": "bfloat16", "shape": [133], "values": "wide"},
        {n: {"grads": {}, "changes": [_DECAY] * (n == 2)} for n in range(2, 7)},
        max_relative_step=0.1,
    ),
    "relative steps that overflow beside copies": _steps_of_galore_adafactor(
        89001780,
        {"dtype": "bfloat16", "shape": [133], "values": "wide"},
        {n: {"grads": {}, "changes": [_DECAY] * (n == 2)} for n in range(2, 9)},
        max_relative_step=0.1,
        master_weights=True,
    ),
    "columns of roundings alone": _steps_of_galore_adafactor(
        300000228,
        {"id": 2, "dtype": "float16", "shape": [15, 4]},
        {4: {"grads": {"2": {"how": "new", "values": "holes", "strides": [1, 0]}}}},
        {"rank": 4},
    ),
    "roundings alone whose common product is zero": _steps_of_galore_adafactor(
        640000044,
        {"dtype": "float64", "shape": [15, 36]},
        {1: {"grads": {"1": {"how": "new", "strides": [0, 1]}}}},
        {"rank": 2, "proj_type": "full"},
    ),
    "rows of roundings alone": _steps_of_galore_adafactor(
        400000672,
        {"dtype": "bfloat16", "shape": [4, 9]},
        {
            2: {"grads": {"1": {"how": "new", "values": "equal", "strides": [0, 1]}}},
            6: {"grads": {}},
        },
        {"rank": 4},
        master_weights="split",
    ),
}


ONCE_REFUSED |= {
    "squares of a row that max_norm rounds to one side": {
        "seed": 500000180,
        "row": "came",
        "options": {},
        "groups": [
            {
                "options": {},
                "weights": [{"id": 2, "dtype": "bfloat16", "shape": [10, 35, 6]}],
            }
        ],
        "steps": [{"n": 4, "changes": [], "grads": {}, "call": {"max_norm": 1.0}}],
    },
}


@pytest.mark.parametrize("what", ONCE_REFUSED)
def test_results_that_are_right_are_taken(what):
    properties.check(ONCE_REFUSED[what] | {"settings": [[0, 1]]}, oracle.Tally())


def test_products_of_rounding_may_be_zero():
    """Vectors beyond the rank of a gradient have these; Adafactor makes them as large as others."""
    asked = SimpleNamespace(grad=torch.ones(8, 35, dtype=torch.float64), dtype=torch.bfloat16)
    basis = torch.zeros(8, 2, dtype=torch.float64)
    basis[:, 0], basis[0, 1], basis[1, 1] = 8**-0.5, 0.5**0.5 + 1e-8, -(0.5**0.5)
    low = projections._Low.of(asked, {projections.LEFT: basis})
    alone = low.value * torch.tensor([[1.0], [0.0]])
    assert 0 < (low.value - alone).abs().max() < 1e-7

    def update(low):
        found = low / low.square().mean(1, keepdim=True).clamp(min=1e-30).sqrt()
        return found / max(1.0, found.square().mean().sqrt() / 0.5)

    bound = projections._farthest(update(low.value), [update(each) for each in low.nearby(0)])
    assert ((update(alone) - update(low.value)).abs() <= bound).all()


# Planted errors


def small_case(row: str, dtype: str = "float32") -> run.Case:
    """Three steps of three weights, all strided, of which the second is looked at."""
    weights = [
        {"id": 1, "dtype": dtype, "shape": [7]},
        {"id": 2, "dtype": dtype, "shape": [30, 40], "strides": [100, 2], "offset": 1},
        {"id": 3, "dtype": dtype, "shape": [5, 6], "strides": [1, 5]},
    ]
    grads = {"1": {"how": "new"}, "2": {"how": "new"}, "3": {"how": "new"}}
    steps = [{"n": 1, "changes": [], "grads": grads, "call": {}}]
    steps += [{"n": n, "changes": [], "grads": {}, "call": {}} for n in (2, 3)]
    return {
        "seed": 5,
        "row": row,
        "options": {"fused": True},
        "groups": [{"options": {}, "weights": weights}],
        "steps": steps,
        "settings": [[0, 2], [2, 3]],
    }


class Planted(run.Run):
    """Spoils something in the last step of the setting that is compared with the oracle."""

    in_every_setting = True

    def take_step(self, call):
        p = self.params[2]
        before = p.detach().clone()
        returned = super().take_step(call)
        self.stepped = getattr(self, "stepped", 0) + 1
        if self.stepped == 3 and (self.in_every_setting or self.tally is None):
            with torch.no_grad():
                self.spoil(p, before)
        return returned


def off(tensor):
    """Changes the largest element by 2e-5 of it."""
    index = tuple(torch.unravel_index(tensor.abs().argmax(), tensor.shape))
    tensor[index] *= 1 + 2e-5


class OneElementOff(Planted):
    def spoil(self, p, before):
        off(p)


class OneStateOff(Planted):
    def spoil(self, p, before):
        off(self.optimizer.state[p][self.row.states[-1]])


class WrongSign(Planted):
    def spoil(self, p, before):
        p.copy_(2 * before - p)


class CountOff(Planted):
    def spoil(self, p, before):
        self.optimizer.state[p]["step"] += 1


class NoStep(Planted):
    def spoil(self, p, before):
        p.copy_(before)


class ByteOutside(Planted):
    def spoil(self, p, before):
        end = p.storage_offset() + 29 * 100 + 39 * 2 + 1
        p.as_strided((1,), (1,), end).fill_(0)


class CodeOff(Planted):
    def spoil(self, p, before):
        codes = self.optimizer.state[p][self.row.states[0]].view(torch.uint8)
        codes[(0,) * codes.dim()] ^= 1


@pytest.mark.parametrize("kind", choices.CODES)
def test_a_wrong_code_is_seen(kind):
    case = small_case("adam")
    case["options"]["state_dtype"] = kind
    case["groups"][0]["weights"][1] |= {"shape": [64, 80], "strides": [100, 1]}
    run.check(case, oracle.Tally())
    with pytest.raises(run.CaseError) as found:
        run.check(case, oracle.Tally(), CodeOff)
    assert found.value.kind == "value"


class BitsOfOneSetting(Planted):
    in_every_setting = False

    def spoil(self, p, before):
        p[3, 4] = torch.nextafter(p[3, 4], torch.tensor(9.0, dtype=p.dtype))


PLANTS = (
    (OneElementOff, "value"),
    (OneStateOff, "value"),
    (WrongSign, "value"),
    (CountOff, "value"),
    (NoStep, "value"),
    (ByteOutside, "outside"),
    (BitsOfOneSetting, "bits"),
)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("row", PLAIN, ids=str)
def test_what_is_planted_is_seen(row, dtype):
    case = small_case(row.name, dtype)
    run.check(case, oracle.Tally())
    absent = (OneStateOff,) if not row.states else ()
    absent += (CountOff,) if not row.counts else ()
    for plant, kind in PLANTS:
        if plant in absent:
            continue
        with pytest.raises(run.CaseError) as failure:
            run.check(case, oracle.Tally(), plant)
        assert (failure.value.kind, failure.value.n) == (kind, 3), plant


def test_a_wrong_gradient_is_seen():
    class Spoilt(Planted):
        def spoil(self, p, before):
            off(p.grad)

    for call in ({}, {"max_norm": 0.1}):
        case = small_case("adam")
        case["steps"][2]["call"] = call
        with pytest.raises(run.CaseError, match="step 3: weight 2: the gradient"):
            run.check(case, oracle.Tally(), Spoilt)


def test_a_change_without_a_gradient_is_seen():
    case = small_case("adam")
    case["steps"][2]["grads"] = {"2": {"how": "none"}}
    with pytest.raises(run.CaseError, match="step 3: weight 2: it or a state has changed"):
        run.check(case, oracle.Tally(), OneElementOff)


def test_an_error_of_the_library_is_seen():
    case = small_case("adam")
    case["options"]["lr"] = -1.0
    with pytest.raises(run.CaseError, match="Invalid learning rate") as failure:
        run.check(case, oracle.Tally())
    assert failure.value.kind == "ValueError"


def test_shrinking_leaves_what_fails():
    """The planted error needs one weight and three steps; all else goes."""

    def fails(case):
        try:
            run.check(case, oracle.Tally(), ThirdStep)
        except run.CaseError as failure:
            return failure.kind == "value"
        return False

    class ThirdStep(Planted):
        def take_step(self, call):
            return super().take_step(call) if 2 in self.params else run.Run.take_step(self, call)

        def spoil(self, p, before):
            p.sub_(1)

    case = small_case("adam")
    case["groups"].append(
        {"options": {"lr": 0.5}, "weights": [{"id": 9, "dtype": "float64", "shape": [3]}]}
    )
    case["options"] |= {"eps": 1e-3, "amsgrad": True}
    case["steps"][1]["changes"] = [{"do": "load"}, {"do": "count", "weight": 1, "value": 10}]
    case["steps"][2]["call"] = {"zero_grad": True}
    untouched = copy.deepcopy(case)
    small = shrink.shrink(case, fails)
    assert case == untouched
    assert small["options"] == {}
    assert small["groups"] == [
        {"options": {}, "weights": [{"id": 2, "dtype": "float32", "shape": []}]}
    ]
    assert [step["n"] for step in small["steps"]] == [1, 2, 3]
    assert all(not step["changes"] and not step["call"] for step in small["steps"])
    assert small["settings"] == [[0, 1]]


# Optimizers that step by rows or whole tensors


def composite_cases(row, count=6):
    seeds = range(0, 10**6, composites.SHARE)
    drawn = (case for case in map(composites.draw, seeds) if case["row"] == row)
    return [next(drawn) for _ in range(count)]


def test_cases_of_composites_have_everything_in_them():
    drawn = [composites.draw(seed) for seed in range(0, 300 * composites.SHARE, composites.SHARE)]
    assert all(json.loads(json.dumps(case)) == case for case in drawn)
    assert {case["row"] for case in drawn} == composites.ROWS.keys()
    steps = [step for case in drawn for step in case["steps"]]
    changes = {change["do"] for step in steps for change in step["changes"]}
    assert changes == {*composites.CHANGES, choices.ORDER}
    gradients = [gradient for step in steps for gradient in step["grads"].values()]
    assert {gradient.get("sparse") for gradient in gradients} == {None, *composites.SPARSE}
    called = {name for step in steps for name in step["call"]}
    assert called == {"max_norm", "zero_grad", "closure", "scale", "found_inf", "refused"}


@pytest.mark.parametrize("row", composites.ROWS)
def test_random_cases_of_composites_pass(row):
    for case in composite_cases(row):
        properties.check(case, oracle.Tally())


class PlantedInRows(Planted, properties.CompositeRun):
    """Spoils a step as `Planted` does. Copies, which step first, are left alone."""

    def take_step(self, call):
        if any(each is self.params[2] for g in self.optimizer.param_groups for each in g["params"]):
            return super().take_step(call)
        return properties.CompositeRun.take_step(self, call)


COMPOSITE_PLANTS = (
    (OneElementOff.spoil, "value"),
    (WrongSign.spoil, "value"),
    (CountOff.spoil, "value"),
    (ByteOutside.spoil, "outside"),
)


#: Options of a group whose matrices a class steps in a way of its own.
OWN_KINDS = {
    "muon": {"ns_dtype": "float32"},
    "musgd": {"use_muon": True, "ns_dtype": "float32"},
    "galore": {"rank": 4},
    "galore_adafactor": {"rank": 4, "max_relative_step": 0.1},
    "apollo": {"rank": 4},
}


def small_composite_case(row, **options):
    case = small_case(row)
    case["options"] = options
    (group,) = case["groups"]
    group["options"] = dict(OWN_KINDS.get(row, {}))
    group["weights"][0]["shape"] = [32, 32] if row in OWN_KINDS else [7]
    if not composites.ROWS[row].same_bits:
        case["settings"] = case["settings"][:1]
    return case


@pytest.mark.parametrize("row", composites.ROWS)
def test_what_is_planted_in_composites_is_seen(row):
    case = small_composite_case(row)
    properties.check(case, oracle.Tally())
    for spoil, kind in COMPOSITE_PLANTS:
        if spoil is CountOff.spoil and row in ("muon", "musgd", "sgd by rows"):
            continue  # they count nothing
        plant = type("Plant", (PlantedInRows,), {"spoil": spoil})
        with pytest.raises(run.CaseError) as failure:
            run.check(case, oracle.Tally(), plant)
        assert (failure.value.kind, failure.value.n) == (kind, 3), spoil


class WrongInCopies(properties.CompositeRun):
    """Spoils every step, of copies too: the formula alone can tell."""

    def take_step(self, call):
        params = [p for group in self.optimizer.param_groups for p in group["params"]]
        before = [p.detach().clone() for p in params]
        returned = super().take_step(call)
        with torch.no_grad():
            for p, old in zip(params, before, strict=True):
                self.spoil(p, old)
        return returned


WRONG_MOVES = {
    "wrong sign": lambda p, old: p.copy_(2 * old - p),
    "wrong scale": lambda p, old: p.copy_(old + 1.5 * (p - old)),
    "no decay": lambda p, old: p.add_(0.1 * 0.3 * old),
    "transposed": lambda p, old: p.copy_(old + (p - old).T) if p.shape == (32, 32) else None,
}


@pytest.mark.parametrize("what", WRONG_MOVES)
@pytest.mark.parametrize("products", [None, "bfloat16"])
@pytest.mark.parametrize("row", composites.ROWS)
def test_a_wrong_move_is_seen_by_the_formula(row, products, what):
    if what == "transposed" and row not in OWN_KINDS:
        pytest.skip("for what steps matrices")
    if products and "ns_dtype" not in OWN_KINDS.get(row, {}):
        pytest.skip("for what has a dtype of products")
    has_decay = "weight_decay" in composites.ROWS[row].options
    case = small_composite_case(row, **({"weight_decay": 0.3} if has_decay else {}))
    case["groups"][0]["options"]["lr"] = 0.1
    if products:
        case["groups"][0]["options"] |= {"ns_dtype": products}
    run.check(case, oracle.Tally(), properties.CompositeRun)
    plant = type("Plant", (WrongInCopies,), {"spoil": staticmethod(WRONG_MOVES[what])})
    with pytest.raises(run.CaseError) as failure:
        run.check(case, oracle.Tally(), plant)
    assert (failure.value.kind, failure.value.n) == ("value", 1)
    assert "weight" in str(failure.value)


class WithinErrors(properties.CompositeRun):
    """Compares steps of other gradients within the error with the bound that the formula gives."""

    looked_at: Counter

    def _compare(self, name, stepped, near, asked, p, what):
        super()._compare(name, stepped, near, asked, p, what)
        self.looked_at[name] += 1
        value, error, places = asked.grad, asked.error, torch.zeros_like(asked.grad)
        places.reshape(-1)[0] = 1
        larger = value.sign()
        for signs in (larger, -larger, larger * (2 * places - 1), larger * places):
            other = dataclasses.replace(asked, grad=value + signs * error, error=None)
            off = (self.row.formula(other).values[name] - stepped.values[name]).abs()
            assert (off <= stepped.errors[name] + 1e-12 * stepped.values[name].abs()).all(), name


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("row", [row for row in composites.ROWS if row not in OWN_KINDS])
def test_bounds_hold_what_the_error_of_a_gradient_makes(row, dtype, monkeypatch):
    monkeypatch.setattr(WithinErrors, "looked_at", found := Counter(), raising=False)
    case = small_case(row, dtype)
    case["settings"] = case["settings"][:1]
    (group,) = case["groups"]
    if composites.ROWS[row].fits({}, []):
        group["weights"].append({"id": 4, "dtype": dtype, "shape": []})
    for step in case["steps"]:
        step["call"] = {"max_norm": 0.1}
    run.check(case, oracle.Tally(), WithinErrors)
    assert found["weight"] == 3 * len(group["weights"])
    assert all(count >= 3 for count in found.values())


def _another_basis(basis):
    basis.copy_(basis.roll(1, 0 if len(basis) > basis.shape[1] else 1))


WRONG_BASES = {
    "another": (_another_basis, "of the gradient"),
    "not orthonormal": (lambda basis: basis.mul_(1.01), "is not orthonormal"),
}


@pytest.mark.parametrize("what", WRONG_BASES)
@pytest.mark.parametrize("row", ["galore", "galore_adafactor", "apollo"])
def test_a_wrong_basis_is_seen(row, what):
    spoil, text = WRONG_BASES[what]

    class WrongBasis(WrongInCopies):
        def spoil(self, p, old):
            for name, state in self.optimizer.state[p].items():
                if name.startswith("projector"):
                    spoil(state)

    case = small_composite_case(row)
    if row == "apollo":
        case["groups"][0]["options"]["proj"] = "svd"
    case["groups"][0]["options"]["update_proj_gap"] = 1
    run.check(case, oracle.Tally(), properties.CompositeRun)
    with pytest.raises(run.CaseError, match=text):
        run.check(case, oracle.Tally(), WrongBasis)


@pytest.mark.parametrize("row", ["galore", "galore_adafactor"])
def test_a_basis_that_changes_between_its_steps_is_seen(row):
    class Moved(WrongInCopies):
        def spoil(self, p, old):
            for name, state in self.optimizer.state[p].items():
                if name.startswith("projector") and self.optimizer.state[p]["step"] > 1:
                    state.neg_()

    with pytest.raises(run.CaseError, match="has changed, but is not due"):
        run.check(small_composite_case(row), oracle.Tally(), Moved)


# Its instruments


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
@pytest.mark.parametrize("layout", WEIGHT_LAYOUTS[:14], ids=str)
def test_areas_see_a_byte_beside_them(layout, dtype):
    area = Area(dtype, layout.shape, layout.strides, layout.offset)
    area.write("usual", 1)
    assert area.view.abs().max() <= 1
    assert area.touched_outside() == 0
    area.view.as_strided((1,), (1,), area.view.storage_offset() - 1).fill_(0)
    assert area.touched_outside() == 1


def test_bounds_hold_what_float32_gives():
    """Formulas in float32, in other orders than in the oracle, are within its bounds."""
    generator = torch.Generator().manual_seed(1)
    a, b = (torch.randn(10_000, generator=generator) for _ in range(2))
    arithmetic = Arithmetic.of(torch.float32)
    x, y = (Bounded(each.double(), 0.0, arithmetic) for each in (a, b))
    pairs = (
        (0.9 * x + 0.1 * y, a + 0.1 * (b - a)),
        (x / (y**2).sqrt(), a / b.abs()),
        (0.3 * (x * y) / 7.0, a * (0.3 / 7.0) * b),
        (1 - x, -(a - 1)),
        (torch.maximum(x, y) + 1e-3, torch.maximum(a, b) + 1e-3),
    )
    for expected, actual in pairs[1:]:
        verdict = judge(actual, expected)
        assert not verdict.wrong.any()
        assert judge(actual * (1 + 1e-4), expected).wrong.float().mean() > 0.5
    averages, actual = pairs[0]
    state = Bounded(a.double(), 0.0, arithmetic, is_state=True)
    assert not judge(actual, 0.9 * state + 0.1 * y).wrong.any()
    assert judge(actual * (1 + 1e-5), averages).wrong.float().mean() > 0.5


def test_the_command_passes_and_prints_a_case(subprocess_environment, tmp_path, monkeypatch):
    command = [sys.executable, "-m", "fuzz"]
    run_it = {"env": subprocess_environment, "capture_output": True, "text": True, "cwd": tmp_path}
    passed = subprocess.run([*command, "--seed", "3", "--cases", "2"], **run_it)
    assert passed.returncode == 0, passed.stderr
    assert "fuzz: 2 cases" in passed.stdout
    assert passed.stdout.endswith("2 cases passed\n")
    # In this process: to start one takes as long as a hundred cases.
    monkeypatch.setattr(sys, "argv", ["fuzz", "--case", json.dumps(small_case("adam"))])
    assert fuzz_main() == 0
    wrong = small_case("adam")
    wrong["options"]["eps"] = -1.0
    failed = subprocess.run([*command, "--case", json.dumps(wrong)], **run_it)
    assert failed.returncode == 1
    assert "ValueError: step 0: Traceback" in failed.stderr
