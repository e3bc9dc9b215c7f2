"""A run of the benchmark: processes, what is made of their results, and where it goes."""

import argparse
import io
import json
import os
import subprocess
import sys
import zipfile
from contextlib import redirect_stdout

import pytest

import run as bench_run
from harness import peer_packages, processes
from harness.processes import LateError, WorkerError
from reports import grid, page, steps
from reports.tables import rounded, write_table
from suites.suite import SUITES
from support.benchmark import BENCH, needs_kernels, needs_limit

# ---- A tiny run ----------------------------------------------------------------------------------


def run_here(*arguments):
    """Runs the benchmark in this process, which it pins, and returns what it prints."""
    affinity = os.sched_getaffinity(0)
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(io.StringIO()) as printed:
        patch.setattr(sys, "argv", ["run.py", *map(str, arguments)])
        try:
            bench_run.main()
        finally:
            os.sched_setaffinity(0, affinity)
    return printed.getvalue()


@pytest.fixture(scope="module")
def output(tmp_path_factory, subprocess_environment):
    """A run as it is typed, in a process of its own."""
    folder = tmp_path_factory.mktemp("bench")
    words = ["--quick", "--budget", "1", "--output", folder, "^(adam/1K|lamb/(1K|4K))$"]
    done = subprocess.run(
        [sys.executable, BENCH / "run.py", *words],
        env=subprocess_environment, capture_output=True, text=True, timeout=500,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout, folder, json.loads((folder / "steps.json").read_text())


@needs_limit
def test_results(output):
    _, _, results = output
    allocators = {row.get("allocator") for row in results["rows"]}
    assert allocators == {"glibc", "jemalloc"} or "no jemalloc" in "".join(results["notes"])
    assert len(results["rows"]) == 3 * len(allocators)
    assert results["machine"]["cores"] >= results["threads"] >= 1
    for row in results["rows"]:
        assert row["bytes"] == 28 * row["elements"]
        assert row["limit"]["ms"] > 0
        for name, result in row["results"].items():
            assert name in results["implementations"]
            low, high = result.get("quartiles", (0, result["ms"]))
            assert low <= result["ms"] <= high, (name, result)
        ours = row["results"]["fused"]
        unfused = row["results"]["unfused"]
        assert unfused["times"] == pytest.approx(unfused["ms"] / ours["ms"], rel=2e-3)
        assert ours["share"] == pytest.approx(row["limit"]["ms"] / ours["ms"], rel=2e-3)


@needs_limit
@needs_kernels
def test_results_have_the_kernels_alone(output):
    printed, _, results = output
    assert "kernels" in printed
    for row in results["rows"]:
        assert row["results"]["kernels"]["ms"] > 0
    for optimizer in ("lamb", "adam"):
        found = steps.grid(results, optimizer, "size")
        column = found.header.index("kernels alone")
        rows = grid.rows_of(results, optimizer, "size")
        for cells, row in zip(found.lines, rows, strict=True):
            assert cells[column] == grid.milliseconds(row["results"]["kernels"]["ms"])


@needs_limit
def test_tables_of_a_run(output):
    printed, folder, _ = output
    tables = (folder / "README.md").read_text()
    for text in (printed, tables):
        assert "adam by size" in text
        assert "lamb by size" in text
        assert "4K elements" in text
    assert "| torch foreach |" in tables
    assert {path.name for path in folder.iterdir()} == {"steps.json", "README.md"}


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["("], "not a regular expression"),
        (["clipping", "--device", "cuda"], "clipping is not measured on cuda"),
        (["peers", "adam", "lamb"], "one FILTER at most"),
    ],
)
def test_what_cannot_be_measured_is_refused(monkeypatch, capsys, words, text):
    monkeypatch.setattr(sys, "argv", ["run.py", *words])
    with pytest.raises(SystemExit):
        bench_run.main()
    assert text in capsys.readouterr().err


def test_without_the_limit_one_line_says_how_it_is_built(tmp_path):
    with pytest.raises(SystemExit, match=r"^.* Build it: cmake --preset release .*$"):
        run_here("--output", tmp_path, "--libraries", tmp_path, "lamb")


# ---- Beside libraries of which one crashes, one is wrong, one fails and one is absent ------------

LIBRARIES_OF_A_RUN = {
    # Ends with its process at one list, and is as good as ours at another.
    "timm/optim.py": """
import os
from fusedstep import optim

class Lamb(optim.Lamb):
    def __init__(self, params, always_adapt, max_grad_norm, **options):
        super().__init__(params, fused=False, **options)

    def step(self):
        if self.param_groups[0]["params"][0].is_contiguous():
            print("from the library, on stdout", flush=True)
            os.abort()
        super().step()
""",
    "pytorch_optimizer/__init__.py": """
import torch

class Lamb(torch.optim.SGD):
    def __init__(self, params, **options):
        super().__init__(params, lr=options["lr"])
""",
    "torchao/optim.py": """
class _AdamW:
    def __init__(self, params, **options):
        raise RuntimeError("no kernel for this machine\\nand so on")

AdamW8bit = _AdamW
""",
}


@pytest.fixture(scope="module")
def beside_peers(tmp_path_factory):
    packages, folder = tmp_path_factory.mktemp("packages"), tmp_path_factory.mktemp("results")
    for path, source in LIBRARIES_OF_A_RUN.items():
        name = path.partition("/")[0]
        file = packages / name / "lib" / "site-packages" / path
        file.parent.mkdir(parents=True)
        (file.parent / "__init__.py").touch()  # else an installed library would be found first
        file.write_text(source)
        (packages / name / "installed").touch()
    (packages / "bitsandbytes").mkdir()
    (packages / "bitsandbytes" / "reason").write_text("no wheel for this machine")
    peers = ("timm", "pytorch_optimizer", "torchao", "bitsandbytes")
    words = (
        "peers", "--output", folder, "--budget", "1", "--all-rows", "--packages", packages,
        "--allocator", "glibc", *(f"--peer={name}" for name in peers),
        "^(lamb/(matrix|sliced)|adamw/matrix|adam/64x10)$",
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        # Another test of this process may have imported it, from where no program finds it.
        patch.delitem(sys.modules, "bitsandbytes", raising=False)
        printed = run_here(*words)
    results = json.loads((folder / "peers.json").read_text())
    return printed, folder, {row["name"]: row for row in results["rows"]}


@needs_limit
def test_what_is_amiss_with_a_peer_is_told(beside_peers):
    _, _, found = beside_peers
    matrix, adamw = found["lamb/matrix"]["results"], found["adamw/matrix"]["results"]
    assert matrix["timm"] == {"crashed": "ended by SIGABRT"}
    assert "off" in matrix["pytorch_optimizer"]["wrong"]
    assert adamw["torchao"] == {"failed": "RuntimeError: no kernel for this machine"}
    assert adamw["bitsandbytes"] == {"absent": "no wheel for this machine"}
    assert matrix["fused"]["ms"] > 0


@needs_limit
def test_rows_after_a_crash_are_measured(beside_peers):
    _, _, found = beside_peers
    sliced = found["lamb/sliced"]["results"]
    assert sliced["timm"]["times"] > 0, sliced
    low, high = sliced["timm"]["quartiles"]
    assert low <= sliced["timm"]["ms"] <= high


@needs_limit
def test_limit_and_ours_are_measured_in_every_process(beside_peers):
    _, _, found = beside_peers
    assert set(found) == {"lamb/matrix", "lamb/sliced", "adamw/matrix", "adam/64x10"}
    assert all(row["limit"]["ms"] > 0 for row in found.values())
    assert found["lamb/sliced"]["results"]["fused"]["processes"] == 3
    assert found["lamb/sliced"]["contiguous"].keys() == {"ms", "times"}
    assert all("contiguous" not in row for name, row in found.items() if name != "lamb/sliced")


@needs_limit
def test_tables_of_a_run_beside_peers(beside_peers):
    printed, folder, _ = beside_peers
    tables = (folder / "README.md").read_text()
    line = next(line for line in tables.splitlines() if line.startswith("| [1024, 1024] |"))
    assert "| crashed | wrong |" in line
    assert "| absent |" in tables
    for text in (
        "timm crashed: ended by SIGABRT (lamb, [1024, 1024])",
        "torchao failed: RuntimeError: no kernel for this machine (adamw",
        "bitsandbytes is absent: no wheel for this machine (adamw",
    ):
        assert text in tables
        assert text in " ".join(printed.split())
    assert "adam by host" in tables
    assert "from the library" not in printed


# ---- Processes -----------------------------------------------------------------------------------


def test_process_that_does_not_end_is_ended():
    with pytest.raises(LateError, match="long after its time"):
        list(processes.events({"until": 0}, dict(os.environ), most_seconds=0.01))


def test_process_that_fails_says_why(tmp_path):
    env = os.environ | {"PYTHONPATH": str(tmp_path)}
    with pytest.raises(WorkerError, match="status 1: ModuleNotFoundError"):
        list(processes.events({"until": 0}, env, log=tmp_path / "log"))


@pytest.mark.parametrize(
    ("suite", "asked", "expected"),
    [
        ("steps", {}, [("torch", "glibc"), ("torch", "jemalloc")]),
        ("steps", {"allocators": ["jemalloc"]}, [("torch", "jemalloc")]),
        ("clipping", {}, [("torch", "jemalloc")]),
        (
            "peers",
            {"peers": ["timm", "torchao_8bit"], "allocators": ["glibc"]},
            [("torch", "glibc"), ("timm", "glibc"), ("torchao", "glibc")],
        ),
    ],
)
def test_processes_and_allocators_that_are_measured(suite, asked, expected):
    arguments = {"suite": suite, "device": "cpu", "allocators": None, "peers": None} | asked
    found = bench_run.Run(argparse.Namespace(**arguments)).pairs()
    assert [(process.name, allocator) for process, allocator in found] == expected
    if "peers" in asked:
        assert found[0][0].names == ("fused",)
        assert found[2][0].names == ("torchao_8bit", "torchao")


def test_a_library_has_a_process_of_its_own():
    for device, libraries in {
        "cpu": ["deepspeed", "timm", "pytorch_optimizer", "torchao", "bitsandbytes"],
        "cuda": ["apex", "deepspeed", "timm"],
    }.items():
        first, *others = SUITES["peers", device].processes
        assert {"for_loop", "foreach", "torch_fused", "fused"} <= {*first.names}
        assert (first.package, first.share) == (None, len(first.names) + 2)
        assert [each.package for each in others if each.package] == libraries
        assert [each.names for each in others if not each.package] == [("compiled",)]


# ---- What is made of their rows ------------------------------------------------------------------


def row_of(name, *names):
    optimizer, shape_list, *_ = name.split("/")
    return {
        "name": name, "optimizer": optimizer, "shapes": shape_list, "title": shape_list,
        "precision": "float32", "purpose": "list", "tensors": 1, "elements": 1 << 20,
        "bytes": 28 << 20, "names": list(names),
    }  # fmt: skip


def in_process(row, limit, **ms):
    results = {name: {"ms": each, "share": limit / each} for name, each in ms.items()}
    return row | {"limit": {"ms": limit}, "results": results}


def test_times_are_told_within_a_process_and_ours_is_the_median():
    def part(name, found, **more):
        row = row_of("adam/gpt2", name)
        return {"allocator": "glibc"} | (found(row) if callable(found) else row | found)

    (merged,) = bench_run.merged(
        [
            part("fused", lambda row: in_process(row, 1.0, fused=2.0)),
            part("torch_fused", lambda row: in_process(row, 2.0, torch_fused=6.0, fused=4.0)),
            part("unfused", lambda row: in_process(row, 1.5, unfused=30.0, fused=3.0)),
            part("deepspeed", {"skipped": "the time was up"}),
            part("timm", {"results": {"timm": {"crashed": "ended by SIGSEGV"}}}),
        ]
    )
    results = merged["results"]
    assert results["torch_fused"]["times"] == 1.5
    assert results["unfused"]["times"] == 10
    assert results["deepspeed"] == {"skipped": "the time was up"}
    assert results["timm"] == {"crashed": "ended by SIGSEGV"}
    assert results["fused"] == {"ms": 3.0, "share": 0.5, "processes": 3}
    assert merged["limit"] == {"ms": 1.5}
    assert "skipped" not in merged
    assert "names" not in merged


def test_time_of_contiguous_weights_is_that_of_the_process_that_took_it():
    contiguous = {"ms": 1.6, "times": 1.25}
    first = in_process(row_of("adam/sliced", "fused"), 1.0, fused=2.0) | {"contiguous": contiguous}
    other = in_process(row_of("adam/sliced", "torch_fused"), 1.0, torch_fused=6.0, fused=4.0)
    (merged,) = bench_run.merged([{"allocator": "glibc"} | row for row in (first, other)])
    assert merged["contiguous"] == contiguous


def test_allocators_are_not_mixed():
    row = in_process(row_of("adam/gpt2", "fused"), 1.0, fused=2.0)
    rows = [{"allocator": allocator} | row for allocator in ("glibc", "jemalloc")]
    assert [each["allocator"] for each in bench_run.merged(rows)] == ["glibc", "jemalloc"]


def test_row_that_no_process_had_time_for_is_skipped():
    row = row_of("adam/gpt2", "fused") | {"skipped": "the time was up", "allocator": "glibc"}
    (merged,) = bench_run.merged([row, row])
    assert merged["skipped"] == "the time was up"
    assert "results" not in merged


# ---- Where results go ----------------------------------------------------------------------------


def test_results_go_where_git_ignores_them_unless_they_are_to_be_committed(
    tmp_path, monkeypatch, repository
):
    monkeypatch.setattr(bench_run, "ROOT", tmp_path)

    def folder(**asked):
        arguments = argparse.Namespace(**({"commit": False, "output": None} | asked))
        found = bench_run.folder_of(arguments, "machine")
        assert found.is_dir()
        return found.relative_to(tmp_path).as_posix()

    assert folder() == "build/results/machine"
    assert folder(commit=True) == "bench/results/machine"
    assert folder(output=tmp_path / "a b") == "a b"
    assert "/build/" in (repository / ".gitignore").read_text().splitlines()


def test_numbers_have_four_digits():
    given = {"ms": 0.0123456789, "all": [12345.6, 7, True, None, "text", float("inf")]}
    found = {"ms": 0.01235, "all": [12350.0, 7, True, None, "text", float("inf")]}
    assert rounded(given) == found


def test_committed_results_are_what_would_be_written_again(repository, tmp_path):
    """The pages of the machines follow from their tables."""
    results = repository / "bench" / "results"
    folders = [file.parent for file in results.glob("*/README.md")]
    assert len(folders) >= 5
    for folder in folders:
        assert (folder / "README.md").read_text() == page.page(folder), folder.name
    for file in results.glob("*/*.json"):
        write_table(tmp_path / file.name, json.loads(file.read_text()))
        assert file.read_bytes() == (tmp_path / file.name).read_bytes(), file


def test_what_made_a_figure_is_in_the_repository(repository):
    probes = {probe.stem for probe in (repository / "bench" / "probes").glob("*")}
    for file in (repository / "bench" / "results").glob("*/*.json"):
        if file.parent.name != "mnist":  # docs/mnist.md has its commands
            known = file.stem in page.TITLES or file.stem in probes
            assert known or "by" in json.loads(file.read_text()), file


def test_all_tables_have_one_writer(repository):
    for file in (repository / "bench").rglob("*.py"):
        text = file.read_text()
        is_one = file.name in ("tables.py", "nanonano_train.py", "nanonano_matrix.py")
        assert is_one or ".write_text(json" not in text, file
        if file.parent.name == "probes" and "--json" in text:
            assert "write_table(" in text, file


@pytest.mark.parametrize(("commit", "shown", "drawn"), [(0, 0, 1), (1, 0, 0), (1, 1, 1)])
def test_committed_plots_are_those_that_pages_show(
    tmp_path, monkeypatch, repository, commit, shown, drawn
):
    """A run writes no plot into bench/results that is not there already."""
    source = repository / "bench" / "results" / "intel-emerald-rapids-16-cores" / "peers.json"
    results = json.loads(source.read_text())

    def collect(run, keep):
        run.rows, run.facts = results["rows"], results

    monkeypatch.setattr(bench_run, "ROOT", tmp_path)
    monkeypatch.setattr(bench_run.Run, "collect", collect)
    (tmp_path / "libfusedstep_limit.so").touch()
    slug = bench_run.this_machine().slug
    folder = tmp_path / ("bench" if commit else "build") / "results" / slug
    if shown:
        folder.mkdir(parents=True)
        (folder / "peers-times.svg").write_text("an older one")
    words = ["peers", "--libraries", str(tmp_path), *["--commit"] * commit]
    monkeypatch.setattr(sys, "argv", ["run.py", *words])
    bench_run.main()
    assert (folder / "peers.json").is_file()
    assert (folder / "peers-times.svg").exists() == drawn
    assert ("(peers-times.svg)" in (folder / "README.md").read_text()) == drawn
    if drawn:
        assert "<svg" in (folder / "peers-times.svg").read_text()


# ---- Packages ------------------------------------------------------------------------------------


def make_wheel(folder, name, source, requires=()):
    path = folder / f"{name}-1.0-py3-none-any.whl"
    info = f"{name}-1.0.dist-info"
    metadata = [f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0"]
    metadata += [f"Requires-Dist: {each}" for each in requires]
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr(f"{name}.py", source)
        wheel.writestr(f"{info}/METADATA", "\n".join(metadata) + "\n")
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")


def test_packages_are_installed_one_by_one(tmp_path, capsys, monkeypatch):
    """One that is missing, or that wants another torch, is left out; the next is installed.

    The torch that counts is the one that is imported, not another behind it.
    """
    pytest.importorskip("pip")
    behind = tmp_path / "behind" / "torch-1.0.dist-info"
    behind.mkdir(parents=True)
    (behind / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 1.0\n")
    monkeypatch.setattr(sys, "path", [*sys.path, str(behind.parent)])
    wheels, folder = tmp_path / "wheels", tmp_path / "peers"
    wheels.mkdir()
    make_wheel(wheels, "fusedstep_greedy", "", requires=["torch==1.0"])
    make_wheel(wheels, "fusedstep_modest", "value = 7\n", requires=["torch>=2"])
    wanted = ["fusedstep_missing>=1.0", "fusedstep_greedy>=0.5", "fusedstep_modest>=0.5"]
    options = ["--no-index", "--find-links", str(wheels)]
    peer_packages.install_all(wanted, options, folder)
    env = peer_packages.environment("fusedstep_modest", dict(os.environ), folder)
    program = "import fusedstep_modest; print(fusedstep_modest.value)"
    done = subprocess.run(
        [sys.executable, "-c", program], env=env, capture_output=True, text=True, check=True
    )
    assert done.stdout == "7\n"
    for name, reason in (("missing", "not find a version"), ("greedy", "conflict")):
        with pytest.raises(peer_packages.AbsentError, match=reason):
            peer_packages.environment(f"fusedstep_{name}", {}, folder)
    assert "fusedstep_greedy: left out" in capsys.readouterr().err
    peer_packages.install_all(wanted[2:], options, folder)
    assert not capsys.readouterr().err, "installed again"


def test_library_that_was_never_installed_is_absent(tmp_path):
    with pytest.raises(peer_packages.AbsentError, match="not installed"):
        peer_packages.environment("fusedstep_missing", {}, tmp_path)


def test_kernels_are_compiled_for_a_device(tmp_path, monkeypatch, capsys):
    """A library that cannot be compiled for one device is there on the other."""
    (tmp_path / "some" / "site-packages").mkdir(parents=True)
    (tmp_path / "some" / "installed").touch()
    program = "import os; assert os.environ['DS_ACCELERATOR'] == 'cpu', 'no nvcc'"
    preparations = {("some", "cpu"): program, ("some", "cuda"): program}
    monkeypatch.setattr(peer_packages, "PREPARATIONS", preparations)
    for device in ("cpu", "cuda"):
        peer_packages.install_all(["some>=1"], [], tmp_path, device)
    assert (tmp_path / "some" / "prepared-cpu").is_file()
    assert "some: left out: AssertionError: no nvcc" in capsys.readouterr().err
    env = peer_packages.environment("some", {}, tmp_path, "cpu")
    assert env["CUDA_VISIBLE_DEVICES"] == ""
    with pytest.raises(peer_packages.AbsentError, match="no nvcc"):
        peer_packages.environment("some", {}, tmp_path, "cuda")
    preparations["some", "cuda"] = "pass"
    peer_packages.install_all(["some>=1"], [], tmp_path, "cuda")
    env = peer_packages.environment("some", {}, tmp_path, "cuda")
    assert "CUDA_VISIBLE_DEVICES" not in env
    assert str(tmp_path / "some" / "site-packages") in env["PYTHONPATH"]


def test_every_package_of_a_process_is_one_that_is_installed(repository):
    text = (repository / "pyproject.toml").read_text()
    packages = {
        process.package
        for (suite, device), found in SUITES.items()
        for process in found.processes
        if process.package and (suite, device) == ("peers", "cpu")
    }
    assert all(f'"{name}' in text for name in packages)
    assert packages == {"deepspeed", "timm", "pytorch_optimizer", "torchao", "bitsandbytes"}
