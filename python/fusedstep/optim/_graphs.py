"""CUDA graphs of work over memory that is kept: the host launches all of it in one call.

The operands of a graph lie where they lay when it was captured, so a graph is found again by where
they are. The work must allocate nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

import torch
from torch import Tensor


class Graphs:
    """Graphs by what their work is and where its operands are."""

    def __init__(self) -> None:
        self._runs: dict[Hashable, Callable[[], Tensor] | None] = {}
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def run(self, key: Hashable, device: torch.device, work: Callable[[], Tensor]) -> Tensor:
        """Does a work, and returns its result: from the second time on by a graph.

        The first time loads kernels, which a capture cannot.
        """
        if key not in self._runs:
            self._runs[key] = None
            return work()
        run = self._runs[key]
        if run is None:
            run = self._runs[key] = self._captured(device, work)
        return run()

    def clear(self) -> None:
        self._runs.clear()

    def _captured(self, device: torch.device, work: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """Captures a work, which does not run it. What cannot be captured is returned itself."""
        # One stream for all, which run one after another: cuBLAS keeps memory for each stream that
        # its calls are captured on.
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.stream(self._streams[device]):
                graph.capture_begin(capture_error_mode="thread_local")  # others may do as they like
                try:
                    result = work()
                finally:
                    graph.capture_end()
        except RuntimeError:  # for want of memory, or under a tool that allows none
            return work

        def launch() -> Tensor:
            graph.replay()
            return result

        return launch


def are_taken(device: torch.device) -> bool:
    """Returns whether work on a device may be a graph: nobody looks at its operations."""
    return (
        device.type == "cuda"
        and torch.version.cuda is not None
        and not torch._C._len_torch_dispatch_stack()
        and not torch.cuda.is_current_stream_capturing()
    )
