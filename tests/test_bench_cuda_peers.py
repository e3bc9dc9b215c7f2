"""Steps on a GPU beside other libraries': what is compared, how it is told. No GPU is needed."""

import dataclasses
import json
import math
import os
import subprocess
import sys
import types

import pytest
import torch

import adan_check
import adan_contestants
import cuda
import cuda_peers
import cuda_peers_plot
import cuda_peers_report
import implementations
import peer_packages
import run_peers
import shapes
import subjects
from benchmark import BENCH
from cases import PLAIN
from fusedstep import optim
from implementations import Implementation, OfTorch, UnavailableError
from rows import BFLOAT16, FLOAT32, Row

CASES = {case.name: case for case in PLAIN}
SOME = shapes.ShapeList("some", "some", ((40, 30), (7, 6), (64, 3, 3, 3)))


# ---- Rows and processes --------------------------------------------------------------------------


def names_of(peer):
    implementation = cuda_peers.IMPLEMENTATIONS[peer]
    return {str(row) for row in cuda_peers.beside_peers() if implementation.exists(row)}


def test_rows_have_names_of_their_own_and_the_largest_come_last():
    rows = list(cuda_peers.beside_peers())
    assert len({str(row) for row in rows}) == len(rows) == 18
    assert {row.shape_list.name for row in rows[-3:]} == {"gpt2-large"}
    assert all(row.shape_list.name != "gpt2-large" for row in rows[:-3])


@pytest.mark.parametrize(
    ("peer", "has", "lacks"),
    [
        ("fused", {"adam/gpt2", "lamb/gpt2-large", "adamw/gpt2/mixed"}, set()),
        ("graph", {"adam/small", "lamb/small"}, {"adagrad/small"}),
        ("torch_fused", {"adagrad/gpt2", "adamw/gpt2/bfloat16"}, {"lamb/gpt2", "adamw/gpt2/mixed"}),
        ("torch_graph", {"adam/gpt2"}, {"adagrad/gpt2"}),
        ("compiled", {"adam/gpt2", "adagrad/resnet50"}, {"adam/small", "lamb/matrix"}),
        ("apex", {"lamb/small", "adagrad/gpt2", "adamw/gpt2/mixed"}, {"adamw/gpt2/bfloat16"}),
        ("deepspeed", {"adam/gpt2", "adamw/gpt2/bfloat16"}, {"lamb/gpt2", "adagrad/gpt2"}),
        ("deepspeed_lamb", {"lamb/gpt2"}, {"adam/gpt2"}),
        ("timm", {"lamb/resnet50"}, {"adam/resnet50"}),
    ],
)
def test_peer_has_the_rows_that_it_can_step(peer, has, lacks):
    found = names_of(peer)
    assert has <= found
    assert not lacks & found


def test_every_peer_is_measured_in_one_process():
    peers = [peer for names in cuda_peers.PROCESSES.values() for peer in names]
    assert sorted([*peers, "fused"]) == sorted(cuda_peers.IMPLEMENTATIONS)
    assert {process.peer for process in run_peers.CUDA_PROCESSES} == set(cuda_peers.PROCESSES)


def test_a_process_has_the_rows_of_its_peers():
    assert {str(row) for row in cuda_peers.rows_of("timm", "")} == names_of("timm")
    (row,) = cuda_peers.rows_of("torch", "^lamb/gpt2$")
    assert cuda_peers.peers_of("torch", row) == ["graph"]
    assert set(cuda_peers.of_process("apex")) == {"apex", "fused"}


# ---- Checks before timing ------------------------------------------------------------------------


class ApexLamb(optim.Lamb):
    def __init__(self, params, use_nvlamb=False, **options):
        variant = "nvlamb" if use_nvlamb else "apex"
        super().__init__(params, fused=False, variant=variant, **options)


class ApexAdam(torch.optim.Adam):
    def __init__(self, params, adam_w_mode=True, **options):
        super().__init__(params, decoupled_weight_decay=adam_w_mode, **options)


class DeepSpeedLamb(optim.Lamb):
    def __init__(self, params, max_coeff, min_coeff, **options):
        bounds = {"max_ratio": max_coeff, "min_ratio": min_coeff}
        super().__init__(params, fused=False, variant="deepspeed", **bounds, **options)


LIBRARIES = {
    "apex.optimizers": {
        "FusedLAMB": ApexLamb,
        "FusedAdam": ApexAdam,
        "FusedAdagrad": torch.optim.Adagrad,
    },
    "deepspeed.ops.adam": {"FusedAdam": ApexAdam},
    "deepspeed.ops.lamb": {"FusedLamb": DeepSpeedLamb},
}


@pytest.fixture
def libraries(monkeypatch):
    """Libraries that step by the formulas of those of their names."""
    for name, members in LIBRARIES.items():
        monkeypatch.setitem(sys.modules, name, types.SimpleNamespace(**members))


@pytest.mark.parametrize(
    ("peer", "case", "precision"),
    [
        ("apex", "lamb", FLOAT32),
        ("apex", "adam", FLOAT32),
        ("apex", "adagrad", FLOAT32),
        ("deepspeed", "adam", FLOAT32),
        ("deepspeed", "adamw", BFLOAT16),
        ("deepspeed_lamb", "lamb", FLOAT32),
    ],
)
def test_libraries_are_told_to_make_the_step_that_they_are_checked_by(
    libraries, peer, case, precision
):
    implementation, row = cuda_peers.IMPLEMENTATIONS[peer], Row(CASES[case], SOME, precision)
    assert implementation.exists(row)
    params = subjects.make(SOME, precision.weight)
    formula = implementation.formula_of(row)
    check = subjects.Check(formula, SOME, precision.weight, implementation.slack)
    assert check(implementation.build(row, params), params) is None


@pytest.fixture
def on_the_cpu(monkeypatch):
    make = subjects.make
    monkeypatch.setattr(subjects, "make", lambda shape_list, dtype, _: make(shape_list, dtype))


def test_only_right_steps_are_timed_and_what_is_amiss_is_told(on_the_cpu):
    def unavailable(row, params):
        raise UnavailableError("no such library")

    def failing(row, params):
        raise RuntimeError("no kernel for this machine\nand so on")

    def wrong(row, params):
        return OfTorch(torch.optim.SGD(params, lr=1e-2))

    contestants = cuda.Contestants(Row(CASES["adam"], SOME))
    builds = {"absent": unavailable, "failed": failing, "wrong": wrong}
    for name, build in builds.items():
        contestants.add(Implementation(name, name, lambda _: True, build))
    contestants.add(implementations.FUSED)
    problems = contestants.problems
    assert problems["absent"] == {"absent": "no such library"}
    assert problems["failed"] == {"failed": "RuntimeError: no kernel for this machine"}
    assert "off" in problems["wrong"]["wrong"]
    assert set(contestants.steppers) == {"fused"}


def test_ways_of_the_limit_are_of_one_block_at_least():
    assert {way.blocks for way in cuda._ways(words=3, processors=132)} == {1}
    most = max(way.blocks for way in cuda._ways(words=10**7, processors=132))
    assert most == 132 * math.ceil(math.ceil(10**7 / 512) / 132) or most == math.ceil(10**7 / 512)


# ---- Packages ------------------------------------------------------------------------------------


def test_kernels_are_compiled_for_a_device(tmp_path, monkeypatch, capsys):
    """What cannot be compiled for one device is there on the other."""
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


# ---- A run ---------------------------------------------------------------------------------------

WORKER = """
import json, os, sys

request = json.loads(sys.argv[1])
peer, limits = request["peer"], request["limits"]


def emit(event, **fields):
    print(json.dumps({"event": event} | fields), flush=True)


PEERS = {
    "torch": {"adam": ["foreach", "graph"], "lamb": ["graph"]},
    "apex": {"adam": ["apex"], "lamb": ["apex"]},
    "timm": {"lamb": ["timm"]},
}
TITLES = {"foreach": "torch foreach", "apex": "apex", "timm": "timm", "fused": "ours fused",
          "graph": "ours, graph"}
rows = [
    {"name": f"{name}/gpt2", "optimizer": name, "shapes": "gpt2", "title": "GPT-2", "threads": None,
     "purpose": "list", "elements": 10, "bytes": 280, "peers": peers}
    for name, peers in PEERS.get(peer, {}).items()
    if f"{name}/gpt2" not in request["skip"]
]
facts = {"torch": "2.11", "device": "Some GPU", "implementations": TITLES, "jemalloc": None}
emit("plan", rows=rows, facts=facts)
for row in rows:
    emit("row", name=row["name"])
    if "absent" in request:
        results = {name: {"absent": request["absent"]} for name in row["peers"]}
        emit("result", row=row | {"results": results})
        continue
    if peer == "torch" and row["optimizer"] == "adam":
        sys.exit("AcceleratorError: an illegal memory access")
    factors = {name: 2.0 for name in row["peers"]} | {"fused": 1.0}
    figures = {n: {"ms": f, "gbps": 1.0, "share": 0.5 / f} for n, f in factors.items()}
    if peer != "torch" and row["optimizer"] == "lamb":
        assert limits["lamb/gpt2"] == {"batch": 2, "blocks": 264}, limits
    limit = {"ms": 0.5, "batch": 2, "blocks": 264}
    emit("result", row=row | {"limit": limit, "results": figures})
"""


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Beside libraries of which one is absent, in processes of which one crashes at a row."""
    worker, folder, packages = (tmp_path / name for name in ("worker.py", "out", "packages"))
    worker.write_text(WORKER)
    (packages / "timm").mkdir(parents=True)
    (packages / "timm" / "installed").touch()
    (packages / "apex").mkdir()
    (packages / "apex" / "reason").write_text("nobody built it")
    target = dataclasses.replace(run_peers.TARGETS["cuda"], program=str(worker))
    monkeypatch.setitem(run_peers.TARGETS, "cuda", target)
    peers = [f"--peer={name}" for name in ("torch", "apex", "timm")]
    arguments = ["--device", "cuda", "--output", str(folder), "--packages", str(packages), *peers]
    monkeypatch.setattr(sys, "argv", ["run_peers.py", *arguments])
    affinity = os.sched_getaffinity(0)
    run_peers.main()
    os.sched_setaffinity(0, affinity)
    results = json.loads((folder / "results.json").read_text())
    return folder, results, {row["name"]: row for row in results["rows"]}, capsys.readouterr().out


def test_a_crash_is_told_of_all_in_the_process_and_the_next_row_is_measured(run):
    _, _, rows, _ = run
    crashed = {"crashed": "ended with status 1: AcceleratorError: an illegal memory access"}
    adam, lamb = rows["adam/gpt2"]["results"], rows["lamb/gpt2"]["results"]
    assert adam == {
        "foreach": crashed, "graph": crashed, "apex": {"absent": "nobody built it"},
    }  # fmt: skip
    assert lamb["graph"]["times"] == lamb["timm"]["times"] == 2
    assert lamb["fused"] == {"ms": 1.0, "gbps": 1.0, "share": 0.5, "processes": 2}
    assert rows["lamb/gpt2"]["limit"] == {"ms": 0.5}


def test_tables_and_plots_of_a_run(run):
    folder, results, _, printed = run
    assert {path.name for path in folder.iterdir()} == {
        "results.json", "README.md", "time.png", "share.png",
    }  # fmt: skip
    tables = (folder / "README.md").read_text()
    assert tables.startswith("# Optimizer steps beside peers on Some GPU\n\nSome GPU, torch 2.11, ")
    assert "| GPT-2 | absent | 2.00 (2.00×) | 1.00 | 2.00 (2.00×) | 0.500 | 0.50 | 0.25 |" in tables
    assert "| lamb | GPT-2 | 0.25 | 0.50 | 0.25 |" in tables
    told = "apex is absent: nobody built it (adam, GPT-2 and 1 more)."
    assert told in tables
    assert told in " ".join(printed.split())
    assert "lamb, times of ours fused, median over the lists: timm 2.00×." in tables
    assert cuda_peers_report.markdown(results) == tables
    cuda_peers_plot.plot(results | {"rows": results["rows"][:1]}, folder)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_device_one_line_says_so(tmp_path):
    done = subprocess.run(
        [sys.executable, BENCH / "run_peers.py", "--device", "cuda", "--output", tmp_path],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert done.stderr.count("bench: torch sees no CUDA device") == 1
    assert not list(tmp_path.iterdir())


# ---- The kernel of Adan's authors ----------------------------------------------------------------


class AuthorsAdan(optim.Adan):
    """The single-tensor one fails."""

    def __init__(self, params, fused, foreach, **options):
        if not foreach:
            raise RuntimeError("no kernel for this machine")
        super().__init__(params, fused=False, **options)


def test_the_authors_kernel_is_a_contestant_where_it_can_be_imported(monkeypatch):
    names, device = {"authors_single", "authors_multi"}, torch.device("cuda")
    assert not names & set(adan_contestants.present(device))
    for name, members in (("adan", {"Adan": AuthorsAdan}), ("fused_adan", {})):
        module = types.SimpleNamespace(__spec__=types.SimpleNamespace(), **members)
        monkeypatch.setitem(sys.modules, name, module)
    assert names <= set(adan_contestants.present(device))
    assert not names & set(adan_contestants.present(torch.device("cpu")))
    assert adan_check.wrong("authors_multi", torch.device("cpu")) is None
    told = adan_check.wrong("authors_single", torch.device("cpu"))
    assert told == "RuntimeError: no kernel for this machine"
