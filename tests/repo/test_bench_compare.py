"""The benchmark's comparison with another commit."""

import subprocess

import pytest
import torch

import compare
from harness.processes import WorkerError
from probes import against


def rounds(*times):
    """The times of one row: REF, the working tree, the working tree, REF."""
    return [tuple({"adam/matrix": each} for each in four) for four in times]


@pytest.mark.parametrize(
    ("times", "ratio", "noise", "verdict"),
    [
        # Half as long, two runs of one tree alike within some per cent.
        ([(2.0, 1.0, 1.02, 2.04), (2.0, 1.0, 0.98, 1.96)], 0.5, 1.02, "faster"),
        ([(1.0, 2.0, 2.0, 1.0), (1.0, 2.1, 2.1, 1.0)], 2.05, 1.0, "SLOWER"),
        # Ratios on both sides of one.
        ([(1.0, 1.1, 0.9, 1.0), (1.0, 1.1, 0.9, 1.0)], 0.995, 1.222, "within the noise"),
        # All above one, but by less than what one tree differs from itself.
        ([(1.0, 1.1, 1.32, 1.2), (1.0, 1.1, 1.32, 1.2)], 1.1, 1.2, "within the noise"),
        ([(1.0, 1.0, 1.0, 1.0)], 1.0, 1.0, "within the noise"),
    ],
)
def test_verdict(times, ratio, noise, verdict):
    (found,) = compare.compare(rounds(*times))
    assert found.ratio == pytest.approx(ratio, rel=1e-2)
    assert found.noise == pytest.approx(noise, rel=1e-2)
    assert found.verdict == verdict
    low, high = found.quartiles
    assert low <= found.ratio <= high


def test_drift_falls_on_both_trees():
    """A machine that gets slower by 10 % from process to process."""
    times = [tuple(1.1**step for step in range(4))]
    (found,) = compare.compare(rounds(*times))
    assert found.ratio == pytest.approx(1)
    assert found.verdict == "within the noise"


def test_rows_of_one_tree_alone_are_left_out():
    both, new = {"adam/matrix": 1.0}, {"adam/matrix": 1.0, "adan/matrix": 1.0}
    assert [each.row for each in compare.compare([(both, new, new, both)])] == ["adam/matrix"]


def test_report_of_a_comparison():
    found = compare.compare(
        [
            (
                {"adam/matrix": 2.0, "lamb/matrix": 1.0},
                {"adam/matrix": 1.0, "lamb/matrix": 1.0},
                {"adam/matrix": 1.0, "lamb/matrix": 1.0},
                {"adam/matrix": 2.0, "lamb/matrix": 1.0},
            )
        ]
    )
    grid = compare.grid("now against v1", found)
    assert grid.lines == [
        ["adam/matrix", "2.00", "1.00", "0.500", "0.500 to 0.500", "±0.0 %", "faster"],
        ["lamb/matrix", "1.00", "1.00", "1.000", "1.000 to 1.000", "±0.0 %", "within the noise"],
    ]
    assert len(grid.header) == len(grid.lines[0])
    assert compare.summary(found) == "2 rows: 1 faster, 0 SLOWER, 1 within the noise."
    assert compare.summary(found[1:]) == "No difference: all 1 rows are within the noise."


@pytest.fixture
def history(tmp_path, monkeypatch):
    """A repository of two commits, whose trees are not built."""

    def git(*arguments):
        who = ("-c", "user.name=a", "-c", "user.email=a@b")
        command = ["git", "-C", str(tmp_path), *who, *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    git("init", "-q")
    for text in ("old", "new"):
        (tmp_path / "file").write_text(text)
        git("add", "file")
        git("commit", "-q", "-m", text)
    monkeypatch.setattr(compare, "ROOT", tmp_path)
    monkeypatch.setattr(compare, "_build", lambda tree: None)
    return git


def test_ref_is_checked_out_and_removed_again(history, tmp_path):
    with compare.checked_out("HEAD~1") as tree:
        assert (tree / "file").read_text() == "old"
        assert tree.is_relative_to(tmp_path / "build")
    assert not tree.exists()
    with pytest.raises(ZeroDivisionError), compare.checked_out("HEAD~1") as tree:
        raise ZeroDivisionError
    assert not tree.exists()
    assert history("worktree", "list").count("\n") == 1
    assert (tmp_path / "file").read_text() == "new"


def test_tree_of_an_interrupted_run_is_no_obstacle(history, tmp_path):
    commit = history("rev-parse", "HEAD~1").strip()
    left = tmp_path / "build" / "compare" / commit[:12]
    history("worktree", "add", "--detach", str(left), commit)
    with compare.checked_out(commit) as tree:
        assert tree == left
        assert (tree / "file").read_text() == "old"


def test_what_is_no_commit_is_refused(history):
    with pytest.raises(SystemExit, match="nonsense"), compare.checked_out("nonsense"):
        pass


def test_ref_is_built_as_the_working_tree_is(tmp_path, monkeypatch):
    cache = tmp_path / "build" / "release" / "CMakeCache.txt"
    cache.parent.mkdir(parents=True)
    lines = ["CMAKE_CXX_COMPILER:FILEPATH=/usr/bin/g++", "CMAKE_CXX_FLAGS:STRING=", "OTHER:BOOL=ON"]
    cache.write_text("\n".join(lines))
    monkeypatch.setattr(compare, "ROOT", tmp_path)
    assert compare._kept_options() == ["-DCMAKE_CXX_COMPILER=/usr/bin/g++"]


# A tree whose harness is another one


def test_the_probe_compares_within_a_round():
    """Rounds of a machine that gets twice as slow, and then slower by a tenth in one tree."""
    found = against.compared(
        [
            ({"Adam/matrix": 1.0}, {"Adam/matrix": 0.5}),
            ({"Adam/matrix": 2.0}, {"Adam/matrix": 1.0}),
            ({"Adam/matrix": 2.0}, {"Adam/matrix": 1.1}),
        ]
    )
    assert found == {
        "Adam/matrix": {
            "reference": 2.0,
            "now": 1.0,
            "ratio": 0.5,
            "least": 0.5,
            "most": pytest.approx(0.55),
        }
    }


def test_the_table_of_the_probe():
    def row(now, ratio):
        return {"reference": 1.0, "now": now, "ratio": ratio, "least": ratio, "most": ratio}

    rows = {"Adam/matrix": row(0.04463, 0.5), "Lamb/matrix": row(12.34, 1.104)}
    assert against.table({"ms": rows}) == (
        "| | Adam | Lamb |\n| --- | ---: | ---: |\n| [1024, 1024] | 0.0446 (0.50) | 12.3 (1.10) |\n"
    )
    many = {f"{name}/matrix": row(1, 1) for name in ("A", "B", "C", "D", "E", "F")}
    lines = against.table({"ms": many}).splitlines()
    assert lines[:3] == ["| | [1024, 1024] |", "| --- | ---: |", "| A | 1 (1.00) |"]
    assert len(lines) == 8


@pytest.mark.parametrize("fused", [True, False])
def test_the_probe_times_the_classes_of_the_tree_that_python_finds(fused, monkeypatch):
    def milliseconds(optimizer, params, gradients, seconds):
        optimizers.append(optimizer)
        return measured(optimizer, params, gradients, seconds)

    measured, optimizers = against.milliseconds, []
    monkeypatch.setattr(against, "milliseconds", milliseconds)
    asked = against.parse_arguments(
        ["--measure", "--lists", "matrix", "transposed", "--seconds=0", "--dtype=bfloat16"]
        + ["--unfused"] * (not fused)
    )
    assert against.flags_of(asked) == ["--dtype", "bfloat16"] + ["--unfused"] * (not fused)
    found = against.measure(asked)
    rows = [f"{cls}/{name}" for name in ("matrix", "transposed") for cls in against.CLASSES]
    assert list(found["times"]) == rows
    assert all(ms > 0 for ms in found["times"].values())
    assert found["about"] == {"threads": torch.get_num_threads()}
    layouts = [each.param_groups[0]["params"][0].is_contiguous() for each in optimizers]
    assert layouts == [True] * 5 + [False] * 5
    assert {each.param_groups[0]["params"][0].dtype for each in optimizers} == {torch.bfloat16}


def test_processes_of_the_probe_step_for_each_round_that_is_asked():
    asked = against.parse_arguments(["--measure", "--lists", "matrix", "--seconds=0"])
    with against.started(against.ROOT, asked) as process:
        rounds = [against.round_of(process) for _ in range(2)]
    assert process.returncode == 0
    assert rounds[0].keys() == rounds[1].keys() == {"times", "about"}
    assert rounds[0]["times"] != rounds[1]["times"]


def test_processes_of_the_probe_that_fail_are_told(tmp_path):
    asked = against.parse_arguments(["--measure", "--lists", "matrix", "--seconds=0"])
    with against.started(tmp_path, asked) as process, pytest.raises(WorkerError, match="status 1"):
        against.round_of(process)


def test_the_probe_renews_gradients(monkeypatch):
    monkeypatch.setattr(against, "RENEWED", 2)
    param, gradient, seen = torch.nn.Parameter(torch.ones(())), torch.tensor(0.5), []

    class Optimizer:
        def step(self):
            seen.append(param.grad.item())
            param.grad.zero_()

    assert against.milliseconds(Optimizer(), [param], [gradient], 0) > 0
    assert len(seen) == against.WARM_UP + against.FEWEST
    assert seen == [0.5, 0, 0, 0, 0.5, 0, 0.5, 0]
