"""The doctor's report: one line each, true, with advice where something costs speed."""

import importlib
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import fusedstep
from fusedstep.__main__ import main

doctor = importlib.import_module("fusedstep.doctor")  # fusedstep.doctor is the function


def test_one_line_each(capsys):
    findings = fusedstep.doctor()
    lines = capsys.readouterr().out.strip().splitlines()
    assert len(lines) == len(findings)
    for line, (topic, finding, advice) in zip(lines, findings, strict=True):
        assert line.startswith(topic)
        assert finding in line
        assert advice is None or advice in line


def test_the_findings_are_true(capsys):
    found = {topic: finding for topic, finding, _ in fusedstep.doctor()}
    assert found["fusedstep"] == fusedstep.__version__
    assert found["torch"] == torch.__version__
    assert fusedstep.isa() in found["ISA"]
    assert all(isa in found["ISA"] for isa in fusedstep.isas())
    assert str(torch.get_num_threads()) in found["threads"]
    for topic in ("jemalloc", "OpenMP", "huge pages", "CUDA"):
        assert found[topic]


@pytest.mark.parametrize(
    ("mode", "jemalloc", "variables", "advised"),
    [
        ("madvise", [], {}, "glibc.malloc.hugetlb=1"),
        ("madvise", [], {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}, None),
        ("madvise", ["libjemalloc.so.2"], {"MALLOC_CONF": "metadata_thp:always"}, "thp:always"),
        ("madvise", ["libjemalloc.so.2"], {"MALLOC_CONF": "x:1,thp:always"}, None),
        ("always", [], {}, None),
        ("never", [], {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}, "echo madvise"),
    ],
)
def test_huge_pages(monkeypatch, mode, jemalloc, variables, advised):
    others = " ".join({"always", "madvise", "never"} - {mode})
    monkeypatch.setattr(Path, "read_text", lambda _: f"{others} [{mode}]\n")
    monkeypatch.setattr(doctor, "mapped_libraries", lambda _: jemalloc)
    for name in ("MALLOC_CONF", "GLIBC_TUNABLES"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    found = doctor.check_huge_pages()
    assert found.finding.startswith(mode)
    if advised is None:
        assert found.advice is None
    else:
        assert advised in found.advice


@pytest.mark.parametrize(
    ("threads", "variables", "finding", "advised"),
    [
        (8, {}, "8 on 8 cores (16 CPUs usable)", None),
        (17, {}, "17 on", "wait for one another: OMP_NUM_THREADS=8"),
        (1, {"OMP_NUM_THREADS": "1"}, "1 on", "cores are idle: OMP_NUM_THREADS=8"),
        (1, {"OMP_NUM_THREADS": "1", "LOCAL_WORLD_SIZE": "8"}, "8 processes", None),
        (2, {"OMP_NUM_THREADS": "2", "LOCAL_WORLD_SIZE": "4"}, "4 processes, OMP", None),
        (4, {"OMP_NUM_THREADS": "4", "LOCAL_WORLD_SIZE": "8"}, "8 processes", "OMP_NUM_THREADS=1"),
        (1, {"OMP_NUM_THREADS": "1", "LOCAL_WORLD_SIZE": "32"}, "32 processes", None),
        (
            1,
            {"OMP_NUM_THREADS": "1", "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "none"},
            "1 on 8 cores (16 CPUs usable), 2 processes, OMP_NUM_THREADS=1",
            "torchrun sets 1, with which steps on the CPU take several times as long: "
            "OMP_NUM_THREADS=4 torchrun",
        ),
    ],
)
def test_threads(monkeypatch, threads, variables, finding, advised):
    """Eight cores of two CPUs each."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr(doctor, "usable_cpus", lambda: list(range(16)))
    monkeypatch.setattr(doctor, "siblings", lambda cpu: str(cpu % 8))
    monkeypatch.setattr(doctor, "cpu_quota", lambda: None)
    for name in ("OMP_NUM_THREADS", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    found = doctor.check_threads()
    assert finding in found.finding
    if advised is None:
        assert found.advice is None
    else:
        assert advised in found.advice


@pytest.mark.parametrize("installed", [False, True])
def test_run_sh_is_advised_in_a_source_tree_only(monkeypatch, tmp_path, installed):
    if installed:
        monkeypatch.setattr(doctor, "__file__", str(tmp_path / "fusedstep" / "doctor.py"))
    monkeypatch.setattr(Path, "read_text", lambda _: "always [madvise] never\n")
    for name in ("MALLOC_CONF", "GLIBC_TUNABLES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(doctor, "jemalloc_decay", lambda _: 10000)
    for mapped in ([], ["libjemalloc.so.2"]):
        monkeypatch.setattr(doctor, "mapped_libraries", lambda _, mapped=mapped: mapped)
        for found in (doctor.check_jemalloc(), doctor.check_huge_pages()):
            assert "MALLOC_CONF=" in found.advice
            assert found.advice.endswith(" (./run.sh SCRIPT.py does)") != installed
            assert ("run.sh" in found.advice) != installed


def test_help_shows_the_example_as_an_example(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["fusedstep", "--help"])
    with pytest.raises(SystemExit) as exit_:
        main()
    assert exit_.value.code == 0
    shown = capsys.readouterr().out
    assert "    from fusedstep import optim\n    optimizer = optim.Lamb(" in shown
    assert ">>>" not in shown


def test_command_line(subprocess_environment):
    worst = fusedstep.isas()[-1]
    result = subprocess.run(
        [sys.executable, "-m", "fusedstep", "doctor"],
        env=subprocess_environment | {"FUSEDSTEP_ISA": worst, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    lines = {line.split()[0]: line for line in result.stdout.splitlines()}
    assert "one runtime" in lines["OpenMP"]
    assert f"{worst} used" in lines["ISA"]
    if len(fusedstep.isas()) > 1:
        assert "unset FUSEDSTEP_ISA" in lines["ISA"]
    assert lines["threads"].split()[1] == "1"
