"""Steps of two processes on the CPU."""

import pytest

import two_processes


@pytest.fixture(scope="module")
def failures():
    return two_processes.failures_by_name("gloo")


@pytest.mark.parametrize("name", [work.__name__ for work in two_processes.WORKS])
def test_two_processes(failures, name):
    if name in failures:
        pytest.fail(failures[name], pytrace=False)
