"""The benchmark of a small GPT in training: the model, the loop, checkpoints, the matrix."""

import dataclasses
import json
import math
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import nanonano_loop
import nanonano_matrix
import nanonano_meter
import nanonano_plot
import nanonano_settings
import nanonano_text
import nanonano_train
from harness.processes import WorkerError
from nanonano_loop import Run, train
from nanonano_model import GPT
from nanonano_settings import ATTENTION, Settings, SettingsError
from reports import nanogpt, page

FOLDER = Path(nanonano_train.__file__).resolve().parent
SIZES = {
    "n_layer": 1, "n_head": 2, "n_embd": 16, "block_size": 12, "batch_size": 3,
    "gradient_accumulation_steps": 2, "max_iters": 6, "warmup_iters": 2, "log_interval": 1,
    "learning_rate": 1e-2, "dtype": "float32", "device": "cpu",
}  # fmt: skip


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A folder with a short text."""
    folder = tmp_path_factory.mktemp("data")
    (folder / "shakespeare").mkdir()
    (folder / "shakespeare" / "input.txt").write_text("to be or not to be\n" * 30)
    return str(folder)


@pytest.fixture(scope="module")
def tiny(data, tmp_path_factory):
    return Settings(**SIZES, data=data, out_dir=str(tmp_path_factory.mktemp("out")))


# ---- The model and its text ----------------------------------------------------------------------


def test_the_file_beside_the_script_has_the_published_run():
    settings = nanonano_settings.read(FOLDER / "hyper_param.json")
    assert settings == Settings()
    with torch.device("meta"):
        model = GPT(settings, 65, "cpu")
    assert model.weights() == 12 * (12 * 768**2 + 2 * 768) + 768 + 65 * 768
    assert f"{model.weights() / 1e6:.2f}" == "85.00"
    assert not [name for name, _ in model.named_parameters() if name.endswith("bias")]
    assert (settings.batch_size, settings.gradient_accumulation_steps) == (6, 5)
    assert (settings.block_size, settings.max_iters, settings.weight_decay) == (1024, 500, 1e-2)


def test_tiny_shakespeare_has_its_published_sizes(monkeypatch):
    try:
        text = nanonano_text.read(nanonano_text.find())
    except FileNotFoundError:
        pytest.skip("there is no tiny Shakespeare here")
    assert (text.characters, text.symbols, len(text.train)) == (1_115_394, 65, 1_003_854)


def test_the_text_is_looked_for_where_it_is_named_and_nowhere_else(data, tmp_path, monkeypatch):
    monkeypatch.setenv("FUSEDSTEP_DATA", data)
    assert nanonano_text.find() == Path(data, "shakespeare", "input.txt")
    with pytest.raises(FileNotFoundError, match=f"^data: {tmp_path} has no shakespeare"):
        nanonano_text.find(str(tmp_path))
    monkeypatch.setenv("FUSEDSTEP_DATA", str(tmp_path))
    with pytest.raises(FileNotFoundError, match=r"^FUSEDSTEP_DATA: "):
        nanonano_text.find()


def loss_and_gradients(settings, tokens):
    torch.manual_seed(0)
    model = GPT(settings, 7, "cpu")
    loss = model(tokens[:, :-1], tokens[:, 1:])
    loss.backward()
    return [loss.detach(), *(weight.grad for weight in model.parameters())]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("attention", sorted({*ATTENTION} - {"math"}))
def test_all_attentions_compute_the_same(tiny, attention, bias):
    """Loss and gradients are those of the backend math, for whole sequences and shorter ones."""
    settings = dataclasses.replace(tiny, n_layer=2, bias=bias)
    for length in (13, 6):
        tokens = torch.randint(7, (2, length), generator=torch.Generator().manual_seed(length))
        wanted, found = (
            loss_and_gradients(dataclasses.replace(settings, attn_type=each), tokens)
            for each in ("math", attention)
        )
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


def test_the_model_is_the_formula_of_a_gpt(tiny):
    """Against torch's own encoder layer, which has another implementation of all parts."""
    settings = dataclasses.replace(tiny, attn_type="naive", bias=True)
    torch.manual_seed(0)
    model = GPT(settings, 7, "cpu")
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    layer = torch.nn.TransformerEncoderLayer(
        16, 2, 64, 0.0, "gelu", batch_first=True, norm_first=True
    )
    block = model.blocks[0]
    pairs = {
        layer.self_attn.in_proj_weight: block.attention.inputs.weight,
        layer.self_attn.in_proj_bias: block.attention.inputs.bias,
    }
    for theirs, ours in (
        (layer.self_attn.out_proj, block.attention.output), (layer.linear1, block.widen),
        (layer.linear2, block.narrow), (layer.norm1, block.norms[0]), (layer.norm2, block.norms[1]),
    ):  # fmt: skip
        pairs |= {theirs.weight: ours.weight, theirs.bias: ours.bias}
    with torch.no_grad():
        for theirs, ours in pairs.items():
            theirs.copy_(ours)
    tokens = torch.tensor([[0, 1, 2, 3, 4, 5], [6, 6, 0, 0, 1, 1]])
    inputs = tokens[:, :-1]
    x = model.tokens.weight[inputs] + model.places.weight[: inputs.shape[1]]
    x = layer(x, torch.ones(5, 5, dtype=torch.bool).triu(1))
    logits = torch.layer_norm(x, (16,), model.norm.weight, model.norm.bias) @ model.tokens.weight.T
    wanted = -logits.log_softmax(-1).gather(-1, tokens[:, 1:, None]).mean()
    torch.testing.assert_close(model(inputs, tokens[:, 1:]), wanted)


# ---- Settings ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"attn_type": "flash"}, "attn_type must be one of naive, math, .*'flash'"),
        ({"optimizer": "AdamW"}, "optimizer must be fusedstep:CLASS or torch:CLASS, not 'AdamW'"),
        ({"n_head": 5}, "n_embd must be a multiple of n_head: 768, 5"),
        ({"batch_size": 0}, "batch_size must be at least 1, not 0"),
        ({"n_layer": 2.0}, "n_layer must be a int, not 2.0"),
        ({"compile": 1}, "compile must be a bool, not 1"),
        ({"dropout": 1}, "dropout must be 0 or more and below 1, not 1"),
        ({"attention": "math"}, "attention is no setting: they are compile, attn_type"),
    ],
)
def test_a_wrong_setting_is_named(values, text, tmp_path):
    file = tmp_path / "hyper_param.json"
    file.write_text(json.dumps(values))
    with pytest.raises(SettingsError, match=f"^{file}: {text}"):
        nanonano_settings.read(file)


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"optimizer": "torch:Adamw"}, "optimizer: torch has no class 'Adamw'"),
        ({"optimizer_options": {"rank": 4}}, "optimizer_options: fusedstep:AdamW has no 'rank'"),
        ({"device": "abacus"}, "device: torch knows no 'abacus'"),
        ({"dropout": 0.1}, "dropout must be 0 with flash_attn on a CPU, whose kernel has none"),
        ({"block_size": 600}, "block_size must be below the 513 characters"),
    ],
)
def test_a_setting_that_cannot_be_met_is_named(tiny, values, text):
    with pytest.raises(SettingsError, match=f"^{text}"):
        Run(dataclasses.replace(tiny, **values))


def test_every_setting_is_a_flag():
    words = ["--attn-type", "math", "--n_layer", "3", "--compile", "--no-decay_lr", "--dropout"]
    words += ["0.5", "--optimizer_options", '{"eps": 1e-6}']
    assert nanonano_settings.given(nanonano_train.parse(words)) == {
        "attn_type": "math", "n_layer": 3, "compile": True, "decay_lr": False, "dropout": 0.5,
        "optimizer_options": {"eps": 1e-6},
    }  # fmt: skip
    shown = set(vars(nanonano_train.parse([f"--{name}=1" for name in ("seed", "n_head")])))
    assert {"seed", "n_head"} <= shown


def test_the_learning_rate_warms_up_and_falls_as_a_cosine():
    settings = Settings(learning_rate=1.0, min_lr=0.1, warmup_iters=4, max_iters=12)
    rates = [settings.learning_rate_at(i) for i in (0, 3, 4, 8, 12)]
    assert rates == pytest.approx([0.2, 0.8, 1.0, 0.55, 0.1])
    assert dataclasses.replace(settings, decay_lr=False).learning_rate_at(9) == 1.0


# ---- Training ------------------------------------------------------------------------------------


def by_hand(settings):
    """The losses of a training by torch's AdamW, with one batch in place of several pieces."""
    torch.manual_seed(settings.seed)
    text = nanonano_text.read(nanonano_text.find(settings.data))
    model = GPT(settings, text.symbols, "cpu")
    matrices, vectors = ([w for w in model.parameters() if (w.dim() > 1) == is_] for is_ in (1, 0))
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}],
        betas=(0.9, 0.95),
    )
    rates = [settings.learning_rate_at(i) for i in range(settings.max_iters)]
    losses, most = [], len(text.train) - settings.block_size
    for iteration, rate in enumerate(rates):
        for group in optimizer.param_groups:
            group["lr"] = rate
        starts = nanonano_text.starts(settings.seed, iteration, (6,), most).tolist()
        tokens = torch.stack([text.train[i : i + settings.block_size + 1] for i in starts])
        loss = model(tokens[:, :-1], tokens[:, 1:])
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return losses


@pytest.mark.parametrize("optimizer", ["fusedstep:AdamW", "torch:AdamW"])
def test_losses_are_those_of_a_loop_by_hand(tiny, optimizer):
    settings = dataclasses.replace(tiny, optimizer=optimizer, weight_decay=0.1)
    told = []
    figures = train(settings, lambda *event: told.append(event))
    assert figures["losses"] == pytest.approx(by_hand(settings), rel=1e-5)
    assert told == [(n + 1, loss) for n, loss in enumerate(figures["losses"])]
    assert figures["loss"] == figures["losses"][-1] < figures["losses"][0] - 0.2


def test_optimizers_have_the_settings_that_they_take(tiny):
    run = Run(dataclasses.replace(tiny, optimizer="fusedstep:Lamb", beta2=0.8))
    first, second = run.optimizer.param_groups
    assert (first["betas"], first["lr"], first["fused"]) == ((0.9, 0.8), 1e-2, True)
    assert (first["weight_decay"], second["weight_decay"]) == (1e-2, 0.0)
    assert {weight.dim() for weight in second["params"]} == {1}
    adan = Run(dataclasses.replace(tiny, optimizer="fusedstep:Adan")).optimizer
    assert adan.param_groups[0]["betas"] == (0.98, 0.92, 0.99)
    options = {"fused": False, "eps": 0.5}
    torchs = Run(dataclasses.replace(tiny, optimizer="torch:AdamW", optimizer_options=options))
    assert torchs.optimizer.param_groups[0]["eps"] == 0.5
    assert torchs.optimizer.param_groups[0]["fused"] is False


class Ticks(nanonano_meter.CpuMeter):
    """A clock that moves by a second at each look."""

    seconds = 0

    def mark(self):
        self.seconds += 1
        return self.seconds


def test_figures_follow_from_the_clock(tiny, monkeypatch):
    """An iteration looks at its beginning, before the step and after it; the first passes twice."""
    monkeypatch.setattr(nanonano_loop, "meter_of", lambda _: Ticks())
    figures = train(dataclasses.replace(tiny, max_iters=5))
    assert figures["first_ms"] == 1e3 * (2 + 4)
    assert figures["ms"] == 2e3
    assert figures["all_ms"] == 1e3 * (6 + 4 * 2) / 5
    assert (figures["optimizer_ms"], figures["share"]) == (1e3, 0.5)
    assert figures["iterations"] == 5
    assert "compile_ms" not in figures
    only = train(dataclasses.replace(tiny, max_iters=1))
    assert "ms" not in only
    assert only["first_ms"] == 6e3


def test_the_compiled_model_trains_as_the_other_in_one_graph(tiny, monkeypatch):
    compiled = []

    def compile_whole(model, **options):
        compiled.append(options)
        return real(model, fullgraph=True, **options)

    real = torch.compile
    monkeypatch.setattr(torch, "compile", compile_whole)
    for attention in ("naive", "flash_attn"):
        settings = dataclasses.replace(tiny, attn_type=attention, max_iters=3)
        wanted = train(settings)
        found = train(dataclasses.replace(settings, compile=True, compile_backend="aot_eager"))
        assert found["losses"] == pytest.approx(wanted["losses"], rel=1e-5)
        assert found["compile_ms"] > 0
    assert compiled == [{"backend": "aot_eager"}] * 2


def test_a_loss_that_is_not_finite_is_no_result(tiny):
    with pytest.raises(FloatingPointError, match=r"^the loss after 3 iterations is (nan|inf)"):
        train(dataclasses.replace(tiny, learning_rate=1e30, decay_lr=False, max_iters=3))


PEAKS = """
import json, re, torch
from pathlib import Path
from nanonano_meter import CpuMeter

def resident():
    return 1024 * int(re.search(r"VmRSS:\\s*(\\d+) kB", Path("/proc/self/status").read_text())[1])

meter, some = CpuMeter(), 1 << 26
before = meter.memory()["peak"]
filled = torch.ones((before - resident() + some) // 4)
full = meter.memory()["peak"]
del filled
print(json.dumps([before + some // 2, full, resident(), meter.memory()["peak"]]))
"""


def test_the_peak_is_that_of_the_process(repository):
    """It rises with memory that is used, and stays when that is freed."""
    done = in_python(repository, "-c", PEAKS)
    assert done.returncode == 0, done.stderr
    between, full, resident, peak = json.loads(done.stdout)
    assert full > between
    assert resident < between < peak


# ---- Checkpoints ---------------------------------------------------------------------------------

KILLED = """
import json, os, signal, sys
from nanonano_loop import train
from nanonano_settings import Settings

def tell(iteration, loss):
    if iteration == 5:
        os.kill(os.getpid(), signal.SIGKILL)

train(Settings(**json.loads(sys.argv[1])), tell)
"""


def in_python(repository, *words):
    path = [repository / name for name in ("python", "bench", "tests", "bench/nanogpt")]
    command = [sys.executable, *map(str, words)]
    env = {"PYTHONPATH": ":".join(map(str, path)), "OMP_NUM_THREADS": str(torch.get_num_threads())}
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False)


def test_a_run_that_was_killed_goes_on_with_the_same_losses(tiny, tmp_path, repository):
    """Dropout too, whose random numbers go on where they were."""
    settings = dataclasses.replace(
        tiny,
        attn_type="math",
        dropout=0.2,
        max_iters=9,
        checkpoint_interval=2,
        out_dir=str(tmp_path),
    )
    whole = train(dataclasses.replace(settings, checkpoint_interval=0))["losses"]
    done = in_python(repository, "-c", KILLED, json.dumps(dataclasses.asdict(settings)))
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert [file.name for file in tmp_path.iterdir()] == ["checkpoint.pt"]
    began = []
    figures = train(settings, lambda iteration, _: began.append(iteration), resume=True)
    assert began == [5, 6, 7, 8, 9]
    assert figures["losses"] == whole
    assert figures["iterations"] == 5


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("attention", ATTENTION)
def test_a_deterministic_run_on_a_gpu_goes_on_with_the_same_losses(tiny, attention, tmp_path):
    """In bfloat16, with kernels that add in another order at each run otherwise."""
    settings = dataclasses.replace(
        tiny,
        attn_type=attention,
        block_size=256,
        device="cuda",
        dtype="bfloat16",
        deterministic=True,
        checkpoint_interval=2,
        out_dir=str(tmp_path),
    )

    def interrupt(iteration, loss):
        if iteration == 5:
            raise KeyboardInterrupt

    whole = train(dataclasses.replace(settings, checkpoint_interval=0))["losses"]
    with pytest.raises(KeyboardInterrupt):
        train(settings, interrupt)
    figures = train(settings, resume=True)
    assert figures["iterations"] == 2
    assert figures["losses"] == whole


@pytest.mark.parametrize("wanted", [False, True])
def test_iterations_are_deterministic_as_the_settings_say(tiny, monkeypatch, wanted):
    iterate, modes = Run._iterate, []

    def watched(run, model):
        modes.append(torch.are_deterministic_algorithms_enabled())
        return iterate(run, model)

    monkeypatch.setattr(Run, "_iterate", watched)
    train(dataclasses.replace(tiny, max_iters=2, deterministic=wanted))
    assert modes == [wanted] * 2
    assert not torch.are_deterministic_algorithms_enabled()


def test_attention_by_math_keeps_the_dtype_of_its_inputs(tiny, monkeypatch):
    """No product of the attention is float32 under autocast, as none is with the other kernels."""
    dtypes, allowed = [], torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed
    before = allowed()

    class Products(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if function is torch.ops.aten.bmm.default:
                dtypes.extend(arg.dtype for arg in args)
            return function(*args, **kwargs or {})

    with Products():
        train(dataclasses.replace(tiny, attn_type="math", dtype="bfloat16", max_iters=1))
    assert dtypes
    assert set(dtypes) == {torch.bfloat16}
    assert allowed() == before


@pytest.mark.parametrize("interval", [0, 2])
def test_an_interrupted_script_says_whether_it_can_go_on(
    tiny, tmp_path, monkeypatch, capsys, interval
):
    """No loss is held back on a CPU: --log_interval is for GPUs."""
    iterate, shown = Run._iterate, []

    def interrupted(run, model):
        if run.iteration == 3:
            raise KeyboardInterrupt
        return iterate(run, model)

    class Bar(nanonano_train.tqdm):
        def update(self, n=1):
            shown.append(n)
            return super().update(n)

    values = dataclasses.asdict(tiny) | {"out_dir": str(tmp_path), "log_interval": 10}
    (tmp_path / "settings.json").write_text(json.dumps(values))
    words = ["--config", str(tmp_path / "settings.json"), f"--checkpoint_interval={interval}"]
    monkeypatch.setattr(Run, "_iterate", interrupted)
    monkeypatch.setattr(nanonano_train, "tqdm", Bar)
    with pytest.raises(SystemExit) as stop:
        nanonano_train.main(words)
    assert stop.value.code == 128 + signal.SIGINT
    assert shown == [1, 1, 1]
    *_, last = capsys.readouterr().err.splitlines()
    how = f": --resume goes on with {tmp_path / 'checkpoint.pt'}" if interval else ""
    assert last == f"nanonano_train.py: interrupted{how}"
    if interval:
        monkeypatch.setattr(Run, "_iterate", iterate)
        shown.clear()
        nanonano_train.main([*words, "--resume"])
        assert shown == [3, 1, 1, 1]
        assert "loss" in capsys.readouterr().out


def test_a_checkpoint_of_another_run_is_refused_before_anything_is_changed(tiny, tmp_path):
    run = Run(tiny)
    run.go(lambda *_: None)
    run.save(tmp_path / "checkpoint.pt")
    other = Run(dataclasses.replace(tiny, weight_decay=0.5))
    weight = other.model.tokens.weight.detach().clone()
    with pytest.raises(SettingsError, match=r"^weight_decay is 0.5, but .* has 0.01$"):
        other.load(tmp_path / "checkpoint.pt")
    assert other.iteration == 0
    assert torch.equal(other.model.tokens.weight, weight)
    again = Run(dataclasses.replace(tiny, attn_type="math", log_interval=3))
    again.load(tmp_path / "checkpoint.pt")
    assert again.iteration == tiny.max_iters


def test_a_checkpoint_that_cannot_be_written_leaves_the_last_one(tiny, tmp_path, monkeypatch):
    def full(content, file):
        file.write_text("half")
        raise OSError("no space")

    file = tmp_path / "checkpoint.pt"
    file.write_text("the last one")
    run = Run(tiny)
    run.go(lambda *_: None)
    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(OSError, match="no space"):
        run.save(file)
    assert [each.name for each in tmp_path.iterdir()] == ["checkpoint.pt"]
    assert file.read_text() == "the last one"


# ---- The scripts ---------------------------------------------------------------------------------


def test_the_script_runs_with_the_file_beside_it(tiny, tmp_path, repository):
    for file in FOLDER.glob("nanonano_*.py"):
        shutil.copy(file, tmp_path)
    values = {k: v for k, v in dataclasses.asdict(tiny).items() if k != "max_iters"}
    (tmp_path / "hyper_param.json").write_text(json.dumps(values | {"max_iters": 4}))
    wanted = tmp_path / "figures.json"
    done = in_python(
        repository, tmp_path / "nanonano_train.py", "--attn_type=math", "--json", wanted
    )
    assert done.returncode == 0, done.stderr
    assert re.search(r"math: 100%.* 4/4 .*loss=\d\.\d{4}", done.stderr)
    figures = json.loads(wanted.read_text())
    assert figures["kernel"] == "math"
    assert len(figures["losses"]) == 4
    lines = done.stdout.splitlines()
    assert lines[0].endswith(f"M weights, float32, loss {figures['loss']:.4f}")
    assert re.fullmatch(
        r"later ones: [\d.,]+ ms, of which the optimizer takes [\d.]+ ms \([\d.]+ %\)", lines[2]
    )
    assert lines[-1] == f"peak of memory: {figures['peak'] / 2**20:,.0f} MiB"


@pytest.fixture
def here(monkeypatch, tmp_path):
    """Trains in this process what the matrix asks for, and writes below a folder of the test."""

    def in_this_process(settings, env):
        if settings.optimizer == "torch:SGD":
            raise WorkerError("ended with status 1: no memory")
        events = []
        figures = train(settings, lambda n, loss: events.append({"iteration": n, "loss": loss}))
        yield from events
        yield {"figures": figures}

    monkeypatch.setattr(nanonano_matrix, "in_a_process", in_this_process)
    monkeypatch.setattr(nanonano_matrix, "environments", lambda names: ({names[0]: {}}, []))
    return tmp_path


def smallest(data):
    values = SIZES | {"max_iters": 2, "data": data, "compile_backend": "eager"}
    return [f"--{name}={value}" for name, value in values.items()]


def test_a_matrix_has_all_eight_runs(here, data, capsys):
    copy, here = here / "all.json", here / "results"
    words = ["--preset", "cpu", *smallest(data), "--output", str(here), "--json", str(copy)]
    nanonano_matrix.main(words)
    results = json.loads((here / "nanogpt.json").read_text())
    assert json.loads(copy.read_text()) == results
    rows = [(row["attn_type"], row["compile"]) for row in results["rows"]]
    assert rows == [(attention, compiled) for attention in ATTENTION for compiled in (False, True)]
    kernels = ["none", "math", "flash_attention", "flash_attention"]
    assert [row["kernel"] for row in results["rows"][::2]] == kernels
    assert results["settings"]["n_embd"] == 16
    assert not {"data", "optimizer"} & results["settings"].keys()
    losses = [row["loss"] for row in results["rows"]]
    assert losses == pytest.approx(losses[:1] * 8, rel=1e-3)
    text = (here / "README.md").read_text()
    assert text == page.page(here)
    assert "| efficient_attn | flash_attention | yes | " in text
    assert "`./run.sh nanogpt --preset cpu --optimizer fusedstep:AdamW`" in text
    assert "(nanogpt-iterations.svg)" in text
    assert "- torch.compile by eager, which makes no kernels." in text
    results["settings"]["compile_backend"] = "inductor"
    assert not [line for line in nanogpt.remarks(results) if "torch.compile" in line]
    out = capsys.readouterr()
    assert "efficient_attn" in out.out
    assert re.search(r"efficient_attn/compiled: 100%.* 16/16 .*loss=\d", out.err)


def test_the_preset_of_a_cpu_trains_as_it_is(here, data, capsys):
    """One of its eight runs, at its own sizes."""
    words = ["flash_attn/compiled", "--preset=cpu", "--data", data, "--output", str(here)]
    nanonano_matrix.main(words)
    (row,) = json.loads((here / "nanogpt.json").read_text())["rows"]
    losses = [loss for _, loss in row["losses"]]
    assert len(losses) == nanonano_matrix.PRESETS["cpu"]["max_iters"]
    assert losses[0] == pytest.approx(math.log(len(set("to be or not to be\n"))), abs=0.3)
    assert row["loss"] < losses[0] - 0.5
    capsys.readouterr()


def test_what_fails_is_told_and_the_others_are_compared(here, data, capsys):
    words = ["naive$", *smallest(data), "--output", str(here), "--preset=cpu"]
    words += [f"--optimizer={name}" for name in ("torch:AdamW", "torch:SGD", "fusedstep:AdamW")]
    with pytest.raises(SystemExit, match="1"):
        nanonano_matrix.main(words)
    results = json.loads((here / "nanogpt.json").read_text())
    assert [row["name"] for row in results["rows"]] == [f"{word[12:]}/naive" for word in words[-3:]]
    page = (here / "README.md").read_text()
    assert "- Not measured: torch:SGD, naive: ended with status 1: no memory." in page
    assert "| naive | failed | no |" in page
    assert "median over the rows of all: torch:AdamW " in page
    assert set(nanogpt.shares(results)) == {"torch:AdamW", "fusedstep:AdamW"}
    assert set(nanonano_plot.series_of(results)) == {"torch:AdamW", "fusedstep:AdamW"}
    capsys.readouterr()


def test_a_run_of_the_matrix_is_a_process(tiny, monkeypatch, repository, tmp_path):
    """Its events come as they happen; a bad setting is the reason of its end."""
    monkeypatch.setattr(nanonano_matrix, "ROOT", tmp_path)
    env = {"PYTHONPATH": str(repository / "python")}
    told = []
    settings = dataclasses.replace(tiny, max_iters=3)
    row = nanonano_matrix.measured(settings, env, lambda *event: told.append(event))
    assert [n for n, _ in told] == [1, 2, 3]
    assert row["losses"] == [list(event) for event in told]
    assert row["peak"] > 2**20
    (log,) = (tmp_path / "build" / "logs" / "nanogpt").iterdir()
    assert log.name == "fusedstep:AdamW-flash_attn.log"


def test_losses_for_the_plot_end_with_the_last_one():
    for count in (1, 49, 50, 51, 500):
        losses = [float(n) for n in range(1, count + 1)]
        found = nanonano_matrix.thinned(losses)
        assert len(found) <= nanonano_matrix.POINTS
        assert found[-1] == [count, count]
        assert all(n == loss for n, loss in found)
        assert len(found) == math.ceil(count / math.ceil(count / 50))


def test_the_preset_of_a_cpu_compiles_without_a_compiler_unless_it_is_asked_for():
    """Inductor's takes minutes."""
    for words, backend in (([], "aot_eager"), (["--compile_backend=inductor"], "inductor")):
        arguments = nanonano_matrix.parse(["--preset", "cpu", *words])
        runs = nanonano_matrix.settings_of(arguments)
        assert [run.compile_backend for run in runs] == [backend] * 8


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["nothing"], "no run is named like 'nothing'"),
        (["--n_head=3"], "n_embd must be a multiple of n_head: 256, 3"),
        (["--optimizer=AdamW"], "optimizer must be fusedstep:CLASS or torch:CLASS"),
    ],
)
def test_a_matrix_that_cannot_be_run_says_why(words, text):
    with pytest.raises(SystemExit, match=f"^nanogpt: {text}"):
        nanonano_matrix.main(["--preset", "cpu", *words])
