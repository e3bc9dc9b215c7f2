#!/usr/bin/env bash
# bitsandbytes 0.50.2, CPU: quantize_blockwise never returns the code of zero.
#
# Both dynamic maps hold an exact 0. A block of 256 with one element of 1 and zeros else decodes to 1 and to
# 1.5625e-05 (unsigned map) or 2.125e-05 (signed map) in place of every zero. Smaller numbers than that decode to the
# same value. An error bound of half a gap of the map would say 0.
#
# Output seen with torch 2.11.0 on x86-64:
#   unsigned: map has 0: True, zeros become 1.5625e-05
#   signed: map has 0: True, zeros become 2.125e-05
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet torch==2.11.0 numpy==2.2.6 bitsandbytes==0.50.2
"$folder/venv/bin/python" - >"$folder/output" <<'PYTHON'
import bitsandbytes.functional as functional
import torch

numbers = torch.zeros(256)
numbers[0] = 1.0
for name, signed in (("unsigned", False), ("signed", True)):
    levels = functional.create_dynamic_map(signed=signed)
    codes, state = functional.quantize_blockwise(numbers, code=levels, blocksize=256)
    decoded = functional.dequantize_blockwise(codes, state)
    (zeros,) = {f"{each:.5g}" for each in decoded[1:].tolist()}
    print(f"{name}: map has 0: {bool((levels == 0).any())}, zeros become {zeros}")
PYTHON
cat "$folder/output"
diff "$folder/output" - <<'SEEN'
unsigned: map has 0: True, zeros become 1.5625e-05
signed: map has 0: True, zeros become 2.125e-05
SEEN
