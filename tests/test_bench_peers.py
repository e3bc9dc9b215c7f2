"""Steps beside other libraries' are right before they are timed, and what is amiss is shown."""

import json
import os
import subprocess
import sys
import types
import zipfile

import pytest
import torch

import implementations
import peer_optimizers
import peer_packages
import peers_plot
import peers_report
import processes
import rows
import run_peers
import shapes
import subjects
from benchmark import BENCH, needs_limit
from cases import PLAIN
from processes import LateError, WorkerError
from rows import BFLOAT16, FLOAT32, MIXED, Purpose, Row

CASES = {case.name: case for case in PLAIN}
LISTS = {each.name: each for each in shapes.ALL}


# ---- Rows ----------------------------------------------------------------------------------------


def rows_of(peer, threads=16):
    return {str(r) for r in rows.beside_peers(threads) if peer_optimizers.PEERS[peer].exists(r)}


def test_rows_have_names_of_their_own():
    names = [str(row) for row in rows.beside_peers(16)]
    assert len(names) == len(set(names))


def test_rows_of_the_largest_model_come_last():
    sizes = [row.shape_list.elements for row in rows.beside_peers(16)]
    count = len(rows.PLAIN)
    assert sizes[-count:] == [774_030_080] * count
    assert max(sizes[:-count]) < 774_030_080


@pytest.mark.parametrize(
    ("threads", "counts"), [(1, [1]), (2, [1, 2]), (6, [1, 2, 4, 6]), (16, [1, 2, 4, 8, 16])]
)
def test_scaling_goes_up_to_what_the_machine_has(threads, counts):
    scaling = [r for r in rows.beside_peers(threads) if r.purpose == Purpose.THREADS]
    assert [row.threads for row in scaling] == counts


@pytest.mark.parametrize(
    ("peer", "has", "lacks"),
    [
        ("fused", {"adam/gpt2", "lamb/sliced", "adam/64x5000", "lamb/64M"}, set()),
        ("unfused", {"lamb/matrix", "adamw/gpt2/mixed"}, {"adam/64x1", "adam/1M"}),
        ("for_loop", {"adam/gpt2-large"}, {"lamb/matrix", "adam/gpt2/4-threads"}),
        ("torch_fused", {"adam/64x2000", "adam/gpt2/8-threads", "adamw/gpt2/bfloat16"},
         {"adamw/gpt2/mixed", "lamb/gpt2"}),
        ("compiled", {"adam/resnet50"}, {"adam/small", "lamb/matrix"}),
        ("deepspeed", {"adagrad/gpt2", "adamw/gpt2/mixed", "adam/gpt2/2-threads"}, {"lamb/gpt2"}),
        ("timm", {"lamb/gpt2-large"}, {"adam/gpt2", "lamb/1M"}),
        ("pytorch_optimizer", {"lamb/transposed"}, {"adam/gpt2"}),
        ("torchao_8bit", {"adamw/matrix"}, {"adamw/matrix/mixed", "adam/matrix"}),
        ("bitsandbytes", {"adamw/matrix", "adamw/gpt2/mixed"}, {"adamw/gpt2/bfloat16"}),
    ],
)  # fmt: skip
def test_peer_has_the_rows_that_it_can_step(peer, has, lacks):
    found = rows_of(peer)
    assert has <= found
    assert not lacks & found


def test_every_peer_has_a_process():
    assert {process.peer for process in run_peers.PROCESSES} == set(peer_optimizers.PEERS)


@pytest.mark.parametrize(
    ("row", "bytes_per_element"),
    [
        (Row(CASES["adamw"], LISTS["matrix"]), 28),
        (Row(CASES["adamw"], LISTS["matrix"], BFLOAT16), 14),
        (Row(CASES["adamw"], LISTS["matrix"], MIXED), 22),
        (Row(CASES["adam"], LISTS["sliced"]), 36),
        (Row(CASES["adam"], LISTS["transposed"]), 28),
        (Row(CASES["adagrad"], LISTS["matrix"]), 20),
    ],
    ids=str,
)
def test_bytes_of_a_row(row, bytes_per_element):
    assert row.bytes == bytes_per_element * row.shape_list.elements
    assert row.streams.two_phase == (not row.case.elementwise)


# ---- Checks before timing ------------------------------------------------------------------------

SOME = ((40, 30), (7, 6), (64, 3, 3, 3))


def stepped(implementation, row):
    """What the check says of an implementation."""
    params = subjects.make(row.shape_list, row.precision.weight)
    formula = implementation.formula_of(row)
    check = subjects.Check(formula, row.shape_list, row.precision.weight, implementation.slack)
    return check(implementation.build(row, params), params)


@pytest.mark.parametrize("layout", ["contiguous", "transposed", "sliced", "channels-last"])
@pytest.mark.parametrize("precision", [FLOAT32, BFLOAT16, MIXED], ids=lambda p: p.name)
@pytest.mark.parametrize("case", PLAIN, ids=str)
def test_ours_is_right_in_every_precision_and_layout(case, precision, layout):
    row = Row(case, shapes.ShapeList("some", "some", SOME, layout), precision)
    assert stepped(implementations.FUSED, row) is None
    assert stepped(implementations.UNFUSED, row) is None


def test_check_knows_the_formula_of_a_peer():
    """LAMB without correction for bias is right by its own formula, and wrong by the row's."""
    row = Row(CASES["lamb"], shapes.ShapeList("some", "some", SOME))
    formula = implementations.case_named("lamb-cybertron")

    def build(row, params):
        return implementations.OfTorch(formula.build(params, fused=False))

    def implementation(formula):
        return implementations.Implementation("x", "x", lambda _: True, build, formula)

    assert stepped(implementation("lamb-cybertron"), row) is None
    assert "off" in stepped(implementation(None), row)


def test_slack_does_not_let_a_step_through_that_does_nothing():
    row = Row(CASES["adamw"], shapes.ShapeList("some", "some", SOME))
    idle = implementations.Implementation(
        "idle", "idle", lambda _: True, lambda *_: types.SimpleNamespace(step=lambda: None),
        slack=peer_optimizers.EIGHT_BITS,
    )  # fmt: skip
    assert "off" in stepped(idle, row)


def test_learning_rate_of_a_tensor_is_set():
    params = subjects.make(shapes.ShapeList("some", "some", SOME), torch.float32)
    optimizer = torch.optim.Adam(params, lr=torch.tensor(0.5), capturable=False, foreach=False)
    rate = optimizer.param_groups[0]["lr"]
    implementations.OfTorch(optimizer).set_lr(0.25)
    assert optimizer.param_groups[0]["lr"] is rate
    assert rate == 0.25


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


def test_packages_are_installed_one_by_one(tmp_path, capsys):
    """One that is missing, or that wants another torch, is left out; the next is installed."""
    pytest.importorskip("pip")
    wheels, folder = tmp_path / "wheels", tmp_path / "peers"
    wheels.mkdir()
    make_wheel(wheels, "fusedstep_greedy", "", requires=["torch==1.0"])
    make_wheel(wheels, "fusedstep_modest", "value = 7\n", requires=["torch>=2"])
    wanted = ["fusedstep_missing>=1.0", "fusedstep_greedy>=0.5", "fusedstep_modest>=0.5"]
    options = ["--no-index", "--find-links", str(wheels)]
    peer_packages.install_all(wanted, options, folder)
    env = peer_packages.environment("fusedstep_modest", dict(os.environ), folder)
    program = "import fusedstep_modest; print(fusedstep_modest.value)"
    run = subprocess.run(
        [sys.executable, "-c", program], env=env, capture_output=True, text=True, check=True
    )
    assert run.stdout == "7\n"
    for name, reason in (("missing", "not find a version"), ("greedy", "conflict")):
        with pytest.raises(peer_packages.AbsentError, match=reason):
            peer_packages.environment(f"fusedstep_{name}", {}, folder)
    assert "fusedstep_greedy: left out" in capsys.readouterr().err
    peer_packages.install_all(wanted[2:], options, folder)
    assert not capsys.readouterr().err, "installed again"


def test_library_that_was_never_installed_is_absent(tmp_path):
    with pytest.raises(peer_packages.AbsentError, match="not installed"):
        peer_packages.environment("fusedstep_missing", {}, tmp_path)


# ---- A run ---------------------------------------------------------------------------------------

LIBRARIES_OF_A_RUN = {
    # Ends with its process at one list, and is as good as ours at another.
    "timm/optim.py": """
import os
from fusedstep import optim

class Lamb(optim.Lamb):
    def __init__(self, params, always_adapt, max_grad_norm, **options):
        super().__init__(params, fused=False, **options)

    def step(self):
        if len(self.param_groups[0]["params"]) == 1:
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
""",
}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Beside libraries of which one crashes, one is wrong, one fails and one is absent."""
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
    command = [
        sys.executable,
        BENCH / "run_peers.py",
        "--output",
        folder,
        "--budget",
        "1",
        "--all-rows",
    ]
    command += ["--packages", packages, "--allocator", "glibc", *(f"--peer={p}" for p in peers)]
    pattern = "^(lamb/(matrix|small|sliced)|adamw/matrix|adam/64x10)$"
    done = subprocess.run([*command, pattern], capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    results = json.loads((folder / "results.json").read_text())
    return done.stdout, folder, results, {row["name"]: row for row in results["rows"]}


@needs_limit
def test_what_is_amiss_with_a_peer_is_told(run):
    _, _, _, found = run
    matrix, adamw = found["lamb/matrix"]["results"], found["adamw/matrix"]["results"]
    assert matrix["timm"] == {"crashed": "ended by SIGABRT"}
    assert "off" in matrix["pytorch_optimizer"]["wrong"]
    assert adamw["torchao"] == {"failed": "RuntimeError: no kernel for this machine"}
    assert adamw["bitsandbytes"] == {"absent": "no wheel for this machine"}
    assert matrix["fused"]["ms"] > 0


@needs_limit
def test_rows_after_a_crash_are_measured(run):
    _, _, _, found = run
    small = found["lamb/small"]["results"]
    assert small["timm"]["times"] > 0, small
    low, high = small["timm"]["ms_quartiles"]
    assert low <= small["timm"]["ms"] <= high


@needs_limit
def test_limit_and_ours_are_measured_in_every_process(run):
    _, _, results, found = run
    assert set(found) == {"lamb/matrix", "lamb/small", "lamb/sliced", "adamw/matrix", "adam/64x10"}
    assert all(row["limit"]["ms"] > 0 for row in found.values())
    by_peer = {each["peer"]: {r["name"]: r for r in each["rows"]} for each in results["processes"]}
    first = by_peer["fused"]["lamb/small"]["limit"]
    other = by_peer["timm"]["lamb/small"]
    assert other["results"]["fused"]["share"] > 0
    assert other["limit"]["walks"][0].keys() == first["walks"][0].keys()
    assert found["lamb/small"]["results"]["fused"]["processes"] == 3
    assert found["lamb/sliced"]["contiguous"].keys() == {"ms", "times"}
    assert all("contiguous" not in row for name, row in found.items() if name != "lamb/sliced")
    assert all("contiguous" not in row for row in by_peer["timm"].values())
    assert by_peer["bitsandbytes"]["adamw/matrix"].keys().isdisjoint({"limit"})


@needs_limit
def test_tables_and_plots_of_a_run(run):
    printed, folder, _, _ = run
    tables = (folder / "README.md").read_text()
    line = next(line for line in tables.splitlines() if line.startswith("| [1024, 1024] | glibc"))
    assert "| crashed | wrong |" in line
    assert "| absent |" in tables
    for text in (
        "timm crashed: ended by SIGABRT (lamb, [1024, 1024], glibc and 1 more)",
        "torchao failed: RuntimeError: no kernel for this machine (adamw",
        "bitsandbytes is absent: no wheel for this machine (adamw",
    ):
        assert text in tables
        assert text in " ".join(printed.split())
    assert "The host's cost: adam" in tables
    for name in peers_report.plots(json.loads((folder / "results.json").read_text())):
        assert (folder / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        assert f"({name}.png)" in tables
    assert "from the library" not in printed


@needs_limit
def test_plots_of_a_run_can_be_drawn_again(run, tmp_path):
    _, folder, _, _ = run
    command = [sys.executable, BENCH / "peers_plot.py", folder / "results.json", tmp_path]
    subprocess.run(command, check=True)
    assert {path.name for path in tmp_path.iterdir()} == {
        path.name for path in folder.glob("*.png")
    }


def test_process_that_does_not_end_is_ended():
    with pytest.raises(LateError, match="long after its time"):
        list(processes.events({"until": 0}, dict(os.environ), most_seconds=0.01))


def test_process_that_fails_says_why(tmp_path):
    env = os.environ | {"PYTHONPATH": str(tmp_path)}
    with pytest.raises(WorkerError, match="status 1: ModuleNotFoundError"):
        list(processes.events({"until": 0}, env, log=tmp_path / "log"))


# ---- What is made of the results -----------------------------------------------------------------


def row_of(name, purpose="list", threads=None, tensors=1, elements=1 << 20):
    optimizer, shape_list, *_ = name.split("/")
    return {
        "name": name, "optimizer": optimizer, "class": optimizer.title(), "plain": True,
        "shapes": shape_list, "title": shape_list, "precision": "float32", "threads": threads,
        "purpose": purpose, "tensors": tensors, "elements": elements, "bytes": 28 * elements,
    }  # fmt: skip


def measured(ms, limit):
    return {"ms": ms, "ms_quartiles": [ms, ms], "gbps": 1.0, "share": limit / ms}


def in_process(row, limit, **ms):
    results = {name: measured(each, limit) for name, each in ms.items()}
    return row | {"limit": {"ms": limit}, "results": results}


def test_times_are_told_within_a_process_and_ours_is_the_median():
    row = row_of("adam/gpt2")
    (merged,) = run_peers.merged(
        [
            ("fused", "glibc", [in_process(row, 1.0, fused=2.0)]),
            ("torch_fused", "glibc", [in_process(row, 2.0, torch_fused=6.0, fused=4.0)]),
            ("unfused", "glibc", [in_process(row, 1.5, unfused=30.0, fused=3.0)]),
            ("deepspeed", "glibc", [row | {"skipped": "the time was up"}]),
            ("timm", "glibc", [row | {"results": {"timm": {"crashed": "ended by SIGSEGV"}}}]),
        ]
    )
    results = merged["results"]
    assert results["torch_fused"]["times"] == 1.5
    assert results["unfused"]["times"] == results["fused"]["speedup"] == 10
    assert results["deepspeed"] == {"skipped": "the time was up"}
    assert results["timm"] == {"crashed": "ended by SIGSEGV"}
    assert (results["fused"]["ms"], results["fused"]["share"]) == (3.0, 0.5)
    assert results["fused"]["processes"] == 3
    assert merged["limit"] == {"ms": 1.5}
    assert "skipped" not in merged


def test_time_of_contiguous_weights_is_that_of_the_process_that_took_it():
    row = row_of("adam/sliced")
    contiguous = {"ms": 1.6, "times": 1.25}
    first = in_process(row, 1.0, fused=2.0) | {"contiguous": contiguous}
    other = in_process(row, 1.0, torch_fused=6.0, fused=4.0)
    (merged,) = run_peers.merged([("fused", "glibc", [first]), ("torch_fused", "glibc", [other])])
    assert merged["contiguous"] == contiguous


def test_row_of_a_layout_knows_the_contiguous_one():
    sliced = Row(CASES["adam"], LISTS["sliced"])
    assert sliced.contiguous.shape_list.shapes == sliced.shape_list.shapes
    assert sliced.contiguous.streams == Row(CASES["adam"], LISTS["contiguous"]).streams
    assert Row(CASES["adam"], LISTS["resnet50"]).contiguous is None


def test_allocators_are_not_mixed():
    row = row_of("adam/gpt2")
    parts = [(("fused"), a, [in_process(row, 1.0, fused=2.0)]) for a in ("glibc", "jemalloc")]
    assert [each["allocator"] for each in run_peers.merged(parts)] == ["glibc", "jemalloc"]


def test_row_that_no_process_had_time_for_is_skipped():
    row = row_of("adam/gpt2") | {"skipped": "the time was up"}
    (merged,) = run_peers.merged([("fused", "glibc", [row]), ("timm", "glibc", [row])])
    assert merged["skipped"] == "the time was up"
    assert "results" not in merged


@pytest.fixture
def results():
    """Of a run that measured all kinds of rows."""
    found = []
    for name, ms in (
        ("lamb/resnet50", 2.6), ("adam/resnet50", 2.0), ("adam/channels-last", 2.2),
        ("adam/contiguous", 0.5), ("adam/transposed", 0.6), ("adam/sliced", 0.7),
    ):  # fmt: skip
        row = in_process(row_of(name), 0.4, fused=ms, torch_fused=2 * ms)
        if name.endswith(("transposed", "sliced", "channels-last")):
            row["contiguous"] = {"ms": 0.5, "times": ms / 0.5}
        found.append(row)
    for threads in (1, 2):
        row = row_of(f"adam/gpt2/{threads}-threads", "threads", threads)
        found.append(in_process(row, 9 / threads, torch_fused=12 / threads, fused=10 / threads))
    for tensors in (1, 100):
        row = row_of(f"adam/64x{tensors}", "host", tensors=tensors)
        found.append(in_process(row, 0.001, torch_fused=0.008 * tensors, fused=0.02))
    for elements in (1 << 10, 1 << 20):
        row = row_of(f"adam/{elements}", "size", elements=elements)
        found.append(in_process(row, 0.5, fused=1.0))
    return {
        "date": "", "machine": {"cpu": "CPU"}, "threads": 2, "isa": "avx2", "torch": "2",
        "notes": [], "dtype": "float32", "kernels": [],
        "rows": [{"allocator": "glibc"} | row for row in found],
        "implementations": {"torch_fused": "torch fused", "fused": "ours fused"},
    }  # fmt: skip


def test_tables_of_threads_host_sizes_and_ratios(results):
    grids = {grid.title: grid.lines for grid in peers_report.grids(results)}
    assert grids["Threads: adam, gpt2, ms a step"] == [
        ["1", "12.0", "10.0", "9.00", "0.90"],
        ["2", "6.00", "5.00", "4.50", "0.90"],
    ]
    assert grids["The host's cost: adam, ms a step"] == [
        ["1", "0.0080", "0.0200", "8.00", "20.00"],
        ["100", "0.800", "0.0200", "8.00", "0.20"],
    ]
    assert [line[1:] for line in grids["Share of the limit by size"]] == [["0.50"], ["0.50"]]
    assert grids["Ours against ours: time to time"] == [
        ["[4096, 1024] transposed to contiguous", "", "1.20"],
        ["[4096, 1024] every second column to contiguous", "", "1.40"],
        ["ResNet-50 channels-last to contiguous", "", "4.40"],
        ["resnet50: LAMB to Adam", "1.30", ""],
    ]
    assert len(grids["adam: ms a step"]) == 5, "rows of plots are in the table of lists"


def test_share_above_the_limit_is_told_as_a_fault(results):
    assert not list(peers_report.faults(results))
    results["rows"][0]["results"]["fused"]["share"] = 1.02
    assert "lamb/resnet50, glibc: 1.02" in "".join(peers_report.faults(results))


def test_plots_are_written_of_whatever_there_is(results, tmp_path):
    skipped = row_of("adam/gpt2") | {"allocator": "glibc", "skipped": "the time was up"}
    cases = (
        (results["rows"], {"time", "share", "threads", "host"}),
        (results["rows"][:1], {"time"}),
        (results["rows"][-1:], {"time", "share"}),
        ([skipped], {"time"}),
    )
    for number, (rows_left, expected) in enumerate(cases):
        folder = tmp_path / str(number)
        folder.mkdir()
        peers_plot.plot(results | {"rows": rows_left}, folder)
        assert {path.stem for path in folder.iterdir()} == expected
