"""Law: `python -m fusedstep memory` tells what a training run then needs."""

import json
import re
import shlex
import subprocess
import sys

import pytest
import torch

from fusedstep import __main__, optim
from fusedstep.memory import report
from fusedstep.memory.activations import trace
from fusedstep.memory.model import Model, load
from fusedstep.memory.plan import (
    MASTERS,
    STATE_DTYPES,
    Choice,
    Run,
    choices,
    need,
    parse,
    state_bytes,
)
from probes import memory_of_a_step as probe
from suites import small_gpt
from support.cases import CASES, COMPOSITES, DTYPES, LOW_PRECISION, PLAIN
from support.pages import ROOT
from support.stepping import CHUNK, as_parameters, make_gradients, make_weights

# Without dimensions, without elements, a small one, and some beyond the sizes of chunks and blocks.
SHAPES = tuple(map(torch.Size, ((), (0, 3), (33, 31), (CHUNK + 5,), (3, 70, 64))))


def accepted(case, dtype, masters="none"):
    """The row with each dtype of states that its class accepts, as the tool finds them."""
    options = {k: v for k, v in (case.options | case.modes).items() if v != float("inf")}
    return accepted_by(case.optimizer, options, dtype, masters)


def accepted_by(cls, options, dtype, masters):
    options = ",".join(f"{name}={value!r}" for name, value in options.items())
    return list(choices([f"{cls.__name__}:{options}"], [], Run(weights=dtype, masters=masters)))


def bytes_after_a_step(case, dtype, **options):
    params = as_parameters(make_weights(SHAPES, dtype))
    optimizer = case.build(params, **options)
    for param, gradient in zip(params, make_gradients(SHAPES, dtype, 1), strict=True):
        param.grad = gradient
    optimizer.step()
    assert optimizer._plans, "stepped in torch operations"
    return bytes_of_states(optimizer)


def bytes_of_states(optimizer):
    found = [value for state in optimizer.state.values() for value in state.values()]
    assert all(isinstance(value, torch.Tensor) for value in found)
    return sum(value.nbytes for value in found)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_states_are_as_many_bytes_as_a_step_makes(case, dtype):
    kinds = accepted(case, dtype)
    assert [choice.states for choice in kinds][:1] == ["default"]
    for choice in kinds:
        states, masters = state_bytes(SHAPES, dtype, choice)
        made = bytes_after_a_step(case, dtype, state_dtype=STATE_DTYPES[choice.states])
        assert (states, masters) == (made, 0), choice


@pytest.mark.parametrize(
    ("dtype", "kind", "bytes_each"),
    [
        *[(dtype, "float32", 4) for dtype in LOW_PRECISION],
        (torch.bfloat16, "split", 2),
    ],
    ids=str,
)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_master_weights_are_told_apart_from_states(case, dtype, kind, bytes_each):
    elements = sum(shape.numel() for shape in SHAPES)
    for choice in accepted(case, dtype, kind):
        states, masters = state_bytes(SHAPES, dtype, choice, kind)
        options = {"state_dtype": STATE_DTYPES[choice.states], "master_weights": MASTERS[kind]}
        assert masters == bytes_each * elements
        assert states + masters == bytes_after_a_step(case, dtype, **options), choice


@pytest.mark.parametrize(("rounding", "bytes_each"), [("kahan", 2), ("stochastic", 0)])
@pytest.mark.parametrize("case", PLAIN, ids=str)
def test_what_rounding_keeps_counts_as_masters(case, rounding, bytes_each):
    options = case.options | {"rounding": rounding}
    choice = Choice(case.optimizer.__name__, options, "default")
    states, masters = state_bytes(SHAPES, torch.bfloat16, choice)
    assert masters == bytes_each * sum(shape.numel() for shape in SHAPES)
    assert states + masters == bytes_after_a_step(case, torch.bfloat16, rounding=rounding)


#: Options of optimizers of matrices or of rows, which have no rows in the table.
WITHOUT_ROWS = (
    (optim.APOLLOAdamW, {}),
    (optim.APOLLOAdamW, {"rank": 20}),
    (optim.APOLLOAdamW, {"rank": 1, "scale_type": "tensor"}),
    (optim.Adafactor, {}),
    (optim.Adafactor, {"beta1": 0.9}),
    (optim.CAME, {}),
    (optim.GaLoreAdafactor, {"rank": 20}),
    (optim.GaLoreAdafactor, {"rank": 20, "beta1": 0.9, "proj_type": "full", "stagger": True}),
    (optim.GaLoreAdamW, {"rank": 20}),
    # The exact projections take most of a step.
    *(
        (optim.GaLoreAdamW, {"rank": 20, "proj_type": each, "svd": "randomized"})
        for each in ("right", "full")
    ),
    (optim.MuSGD, {}),
    (optim.MuSGD, {"momentum": 0.9}),
    (optim.Muon, {}),
    (optim.Muon, {"normuon": True}),
    (optim.RowWiseAdagrad, {}),
    (optim.SparseAdam, {}),
)

# A filter among them, and more or fewer rows than columns.
OF_MATRICES = tuple(map(torch.Size, ((250, 70), (40,), (70, 97), (64, 3, 50), (5000,), (23, 21))))


def bytes_after_steps_of(cls, options, dtype):
    params = as_parameters(make_weights(OF_MATRICES, dtype))
    optimizer = cls(cls._grouped(params), **options)
    for step in (1, 2):
        grads = make_gradients(OF_MATRICES, dtype, step)
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad.to_sparse(1) if cls is optim.SparseAdam else grad
        optimizer.step()
    return bytes_of_states(optimizer)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize(
    ("dtype", "masters"),
    [(torch.float32, "none"), *((torch.bfloat16, masters) for masters in MASTERS)],
    ids=str,
)
@pytest.mark.parametrize(("cls", "options"), WITHOUT_ROWS, ids=str)
def test_states_of_matrices_and_rows_are_told_before(cls, options, dtype, masters):
    try:
        kinds = accepted_by(cls, options, dtype, masters)
    except ValueError:
        assert masters != "none"
        with pytest.raises((TypeError, ValueError), match="master_weights"):
            cls([torch.ones(2)], master_weights=MASTERS[masters])
        return
    if issubclass(cls, (optim.GaLoreAdamW, optim.APOLLOAdamW, optim.Muon, optim.MuSGD)):
        assert [choice.states for choice in kinds][-3:] == ["int8", "int4", "fp8"]
    for choice in kinds:
        more = {"state_dtype": STATE_DTYPES[choice.states], "master_weights": MASTERS[masters]}
        more = {name: value for name, value in more.items() if value}
        told = state_bytes(OF_MATRICES, dtype, choice, masters)
        assert sum(told) == bytes_after_steps_of(cls, options | more, dtype), choice
        assert (told[1] > 0) == (masters != "none")


def test_every_optimizer_without_rows_is_told():
    assert {cls for cls, _ in WITHOUT_ROWS} == COMPOSITES.keys()


@pytest.mark.parametrize(
    ("optimizer", "states", "expected"),
    [
        ("GaLoreAdamW", "default", (128 * 48 * 8 + 48 * 96 * 4 + 4) + (40 * 8 + 4)),
        ("GaLoreAdamW", "int8", (128 * 48 * 2 + 24 * 8 + 48 * 96 * 4 + 4) + (40 * 8 + 4)),
        ("APOLLOAdamW", "int8", (128 * 48 * 2 + 24 * 8 + 2 * 4 + 4 + 4) + (40 * 8 + 4)),
        ("GaLoreAdafactor", "default", ((128 + 48) * 4 + 48 * 96 * 4 + 4) + (40 * 4 + 4)),
    ],
)
def test_states_of_low_rank(optimizer, states, expected):
    """Vectors are in a group without a rank."""
    name, options = parse(f"{optimizer}:rank=48")
    shapes = (torch.Size([128, 96]), torch.Size([40]))
    choice = Choice(name, options, states)
    assert state_bytes(shapes, torch.float32, choice) == (expected, 0)
    assert choice in list(choices([f"{optimizer}:rank=48"], [states], Run()))


def test_a_rank_is_of_matrices_that_are_larger():
    """Of both sides; an option of the optimizer's own comes before the run's."""
    texts = ["GaLoreAdamW", "APOLLOAdamW:rank=7", "AdamW", "GaLoreAdamW8bit"]
    found = list(choices(texts, ["default"], Run(rank=48)))
    ranks = [choice.options.get("rank") for choice in found]
    assert ranks == [48, 7, None, 48]
    small = tuple(map(torch.Size, ((48, 96), (96, 4, 3), (96,))))
    elements = sum(shape.numel() for shape in small)
    assert state_bytes(small, torch.float32, found[0]) == (8 * elements + 12, 0)


def test_what_an_optimizer_lacks_is_left_out():
    texts = ["Adafactor", "RowWiseAdagrad", "AdamW8bit", "AdamW"]
    left_out = []
    found = list(choices(texts, ["int8"], Run(weights=BF16, masters="split"), left_out))
    assert [choice.optimizer for choice in found] == ["AdamW8bit", "AdamW"]
    assert left_out == [
        "--optimizer Adafactor --states int8 --masters split: Adafactor lacks 'state_dtype'",
        "--optimizer RowWiseAdagrad --states int8 --masters split: "
        "RowWiseAdagrad lacks 'state_dtype'",
    ]
    # The option's own mistakes are errors.
    with pytest.raises(ValueError, match="--optimizer Adafactor:rank=2: Adafactor lacks 'rank'"):
        list(choices(["AdamW", "Adafactor:rank=2"], [], Run()))


def test_names_of_low_bits_are_optimizers_too():
    texts = ["adamw8bit:lr=0.1", "AdamW:state_dtype=int8"]
    found = list(choices(texts, [], Run()))
    assert found == [
        Choice("AdamW8bit", {"lr": 0.1}, "default"),
        Choice("AdamW", {"state_dtype": "int8"}, "default"),
    ]
    shapes = (torch.Size([64, 64]),)
    expected = state_bytes(shapes, torch.float32, Choice("AdamW", {}, "int8"))
    assert [state_bytes(shapes, torch.float32, each) for each in found] == [expected] * 2


def test_every_optimizer_is_compared():
    found = choices([], [], Run())
    assert [choice.optimizer for choice in found if choice.states == "default"] == optim.__all__
    assert {case.optimizer for case in PLAIN} | COMPOSITES.keys() == {
        getattr(optim, name) for name in optim.__all__
    }


BF16 = torch.bfloat16
N = 10 * 2**20
PLAIN_ADAMW = Choice("AdamW", {}, "default")


@pytest.mark.parametrize(
    ("choice", "run", "bytes_each"),
    [
        pytest.param(PLAIN_ADAMW, Run(), 16, id="AdamW"),
        pytest.param(PLAIN_ADAMW, Run(autocast=BF16), 18, id="mixed training"),
        pytest.param(
            PLAIN_ADAMW,
            Run(weights=BF16, masters="float32", gradients=torch.float32),
            18,
            id="mixed training with master weights",
        ),
        pytest.param(PLAIN_ADAMW, Run(weights=BF16, masters="float32"), 16, id="ZeRO's 16"),
        pytest.param(PLAIN_ADAMW, Run(autocast=BF16, inference=True), 6, id="inference"),
        pytest.param(Choice("Adan", {}, "default"), Run(), 24, id="24 n / 1048576 MB"),
        pytest.param(Choice("SGD", {"momentum": 0.9}, "default"), Run(), 12, id="SGD"),
        pytest.param(PLAIN_ADAMW, Run(zero=1, ranks=4), 10, id="ZeRO 1"),
        pytest.param(PLAIN_ADAMW, Run(zero=2, ranks=4), 7, id="ZeRO 2"),
        pytest.param(PLAIN_ADAMW, Run(zero=3, ranks=4), 4, id="ZeRO 3"),
    ],
)
def test_known_rules_are_special_cases(choice, run, bytes_each):
    """But for step counts, which are 4 bytes a tensor."""
    model = load(str(N))
    found = need(model, run, choice, None).total
    assert 0 <= found - bytes_each * N <= 4 * len(model.trained)


@pytest.mark.parametrize(
    ("optimizer", "states", "gigabytes"),
    [("AdamW", "default", 24), ("Adafactor", "default", 12), ("AdamW", "int8", 6)],
)
def test_states_of_t5_3b(optimizer, states, gigabytes):
    """The known figures of Hugging Face, to a tenth; Adafactor's is with a first moment."""
    options = {"beta1": 0.9} if optimizer == "Adafactor" else {}
    choice = Choice(optimizer, options, states)
    found = need(load("3B"), Run(), choice, None).states
    assert found == pytest.approx(gigabytes * 1e9, rel=0.1)


def test_frozen_weights_have_neither_gradients_nor_states():
    model = Model("", (torch.Size([100]),), frozen=1000, buffers=10)
    found = need(model, Run(), PLAIN_ADAMW, None)
    assert found == (4440, 0, 0, 804, 0, 400, 0)


LENGTH = 128
"""The sequences' length. A batch of eight then has more activations than the model weights."""


@pytest.fixture
def two_threads():
    """Attention on the CPU has a buffer for each thread, which is no part of the law."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("case", probe.CASES, ids=lambda case: case.name)
def test_a_training_step_peaks_at_the_total(case):
    said, found = probe.predicted(case, "tiny", LENGTH), probe.peak_on_cpu(case, "tiny", LENGTH)
    assert said == pytest.approx(found, rel=0.03)


def test_a_peak_that_is_told_wrong_is_seen():
    """The control: the peak without checkpointing is no peak with it."""
    case = probe.CASES[1]
    assert case.batch == 8
    said = probe.predicted(case, "tiny", LENGTH)
    found = probe.peak_on_cpu(case._replace(checkpointing=True), "tiny", LENGTH)
    assert said > 1.1 * found


def test_what_activations_depend_on():
    def highest(size=(2, 64), **options):
        return trace(small_gpt.tiny, size, **options).highest

    assert highest((4, 64)) > 1.9 * highest()
    assert highest(attention="eager") > highest()
    assert highest(dtype=BF16) < 0.6 * highest()
    assert highest(inference=True) < highest(checkpointing=True) < highest()


def test_nothing_is_left_behind_by_a_trace():
    state, own = torch.get_rng_state(), torch.nn.functional.scaled_dot_product_attention
    trace(small_gpt.tiny, (2, 64))
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.nn.functional.scaled_dot_product_attention is own
    assert type(small_gpt.tiny().norm.weight.data) is torch.Tensor


def convolution():
    return torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.Flatten(), torch.nn.Linear(8, 5)
    )


def adapter():
    model = torch.nn.Sequential(torch.nn.Linear(10, 10), torch.nn.Linear(10, 1))
    model[0].requires_grad_(False)
    return model


def converted():
    """A model that is converted as it is made, the second layer's weight the first one's."""
    model = torch.nn.Sequential(torch.nn.Linear(10, 10), torch.nn.Linear(10, 10)).double()
    model[1].weight = model[0].weight
    model[0].to(torch.float16)
    return model.float()


def test_a_factory_may_convert_its_model(monkeypatch):
    found = trace(converted, (8, 10), tokens=False)
    assert torch.nn.Module._apply.__module__ == "torch.nn.modules.module"
    # Gradients: of a weight that both layers share, and two biases.
    assert max(kept for _, kept in found.times) == 4 * (100 + 20)


def test_models_by_path():
    found = load(f"{__name__}:convolution")
    assert (found.parameters, found.buffers) == (3 * 8 * 9 + 8 + 16 + 45, 17)
    trace(found.make, (4, 3, 3, 3), tokens=False)
    found = load(f"{__name__}:adapter")
    assert (found.trained_elements, found.frozen) == (11, 110)
    # The first layer's result, which the last one keeps, the scores, and their gradient.
    assert trace(found.make, (8, 10), tokens=False).highest >= 8 * 10 * 4
    tied = load("suites.small_gpt:tiny")
    assert tied.parameters == sum(p.numel() for p in small_gpt.tiny().parameters())


@pytest.mark.parametrize(
    ("text", "count"),
    [("124M", 124_000_000), ("1.5B", 1_500_000_000), ("7e9", 7 * 10**9), ("1_000", 1000)],
)
def test_parameter_counts(text, count):
    assert load(text).parameters == count


def run(capsys, monkeypatch, *arguments):
    """Returns what the command prints."""
    monkeypatch.setattr(sys, "argv", ["fusedstep", "memory", *arguments])
    __main__.main()
    return capsys.readouterr().out


def test_short_names_of_dtypes(capsys, monkeypatch):
    options = ("--optimizer", "AdamW", "--json", "--states")
    short = ("fp32", "--weights", "bf16", "--gradients", "fp16", "--autocast", "fp16")
    long = ("float32", "--weights", "bfloat16", "--gradients", "float16", "--autocast", "float16")
    assert run(capsys, monkeypatch, "1M", *options, *short) == run(
        capsys, monkeypatch, "1M", *options, *long
    )


def test_json_has_every_choice_apart(capsys, monkeypatch):
    arguments = ("124M", "--weights", "bfloat16", "--ranks", "8", "--zero", "1")
    found = json.loads(run(capsys, monkeypatch, *arguments, "--json"))
    assert found["parameters"] == 124_000_000
    assert {each["optimizer"] for each in found["choices"]} == set(optim.__all__)
    for each in found["choices"]:
        parts = dict(each["bytes"])
        total = parts.pop("total")
        assert total == sum(parts.values())
        assert set(each["zero"]) == {"0", "2", "3"}
        assert each["zero"]["0"] >= total >= each["zero"]["2"] >= each["zero"]["3"]


def test_the_table_and_the_bars(capsys, monkeypatch):
    asked = ("--optimizer", "AdamW", "--optimizer", "sgd:momentum=0.9", "--optimizer", "Lion")
    text = run(capsys, monkeypatch, "1B", *asked, "--states", "default")
    head, *lines = text.splitlines()
    assert head == "1B: 1,000,000,000 parameters"
    assert re.search(r"^SGD:momentum=0.9, Lion +default .* 11\.18 GiB$", text, re.MULTILINE)
    assert re.search(r"^AdamW +default .* 14\.90 GiB$", text, re.MULTILINE)
    bars = [line for line in lines if "█" in line][:-1]
    assert len(bars) == 2


def test_the_activations_of_a_factory(capsys, monkeypatch):
    batch = ("--batch", "2", "--sequence", "256", "--json")
    batch += ("--optimizer", "AdamW", "--states", "default")
    found = json.loads(run(capsys, monkeypatch, "suites.small_gpt:tiny", *batch))
    assert found["choices"][0]["bytes"]["total"] == probe.predicted(probe.CASES[0], "tiny", 256)
    assert found["highest_activations"] > found["choices"][0]["bytes"]["activations"]


def test_a_plot_is_drawn(capsys, monkeypatch, tmp_path):
    pytest.importorskip("matplotlib")
    file = tmp_path / "memory.svg"
    run(capsys, monkeypatch, "1B", "--plot", str(file))
    assert file.read_text().count("<svg") == 1


def test_a_plot_needs_matplotlib(capsys, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    file = tmp_path / "memory.svg"
    with pytest.raises(SystemExit):
        run(capsys, monkeypatch, "1B", "--plot", str(file))
    assert "--plot needs matplotlib: pip install matplotlib" in capsys.readouterr().err
    assert not file.exists()


def test_a_config_needs_transformers(capsys, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "transformers", None)
    file = tmp_path / "config.json"
    file.write_text('{"model_type": "gpt2"}')
    with pytest.raises(SystemExit):
        run(capsys, monkeypatch, str(file))
    assert "needs transformers: pip install transformers" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ("none", "MODEL must be a parameter count (124M), a config.json or package.module:"),
        ("0", "MODEL must have a parameter or more"),
        ("no_such_module:factory", "MODEL no_such_module:factory cannot be imported"),
        ("suites.small_gpt:nothing", "MODEL suites.small_gpt:nothing cannot be imported"),
        ("math:tau", "MODEL math:tau is not callable"),
        (
            "builtins:dict",
            "MODEL builtins:dict cannot be made: it must be a torch.nn.Module, not dict",
        ),
        ("builtins:len", "MODEL builtins:len cannot be made: len() takes exactly one argument"),
        (
            "1B --optimizer Adman",
            "--optimizer Adman: no optimizer is named 'Adman': did you mean 'a",
        ),
        ("1B --optimizer PagedAdamW8bit", "--optimizer PagedAdamW8bit: no optimizer is named"),
        ("1B --optimizer AdamW:rounding=kahn", "--optimizer AdamW:rounding=kahn: rounding must be"),
        ("1B --optimizer SGD:momentum", "--optimizer SGD:momentum: write NAME:OPTION=VALUE"),
        ("1B --optimizer SGD:momentum=-1", "--optimizer SGD:momentum=-1: Inv"),
        ("1B --optimizer SGD:speed=1", "--optimizer SGD:speed=1: SGD lacks 'speed'"),
        ("1B --optimizer Adafactor --states int8", "Adafactor lacks 'state_dtype'"),
        ("1B --weights bf15", "--weights: must be one of float32 (fp32), "),
        ("1B --autocast fp32", "--autocast must be bfloat16 or float16, not float32"),
        ("1B --rank 0", "--rank: must be a number above 0"),
        ("1B --states int9", "--states"),
        ("1B --masters float32", "--masters needs --weights bfloat16 or float16"),
        ("1B --batch 2 --sequence 8", "--batch: a parameter count does not tell"),
        ("1B --sequence 8", "--sequence needs --batch"),
        ("1B --ranks 0", "--ranks: must be a number above 0"),
        ("1B --zero 1", "--zero needs --ranks"),
        ("1B --zero 4 --ranks 2", "--zero"),
        ("1B --fit much", "--fit: must be a size as 24GiB or 24GB, not 'much'"),
        ("1B --fit 24", "--fit: must be a size as 24GiB or 24GB, not '24'"),
        ("suites.small_gpt:tiny --batch 2", "--batch needs --sequence"),
        (
            "suites.small_gpt:tiny --batch 2 --sequence 257",
            "the activations of MODEL suites.small_gpt:tiny",
        ),
        ("suites.small_gpt:tiny --input 2x3x4x5", "the activations of MODEL suites.small_gpt:tiny"),
        ("test_memory_needs:adapter --input 2x1x10 --checkpointing", "has no ModuleList"),
    ],
)
def test_errors_name_the_argument(capsys, monkeypatch, arguments, error):
    with pytest.raises(SystemExit) as exit_:
        run(capsys, monkeypatch, *arguments.split())
    assert exit_.value.code == 2
    text = capsys.readouterr().err
    assert error in text
    assert text.startswith("python -m fusedstep memory: error: ")
    assert text.count("\n") == 1


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (150 * 2**20, "150 MiB"),
        (2**50, "1024 TiB"),
    ],
)
def test_sizes_are_short(number, text):
    assert report.size(number) == text


def test_the_page_shows_what_the_command_prints(subprocess_environment):
    page = (ROOT / "docs" / "training_memory.md").read_text()
    shown = re.findall(r"^```console\n\$ python (.*?)\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    assert shown
    for command, output in shown:
        result = subprocess.run(
            [sys.executable, *shlex.split(command)],
            env=subprocess_environment,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert result.returncode == 0, result.stderr
        assert result.stdout == output
