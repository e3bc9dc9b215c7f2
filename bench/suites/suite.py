"""The suites: rows on a device, and the processes that measure implementations of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from suites import implementations as known
from suites import rows
from suites.implementations import Implementation
from suites.rows import Row


@dataclass(frozen=True)
class Process:
    """Implementations that are measured in one process, with ours."""

    name: str
    names: tuple[str, ...]

    @property
    def package(self) -> str | None:
        """The library that they are from, which peer_packages.py has installed."""
        return None if self.name in ("torch", "compiled") else self.name

    @property
    def share(self) -> int:
        """The share of the time, with ours and the limit."""
        return len(self.names) + 2


@dataclass(frozen=True)
class Suite:
    implementations: tuple[Implementation, ...]
    """In the order of the tables: the baseline first, ours last."""
    rows: Callable[..., Iterable[Row]]
    seconds: float
    """For all, unless told."""
    allocators: tuple[str, ...] = ("jemalloc",)
    has_limit: bool = True
    leaves_out: bool = False
    """Rows for which no time is left are left out, instead of measured shortly."""

    @property
    def processes(self) -> list[Process]:
        """One for torch's and ours, which looks for the limits, and one for each library."""
        names: dict[str, list[str]] = {"torch": []}
        for each in self.implementations:
            names.setdefault(each.process, []).append(each.name)
        return [Process(process, tuple(found)) for process, found in names.items()]


_BOTH = ("glibc", "jemalloc")
_STEPS = (
    known.UNFUSED, known.FOR_LOOP, known.FOREACH, known.TORCH_FUSED, known.KEEP_GRAD, known.FUSED
)  # fmt: skip
_CUDA_STEPS = (
    known.UNFUSED, known.FOREACH, known.CUDA_FUSED, known.TORCH_GRAPH, known.FUSED, known.GRAPH
)  # fmt: skip
_PEERS = (
    known.UNFUSED, known.FOR_LOOP, known.FOREACH, known.COMPILED, known.TORCH_FUSED,
    *known.CPU_LIBRARIES, known.FUSED,
)  # fmt: skip
_CUDA_PEERS = (
    known.FOR_LOOP, known.FOREACH, known.CUDA_FUSED, known.TORCH_GRAPH, known.COMPILED,
    *known.CUDA_LIBRARIES, known.FUSED, known.GRAPH,
)  # fmt: skip
_EMBEDDING = Suite(known.EMBEDDING, rows.embedding, 60, has_limit=False)
_CPU_EMBEDDING = replace(
    _EMBEDDING, implementations=(*known.EMBEDDING[:-1], known.FBGEMM, known.EMBEDDING[-1])
)
_ADAN = Suite(known.ADAN, rows.adan, 600, has_limit=False)

SUITES = {
    ("steps", "cpu"): Suite(_STEPS, rows.steps, 1200, _BOTH),
    ("steps", "cuda"): Suite(_CUDA_STEPS, rows.steps, 300, ("glibc",)),
    ("peers", "cpu"): Suite(_PEERS, rows.beside_peers, 1500, _BOTH, leaves_out=True),
    ("peers", "cuda"): Suite(_CUDA_PEERS, rows.beside_peers, 600, ("glibc",), leaves_out=True),
    ("clipping", "cpu"): Suite(known.CLIPPING, rows.clipping, 64, has_limit=False),
    ("embedding", "cpu"): _CPU_EMBEDDING,
    ("embedding", "cuda"): _EMBEDDING,
    ("adan", "cpu"): _ADAN,
    ("adan", "cuda"): _ADAN,
}
