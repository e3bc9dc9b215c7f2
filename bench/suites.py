"""The suites: rows on a device, and the processes that measure implementations of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import rows
from implementations import (
    ADAN,
    CLIPPING,
    COMPILED,
    CPU_LIBRARIES,
    CUDA_FUSED,
    CUDA_LIBRARIES,
    EMBEDDING,
    FOR_LOOP,
    FOREACH,
    FUSED,
    GRAPH,
    KEEP_GRAD,
    TORCH_FUSED,
    TORCH_GRAPH,
    UNFUSED,
    Implementation,
)
from rows import Row


@dataclass(frozen=True)
class Process:
    """Implementations that are measured in one process, beside ours."""

    names: tuple[str, ...]
    package: str | None = None
    """The library that they are from, which peer_packages.py has installed."""
    allocates: bool = False
    """A step makes temporaries: its time depends on the allocator."""
    share: float = 1
    """Of the time."""

    def __str__(self) -> str:
        return self.package or (self.names[0] if len(self.names) == 1 else "all")


@dataclass(frozen=True)
class Suite:
    implementations: tuple[Implementation, ...]
    """In the order of the tables: the baseline first, ours last."""
    rows: Callable[..., Iterable[Row]]
    processes: tuple[Process, ...]
    """The first one looks for the limits; the others begin with the ways that were best in it."""
    seconds: float
    """For all, unless told."""
    allocators: tuple[str, ...] = ("jemalloc",)
    has_limit: bool = True
    leaves_out: bool = False
    """Rows for which no time is left are left out, instead of measured shortly."""

    def named(self, names: Iterable[str]) -> list[Implementation]:
        """Those of a process, and ours."""
        return [each for each in self.implementations if each.name in (*names, "fused")]


def _together(found: tuple[Implementation, ...]) -> tuple[Process, ...]:
    return (Process(tuple(each.name for each in found), allocates=True),)


_STEPS = (UNFUSED, FOR_LOOP, FOREACH, TORCH_FUSED, KEEP_GRAD, FUSED)
_CUDA_STEPS = (UNFUSED, FOREACH, CUDA_FUSED, TORCH_GRAPH, FUSED, GRAPH)
_PEERS = (UNFUSED, FOR_LOOP, FOREACH, COMPILED, TORCH_FUSED, *CPU_LIBRARIES, FUSED)
_CUDA_PEERS = (
    FOR_LOOP, FOREACH, CUDA_FUSED, TORCH_GRAPH, COMPILED, *CUDA_LIBRARIES, FUSED, GRAPH
)  # fmt: skip
_BOTH = ("glibc", "jemalloc")

SUITES = {
    ("steps", "cpu"): Suite(_STEPS, rows.steps, _together(_STEPS), 1200, _BOTH),
    ("steps", "cuda"): Suite(_CUDA_STEPS, rows.steps, _together(_CUDA_STEPS), 300, ("glibc",)),
    ("peers", "cpu"): Suite(
        _PEERS,
        rows.beside_peers,
        (
            Process(("fused",), share=5),
            Process(("torch_fused",), share=2),
            Process(("unfused",), allocates=True, share=1.5),
            Process(("for_loop",), allocates=True),
            Process(("foreach",), allocates=True),
            Process(("compiled",)),
            Process(("deepspeed",), "deepspeed", share=2),
            Process(("timm",), "timm", allocates=True),
            Process(("pytorch_optimizer",), "pytorch_optimizer", allocates=True),
            Process(("torchao_8bit", "torchao"), "torchao"),
            Process(("bitsandbytes_8bit", "bitsandbytes"), "bitsandbytes"),
        ),
        1500,
        _BOTH,
        leaves_out=True,
    ),
    ("peers", "cuda"): Suite(
        _CUDA_PEERS,
        rows.beside_peers,
        (
            Process(("for_loop", "foreach", "torch_fused", "torch_graph", "graph"), share=7),
            Process(("apex",), "apex", share=3),
            Process(("deepspeed", "deepspeed_lamb"), "deepspeed", share=3),
            Process(("timm",), "timm", share=2),
            Process(("compiled",), share=4),
        ),
        600,
        ("glibc",),
        leaves_out=True,
    ),
    ("clipping", "cpu"): Suite(CLIPPING, rows.clipping, _together(CLIPPING), 64, has_limit=False),
    **{
        ("embedding", device): Suite(
            EMBEDDING, rows.embedding, _together(EMBEDDING), 60, has_limit=False
        )
        for device in ("cpu", "cuda")
    },
    **{
        ("adan", device): Suite(ADAN, rows.adan, _together(ADAN), 600, has_limit=False)
        for device in ("cpu", "cuda")
    },
}
