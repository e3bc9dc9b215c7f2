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
  local status=0
  build "$@" || return
  step "ctest-$1" "running the C++ tests ($1)" \
    env OMP_WAIT_POLICY=passive ctest --test-dir "$root/build/$1" --verbose --no-tests=error -j "$(nproc)" || status=1
  count_cpp_tests "$logs/ctest-$1.log"
  return "$status"
}

# Of a log of several programs at a time: what failed or never came to an end, by name, and how many passed.
count_cpp_tests() {
  awk '$3 == "RUN" { left[$5] }
       $3 == "OK" { ++passed }
       $3 == "OK" || $3 == "SKIPPED" { delete left[$5] }
       END { for (name in left) print "FAILED", name; print passed + 0, "tests passed" }' "$1"
}

# One process for each CPU: most tests keep no more busy.
python_tests() { (cd "$root" && "$python" -m pytest -n "$(parallelism)" "$@"); }

# What has no LibTorch in it, which is not built for sanitizers.
sanitized=(sanitize --target fusedstep_core_tests mnist_test)

test_everything() {
  local ahead
  need_python_packages test
  part "C++" cpp_tests release
  # In what the Python tests leave idle. What goes wrong is seen when its turn comes.
  (renice -n 10 "$BASHPID" && build "${sanitized[@]}") &>/dev/null &
  ahead=$!
  part "Python" python_tests --dist worksteal --ignore=tests/packaging
  wait "$ahead" || true
  part "C++ sanitized" cpp_tests "${sanitized[@]}"
  part "packaging" python_tests --dist loadfile tests/packaging
  printf '\n'
  printf '%s\n' "${summary[@]}"
  ((failures == 0))
}
