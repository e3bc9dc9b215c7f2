#!/usr/bin/env bash
set -euo pipefail

# shellcheck source=scripts/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/scripts/common.sh"
# shellcheck source=scripts/install.sh
source "$root/scripts/install.sh"
# shellcheck source=scripts/fuzz.sh
source "$root/scripts/fuzz.sh"
# shellcheck source=scripts/test.sh
source "$root/scripts/test.sh"
# shellcheck source=scripts/docs.sh
source "$root/scripts/docs.sh"
# shellcheck source=scripts/wheel.sh
source "$root/scripts/wheel.sh"
# shellcheck source=scripts/lint.sh
source "$root/scripts/lint.sh"

usage() {
  cat <<'END'
Usage:
  ./run.sh [--full]              build, time three optimizers against the alternatives, train a network on MNIST:
                                 minutes after the build (--full: all optimizers and sizes, 14 epochs)
  ./run.sh SCRIPT.py [ARG...]    run a Python script as it should run on a Xeon: jemalloc, threads, pinning
  ./run.sh test                  every law, on a part of all combinations: another one for each commit
                                 (--all: on all of them; --draw TEXT: on those that another run has named)
  ./run.sh test newest-torch     tests of what depends on torch most, again on its newest release
  ./run.sh test sanitize         the engine's C++ tests again, under AddressSanitizer and UndefinedBehaviorSanitizer
  ./run.sh test sanitize-cuda    the CUDA kernels under compute-sanitizer, where there is a GPU
  ./run.sh fuzz [--minutes N] [--seed S]
                                 random optimizers over random memory against float64; prints what fails, made small
                                 (--layouts: layouts and plans, by libFuzzer)
  ./run.sh bench [FILTER]        the benchmark, all sizes; results go to build/results (--commit: to bench/results)
  ./run.sh bench peers [FILTER]  beside other libraries' optimizers, which it installs (--device cuda: on a GPU)
  ./run.sh bench compare REF [FILTER]
                                 this tree against another commit
  ./run.sh bench cuda [FILTER]   steps of weights on a GPU, beside torch's
  ./run.sh bench adan [FILTER]   memory and time of Adan beside Adam over sizes of GPT-2, on a GPU if there is one
  ./run.sh bench clipping        step(max_norm, zero_grad) against the separate calls
  ./run.sh bench embedding       sparse gradients of an embedding table, beside torch's and FBGEMM's
                                 (--device cuda: on a GPU)
  ./run.sh mnist [OPTION...]     the convergence check
  ./run.sh nanogpt [OPTION...]   a GPT in training: four kinds of attention, with and without torch.compile
                                 (--preset cpu|full, --optimizer fusedstep:CLASS|torch:CLASS, --commit)
  ./run.sh docs [build]          the documentation as a site: built into build/site, and without `build` served at
                                 http://127.0.0.1:8000 and built anew when a page changes
  ./run.sh wheel [cpu|cuda]      wheels for other machines: fusedstep, and fusedstep-cuda where nvcc is
                                 (--into FOLDER: default build/wheels; --architectures LIST: GPUs, as '90' or
                                 '80-real;90', for all of them take nvcc long)
  ./run.sh doctor                what was found on this machine, and what costs speed
  ./run.sh lint [--fix]          clang-format, clang-tidy, ruff, mypy, shellcheck (minutes)
  ./run.sh build                 only install what is missing and build (--library: without tests and benchmarks, as an
                                 install for C++ needs it)
  ./run.sh help
END
}

# ---- Building -------------------------------------------------------------------------------------------

# As many compilers at a time as there are CPUs, and memory for torch's headers in each.
parallelism() {
  local memory
  memory=$(awk '/MemAvailable/ { print int($2 / 1500000) }' /proc/meminfo)
  printf '%s\n' "$(nproc)" "$((memory > 1 ? memory : 1))" | sort -n | head -n 1
}

configure() {
  local preset=$1 folder=$root/build/$1 args configured
  args=("-DPython_EXECUTABLE=$python")
  configured="${args[*]} $(nvidia-smi -L 2>/dev/null || true)"  # for the CUDA kernels are compiled for the GPUs
  [[ ! -e $folder/build.ninja || $(cat "$folder/.configured" 2>/dev/null) != "$configured" ]] || return 0
  step "configure-$preset" "configuring $preset" cmake -S "$root" --preset "$preset" "${args[@]}" || return
  echo "$configured" >"$folder/.configured"
}

# build PRESET [--target TARGET...]
build() {
  local targets=${*:3}
  configure "$1" || return
  step "build-$1" "building ${targets:-everything} ($1)" cmake --build "$root/build/$1" -j "$(parallelism)" "${@:2}"
}

launch() { "$python" "$root/scripts/launch.py" "$@"; }

# ---- The commands ---------------------------------------------------------------------------------------

everything() {
  # A first look: all optimizers over the lists of --quick take 12 minutes.
  local bench_options=(--quick --allocator jemalloc --budget 60 '^(adam|adan|lamb)/(matrix|small)$') epochs=1
  [[ $1 != --full ]] || { bench_options=() && epochs=14; }
  say "first, how fast: the optimizers against the alternatives"
  bench "${bench_options[@]}"
  say "second, does it train: a network on MNIST"
  mnist --epochs "$epochs"
}

# Prints the device that libraries compile their kernels for.
peers_device() { [[ " $* " == *" --device"[\ =]"cuda "* ]] && echo cuda || echo cpu; }

bench() {
  need_python_packages bench
  build release --target fusedstep_python bench/all
  case ${1:-} in
    peers) install_peers peers "$(peers_device "${@:2}")" ;;
    embedding) [[ $(peers_device "${@:2}") != cpu ]] || install_peers tables cpu ;;
  esac
  local program=$root/bench/run.py
  [[ ${1:-} != compare ]] || { program=$root/bench/compare.py && shift; }
  PYTHONPATH=$root/tests:$root/python "$python" "$program" "$@"
}

mnist() {
  local folder
  need_python_packages examples
  build release --target mnist
  if [[ " $* " != *" --data"[\ =]* ]]; then
    folder=$("$python" "$root/examples/mnist/data.py") || return
    set -- --data "$folder" "$@"
  fi
  launch "$root/build/release/examples/mnist/mnist" "$@"
}

nanogpt() {
  need_python_packages bench
  build release --target fusedstep_python
  PYTHONPATH=$root/bench:$root/tests:$root/python "$python" "$root/bench/nanogpt/nanonano_matrix.py" "$@"
}

doctor() {
  build release --target fusedstep_python
  launch -m fusedstep doctor
}

# run_script SCRIPT.py [ARG...]: looked for from the current folder, then from the repository's.
run_script() {
  [[ -e $1 ]] || set -- "$root/$1" "${@:2}"
  [[ -e $1 ]] || die "no such file: ${1#"$root/"}"
  build release --target fusedstep_python
  launch "$@"
}

run_tests() {
  case ${1:-} in
    '') test_everything "$(commit)" ;;
    --draw) test_everything "$2" ;;
    --all) test_everything ;;
    newest-torch) test_on_newest_torch ;;
    sanitize) test_under_sanitizers ;;
    sanitize-cuda) test_under_compute_sanitizer ;;
  esac
}

main() {
  local command=${1:-}
  (($# == 0)) || shift
  case "$command" in
    build) [[ $* == @(|--library) ]] || die "build takes no argument but --library: $*" ;;
    --full | doctor) (($# == 0)) || die "$command takes no arguments: $*" ;;
    test) [[ $* == @(|--all|--draw +([! ])|newest-torch|sanitize|sanitize-cuda) ]] ||
      die "test takes no argument but --all, --draw TEXT, newest-torch, sanitize or sanitize-cuda: $*" ;;
  esac
  case "$command" in
    help | -h | --help) usage && return ;;
    '' | --full | build | test | fuzz | bench | mnist | nanogpt | docs | wheel | doctor | lint | *.py) need_writable_checkout && prepare ;;
    *) usage >&2 && die "unknown command: $command" ;;
  esac
  case "$command" in
    '' | --full) everything "$command" ;;
    build) build release ${1:+--target fusedstep_python} ;;
    test) run_tests "$@" ;;
    *.py) run_script "$command" "$@" ;;
    *) "$command" "$@" ;;
  esac
}

main "$@"
