"""The recipes run and train; tests/frameworks has those inside of a framework."""

import gc
import io
import itertools
import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader

import fusedstep
from support import recipes
from support.pages import ROOT

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

PLAIN = ("mixed_precision", "bf16_split", "checkpointing", "int8_states", "accumulation")
PAGE = ROOT / "docs" / "recipes.md"


def test_every_recipe_is_on_the_page_and_run_by_a_test():
    paths = re.findall(r"examples/recipes/(\w+)\.py", PAGE.read_text())
    assert sorted(set(paths)) == sorted([*recipes.NAMES, "recipe"])
    sources = (ROOT / "tests").rglob("test_*.py")
    tests = "".join(path.read_text() for path in sources)
    missing = [name for name in recipes.NAMES if f'"{name}"' not in tests]
    assert missing == []


@pytest.fixture(scope="module")
def first_losses():
    """Those of the recipe whose steps are plain AdamW's."""
    run = recipes.run("checkpointing", "--steps", "3", "--batch", "4")
    return torch.tensor([float(each) for each in run.losses])


@pytest.mark.parametrize("name", PLAIN)
def test_recipe(capsys, first_losses, name):
    """All train one model on the same data: in float32 to the same losses, or nearly so."""
    losses = recipes.assert_trains(capsys, name, "--batch", "4")
    expected = {"mixed_precision": 0.02, "bf16_split": 0.05, "int8_states": 0.02}
    torch.testing.assert_close(losses[:3], first_losses, rtol=0, atol=expected.get(name, 1e-4))


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize(
    ("on", "quiet"), [(Terminal, False), (Terminal, True), (io.StringIO, False)]
)
def test_a_terminal_shows_how_far_a_long_run_is(on, quiet, monkeypatch, capsys):
    """By a clock that goes on by 0.2 s whenever it is read."""
    monkeypatch.syspath_prepend(str(recipes.FOLDER))
    import recipe

    ticks = itertools.count()
    monkeypatch.setattr(recipe.time, "perf_counter", lambda: 0.2 * next(ticks))
    monkeypatch.setattr(sys, "stderr", on())
    with recipe.Run("cpu", 20, quiet=quiet) as run:
        for step in range(20):
            run.add(torch.tensor(1 / (1 + step)), 4)
        shown = sys.stderr.getvalue().split("\r\033[K")
    if quiet or on is io.StringIO:
        assert shown == [""]
        assert sys.stderr.getvalue() == ""
    else:
        # The clock is read once at the start, once by a step, and once more where a line is shown.
        assert shown == ["", *(f"step {n} of 20, loss {1 / n:.3f}" for n in (11, 14, 17, 20))]
        assert sys.stderr.getvalue().endswith("\r\033[K")
    assert (capsys.readouterr().out == "") == quiet


def test_numbers_of_steps_below_one_are_refused(capsys):
    with pytest.raises(SystemExit):
        recipes.run("checkpointing", "--steps", "0")
    assert "argument --steps: must be at least 1: 0" in capsys.readouterr().err


def test_a_run_that_has_all_its_steps_says_how_to_go_on(capsys, tmp_path):
    options = ("--batch", "2", "--every", "2", "--folder", str(tmp_path))
    recipes.run("resume", "--steps", "2", *options)
    capsys.readouterr()
    assert recipes.run("resume", "--steps", "2", *options) is None
    assert capsys.readouterr().out == f"{tmp_path} has 2 steps: --steps 4 would go on\n"
    assert len(recipes.run("resume", "--steps", "4", *options).losses) == 2


def test_lamb_with_warmup(capsys):
    recipes.assert_trains(capsys, "lamb_warmup", "--batch", "16", steps=20)


@pytest.mark.parametrize("name", ["muon", "adafactor"])
def test_of_other_optimizers(capsys, name):
    recipes.assert_trains(capsys, name, "--batch", "8", steps=20)


def muon_of_two_processes(device, *options):
    """Runs the recipe by torchrun, and returns what it has printed."""
    python = [str(Path(fusedstep.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    recipe = [str(recipes.FOLDER / "muon_fsdp2.py"), "--device", device]
    environment = {
        "PYTHONPATH": os.pathsep.join(python),
        "FUSEDSTEP_DATA": "nowhere",
        "NCCL_NVLS_ENABLE": "0",  # NVLink multicast: nothing for tests to set up
    }
    run = subprocess.run(
        [*torchrun, "--nproc-per-node", "2", *recipe, *options],
        env=os.environ | environment,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    return run.stdout


@pytest.mark.parametrize(
    "device",
    [
        "cpu",
        pytest.param(
            "cuda",
            marks=pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
        ),
    ],
)
def test_muon_on_fsdp2_goes_on_with_another_number_of_processes(device, tmp_path):
    options = ("--batch", "4", "--every", "6")
    folders = [str(tmp_path / name) for name in ("two", "one")]
    found = muon_of_two_processes(device, *options, "--steps", "6", "--folder", folders[0])
    assert re.fullmatch(recipes.CLOSING_LINE, found.strip())
    metadata = FileSystemReader(tmp_path / "two" / "step-00000006").read_metadata()
    states = [name.split(".")[-1] for name in metadata.state_dict_metadata]
    assert states.count("momentum_buffer") == states.count("momentum_buffer_absmax") == 8

    options = ("--steps", "12", *options)
    resumed, whole = (
        recipes.run("muon_fsdp2", *options, "--folder", folder, device=device).losses
        for folder in folders
    )
    assert [len(losses) for losses in (resumed, whole)] == [6, 12]
    whole = torch.tensor([float(loss) for loss in whole])
    assert whole[-3:].mean() < whole[:3].mean() - 0.1
    torch.testing.assert_close(
        torch.tensor([float(loss) for loss in resumed]), whole[6:], rtol=0.01, atol=0
    )


def test_offload_says_that_it_needs_a_gpu(capsys):
    assert recipes.run("offload") is None
    assert capsys.readouterr().out.startswith("skipped: ")


#: Recipes of no framework: options, and steps after which the loss has fallen.
ON_A_GPU = {
    **dict.fromkeys(PLAIN, ((), 12)),
    **dict.fromkeys(("muon", "adafactor", "offload", "galore_in_backward"), ((), 20)),
    "lamb_warmup": (("--batch", "16"), 20),
    "recommender": (("--batch", "256"), 60),
}


@needs_gpu
@pytest.mark.parametrize("name", ON_A_GPU)
def test_recipe_on_a_gpu(capsys, name):
    options, steps = ON_A_GPU[name]
    recipes.assert_trains(capsys, name, *options, steps=steps, device="cuda")


@needs_gpu
def test_mixed_precision_scales_on_a_gpu(capsys, monkeypatch):
    """Gradients of float16: the scaler hands its scale to the step, which takes no bad one."""
    scalers = []

    class Scaler(torch.amp.GradScaler):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            scalers.append(self)

    monkeypatch.setattr(torch.amp, "GradScaler", Scaler)
    recipes.assert_trains(capsys, "mixed_precision", steps=12, device="cuda")
    (scaler,) = scalers
    assert scaler.is_enabled()
    assert scaler.get_scale() > 1


@needs_gpu
def test_a_run_on_a_gpu_goes_on(tmp_path):
    options = ("--batch", "2", "--every", "2", "--folder", str(tmp_path))
    for steps in ("2", "4"):
        run = recipes.run("resume", "--steps", steps, *options, device="cuda")
        assert len(run.losses) == 2


@needs_gpu
def test_ladder_on_a_gpu():
    """The memory of the device is less where a batch is taken in parts."""
    small = ("--width", "64", "--layers", "2", "--length", "32", "--steps", "2")
    memory = {
        rung: found[1] for rung, found in recipes.run("ladder", *small, device="cuda").items()
    }
    assert memory["baseline"] > memory["accumulation"]


def test_galore_in_backward(capsys):
    recipes.assert_trains(capsys, "galore_in_backward", steps=20)


@pytest.mark.parametrize("table", ["rowwise", "adagrad", "adam"])
def test_recommender(capsys, table):
    recipes.assert_trains(capsys, "recommender", "--batch", "256", "--table", table, steps=60)


def test_ladder(capsys, tmp_path):
    file = tmp_path / "ladder.json"
    small = (
        "--width",
        "64",
        "--layers",
        "2",
        "--length",
        "32",
        "--steps",
        "2",
        "--json",
        str(file),
    )
    rungs = recipes.run("ladder", *small)
    table = capsys.readouterr().out.splitlines()
    assert len(table) == 2 + len(rungs)
    rows = json.loads(file.read_text())["rows"]
    assert {row["rung"]: (row["samples_s"], row["bytes"], row["loss"]) for row in rows} == rungs
    for line, (name, (speed, memory, loss)) in zip(table[2:], rungs.items(), strict=True):
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        assert cells == [name, f"{speed:,.1f}", f"{memory / 2**20:,.1f}", f"{loss:.4f}"]
        assert speed > 0
    _, memory, losses = ({n: r[i] for n, r in rungs.items()} for i in range(3))
    assert memory["baseline"] > memory["accumulation"] > memory["all"] > memory["all, int8"]
    assert memory["baseline"] > memory["checkpointing"] > memory["all"]
    assert memory["baseline"] > memory["bf16"] > memory["all"]
    assert losses["accumulation"] == pytest.approx(losses["baseline"], rel=1e-5)
    assert losses["checkpointing"] == losses["baseline"]
    assert losses["all, int8"] == pytest.approx(losses["baseline"], rel=2e-2)


def test_a_peak_of_the_ladder_is_that_of_its_call(monkeypatch):
    """Not less what another call has left, which Python gives back at any time."""
    monkeypatch.syspath_prepend(str(recipes.FOLDER))
    peak = runpy.run_path(str(recipes.FOLDER / "ladder.py"))["peak"]

    def leaves_a_cycle():
        cycle = [torch.ones(1 << 20)]
        cycle.append(cycle)

    def collects():
        gc.collect()
        torch.ones(1 << 18)

    def gives_back():
        torch.ones(1 << 20)
        torch.ones(1 << 18)

    assert peak(leaves_a_cycle, "cpu") >= 4 << 20
    assert peak(collects, "cpu") >= 4 << 18
    # Neither the sum nor what was there at last.
    assert 4 << 20 <= peak(gives_back, "cpu") < 5 << 20


def test_the_data_of_a_folder_is_found(tmp_path, monkeypatch):
    (tmp_path / "shakespeare").mkdir()
    (tmp_path / "shakespeare" / "input.txt").write_text("abcab")
    monkeypatch.syspath_prepend(str(recipes.FOLDER))
    monkeypatch.setenv("FUSEDSTEP_DATA", str(tmp_path))
    monkeypatch.delitem(sys.modules, "recipe", raising=False)  # of another test, with its own data
    import recipe

    try:
        tokens, symbols = recipe.encoded()
    finally:
        del sys.modules["recipe"]
    assert (tokens.tolist(), symbols) == ([0, 1, 2, 0, 1], 3)


def test_as_it_is_typed(tmp_path):
    package = str(Path(fusedstep.__file__).parents[1])
    run = subprocess.run(
        [sys.executable, str(recipes.FOLDER / "bf16_split.py"), "--steps", "2", "--batch", "2"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": package, "FUSEDSTEP_DATA": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert re.fullmatch(recipes.CLOSING_LINE, run.stdout.strip())
