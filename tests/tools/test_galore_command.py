"""The command ``python -m fusedstep.galore``."""

import functools
import json
import re

import pytest
import torch

from fusedstep.galore import __main__ as command
from fusedstep.galore import kernels

#: Largest errors, as published for steps in float32.
BOUNDS = {"mean": 1e-6, "variance": 2e-6, "parameters": 1e-6}


@pytest.fixture
def _eager_compiler(monkeypatch):
    """Takes a whole step into one graph, and runs that without code being made for it."""
    eager = functools.partial(torch.compile, backend="eager")
    monkeypatch.setattr(torch, "compile", lambda function, mode, **o: eager(function, **o))


def run(*arguments, file=None):
    command.main([*arguments, *(["--json", str(file)] if file else [])])
    return json.loads(file.read_text()) if file else None


@pytest.mark.usefixtures("_eager_compiler")
@pytest.mark.parametrize("size", [("96", "64"), ("64", "96")])
@pytest.mark.parametrize("kernel", ["torch", "hybrid", "parts", "compiled"])
def test_steps_are_as_exact_as_published(kernel, size, tmp_path, capsys):
    options = ("--kernel", kernel, "--M", size[0], "--N", size[1], "--rank", "16", "--repeats", "2")
    found = run(*options, "--verbose", "--device", "cpu", file=tmp_path / "found.json")
    for name, bound in BOUNDS.items():
        assert 0 < found["errors"][name]["largest"] < bound, name
        assert 0 < found["errors"][name]["relative"] < bound, name
    assert set(found["ms"]) == {"torch", kernel}
    assert found["shapes"]["weight"] == list(map(int, size))
    printed = capsys.readouterr().out
    assert "largest error" in printed
    assert f"{size[0]} x {size[1]}" in printed


def test_errors_are_seen(monkeypatch):
    given = kernels.problem(48, 32, 8, torch.float32, "cpu")

    def wrong(problem):
        step = kernels._by_optimizer(problem, fused=True)

        def step_and_err():
            step()
            problem.weight[3, 4] += 0.5

        return step_and_err

    monkeypatch.setitem(kernels.KERNELS, "wrong", wrong)
    found = kernels.errors(given, "wrong")
    assert found["parameters"]["largest"] == pytest.approx(0.5, abs=1e-5)
    assert found["mean"]["largest"] < 1e-6


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_steps_of_16_bits_agree(dtype):
    given = kernels.problem(96, 64, 16, getattr(torch, dtype), "cpu")
    for kernel in ("torch", "hybrid"):
        found = kernels.errors(given, kernel)
        assert found["parameters"]["relative"] < 4e-3
        assert found["mean"]["relative"] < 4e-3


def test_a_step_moves_weights_by_more_than_its_error():
    given = kernels.problem(96, 64, 16, torch.float32, "cpu")
    before = given.weight.clone()
    kernels.KERNELS["hybrid"](given)()
    assert (given.weight - before).norm() > 1e-4 * before.norm()


@pytest.mark.usefixtures("_eager_compiler")
def test_a_benchmark_has_a_table_of_all_kernels(tmp_path, capsys):
    options = ("--mode", "benchmark", "--M", "80", "--N", "64", "--repeats", "1", "--device", "cpu")
    plot = tmp_path / "found.png"
    found = run(*options, "--plot", str(plot), file=tmp_path / "found.json")
    (table,) = found["tables"]
    assert (table["M"], table["N"], table["tf32"]) == (80, 64, False)
    assert [row["rank"] for row in table["rows"]] == [32, 64]
    for row in table["rows"]:
        assert row.keys() == {"rank", "torch", "hybrid", "parts", "compiled"}
        assert all(time > 0 for time in row.values())
    assert plot.stat().st_size > 1000
    captured = capsys.readouterr()
    assert "80 x 64, median ms" in captured.out
    assert "[8/8]" in captured.err


def test_a_benchmark_goes_on_where_it_was_stopped(tmp_path, capsys, monkeypatch):
    options = ("--mode", "benchmark", "--M", "80", "--N", "64", "--repeats", "1", "--device", "cpu")
    file, timed = tmp_path / "found.json", []

    def stopping(example, kernel, repeats):
        if kernel == "parts":
            raise KeyboardInterrupt
        timed.append(kernel)
        return [float(len(timed))]

    monkeypatch.setattr(command, "milliseconds", stopping)
    with pytest.raises(KeyboardInterrupt):
        run(*options, "--resume", file=file)
    assert "torch        2.000 ms" in capsys.readouterr().err
    rows = json.loads(file.read_text())["tables"][0]["rows"]
    assert rows == [{"rank": 32, "torch": 1, "hybrid": 3}, {"rank": 64, "torch": 2, "hybrid": 4}]
    monkeypatch.setattr(command, "milliseconds", lambda example, kernel, repeats: [7.0])
    rows = run(*options, "--resume", file=file)["tables"][0]["rows"]
    assert rows[1] == {"rank": 64, "torch": 2, "hybrid": 4, "parts": 7, "compiled": 7}
    with pytest.raises(SystemExit, match="of another device, dtype, torch, shape or rank"):
        run(*options, "--rank", "8", "--resume", file=file)
    assert run(*options, file=file)["tables"][0]["rows"][0]["torch"] == 7


def test_tables_with_tf32_are_timed_first(monkeypatch):
    monkeypatch.setattr(command, "_settings", lambda given: {})
    given = command._parser().parse_args(["--mode", "benchmark", "--device", "cuda"])
    tables = command._tables(given, *command._sizes(given))["tables"]
    assert [(table["N"], table["tf32"]) for table in tables] == [
        (4096, True), (11008, True), (4096, False), (11008, False),
    ]  # fmt: skip
    assert [row["rank"] for row in tables[3]["rows"]] == [32, 64, 128, 256, 512]


def test_the_published_tables_are_the_default():
    given = command._parser().parse_args(["--mode", "benchmark"])
    shapes, ranks = command._sizes(given)
    assert shapes == [(4096, 4096), (4096, 11008)]
    assert ranks == [32, 64, 128, 256, 512]
    given = command._parser().parse_args([])
    assert command._sizes(given) == ([(4096, 4096)], [128])
    assert (given.mode, given.kernel, given.dtype) == ("test", "hybrid", "float32")


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            ("--kernel", "fused", "--device", "cpu"),
            "kernel=fused is for GPUs of compute capability 9",
        ),
        (("--allow_tf32", "--device", "cpu"), "--allow_tf32 is for float32 on a GPU"),
        (
            ("--allow_tf32", "--device", "cuda", "--dtype", "bfloat16"),
            "--allow_tf32 is for float32 on a GPU",
        ),
        (("--M", "64", "--N", "32", "--rank", "33"), "--rank 33 is not from 1 to"),
        (("--rank", "0"), "--rank 0 is not from 1 to"),
        (("--repeats", "0"), "--repeats must be at least 1"),
        (("--resume",), "--resume is for --mode=benchmark with --json"),
        (("--dtype", "float8"), "invalid choice: 'float8'"),
    ],
)
def test_mistakes_are_explained(options, text, capsys):
    with pytest.raises(SystemExit) as exit_:
        command.main(list(options))
    assert exit_.value.code == 2
    assert re.search(text, capsys.readouterr().err)
