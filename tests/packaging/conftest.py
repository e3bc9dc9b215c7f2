"""The wheels, built once for all tests that look at them."""

import os

import pytest
from filelock import FileLock

import built_wheels


@pytest.fixture(scope="session")
def wheels(tmp_path_factory) -> built_wheels.Wheels:
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    folder /= "wheels"
    with FileLock(f"{folder}.lock"):
        if not folder.exists():
            built_wheels.build(folder)
    return built_wheels.wheels_in(folder)
