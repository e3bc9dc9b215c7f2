#!/usr/bin/env bash
# Times building from nothing, without ccache: the library for some choices of GPUs, or of each commit that is named
# all that `./run.sh build` makes, without CUDA:
#
#   bench/probes/build_time.sh [COMMIT...]
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)

# timed NAME SOURCE TARGET OPTION...
timed() {
  local build
  build=$(mktemp -d)
  cmake -S "$2" -B "$build" -G Ninja -DCMAKE_BUILD_TYPE=Release "${@:4}" \
    -DCMAKE_CXX_COMPILER_LAUNCHER= -DCMAKE_CUDA_COMPILER_LAUNCHER= >/dev/null
  TIMEFORMAT="$1: %R seconds, %U + %S of CPUs"
  time cmake --build "$build" --target "$3" >/dev/null
  find "$build" -name '*.so' -printf '%s bytes %f\n'
  rm -r "$build"
}

for commit; do
  source=$(mktemp -d)
  git -C "$root" archive "$commit" | tar x -C "$source"
  timed "$commit" "$source" all -DFUSEDSTEP_WITH_CUDA=OFF -DFUSEDSTEP_BUILD_{TESTS,BENCHMARKS,EXAMPLES}=ON
  rm -r "$source"
done
(($# == 0)) || exit 0
for options in WITH_CUDA=OFF CUDA_ARCHITECTURES=90 'CUDA_ARCHITECTURES=80-real;90-real;100-real;120'; do
  timed "$options" "$root" fusedstep_python "-DFUSEDSTEP_$options"
done
