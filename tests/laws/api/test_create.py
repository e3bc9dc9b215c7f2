"""`optim.create` and `optim.names`: classes by name, groups with and without weight decay."""

import copy
import re

import pytest
import torch
from torch import nn

from fusedstep import optim
from fusedstep._models.presets import PRESETS


class Model(nn.Module):
    """A norm in a sequence, whose name does not say so, and one that is named."""

    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(5, 4)
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4, bias=False))
        self.q_norm1 = nn.Bilinear(4, 4, 2, bias=False)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.tokens.weight


NO_NORM_NO_BIAS = ["layers.0.bias", "layers.1.bias", "layers.1.weight", "q_norm1.weight"]
OTHERS = ["layers.0.weight", "layers.2.weight", "tokens.weight"]


def members(group):
    return sorted(group["param_names"])


def test_every_class_has_a_name():
    assert list(optim.names()) == sorted(optim.names())
    for name in optim.names():
        created = optim.create(name, [nn.Parameter(torch.ones(4, 4))])
        assert type(created).__name__.lower() == name
    assert {each.lower() for each in optim.__all__} <= set(optim.names())
    assert {"adamw8bit", "adam4bit", "adamwfp8"} <= set(optim.names())
    assert "fusedoptimizer" not in optim.names()


@pytest.mark.parametrize(
    ("name", "cls"),
    [
        ("lamb", optim.Lamb),
        ("LAMB", optim.Lamb),
        ("AdamW", optim.AdamW),
        ("adam_w", optim.AdamW),
        ("adamw_8bit", optim.AdamW8bit),
        ("AdamW-8bit", optim.AdamW8bit),
        ("adamw_fp8", optim.AdamWFp8),
        ("RMSprop", optim.RMSprop),
    ],
)
def test_case_and_dashes_do_not_matter(name, cls):
    assert type(optim.create(name, Model())) is cls


def test_options_are_those_of_the_class():
    model = Model()
    created = optim.create("adamw", model, lr=0.5, betas=(0.8, 0.7), eps=1e-4, weight_decay=0.3)
    expected = optim.AdamW(model.parameters(), lr=0.5, betas=(0.8, 0.7), eps=1e-4, weight_decay=0.3)
    assert created.defaults == expected.defaults
    (group,) = created.param_groups
    assert members(group) == sorted(name for name, _ in model.named_parameters())
    assert {id(p) for p in group["params"]} == {id(p) for p in model.parameters()}


def test_groups_with_and_without_decay():
    created = optim.create("lamb", Model(), weight_decay=0.1, no_decay=("bias", "norm"))
    with_decay, without = created.param_groups
    assert members(with_decay) == OTHERS
    assert members(without) == NO_NORM_NO_BIAS
    assert (with_decay["weight_decay"], without["weight_decay"]) == (0.1, 0.0)


def test_only_the_group_with_decay_decays():
    """AdamW with gradients of zero: a weight is multiplied by 1 - lr * weight_decay."""
    model = Model()
    before = copy.deepcopy(model.state_dict())
    optimizer = optim.create("adamw", model, lr=0.5, weight_decay=0.25, no_decay=("BIAS", "Norm"))
    for weight in model.parameters():
        weight.grad = torch.zeros_like(weight)
    optimizer.step()
    for name, weight in model.named_parameters():
        factor = 1 - 0.5 * 0.25 if name in OTHERS else 1
        torch.testing.assert_close(weight.detach(), before[name] * factor)


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("layers.1", ["layers.1.bias", "layers.1.weight"]),
        ("0", ["layers.0.bias", "layers.0.weight"]),
        ("embedding", ["tokens.weight"]),
        ("s.0", ["layers.0.bias", "layers.0.weight"]),
    ],
)
def test_patterns(pattern, expected):
    groups = optim.create("sgd", Model(), weight_decay=0.1, no_decay=[pattern]).param_groups
    assert [members(group) for group in groups if group["weight_decay"] == 0] == [expected]
    assert sum(len(group["params"]) for group in groups) == len(OTHERS + NO_NORM_NO_BIAS)


def test_named_parameters_and_groups_are_split():
    model = Model()
    named = dict(model.named_parameters())
    (with_decay, without) = optim.create(
        "adamw", model.named_parameters(), no_decay=("bias", "norm")
    ).param_groups
    # Without the model nothing tells that layers.1 is a norm.
    assert members(without) == ["layers.0.bias", "layers.1.bias", "q_norm1.weight"]
    assert with_decay["weight_decay"] == 0.01
    groups = [
        {"params": [("tokens", named["tokens.weight"])], "lr": 0.5},
        {"params": list(model.layers.named_parameters()), "weight_decay": 0.3},
    ]
    created = optim.create("adamw", groups, lr=0.1, no_decay=("bias",)).param_groups
    told = [(members(g), g["lr"], g["weight_decay"]) for g in created]
    assert told == [
        (["tokens"], 0.5, 0.01),
        (["0.weight", "1.weight", "2.weight"], 0.1, 0.3),
        (["0.bias", "1.bias"], 0.1, 0.0),
    ]
    assert groups[1]["weight_decay"] == 0.3
    assert len(groups[1]["params"]) == 5


def test_frozen_weights_may_be_trained_later():
    model = Model()
    model.tokens.requires_grad_(False)
    (group,) = optim.create("adam", model).param_groups
    assert "tokens.weight" in group["param_names"]


def test_dictionaries_are_exchanged_with_torch():
    model = Model()
    for weight in model.parameters():
        weight.grad = torch.ones_like(weight)
    theirs = torch.optim.AdamW(model.parameters())
    theirs.step()
    created = optim.create("adamw", model)
    created.load_state_dict(theirs.state_dict())
    theirs.load_state_dict(created.state_dict())
    weight = model.layers[0].weight
    torch.testing.assert_close(created.state[weight]["exp_avg"], torch.full((4, 4), 0.1))
    torch.testing.assert_close(theirs.state[weight]["exp_avg"], torch.full((4, 4), 0.1))


@pytest.mark.parametrize(
    ("error", "match", "name", "given"),
    [
        (ValueError, r"named 'lam': did you mean 'lamb'\?", "lam", {}),
        (ValueError, r"'AdamW9bit': did you mean 'adamw8bit'", "AdamW9bit", {}),
        (ValueError, r"named 'xyz': names are \('adadelta', ", "xyz", {}),
        (TypeError, r"name must be a text, such as 'adamw', not <class", optim.Adam, {}),
        (
            TypeError,
            r"AdamW has no option 'weigth_decay': did you mean 'weight_decay'",
            "adamw",
            {"weigth_decay": 1},
        ),
        (TypeError, r"Lion has no option 'xyz'$", "lion", {"xyz": 1}),
        (TypeError, r"write eps=0.1 instead", "adamw", {"epsilon": 0.1}),
        (ValueError, r"Invalid learning rate: -1", "adamw", {"lr": -1.0}),
        (TypeError, r"no_decay must be .* a sequence .*not 'bias'", "adamw", {"no_decay": "bias"}),
        (TypeError, r"no_decay must be .* a sequence .*not \[1\]", "adamw", {"no_decay": [1]}),
        (ValueError, r"matches 'biass': did you mean 'bias'\?", "adamw", {"no_decay": ["biass"]}),
        (ValueError, r"no weight matches 'ers0'", "adamw", {"no_decay": ["bias", "ers0"]}),
        (ValueError, r"Rprop has no weight_decay", "rprop", {"no_decay": ["bias"]}),
    ],
)
def test_errors_name_what_is_wrong(error, match, name, given):
    with pytest.raises(error, match=match):
        optim.create(name, Model(), **given)


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("LAMB8bit", "write Lamb8bit"),
        ("Sgd", "write SGD"),
        ("AdamW32bit", "write AdamW with state_dtype=torch.float32"),
        ("PagedAdamW8bit", "write AdamW8bit, whose states are not paged: fusedstep.offload"),
        ("PagedLion32bit", "write Lion with state_dtype=torch.float32, whose states are not paged"),
    ],
)
def test_names_of_bitsandbytes_are_answered_with_ours(name, advice):
    with pytest.raises(AttributeError, match=f"no attribute '{name}': {re.escape(advice)}"):
        getattr(optim, name)
    if name.lower() not in optim.names():
        with pytest.raises(ValueError, match=f"named '{name}': {re.escape(advice)}"):
            optim.create(name, Model())


@pytest.mark.parametrize("name", ["PagedAdEMAMix8bit", "LARS", "Paged", "_adam", "__path_"])
def test_other_names_are_no_attributes(name):
    assert not hasattr(optim, name)
    with pytest.raises(AttributeError, match=f"no attribute '{name}'$"):
        getattr(optim, name)


@pytest.mark.parametrize("wrap", [list, lambda params: [{"params": params}]])
def test_patterns_need_names(wrap):
    with pytest.raises(ValueError, match=r"no_decay needs names: .*named_parameters"):
        optim.create("adamw", wrap(Model().parameters()), no_decay=("bias",))


@pytest.mark.parametrize("wrap", [list, lambda named: [{"params": named}]])
def test_a_pattern_that_no_name_matches(wrap):
    named = list(Model().named_parameters())
    with pytest.raises(ValueError, match=r"no weight matches 'biass': did you mean 'bias'"):
        optim.create("adamw", wrap(named), no_decay=("norm", "biass"))


@pytest.mark.parametrize(
    "given", [{"no_decay": "auto"}, {"others": {"lr": 1}}, {"rules": {"*": "matrix"}}]
)
def test_roles_need_a_model(given):
    with pytest.raises(TypeError, match=r"others, rules and no_decay='auto' need a model"):
        optim.create("muon", Model().named_parameters(), **given)


@pytest.mark.parametrize(
    ("name", "preset"), [(name, preset) for name, of in PRESETS.items() for preset in of]
)
def test_presets(name, preset):
    """Options of the class; given ones replace them, and groups do not decay norms and biases."""
    published = PRESETS[name][preset]
    created = optim.create(name, Model(), preset=preset)
    main = created.param_groups[0]
    assert published.options.items() <= (created.defaults | main).items()
    beside = [group for group in created.param_groups if group.get("use_muon") is False]
    assert all(published.others.items() <= group.items() for group in beside)
    undecayed = [n for g in created.param_groups if not g["weight_decay"] for n in members(g)]
    if published.options["weight_decay"]:
        assert undecayed == ["layers.0.bias", "layers.1.bias", "layers.1.weight"]
    changed = optim.create(name, Model(), preset=preset, lr=0.5, no_decay=())
    assert changed.param_groups[0]["lr"] == 0.5
    assert {g["weight_decay"] for g in changed.param_groups} == {published.options["weight_decay"]}


def test_every_preset_has_a_source_in_the_docstring():
    table = optim.create.__doc__.partition("``preset``      optimizer")[2].partition("Norm is")[0]
    rows = re.findall(r"^    ``([\w-]+)`` +(\w+) ", table, re.MULTILINE)
    assert sorted((cls.lower(), preset) for preset, cls in rows) == sorted(
        (name, preset) for name, of in PRESETS.items() for preset in of
    )
    sources = set(re.findall(r"`([^`]+)`_", table))
    assert sources == set(re.findall(r"\.\. _([^:]+):\n +https://", optim.create.__doc__))


def test_states_in_codes_have_the_presets_of_their_base():
    created = optim.create("adamw8bit", Model(), preset="gpt")
    assert created.defaults["betas"] == (0.9, 0.95)
    assert optim.create("galoreadamw8bit", Model(), preset="llama").defaults["lr"] == 0.01
    assert optim.create("adamw", list(Model().parameters()), preset="gpt").defaults["lr"] == 6e-4


@pytest.mark.parametrize(
    ("name", "preset", "text"),
    [
        ("adamw", "gtp", r"AdamW has no preset 'gtp': did you mean 'gpt'\?"),
        ("adamw", "bert-lamb", r"'bert-lamb': .*; lamb has bert-lamb;"),
        ("adamw", "xyz", r"presets of AdamW are gpt, llama, bert, finetune, vit"),
        ("lion", "gpt", r"Lion has no preset 'gpt': it has none \(adamw has gpt, llama"),
        ("adamw", 3, r"AdamW has no preset 3: presets of"),
    ],
)
def test_presets_that_there_are_not(name, preset, text):
    with pytest.raises(ValueError, match=text):
        optim.create(name, Model(), preset=preset)


def test_a_preset_with_options_of_two_parts_needs_a_model():
    with pytest.raises(TypeError, match=r"others.* need a model"):
        optim.create("muon", [nn.Parameter(torch.ones(4, 4))], preset="gpt")
