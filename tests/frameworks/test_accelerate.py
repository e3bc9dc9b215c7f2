"""Accelerate: the prepared loop, its scaler and scheduler, the exchange of weights for FSDP2."""

import copy
import importlib
import os

import pytest
import torch

import fusedstep
from fusedstep import integrations, optim
from fusedstep._native import ops
from support import recipes, two_processes, wrapped
from support.cases import PLAIN, WITH_NAMESAKE
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
from support.stepping import as_parameters, assert_same_contents, contents, make_weights, train

need("accelerate")


@pytest.fixture
def accelerate():
    """Without what its singletons keep of another test, of another file too: Trainer has one."""
    accelerate = importlib.import_module("accelerate")
    forget(accelerate)
    yield accelerate
    forget(accelerate)


def forget(accelerate):
    accelerate.state.AcceleratorState._reset_state(True)
    accelerate.state.GradientState._reset_state()


class Loop:
    """A prepared model, optimizer and schedule; two batches a step, clipped."""

    def __init__(self, accelerate, kind, precision="no"):
        self.accelerator = accelerate.Accelerator(
            cpu=True, mixed_precision=precision, gradient_accumulation_steps=2
        )
        cls, options = kind
        model = network()
        optimizer = cls(model.parameters(), **options)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        self.model, self.optimizer, self.schedule = self.accelerator.prepare(
            model, optimizer, schedule
        )
        self.losses = []

    def train(self, data):
        for batch in data:
            with self.accelerator.accumulate(self.model):
                loss = loss_of(self.model, batch)
                self.accelerator.backward(loss)
                if self.accelerator.sync_gradients:
                    self.accelerator.clip_grad_norm_(self.model.parameters(), 0.5)
                self.optimizer.step()
                self.schedule.step()
                self.optimizer.zero_grad()
            self.losses.append(loss.item())
        return self.losses


@pytest.mark.parametrize(("precision", "rtol"), [("no", 1e-5), ("bf16", 2e-3)])
@pytest.mark.parametrize("case", PLAIN, ids=str)
def test_the_prepared_loop(accelerate, case, precision, rtol):
    loop = Loop(accelerate, ours(case), precision)
    losses = loop.train(batches())
    assert_native(loop.optimizer.optimizer)
    assert_same_losses(losses, Loop(accelerate, reference(case), precision).train(batches()), rtol)


@pytest.mark.parametrize("case", PLAIN, ids=str)
def test_the_state_is_saved_and_loaded(accelerate, case, tmp_path):
    loop = Loop(accelerate, ours(case))
    loop.train(batches()[:4])
    loop.accelerator.save_state(str(tmp_path))
    straight = loop.train(batches()[4:])
    other = Loop(accelerate, ours(case))
    other.accelerator.load_state(str(tmp_path))
    assert other.train(batches()[4:]) == straight[4:]
    assert_same_contents(contents(other.optimizer.optimizer), contents(loop.optimizer.optimizer))


@pytest.mark.parametrize("to_ours", [True, False])
@pytest.mark.parametrize("case", WITH_NAMESAKE, ids=str)
def test_states_of_torchs_class_and_ours_are_exchanged(accelerate, case, to_ours, tmp_path):
    """Three steps more by the other class are those of the first."""
    data = batches(12)
    kinds = [reference(case), ours(case)]
    begun, other = kinds if to_ours else kinds[::-1]
    loop = Loop(accelerate, begun)
    loop.train(data[:6])
    loop.accelerator.save_state(str(tmp_path))
    expected = loop.train(data[6:])
    resumed = Loop(accelerate, other)
    resumed.accelerator.load_state(str(tmp_path))
    assert_same_losses(resumed.train(data[6:]), expected[6:])


@pytest.mark.parametrize("case", PLAIN, ids=str)
def test_a_skipped_step_is_seen_to_be_skipped(accelerate, case):
    """Three overflows, then a step: the schedule, which halves the learning rate, moves once."""
    *seen, loss = train_with_overflows(accelerate, ours(case))
    *expected, its_loss = train_with_overflows(accelerate, reference(case))
    assert seen == expected == [[True, True, True, False], 0.5]
    assert_same_losses([loss], [its_loss])


@pytest.mark.parametrize("case", PLAIN, ids=str)
def test_with_fused_the_schedule_goes_on(accelerate, case):
    """As with torch's Adam and AdamW: the page says so."""
    kinds = [(case.optimizer, case.options | {"fused": True})]
    if case.name in ("adam", "adamw"):
        kinds.append((case.namesake, case.options | {"fused": True}))
    for kind in kinds:
        *seen, _ = train_with_overflows(accelerate, kind)
        assert seen == [[False] * 4, 0.5**4]


@pytest.mark.parametrize("case", PLAIN, ids=str)
def test_the_wrapper_is_followed(accelerate, case):
    """States that are replaced, exchanged or cleared through it."""
    wrap = accelerate.Accelerator(cpu=True).prepare
    wrapped.assert_events_are_followed(wrap, ours(case))


@pytest.mark.parametrize("case", PLAIN, ids=str)
def test_what_takes_the_optimizer_inside_of_the_wrapper(accelerate, case):
    accelerator = accelerate.Accelerator(cpu=True)

    def inside(model, optimizer):
        model, optimizer = accelerator.prepare(model, optimizer)
        return model, optimizer.optimizer

    wrapped.assert_functions_take_it(inside, ours(case))


def train_with_overflows(accelerate, kind):
    accelerator = accelerate.Accelerator(cpu=True)
    cls, options = kind
    model = network()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    inner = cls(model.parameters(), **options | {"lr": 1.0})
    optimizer = accelerate.optimizer.AcceleratedOptimizer(inner, scaler=scaler)
    schedule = accelerator.prepare(torch.optim.lr_scheduler.ExponentialLR(inner, 0.5))
    schedule.optimizers = [optimizer]
    before, skipped = copy.deepcopy(model.state_dict()), []
    for batch, factor in zip(batches(4), (float("inf"),) * 3 + (1.0,), strict=True):
        scaler.scale(loss_of(model, batch) * factor).backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        skipped.append(optimizer.step_was_skipped)
        if factor != 1.0:
            assert all(torch.equal(before[name], p) for name, p in model.named_parameters())
    return skipped, inner.param_groups[0]["lr"], loss_of(model, batches(1)[0]).item()


@pytest.mark.skipif(ops.bind is None, reason="built without Python's headers")
@pytest.mark.parametrize("case", PLAIN, ids=str)
def test_prepared_steps_take_the_shortcut(accelerate, case, monkeypatch):
    """Although Accelerate calls `step(None)`, and has read the states."""
    answers, repeat = [], ops.bind.repeat
    monkeypatch.setattr(
        ops.bind, "repeat", lambda *args: answers.append(repeat(*args)) or answers[-1]
    )
    params = as_parameters(make_weights([(5, 4), (7,)], torch.float32))
    cls, options = ours(case)
    optimizer = accelerate.Accelerator(cpu=True).prepare(cls(params, **options))
    train(optimizer, params, range(1, 6))
    assert answers[-3:] == [True] * 3


@pytest.mark.parametrize("case", PLAIN, ids=str)
def test_the_option_max_grad_norm_is_clip_grad_norm(accelerate, case):
    def train_with(kind, clips_itself):
        cls, options = kind
        accelerator, model = accelerate.Accelerator(cpu=True), network()
        optimizer = accelerator.prepare(cls(model.parameters(), **options))
        losses = []
        for batch in batches():
            loss = loss_of(model, batch)
            accelerator.backward(loss)
            if not clips_itself:
                accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    cls, options = ours(case)
    losses = train_with((cls, options | {"max_grad_norm": 0.5}), True)
    assert_same_losses(losses, train_with(reference(case), False))


@pytest.mark.parametrize("case", PLAIN, ids=str)
def test_the_weights_of_the_groups_are_exchanged(accelerate, case):
    """As preparing for FSDP2 does, after the optimizer has been made."""
    shapes = [(5, 4), (7,)]
    old, new = (as_parameters(make_weights(shapes, torch.float32)) for _ in range(2))
    cls, options = ours(case)
    optimizer = accelerate.Accelerator(cpu=True).prepare(cls(old, **options))
    optimizer._switch_parameters(dict(zip(old, new, strict=True)))
    train(optimizer, new, [1, 2])
    saved = copy.deepcopy(optimizer.state_dict())
    assert sorted(saved["state"]) == ([0, 1] if case.states or case.numbers else [])
    params = as_parameters(make_weights(shapes, torch.float32))
    straight = case.build(params)
    train(straight, params, [1, 2])
    assert_same_contents(contents(optimizer), contents(straight))
    resumed = cls(as_parameters(new), **options)
    resumed.load_state_dict(saved)
    train(resumed, resumed.param_groups[0]["params"], [3])
    train(straight, params, [3])
    assert_same_contents(contents(resumed), contents(straight))


TOOLS = [fusedstep.doctor, fusedstep.verify, fusedstep.compare, fusedstep.convert]


@pytest.mark.parametrize("tool", TOOLS)
def test_tools_ask_for_the_optimizer_inside(accelerate, tool):
    optimizer = accelerate.Accelerator(cpu=True).prepare(optim.AdamW(network().parameters()))
    with pytest.raises(TypeError, match=r"wraps .*\.optimizer"):
        tool(optimizer)
    tool(optimizer.optimizer)


def test_the_page(accelerate):
    names = run_page("accelerate", model=network(), batches=batches(), loss_of=loss_of)
    assert_native(names["optimizer"].optimizer)


def test_the_recipe(accelerate, capsys):
    recipes.assert_trains(capsys, "hf_accelerate")


def under_deepspeed(here, build, **config):
    """The engine that Accelerate makes of a configuration, and its losses."""
    import accelerate
    from accelerate.utils import DeepSpeedPlugin

    two = str(two_processes.PROCESSES)
    os.environ |= {"RANK": str(here.rank), "LOCAL_RANK": str(here.rank), "WORLD_SIZE": two}
    os.environ |= {"LOCAL_WORLD_SIZE": two, "ACCELERATE_USE_DEEPSPEED": "true"}
    forget(accelerate)
    plugin = DeepSpeedPlugin(hf_ds_config={"train_micro_batch_size_per_gpu": 8} | config)
    accelerator = accelerate.Accelerator(deepspeed_plugin=plugin)
    model = network()
    engine, optimizer = accelerator.prepare(model, build(model.parameters()))
    losses = []
    for batch in batches(3):
        loss = loss_of(engine, batch)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return engine, losses


def a_configuration_of_deepspeed_selects_ours(here):
    from accelerate.utils import DummyOptim

    numbers = {"lr": 0.02, "weight_decay": 0.03}
    others = {"betas": (0.8, 0.95), "eps": 1e-6}
    zero = {"zero_optimization": {"stage": 1}}
    for _ in range(2):
        integrations.accelerate.register()
    for cls in (optim.AdamW, optim.AdamW8bit):
        params = dict.fromkeys(numbers, "auto") | others | {"betas": [0.8, 0.95]}
        config = zero | {"optimizer": {"type": cls.__name__, "params": params}}
        engine, losses = under_deepspeed(here, lambda p: DummyOptim(p, **numbers), **config)
        assert type(engine.basic_optimizer) is cls
        group = engine.basic_optimizer.param_groups[0]
        assert {name: group[name] for name in numbers | others} == numbers | others
        options = numbers | others
        _, expected = under_deepspeed(here, lambda p, cls=cls, o=options: cls(p, **o), **zero)
        assert losses == expected
    for _ in range(2):
        integrations.accelerate.unregister()
    config["optimizer"]["type"] = "AdamW8bit"
    with pytest.raises(AssertionError, match="AdamW8bit is not a supported"):
        under_deepspeed(here, lambda p: DummyOptim(p, **numbers), **config)


def ours_stays_where_deepspeed_offloads(here):
    """And where DeepSpeed refuses it, that is an error, and no other optimizer."""
    from deepspeed.runtime.zero.utils import ZeRORuntimeException

    zero = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}
    flag = "zero_force_ds_cpu_optimizer"
    integrations.accelerate.register()
    engine, _ = under_deepspeed(here, optim.Lamb, **zero, **{flag: False})
    assert type(engine.basic_optimizer) is optim.Lamb
    with pytest.raises(ZeRORuntimeException, match=flag):
        under_deepspeed(here, optim.AdamW, **zero)
    integrations.accelerate.unregister()


WORKS = (a_configuration_of_deepspeed_selects_ours, ours_stays_where_deepspeed_offloads)


@pytest.fixture(scope="module")
def failures():
    need("deepspeed")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", "")  # Accelerate takes a GPU where there is one
        return two_processes.failures_by_name("gloo", WORKS, deepspeed_by_gloo)


@pytest.mark.parametrize("name", [work.__name__ for work in WORKS])
def test_under_deepspeed(failures, name):
    if name in failures:
        pytest.fail(failures[name], pytrace=False)
