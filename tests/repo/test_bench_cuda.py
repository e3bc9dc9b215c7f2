"""The benchmark on a GPU: other libraries' options, the limit's ways, a run. No GPU is needed."""

import json
import math
import os
import sys
import types
from pathlib import Path

import pytest
import torch

import run as bench_run
from fusedstep import optim
from harness import processes
from suites import devices, shapes, subjects, worker
from suites.implementations import FUSED, Implementation, Stepper, UnavailableError
from suites.limit_library import Limit
from suites.rows import BFLOAT16, FLOAT32, Row
from suites.suite import SUITES
from support.benchmark import LIBRARIES
from support.cases import PLAIN

CASES = {case.name: case for case in PLAIN}
SOME = shapes.ShapeList("some", "some", ((40, 30), (7, 6), (64, 3, 3, 3)))
PEERS = {each.name: each for each in SUITES["peers", "cuda"].implementations}


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


OTHERS = {
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
    for name, members in OTHERS.items():
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
    implementation, row = PEERS[peer], Row(CASES[case], SOME, precision)
    assert implementation.exists(row)
    params = subjects.make(SOME, precision.weight)
    formula = implementation.formula_of(row)
    check = subjects.Check(formula, SOME, precision.weight, implementation.slack)
    assert check(implementation.build(row, params), params) is None


def test_only_right_steps_are_timed_and_what_is_amiss_is_told(monkeypatch):
    def unavailable(row, params):
        raise UnavailableError("no such library")

    def failing(row, params):
        raise RuntimeError("no kernel for this machine\nand so on")

    def full(row, params):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB. GPU 0 has")

    def wrong(row, params):
        return Stepper(torch.optim.SGD(params, lr=1e-2))

    builds = {"absent": unavailable, "failed": failing, "full": full, "wrong": wrong}
    bench = worker.Bench(worker.Request(until=math.inf))
    bench.implementations = [
        *(Implementation(name, name, build) for name, build in builds.items()),
        FUSED,
    ]
    found = worker.Measurement(bench, Row(CASES["adam"], SOME), seconds=0.0).run()["results"]
    assert found["absent"] == {"absent": "no such library"}
    assert found["failed"] == {"failed": "RuntimeError: no kernel for this machine"}
    assert found["full"] == {"memory": "OutOfMemoryError: CUDA out of memory"}
    assert "off" in found["wrong"]["wrong"]
    assert found["fused"]["ms"] > 0
    assert found["fused"]["samples"] >= worker.LEAST_ROUNDS


def test_what_does_not_fit_together_is_measured_one_after_the_other(monkeypatch):
    bench = worker.Bench(worker.Request(until=math.inf, names=("unfused", "fused")))
    row = Row(CASES["adam"], SOME)
    monkeypatch.setattr(bench.device, "available_memory", lambda: 3 * row.arrays_bytes)
    groups = []
    take_turns = worker.take_turns
    monkeypatch.setattr(
        worker,
        "take_turns",
        lambda group, until: (groups.append(len(group)), take_turns(group, until)),
    )
    found = worker.Measurement(bench, row, seconds=0.0).run()["results"]
    assert found["unfused"]["ms"] > 0
    assert found["fused"]["ms"] > 0
    assert groups == [1, 1]
    monkeypatch.setattr(bench.device, "available_memory", lambda: row.arrays_bytes)
    assert "of memory" in worker.Measurement(bench, row, seconds=0.0).run()["skipped"]


# ---- The limit -----------------------------------------------------------------------------------


def test_ways_of_the_limit_are_of_one_block_at_least():
    assert {way.blocks for way in devices.ways(words=3, processors=132)} == {1}
    most = max(way.blocks for way in devices.ways(words=10**7, processors=132))
    assert most == math.ceil(10**7 / 512)


def test_limits_are_restored_in_another_process():
    limit = Limit(0.5, None, (devices.Way(2, 264), devices.Way(4, 132)))
    known = json.loads(json.dumps(devices.described(limit)))
    assert known["ms"] == 500
    restored = devices.Cuda.restored(known)
    assert (restored.seconds, restored.walks) == (math.inf, limit.walks)


# ---- A run ---------------------------------------------------------------------------------------

WORKER = """
import json, sys

request = json.loads(sys.argv[1])
names, limits = request["names"], request["limits"]


def emit(event, **fields):
    print(json.dumps({"event": event} | fields), flush=True)


OF = {"adam": ["foreach", "graph", "apex"], "lamb": ["graph", "apex", "timm"]}
TITLES = {"foreach": "torch foreach", "apex": "apex", "timm": "timm", "fused": "ours fused",
          "graph": "ours, graph"}
rows = [
    {"name": f"{name}/gpt2", "optimizer": name, "shapes": "gpt2", "title": "GPT-2",
     "purpose": "list", "elements": 10, "bytes": 280, "names": [n for n in of if n in names]}
    for name, of in OF.items()
    if set(of) & set(names) and f"{name}/gpt2" not in request["skip"]
]
facts = {"torch": "2.11", "device": "Some GPU", "implementations": TITLES, "jemalloc": None}
emit("plan", rows=rows, facts=facts)
for row in rows:
    emit("row", name=row["name"])
    if "absent" in request:
        results = {name: {"absent": request["absent"]} for name in row["names"]}
        emit("result", row=row | {"results": results})
        continue
    if "foreach" in names and row["optimizer"] == "adam":
        sys.exit("AcceleratorError: an illegal memory access")
    factors = {name: 2.0 for name in row["names"]} | {"fused": 1.0}
    figures = {n: {"ms": f, "share": 0.5 / f} for n, f in factors.items()}
    if "timm" in names:
        assert limits["lamb/gpt2"]["walks"] == [{"batch": 2, "blocks": 264}], limits
    limit = {"ms": 0.5, "seconds": 5e-4, "memory": None, "walks": [{"batch": 2, "blocks": 264}]}
    emit("result", row=row | {"limit": limit, "results": figures})
"""


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Beside libraries of which one is absent, in processes of which one crashes at a row."""
    program, folder, packages = (tmp_path / name for name in ("worker.py", "out", "packages"))
    program.write_text(WORKER)
    (packages / "timm").mkdir(parents=True)
    (packages / "timm" / "installed").touch()
    (packages / "apex").mkdir()
    (packages / "apex" / "reason").write_text("nobody built it")
    monkeypatch.setattr(processes, "WORKER", program)
    (tmp_path / "libfusedstep_limit.so").touch()
    peers = [f"--peer={name}" for name in ("foreach", "apex", "timm")]
    arguments = ["peers", "--device", "cuda", "--output", str(folder), "--packages", str(packages)]
    arguments += ["--libraries", str(tmp_path), *peers]
    monkeypatch.setattr(sys, "argv", ["run.py", *arguments])
    affinity = os.sched_getaffinity(0)
    bench_run.main()
    os.sched_setaffinity(0, affinity)
    results = json.loads((folder / "peers.json").read_text())
    return folder, results, {row["name"]: row for row in results["rows"]}, capsys.readouterr().out


def test_a_crash_is_told_of_all_in_the_process_and_the_next_row_is_measured(run):
    _, _, rows, _ = run
    crashed = {"crashed": "ended with status 1: AcceleratorError: an illegal memory access"}
    adam, lamb = rows["adam/gpt2"]["results"], rows["lamb/gpt2"]["results"]
    assert adam == {
        "foreach": crashed, "graph": crashed, "apex": {"absent": "nobody built it"},
    }  # fmt: skip
    assert lamb["graph"]["times"] == lamb["timm"]["times"] == 2
    assert lamb["fused"] == {"ms": 1.0, "share": 0.5, "processes": 2}
    assert rows["lamb/gpt2"]["limit"] == {"ms": 0.5}


def test_tables_of_a_run(run):
    folder, results, _, printed = run
    assert {path.name for path in folder.iterdir()} == {"peers.json", "README.md"}
    assert results["allocator"] == "glibc"
    tables = (folder / "README.md").read_text()
    assert "Some GPU, torch 2.11, " in tables
    assert "| GPT-2 | absent | 2.00 (2.00×) | 1.00 | 2.00 (2.00×) | 0.500 | 0 | 0.50 | 0.25 |" in (
        tables
    )
    told = "apex is absent: nobody built it (adam, GPT-2 and 1 more)."
    assert told in tables
    assert told in " ".join(printed.split())


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.parametrize("words", [["cuda"], ["peers", "--device", "cuda"]])
def test_without_a_device_one_line_says_so(tmp_path, monkeypatch, words):
    (tmp_path / "libfusedstep_limit.so").touch()
    options = ["--output", str(tmp_path / "out"), "--libraries", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["run.py", *words, *options])
    affinity = os.sched_getaffinity(0)
    with pytest.raises(SystemExit, match="bench: torch sees no CUDA device"):
        bench_run.main()
    os.sched_setaffinity(0, affinity)
    assert not (tmp_path / "out").exists()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_row_is_measured_on_the_device():
    if not (LIBRARIES / devices.CUDA_LIMIT).is_file():
        pytest.skip("the limit is not built")
    names = [each.name for each in SUITES["steps", "cuda"].implementations]
    request = worker.Request(
        until=math.inf, device="cuda", names=tuple(names), filter="^adam/matrix$",
        libraries=str(Path(LIBRARIES)),
    )  # fmt: skip
    bench = worker.Bench(request)
    (row,) = bench.rows()
    measured = bench.measured(row, seconds=3.0)
    assert set(measured["results"]) == set(names)
    assert all("ms" in result for result in measured["results"].values()), measured
    assert measured["limit"]["ms"] > 0
