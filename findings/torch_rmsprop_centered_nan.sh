#!/usr/bin/env bash
# torch 2.11.0, CPU: RMSprop(centered=True) makes weights NaN where a gradient keeps its value.
#
# The step divides by the root of E[g^2] - E[g]^2. Where g stays the same, both terms become equal, and their difference
# is a rounding error, which may be negative: `addcmul` rounds once what the square of the state rounds twice. The root
# of a negative number is NaN, and the weight stays NaN. Every gradient is finite and every option is in its range. The
# for-loop and foreach=True do the same. eps, which is added after the root, does not help.
#
# Output seen with torch 2.11.0 on x86-64 with FMA (of 1,000 weights about a half are NaN):
#   alpha 0.5: NaN within 200 steps: for-loop True, foreach True
#   alpha 0.9: NaN within 200 steps: for-loop True, foreach True
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet torch==2.11.0 numpy==2.2.6
"$folder/venv/bin/python" - >"$folder/output" <<'PYTHON'
import torch

torch.manual_seed(0)
gradient = torch.randn(1000)


def is_nan(steps, alpha):
    found = []
    for foreach in (False, True):
        weight = torch.nn.Parameter(torch.zeros(1000))
        optimizer = torch.optim.RMSprop([weight], alpha=alpha, centered=True, foreach=foreach)
        for _ in range(steps):
            weight.grad = gradient.clone()
            optimizer.step()
        found.append(bool(weight.isnan().any()))
    return "for-loop {}, foreach {}".format(*found)


print(f"alpha 0.5: NaN within 200 steps: {is_nan(200, 0.5)}")
print(f"alpha 0.9: NaN within 200 steps: {is_nan(200, 0.9)}")
PYTHON
cat "$folder/output"
diff "$folder/output" - <<'SEEN'
alpha 0.5: NaN within 200 steps: for-loop True, foreach True
alpha 0.9: NaN within 200 steps: for-loop True, foreach True
SEEN
