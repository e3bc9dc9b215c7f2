"""Law: a build tells a terminal how far it has come, and nothing else of it changes."""

import json
import os
import re
import runpy
import subprocess
import sys
import tarfile

import pytest
from scikit_build_core import build

from built_wheels import ROOT, run

BACKEND = ROOT / "packaging" / "backend" / "fusedstep_build.py"

#: A project that needs no compiler: of two steps, the second takes a second.
PROJECT = """
[build-system]
requires = ["scikit-build-core"]
build-backend = "fusedstep_build"
backend-path = ["backend"]

[project]
name = "tiny"
version = "1"
"""
CMAKE = """
cmake_minimum_required(VERSION 3.25)
project(tiny LANGUAGES NONE)
message(STATUS "CUDA kernels are compiled for 80-real;90, which takes minutes")
set(run ${CMAKE_COMMAND} -E)
add_custom_command(OUTPUT one COMMAND ${run} touch one)
add_custom_command(OUTPUT two COMMAND ${run} sleep 1 COMMAND ${run} LAST DEPENDS one)
add_custom_target(both ALL DEPENDS two)
"""

#: Runs a command whose controlling terminal is a new one, and passes on what it writes there.
SPAWN = "import os, pty, sys; sys.exit(os.waitstatus_to_exitcode(pty.spawn(sys.argv[1:])))"


def project(folder, last="touch two", backend=None):
    (folder / "backend").mkdir(parents=True)
    (folder / "backend" / BACKEND.name).write_text(backend or BACKEND.read_text())
    (folder / "pyproject.toml").write_text(PROJECT)
    (folder / "CMakeLists.txt").write_text(CMAKE.replace("LAST", last))
    return folder


def wheel(folder, *options):
    """The command that makes a wheel of a project."""
    pip = (sys.executable, "-m", "pip", "wheel", "--disable-pip-version-check", "--no-index")
    return [*pip, "--no-build-isolation", "--no-deps", *options, "-w", folder / "out", folder]


def answer(command):
    """The status of a command, and what it writes."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [str(word) for word in command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=environment,
    )
    return done.returncode, done.stdout.decode()


def on_a_terminal(*command):
    return answer([sys.executable, "-c", SPAWN, *command])


@pytest.mark.parametrize(
    ("last", "status", "end"),
    [("touch two", 0, "all compiled.*done"), ("cat nothing", 1, "1 of 2 compiled.*error")],
    ids=["built", "failed"],
)
def test_a_terminal_sees_progress(tmp_path, last, status, end):
    found, shown = on_a_terminal(*wheel(project(tmp_path / "tiny", last)))
    assert found == status, shown
    assert re.search(
        r"kernels for CPUs and GPUs \(80-real, 90\), about \d+ min on \d+ cores", shown
    )
    assert re.search(r"\r\033\[K  fusedstep: 1 of 2 compiled, 0 min \d\d s\r", shown), shown
    assert re.search(rf"\r\033\[K  fusedstep: {end}", shown), shown
    assert ("nothing" in shown) == (status == 1)  # the error's text is still pip's to show


def test_what_is_promised_was_measured():
    file = ROOT / "bench" / "results" / "nvidia-h100" / "build_time.json"
    of_cpu, of_all = (row["cpu_seconds"] for row in json.loads(file.read_text())["rows"])
    backend = runpy.run_path(str(BACKEND))
    assert (backend["_CPU"], backend["_CPU"] + backend["_GPU"]) == (of_cpu, of_all)


@pytest.mark.parametrize("last", ["touch two", "cat nothing"], ids=["built", "failed"])
def test_without_a_terminal_the_output_is_scikit_build_cores(tmp_path, last):
    def output(name, *backend):
        status, text = answer(wheel(project(tmp_path / name, last, *backend)))
        return status, re.sub(r"sha256=\w+|/\S+", "…", text)

    assert output("ours") == output("theirs", "from scikit_build_core.build import *")


def test_a_terminal_that_shows_the_output_sees_no_progress(tmp_path):
    """With -v, and where pip's own output goes elsewhere, as in ./run.sh wheel.

    So it is for pip in the background.
    """
    folder = project(tmp_path / "tiny")
    _, shown = on_a_terminal(*wheel(folder, "-v"))
    assert "[2/2]" in shown
    assert "fusedstep: " not in shown
    _, shown = on_a_terminal("sh", "-c", 'set -m; "$@" & wait', "sh", *wheel(folder))
    assert "Successfully built" in shown
    assert "fusedstep: " not in shown
    redirected = 'exec "$@" >/dev/null'
    assert on_a_terminal("sh", "-c", redirected, "sh", *wheel(folder)) == (0, "")


def test_every_hook_is_there_and_a_source_archive_has_them(tmp_path):
    code = (
        "import sys; sys.path.insert(0, 'packaging/backend'); import fusedstep_build as hooks;"
        f"print(*(getattr(hooks, name).__name__ for name in {build.__all__}));"
        f"hooks.build_sdist({str(tmp_path)!r})"
    )
    assert run(sys.executable, "-c", code, cwd=ROOT).splitlines()[0].split() == build.__all__
    (archive,) = tmp_path.glob("fusedstep-*.tar.gz")
    with tarfile.open(archive) as files:
        names = files.getnames()
    assert f"{archive.name.removesuffix('.tar.gz')}/packaging/backend/fusedstep_build.py" in names
