# shellcheck shell=bash
# Sourced by run.sh: the formatters and linters, each over our own files.

ours() { git ls-files --cached --others --exclude-standard -- "$@"; }

# check NAME COMMAND...: shows what COMMAND has to say only when it fails.
check() {
  local name=$1
  shift
  step "lint-$name" "$name" "$@" || failed+=("$name")
}

format_cpp() { ours '*.h' '*.cpp' '*.cu' '*.cuh' | xargs -r -d '\n' clang-format "$@"; }

# Over the files that the release build compiles. Those that are compiled once for each rule, those of several sources and
# the largest come first: none that takes long is left for the end.
# clang has an omp.h only where its own OpenMP is installed: the compiler's is looked for last.
tidy() {
  grep -oP '"file": "\K[^"]+' build/release/compile_commands.json | grep -v '\.cu$' | sort -u |
    xargs -r -d '\n' ls -S | awk '/Unity|cpu_kernels/ { print; next } { rest = rest $0 "\n" } END { printf "%s", rest }' | xargs -r -d '\n' -n 1 -P "$(parallelism)" \
      clang-tidy -p build/release --quiet --extra-arg="-idirafter$("$CXX" -print-file-name=include)" 2>&1 |
    { grep -Ev 'warnings generated\.$|Processing file' || true; }
}

lint() {
  local fix=${1:-} failed=()
  [[ $fix == @(|--fix) ]] || die "unknown option: $fix"
  cd "$root" || return
  need_python_packages lint
  configure release
  if [[ $fix == --fix ]]; then
    check clang-format format_cpp -i
    check ruff "$python" -m ruff check --fix
    check ruff-format "$python" -m ruff format
  else
    check clang-format format_cpp --dry-run -Werror
    check ruff "$python" -m ruff check
    check ruff-format "$python" -m ruff format --check
  fi
  check mypy "$python" -m mypy # with the files and options of pyproject.toml; it keeps a cache
  check clang-tidy tidy
  ! command -v shellcheck >/dev/null || check shellcheck shellcheck -x run.sh .ci/run bench/probes/build_time.sh scripts/repair_wheel.sh
  ((${#failed[@]} == 0)) || die "lint: ${failed[*]}"
}
