"""The folders of the benchmark and its native parts, and helpers of its tests."""

from pathlib import Path

import pytest

from suites import kernels, limit_library

BENCH = Path(limit_library.__file__).parents[1]
LIBRARIES = BENCH.parent / "build" / "release" / "bench"

needs_limit = pytest.mark.skipif(
    not (LIBRARIES / limit_library.NAME).is_file(), reason="the limit is not built"
)
needs_kernels = pytest.mark.skipif(
    not (LIBRARIES / kernels.NAME).is_file(), reason="built without Google Benchmark"
)
