"""Lightning: Trainer, manual optimization and Fabric."""

import functools
import importlib
import sys
from unittest import mock

import pytest
import torch

import fusedstep
from fusedstep import integrations, optim
from support import recipes, wrapped
from support.cases import PLAIN, WITH_NAMESAKE
from support.pages import run_page
from support.small import (
    assert_native,
    assert_same_losses,
    batches,
    loss_of,
    need,
    network,
    ours,
    reference,
)

need("lightning")

NAMESAKES = [case for case in PLAIN if case in WITH_NAMESAKE]
PRECISIONS = {"32-true": 1e-5, "bf16-mixed": 2e-3, "16-mixed": 2e-3}
"""Precisions, and how far apart losses may be: autocast amplifies the last bits of a weight."""
BUILDERS = {"ours": ours, "reference": reference}


@pytest.fixture(scope="module")
def lightning():
    return importlib.import_module("lightning")


class Recorder:
    """The methods of a module that keeps its losses."""

    def __init__(self, build, schedule=None):
        super().__init__()
        self.model, self.build, self.schedule, self.losses = network(), build, schedule, []

    def training_step(self, batch, _):
        loss = loss_of(self.model, batch)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        optimizer = self.build(self.parameters())
        if self.schedule is None:
            return optimizer
        schedule = {"scheduler": self.schedule(optimizer), "interval": "step"}
        return {"optimizer": optimizer, "lr_scheduler": schedule}


def trainer(lightning, folder, **options):
    return lightning.Trainer(
        **{"max_steps": 6, "accelerator": "cpu", "devices": 1, "logger": False}
        | {"enable_checkpointing": False, "enable_progress_bar": False}
        | {"enable_model_summary": False, "default_root_dir": folder}
        | options
    )


def module(lightning, kind, *methods, **options):
    cls, its_options = kind
    bases = (*methods, Recorder, lightning.LightningModule)
    return type("Module", bases, {})(lambda params: cls(params, **its_options), **options)


def data(count=6):
    return torch.utils.data.DataLoader(batches(count), batch_size=None)


def fit(lightning, folder, kind, *methods, schedule=None, **options):
    it = module(lightning, kind, *methods, schedule=schedule)
    trainer(lightning, folder, **options).fit(it, data())
    return it


class ClipsItself:
    def configure_gradient_clipping(self, optimizer, gradient_clip_val, gradient_clip_algorithm):
        self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")


@pytest.mark.parametrize("clips", ["never", "trainer", "module"])
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("case", PLAIN, ids=str)
def test_automatic_optimization(lightning, tmp_path, case, precision, clips):
    options = {"precision": precision, "gradient_clip_val": 0.5 if clips == "trainer" else None}
    methods = [ClipsItself] if clips == "module" else []
    it = fit(lightning, tmp_path, ours(case), *methods, **options)
    expected = fit(lightning, tmp_path, reference(case), *methods, **options)
    assert_native(it.optimizers().optimizer)
    assert_same_losses(it.losses, expected.losses, PRECISIONS[precision])


@pytest.mark.parametrize("precision", [name for name in PRECISIONS if "mixed" in name])
def test_clipping_with_fused_is_refused_as_for_torchs_class(lightning, tmp_path, precision):
    (adamw,) = (case for case in PLAIN if case.name == "adamw")
    for cls in (adamw.optimizer, adamw.namesake):
        kind = cls, adamw.options | {"fused": True}
        with pytest.raises(RuntimeError, match="performs unscaling of gradients internally"):
            fit(lightning, tmp_path, kind, precision=precision, gradient_clip_val=0.5)


@pytest.mark.parametrize("case", PLAIN, ids=str)
def test_accumulation_and_a_schedule(lightning, tmp_path, case):
    def schedule(optimizer):
        return torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.02, 8, cycle_momentum=False)

    options = {"accumulate_grad_batches": 2, "schedule": schedule, "max_epochs": 2}
    it = fit(lightning, tmp_path, ours(case), **options)
    expected = fit(lightning, tmp_path, reference(case), **options)
    assert_same_losses(it.losses, expected.losses)


class Manual:
    """Clips in the step, or beside it."""

    automatic_optimization = False

    def training_step(self, batch, index):
        loss = super().training_step(batch, index)
        optimizer = self.optimizers()
        self.manual_backward(loss)
        if self.clips_in_step:
            assert optimizer.step(max_norm=0.5, zero_grad=True) is None
        else:
            torch.nn.utils.clip_grad_norm_(self.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("case", PLAIN, ids=str)
def test_manual_optimization_clips_in_the_step(lightning, tmp_path, case):
    class InStep(Manual):
        clips_in_step = True

    class Beside(Manual):
        clips_in_step = False

    it = fit(lightning, tmp_path, ours(case), InStep)
    expected = fit(lightning, tmp_path, reference(case), Beside)
    assert_same_losses(it.losses, expected.losses)


@pytest.mark.parametrize("case", PLAIN, ids=str)
def test_the_option_max_grad_norm_is_the_trainers_clipping(lightning, tmp_path, case):
    cls, options = ours(case)
    it = fit(lightning, tmp_path, (cls, options | {"max_grad_norm": 0.5}))
    expected = fit(lightning, tmp_path, reference(case), gradient_clip_val=0.5)
    assert_same_losses(it.losses, expected.losses)


@pytest.mark.parametrize("order", ["reference-ours", "ours-reference", "ours-ours"])
@pytest.mark.parametrize("case", NAMESAKES, ids=str)
def test_training_is_resumed_from_a_checkpoint(lightning, tmp_path, case, order):
    first, second = (BUILDERS[name](case) for name in order.split("-"))
    checkpoint = tmp_path / "checkpoint"
    losses = []
    for kind, epochs, path in ((first, 1, None), (second, 2, checkpoint)):
        it = module(lightning, kind)
        its_trainer = trainer(lightning, tmp_path, max_steps=-1, max_epochs=epochs)
        its_trainer.fit(it, data(3), ckpt_path=path)
        its_trainer.save_checkpoint(checkpoint)
        losses += it.losses
    straight = module(lightning, reference(case))
    trainer(lightning, tmp_path, max_epochs=2).fit(straight, data(3))
    assert_same_losses(losses, straight.losses)


@pytest.mark.parametrize("case", PLAIN, ids=str)
def test_a_module_verifies_its_optimizer(lightning, tmp_path, case):
    reports = []

    class Verifies:
        def on_train_start(self):
            reports.append(fusedstep.verify(self.optimizers(), steps=3))

    fit(lightning, tmp_path, ours(case), Verifies)
    (report,) = reports
    assert report.ok, report


def train_in_fabric(lightning, kind):
    """Losses, and the norms by which Fabric has clipped, under a scaler."""
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    plugin = lightning.fabric.plugins.MixedPrecision("16-mixed", "cpu", scaler)
    fabric = lightning.Fabric(accelerator="cpu", devices=1, plugins=plugin)
    cls, options = kind
    model = network()
    model, optimizer = fabric.setup(model, cls(model.parameters(), **options))
    losses = []
    for batch in batches():
        loss = loss_of(model, batch)
        fabric.backward(loss)
        norm = fabric.clip_gradients(model, optimizer, max_norm=0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses += [loss.item(), norm.item()]
    return losses


@pytest.mark.parametrize("case", PLAIN, ids=str)
def test_fabric_clips_under_a_scaler(lightning, case):
    found, expected = (train_in_fabric(lightning, build(case)) for build in (ours, reference))
    assert_same_losses(found, expected, 2e-3)


def test_fabric_refuses_to_clip_with_fused_as_for_torchs_class(lightning):
    for cls in (optim.AdamW, torch.optim.AdamW):
        with pytest.raises(NotImplementedError, match="handling the unscaling"):
            train_in_fabric(lightning, (cls, {"fused": True}))


def in_fabric(lightning, model, optimizer):
    return lightning.Fabric(accelerator="cpu", devices=1).setup(model, optimizer)


@pytest.mark.parametrize("case", PLAIN, ids=str)
def test_fabrics_wrapper_is_followed(lightning, case):
    """States that are replaced, exchanged or cleared through it."""
    wrap = functools.partial(in_fabric, lightning)
    wrapped.assert_events_are_followed(wrap, ours(case))


@pytest.mark.parametrize("case", PLAIN, ids=str)
def test_fabrics_wrapper_in_place_of_an_optimizer(lightning, case):
    wrapped.assert_functions_take_it(functools.partial(in_fabric, lightning), ours(case))


@pytest.fixture
def registered():
    for _ in range(2):
        integrations.lightning.register()
    yield
    for _ in range(2):
        integrations.lightning.unregister()


def command_line(lightning, folder, *words):
    """A LightningCLI, made but not run."""
    pytest.importorskip("jsonargparse")
    cli = importlib.import_module("lightning.pytorch.cli")

    class Module(Recorder, lightning.LightningModule):
        def __init__(self):
            super().__init__(None)

    options = {"max_steps": 6, "accelerator": "cpu", "devices": 1, "logger": False}
    quiet = ("enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    options |= dict.fromkeys(quiet, False) | {"default_root_dir": folder}
    with mock.patch.object(sys, "argv", ["train.py", *words]):
        return cli.LightningCLI(
            Module, save_config_callback=None, trainer_defaults=options, run=False
        )


def words_for(name, options):
    return [
        f"--optimizer={name}",
        *(f"--optimizer.{option}={value}" for option, value in options.items()),
    ]


NUMBERS = {"lr": 0.02, "betas": [0.8, 0.95], "eps": 1e-6, "weight_decay": 0.03}


@pytest.mark.parametrize(
    ("name", "cls"),
    [
        ("AdamW", optim.AdamW),
        ("Lamb", optim.Lamb),
        ("AdamW8bit", optim.AdamW8bit),
        ("fusedstep.optim.AdamW", optim.AdamW),
        ("torch.optim.AdamW", torch.optim.AdamW),
    ],
)
def test_names_of_the_command_line(lightning, registered, tmp_path, name, cls):
    cli = command_line(lightning, tmp_path, *words_for(name, NUMBERS))
    optimizer = cli.model.configure_optimizers()
    assert type(optimizer) is cls
    group = optimizer.param_groups[0]
    assert {option: group[option] for option in NUMBERS} == NUMBERS | {"betas": (0.8, 0.95)}


def test_a_command_line_with_a_schedule_trains_as_with_torchs_class(
    lightning, registered, tmp_path
):
    schedule = ["--lr_scheduler=StepLR", "--lr_scheduler.step_size=1"]
    losses = []
    for name in ("AdamW", "torch.optim.AdamW"):
        cli = command_line(lightning, tmp_path, *words_for(name, NUMBERS), *schedule)
        cli.trainer.fit(cli.model, data())
        losses.append(cli.model.losses)
    assert_same_losses(*losses)


def test_other_names_of_the_command_line_are_as_before(lightning, registered, tmp_path):
    """One that torch alone has, and the classes of a command line that offers some."""
    cli = command_line(lightning, tmp_path, *words_for("LBFGS", {"lr": 0.5}))
    assert type(cli.model.configure_optimizers()) is torch.optim.LBFGS
    parser = importlib.import_module("lightning.pytorch.cli").LightningArgumentParser()
    parser.add_optimizer_args((torch.optim.Adam, torch.optim.SGD), "optimizer")
    assert parser.parse_args(["--optimizer=SGD"]).optimizer.class_path == "torch.optim.SGD"


def test_without_registering_a_name_of_both_is_refused(lightning, registered, tmp_path, capsys):
    """As the page says."""
    integrations.lightning.unregister()
    with pytest.raises(SystemExit):
        command_line(lightning, tmp_path, *words_for("AdamW", {"lr": 0.1}))
    assert "avoid ambiguity: torch.optim.AdamW, fusedstep.optim.AdamW" in capsys.readouterr().err


def test_the_page(lightning):
    names = run_page("lightning", model=network(), batches=batches(), loss_of=loss_of)
    assert_native(names["module"].optimizers().optimizer)


def test_the_recipe(lightning, capsys):
    recipes.assert_trains(capsys, "lightning_amp")
