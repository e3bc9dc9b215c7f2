# shellcheck shell=bash
# Sourced by run.sh: the wheels, named as package indexes ask for.

wheels=$root/build/wheels

# make_wheel NAME SOURCE DEFINE...
# With the torch that is here: an isolated build would load one down. DEFINE: options of CMake without FUSEDSTEP_.
make_wheel() {
  local name=$1 source=$2 raw=$wheels/raw
  shift 2
  rm -f "$raw/${name//-/_}"-[0-9]*.whl
  step "wheel-$name" "building $name" "$python" -m pip wheel -v --no-build-isolation --no-deps --no-index \
    "${@/#/-Ccmake.define.FUSEDSTEP_}" -w "$raw" "$source" || return
  rm -f "$wheels/${name//-/_}"-[0-9]*.whl
  step "repair-$name" "naming the systems that it is for" \
    env "PYTHON=$python" "$root/scripts/repair_wheel.sh" "$raw/${name//-/_}"-[0-9]*.whl "$wheels" || return
  tell_wheel "$wheels/${name//-/_}"-[0-9]*.whl
}

# tell_wheel WHEEL: its name and size, and what its tag says.
tell_wheel() {
  local glibc
  glibc=$(grep -oP 'manylinux_2_\K[0-9]+' <<<"${1##*/}" | sort -n | head -n 1)
  say "${1#"$root/"}: $(numfmt --to=iec "$(stat -c %s "$1")")B, for glibc 2.$glibc and later"
  ((glibc <= 28)) || say "(this machine's compiler and glibc decide that; CONTRIBUTING.md tells how to build for 2.28)"
}

can_compile_cuda() {
  command -v nvcc >/dev/null || [[ -x /usr/local/cuda/bin/nvcc ]] || return
  "$python" -c 'import importlib.util as u, pathlib, sys
sys.exit(not (pathlib.Path(u.find_spec("torch").origin).parent / "lib" / "libtorch_cuda.so").is_file())'
}

wheel() {
  local which='' architectures=ALL
  while (($#)); do
    case $1 in
      cpu | cuda) which=$1 && shift && continue ;;
      --architectures | --into) (($# > 1)) || die "$1 is followed by nothing" ;;
      *) die "wheel takes cpu or cuda, --architectures LIST and --into FOLDER: $1" ;;
    esac
    [[ $1 == --into ]] && wheels=$2 || architectures=$2
    shift 2
  done
  need_python_packages test wheel
  if [[ $which != cpu ]] && ! can_compile_cuda; then
    [[ -z $which ]] || die "fusedstep-cuda needs nvcc, and a torch for CUDA"
    which=cpu
    say "there is no nvcc, or no torch for CUDA: no fusedstep-cuda"
  fi
  [[ $which == cuda ]] || make_wheel fusedstep "$root" WITH_CUDA=OFF
  [[ $which == cpu ]] || make_wheel fusedstep-cuda "$root/packaging/cuda" "CUDA_ARCHITECTURES=$architectures"
}
