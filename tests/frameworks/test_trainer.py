"""transformers' Trainer, and peft, which imports transformers too."""

import importlib
import inspect

import pytest
import torch

from fusedstep import optim
from support import recipes
from support.cases import PLAIN
from support.pages import run_page
from support.small import assert_native, assert_same_losses, need, ours, reference
from support.small_trainer import STEPS, arguments, gpt2, inner, losses_of, texts, trainer

need("transformers")


@pytest.fixture(scope="module")
def transformers():
    return importlib.import_module("transformers")


@pytest.fixture(scope="module")
def peft():
    pytest.importorskip("peft.optimizers")
    return pytest.importorskip("peft")


def from_arguments(kind, args):
    """As the page says: what the arguments set is handed on by name."""
    cls, options = kind
    names = inspect.signature(cls).parameters
    if "betas" in names and len(names["betas"].default) == 2:
        options = options | {"betas": (args.adam_beta1, args.adam_beta2)}
    if "eps" in names:
        options = options | {"eps": args.adam_epsilon}
    return cls, options | {"lr": args.learning_rate}


@pytest.mark.parametrize(
    ("options", "rtol"), [({}, 2e-5), ({"bf16": True}, 2e-3)], ids=["", "bf16"]
)
@pytest.mark.parametrize("case", PLAIN, ids=str)
def test_a_class_and_options_from_the_arguments(transformers, tmp_path, case, options, rtol):
    args = arguments(transformers, tmp_path, **options)
    results = {}
    for kind in (ours, reference):
        kind_of_args = from_arguments(kind(case), args)
        it = trainer(transformers, args, optimizer_cls_and_kwargs=kind_of_args)
        it.train()
        results[kind] = it
    assert_native(inner(results[ours]))
    groups = results[ours].optimizer.param_groups
    assert [group["weight_decay"] for group in groups] == [0.1, 0.0]
    assert {group["initial_lr"] for group in groups} == {args.learning_rate}
    assert_same_losses(losses_of(results[ours]), losses_of(results[reference]), rtol)


@pytest.mark.parametrize("case", PLAIN, ids=str)
def test_training_is_resumed(transformers, tmp_path, case):
    straight = None
    for resume in (None, str(tmp_path / "checkpoint-2")):
        args = arguments(transformers, tmp_path, save_strategy="steps", save_steps=2)
        it = trainer(transformers, args, optimizer_cls_and_kwargs=ours(case))
        it.train(resume_from_checkpoint=resume)
        straight = straight or it
    assert losses_of(it) == losses_of(straight)
    for ours_now, then in zip(it.model.parameters(), straight.model.parameters(), strict=True):
        assert torch.equal(ours_now, then)


@pytest.mark.parametrize("name", ["adamw_torch", "adamw_torch_fused"])
def test_a_checkpoint_of_torchs_adamw_is_resumed(transformers, tmp_path, name):
    args = arguments(transformers, tmp_path, optim=name, save_strategy="steps", save_steps=2)
    straight = trainer(transformers, args)
    straight.train()
    (adamw,) = (case for case in PLAIN if case.name == "adamw")
    kind = from_arguments(ours(adamw), args)
    it = trainer(transformers, args, optimizer_cls_and_kwargs=kind)
    it.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert isinstance(inner(it), optim.AdamW)
    if name == "adamw_torch_fused":
        assert all(group["fused"] for group in it.optimizer.param_groups)
    assert_native(inner(it))
    assert_same_losses(losses_of(it), losses_of(straight), 2e-5)


@pytest.mark.parametrize("case", PLAIN, ids=str)
def test_the_schedule_waits_while_steps_are_skipped(transformers, tmp_path, case):
    """On the CPU Accelerate has no scaler of its own: this one is that of fp16 on a GPU."""

    class Overflows(transformers.Trainer):
        def create_optimizer(self, *args):
            self.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
            return super().create_optimizer(*args)

        def compute_loss(self, *args, **kwargs):
            loss = super().compute_loss(*args, **kwargs)
            return loss * float("inf") if self.state.global_step < 2 else loss

    def train(kind):
        args = arguments(transformers, tmp_path, max_grad_norm=0.0, lr_scheduler_type="linear")
        it = Overflows(
            model=gpt2(transformers),
            args=args,
            train_dataset=texts(),
            optimizer_cls_and_kwargs=from_arguments(kind, args),
        )
        it.train()
        return it

    it, expected = train(ours(case)), train(reference(case))
    assert it.lr_scheduler.last_epoch == expected.lr_scheduler.last_epoch == STEPS - 2
    assert it.lr_scheduler.get_last_lr() == expected.lr_scheduler.get_last_lr()
    assert_same_losses(losses_of(it)[2:], losses_of(expected)[2:], 2e-5)


def test_the_page_on_trainer(transformers, tmp_path):
    args = arguments(transformers, tmp_path)
    names = run_page("transformers", "By class", model=gpt2(transformers), args=args, data=texts())
    it = names["trainer"]
    assert_native(inner(it))
    expected = trainer(transformers, args)
    expected.train()
    assert_same_losses(losses_of(it), losses_of(expected), 2e-5)


@pytest.mark.parametrize("kind", ["lora", "dora", "lora+"])
@pytest.mark.parametrize("case", PLAIN, ids=str)
def test_adapters_of_peft(transformers, peft, case, kind):
    def train(cls, options):
        torch.manual_seed(2)
        config = peft.LoraConfig(
            r=4, target_modules=["c_attn"], use_dora=kind == "dora", fan_in_fan_out=True
        )
        model = peft.get_peft_model(gpt2(transformers), config)
        if kind == "lora+":
            optimizer = peft.optimizers.create_loraplus_optimizer(
                model, cls, loraplus_lr_ratio=16, **options
            )
        else:
            optimizer = cls(model.parameters(), **options)
        losses = []
        for line in texts(6):
            ids = line["input_ids"][None]
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return optimizer, losses

    optimizer, losses = train(*ours(case))
    assert_native(optimizer)
    assert_same_losses(losses, train(*reference(case))[1], 2e-5)
    with_state = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    has_state = bool(case.states or case.numbers)
    assert len(optimizer.state) == (len(with_state) if has_state else 0)


def test_the_page_on_peft(transformers, peft):
    torch.manual_seed(2)
    config = peft.LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True)
    model = peft.get_peft_model(gpt2(transformers), config)
    names = run_page("peft", model=model, lines=[line["input_ids"] for line in texts(4)])
    assert_native(names["optimizer"])


def test_the_recipe_of_lora(peft, capsys):
    recipes.assert_trains(capsys, "peft_lora", falls_by=0.02)
