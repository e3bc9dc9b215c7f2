#!/usr/bin/env bash
# torch 2.11.0: Inductor's cache on disk does not know what a custom operator returns. A library whose operator returns
# another shape or another dtype than the library's last version is given the code that was compiled for that version.
#
# The key of a cached graph is made of the graph's text and its inputs. Of `torch.library.custom_op` the text has the
# name and the arguments; what `register_fake` returns is no part of it, nor is the code of either function. Another
# length is noticed, by an assertion that blames the fake kernel, although the fake kernel is right. Another dtype is
# not noticed: the next kernel reads the new numbers as numbers of the old dtype, and the result is wrong in silence.
# The cache is in the temporary folder and outlives an upgrade. A library can pass what decides the shape or the dtype,
# as an argument of the operator: then it is part of the text.
#
# Output seen with torch 2.11.0, each line from a process of its own:
#   8 of torch.float32: compiled, [4.0, 4.0], torch.float32
#   8 of torch.float32: cached, [4.0, 4.0], torch.float32
#   11 of torch.float32: cached, AssertionError: expected size 11==8, stride 1==1 at dim=0
#   8 of torch.float64: cached, [512.0, 512.0], torch.float64
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet torch==2.11.0 numpy==2.2.6
cat >"$folder/version.py" <<'PYTHON'
import sys

import torch
from torch._dynamo.utils import counters

LENGTH, DTYPE = int(sys.argv[1]), getattr(torch, sys.argv[2])


@torch.library.custom_op("demo::twos", mutates_args=())
def twos(x: torch.Tensor) -> torch.Tensor:
    return torch.full((LENGTH,), 2.0, dtype=DTYPE)


@twos.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty(LENGTH, dtype=DTYPE)


def doubled(x):
    return twos(x) * 2


try:
    found = torch.compile(doubled)(torch.zeros(3))
    said = f"{found[:2].tolist()}, {found.dtype}"
except AssertionError as error:
    said = f"AssertionError: {str(error).splitlines()[0]}"
hits = counters["inductor"]["fxgraph_cache_hit"] + counters["aot_autograd"]["autograd_cache_hit"]
print(f"{LENGTH} of {DTYPE}: {'cached' if hits else 'compiled'}, {said}")
PYTHON
export TORCHINDUCTOR_CACHE_DIR=$folder/cache
for version in "8 float32" "8 float32" "11 float32" "8 float64"; do
  read -ra arguments <<<"$version"
  "$folder/venv/bin/python" "$folder/version.py" "${arguments[@]}" 2>"$folder/errors" || { cat "$folder/errors" && exit 1; }
done >"$folder/output"
cat "$folder/output"
diff "$folder/output" - <<'SEEN'
8 of torch.float32: compiled, [4.0, 4.0], torch.float32
8 of torch.float32: cached, [4.0, 4.0], torch.float32
11 of torch.float32: cached, AssertionError: expected size 11==8, stride 1==1 at dim=0
8 of torch.float64: cached, [512.0, 512.0], torch.float64
SEEN
