"""The benchmark of Adan over sizes of GPT-2: the sizes, what is measured again, the tables."""

import json
import math
import os
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import adan_contestants
import adan_memory
import adan_plot
import adan_report
import adan_time
import gpt2
import run_adan
from adan_published import PUBLISHED
from adan_time import Effort

ROOT = Path(__file__).resolve().parents[1]
CPU = torch.device("cpu")


# ---- The publication -----------------------------------------------------------------------------


def test_the_published_sizes_are_twenty_five():
    assert len(PUBLISHED) == 25
    assert list(PUBLISHED)[:2] == ["6x6x768", "12x6x768"]
    assert list(PUBLISHED)[-1] == "16x24x2048"
    assert {published.config.heads for published in PUBLISHED.values()} == {6, 12, 16}


def test_the_published_headline_comes_out_of_its_tables():
    """The authors: at most 15 % more memory, 64 to 85 % of the time."""
    differences = [published.difference for published in PUBLISHED.values()]
    assert min(differences) == 0
    assert max(differences) == pytest.approx(14.30, abs=0.01)
    assert sum(difference > 0.1 for difference in differences) == 4
    ratios = [published.ratio for published in PUBLISHED.values()]
    assert min(ratios) == pytest.approx(0.638, abs=1e-3)
    assert max(ratios) == pytest.approx(0.847, abs=1e-3)
    assert statistics.median(ratios) == pytest.approx(0.76, abs=0.01)


def test_published_peaks_are_what_an_allocator_reserves():
    """Whole pieces of 2 MiB, in 10^6 bytes rounded down: why ours are compared as reserved."""
    for published in PUBLISHED.values():
        for peak in (published.adam_peak, published.adan_peak):
            pieces = math.ceil(peak * 10**6 / 2**21)
            assert pieces * 2**21 // 10**6 == peak


@pytest.mark.parametrize("name", PUBLISHED)
def test_models_have_the_published_sizes(name):
    published = PUBLISHED[name]
    with torch.device("meta"):
        model = gpt2.GPT2(published.config)
    parameters = [parameter.numel() for parameter in model.parameters()]
    assert sum(parameters) // 10**6 == published.millions
    # Two embeddings, twelve tensors a block, the last norm: as many kernels a for-loop starts.
    assert len(parameters) == 2 + 12 * published.config.layers + 2
    assert max(parameters) == gpt2.VOCABULARY * published.config.embedding


# ---- The model -----------------------------------------------------------------------------------

TINY = gpt2.Config(heads=2, layers=2, embedding=8)


def test_the_model_predicts_from_what_came_before():
    """A later token changes no earlier logits; every parameter gets a gradient."""
    torch.manual_seed(0)
    model = gpt2.GPT2(TINY)
    tokens = torch.randint(gpt2.VOCABULARY, (1, 6))
    changed = tokens.clone()
    changed[0, 4] = (changed[0, 4] + 1) % gpt2.VOCABULARY
    torch.manual_seed(1)
    loss, logits = model(tokens)
    torch.manual_seed(1)
    _, others = model(changed)
    torch.testing.assert_close(logits[:, :4], others[:, :4])
    assert not torch.allclose(logits[:, 4], others[:, 4])
    assert loss.item() == pytest.approx(math.log(gpt2.VOCABULARY), rel=0.01)
    gpt2.make_gradients(model)
    assert all(parameter.grad.any() for parameter in model.parameters())


def test_gelu_is_that_of_torch():
    x = torch.linspace(-4, 4, 101, dtype=torch.float64)
    expected = torch.nn.functional.gelu(x, approximate="tanh")
    torch.testing.assert_close(gpt2.gelu(x), expected)


# ---- What is measured ----------------------------------------------------------------------------


def names(text):
    return [str(published.config) for published in run_adan.selected(text)]


def test_sizes_are_chosen_by_name_or_expression():
    assert names("12x12x768, 6x6x768") == ["6x6x768", "12x12x768"]
    assert names(".*x24x2048") == ["16x24x2048"]
    assert len(names(".*x24x.*,6x6x768")) == 9
    assert names("6x6x76") == []


def test_steps_are_fewer_where_they_take_long():
    effort = Effort(steps=200, seconds=1.0)
    assert (effort.turns, effort.count(0.5)) == (5, 40)
    assert effort.count(20.0) == 10
    assert effort.count(1e4) == 1
    assert (Effort(2, 1.0).turns, Effort(2, 1.0).count(0.5)) == (2, 1)


def test_a_row_is_measured_once_for_the_same_effort():
    effort = Effort(200, 1.0)
    row = {"config": "6x6x768", "memory": {name: {} for name in adan_memory.COMPARED}}
    assert run_adan.is_measured(row, "memory", effort, CPU)
    assert not run_adan.is_measured(row, "time", effort, CPU)
    results = {name: {"ms": 1.0} for name in adan_contestants.present(CPU)}
    row["time"] = {"effort": effort.facts(), "results": results}
    assert run_adan.is_measured(row, "time", effort, CPU)
    assert not run_adan.is_measured(row, "time", Effort(100, 1.0), CPU)
    del results["adan_multi"], row["memory"]["adan_multi"]
    assert not run_adan.is_measured(row, "time", effort, CPU)
    assert not run_adan.is_measured(row, "memory", effort, CPU)


def test_rows_of_another_torch_do_not_go_on(tmp_path):
    facts = {"device": "one", "torch": "2.11", "version": "1.0"}
    assert run_adan.rows_before(tmp_path, facts) == []
    rows = [{"config": "6x6x768"}]
    (tmp_path / "results.json").write_text(json.dumps(facts | {"rows": rows}))
    assert run_adan.rows_before(tmp_path, facts) == rows
    for key in facts:
        assert run_adan.rows_before(tmp_path, facts | {key: "other"}) == []
    (tmp_path / "results.json").write_text('{"rows": [')
    assert run_adan.rows_before(tmp_path, facts) == []


def test_a_size_that_does_not_fit_is_not_tried(monkeypatch):
    published = PUBLISHED["6x6x768"]
    monkeypatch.setattr(run_adan, "available_memory", lambda: 4 << 30)
    assert "needs about 6 GiB" in run_adan.lacking(published, 82 * 10**6, "memory")
    assert run_adan.lacking(published, 82 * 10**6, "time") is None


def test_what_went_amiss_is_told_apart():
    lack = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB. GPU 0 has")
    assert adan_contestants.problem(lack) == {"out of memory": "CUDA out of memory"}
    lack = RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried")
    assert "out of memory" in adan_contestants.problem(lack)
    assert adan_contestants.problem(RuntimeError("no kernel\nat all")) == {"failed": "no kernel"}


def test_contestants_that_fail_leave_the_others(monkeypatch):
    class Full:
        def __init__(self, params):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried")

    contestants = {
        "fits": adan_contestants.Contestant("fits", lambda params: torch.optim.SGD(params, 0.0)),
        "full": adan_contestants.Contestant("full", Full),
    }
    monkeypatch.setattr(adan_time, "CONTESTANTS", contestants)
    results = adan_time.measure(gpt2.GPT2(TINY), contestants, Effort(3, 60.0))
    assert results["full"] == {"out of memory": "CUDA out of memory"}
    assert results["fits"]["steps"] == 3
    low, high = results["fits"]["ms_range"]
    assert 0 < low <= results["fits"]["ms"] <= high


# ---- The tables ----------------------------------------------------------------------------------


def peaks(first, later):
    return {"first": first * 10**6, "later": later * 10**6}


def some_results():
    memory = {
        "adam_for_loop": peaks(4000, 5000),
        "adan_single": peaks(4000, 5600),
        "adan_multi": peaks(4400, 6000),
    }
    figures = {"adam_for_loop": 4.0, "adam_foreach": 3.0, "adam_fused": 2.0, "adan_multi": 2.4}
    times = {name: {"ms": ms, "steps": 100} for name, ms in figures.items()}
    effort = Effort(200, 1.0).facts()
    full = {name: {"out of memory": "needs 99 GiB"} for name in adan_memory.COMPARED}
    return {
        "device": "a CPU",
        "device_type": "cpu",
        "torch": "2.11",
        "version": "1.0",
        "threads": 2,
        "allocator": "glibc",
        "date": "today",
        "notes": [],
        "rows": [
            {"config": "16x24x2048", "parameters": 1_313_000_000, "memory": full},
            {
                "config": "6x6x1536",
                "parameters": 248_900_000,
                "memory": memory,
                "time": {
                    "effort": effort,
                    "results": times | {"adan_single": {"wrong": "1.0e+00 off after 4 steps"}},
                },
            },
        ],
    }


def cells(grid, line):
    return dict(zip(grid.header, grid.lines[line], strict=True))


def test_memory_table_stands_beside_the_published():
    grid = adan_report.memory_grid(some_results(), "first")
    assert cells(grid, 0) == {
        "heads × layers × embedding": "6 × 6 × 1536",
        "M": "248",
        "Adam, for-loop": "4,000",
        "Adan, fused single": "4,000",
        "Adan, fused multi": "4,400",
        "Adan, fused single %": "0.00",
        "Adan, fused multi %": "+10.00",
        "published, Adam": "6,880",
        "published %": "+6.22",
    }
    full = cells(grid, 1)
    assert (full["Adam, for-loop"], full["Adan, fused multi %"]) == ("memory", "–")
    later = cells(adan_report.memory_grid(some_results(), "later"), 0)
    assert (later["Adan, fused single %"], later["Adan, fused multi %"]) == ("+12.00", "+20.00")
    assert "published %" not in later


def test_memory_table_of_a_gpu_has_what_was_reserved():
    results = some_results() | {"device_type": "cuda"}
    memory = results["rows"][1]["memory"]
    for name, reserved in zip(adan_memory.COMPARED, (4000, 4000, 4200), strict=True):
        memory[name]["first_reserved"] = reserved * 10**6
    found = cells(adan_report.memory_grid(results, "first"), 0)
    assert found["reserved, Adam"] == "4,000"
    assert found["reserved, Adan, fused multi %"] == "+5.00"
    told = "\n".join(adan_report.remarks(results))
    handed_out, reserved = (
        f"memory {kind} in the first step: at most {most} % beside Adam, above the published in "
        for kind, most in (("handed out", "+10.00"), ("reserved", "+5.00"))
    )
    assert f"{handed_out}1 of 1 rows (6x6x1536)." in told
    assert f"{reserved}0 of 1 rows." in told


def test_time_table_stands_beside_the_published():
    assert cells(adan_report.time_grid(some_results()), 0) == {
        "heads × layers × embedding": "6 × 6 × 1536",
        "M": "248",
        "Adam, for-loop": "4.00",
        "Adam, foreach": "3.00",
        "Adam, fused": "2.00",
        "Adan, for-loop": "–",
        "Adan, foreach": "–",
        "Adan, fused single": "wrong",
        "Adan, fused multi": "2.40",
        "authors' fused single": "–",
        "authors' fused multi": "–",
        "multi / for-loop %": "60.0",
        "published %": "77.2",
        "multi / foreach %": "80.0",
        "multi / fused %": "120.0",
    }


def test_page_tells_the_point_and_what_is_missing():
    page = adan_report.markdown(some_results())
    assert "# Adan over sizes of GPT-2 on a CPU" in page
    assert "60.0 % of the time of Adam, for-loop, median of 1 rows (60.0 to 60.0)" in page
    assert "Published on one A100: 77.2 %" in page
    assert (
        "Not measured: memory of 16 × 24 × 2048: out of memory: needs 99 GiB "
        "(Adam, for-loop; Adan, fused single; Adan, fused multi)."
    ) in page
    assert "wrong: 1.0e+00 off after 4 steps (Adan, fused single)." in page
    assert "4 of 4 times are of fewer steps" in page
    assert "![memory](memory.png)" in page
    results = some_results()
    results["rows"] = results["rows"][:1]
    assert "![time]" not in adan_report.markdown(results)


def test_plots_are_drawn_of_what_is_there(tmp_path):
    results = some_results()
    adan_plot.plot(results, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"memory.png", "time.png"}
    for path in tmp_path.iterdir():
        path.unlink()
    del results["rows"][1]["time"]
    adan_plot.plot(results, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"memory.png"}


# ---- The command ---------------------------------------------------------------------------------


def run(*options):
    env = os.environ | {"PYTHONPATH": os.pathsep.join((str(ROOT / "python"), str(ROOT / "tests")))}
    command = [sys.executable, ROOT / "bench" / "run_adan.py", *options]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=600)


def test_an_unknown_size_or_table_is_named():
    done = run("--configs", "7x7x7")
    assert done.returncode == 2
    assert "'7x7x7' is none of 6x6x768" in done.stderr
    done = run("--tables", "memory,speed")
    assert done.returncode == 2
    assert "no such table: speed" in done.stderr


def test_what_was_measured_is_shown_again_without_measuring(tmp_path):
    """A result that could not come from a measurement stays, as its row is there already."""
    facts = run_adan.facts_of(CPU)
    row = {"config": "6x6x768", "parameters": 81_000_000}
    row["memory"] = dict.fromkeys(adan_memory.COMPARED, peaks(1, 2))
    (tmp_path / "results.json").write_text(json.dumps(facts | {"rows": [row]}))
    options = ("--device", "cpu", "--tables", "memory", "--configs", "6x6x768")
    done = run(*options, "--output", tmp_path)
    assert done.returncode == 0, done.stderr
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["rows"] == [row]
    assert str(ROOT) not in json.dumps(results)
    assert (tmp_path / "memory.png").is_file()
    assert "6 × 6 × 768" in done.stdout


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_contestants_are_right(device):
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    from adan_check import wrong

    for name in adan_contestants.present(torch.device(device)):
        assert wrong(name, torch.device(device)) is None, name
