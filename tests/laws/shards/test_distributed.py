"""Steps of two processes on the CPU."""

import pytest

from support import (
    codes_of_shards,
    factors_of_shards,
    gradients_of_shards,
    matrices_of_shards,
    projections_of_shards,
    training_of_two,
    two_processes,
)

WORKS = (
    *two_processes.WORKS,
    *two_processes.ON_THE_CPU,
    *codes_of_shards.WORKS,
    *factors_of_shards.WORKS,
    *gradients_of_shards.WORKS,
    *matrices_of_shards.WORKS,
    *projections_of_shards.WORKS,
    *projections_of_shards.ON_THE_CPU,
    *training_of_two.WORKS,
)


@pytest.fixture(scope="module")
def failures():
    return two_processes.failures_by_name("gloo", WORKS)


@pytest.mark.parametrize("name", [work.__name__ for work in WORKS])
def test_two_processes(failures, name):
    if name in failures:
        pytest.fail(failures[name], pytrace=False)
