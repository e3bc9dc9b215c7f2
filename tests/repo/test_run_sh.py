"""run.sh in folders with spaces, in those that cannot be written, and on disks that are full."""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]

#: Stands for every program that a build needs: tells what was asked of CMake, and builds nothing.
STUB = """#!/bin/sh
case "$(basename "$0") $1" in
  "g++ -dumpversion") echo 13 ;;
  "cmake --version") echo "cmake version 3.31.0" ;;
  "cmake -S") mkdir -p "$2/build/$4" && printf '%s\\n' "$@" >"$2/asked" ;;
  "cmake --build") printf '%s\\n' "$@" >"$2/built" ;;
  nvidia-smi*) exit 1 ;;
esac
"""


@pytest.fixture
def checkout(repository):
    """A copy of run.sh and its scripts, in a folder with spaces that anybody may enter."""
    with tempfile.TemporaryDirectory(prefix="a b ") as folder:
        Path(folder).chmod(0o755)
        root = Path(folder) / "fu sed"
        shutil.copytree(repository / "scripts", root / "scripts")
        shutil.copy(repository / "run.sh", root)
        shutil.copy(repository / "pyproject.toml", root)
        yield root


@pytest.fixture
def programs(tmp_path):
    """An environment with stubs in place of compilers and CMake."""
    folder = tmp_path / "programs"
    folder.mkdir()
    for name in ("g++", "cmake", "ninja", "nm", "ccache", "nvidia-smi", "apt-get"):
        (folder / name).write_text(STUB)
        (folder / name).chmod(0o755)
    path = os.pathsep.join([str(folder), str(Path(sys.executable).parent), os.environ["PATH"]])
    return os.environ | {"PATH": path, "CXX": str(folder / "g++")}


def run(*command, **options):
    return subprocess.run(
        [str(word) for word in command], capture_output=True, text=True, **options
    )


@pytest.mark.parametrize("target", [[], ["--library"]])
def test_builds_in_a_folder_whose_name_has_spaces(checkout, programs, target):
    (checkout / "build").mkdir()
    for name in ("jemalloc", "python-headers"):  # these are not to be installed
        (checkout / "build" / f".tried-{name}").touch()
    done = run(checkout / "run.sh", "build", *target, env=programs)
    assert done.returncode == 0, done.stderr
    built = (checkout / "build" / "release" / "built").read_text().splitlines()
    assert ("fusedstep_python" in built) == bool(target)
    asked = (checkout / "asked").read_text().splitlines()
    assert asked[:4] == ["-S", str(checkout), "--preset", "release"]
    (python,) = (word for word in asked if word.startswith("-DPython_EXECUTABLE="))
    assert Path(python.partition("=")[2]).is_file()


@pytest.mark.parametrize("folder", [".", "build", "python/fusedstep"])
def test_a_checkout_that_cannot_be_written_is_named_before_anything_else(checkout, folder):
    folder = checkout / folder
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o555)
    nobody = ()
    if os.geteuid() == 0:  # whom no permission binds
        if not shutil.which("setpriv"):
            pytest.skip("there is no setpriv")
        nobody = ("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups")
        for path in (checkout / "build", checkout / "python" / "fusedstep", checkout):
            if path.exists() and path != folder:
                os.chown(path, 65534, 65534)
    done = run(*nobody, checkout / "run.sh", "build")
    folder.chmod(0o755)
    assert done.returncode == 1
    assert done.stderr == (
        f"run.sh: {folder} cannot be written, and builds go there: use a copy that is yours\n"
    )


def test_a_run_leaves_git_status_clean(checkout, programs):
    """With all that commands, tests and benchmarks write, where .gitignore has it."""
    shutil.copy(REPOSITORY / ".gitignore", checkout)
    git = ("git", "-C", checkout, "-c", "user.name=a", "-c", "user.email=a@b")
    for words in (("init", "-q"), ("add", "-A"), ("commit", "-q", "-m", "all")):
        assert run(*git, *words).returncode == 0
    written = (
        *("build/results/a.json", "build/logs/a.log", "python/fusedstep/lib/libfusedstep.so"),
        *("tests/__pycache__/a.pyc", ".pytest_cache/a", ".ruff_cache/a", "dist/a.whl"),
        *(".venv/bin/python", "python/fusedstep.egg-info/PKG-INFO", "data/mnist/a"),
    )
    (checkout / "build").mkdir()
    for name in ("jemalloc", "python-headers"):
        (checkout / "build" / f".tried-{name}").touch()
    for command in ("help", "build"):
        done = run(checkout / "run.sh", command, env=programs)
        assert done.returncode == 0, done.stderr
        (checkout / "asked").unlink(missing_ok=True)  # the stub's
    for name in written:
        (checkout / name).parent.mkdir(parents=True, exist_ok=True)
        (checkout / name).touch()
    assert run(*git, "status", "--porcelain").stdout == ""
    (checkout / "stray").touch()
    assert run(*git, "status", "--porcelain").stdout == "?? stray\n"


@pytest.mark.parametrize("leaves", ["", "build/a.log", "new"])
def test_ci_fails_where_the_tests_leave_a_file(leaves, tmp_path):
    (tmp_path / ".ci").mkdir()
    shutil.copy(REPOSITORY / ".ci/run", tmp_path / ".ci")
    shutil.copy(REPOSITORY / ".gitignore", tmp_path)
    (tmp_path / "build").mkdir()
    (tmp_path / "old").touch()
    (tmp_path / "run.sh").write_text(f'#!/bin/sh\n[ "$1" != test ] || touch run.sh {leaves}\n')
    (tmp_path / "run.sh").chmod(0o755)
    assert run(tmp_path / ".ci/run").returncode == 0  # not of git
    (tmp_path / "new").unlink(missing_ok=True)

    assert run("git", "init", "-q", tmp_path).returncode == 0
    done = run(tmp_path / ".ci/run")
    told = ".ci/run: the tests left files that git sees: ?? new\n"
    assert (done.returncode, done.stderr) == ((1, told) if leaves == "new" else (0, ""))


STEP = 'source "$1/scripts/common.sh" && shift && step x "compiling" "$@"'


def test_a_full_disk_is_told_in_one_line(checkout):
    text = "fatal error: error writing to /tmp/c.s: No space left on device"
    told = f"echo first; echo '{text}'; echo last; exit 3"
    done = run("bash", "-c", STEP, "bash", checkout, "bash", "-c", told)
    assert done.returncode == 3
    assert done.stderr.splitlines() == [
        "run.sh: compiling ... failed",
        f"run.sh: a disk is full: {text}",
    ]


def test_a_full_disk_that_has_no_room_for_a_log_is_told_too(checkout, tmp_path):
    """df as on such a disk."""
    (tmp_path / "df").write_text(
        "#!/bin/sh\necho header\ncase $* in *-h*) echo / 5G;; *) echo 300;; esac"
    )
    (tmp_path / "df").chmod(0o755)
    path = os.pathsep.join([str(tmp_path), os.environ["PATH"]])
    done = run("bash", "-c", STEP, "bash", checkout, "false", env=os.environ | {"PATH": path})
    assert done.stderr.splitlines()[1:] == ["run.sh: a disk is full: / 5G"]


def test_any_other_failure_shows_the_end_of_its_log(checkout):
    done = run("bash", "-c", STEP, "bash", checkout, "bash", "-c", "echo why; exit 4")
    assert done.returncode == 4
    log = checkout / "build" / "logs" / "x.log"
    assert done.stderr.splitlines()[1:] == ["why", f"run.sh: the whole output: {log}"]


def test_the_site_without_a_network_tells_in_one_line_what_it_needs(checkout):
    pyproject = checkout / "pyproject.toml"
    text = pyproject.read_text()
    pyproject.write_text(
        re.sub(r"^docs = \[", r'\g<0>"had-nowhere>=1", ', text, flags=re.MULTILINE)
    )
    code = 'for part in common install docs; do source "$1/scripts/$part.sh"; done; python=$2; '
    code += "is_online() { false; }; docs build"
    done = run("bash", "-c", code, "bash", checkout, sys.executable)
    (line,) = done.stderr.splitlines()
    assert done.returncode == 1
    assert "the site needs had-nowhere>=1" in line
    assert line.endswith(", and there is no network to get them by")


def test_the_fuzz_target_of_layouts_is_made_of_what_there_is(repository):
    script = (repository / "scripts" / "fuzz.sh").read_text(encoding="utf-8")
    (names,) = re.findall(r"/src/plan/\{([\w,]+)\}\.cpp", script)
    for name in names.split(","):
        assert (repository / "src" / "plan" / f"{name}.cpp").is_file(), name
    (library,) = re.findall(r"lib(\w+)\.a", script)
    assert f"--target {library} " in script
    assert f"{library} STATIC" in (repository / "CMakeLists.txt").read_text(encoding="utf-8")


def test_what_the_tests_take_is_read_from_their_summary(tmp_path):
    """Parts that ran beside others were hardly waited for, and took seconds all the same."""
    (tmp_path / "log").write_text(
        "passed   C++                159 s  10321 tests passed\n"
        "passed   Python             626 s  41100 passed, 170 warnings in 625.71s (0:10:25)\n"
        "FAILED   packaging            0 s  1 failed, 23 passed in 95.40s (0:01:35)\n"
        "skipped  site                 0 s  run.sh: skipped: the site is not built\n"
        "passed   fuzz                 2 s  fuzz: 400 cases, 1,927 steps, 266 s: 400 cases passed\n"
    )
    cases = [("a.test_x", "test_1[a]", 7.6), ("a.test_x", "test_1[b]", 4), ("test_y", "test_2", 3)]
    lines = [f'<testcase classname="{a}" name="{b}" time="{c}" />' for a, b, c in cases]
    (tmp_path / "report").write_text(f"<testsuite>{''.join(lines)}</testsuite>")
    (tmp_path / "out.json").write_text('{"files": {"a.test_x": 7, "test_y": 1}}')
    probe = REPOSITORY / "bench" / "probes" / "test_time.py"
    done = run(sys.executable, probe, *(tmp_path / name for name in ("log", "out.json", "report")))
    assert done.returncode == 0, done.stderr
    assert done.stdout == "a.test_x: 12 s, 7 s before\n"
    assert json.loads((tmp_path / "out.json").read_text()) == {
        "parts": [
            {"part": "C++", "seconds": 159, "tests": "10321 tests passed"},
            {"part": "Python", "seconds": 626, "tests": "41100 passed, 170 warnings", "ran": 626},
            {"part": "packaging", "seconds": 0, "tests": "1 failed, 23 passed", "ran": 95},
            {"part": "fuzz", "seconds": 2, "tests": "fuzz: 400 cases, 1,927 steps", "ran": 266},
        ],
        "seconds": 787,
        "files": {"a.test_x": 12, "test_y": 3},
        "functions": {"a.test_x.test_1": 12, "test_y.test_2": 3},
    }
