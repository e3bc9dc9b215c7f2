#!/usr/bin/env bash
# torch 2.11.0 on a CPU with AVX-512: torch.baddbmm of bfloat16 matrices gives wrong numbers with alpha=0. It should
# return beta * input. With beta=-0.5 other numbers come, off by several times the largest one, and with beta=0 NaN.
#
# Matrices of side 4 are right; from side 16 on they are wrong. So are only those of bfloat16, in batches: torch.addmm
# of one matrix, float16 and float32 are right, and so is beta=1. With ONEDNN_MAX_CPU_ISA=AVX2 all are right: then
# another kernel takes the product. A polynomial of matrices b A + c A A whose c is an option meets this where c is 0.
#
# Output seen with torch 2.11.0 on x86-64 with AVX-512:
#   torch.bfloat16, side 4: beta -0.5 right, beta 0.0 right, beta 1.0 right
#   torch.bfloat16, side 64: beta -0.5 wrong, beta 0.0 NaN, beta 1.0 right
#   torch.float16, side 64: beta -0.5 right, beta 0.0 right, beta 1.0 right
#   torch.float32, side 64: beta -0.5 right, beta 0.0 right, beta 1.0 right
#   one matrix of torch.bfloat16, side 64: right
set -euo pipefail

if ! grep -qw avx512bw /proc/cpuinfo; then
  echo "this CPU has no AVX-512: the behaviour cannot be seen here" >&2
  exit 1
fi
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet torch==2.11.0 numpy==2.2.6
"$folder/venv/bin/python" - >"$folder/output" <<'PYTHON'
import torch


def told(found, expected):
    if found.isnan().any():
        return "NaN"
    return "right" if torch.equal(found.double(), expected) else "wrong"


for dtype, side in ((torch.bfloat16, 4), (torch.bfloat16, 64), (torch.float16, 64), (torch.float32, 64)):
    torch.manual_seed(0)
    c, a, b = (torch.randn(2, side, side).to(dtype) for _ in range(3))
    words = []
    for beta in (-0.5, 0.0, 1.0):
        found = torch.baddbmm(c, a, b, beta=beta, alpha=0)
        words.append(f"beta {beta} {told(found, beta * c.double())}")
    print(f"{dtype}, side {side}: {', '.join(words)}")
    if dtype is torch.bfloat16:
        one = told(torch.addmm(c[0], a[0], b[0], beta=-0.5, alpha=0), -0.5 * c[0].double())
print(f"one matrix of torch.bfloat16, side 64: {one}")
PYTHON
cat "$folder/output"
diff "$folder/output" - <<'SEEN'
torch.bfloat16, side 4: beta -0.5 right, beta 0.0 right, beta 1.0 right
torch.bfloat16, side 64: beta -0.5 wrong, beta 0.0 NaN, beta 1.0 right
torch.float16, side 64: beta -0.5 right, beta 0.0 right, beta 1.0 right
torch.float32, side 64: beta -0.5 right, beta 0.0 right, beta 1.0 right
one matrix of torch.bfloat16, side 64: right
SEEN
