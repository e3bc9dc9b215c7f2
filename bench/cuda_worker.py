"""Measures rows on a CUDA device in this process, with the libraries that it can import.

    cuda_worker.py REQUEST       REQUEST: the fields of worker.Request as JSON

Writes events to stdout, one JSON object a line; processes.py reads them.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

import cuda
import cuda_peers
from implementations import told
from rows import Row
from worker import Events, Request, described, mapped_jemalloc


def measured(request: Request, row: Row, limit: cuda.Limit) -> dict[str, Any]:
    names = cuda_peers.peers_of(request.peer, row)
    if request.absent is not None:
        return {"results": {name: {"absent": request.absent} for name in names}}
    if time.monotonic() > request.until and request.skip_late:
        return {"skipped": "the time was up"}
    known = request.limits.get(str(row))
    ways = None if known is None else [cuda.Way(**known)]
    beside = cuda_peers.of_process(request.peer)
    results, bound, way = cuda.compare(row, limit, beside, ways, cuda_peers.TURNS)
    return {"limit": {"ms": bound} | asdict(way), "results": results}


def facts() -> dict[str, Any]:
    return {
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name(),
        "jemalloc": mapped_jemalloc(),
        "implementations": {name: each.title for name, each in cuda_peers.IMPLEMENTATIONS.items()},
    }


def main() -> None:
    events = Events()
    request = Request(**json.loads(sys.argv[1]))
    libraries = Path(request.libraries)
    cuda.check(libraries)
    limit = cuda.Limit(libraries)
    known = cuda_peers.rows_of(request.peer, request.filter)
    chosen = [row for row in known if str(row) not in request.skip]
    planned = {
        str(row): described(row) | {"peers": cuda_peers.peers_of(request.peer, row)}
        for row in chosen
    }
    events.emit("plan", rows=list(planned.values()), facts=facts())
    for row in chosen:
        events.emit("row", name=str(row))
        try:
            found = measured(request, row, limit)
        except torch.AcceleratorError as error:
            sys.exit(told(error))
        events.emit("result", row=planned[str(row)] | found)
        gc.collect()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
