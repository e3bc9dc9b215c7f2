"""`optim.groups`: what each weight of a module is for, and the options that classes want for it."""

import copy

import pytest
import torch
from torch import nn

import fusedstep
from fusedstep import optim
from fusedstep._models.roles import HIDDEN, ROLES, UNDECAYED, roles_of


class Attention(nn.Module):
    def __init__(self, rows):
        super().__init__()
        self.qkv = nn.Linear(16, rows)
        self.proj = nn.Linear(16, 16, bias=False)


class Conv1D(nn.Module):
    """As that of transformers: [in, out]."""

    def __init__(self, outputs, inputs):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(inputs, outputs))


class Old(nn.Module):
    def __init__(self):
        super().__init__()
        self.c_attn = Conv1D(48, 16)
        self.c_proj = Conv1D(16, 16)


class Gated(nn.Module):
    def __init__(self, is_gated=True):
        super().__init__()
        self.fc1 = nn.Linear(16, 64, bias=False)
        self.fc2 = nn.Linear(32 if is_gated else 64, 16, bias=False)


class Mixture(nn.Module):
    def __init__(self, is_stack):
        super().__init__()
        self.gate = nn.Linear(16, 4, bias=False)
        if is_stack:
            self.experts = nn.Module()
            self.experts.gate_up_proj = nn.Parameter(torch.ones(4, 24, 16))
            self.experts.down_proj = nn.Parameter(torch.ones(4, 16, 12))
        else:
            self.experts = nn.ModuleList(nn.Linear(16, 16, bias=False) for _ in range(2))


class Columns(nn.Module):
    """Experts that are [E, in, out], with biases and numbers of two dimensions."""

    def __init__(self):
        super().__init__()
        self.experts = nn.Module()
        self.experts.gate_up_proj = nn.Parameter(torch.ones(4, 16, 24))
        self.experts.gate_up_proj_bias = nn.Parameter(torch.ones(4, 24))
        self.experts.down_proj = nn.Parameter(torch.ones(4, 12, 16))
        self.A_log = nn.Parameter(torch.ones(6, 4))
        self.alpha = nn.Parameter(torch.ones(1, 1, 16))


class Alike(nn.Module):
    """A name that begins like q, k and v, in sizes that are thrice others by chance."""

    def __init__(self):
        super().__init__()
        self.in_proj_qkvz = nn.Linear(16, 48, bias=False)
        self.out_proj = nn.Linear(16, 16, bias=False)


class Capitals(nn.Module):
    def __init__(self):
        super().__init__()
        self.Wi = nn.Linear(16, 64, bias=False)
        self.Wo = nn.Linear(32, 16, bias=False)


class Normed(nn.Module):
    """Weights that a norm has taken apart, in both ways of torch."""

    def __init__(self):
        super().__init__()
        new, old = nn.utils.parametrizations.weight_norm, nn.utils.weight_norm
        self.conv = new(nn.Conv1d(16, 16, 3, groups=2, bias=False))
        self.linear = old(nn.Linear(16, 16, bias=False))


class Model(nn.Module):
    """Two blocks, so that what is in them is no last layer."""

    def __init__(self, block, **others):
        super().__init__()
        self.tokens = nn.Embedding(20, 16)
        self.blocks = nn.ModuleList([block, copy.deepcopy(block)])
        for name, module in others.items():
            self.register_module(name, module)


class Words(nn.Embedding):
    """A class whose name does not say that it is an embedding."""


class Layer(nn.Linear):
    """Nor this one that it is linear."""


class Tied(Model):
    def __init__(self):
        super().__init__(Gated(), lm_head=nn.Linear(16, 20, bias=False))
        self.lm_head.weight = self.tokens.weight


class Own(nn.Module):
    """Parameters in a module that nobody knows."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.pos_embed = nn.Parameter(torch.ones(1, 9, 16))
        self.heads = nn.Parameter(torch.ones(2, 4, 4))
        self.mix = nn.Parameter(torch.ones(6, 4))
        self.scale = nn.Parameter(torch.ones(4))
        self.norm = nn.LayerNorm([3, 4])


class Said(nn.Module):
    """A model that says which weights are its last layer, and which decay."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def get_classifier(self):
        return self.a

    def no_weight_decay(self):
        return {"b.weight"}


def convolutions():
    return nn.Sequential(
        nn.Conv2d(3, 8, 3),
        nn.BatchNorm2d(8),
        nn.Conv2d(8, 8, 3, groups=8),
        nn.Conv2d(8, 8, 3, groups=2),
        nn.Conv2d(8, 8, 1, bias=False),
        nn.Conv1d(8, 16, 3, bias=False),
        nn.Flatten(),
        nn.Linear(16, 4),
    )


#: Roles by name, and what Muon's groups have of them: those that differ from a matrix or AdamW.
EXPECTED = {
    "equal parts": (
        lambda: Model(Attention(48), head=nn.Linear(16, 20)),
        {
            "tokens.weight": "embedding",
            "blocks.0.qkv.weight": "fused qkv",
            "blocks.0.qkv.bias": "bias",
            "blocks.0.proj.weight": "matrix",
            "head.weight": "head",
        },
        {"blocks.0.qkv.weight": {"split_heads": 3}},
        "blocks.0.qkv.weight, blocks.1.qkv.weight: guessed by the 16 inputs of proj: q, k and v",
    ),
    "unequal parts": (
        lambda: Model(Attention(32)),
        {"blocks.1.qkv.weight": "fused qkv"},
        {},
        "guessed by the 16 inputs of proj: q, k, v of 16, 8 and 8 rows are one matrix, "
        "and three with split_sizes=(16, 8, 8)",
    ),
    "attention of torch": (
        lambda: Model(nn.MultiheadAttention(16, 2)),
        {"blocks.0.in_proj_weight": "fused qkv", "blocks.0.out_proj.weight": "matrix"},
        {"blocks.0.in_proj_weight": {"split_heads": 3}},
        "",
    ),
    "columns": (
        lambda: Model(Old()),
        {"blocks.0.c_attn.weight": "fused qkv", "blocks.0.c_proj.weight": "matrix"},
        {},
        "q, k and v lie along columns, and are one matrix",
    ),
    "gates": (
        lambda: Model(Gated()),
        {"blocks.0.fc1.weight": "fused gate", "blocks.0.fc2.weight": "matrix"},
        {"blocks.0.fc1.weight": {"split_heads": 2}},
        "gate and value are equal blocks of rows",
    ),
    "no gates": (lambda: Model(Gated(False)), {"blocks.0.fc1.weight": "matrix"}, {}, ""),
    "a tied head": (
        Tied,
        {"tokens.weight": "tied embedding"},
        {"blocks.0.fc1.weight": {"split_heads": 2}},
        "gate and value are equal blocks of rows",
    ),
    "experts": (
        lambda: Model(Mixture(False)),
        {"blocks.0.gate.weight": "router", "blocks.0.experts.1.weight": "experts"},
        {},
        "",
    ),
    "a stack of experts": (
        lambda: Model(Mixture(True)),
        {
            "blocks.0.gate.weight": "router",
            "blocks.0.experts.gate_up_proj": "experts",
            "blocks.0.experts.down_proj": "experts",
        },
        {"blocks.0.experts.gate_up_proj": {"split_heads": 2}},
        "guessed by the 12 inputs of down_proj",
    ),
    "a stack of experts in columns": (
        lambda: Model(Columns()),
        {
            "blocks.0.experts.gate_up_proj": "experts",
            "blocks.0.experts.gate_up_proj_bias": "bias",
            "blocks.0.experts.down_proj": "experts",
            "blocks.0.A_log": "vector",
            "blocks.0.alpha": "vector",
        },
        {},
        "guessed by the 12 inputs of down_proj: gate and value lie along columns, and are one m",
    ),
    "more than q, k and v": (
        lambda: Model(Alike()),
        {"blocks.0.in_proj_qkvz.weight": "fused qkv"},
        {},
        "guessed by its name: one matrix, since nothing tells whose rows are whose",
    ),
    "names in capitals": (
        lambda: Model(Capitals()),
        {"blocks.0.Wi.weight": "fused gate", "blocks.0.Wo.weight": "matrix"},
        {"blocks.0.Wi.weight": {"split_heads": 2}},
        "guessed by the 32 inputs of Wo",
    ),
    "weights that norms have taken apart": (
        lambda: nn.Sequential(
            nn.Conv1d(3, 16, 3, bias=False), Normed(), nn.utils.weight_norm(nn.Linear(16, 4))
        ),
        {
            "1.conv.parametrizations.weight.original0": "vector",
            "1.conv.parametrizations.weight.original1": "convolution",
            "1.linear.weight_g": "vector",
            "1.linear.weight_v": "matrix",
            "2.weight_g": "vector",
            "2.weight_v": "head",
        },
        {"1.conv.parametrizations.weight.original1": {"split_heads": 2, "stacked": False}},
        "2.weight_v: guessed: the last linear layer",
    ),
    "a list of one block": (
        lambda: nn.ModuleList([Gated(False)]),
        {"0.fc1.weight": "matrix", "0.fc2.weight": "matrix"},
        {},
        "",
    ),
    "convolutions": (
        convolutions,
        {
            "0.weight": "first convolution",
            "1.weight": "norm",
            "1.bias": "norm",
            "2.weight": "depthwise convolution",
            "3.weight": "convolution",
            "4.weight": "convolution",
            "5.weight": "convolution",
            "7.weight": "head",
            "7.bias": "bias",
        },
        {"3.weight": {"split_heads": 2}, "5.weight": {"stacked": False}},
        "guessed: the last linear layer outside of repeated blocks",
    ),
    "parameters of a module": (
        lambda: Model(Own()),
        {
            "blocks.0.pos_embed": "position",
            "blocks.0.heads": "stack",
            "blocks.0.mix": "matrix",
            "blocks.0.scale": "vector",
            "blocks.0.norm.weight": "norm",
        },
        {},
        "guessed: a parameter of Own",
    ),
    "recurrent": (
        lambda: Model(nn.LSTM(8, 8), head=nn.Linear(8, 4)),
        {"blocks.0.weight_ih_l0": "recurrent", "blocks.0.bias_hh_l0": "bias"},
        {"blocks.0.weight_ih_l0": {"split_heads": 4}, "blocks.0.weight_hh_l0": {"split_heads": 4}},
        "",
    ),
    "other names of classes": (
        lambda: nn.Sequential(Words(9, 8), Layer(8, 8), Layer(8, 4)),
        {"0.weight": "embedding", "1.weight": "matrix", "2.weight": "head"},
        {},
        "2.weight: guessed: the last linear layer",
    ),
    "a model that says it": (Said, {"a.weight": "head", "b.weight": "matrix"}, {}, ""),
}


def options_by_name(groups):
    return {
        name: {key: value for key, value in group.items() if key != "params"}
        for group in groups
        for name, _ in group["params"]
    }


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
@pytest.mark.parametrize("case", EXPECTED)
def test_roles(case):
    make, expected, of_muon, note = EXPECTED[case]
    model = make()
    roles = {each.name: each.role for each in roles_of(model)}
    assert {name: roles[name] for name in expected} == expected
    assert list(roles) == [name for name, _ in model.named_parameters()]
    groups = optim.groups(model, for_="muon")
    options = options_by_name(groups)
    assert options.keys() == roles.keys()
    for name, role in roles.items():
        twin = of_muon.get(name.replace("blocks.1", "blocks.0"), {})
        if role not in HIDDEN:
            twin = {"use_muon": False, "lr": 3e-4}
        if role in UNDECAYED or (case, name) == ("a model that says it", "b.weight"):
            twin = twin | {"weight_decay": 0.0}
        assert options[name] == twin, name
    assert note in str(groups)
    assert ("guessed" in str(groups)) == bool(note)
    optimizer = optim.Muon(groups, lr=0.02)
    for weight in model.parameters():
        weight.grad = torch.ones_like(weight)
    optimizer.step()


def test_every_role_is_in_the_docstring_and_of_some_model():
    doc = " ".join(optim.groups.__doc__.split())
    assert [role for role in ROLES if f"``{role}``" not in doc] == []
    found = {role for make, roles, _, _ in EXPECTED.values() for role in roles.values()}
    assert ROLES.keys() - found == {"fused kv", "LoRA"}


def test_muon_takes_a_convolution_in_one_dimension_for_one_matrix():
    """As without the groups, whose stack of 16 matrices would be another step."""
    model = nn.Sequential(nn.Conv1d(2, 8, 3), nn.Conv1d(8, 16, 3, bias=False))
    start = model[1].weight.detach().clone()
    optimizer = optim.create("muon", model, lr=0.1, weight_decay=0, ns_dtype=torch.float32)
    model[1].weight.grad = torch.randn_like(start)
    flat = nn.Parameter(start.flatten(1).clone())
    flat.grad = model[1].weight.grad.flatten(1)
    expected = optim.Muon([flat], lr=0.1, weight_decay=0, ns_dtype=torch.float32)
    optimizer.step()
    expected.step()
    torch.testing.assert_close(model[1].weight.flatten(1), flat)


def test_ranks():
    model = Model(Attention(48), head=nn.Linear(16, 20))
    options = options_by_name(optim.groups(model, for_="galoreadamw"))
    assert options["blocks.0.qkv.weight"] == {"rank": 4}
    assert options["head.weight"] == options["tokens.weight"] == {"rank": None}
    assert options["blocks.0.qkv.bias"] == {"rank": None, "weight_decay": 0.0}
    with pytest.warns(UserWarning, match="rank=17 is larger than the shorter side of every"):
        groups = optim.groups(model, for_="apolloadamw", rank=17)
    assert "a side is shorter than the rank of 17" in str(groups)
    assert {group["rank"] for group in groups} == {None}
    for name in ("galoreadamw", "galoreadafactor", "apolloadamw", "galoreadamw8bit"):
        ranks = [group["rank"] for group in optim.create(name, model, rank=8).param_groups]
        assert sorted(map(str, set(ranks))) == ["8", "None"]


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("adamw8bit", {}),
        ("lion8bit", {}),
        ("galoreadamw8bit", {}),
        ("adamw4bit", {}),
        ("adamw", {"state_dtype": "int8"}),
        ("muon", {"state_dtype": "fp8"}),
    ],
)
def test_embeddings_beside_states_in_codes(name, options):
    for model in (Model(Gated()), Tied()):
        options_of = options_by_name(optim.groups(model, for_=name, **options))
        wide = [each for each, of in options_of.items() if of.get("state_dtype") is torch.float32]
        assert wide == ["tokens.weight"]
        created = optim.create(name, model, **options)
        wide = [g for g in created.param_groups if g.get("state_dtype") is torch.float32]
        assert [group["param_names"] for group in wide] == [["tokens.weight"]]


@pytest.mark.parametrize("name", ["adamw", "adamw8bit"])
def test_states_are_wide_where_they_are_asked_to_be(name):
    model = Model(Gated())
    created = optim.create(name, model, state_dtype=torch.float32)
    assert len(created.param_groups) == 1


def test_parts_of_musgd():
    options = options_by_name(optim.groups(convolutions(), for_="MuSGD"))
    assert {name for name, of in options.items() if of.get("use_muon")} == {
        f"{index}.weight" for index in (0, 2, 3, 4, 5, 7)
    }
    assert options["1.bias"] == {"weight_decay": 0.0}
    options = options_by_name(optim.groups(Model(Mixture(True)), for_="musgd"))
    assert {name for name, of in options.items() if of.get("use_muon")} == {
        "blocks.0.gate.weight",
        "blocks.1.gate.weight",
    }


def test_decay():
    model = Model(Own(), head=nn.Linear(16, 20))
    for made in (optim.groups(model, for_="adamw"), optim.groups(model, for_="lamb")):
        roles = {each.name: each.role for each in roles_of(model)}
        undecayed = [name for name, of in options_by_name(made).items() if "weight_decay" in of]
        assert sorted(undecayed) == sorted(n for n, role in roles.items() if role in UNDECAYED)
    created = optim.create("adamw", model, weight_decay=0.3, no_decay="auto")
    assert [group["weight_decay"] for group in created.param_groups] == [0.3, 0.0]
    assert len(optim.groups(model, for_="rprop")) == 1
    assert len(optim.groups(model, for_="adamw", no_decay=())) == 1


def test_others():
    model = Model(Gated())
    beside = {"lr": 1e-4, "betas": (0.9, 0.95)}
    created = optim.create("muon", model, lr=0.02, weight_decay=0.3, others=beside)
    found = [(g.get("use_muon", True), g["lr"], g["weight_decay"]) for g in created.param_groups]
    assert found == [(True, 0.02, 0.3)] * 2 + [(False, 1e-4, 0.3)]
    assert created.param_groups[2]["betas"] == (0.9, 0.95)
    created = optim.create("muon", model, lr=2e-4, adjust_lr_fn="match_rms_adamw")
    assert {group["lr"] for group in created.param_groups} == {2e-4}
    with pytest.raises(TypeError, match=r"others=\{'lr': 1\}: AdamW steps all groups in one way"):
        optim.create("adamw", model, others={"lr": 1})


def test_rules():
    model = convolutions()
    rules = {
        nn.BatchNorm2d: {"weight_decay": 0.2},
        "[34].weight": {"split_heads": 1},
        "0.*": "convolution",
        "7.weight": "matrix",
        "5.weight": {"use_muon": False, "mine": 3},
    }
    options = options_by_name(optim.groups(model, for_="muon", rules=rules))
    assert options["1.weight"] == {"use_muon": False, "lr": 3e-4, "weight_decay": 0.2}
    assert options["3.weight"] == options["4.weight"] == {"split_heads": 1}
    assert options["0.weight"] == options["7.weight"] == {}
    assert options["5.weight"] == {"stacked": False, "use_muon": False, "mine": 3}
    options = options_by_name(optim.groups(model, for_="muon", rules={"7.weight": "fused kv"}))
    assert options["7.weight"] == {"split_heads": 2}
    tied = optim.create("muon", Tied(), rules={"lm_head.weight": "matrix"})
    assert all(group.get("use_muon", True) for group in tied.param_groups)


ERRORS = [
    (TypeError, r"model must be a torch\.nn\.Module, not \[\]", {"model": []}),
    (ValueError, r"did you mean 'muon'", {"for_": "moun"}),
    (TypeError, r"'rnak' decides .* GaLoreAdamW: did you mean 'rank'", {"rnak": 3}),
    (TypeError, r"'lr' decides about no groups of GaLoreAdamW: options are \['rank'", {"lr": 3}),
    (ValueError, r"'weigth_decay' of a group.* 'weight_decay'", {"others": {"weigth_decay": 0}}),
    (ValueError, r"'rnak' of a group .* mean 'rank'", {"rules": {"*.bias": {"rnak": 0}}}),
    (ValueError, r"no weight matches '7\.wieght': .*'7\.weight'", {"rules": {"7.wieght": {}}}),
    (ValueError, r"no weight matches <class .*Conv3d'>: .*'Conv2d'", {"rules": {nn.Conv3d: {}}}),
    (ValueError, r"'matrx' is no role: did you mean 'matrix'", {"rules": {"*": "matrx"}}),
    (ValueError, r"3 is no role: roles are matrix, ", {"rules": {"*": 3}}),
    (TypeError, r"3 is no pattern, and no class of modules", {"rules": {3: "matrix"}}),
    (ValueError, r"no weight matches 'biass': did you mean 'bias'", {"no_decay": ("biass",)}),
    (TypeError, r"no_decay must be 'auto' or a sequence", {"no_decay": "bias"}),
    (ValueError, r"Rprop has no weight_decay", {"for_": "rprop", "no_decay": ("bias",)}),
]


@pytest.mark.parametrize(("error", "text", "given"), ERRORS, ids=[row[1] for row in ERRORS])
def test_errors(error, text, given):
    given = {"model": convolutions(), "for_": "galoreadamw"} | given
    with pytest.raises(error, match=text):
        optim.groups(given.pop("model"), **given)


def of_fsdp1():
    cls = type("FullyShardedDataParallel", (nn.Module,), {})
    model = cls()
    model.inner = nn.Linear(4, 4)
    return model


def of_zero3():
    model = nn.Linear(4, 4)
    model.weight.ds_shape = torch.Size([4, 4])
    return model


@pytest.mark.parametrize(("make", "text"), [(of_fsdp1, "FSDP2"), (of_zero3, "before deepspeed")])
def test_weights_that_have_lost_their_shapes(make, text):
    for name, options in (("muon", {}), ("adamw", {"no_decay": "auto"}), ("galoreadamw", {})):
        with pytest.raises(ValueError, match=rf"roles of weights .*{text}"):
            optim.create(name, make(), **options)
    groups = optim.create("adamw", make(), no_decay=("bias",)).param_groups
    assert [group["weight_decay"] for group in groups] == [0.01, 0.0]


TABLE = """\
Groups for Muon
group  role        weights  elements  options                                      names
0      fused gate        2     2,048  split_heads=2                                \
blocks.0.fc1.weight, blocks.1.fc1.weight
1      matrix            2     1,024  –                                            \
blocks.0.fc2.weight, blocks.1.fc2.weight
2      embedding         1       320  use_muon=False, lr=0.0003                    tokens.weight
2      head              1       320  use_muon=False, lr=0.0003                    head.weight
3      bias              1        20  use_muon=False, lr=0.0003, weight_decay=0.0  head.bias
  blocks.0.fc1.weight, blocks.1.fc1.weight: guessed by the 32 inputs of fc2: gate and value are \
equal blocks of rows"""


def test_the_table():
    model = Model(Gated(), head=nn.Linear(16, 20))
    groups = optim.groups(model, for_="muon")
    assert str(groups) == repr(groups) == TABLE
    optimizer = optim.Muon(groups)  # torch writes its defaults in groups of Muon's part
    assert str(groups) == TABLE
    assert str(copy.deepcopy(groups)) == TABLE
    model.requires_grad_(False)
    assert "tokens.weight" in (line := str(groups).splitlines()[4])
    assert line.startswith("2      embedding, frozen ")
    assert optimizer.param_groups[1]["param_names"] == [
        "blocks.0.fc2.weight",
        "blocks.1.fc2.weight",
    ]


@pytest.mark.parametrize("name", ["muon", "musgd", "galoreadamw", "apolloadamw", "adamw8bit"])
def test_dictionaries_of_groups(name):
    """They are loaded by an optimizer that was made likewise, and training goes on alike."""

    def made():
        torch.manual_seed(0)
        model = Model(Attention(48), head=nn.Linear(16, 20))
        return model, optim.create(name, model)

    def step(model, optimizer, seed):
        generator = torch.Generator().manual_seed(seed)
        for weight in model.parameters():
            weight.grad = torch.randn(weight.shape, generator=generator)
        optimizer.step()

    model, optimizer = made()
    step(model, optimizer, 1)
    later, other = made()
    later.load_state_dict(model.state_dict())
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    imported, third = made()
    imported.load_state_dict(model.state_dict())
    fusedstep.import_state_dict(third, copy.deepcopy(optimizer.state_dict()))
    for each in ((model, optimizer), (later, other), (imported, third)):
        step(*each, 2)
    for mine, its, imports in zip(*(m.parameters() for m in (model, later, imported)), strict=True):
        assert torch.equal(mine, its)
        assert torch.equal(mine, imports)


@pytest.mark.parametrize("name", ["galoreadamw", "galoreadafactor", "apolloadamw"])
def test_a_rank_that_no_weight_can_have_is_warned_of(name):
    model = Model(Attention(48), head=nn.Linear(16, 20))
    with pytest.warns(UserWarning, match="rank=1000 is larger than the shorter side of every mat"):
        optimizer = optim.create(name, model, rank=1000)
    assert {group["rank"] for group in optimizer.param_groups} == {None}


def test_a_pattern_of_a_part_of_names_is_an_error_that_has_the_pattern_to_write():
    with pytest.raises(
        ValueError, match=r"matches 'qkv': patterns are of whole names, as '\*qkv\*'"
    ):
        optim.groups(Model(Attention(48)), for_="muon", rules={"qkv": "matrix"})
