#!/usr/bin/env bash
# torch 2.11.0, gloo: no collective takes int16, unsigned integers of 16 and 32 bits, or float8, not even those that only
# copy (broadcast, all_gather, scatter). Point to point, the same tensors arrive bit for bit. complex64 goes through all
# collectives but gather, whose opposite, scatter, takes it. So shards of 16-bit integers or of float8 need a view of
# another dtype of their size before a collective.
#
# Output seen on x86-64:
#   int16, uint16, uint32, float8_e4m3fn: no collective; sent bit for bit
#   complex64: all but gather; sent bit for bit
#   bfloat16, int32: all collectives; sent bit for bit
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet torch==2.11.0 numpy==2.2.6
cat >"$folder/dtypes.py" <<'PYTHON'
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

GROUPS = [["int16", "uint16", "uint32", "float8_e4m3fn"], ["complex64"], ["bfloat16", "int32"]]


def collectives(x):
    """Those of a group of one process."""
    like = torch.empty_like(x)
    return {
        "all_reduce": lambda: dist.all_reduce(x),
        "broadcast": lambda: dist.broadcast(x, 0),
        "all_gather": lambda: dist.all_gather([like], x),
        "gather": lambda: dist.gather(x, [like], 0),
        "scatter": lambda: dist.scatter(like, [x], 0),
        "all_to_all": lambda: dist.all_to_all_single(like, x),
    }


def is_taken(run):
    try:
        run()
    except RuntimeError as error:
        assert "Invalid scalar type" in str(error), error
        return False
    return True


def ways(name):
    runs = collectives(torch.ones(4).to(getattr(torch, name)))
    taken = {what for what, run in runs.items() if is_taken(run)}
    if len(taken) in (0, len(runs)):
        return "all collectives" if taken else "no collective"
    return "all but " + ", ".join(runs.keys() - taken)


def send(rank, folder):
    """Sends a tensor of each dtype from the first process to the second."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/two", rank=rank, world_size=2)
    for name in (name for group in GROUPS for name in group):
        source = torch.arange(64, dtype=torch.uint8).view(getattr(torch, name))
        x = source.clone() if rank == 0 else torch.zeros(64, dtype=torch.uint8).view(source.dtype)
        if rank == 0:
            dist.send(x, 1)
        else:
            dist.recv(x, 0)
            assert x.view(torch.uint8).equal(source.view(torch.uint8)), name
    dist.destroy_process_group()


if __name__ == "__main__":
    folder = sys.argv[1]
    mp.spawn(send, (folder,), nprocs=2)
    dist.init_process_group("gloo", init_method=f"file://{folder}/one", rank=0, world_size=1)
    for group in GROUPS:
        (way,) = set(map(ways, group))
        print(f"{', '.join(group)}: {way}; sent bit for bit")
    dist.destroy_process_group()
PYTHON
"$folder/venv/bin/python" "$folder/dtypes.py" "$folder" >"$folder/output" 2>"$folder/errors" || {
  cat "$folder/errors"
  exit 1
}
cat "$folder/output"
diff "$folder/output" - <<'SEEN'
int16, uint16, uint32, float8_e4m3fn: no collective; sent bit for bit
complex64: all but gather; sent bit for bit
bfloat16, int32: all collectives; sent bit for bit
SEEN
