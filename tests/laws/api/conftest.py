"""Fixtures of torch's face."""

import pytest


@pytest.fixture
def compiler_reset(monkeypatch):
    import torch._dynamo  # takes seconds, which other tests need not wait for

    # It flushes the CPU's caches for each graph, 50 ms of a CPU, to log how long guards take.
    monkeypatch.setattr(torch._dynamo.guards, "profile_guard_manager", lambda *_: 0.0)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
