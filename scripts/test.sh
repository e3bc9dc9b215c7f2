# shellcheck shell=bash
# Sourced by run.sh: everything that CI runs, the summaries last.

summary=()
failures=0

# part NAME COMMAND...: runs one part, keeps its output in build/logs and its last words for the summary.
part() {
  local name=$1 log=$logs/test-${1// /-}.log began=$SECONDS outcome=passed words
  shift
  mkdir -p "$logs"
  say "$name"
  "$@" </dev/null 2>&1 | tee "$log" || {
    outcome=FAILED
    failures=$((failures + 1))
  }
  words=$(grep -E 'tests passed|^=+ .*(passed|failed|error)|^run.sh: .*failed' "$log" | tail -n 1 | sed 's/^=* *//; s/ *=*$//' || true)
  summary+=("$(printf '%-8s %-16s %5d s  %s' "$outcome" "$name" $((SECONDS - began)) "$words")")
}

# cpp_tests PRESET [OPTION...]: options go to `cmake --build`. More threads are started than there are CPUs: they must
# not spin as they wait for one another.
cpp_tests() {
  build "$@" || return
  step "ctest-$1" "running the C++ tests ($1)" \
    env OMP_WAIT_POLICY=passive ctest --test-dir "$root/build/$1" --output-on-failure --no-tests=error -j "$(nproc)" || return
  grep 'tests passed' "$logs/ctest-$1.log"
}

python_tests() { (cd "$root" && "$python" -m pytest "$@"); }

# What has no LibTorch in it, which is not built for sanitizers.
sanitized=(sanitize --target fusedstep_core_tests mnist_test)

test_everything() {
  local ahead
  need_python_packages test
  part "C++" cpp_tests release
  # The Python tests leave a core idle for most of their time. What goes wrong is seen when its turn comes.
  (renice -n 10 "$BASHPID" && build "${sanitized[@]}") &>/dev/null &
  ahead=$!
  part "Python" python_tests --ignore=tests/packaging
  wait "$ahead" || true
  part "C++ sanitized" cpp_tests "${sanitized[@]}"
  part "packaging" python_tests tests/packaging
  printf '\n'
  printf '%s\n' "${summary[@]}"
  ((failures == 0))
}
