# shellcheck shell=bash
# Sourced by run.sh: every test once, the summaries last, and what CI runs again with other tools.

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
  words=$(grep -E '(tests|cases) passed|^=+ .*(passed|failed|error)|^run.sh: (.*failed|skipped:)' "$log" | tail -n 1 || true)
  words=$(sed 's/^=* *//; s/ *=*$//' <<<"$words")
  [[ $words != "run.sh: skipped:"* ]] || outcome=skipped
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

# Reads a log of several programs at a time. Prints the tests that failed or never ended, and how many passed.
count_cpp_tests() {
  awk '$3 == "RUN" { left[$5] }
       $3 == "OK" { ++passed }
       $3 == "OK" || $3 == "SKIPPED" { delete left[$5] }
       END { for (name in left) print "FAILED", name; print passed + 0, "tests passed" }' "$1"
}

# One process for each CPU: most tests keep no more busy.
python_tests() { (cd "$root" && "$python" -m pytest -n "$(parallelism)" "$@"); }

# For tests of some milliseconds: pytest's capture of logs, which none of them asks for, takes a tenth of that.
short_tests=(-p no:logging)

# The laws that depend on torch most, with the library that was built on an older one. Of compiled steps a few, and none
# whose memory runs out: they take longer than all others.
test_on_newest_torch() {
  local compiled="in_one_graph or operators_are_as_declared or copies_no_weight or a_scheduler"
  need_python_packages test
  prepare_newest_torch || true
  newest_torch_version >/dev/null || { say "skipped: no newer torch is here, and pip brings none" && return; }
  build release || return
  say "some laws on torch $(newest_torch_version)"
  (cd "$root" && "$newest/bin/python" -m pytest -n "$(parallelism)" --dist worksteal --plain "${short_tests[@]}" \
    -k "not test_compile or $compiled" \
    tests/laws/{engine/test_{groups,bind,isa},maths/test_{optim_database,contract},state/test_{checkpoints,states},api/test_{hooks,compile{,_changes,_operators}}}.py)
}

# Targets without LibTorch, which is not built for sanitizers.
test_under_sanitizers() { cpp_tests sanitize --target fusedstep_core_tests mnist_test; }

# Tests of one small kernel of every kind: under these tools one takes a hundred times as long.
kernels_once="another_dtype or clipping_scaling or a_scalers_step or is_replayed"
kernels_once+=" or (every_layout and (lamb or adagrad) and (column or transposed))"
kernels_once+=" or (cuda and (sparse_dimensions or rows_that or and_sparse or clips or a_scalers_gradients))"
kernels_once+=" or (cuda and the_dense_step and times and float32)"

# compute_sanitizer TOOL
# torch's kernels are looked at by initcheck alone, which has to see what they write. What torch asks of the runtime may
# fail, as torch knows. Each tensor has memory of its own: what is beyond its end is nobody's.
compute_sanitizer() {
  local tool=$1 log=$logs/sanitize-cuda-$1.log options=(--error-exitcode 1 --report-api-errors no)
  [[ $tool == initcheck ]] || options+=(--kernel-name kns=fusedstep)
  step "sanitize-cuda-$tool" "CUDA kernels under compute-sanitizer $tool" \
    env PYTORCH_NO_CUDA_MEMORY_CACHING=1 OMP_WAIT_POLICY=passive PYTHONPATH="$root/tests:$root/python" \
    compute-sanitizer --tool "$tool" "${options[@]}" \
    "$python" -m pytest -q -p no:cacheprovider "$root"/tests/laws/engine/test_{cuda,sparse}.py -k "$kernels_once" || return
  grep -E 'SUMMARY|[0-9]+ passed' "$log" | sed "s/^=* */run.sh: $tool: /" >&2
  # If all are skipped, nothing has been tested.
  grep -qE '^[0-9]+ passed' "$log" || { say "$tool: no test has run, $log says why" && return 1; }
}

test_under_compute_sanitizer() {
  local tool status=0
  command -v compute-sanitizer >/dev/null || die "there is no compute-sanitizer: it is part of the CUDA toolkit"
  build release --target fusedstep_python || return
  for tool in memcheck racecheck initcheck; do compute_sanitizer "$tool" || status=1; done
  return "$status"
}

# await PROCESS LOG: the output of `... &>LOG && echo passed >>LOG` in the background, and whether it did.
await() {
  while kill -0 "$1" 2>/dev/null; do sleep 1; done
  cat "$2"
  [[ $(tail -n 1 "$2") == passed ]]
}

# A text that chooses a draw: another one for each commit.
commit() { git -C "$root" rev-parse HEAD 2>/dev/null || echo fusedstep; }

# test_everything [TEXT]: all combinations of the laws' parameters, or the draw that TEXT chooses (tests/support/draw.py).
test_everything() {
  local bringing fuzzing fuzz_log=$logs/fuzz.log combinations=()
  if (($#)); then
    combinations=(--draw "$1")
    say "combinations are drawn by $1: './run.sh test --draw $1' has them again, './run.sh test --all' has all"
  fi
  need_python_packages test wheel docs
  install_frameworks
  # For the tests of packages. Gigabytes to load down and unpack, as the compilers run.
  (renice -n 10 "$BASHPID" && prepare_newest_torch) &>/dev/null &
  bringing=$!
  part "C++" cpp_tests release
  part "site" test_site
  part "Python" python_tests --dist worksteal "${short_tests[@]}" "${combinations[@]}" \
    --junitxml "$logs/python-tests.xml" --ignore=tests/packaging --ignore=tests/frameworks
  # In what the other parts leave idle: a minute of a core, and the same cases each time. `./run.sh fuzz` has others.
  # What goes wrong is seen when its turn comes.
  { renice -n 10 "$BASHPID" >/dev/null && random_cases --seed 1 --cases 250 && echo passed; } </dev/null &>"$fuzz_log" &
  fuzzing=$!
  # A file is about one framework, which takes seconds to import.
  part "frameworks" python_tests --dist loadfile "${combinations[@]}" tests/frameworks
  wait "$bringing" || true
  part "packaging" python_tests --dist loadfile tests/packaging
  part "fuzz" await "$fuzzing" "$fuzz_log"
  printf '\n'
  printf '%s\n' "${summary[@]}"
  ((failures == 0))
}
