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

WORKS = {
    two_processes: (*two_processes.WORKS, *two_processes.ON_THE_CPU),
    codes_of_shards: codes_of_shards.WORKS,
    factors_of_shards: factors_of_shards.WORKS,
    gradients_of_shards: gradients_of_shards.WORKS,
    matrices_of_shards: matrices_of_shards.WORKS,
    projections_of_shards: (*projections_of_shards.WORKS, *projections_of_shards.ON_THE_CPU),
    training_of_two: training_of_two.WORKS,
}
"""Works by module."""


# One test for each module: two workers that share the tests of a module would both do its works.
@pytest.mark.parametrize("module", WORKS, ids=lambda module: module.__name__.rpartition(".")[2])
def test_two_processes(module):
    failures = two_processes.failures_by_name("gloo", WORKS[module])
    if failures:
        texts = [f"{name}\n{text}" for name, text in failures.items()]
        pytest.fail("\n".join(texts), pytrace=False)
