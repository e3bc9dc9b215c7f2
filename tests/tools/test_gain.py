"""Law: `python -m fusedstep gain` and `compare` time what they say, and leave the run alone."""

import json
import math
import sys

import pytest
import torch

import fusedstep
from fusedstep import __main__, optim
from fusedstep.gain import FORMULA, OURS, Gain, time_steps, torch_class, ways_of
from support.cases import PLAIN
from support.stepping import assert_same_bits

SHAPES = ((4, 3), (5,))


def gain(capsys, monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["fusedstep", "gain", *arguments])
    __main__.main()
    return capsys.readouterr().out


def parameters(with_gradients=True):
    torch.manual_seed(0)
    found = [torch.nn.Parameter(torch.randn(shape)) for shape in SHAPES]
    for param in found if with_gradients else ():
        param.grad = torch.randn_like(param)
    return found


@pytest.mark.parametrize("case", PLAIN, ids=str)
def test_a_class_is_compared_with_torchs_of_its_name(case):
    cls = torch_class(case.optimizer)
    assert cls is getattr(torch.optim, case.optimizer.__name__, None)
    found = ways_of(case.optimizer, parameters, {"lr": 1e-3})
    assert type(found.pop(OURS)) is case.optimizer
    if cls is None:
        assert list(found) == [FORMULA]
        return
    assert {type(each) for each in found.values()} == {cls}
    for name, other in found.items():
        (group,) = other.param_groups
        assert group["lr"] == 1e-3
        if "foreach" not in group:
            assert list(found) == ["for-loop"]
            continue
        assert bool(group.get("fused")) == (name == "fused")
        assert bool(group["foreach"]) == (name == "foreach")
    assert time_steps(found, 1).keys() == found.keys()


def test_low_bits_have_the_class_of_their_base():
    assert torch_class(optim.AdamW8bit) is torch.optim.AdamW
    assert torch_class(optim.Lamb8bit) is None


@pytest.mark.parametrize("has_gradients", [True, False])
@pytest.mark.parametrize("case", PLAIN, ids=str)
def test_a_run_that_is_compared_is_left_alone(case, has_gradients, capsys):
    params = parameters()
    optimizer = case.build(params)
    optimizer.step()
    for param in params if not has_gradients else ():
        param.grad = None
    calls = []
    optimizer.register_step_post_hook(lambda *_: calls.append(1))
    before = [param.detach().clone() for param in params]
    states = [dict(optimizer.state[param]) for param in params]
    generator, groups = torch.get_rng_state(), [dict(group) for group in optimizer.param_groups]
    found = fusedstep.compare(optimizer, rounds=1)
    assert capsys.readouterr().out == f"{found}\n"
    assert found.optimizer == case.optimizer.__name__
    assert not calls
    assert [dict(group) for group in optimizer.param_groups] == groups
    assert torch.equal(torch.get_rng_state(), generator)
    for param, weight, state in zip(params, before, states, strict=True):
        assert_same_bits(param, weight, "weight")
        assert (param.grad is not None) == has_gradients
        assert all(optimizer.state[param][name] is value for name, value in state.items())


def test_weights_that_torchs_class_does_not_take_are_compared_with_the_formula():
    """Torch's Muon takes matrices alone."""
    params = parameters()
    optimizer = optim.Muon(optim.Muon._grouped(params))
    assert list(fusedstep.compare(optimizer, rounds=1).ms) == [OURS, FORMULA]
    found = ways_of(optim.Muon, lambda: optim.Muon._grouped(parameters()), {})
    assert list(found) == [OURS, FORMULA]
    gain = fusedstep.compare(optim.Muon(parameters()[:1]), rounds=1)
    assert (list(gain.ms), gain.notes) == ([OURS, "for-loop"], ())


@pytest.mark.parametrize("options", [{"fused": False}, {"foreach": True}], ids=str)
def test_a_step_in_torch_operations_is_told(options, capsys):
    assert fusedstep.compare(optim.AdamW(parameters()), rounds=1).notes == ()
    (name, value), *_ = options.items()
    found = fusedstep.compare(optim.AdamW(parameters(), **options), rounds=1)
    assert found.notes == (f"Torch operations step group 0: {name}={value}.",)
    assert capsys.readouterr().out.endswith(f"{found.notes[0]}\n")


KEPT = [
    (optim.AdamW8bit, {}, "states in int8, torch's fused states in the weights' dtype"),
    (optim.Lamb8bit, {}, "states in int8, the formula states in float32"),
    (
        optim.AdamW,
        {"master_weights": "split"},
        "states in the weights' dtype and master_weights='split', torch's fused states in the",
    ),
    (optim.AdamW, {"state_dtype": torch.float32}, "states in float32, torch's fused states in"),
]


@pytest.mark.parametrize(("cls", "options", "text"), KEPT, ids=[row[2] for row in KEPT])
def test_states_in_another_form_are_told(cls, options, text):
    param = torch.nn.Parameter(torch.ones(64, 64, dtype=torch.bfloat16))
    (note,) = fusedstep.compare(cls([param], **options), rounds=1).notes
    assert note.startswith(f"fusedstep has {text}")


def test_weights_that_torchs_fused_step_refuses_are_compared_with_foreach():
    param = torch.nn.Parameter(torch.ones(3, dtype=torch.complex64))
    found = fusedstep.compare(optim.AdamW([param]), rounds=1)
    assert list(found.ms) == [OURS, "foreach"]
    assert "complex64" in found.notes[0]


def test_the_command_tells_the_same(capsys, monkeypatch):
    asked = ("1K", "--rounds", "1", "--device", "cpu", "--optimizer", "AdamW8bit", "--json")
    notes = json.loads(gain(capsys, monkeypatch, *asked))["notes"]
    assert len(notes) == 3  # of torch's fused, foreach and for-loop
    assert all(note.startswith("fusedstep has states in int8, torch's ") for note in notes)


def test_what_compare_does_not_take():
    with pytest.raises(TypeError, match=r"one of fusedstep\.optim"):
        fusedstep.compare(torch.optim.AdamW(parameters()))
    with pytest.raises(TypeError, match=r"call this before offload\(\)"):
        fusedstep.compare(fusedstep.offload(optim.AdamW(parameters())))
    optimizer = optim.AdamW(parameters())
    for name in ("rounds", "iteration_ms"):
        with pytest.raises(ValueError, match=f"Invalid {name} value: 0"):
            fusedstep.compare(optimizer, **{name: 0})


@pytest.mark.parametrize(
    ("ms", "iteration_ms", "sentence"),
    [
        ({"fused": 5.0, "foreach": 9.0}, 240, "becomes 1.2 % faster than by torch's fused: you co"),
        ({"fused": 9.0, "foreach": 5.0}, 30, "becomes 10.0 % faster than by torch's foreach."),
        ({"fused": 2.0}, 240, "becomes no faster than by torch's fused: you come for memory."),
        ({"fused": 1.0}, 240, "becomes 0.4 % slower than by torch's fused: you come for memory."),
        ({"formula": 5.0}, None, "A step takes 3.000 ms less than by the formula in torch op"),
        ({"foreach": 1.5}, None, "A step takes 0.500 ms more than by torch's foreach."),
    ],
)
def test_the_sentence(ms, iteration_ms, sentence):
    assert sentence in str(Gain("AdamW", {"fusedstep": 2.0} | ms, iteration_ms))


def test_the_command_has_all_parts(capsys, monkeypatch):
    asked = ("20K", "--rounds", "1", "--device", "cpu", "--weights", "bf16")
    found = json.loads(gain(capsys, monkeypatch, *asked, "--iteration-ms", "217", "--json"))
    assert list(found["ms"]) == ["fusedstep", "fused", "foreach", "for-loop"]
    assert found["share"] == pytest.approx(found["saved_ms"] / 217)
    text = gain(capsys, monkeypatch, *asked)
    assert text.startswith("20K: 20,000 parameters, bfloat16, on the CPU with")
    assert "Give --iteration-ms" in text


def test_iterations_of_a_model_are_timed(capsys, monkeypatch):
    asked = ("suites.small_gpt:tiny", "--rounds", "1", "--device", "cpu", "--batch", "1")
    text = gain(capsys, monkeypatch, *asked, "--sequence", "8", "--optimizer", "SGD:momentum=0.9")
    assert "A training becomes" in text
    assert "An iteration took" in text


def test_steps_of_many_weights_are_timed_on_a_part(capsys, monkeypatch):
    monkeypatch.setattr("fusedstep.memory.gain._ELEMENTS", 30_000)
    asked = ("1M", "--rounds", "1", "--device", "cpu", "--json", "--optimizer", "Lion")
    found = json.loads(gain(capsys, monkeypatch, *asked))
    assert 1_000_000 / 70_000 < found["multiplied_by"] < 1_000_000 / 4_000
    assert list(found["ms"]) == ["fusedstep", "formula"]


def test_slow_steps_are_timed_less_often(monkeypatch):
    """After the seconds there are, but once at least."""
    clock = iter(range(1000))  # each look at it takes a second
    monkeypatch.setattr("fusedstep.gain.time.perf_counter", lambda: next(clock))
    for seconds, rounds in ((math.inf, 7), (0, 3), (12, 4)):
        told = []
        params = [torch.nn.Parameter(torch.ones(3))]
        timed = {name: optim.SGD(params) for name in (OURS, FORMULA)}
        time_steps(timed, 5, lambda done, of, told=told: told.append((done, of)), seconds)
        assert told == [(done, 7) for done in range(1, rounds + 1)]


def test_a_plot_is_drawn(capsys, monkeypatch, tmp_path):
    pytest.importorskip("matplotlib")
    file = tmp_path / "gain.svg"
    gain(capsys, monkeypatch, "10K", "--rounds", "1", "--device", "cpu", "--plot", str(file))
    assert file.read_text().count("<svg") == 1


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ("1K --optimizer AdamV", "no optimizer is named 'AdamV'"),
        ("1K --optimizer AdamW:speed=1", "--optimizer AdamW:speed=1: "),
        ("1K --iteration-ms 0", "--iteration-ms must be above 0, not 0"),
        ("1K --batch 2", "--batch: a parameter count has no iterations: give --iteration-ms"),
        ("1K --device nowhere", "--device nowhere: "),
        ("1K --weights bf15", "--weights: must be one of float32 (fp32)"),
        (
            "suites.small_gpt:tiny --batch 1 --sequence 300 --rounds 1 --device cpu",
            "an iteration of MODEL suites.small_gpt:tiny cannot be timed: ",
        ),
    ],
)
def test_errors_name_the_argument(capsys, monkeypatch, arguments, error):
    with pytest.raises(SystemExit):
        gain(capsys, monkeypatch, *arguments.split())
    text = capsys.readouterr().err
    assert error in text
    assert text.startswith("python -m fusedstep gain: error: ")


def test_every_command_is_in_the_help(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["fusedstep", "--help"])
    with pytest.raises(SystemExit):
        __main__.main()
    text = capsys.readouterr().out
    for command in ("doctor", "memory", "gain", "python -m fusedstep.galore"):
        assert command in text
