"""timm: its registry of optimizers, layer decay, Lookahead and schedulers."""

import importlib
import inspect
import logging
import sys

import pytest
import torch

import recipes
from cases import PLAIN
from fusedstep import integrations, optim
from pages import run_page
from small import assert_native, assert_same_losses, need

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


@pytest.mark.parametrize("name", sorted({*optim.names()} - {"muon", "rprop", "sparseadam"}))
def test_every_name_of_ours_is_one_of_timms(timm, name):
    """Muon's groups need another option for vectors; the page says which two have none."""
    optimizer = timm.optim.create_optimizer_v2(vit(timm), f"fused{name}", lr=1e-3)
    assert type(optimizer) is type(optim.create(name, vit(timm)))


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
    assert registry.get_optimizer_info("fusedlamb").opt_class is optim.Lamb
    assert not caplog.records


def test_the_recipe(timm, capsys):
    recipes.assert_trains(capsys, "timm_vit", "--batch", "32", steps=40)
