#!/usr/bin/env bash
# Builds and runs the benchmark on a machine without network: ./run.sh wants to install what is missing, this makes do
# with what is there and what was carried along.
#
#   bench/offline.sh [--peers] [--budget SECONDS] [FILTER]
#
#   --peers      beside other libraries' optimizers, instead of the kernels and all allocators
#   --budget     time for measuring whole steps (default 240); building and the rest come on top
#   PYTHON       a Python with torch, numpy, rich and matplotlib (default python3)
#   PACKAGES     a folder of carried packages, unpacked into build/packages and not installed: Debian's libjemalloc2,
#                libbenchmark1 with libbenchmark-dev, libgtest-dev; the wheels of onednn-cpu-gomp and onednn-devel-cpu-gomp;
#                in its folder peers what peer_wheels.sh has collected
#   OUT          where results go (default build/offline)
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=$(command -v "${PYTHON:-python3}")
packages=$root/build/packages
build=$root/build/release
out=${OUT:-$root/build/offline}
budget=240 filter='' peers=no

while (($#)); do
  case "$1" in
    --budget) budget=$2 && shift 2 ;;
    --peers) peers=yes && shift ;;
    -*) sed -n '2,15s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" && exit 2 ;;
    *) filter=$1 && shift ;;
  esac
done

stamp() { printf '== %4d s  %s\n' "$SECONDS" "$*"; }

unpack() {
  local package
  mkdir -p "$packages"
  for package in "$1"/*.deb; do
    [[ ! -e $package ]] || dpkg -x "$package" "$packages"
  done
  for package in "$1"/*.whl; do
    [[ ! -e $package ]] ||
      "$python" -m pip install -q --no-index --no-deps --prefix "$packages/usr" "$package"
  done
}

# What was unpacked is found as what is installed: by CMake, by the linker, and by Python's search for libraries, which
# asks the compiler and wants a name without a version.
use_unpacked() {
  local library folders
  folders=$(find "$packages" -name '*.so*' -printf '%h\n' | sort -u | paste -sd:)
  while read -r library; do
    [[ -e ${library%.so*}.so ]] || ln -s "$(basename "$library")" "${library%.so*}.so"
  done < <(find "$packages" -name '*.so.*')
  export LIBRARY_PATH=$folders${LIBRARY_PATH:+:$LIBRARY_PATH}
  export LD_LIBRARY_PATH=$folders${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
  export CMAKE_PREFIX_PATH=$packages/usr:$packages/usr/local${CMAKE_PREFIX_PATH:+:$CMAKE_PREFIX_PATH}
}

measure_peers() {
  local missing
  stamp "installing peers"
  mapfile -t missing < <("$python" "$root/scripts/missing_packages.py" peers)
  "$python" "$root/bench/peer_packages.py" --find-links "${PACKAGES:-$out}/peers" "${missing[@]}"
  stamp "whole steps beside peers"
  "$python" "$root/bench/run_peers.py" --budget "$budget" --output "$out" "$filter" | tee "$out/tables.txt"
  stamp "done: $out"
}

has_googletest() { echo '#include <gtest/gtest.h>' | c++ -x c++ -E -isystem "$packages/usr/include" - &>/dev/null; }

main() {
  mkdir -p "$out"
  if [[ -n ${PACKAGES:-} ]]; then
    unpack "$PACKAGES"
    use_unpacked
  fi

  stamp "building"
  local tests=OFF cuda=AUTO
  if [[ $peers == yes ]]; then
    cuda=OFF  # the peers step on the CPU
  elif has_googletest; then
    tests=ON
  fi
  cmake -S "$root" -B "$build" -G Ninja -DCMAKE_BUILD_TYPE=Release -DPython_EXECUTABLE="$python" \
    -DFUSEDSTEP_WITH_CUDA=$cuda -DFUSEDSTEP_IN_PLACE=ON \
    -DFUSEDSTEP_BUILD_BENCHMARKS=ON -DFUSEDSTEP_BUILD_TESTS=$tests >"$out/build.log"
  cmake --build "$build" >>"$out/build.log" || { tail -n 40 "$out/build.log" && exit 1; }

  if [[ $tests == ON ]]; then
    stamp "C++ tests"
    ctest --test-dir "$build" --output-on-failure -j "$(nproc)" | tail -n 20
  fi

  if [[ $peers == yes ]]; then
    measure_peers
    return
  fi
  stamp "whole steps"
  "$python" "$root/bench/run.py" --full --budget "$budget" --output "$out" "$filter" | tee "$out/tables.txt"

  if [[ -x $build/bench/fusedstep_bench_kernels ]]; then
    stamp "kernels alone"
    "$build/bench/fusedstep_bench_kernels" --benchmark_min_time=0.05 \
      --benchmark_filter='/(matrix|small|gpt2)/' \
      --benchmark_out="$out/kernels.json" --benchmark_out_format=json
    sed -i 's#"executable": ".*/#"executable": "#' "$out/kernels.json"  # results are for others too
  fi
  stamp "done: $out"
}

main
