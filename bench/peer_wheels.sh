#!/usr/bin/env bash
# Collects what the peers of the benchmark need on a machine without network, which has torch, numpy and matplotlib:
#
#   bench/peer_wheels.sh FOLDER [PYTHON_VERSION]      PYTHON_VERSION: the other machine's, as 3.12 (default: that of python3)
#
# The folder is for PACKAGES/peers of bench/offline.sh.
set -euo pipefail

folder=${1:?usage: bench/peer_wheels.sh FOLDER [PYTHON_VERSION]}
version=${2:-$(python3 -c 'import sys; print("%d.%d" % sys.version_info[:2])')}

names=(bitsandbytes pytorch_optimizer timm torchao
  einops hjson msgpack ninja packaging psutil py-cpuinfo pydantic pydantic_core annotated-types typing-inspection
  typing_extensions tqdm                                                   # for DeepSpeed
  torchvision==0.26.0 pyyaml safetensors huggingface_hub hf-xet httpx2 httpcore2 h11 anyio idna click filelock fsspec
  truststore)                                                              # for timm, beside torch 2.11

platforms=()
for glibc in 2_39 2_35 2_34 2_31 2_28 2_27 2_24 2_17 2_12 2_5; do
  platforms+=(--platform "manylinux_${glibc}_x86_64")
done
for old in manylinux2014 manylinux2010 manylinux1; do platforms+=(--platform "${old}_x86_64"); done
platforms+=(--platform any)

mkdir -p "$folder"
# What compiles at its first use is built here without a compiler.
DS_BUILD_OPS=0 python3 -m pip wheel -q --no-deps -w "$folder" deepspeed
python3 -m pip download -q --no-deps --only-binary=:all: --implementation cp --python-version "$version" \
  "${platforms[@]}" -d "$folder" "${names[@]}"

# Kernels for GPUs are most of bitsandbytes, and of no use to a step on the CPU.
python3 - "$folder" <<'END_OF_PROGRAM'
import re, sys, zipfile
from pathlib import Path

for wheel in Path(sys.argv[1]).glob("bitsandbytes-*.whl"):
    smaller = wheel.with_suffix(".smaller")
    with zipfile.ZipFile(wheel) as old, zipfile.ZipFile(smaller, "w", zipfile.ZIP_DEFLATED) as new:
        for file in old.infolist():
            if not re.search(r"/libbitsandbytes_(cuda|rocm|xpu)", file.filename):
                new.writestr(file, old.read(file))
    smaller.replace(wheel)
END_OF_PROGRAM
du -sh "$folder"
