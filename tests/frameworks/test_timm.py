"""timm: its registry of optimizers, layer decay, Lookahead and schedulers."""

import copy
import functools
import importlib
import inspect
import logging
import sys

import pytest
import torch

from fusedstep import integrations, optim
from fusedstep._api.names import find
from support import recipes
from support.cases import PLAIN
from support.pages import run_page
from support.small import assert_native, assert_same_losses, need
from support.stepping import as_parameters, make_weights
from support.stepping import train as train_on

need("timm")

CLASSES = {
    case.optimizer.__name__.lower(): case.optimizer for case in PLAIN if case.has("weight_decay")
}


@pytest.fixture(scope="module")
def timm():
    """With our optimizers registered, as the page says."""
    for module in ("timm.optim", "timm.scheduler"):
        importlib.import_module(module)
    timm = sys.modules["timm"]
    run_page("timm", model=vit(timm))
    register, info = timm.optim._optim_factory.default_registry, timm.optim.OptimInfo
    for name in CLASSES.keys() - set(register.list_optimizers()):
        register.register(info(name=name, opt_class=getattr(torch.optim, CLASSES[name].__name__)))
    return timm


def vit(timm):
    torch.manual_seed(0)
    return timm.models.vision_transformer.VisionTransformer(
        img_size=16, patch_size=8, in_chans=1, num_classes=4, embed_dim=16, depth=2, num_heads=2
    )


def train(timm, name, options, **more):
    generator = torch.Generator().manual_seed(1)
    model = vit(timm)
    optimizer = timm.optim.create_optimizer_v2(
        model, name, lr=2e-3, weight_decay=0.05, **options, **more
    )
    schedule = timm.scheduler.CosineLRScheduler(optimizer, t_initial=7, warmup_t=2)
    losses = []
    for step in range(7):
        images = torch.randn(4, 1, 16, 16, generator=generator)
        labels = torch.randint(4, (4,), generator=generator)
        loss = torch.nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step(step + 1)
        losses.append(loss.item())
    return optimizer, losses


@pytest.mark.parametrize(
    ("prefix", "more"),
    [("", {}), ("", {"layer_decay": 0.75}), ("lookahead_", {})],
    ids=["decay of weights only", "layer decay", "lookahead"],
)
@pytest.mark.parametrize("name", CLASSES)
def test_by_name(timm, name, prefix, more):
    has_eps = "eps" in inspect.signature(CLASSES[name]).parameters
    eps = {"eps": 1e-8} if has_eps else {}  # timm has one of its own for Adagrad
    optimizer, losses = train(timm, f"{prefix}fused{name}", eps, **more)
    _, expected = train(timm, f"{prefix}{name}", eps, **more)
    inner = optimizer._base_optimizer if prefix else optimizer
    assert type(inner) is CLASSES[name]
    assert_native(inner)
    assert len(inner.param_groups) == (8 if more else 2)
    assert_same_losses(losses, expected, 2e-5)


def test_by_a_class_named_by_a_string(timm):
    register, info = timm.optim._optim_factory.default_registry, timm.optim.OptimInfo
    register.register(info(name="bystring", opt_class="fusedstep.optim.AdamW", has_betas=True))
    optimizer, losses = train(timm, "bystring", {})
    assert type(optimizer) is optim.AdamW
    assert losses == train(timm, "fusedadamw", {})[1]


def test_options_of_the_command_line(timm):
    """`--opt fusedadan --opt-betas … --opt-eps … --opt-foreach`, which selects torch operations."""
    betas, eps = (0.9, 0.8, 0.95), 1e-6
    optimizer, losses = train(timm, "fusedadan", {"betas": betas, "eps": eps})
    assert optimizer.defaults["betas"] == betas
    assert_same_losses(losses, train(timm, "adan", {"betas": betas, "eps": eps})[1], 2e-5)
    optimizer, _ = train(timm, "fusedadamw", {}, foreach=True)
    assert not optimizer._plans


def test_a_name_with_an_underscore_is_another_optimizer(timm):
    """As the page warns."""
    optimizer = timm.optim.create_optimizer_v2(vit(timm), "fused_adamw", lr=1e-3)
    assert type(optimizer) is torch.optim.AdamW


def test_an_option_that_has_another_name_here(timm):
    with pytest.raises(TypeError, match="max_ratio"):
        train(timm, "fusedlamb", {"trust_clip": True})


@pytest.mark.parametrize("name", sorted({*optim.names()} - {"rprop", "sparseadam"}))
def test_every_name_of_ours_is_one_of_timms(timm, name):
    """The page says which two have none."""
    optimizer = timm.optim.create_optimizer_v2(vit(timm), f"fused{name}", lr=1e-3)
    assert type(optimizer) is find(name)


def test_names_are_registered_once_and_removed(timm, caplog):
    """In silence, and apex's are there again."""
    registry = timm.optim._optim_factory.default_registry
    ours = registry.list_optimizers()
    with caplog.at_level(logging.WARNING):
        integrations.timm.register()
        assert registry.list_optimizers() == ours
        integrations.timm.unregister()
        integrations.timm.unregister()
        theirs = registry.list_optimizers()
        assert "fusedadan" not in theirs
        assert registry.get_optimizer_info("fusedlamb").opt_class == "apex.optimizers.FusedLAMB"
        integrations.timm.register()
    assert registry.list_optimizers() == ours
    assert issubclass(registry.get_optimizer_info("fusedlamb").opt_class, optim.Lamb)
    assert not caplog.records


#: Shapes on both sides of each border of timm's Muon: dimensions, units, sides and their ratio.
MATRICES = [(8, 16), (4, 512), (4, 513), (3, 9), (1, 8), (8, 1), (5, 6, 3), (4, 8, 2, 2), (7,)]
MATRICES += [(6, 1, 3, 3), (1, 9, 8), (5, 2, 1), (2, 9, 9), (), (4, 4)]


class Shapes(torch.nn.Module):
    def __init__(self, shapes, dtype):
        super().__init__()
        weights = as_parameters(make_weights(shapes, dtype))
        self.weights = torch.nn.ParameterList(weights)


def made(timm, name, dtype, **options):
    """An optimizer after three steps, and its weights."""
    model = Shapes(MATRICES, dtype)
    optimizer = timm.optim.create_optimizer_v2(model, name, **{"weight_decay": 0.1} | options)
    params = [*model.parameters()]
    train_on(optimizer, params, [1, 2, 3])
    return optimizer, params


@pytest.fixture
def dtype(timm, request, monkeypatch):
    """Has timm's Muon compute its products in a dtype, which it takes bfloat16 for."""
    muon = importlib.import_module("timm.optim.muon")
    products = functools.partial(muon.zeropower_via_newtonschulz, dtype=request.param)
    monkeypatch.setattr(muon, "zeropower_via_newtonschulz", products)
    return request.param


both_dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], indirect=True)


@both_dtypes
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"lr": 0.01, "fallback_lr_scale": 0.25},
        {"momentum": 0.8, "betas": (0.8, 0.9), "eps": 1e-5},
        {"ns_coefficients": "original", "adjust_lr_fn": "original", "ns_steps": 3},
        {"adjust_lr_fn": "rms_to_rms", "ns_coefficients": (3.0, -3.2, 1.2)},
        {"fallback_list": ("weights.0",), "weight_decay": 0.0},
    ],
    ids=str,
)
def test_muon_is_timms(timm, dtype, options):
    _, expected = made(timm, "muon", dtype, **options)
    optimizer, found = made(timm, "fusedmuon", dtype, ns_dtype=dtype, **options)
    assert type(optimizer) is optim.Muon
    bound = 2e-6 if dtype is torch.float32 else 1e-13
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=bound, atol=bound)


@both_dtypes
def test_a_checkpoint_of_timms_muon_goes_on(timm, dtype):
    theirs, expected = made(timm, "muon", dtype, fallback_lr_scale=0.5)
    ours, found = made(timm, "fusedmuon", dtype, lr=1.0, ns_dtype=dtype)
    with torch.no_grad():
        for weight, saved in zip(found, expected, strict=True):
            weight.copy_(saved)
    ours.load_state_dict(copy.deepcopy(theirs.state_dict()))
    for optimizer, params in ((theirs, expected), (ours, found)):
        train_on(optimizer, params, [4, 5, 6])
    for weight, other in zip(found, expected, strict=True):
        torch.testing.assert_close(weight, other, rtol=2e-6, atol=2e-6)
    again, _ = made(timm, "fusedmuon", dtype)
    saved = ours.state_dict()
    again.load_state_dict(saved)
    assert again.state_dict()["param_groups"] == saved["param_groups"]
    torch.testing.assert_close(again.state_dict()["state"], saved["state"], rtol=0, atol=0)


#: Shapes that timm's Adafactor factors as ours does: a long matrix, a vector, and filters.
FACTORED = [(24, 20), (7,), (17, 40), (9, 20, 24)]


@pytest.mark.parametrize("of", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(
    "options",
    [
        {"lr": 0.01},
        {"lr": None},
        {"lr": None, "warmup_init": True, "scale_parameter": False},
        {"lr": 0.02, "betas": (0.8, 0.9), "eps": 1e-6, "clip_threshold": 0.7, "decay_rate": -0.6},
        {"lr": None, "eps_scale": 0.5},
    ],
    ids=str,
)
def test_adafactor_is_timms(timm, of, options):
    weights = []
    for name in ("adafactor", "fusedadafactor"):
        model = Shapes(FACTORED, of)
        optimizer = timm.optim.create_optimizer_v2(model, name, weight_decay=0.1, **options)
        weights.append([*model.parameters()])
        train_on(optimizer, weights[-1], [1, 2, 3])
    assert type(optimizer) is optim.Adafactor
    bound = 2e-6 if of is torch.float32 else 1e-12
    for found, expected in zip(*reversed(weights), strict=True):
        torch.testing.assert_close(found, expected, rtol=bound, atol=bound)


@pytest.mark.parametrize(
    "options", [{"min_dim_size_to_factor": 32}, {"caution": True}, {"min_dim_size_to_factor": 16}]
)
def test_adafactor_names_an_option_that_it_lacks(timm, options):
    (name,) = options
    with pytest.raises(ValueError, match=f"{name} of timm has no counterpart in Adafactor"):
        timm.optim.create_optimizer_v2(vit(timm), "fusedadafactor", lr=1e-3, **options)


@pytest.mark.parametrize("name", ["lamb", "adan", "lion", "adamw"])
def test_a_checkpoint_of_timms_class_goes_on(timm, name):
    """As with its dictionary, so with that of ours."""
    theirs, expected = made(timm, name, torch.float32, lr=0.01)
    dictionary = copy.deepcopy(theirs.state_dict())
    train_on(theirs, expected, [4, 5])
    for _ in range(2):
        ours, found = made(timm, f"fused{name}", torch.float32, lr=1.0)
        with torch.no_grad():
            for weight, other in zip(
                found, made(timm, name, torch.float32, lr=0.01)[1], strict=True
            ):
                weight.copy_(other)
        ours.load_state_dict(dictionary)
        dictionary = copy.deepcopy(ours.state_dict())
        train_on(ours, found, [4, 5])
        for weight, other in zip(found, expected, strict=True):
            torch.testing.assert_close(weight, other, rtol=1e-5, atol=2e-6)


#: The names whose checkpoints continue under the other library's class.
EXCHANGED = ["adadelta", "adagrad", "adam", "adamax", "adamw", "adan", "lamb", "lion", "nadam"]
EXCHANGED += ["radam", "rmsprop", "sgd"]


@pytest.mark.parametrize("to_ours", [True, False])
@pytest.mark.parametrize("name", EXCHANGED)
def test_a_checkpoint_of_a_training_script_goes_on(timm, name, to_ours, tmp_path):
    """Three steps of a training go on with the other class. Backward passes enlarge last bits."""

    def made():
        model = vit(timm)
        kinds = (f"fused{name}", name) if to_ours else (name, f"fused{name}")
        options = {"lr": 2e-3, "weight_decay": 0.05}
        return model, [timm.optim.create_optimizer_v2(model, each, **options) for each in kinds]

    def train_three(model, optimizer, first):
        generator = torch.Generator().manual_seed(first)
        for _ in range(3):
            images = torch.randn(4, 1, 16, 16, generator=generator)
            labels = torch.randint(4, (4,), generator=generator)
            torch.nn.functional.cross_entropy(model(images), labels).backward()
            optimizer.step()
            optimizer.zero_grad()

    model, (_, begun) = made()
    train_three(model, begun, 1)
    file = tmp_path / "checkpoint-3.pth.tar"
    torch.save({"state_dict": model.state_dict(), "optimizer": begun.state_dict()}, file)
    found = []
    for kind in (0, 1):
        saved = torch.load(file)
        model, optimizers = made()
        model.load_state_dict(saved["state_dict"])
        optimizers[kind].load_state_dict(saved["optimizer"])
        train_three(model, optimizers[kind], 4)
        found.append([*model.parameters()])
    for weight, expected in zip(*found, strict=True):
        torch.testing.assert_close(weight, expected, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("name", ["adan", "lamb"])
def test_what_timm_reads_is_no_part_of_our_groups(timm, name):
    """Counts in groups would be tensors, with which no step is repeated past Python."""
    optimizer, _ = made(timm, f"fused{name}", torch.float32)
    groups = [group.keys() for group in optimizer.param_groups]
    saved = optimizer.state_dict()
    assert {float(group["step"]) for group in saved["param_groups"]} == {3.0}
    again, _ = made(timm, f"fused{name}", torch.float32)
    again.load_state_dict(copy.deepcopy(saved))
    assert [group.keys() for group in again.param_groups] == groups
    torch.testing.assert_close(again.state_dict(), saved, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"safety_factor": 1.01}, r"safety_factor=1\.01 of timm has no counterpart in Muon"),
        ({"conv_mode": "batched"}, "conv_mode='batched' of timm has no counterpart"),
        ({"algo": "adamuon"}, "algo='adamuon' of timm has no counterpart"),
        ({"scale_eps": True}, "scale_eps=True of timm has no counterpart"),
        ({"capturable": True}, "capturable=True of timm has no counterpart"),
        ({"ns_coefficients": "polar_express"}, "'polar_express' of timm has no counterpart"),
        ({"nesterov": True}, "nesterov=True of timm's Muon has NAdamW"),
        ({"adamw_lr": 1e-3}, "unexpected keyword argument 'adamw_lr'"),
    ],
    ids=str,
)
def test_muon_names_an_option_that_it_lacks(timm, options, text):
    with pytest.raises((TypeError, ValueError), match=text):
        made(timm, "fusedmuon", torch.float32, **options)


def test_the_recipe(timm, capsys):
    recipes.assert_trains(capsys, "timm_vit", "--batch", "32", steps=40)
