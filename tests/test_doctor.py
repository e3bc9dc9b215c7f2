"""The doctor's report: one line each, true, with advice where something costs speed."""

import subprocess
import sys

import torch

import fusedstep


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
