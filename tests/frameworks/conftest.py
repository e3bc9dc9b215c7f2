"""Settings that frameworks read at their import, and what spares the collector their code."""

import gc
import os

import pytest

os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("DO_NOT_TRACK", "1")


@pytest.fixture(scope="module")
def imported() -> list[bool]:
    """A list that the first test of a file fills: from then on the framework is there."""
    return []


@pytest.fixture(autouse=True)
def _collector_leaves_imports_alone(imported):
    """Accelerate collects after each training, which takes longer among a million objects."""
    yield
    if not imported:
        imported.append(True)
        gc.collect()
        gc.freeze()
