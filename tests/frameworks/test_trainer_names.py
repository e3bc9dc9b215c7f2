"""transformers: the optimizers that `TrainingArguments(optim=...)` selects once registered."""

import importlib
import sys
from types import SimpleNamespace

import pytest
import torch

import fusedstep
from fusedstep import integrations, optim
from fusedstep.convert import forms
from fusedstep.integrations import transformers as by_name
from fusedstep.integrations._groups import written_as_theirs
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


def wide_llama(transformers):
    """One whose projected moments are large enough for codes, where the rank is 64."""
    return llama(transformers, width=64)


#: Names of optimizers that are not torch's, the package they are in, the model, the rank, and the
#: bounds of losses: of their folder that ours goes on from, and of ours that theirs goes on from.
OF_OTHERS = [
    ("adamw_torch_8bit", "torchao", wide_gpt2, None, 1e-5, 1e-5),
    ("adamw_torch_4bit", "torchao", wide_gpt2, None, 5e-5, 5e-5),
    ("adamw_bnb_8bit", "bitsandbytes", wide_gpt2, None, 1e-5, 1e-5),
    ("lion_8bit", "bitsandbytes", wide_gpt2, None, 1e-5, 1e-5),
    ("lion_32bit", "bitsandbytes", gpt2, None, 1e-5, 1e-5),
    ("rmsprop_bnb_32bit", "bitsandbytes", gpt2, None, 1e-5, 1e-5),
    ("rmsprop_bnb_8bit", "bitsandbytes", wide_gpt2, None, 1e-5, 2e-5),
    ("adafactor", "transformers", gpt2, None, 1e-5, 1e-5),
    ("galore_adamw", "galore_torch", llama, 4, 1e-5, 1e-5),
    # Their class limits what ours does not, and rounds codes otherwise.
    ("galore_adamw_8bit", "galore_torch", wide_llama, 64, 1e-3, 1e-3),
    ("galore_adafactor", "galore_torch", llama, 4, 1e-5, 1e-5),
    ("apollo_adamw", "apollo_torch", llama, 4, 1e-3, 1e-5),  # ours has other random projections
]
#: The bound of the last loss, two steps after the other library's states were loaded. AdamW8bit
#: rounds codes by the number of the step, and bitsandbytes to nearest.
LAST = {"adamw_bnb_8bit": 5e-5}
OF_NAME = [row[0] for row in OF_OTHERS]
#: Other names of a row's class and library.
ALIASES = {"adamw_8bit": "adamw_bnb_8bit", "rmsprop_bnb": "rmsprop_bnb_32bit"}


def test_every_name_is_of_torch_or_has_a_form():
    names, libraries = by_name._NAMES, by_name._LIBRARIES
    assert names.keys() - by_name._OF_TORCH == libraries.keys()
    assert libraries.keys() == {*OF_NAME, *ALIASES}
    for alias, name in ALIASES.items():
        assert (names[alias], libraries[alias]) == (names[name], libraries[name])


class Runs:
    """Trainings of one name in folders, with ours or with Trainer's own class."""

    def __init__(self, transformers, folder, monkeypatch, name, schedule="cosine"):
        row = next(row for row in OF_OTHERS if row[0] == name)
        self.transformers, self.folder, self.name = transformers, folder, name
        _, self.package, self.model, rank, self.to_ours, self.to_theirs = row
        low_bit = need_library(monkeypatch, self.package)
        monkeypatch.setattr(sys, "path", [*sys.path, str(FOLDER)])
        monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)  # of GaLore's, on a CPU too
        if self.package == "torchao":  # transformers has looked for it once, and before
            choice = importlib.import_module("transformers.trainer_optimizer")
            monkeypatch.setattr(choice, "is_torchao_available", lambda: True)
        self.options = {"max_steps": 6, "save_strategy": "steps", "save_steps": 1}
        self.options |= {"lr_scheduler_type": schedule, "metric_for_best_model": "loss"}
        if schedule == "reduce_lr_on_plateau":
            self.options |= {"eval_strategy": "steps", "eval_steps": 1}
        if rank:
            self.options |= {"optim_target_modules": ["attn", "mlp"], "optim_args": f"rank={rank}"}
            allow_projectors(low_bit)

    def trainer(self, folder="other"):
        args = arguments(self.transformers, self.folder / folder, optim=self.name, **self.options)
        return trainer(self.transformers, args, self.model, eval_dataset=texts(4))

    def ours(self, folder, resume=None):
        integrations.transformers.register()
        it = self.trainer(folder)
        it.train(resume_from_checkpoint=resume and str(self.folder / resume))
        assert isinstance(inner(it), optim.FusedOptimizer)
        return it, losses_of(it)

    def theirs(self, folder, resume=None):
        integrations.transformers.unregister()
        it = self.trainer(folder)
        with torch.compiler.set_stance("force_eager"):  # torchao's compiles take a minute
            try:
                it.train(resume_from_checkpoint=resume and str(self.folder / resume))
            except ImportError as error:
                pytest.skip(f"Trainer cannot train with its own class: {error}")
        assert not isinstance(inner(it), optim.FusedOptimizer)
        return it, losses_of(it)


EACH_NAME = pytest.mark.parametrize(
    ("name", "schedule"),
    [*((name, "cosine") for name in OF_NAME), ("adamw_bnb_8bit", "reduce_lr_on_plateau")],
)


@EACH_NAME
def test_a_folder_of_trainers_own_optimizer_is_resumed(
    transformers, tmp_path, monkeypatch, name, schedule
):
    """With the losses that it would have had; and one of ours is too."""
    runs = Runs(transformers, tmp_path, monkeypatch, name, schedule)
    _, losses = runs.theirs("theirs")
    for resume in ("theirs/checkpoint-3", "ours/checkpoint-5"):
        it, found = runs.ours("ours", resume)
        assert_same_losses(found[:-1], losses[:-1], runs.to_ours)
        assert_same_losses(found[-1:], losses[-1:], LAST.get(name, runs.to_ours))
    rates = {float(group["lr"]) for group in inner(it).param_groups}
    assert len(rates) == 1


@EACH_NAME
def test_trainers_own_optimizer_resumes_a_folder_of_ours(
    transformers, tmp_path, monkeypatch, name, schedule
):
    """With the losses that ours would have had; ours goes on with these very numbers."""
    runs = Runs(transformers, tmp_path, monkeypatch, name, schedule)
    it, losses = runs.ours("ours")
    weights = [p.detach().clone() for p in it.model.parameters()]
    counts = [len(getattr(it.lr_scheduler, each, [])) for each in ("base_lrs", "_last_lr")]
    assert set(counts) <= {0, len(inner(it).param_groups)}
    _, found = runs.theirs("theirs", "ours/checkpoint-3")
    assert_same_losses(found[:-1], losses[:-1], runs.to_theirs)
    assert_same_losses(found[-1:], losses[-1:], LAST.get(name, runs.to_theirs))
    it, found = runs.ours("again", "ours/checkpoint-3")
    assert found == losses
    assert all(map(torch.equal, it.model.parameters(), weights))
    _, found = runs.ours("back", "theirs/checkpoint-5")
    assert_same_losses(found, losses, 10 * runs.to_theirs)


#: States that a form of another library lacks, and what the class here has in their place then.
WITHOUT = {"lion_8bit": {"step"}, "apollo_adamw": {"place"}}


@pytest.mark.parametrize("name", OF_NAME)
def test_the_form_of_another_library_loses_nothing(transformers, tmp_path, monkeypatch, name):
    """It has the bits of all states; beside it there is ours, which load_state_dict takes."""
    runs = Runs(transformers, tmp_path, monkeypatch, name)
    runs.options["max_steps"] = 2
    it, _ = runs.ours("ours")
    with written_as_theirs(it.optimizer, it.lr_scheduler):
        saved = it.optimizer.state_dict()
    theirs = {key: saved[key] for key in ("state", "param_groups")}
    own = saved["fusedstep"]["state"]
    for dictionary, load in (
        (theirs, lambda fresh: fresh.load_state_dict(theirs)),
        (saved, lambda fresh: fresh.load_state_dict(saved)),
        (saved, lambda fresh: fusedstep.import_state_dict(fresh, saved)),
    ):
        fresh = runs.trainer().create_optimizer()
        load(fresh)
        lost = WITHOUT.get(name, set()) if dictionary is theirs else set()
        found = fresh.state_dict()["state"]
        assert found.keys() == own.keys()
        for key, state in own.items():
            assert found[key].keys() | lost == state.keys() | lost
            assert all(torch.equal(found[key][each], state[each]) for each in state.keys() - lost)
    with pytest.raises(ValueError, match=r"pass state_dict\['fusedstep'\]"):
        fresh.load_state_dict({"fusedstep": saved["fusedstep"]})


@pytest.mark.parametrize("name", ["adamw_torch_8bit", "adamw_torch_4bit", *OF_NAME[-4:]])
def test_a_folder_is_resumed_where_the_library_is_gone(transformers, tmp_path, monkeypatch, name):
    runs = Runs(transformers, tmp_path, monkeypatch, name)
    _, losses = runs.ours("ours")
    for module, _ in forms._PICKLED[runs.package]:
        monkeypatch.setitem(sys.modules, module, None)
    known = torch.serialization.get_safe_globals()
    torch.serialization.clear_safe_globals()
    try:
        _, found = runs.ours("again", "ours/checkpoint-3")
    finally:
        torch.serialization.add_safe_globals(known)
    assert found == losses
    saved = torch.load(tmp_path / "again" / "checkpoint-5" / "optimizer.pt")
    assert "fusedstep" not in saved


def test_what_deepspeed_saves_has_our_form(transformers, tmp_path, monkeypatch):
    runs = Runs(transformers, tmp_path, monkeypatch, "adamw_bnb_8bit")
    runs.options["save_strategy"] = "no"
    it, _ = runs.ours("ours")
    saved = []
    it.model_wrapped = SimpleNamespace(
        save_checkpoint=lambda _: saved.append(inner(it).state_dict())
    )
    it.is_deepspeed_enabled = True
    (tmp_path / "folder").mkdir()
    it._save_optimizer_and_scheduler(str(tmp_path / "folder"))
    assert [len(each["param_groups"]) for each in saved] == [3]
    assert "fusedstep" not in saved[0]


def test_a_formula_of_torchs_keeps_our_form(transformers, tmp_path):
    args = arguments(transformers, tmp_path, optim="adafactor", optim_args="variant=torch")
    it = trainer(transformers, args)
    it.train()
    with written_as_theirs(it.optimizer, it.lr_scheduler):
        assert "fusedstep" not in it.optimizer.state_dict()


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
