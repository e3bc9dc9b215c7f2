"""Fixtures of the suite."""

import gc
import os
from pathlib import Path

# Threads that wait for one another must not spin: tests start more of them than there are CPUs.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import pytest
import torch

import fusedstep
from cases import PLAIN, WITH_COUNTS, WITH_STATES
from fusedstep import _ops


def pytest_addoption(parser):
    parser.addoption("--plain", action="store_true", help="only the plain rows of tests/optimizers")


def pytest_collection_modifyitems(config, items):
    """Keeps all tests that take no row."""

    def is_plain(item):
        row = item.callspec.params.get("case") if hasattr(item, "callspec") else None
        return row is None or row in (*PLAIN, *WITH_STATES, *WITH_COUNTS)

    if config.getoption("plain"):
        items[:] = filter(is_plain, items)


def pytest_collection_finish():
    """The collector need not go over a million objects of tests each time: they live to the end."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure():
    """At exit it has to: libraries report what it would have freed as leaked."""
    gc.unfreeze()


@pytest.fixture(autouse=True)
def _process_settings_restored():
    """No test leaves its thread count, instruction set or denormal mode to the next."""
    count = torch.get_num_threads()
    yield
    torch.set_num_threads(count)
    torch.set_flush_denormal(False)
    _ops.force_isa(None)


@pytest.fixture(scope="session")
def repository() -> Path:
    return Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def subprocess_environment() -> dict[str, str]:
    """The environment in which another Python finds the package and the helpers of the suite."""
    package = Path(fusedstep.__file__).resolve().parent.parent
    path = os.pathsep.join([str(package), str(Path(__file__).resolve().parent)])
    return os.environ | {"PYTHONPATH": path}
