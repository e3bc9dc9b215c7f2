"""transformers: the optimizers that `TrainingArguments(optim=...)` selects once registered."""

import importlib
import sys

import pytest
import torch

from fusedstep import integrations, optim
from support import recipes
from support.foreign_codes import FOLDER, need_library
from support.pages import run_page
from support.small import assert_native, assert_same_losses, need
from support.small_trainer import arguments, gpt2, inner, llama, losses_of, texts, trainer

need("transformers")

#: The learning rate of arguments(), its betas and eps.
LR, BETAS, EPS = 5e-3, (0.9, 0.95), 1e-6

NAMES = {
    "adamw_torch": optim.AdamW,
    "adamw_torch_fused": optim.AdamW,
    "adamw_torch_8bit": optim.AdamW8bit,
    "adamw_torch_4bit": optim.AdamW4bit,
    "adamw_bnb_8bit": optim.AdamW8bit,
    "adamw_8bit": optim.AdamW8bit,
    "adagrad": optim.Adagrad,
    "lion_32bit": optim.Lion,
    "lion_8bit": optim.Lion8bit,
    "rmsprop": optim.RMSprop,
    "rmsprop_bnb": optim.RMSprop,
    "rmsprop_bnb_32bit": optim.RMSprop,
    "rmsprop_bnb_8bit": optim.RMSprop8bit,
    "sgd": optim.SGD,
}
OF_TORCH = ["adamw_torch", "adamw_torch_fused", "adagrad", "rmsprop", "sgd"]
"""Names under which transformers has classes of torch: losses are compared with theirs."""


@pytest.fixture
def transformers():
    integrations.transformers.register()
    yield importlib.import_module("transformers")
    integrations.transformers.unregister()


def class_of(transformers, folder, name, model=None, **options):
    args = arguments(transformers, folder, optim=name, **options)
    return transformers.Trainer.get_optimizer_cls_and_kwargs(args, model)


@pytest.mark.parametrize("name", NAMES)
def test_a_name_selects_ours(transformers, tmp_path, name):
    it = trainer(transformers, arguments(transformers, tmp_path, optim=name))
    it.train()
    optimizer = inner(it)
    assert type(optimizer) is NAMES[name]
    assert_native(optimizer)
    assert {group["initial_lr"] for group in optimizer.param_groups} == {LR}
    assert {group["weight_decay"] for group in optimizer.param_groups} == {0.1, 0.0}
    has_betas = "betas" in optimizer.defaults
    assert optimizer.defaults.get("betas") == (BETAS if has_betas else None)
    if has_betas and "eps" in optimizer.defaults:
        assert optimizer.defaults["eps"] == EPS


@pytest.mark.parametrize("name", OF_TORCH)
def test_losses_are_those_of_the_class_that_is_replaced(transformers, tmp_path, name):
    options = {"optim_args": "momentum=0.9, nesterov=True"} if name == "sgd" else {}
    args = arguments(transformers, tmp_path, optim=name, **options)
    it = trainer(transformers, args)
    it.train()
    integrations.transformers.unregister()
    theirs = trainer(transformers, args)
    theirs.train()
    assert type(inner(it)) is NAMES[name]
    assert type(inner(theirs)).__module__.startswith("torch.optim")
    assert_same_losses(losses_of(it), losses_of(theirs), 2e-5)


def test_adafactor_has_the_options_of_transformers(transformers, tmp_path):
    """No step size of its own, nor one in proportion to the weights: lr is Trainer's."""
    args = arguments(transformers, tmp_path, optim="adafactor")
    it = trainer(transformers, args)
    it.train()
    optimizer = inner(it)
    assert type(optimizer) is optim.Adafactor
    options = ("initial_lr", "scale_parameter", "relative_step")
    told = [tuple(group[option] for option in options) for group in optimizer.param_groups]
    assert told == [(LR, False, False)] * 2
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
    integrations.transformers.unregister()
    theirs = trainer(transformers, args)
    theirs.train()
    assert type(inner(theirs)) is transformers.Adafactor
    assert_same_losses(losses_of(it), losses_of(theirs), 2e-5)


@pytest.mark.parametrize("name", ["adamw_bnb_8bit", "lion_8bit"])
def test_embeddings_keep_wide_states_as_with_bitsandbytes(transformers, tmp_path, name):
    """The embeddings of tokens, which are the head's too, and of positions."""
    it = trainer(transformers, arguments(transformers, tmp_path, optim=name))
    groups = it.create_optimizer().param_groups
    told = [(group["state_dtype"], group["weight_decay"]) for group in groups]
    assert told == [("int8", 0.1), (torch.float32, 0.1), ("int8", 0.0)]
    wte, wpe = it.model.transformer.wte.weight, it.model.transformer.wpe.weight
    assert {id(weight) for weight in groups[1]["params"]} == {id(wte), id(wpe)}


def test_torchaos_names_make_no_exception_of_embeddings(transformers, tmp_path):
    it = trainer(transformers, arguments(transformers, tmp_path, optim="adamw_torch_8bit"))
    groups = it.create_optimizer().param_groups
    told = [(group["state_dtype"], group["weight_decay"]) for group in groups]
    assert told == [("int8", 0.1), ("int8", 0.0)]


def test_optim_args_are_options_of_the_class(transformers, tmp_path):
    text = "state_dtype=int8, max_grad_norm=0.5, amsgrad=yes, eps=1e-3, master_weights=False"
    cls, options = class_of(transformers, tmp_path, "adamw_torch", optim_args=text)
    assert cls is optim.AdamW
    assert options == {
        "lr": LR,
        "betas": BETAS,
        "eps": 1e-3,
        "state_dtype": "int8",
        "max_grad_norm": 0.5,
        "amsgrad": True,
        "master_weights": False,
    }


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("momentun=0.9", r"SGD has no option 'momentun': did you mean 'momentum'"),
        ("params=1", r"SGD has no option 'params'"),
        ("momentum", r"'name=value, name=value', not 'momentum'"),
        ("=1", r"'name=value, name=value', not '=1'"),
    ],
)
def test_wrong_optim_args_are_named(transformers, tmp_path, text, match):
    with pytest.raises(ValueError, match=match):
        class_of(transformers, tmp_path, "sgd", optim_args=text)


def test_names_without_a_class_here_stay(transformers, tmp_path, monkeypatch):
    monkeypatch.delattr(optim, "Adafactor", raising=False)
    cls, options = class_of(transformers, tmp_path, "adafactor")
    assert cls is transformers.Adafactor
    assert options == {"lr": LR, "scale_parameter": False, "relative_step": False}


def test_registering_twice_and_back(tmp_path):
    transformers = importlib.import_module("transformers")
    theirs = vars(transformers.Trainer)["get_optimizer_cls_and_kwargs"].__func__
    for _ in range(2):
        integrations.transformers.register()
    assert class_of(transformers, tmp_path, "adamw_torch")[0] is optim.AdamW
    for _ in range(2):
        integrations.transformers.unregister()
    assert vars(transformers.Trainer)["get_optimizer_cls_and_kwargs"].__func__ is theirs
    assert class_of(transformers, tmp_path, "adamw_torch")[0] is torch.optim.AdamW


class LowRank(optim.AdamW, is_alias=True):
    """Takes the options of groups, and does nothing with them."""


GALORE = {"rank": 128, "update_proj_gap": 200, "scale": 0.25, "proj_type": "std"}
APOLLO = GALORE | {"proj": "random", "scale_type": "channel", "scale": 1.0}


@pytest.mark.parametrize(
    ("name", "cls", "defaults"),
    [("galore_adamw", "GaLoreAdamW", GALORE), ("apollo_adamw", "APOLLOAdamW", APOLLO)],
)
def test_groups_of_low_rank(transformers, tmp_path, monkeypatch, name, cls, defaults):
    """Decay, betas and eps are kept, which transformers' own GaLore drops."""
    monkeypatch.setattr(optim, cls, LowRank, raising=False)
    options = {"optim": name, "optim_args": "rank=4, scale=0.5, max_grad_norm=2"}
    args = arguments(transformers, tmp_path, optim_target_modules=["attn", "mlp"], **options)
    it = trainer(transformers, args, llama)
    optimizer = it.create_optimizer()
    assert type(optimizer) is LowRank
    assert {key: optimizer.defaults[key] for key in ("lr", "betas", "eps", "max_grad_norm")} == {
        "lr": LR,
        "betas": BETAS,
        "eps": EPS,
        "max_grad_norm": 2,
    }
    names = {weight: name for name, weight in it.model.named_parameters()}
    targets = {n for n in names.values() if "attn" in n or "mlp" in n}
    low_rank = [group for group in optimizer.param_groups if "rank" in group]
    (group,) = low_rank
    assert {names[weight] for weight in group["params"]} == targets
    assert group["weight_decay"] == 0.1
    assert {key: group[key] for key in defaults} == defaults | {"rank": 4, "scale": 0.5}
    others = [group for group in optimizer.param_groups if "rank" not in group]
    assert [group["weight_decay"] for group in others] == [0.1, 0.0]
    assert {names[w] for g in others for w in g["params"]} == set(names.values()) - targets
    it.train()


@pytest.mark.parametrize(
    ("name", "cls", "options"),
    [
        ("galore_adamw", optim.GaLoreAdamW, {}),
        ("galore_adamw_8bit", optim.GaLoreAdamW8bit, {"state_dtype": "int8"}),
        (
            "galore_adafactor",
            optim.GaLoreAdafactor,
            {"relative_step": False, "scale_parameter": False},
        ),
        ("apollo_adamw", optim.APOLLOAdamW, {}),
        ("galore_adamw_8bit_layerwise", optim.GaLoreAdamW8bit, {}),
        ("galore_adafactor_layerwise", optim.GaLoreAdafactor, {}),
    ],
)
def test_names_of_low_rank_select_ours(transformers, tmp_path, name, cls, options):
    """They train, with the groups and options that the names stand for."""
    args = arguments(
        transformers,
        tmp_path,
        optim=name,
        optim_args="rank=4",
        optim_target_modules=["attn", "mlp"],
        max_grad_norm=0.0,
        gradient_accumulation_steps=1,
    )
    it = trainer(transformers, args, llama)
    it.train()
    optimizer = inner(it)
    assert type(optimizer) is cls
    (group,) = [group for group in optimizer.param_groups if group["rank"] is not None]
    assert group["rank"] == 4
    assert all(
        {"projector_left", "projector_right"} & optimizer.state[p].keys() or "apollo" in name
        for p in group["params"]
    )
    for option, value in options.items():
        assert all(each[option] == value for each in optimizer.param_groups)
    losses = losses_of(it)
    assert losses[-1] < losses[0]


def test_every_linear_layer_is_a_target(transformers, tmp_path, monkeypatch):
    monkeypatch.setattr(optim, "GaLoreAdamW", LowRank, raising=False)
    args = arguments(
        transformers, tmp_path, optim="galore_adamw", optim_target_modules="all-linear"
    )
    it = trainer(transformers, args, llama)
    (group,) = [group for group in it.create_optimizer().param_groups if "rank" in group]
    linear = [m for m in it.model.modules() if isinstance(m, torch.nn.Linear)]
    assert {id(w) for w in group["params"]} == {id(module.weight) for module in linear}


def test_layerwise_steps_as_one_optimizer_does(transformers, tmp_path, monkeypatch):
    """With the schedule, and resumed in the middle; gradients are gone before Trainer's step."""
    monkeypatch.setattr(optim, "GaLoreAdamW", LowRank, raising=False)
    options = {"optim_target_modules": ["attn", "mlp"], "gradient_accumulation_steps": 1}
    options |= {"max_grad_norm": 0.0, "save_strategy": "steps", "save_steps": 2}
    losses = []
    for suffix, resume in (("", None), ("_layerwise", None), ("_layerwise", "checkpoint-2")):
        folder = tmp_path / suffix
        args = arguments(transformers, folder, optim=f"galore_adamw{suffix}", **options)
        it = trainer(transformers, args, llama)
        optimizer, seen = it.create_optimizer(), []
        optimizer.register_step_pre_hook(
            lambda optimizer, *_, seen=seen: seen.append(
                sum(w.grad is not None for g in optimizer.param_groups for w in g["params"])
            )
        )
        it.train(resume_from_checkpoint=str(folder / resume) if resume else None)
        losses.append(losses_of(it))
        assert set(seen) == ({1, 0} if suffix else {len(list(it.model.parameters()))})
    assert losses[0] == losses[1] == losses[2]


@pytest.mark.parametrize(
    ("error", "match", "name", "options"),
    [
        (ValueError, "optim='galore_adamw' needs optim_target_modules", "galore_adamw", {}),
        (
            ValueError,
            r"optim_target_modules=\['x'\] names no linear layer",
            "galore_adamw",
            {"optim_target_modules": ["x"]},
        ),
        (
            ValueError,
            "GaLoreAdamW.* has no option 'ranc': did you mean 'rank'",
            "galore_adamw",
            {"optim_target_modules": ["mlp"], "optim_args": "ranc=4"},
        ),
        (
            ValueError,
            "optim='galore_adamw_layerwise' does not support gradient_accumulation_steps",
            "galore_adamw_layerwise",
            {"optim_target_modules": ["mlp"]},
        ),
        (
            ValueError,
            "optim='galore_adamw_layerwise' does not support max_grad_norm",
            "galore_adamw_layerwise",
            {"optim_target_modules": ["mlp"], "optim_args": "max_grad_norm=1"},
        ),
    ],
)
def test_errors_of_low_rank(transformers, tmp_path, monkeypatch, error, match, name, options):
    GaLoreAdamW = type(optim.AdamW)("GaLoreAdamW", (LowRank,), {}, is_alias=True)
    monkeypatch.setattr(optim, "GaLoreAdamW", GaLoreAdamW, raising=False)
    with pytest.raises(error, match=match):
        class_of(transformers, tmp_path, name, llama(transformers), **options)


def wide_gpt2(transformers):
    """One whose matrices are large enough for states in codes."""
    return gpt2(transformers, width=64)


#: Names of optimizers that are not torch's, the package they are in, the model, and the bound.
OF_OTHERS = [
    ("adamw_bnb_8bit", "bitsandbytes", wide_gpt2, 1e-5),
    ("lion_8bit", "bitsandbytes", wide_gpt2, 1e-5),
    ("lion_32bit", "bitsandbytes", gpt2, 1e-5),
    ("rmsprop_bnb_32bit", "bitsandbytes", gpt2, 1e-5),
    ("adafactor", "transformers", gpt2, 1e-5),
    ("galore_adamw", "galore_torch", llama, 1e-5),
    ("galore_adafactor", "galore_torch", llama, 1e-5),
    ("apollo_adamw", "apollo_torch", llama, 1e-3),  # goes on with other random projections
]


#: The bound of the last loss, two steps after bitsandbytes' states were loaded. AdamW8bit rounds
#: codes by the number of the step, and bitsandbytes to nearest.
LAST = {"adamw_bnb_8bit": 5e-5}


@pytest.mark.parametrize("schedule", ["cosine", "reduce_lr_on_plateau"])
@pytest.mark.parametrize(("name", "package", "model", "rtol"), OF_OTHERS)
def test_a_folder_of_trainers_own_optimizer_is_resumed(
    transformers, tmp_path, monkeypatch, name, package, model, rtol, schedule
):
    """With the losses that it would have had; and one of ours is too."""
    low_bit = need_library(monkeypatch, package)
    monkeypatch.setattr(sys, "path", [*sys.path, str(FOLDER)])
    options = {"max_steps": 6, "save_strategy": "steps", "save_steps": 1}
    options |= {"lr_scheduler_type": schedule, "metric_for_best_model": "loss"}
    if schedule == "reduce_lr_on_plateau":
        options |= {"eval_strategy": "steps", "eval_steps": 1}
    if package in ("galore_torch", "apollo_torch"):
        options |= {"optim_target_modules": ["attn", "mlp"], "optim_args": "rank=4"}
        allow_projectors(low_bit)

    def run(folder, resume=None):
        args = arguments(transformers, folder, optim=name, **options)
        it = trainer(transformers, args, model, eval_dataset=texts(4))
        it.train(resume_from_checkpoint=resume and str(resume))
        return it, losses_of(it)

    integrations.transformers.unregister()
    try:
        it, losses = run(tmp_path / "theirs")
    except (ImportError, RuntimeError) as error:
        pytest.skip(f"Trainer cannot train with its own class: {error}")
    assert not isinstance(inner(it), optim.FusedOptimizer)
    integrations.transformers.register()
    for folder in ("theirs/checkpoint-3", "ours/checkpoint-5"):
        it, found = run(tmp_path / "ours", tmp_path / folder)
        assert isinstance(inner(it), optim.FusedOptimizer)
        assert_same_losses(found[:-1], losses[:-1], rtol)
        assert_same_losses(found[-1:], losses[-1:], LAST.get(name, rtol))
    rates = {group["lr"] for group in inner(it).param_groups}
    assert len(rates) == 1


def allow_projectors(package):
    """Lets Trainer read what it has written: projectors are Python objects."""
    modules = [module for name, module in sys.modules.items() if name.startswith(package.__name__)]
    found = {v for m in modules for v in vars(m).values() if isinstance(v, type)}
    torch.serialization.add_safe_globals([each for each in found if "Projector" in each.__name__])


def test_the_page(transformers, tmp_path):
    integrations.transformers.unregister()
    names = run_page(
        "transformers", "By name", model=gpt2(transformers), data=texts(), folder=tmp_path
    )
    assert type(names["trainer"].create_optimizer()) is optim.AdamW8bit


def test_the_recipe(transformers, capsys):
    """The three ways make the same optimizer, of the same groups."""
    losses = [
        recipes.assert_trains(capsys, "hf_trainer", "--way", way, falls_by=0.05)
        for way in ("name", "class", "object")
    ]
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-5, atol=0)
    torch.testing.assert_close(losses[2], losses[0], rtol=1e-5, atol=0)
