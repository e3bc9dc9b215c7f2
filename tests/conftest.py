"""Fixtures of the suite."""

import gc
import os
from pathlib import Path

# Threads that wait for one another must not spin: tests start more of them than there are CPUs.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import pytest
import torch
from _pytest.runner import runtestprotocol

import fusedstep
from fusedstep._native import ops
from support.draw import drawn, is_plain

SHOWN = 0.005
"""Seconds from which pytest's `--durations` shows a fixture."""


def pytest_addoption(parser):
    group = parser.getgroup("combinations of parameters")
    group.addoption("--plain", action="store_true", help="only the plain rows of tests/optimizers")
    group.addoption("--draw", metavar="TEXT", help="a draw of all combinations, chosen by TEXT")


def pytest_configure(config):
    config.addinivalue_line(
        "markers", "whole(parameter=value): a draw has all combinations, or all with these values"
    )


def pytest_collection_modifyitems(config, items):
    """Leaves combinations out, as the options say.

    Of a function's tests that are skipped for one reason, as without a GPU, keeps the first.
    """
    text = config.getoption("draw")
    if config.getoption("plain"):
        items[:] = filter(is_plain, items)
    if text is not None:
        items[:] = drawn(items, text)
    kept = {}
    for item in items:
        reasons = [m.kwargs["reason"] for m in item.iter_markers("skipif") if m.args[0]]
        name = item.nodeid.partition("[")[0] if reasons else item.nodeid
        kept.setdefault((name, *reasons), item)
    items[:] = kept.values()


def pytest_collection_finish():
    """The collector need not go over a million objects of tests each time: they live to the end."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure():
    """At exit it has to: libraries report what it would have freed as leaked."""
    gc.unfreeze()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item, nextitem):
    """Runs a test, which leaves its thread count, instruction set and denormal mode to no other.

    A report to another process takes as long as a short test. Left out are those of fixtures that
    pass in less time than `--durations` shows, and the keywords of what passes: nobody reads them.
    """
    count = torch.get_num_threads()
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    for report in runtestprotocol(item, log=False, nextitem=nextitem):
        if report.passed:
            report.keywords = {}
        if not report.passed or report.when == "call" or report.duration >= SHOWN:
            item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    torch.set_num_threads(count)
    torch.set_flush_denormal(False)
    ops.force_isa(None)
    return True


@pytest.fixture(scope="session")
def repository() -> Path:
    return Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def subprocess_environment() -> dict[str, str]:
    """The environment in which another Python finds the package and the helpers of the suite."""
    package = Path(fusedstep.__file__).resolve().parent.parent
    path = os.pathsep.join([str(package), str(Path(__file__).resolve().parent)])
    return os.environ | {"PYTHONPATH": path}
