# shellcheck shell=bash
# Sourced by run.sh: random cases for the optimizers, and random inputs for layouts and plans.

# random_cases [OPTION...]: of tests/fuzz.
random_cases() { PYTHONPATH=$root/tests:$root/python "$python" -m fuzz "$@"; }

# random_layouts [OPTION OR INPUT...]: libFuzzer's, which come with clang. The tests run the same target with g++.
random_layouts() {
  local folder=$root/build/fuzz sources=("$root"/src/plan/{layout,plan,rows,overlap,operand_checks}.cpp)
  command -v clang++ >/dev/null || die "there is no clang++, which libFuzzer is part of: apt-get install clang"
  mkdir -p "$folder/corpus"
  build release --target fusedstep_core || return
  step fuzz-layouts "building the fuzz target for layouts" clang++ -std=c++20 -O1 -g -fno-sanitize-recover=all \
    -fsanitize=fuzzer,address,undefined -I"$root" -I"$root/include" \
    "$root/tests/cpp/fuzz/layouts.cpp" "${sources[@]}" \
    "$root/build/release/libfusedstep_core.a" -lgomp -ldl -o "$folder/layouts" || return
  (($#)) || set -- -max_total_time=60 -max_len=600 -len_control=0 "$folder/corpus"
  "$folder/layouts" -artifact_prefix="$folder/" "$@"
}

fuzz() {
  if [[ ${1:-} == --layouts ]]; then
    random_layouts "${@:2}"
  else
    need_python_packages examples
    build release --target fusedstep_python
    random_cases "$@"
  fi
}
