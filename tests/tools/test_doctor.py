"""The doctor's report: one line each, true, with advice where something costs speed."""

import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import fusedstep
from fusedstep import optim
from fusedstep.__main__ import main
from fusedstep._api.registry import classes
from fusedstep._native import ops
from support.cases import WITH_STATES

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
        installed_at = tmp_path / "fusedstep" / "doctor" / "__init__.py"
        monkeypatch.setattr(doctor, "__file__", str(installed_at))
    monkeypatch.setattr(Path, "read_text", lambda _: "always [madvise] never\n")
    for name in ("MALLOC_CONF", "GLIBC_TUNABLES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(doctor, "jemalloc_decay", lambda _: 10000)
    monkeypatch.setattr(doctor, "mapped_libraries", lambda _: ["libjemalloc.so.2"])
    for found in (doctor.check_jemalloc(), doctor.check_huge_pages()):
        assert "MALLOC_CONF=" in found.advice
        assert found.advice.endswith(" (./run.sh SCRIPT.py does)") != installed
        assert ("run.sh" in found.advice) != installed


@pytest.mark.parametrize(
    ("mapped", "variables", "line"),
    [
        ([], {}, "OMP_NUM_THREADS=4 GLIBC_TUNABLES=glibc.malloc.hugetlb=1 python …"),
        ([], {"GLIBC_TUNABLES": "a=1"}, "GLIBC_TUNABLES=a=1:glibc.malloc.hugetlb=1 python …"),
        (
            ["libjemalloc.so.2"],
            {"MALLOC_CONF": "x:1"},
            "MALLOC_CONF=x:1,dirty_decay_ms:-1,muzzy_decay_ms:-1,thp:always python …",
        ),
    ],
)
def test_the_environment_is_one_line_to_paste(monkeypatch, mapped, variables, line):
    for name in ("MALLOC_CONF", "GLIBC_TUNABLES", "OMP_NUM_THREADS", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    monkeypatch.setattr(doctor, "usable_cpus", lambda: list(range(4)))
    monkeypatch.setattr(doctor, "siblings", str)
    monkeypatch.setattr(doctor, "cpu_quota", lambda: None)
    monkeypatch.setattr(Path, "read_text", lambda _: "always [madvise] never\n")
    monkeypatch.setattr(doctor, "mapped_libraries", lambda _: mapped)
    monkeypatch.setattr(doctor, "jemalloc_decay", lambda _: 10000)
    assert doctor.check_environment().advice.endswith(line)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    monkeypatch.setattr(Path, "read_text", lambda _: "[always] madvise never\n")
    monkeypatch.setattr(doctor, "jemalloc_decay", lambda _: -1)
    assert doctor.check_environment().advice is None


def test_help_shows_the_example_as_an_example(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["fusedstep", "--help"])
    with pytest.raises(SystemExit) as exit_:
        main()
    assert exit_.value.code == 0
    shown = capsys.readouterr().out
    assert "    from fusedstep import optim\n    optimizer = optim.Lamb(" in shown
    assert ">>>" not in shown
    package = Path(fusedstep.__file__).parent
    programs = [path.parent.relative_to(package.parent) for path in package.rglob("__main__.py")]
    assert all(f"python -m {'.'.join(path.parts)}" in shown for path in programs)
    assert all(
        re.search(rf"^ +{command} ", shown, re.MULTILINE) for command in ("doctor", "memory")
    )


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


# ---- of an optimizer -----------------------------------------------------------------------------


def lines_of(optimizer):
    """The lines about an optimizer, as topics with what is printed behind them."""
    machine = {check().topic for check in doctor.CHECKS}
    found = [each for each in fusedstep.doctor(optimizer) if each.topic not in machine]
    return [(each.topic, f"{each.finding} → {each.advice}") for each in found]


def parameter(*shape, dtype=torch.float32):
    return torch.nn.Parameter(torch.ones(shape, dtype=dtype))


@pytest.mark.parametrize("cls", classes, ids=lambda cls: cls.__name__)
def test_a_line_for_each_group_says_how_it_is_stepped(cls, capsys):
    optimizer = cls([{"params": [parameter(4, 4)]}, {"params": [parameter(4, 4)]}])
    for index, (topic, line) in enumerate(lines_of(optimizer)):
        assert topic == f"group {index}"
        assert line.startswith(f"{cls.__name__}, 1 weight, 16 elements, float32 on cpu: native")
        assert f"{topic}      {cls.__name__}" in capsys.readouterr().out or index
    optimizer.param_groups[1]["fused"] = False
    lines = lines_of(optimizer)
    assert "torch operations: fused=False → set fused to None in this group" in lines[1][1]
    assert lines[2][0] == "group 1"
    assert "fused=False, while the optimizer was made with fused=None" in lines[2][1]


def test_options_of_a_checkpoint_are_told():
    params = [parameter(4, 4)]
    optimizer = optim.AdamW(params)
    optimizer.load_state_dict(torch.optim.AdamW(params, foreach=True).state_dict())
    (_, first), (_, second) = lines_of(optimizer)
    assert "torch operations: foreach=True → set foreach to None" in first
    assert "foreach=True, while the optimizer was made with foreach=None: the group, or a" in second
    assert len(lines_of(optim.AdamW(params, foreach=True))) == 1


def test_a_reason_is_the_errors_text():
    ((_, line),) = lines_of(optim.AdamW([parameter(3, dtype=torch.complex64)]))
    assert "torch operations: `fused=True` requires all the params to be floating" in line


@pytest.mark.parametrize(
    ("dtype", "parts", "lr", "share"),
    [
        (torch.bfloat16, 512, 2.0**-10, "100%"),
        (torch.bfloat16, 512, 2.0**-6, "0%"),
        (torch.float16, 4096, 2.0**-13, "100%"),
    ],
)
def test_what_16_bit_weights_lose_is_told(dtype, parts, lr, share):
    """A weight of 1 is the first of those whose neighbours are eps apart."""
    optimizer = optim.AdamW([parameter(10, dtype=dtype)], lr=lr)
    (_, (_, line)) = lines_of(optimizer)
    assert f"a move of less than 1/{parts} of an element rounds away" in line
    assert f"{share} of the elements are too large to move by lr={lr:g}" in line
    name = str(dtype).removeprefix("torch.")
    assert f"1 weight in {name} alone" in line
    small = (torch.ones((), dtype=dtype) * (2 - torch.finfo(dtype).eps)).float()
    assert (small + small / (1.01 * parts)).to(dtype) == small.to(dtype)
    kept = optim.AdamW([parameter(10, dtype=dtype)], lr=lr, master_weights=True)
    assert len(lines_of(kept)) == 1
    assert len(lines_of(optim.Adafactor([parameter(3, 3, dtype=dtype)], lr=None))) == 2


@pytest.mark.skipif(ops.bind is None, reason="built without Python's headers")
@pytest.mark.parametrize("case", WITH_STATES, ids=str)
def test_a_dictionary_that_is_held_is_told_until_it_is_not(case):
    params = [parameter(4, 4)]
    optimizer = case.build(params)

    def step():
        for param in params:
            param.grad = torch.ones_like(param)
        optimizer.step()

    step()
    held = optimizer.state_dict()
    for _ in range(2):
        step()
    topics = [topic for topic, _ in lines_of(optimizer)]
    assert ("state" in topics) == (optimizer._last_step is not None)
    del held
    assert [topic for topic, _ in lines_of(optimizer)] == ["group 0"]


def test_steps_that_were_left_out_are_told():
    optimizer = optim.AdamW([parameter(3)], skip_nonfinite=True)
    optimizer.param_groups[0]["params"][0].grad = torch.full((3,), torch.nan)
    optimizer.step()
    assert lines_of(optimizer)[1][1].startswith("1 step by skip_nonfinite → step(error_if_")


def test_offloaded_and_other_optimizers():
    offloaded = fusedstep.offload(optim.AdamW([parameter(3)]))
    assert [topic for topic, _ in lines_of(offloaded)] == ["group 0"]
    with pytest.raises(TypeError, match=r"must be one of fusedstep.optim, not torch.optim.sgd.SGD"):
        fusedstep.doctor(torch.optim.SGD([parameter(3)]))


@pytest.mark.parametrize(
    "tool", [fusedstep.doctor, fusedstep.verify, fusedstep.compare, fusedstep.convert]
)
def test_what_holds_an_optimizer_is_an_error_that_says_where(tool, capsys):
    optimizer = optim.AdamW([parameter(3)])
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    with pytest.raises(TypeError, match=r"StepLR, which wraps the optimizer: give its \.optimizer"):
        tool(schedule)

    class Holder:
        optimizers = (optimizer,)

    with pytest.raises(TypeError, match=r"Holder, which wraps .*: give its \.optimizers\[0\]"):
        tool(Holder())
    if tool is not fusedstep.doctor:
        with pytest.raises(TypeError, match=r"OffloadedOptimizer, .* call this before offload\(\)"):
            tool(fusedstep.offload(optim.AdamW([parameter(3)])))


def test_a_notebook_shows_a_line_below_what_was_printed(capsys):
    """The text of what is returned repeats nothing."""
    params = [parameter(3)]
    params[0].grad = torch.ones(3)
    optimizer = optim.AdamW(params)
    report = fusedstep.verify(optimizer, steps=1)
    assert repr(report) == "<Report of AdamW: 0 of 1 steps, ok=False>"
    optimizer.step()
    found = fusedstep.doctor(optimizer), fusedstep.compare(optimizer, rounds=1), report
    printed = capsys.readouterr().out
    for each in found:
        assert re.fullmatch("<.*>", repr(each))
        assert repr(each) not in printed
    assert repr(report) == "<Report of AdamW: 1 of 1 steps, ok=True>"
