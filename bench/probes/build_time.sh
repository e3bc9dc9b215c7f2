#!/usr/bin/env bash
# Times building the library from nothing, without ccache, for some choices of GPUs:
#
#   bench/probes/build_time.sh
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
for options in WITH_CUDA=OFF CUDA_ARCHITECTURES=90 'CUDA_ARCHITECTURES=80-real;90-real;100-real;120'; do
  build=$(mktemp -d)
  cmake -S "$root" -B "$build" -G Ninja -DCMAKE_BUILD_TYPE=Release "-DFUSEDSTEP_$options" \
    -DCMAKE_CXX_COMPILER_LAUNCHER= -DCMAKE_CUDA_COMPILER_LAUNCHER= >/dev/null
  TIMEFORMAT="$options: %R seconds, %U + %S of CPUs"
  time cmake --build "$build" --target fusedstep_python >/dev/null
  find "$build" -name '*.so' -printf '%s bytes %f\n'
  rm -r "$build"
done
