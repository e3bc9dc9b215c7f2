#!/usr/bin/env bash
# torchao 0.18.0: AdamW8bit moves a weight by 11,889 learning rates in one step.
#
# The unsigned map of second moments has a code of zero, and numbers below 1.6e-7 of the largest in their block of 256
# round to it. The first moment of the same element keeps its code, because it is not squared: its share is the root of
# the second moment's. When the next gradient is nearly zero, the step divides the first moment by eps alone.
# Two steps on 4,096 weights are enough: gradients of 1 with one of 3e-4, then zeros with 1e-9 in the same place.
#
# Output seen with torch 2.11.0 on x86-64, in learning rates:
#   torch AdamW moves the weight by -0.67
#   torchao AdamW8bit moves the weight by -1.19e+04
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet torch==2.11.0 numpy==2.2.6 torchao==0.18.0
TORCHDYNAMO_DISABLE=1 "$folder/venv/bin/python" - >"$folder/output" 2>"$folder/messages" <<'PYTHON' || { cat "$folder/messages" >&2; exit 1; }
import torch
from torchao.optim import AdamW8bit

LR = 1e-3


def last_move(optimizer_class):
    weight = torch.nn.Parameter(torch.zeros(4096))
    optimizer = optimizer_class([weight], lr=LR, weight_decay=0)
    for usual, small in ((1.0, 3e-4), (0.0, 1e-9)):
        before = weight.detach().clone()
        weight.grad = torch.full((4096,), usual)
        weight.grad[1] = small
        optimizer.step()
    return (weight.detach() - before)[1].item() / LR


for name, optimizer_class in (("torch AdamW", torch.optim.AdamW), ("torchao AdamW8bit", AdamW8bit)):
    print(f"{name} moves the weight by {last_move(optimizer_class):.3g}")
PYTHON
cat "$folder/output"
diff "$folder/output" - <<'SEEN'
torch AdamW moves the weight by -0.67
torchao AdamW8bit moves the weight by -1.19e+04
SEEN
