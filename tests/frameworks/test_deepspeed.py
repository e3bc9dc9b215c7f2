"""DeepSpeed: two processes, every stage of ZeRO, and states offloaded to the CPU."""

import os

import pytest
import torch
import torch.distributed as dist

from fusedstep import integrations, optim
from fusedstep._step import strategy
from fusedstep.optim import low_bit
from support import two_processes
from support.cases import PLAIN
from support.pages import run_page
from support.small import (
    assert_native,
    assert_same_losses,
    batches,
    deepspeed_by_gloo,
    loss_of,
    need,
    network,
    ours,
    reference,
)
from support.two_processes import PROCESSES

need("deepspeed")

SIZE = 4
"""Samples a process takes at a time."""


def expected_losses(case, dtype, made=network):
    """Losses of one process that has the samples of both."""
    cls, options = reference(case)
    model, losses = made(), []
    optimizer = cls(model.parameters(), **options)
    for inputs, labels in batches(4, SIZE * PROCESSES):
        rounded = [p.detach().to(dtype) for p in model.parameters()]
        names = [name for name, _ in model.named_parameters()]
        used = {
            name: p + (r.float() - p).detach()
            for name, r, p in zip(names, rounded, model.parameters(), strict=True)
        }
        outputs = torch.func.functional_call(model, used, inputs)
        loss = torch.nn.functional.cross_entropy(outputs, labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def train(engine, rank, dtype, steps=4):
    losses = []
    for inputs, labels in batches(steps, SIZE * PROCESSES):
        part = slice(rank * SIZE, (rank + 1) * SIZE)
        loss = loss_of(engine, (inputs[part].to(dtype), labels[part]))
        engine.backward(loss)
        engine.step()
        mean = loss.detach().float()
        dist.all_reduce(mean)
        losses.append(mean.item() / PROCESSES)
    return losses


def configuration(stage, dtype=torch.float32, **zero):
    return {
        "train_micro_batch_size_per_gpu": SIZE,
        "zero_optimization": {"stage": stage, **zero},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": dtype is torch.bfloat16},
    }


def set_environment(here):
    """As its launcher does."""
    ranks = {"RANK": here.rank, "LOCAL_RANK": here.rank, "WORLD_SIZE": PROCESSES}
    os.environ.update({name: str(value) for name, value in ranks.items()})


def trained_by_deepspeed(case, here, stage, dtype=torch.float32, made=network, **zero):
    import deepspeed

    set_environment(here)
    cls, options = ours(case)
    model = made()
    optimizer = cls(model.parameters(), **options)
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer, config=configuration(stage, dtype, **zero)
    )
    losses = train(engine, here.rank, dtype)
    assert_native(optimizer)
    return losses


def every_stage_trains_as_one_process(here):
    for case in PLAIN:
        expected = expected_losses(case, torch.float32)
        # One trust ratio for a flat partition is not that of its weights: the page says so.
        for stage in range(4) if case.elementwise else [0]:
            assert_same_losses(trained_by_deepspeed(case, here, stage), expected)


def bfloat16_weights_train_as_ones_of_float32_rounded(here):
    for case in PLAIN:
        if case.elementwise:
            losses = trained_by_deepspeed(case, here, 2, torch.bfloat16)
            assert_same_losses(losses, expected_losses(case, torch.bfloat16), 2e-2)


def states_are_offloaded(here):
    for case in PLAIN:
        if case.elementwise:
            offload = {"offload_optimizer": {"device": "cpu"}}
            expected = expected_losses(case, torch.float32)
            for stage in (2, 3):
                assert_same_losses(trained_by_deepspeed(case, here, stage, **offload), expected)


def network_of_slices():
    """The weights of its layers are slices of wider matrices.

    Transposed ones stop ``deepspeed.initialize``, which sends a weight as bytes.
    """
    model = network()
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            wide = torch.nn.functional.pad(module.weight.detach(), (1, 2))
            module.weight = torch.nn.Parameter(wide[:, 1:-2])
    assert not all(p.is_contiguous() for p in model.parameters())
    return model


def slices_are_stepped(here):
    case = next(case for case in PLAIN if case.optimizer is optim.AdamW)
    offload = {"offload_optimizer": {"device": "cpu"}}
    expected = expected_losses(case, torch.float32, network_of_slices)
    for stage, zero in ((0, {}), (1, {}), (2, offload), (3, offload)):
        losses = trained_by_deepspeed(case, here, stage, made=network_of_slices, **zero)
        assert_same_losses(losses, expected)


def no_call_makes_a_plan_after_the_first_step(here):
    """Though each call has other groups, or groups with other weights."""
    import deepspeed

    made = []

    class Plan(strategy.Plan):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            made.append(self)

    set_environment(here)
    before, strategy.Plan = strategy.Plan, Plan
    offload = {"offload_optimizer": {"device": "cpu"}}
    for stage, zero in ((1, {}), (2, offload), (3, {"sub_group_size": 50}), (3, offload)):
        made.clear()
        model = network()
        first, *others = model.parameters()
        optimizer = optim.AdamW([{"params": [first]}, {"params": others, "lr": 0.1}])
        engine, *_ = deepspeed.initialize(
            model=model, optimizer=optimizer, config=configuration(stage, **zero)
        )
        train(engine, here.rank, torch.float32, steps=1)
        plans = len(made)
        train(engine, here.rank, torch.float32)
        assert len(made) == plans > 1, stage
    strategy.Plan = before


def both_flags_are_needed(here):
    """As the page says."""
    import deepspeed
    from deepspeed.runtime.zero.utils import ZeRORuntimeException

    set_environment(here)
    offload = configuration(2, offload_optimizer={"device": "cpu"})
    for config, flag, error in (
        (configuration(1), "zero_allow_untested_optimizer", AssertionError),
        (offload, "zero_force_ds_cpu_optimizer", ZeRORuntimeException),
    ):
        model = network()
        without = {name: value for name, value in config.items() if name != flag}
        with pytest.raises(error, match=flag):
            deepspeed.initialize(
                model=model, optimizer=optim.AdamW(model.parameters()), config=without
            )


def registered_classes_are_taken_by_zero(here):
    """Elementwise classes are taken. LAMB is still refused, and all are once they are removed."""
    import deepspeed
    from deepspeed.runtime.zero.utils import (
        ZERO_SUPPORTED_OPTIMIZERS,
        is_zero_supported_optimizer,
    )

    set_environment(here)
    is_zero_supported_optimizer(None)  # DeepSpeed adds its Muon when it is asked first
    before = list(ZERO_SUPPORTED_OPTIMIZERS)
    config = configuration(1)
    del config["zero_allow_untested_optimizer"]

    def start(name):
        model = network()
        optimizer = getattr(optim, name)(model.parameters())
        deepspeed.initialize(model=model, optimizer=optimizer, config=config)

    for _ in range(2):
        integrations.deepspeed.register()
    assert ZERO_SUPPORTED_OPTIMIZERS[: len(before)] == before
    added = [cls.__name__ for cls in ZERO_SUPPORTED_OPTIMIZERS[len(before) :]]
    assert len(added) == len(set(added))
    assert {"AdamW", "SGD", "Lion", "AdamW8bit"} <= set(added) <= {*optim.__all__, *vars(low_bit)}
    assert not {"Lamb", "Lamb8bit"} & set(added)
    for name in ("AdamW", "AdamW8bit"):
        start(name)
    with pytest.raises(AssertionError, match="zero_allow_untested_optimizer"):
        start("Lamb")
    for _ in range(2):
        integrations.deepspeed.unregister()
    assert before == ZERO_SUPPORTED_OPTIMIZERS
    with pytest.raises(AssertionError, match="zero_allow_untested_optimizer"):
        start("AdamW")


def the_configuration_selects_registered_classes(here):
    """As they are when they are given, and DeepSpeed's again once they are removed."""
    import deepspeed

    set_environment(here)
    offload = {"stage": 2, "offload_optimizer": {"device": "cpu"}}

    def start(name, zero, **params):
        config = configuration(**zero) | {"optimizer": {"type": name, "params": params}}
        for flag in ("zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer"):
            del config[flag]
        model = network()
        engine, *_ = deepspeed.initialize(
            model=model, model_parameters=model.parameters(), config=config
        )
        return engine

    numbers = {"lr": 0.02, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.03}
    integrations.deepspeed.register()
    for name, cls, more, zero in (
        ("AdamW", optim.AdamW, {"torch_adam": True}, {"stage": 0}),
        ("adamw", optim.AdamW, {"adam_w_mode": True}, offload),
        ("Adam", optim.Adam, {"adam_w_mode": False}, {"stage": 1}),
        ("AdamW8bit", optim.AdamW8bit, {}, offload),
    ):
        engine = start(name, zero, **numbers, **more)
        assert type(engine.basic_optimizer) is cls
        group = engine.basic_optimizer.param_groups[0]
        assert {option: group[option] for option in numbers} == numbers
        assert group["decoupled_weight_decay"] == (cls is not optim.Adam)
        losses = train(engine, here.rank, torch.float32)
        assert_native(engine.basic_optimizer)
        model = network()
        optimizer = cls(model.parameters(), **numbers)
        engine, *_ = deepspeed.initialize(
            model=model, optimizer=optimizer, config=configuration(**zero)
        )
        assert losses == train(engine, here.rank, torch.float32)
    assert start("adam", {"stage": 1}).basic_optimizer.param_groups[0]["decoupled_weight_decay"]
    assert type(start("SGD", {"stage": 1}, lr=0.1).basic_optimizer) is optim.SGD
    assert type(start("ASGD", {"stage": 0}).basic_optimizer) is optim.ASGD
    with pytest.raises(ValueError, match="gradient_clipping"):
        start("AdamW", {"stage": 0}, max_grad_norm=1.0)
    integrations.deepspeed.unregister()
    assert type(start("SGD", {"stage": 0}, lr=0.1).basic_optimizer) is torch.optim.SGD
    with pytest.raises(AssertionError, match="AdamW8bit is not a supported"):
        start("AdamW8bit", {"stage": 0})


def the_page_is_right(here):
    set_environment(here)
    inputs, labels = batches(1, SIZE * PROCESSES)[0]
    names = run_page(
        "deepspeed", model=network(), loss_of=loss_of, batches=[(inputs[:SIZE], labels[:SIZE])]
    )
    assert_native(names["optimizer"])


WORKS = (
    every_stage_trains_as_one_process,
    bfloat16_weights_train_as_ones_of_float32_rounded,
    states_are_offloaded,
    slices_are_stepped,
    no_call_makes_a_plan_after_the_first_step,
    both_flags_are_needed,
    registered_classes_are_taken_by_zero,
    the_configuration_selects_registered_classes,
    the_page_is_right,
)


@pytest.fixture(scope="module")
def failures():
    return two_processes.failures_by_name("gloo", WORKS, deepspeed_by_gloo)


@pytest.mark.parametrize("name", [work.__name__ for work in WORKS])
def test_deepspeed(failures, name):
    if name in failures:
        pytest.fail(failures[name], pytrace=False)
