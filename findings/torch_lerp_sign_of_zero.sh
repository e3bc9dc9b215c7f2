#!/usr/bin/env bash
# torch 2.11.0, CPU: the bits of torch.lerp depend on strides. With weight 1 the result should be `end`, but an `end` of
# -0.0 comes out as 0.0 in one memory layout and as -0.0 in the other, and which of the two depends on `start`.
#
# Elements that lie one after the other are computed by end + (weight - 1) * (end - start), rounded once; elements with
# gaps between them by end - (end - start) * (1 - weight). The products are zeros of opposite signs, so that one sum
# keeps the sign of `end` and the other loses it. Averages of an optimizer with a momentum of 0 are such a lerp: two
# runs that differ in strides alone end with other bits, and a checksum of states tells them apart. In 4,096 random
# numbers with weights of .1 to .9 no result differs.
#
# Output seen with torch 2.11.0 on x86-64 with FMA:
#   start 1.0, end -0.0, weight 1: dense -0.0, strided 0.0
#   start -1.0, end -0.0, weight 1: dense 0.0, strided -0.0
#   random numbers that differ: 0
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet torch==2.11.0 numpy==2.2.6
"$folder/venv/bin/python" - >"$folder/output" <<'PYTHON'
import torch


def strided(tensor):
    return torch.empty(2 * len(tensor))[::2].copy_(tensor)


for start in (1.0, -1.0):
    operands = torch.full((64,), start), torch.full((64,), -0.0)
    dense = torch.lerp(*operands, 1.0)
    apart = torch.lerp(*map(strided, operands), 1.0)
    assert dense.signbit().unique().numel() == apart.signbit().unique().numel() == 1
    print(f"start {start}, end -0.0, weight 1: dense {dense[0].item()}, strided {apart[0].item()}")

torch.manual_seed(0)
operands = torch.randn(4096), torch.randn(4096)
differ = 0
for weight in (0.1, 0.3, 0.6, 0.9):
    differ += (torch.lerp(*operands, weight) != torch.lerp(*map(strided, operands), weight)).sum().item()
print(f"random numbers that differ: {differ}")
PYTHON
cat "$folder/output"
diff "$folder/output" - <<'SEEN'
start 1.0, end -0.0, weight 1: dense -0.0, strided 0.0
start -1.0, end -0.0, weight 1: dense 0.0, strided -0.0
random numbers that differ: 0
SEEN
