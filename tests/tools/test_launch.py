"""Settings of `./run.sh SCRIPT.py` for a program: threads, pinning, allocator, import path."""

import ctypes.util
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LAUNCH = ROOT / "scripts" / "launch.py"

REPORT = """
import json, os, sys
maps = open("/proc/self/maps").read()
print(json.dumps({
    "arguments": sys.argv[1:],
    "cpus": sorted(os.sched_getaffinity(0)),
    "jemalloc": "jemalloc" in maps,
    "environment": dict(os.environ),
}))
sys.exit(7)
"""


@pytest.fixture
def launched(tmp_path):
    """Runs a script by launch.py; returns what the script saw and the line on stderr."""
    script = tmp_path / "report.py"
    script.write_text(REPORT)

    def launched(*arguments, **environment):
        clean = {
            name: v for name, v in os.environ.items() if not name.startswith(("OMP_", "GOMP_"))
        }
        done = subprocess.run(
            [sys.executable, LAUNCH, script, *arguments],
            env=clean | environment,
            cwd=tmp_path,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 7, done.stderr
        assert done.stderr.count("\n") == 1, done.stderr
        return json.loads(done.stdout), done.stderr

    return launched


@pytest.fixture
def launch():
    """launch.py as a module."""
    spec = importlib.util.spec_from_file_location("launch", LAUNCH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def two_sockets(launch, monkeypatch):
    """A machine of two sockets with two cores each, two hardware threads a core, all allowed."""
    siblings = ["0,4", "1,5", "2,6", "3,7"] * 2
    places = {
        "thread_siblings_list": siblings.__getitem__,
        "physical_package_id": lambda cpu: cpu // 2 % 2,
    }
    monkeypatch.setattr(launch, "topology", lambda cpu, name: str(places[name](cpu)))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    return launch


def test_program_gets_arguments_import_path_and_its_own_exit_status(launched):
    seen, _ = launched("--a", "b c", PYTHONPATH="/elsewhere")
    assert seen["arguments"] == ["--a", "b c"]
    assert seen["environment"]["PYTHONPATH"] == f"{ROOT / 'python'}:/elsewhere"


def test_one_thread_a_core_and_pinned_to_them(launched):
    seen, told = launched()
    threads = int(seen["environment"]["OMP_NUM_THREADS"])
    assert 1 <= threads <= len(seen["cpus"])
    assert set(seen["cpus"]) <= os.sched_getaffinity(0)
    assert f"OMP_NUM_THREADS={threads} on CPUs" in told


def test_number_of_threads_given_by_the_user_is_kept(launched):
    assert launched(OMP_NUM_THREADS="1")[0]["environment"]["OMP_NUM_THREADS"] == "1"


def test_more_threads_than_cores_are_not_squeezed_onto_one_socket(launched):
    seen, told = launched(OMP_NUM_THREADS="10000")
    assert set(seen["cpus"]) == os.sched_getaffinity(0)
    assert "not pinned" in told


def test_pinning_by_the_user_is_left_alone(launched):
    seen, told = launched(OMP_PROC_BIND="false")
    assert set(seen["cpus"]) == os.sched_getaffinity(0)
    assert "pinning as set" in told


@pytest.mark.skipif(not ctypes.util.find_library("jemalloc"), reason="no jemalloc on this machine")
def test_jemalloc_is_mapped_with_the_settings_that_keep_pages(launched):
    seen, told = launched()
    assert seen["jemalloc"]
    assert seen["environment"]["MALLOC_CONF"] == (
        "oversize_threshold:1,background_thread:true,metadata_thp:auto,"
        "dirty_decay_ms:-1,muzzy_decay_ms:-1,thp:always"
    )
    assert "(mapped)" in told


@pytest.mark.skipif(not ctypes.util.find_library("jemalloc"), reason="no jemalloc on this machine")
def test_jemalloc_that_refuses_a_setting_is_not_used(launch, monkeypatch):
    monkeypatch.setattr(launch, "MALLOC_CONF", "no_such_setting:1,dirty_decay_ms:-1")
    env = dict(os.environ)
    assert "not used: <jemalloc>: Invalid conf pair" in launch.jemalloc(env)
    assert env == os.environ


def test_without_jemalloc_it_says_so_and_goes_on(launch, monkeypatch):
    monkeypatch.setattr(ctypes.util, "find_library", lambda _: None)
    env = dict(os.environ)
    env.pop("GLIBC_TUNABLES", None)
    assert launch.allocator(env).startswith("no jemalloc")
    assert env.pop("GLIBC_TUNABLES") == "glibc.malloc.hugetlb=1"
    assert env == {k: v for k, v in os.environ.items() if k != "GLIBC_TUNABLES"}


def test_tunables_of_the_user_are_kept(launch, monkeypatch):
    monkeypatch.setattr(ctypes.util, "find_library", lambda _: None)
    env = os.environ | {"GLIBC_TUNABLES": "glibc.malloc.arena_max=1"}
    assert "GLIBC_TUNABLES=glibc.malloc.arena_max=1" in launch.allocator(env)
    assert env["GLIBC_TUNABLES"] == "glibc.malloc.arena_max=1"


def test_one_hardware_thread_of_each_core_of_one_socket(two_sockets):
    assert two_sockets.cores_of_one_socket() == [0, 1]


def test_socket_with_most_allowed_cores_is_chosen(two_sockets, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {1, 5, 6, 7})
    assert two_sockets.cores_of_one_socket() == [6, 7]


def test_container_with_less_time_than_cores_gets_fewer_threads(two_sockets, monkeypatch):
    monkeypatch.setattr(os, "sched_setaffinity", lambda *_: None)
    monkeypatch.setattr(two_sockets, "cpu_quota", lambda: 1)
    env = {}
    assert two_sockets.threads_and_pinning(env) == "OMP_NUM_THREADS=1 on CPUs 0-1"
    assert env == {"OMP_NUM_THREADS": "1"}


@pytest.mark.parametrize(
    ("numbers", "text"), [([0], "0"), ([0, 1, 2, 5], "0-2,5"), ([1, 3, 4], "1,3-4")]
)
def test_ranges(launch, numbers, text):
    assert launch.ranges(numbers) == text
