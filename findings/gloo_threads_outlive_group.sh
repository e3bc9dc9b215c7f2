#!/usr/bin/env bash
# torch 2.11.0: destroy_process_group() ends gloo's two threads of a group that has been used by itself or by a
# DeviceMesh, but not once an operator has run on a DTensor of the mesh. The cache of DTensor's sharding propagation
# refers to the mesh, and the mesh to the group; gc.collect() frees neither. The threads live as long as the process.
#
# A training by FSDP2 therefore reaches the end of the interpreter with these threads. A thread frees the tensors of a
# collective a little after it has told the waiting process that they are ready. If the interpreter ends meanwhile,
# glibc may end a training whose steps are all done with "terminate called without an active exception". os._exit(0)
# as the last call of such a program avoids the end of the interpreter.
#
# Output seen on x86-64, glibc 2.36:
#   all_reduce: 2 threads, 0 after destroy_process_group
#   mesh: 2 threads, 0 after destroy_process_group
#   operator: 2 threads, 2 after destroy_process_group
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet torch==2.11.0 numpy==2.2.6
cat >"$folder/threads.py" <<'PYTHON'
import gc
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard


def threads():
    """Returns how many threads of gloo's this process has."""
    return sum("gloo_runloop" in file.read_text() for file in Path("/proc/self/task").glob("*/comm"))


def operator():
    mesh = init_device_mesh("cpu", (1,))
    DTensor.from_local(torch.ones(4, 4), mesh, [Shard(0)], run_check=False) * 2


WORKS = {
    "all_reduce": lambda: dist.all_reduce(torch.ones(4)),
    "mesh": lambda: init_device_mesh("cpu", (1,)),
    "operator": operator,
}

name = sys.argv[1]
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
WORKS[name]()
during = threads()
dist.destroy_process_group()
gc.collect()
print(f"{name}: {during} threads, {threads()} after destroy_process_group")
PYTHON
for name in all_reduce mesh operator; do
  "$folder/venv/bin/python" "$folder/threads.py" "$name"
done | tee "$folder/found"
diff "$folder/found" - <<'EXPECTED'
all_reduce: 2 threads, 0 after destroy_process_group
mesh: 2 threads, 0 after destroy_process_group
operator: 2 threads, 2 after destroy_process_group
EXPECTED
