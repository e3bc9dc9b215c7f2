# shellcheck shell=bash
# Sourced by run.sh: where things are, and how what happens is told.

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=$root/.venv
logs=$root/build/logs

say() { printf 'run.sh: %s\n' "$*" >&2; }

die() {
  say "$*"
  exit 1
}

# Builds go into the checkout.
need_writable_checkout() {
  local folder
  for folder in "$root" "$root/build" "$root/python/fusedstep"; do
    [[ ! -e $folder || -w $folder ]] || die "$folder cannot be written, and builds go there: use a copy that is yours"
  done
}

# full_disk LOG: the line of LOG that names a full disk. Where it had no room for that line, less than a megabyte is left.
full_disk() {
  grep -s -m 1 "No space left on device" "$1" && return
  (($(df --output=avail "$logs" | tail -n 1) < 1024)) && df --output=target,size,avail -h "$logs" | tail -n 1
}

# over TEXT: writes TEXT over the terminal's last line. One wider than the terminal could not be written over.
over() {
  local columns=0
  read -r _ columns < <(stty size <&2 2>/dev/null) || true
  ((columns > 0)) || columns=80
  printf '\r\033[K%s' "${1:0:columns-1}" >&2
}

# step LOG WHAT COMMAND...
# Runs COMMAND with its output in build/logs/LOG.log and one line on the terminal: WHAT, then the seconds it
# took. When it fails, the end of the log is shown, or in one line that a disk is full.
step() {
  local log=$logs/$1.log what=$2 began=$SECONDS ticker='' status=0 full
  shift 2
  mkdir -p "$logs"
  if [[ -t 2 ]]; then
    tick "$what" "$log" &
    ticker=$!
  else
    printf 'run.sh: %s ... ' "$what" >&2
  fi
  "$@" </dev/null >"$log" 2>&1 || status=$?
  if [[ -n $ticker ]]; then
    kill "$ticker"
    wait "$ticker" 2>/dev/null || true
    printf '\r\033[Krun.sh: %s ... ' "$what" >&2
  fi
  if ((status == 0)); then
    printf '%d s\n' $((SECONDS - began)) >&2
    return
  fi
  printf 'failed\n' >&2
  if full=$(full_disk "$log"); then
    say "a disk is full: $full"
    return "$status"
  fi
  tail -n 40 "$log" >&2
  say "the whole output: $log"
  return "$status"
}

# Shows how far a step has come, for as long as this script lives.
tick() {
  local began=$SECONDS
  over "run.sh: $1 ..."
  while sleep 1 && kill -0 $$ 2>/dev/null; do
    over "run.sh: $1 ... $((SECONDS - began)) s  $(tail -n 1 "$2" 2>/dev/null)"
  done
}
