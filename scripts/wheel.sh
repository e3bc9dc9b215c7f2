# shellcheck shell=bash
# Sourced by run.sh: the wheels, named as package indexes ask for.

wheels=$root/build/wheels
policy=manylinux_2_28_$(uname -m)  # that of torch's own wheels

# Sets $older: what makes a linker use libraries of that policy, where this system has newer ones. libdl and libpthread
# are named as needed though the linker finds nothing in them: since glibc 2.34 libc has what they had. Parts of
# libstdc++'s archive that torch's libraries alone ask for are dropped.
link_older_libraries() {
  local glibc folder=$root/build/older
  older=${LDFLAGS:-}
  glibc=$(getconf GNU_LIBC_VERSION)
  at_least 2.29 "${glibc#glibc }" || return 0
  step older "writing libraries of $policy" "$python" "$root/scripts/older_libraries.py" "$folder" "$policy" || return
  older+=" -L$folder -Wl,--no-as-needed -Wl,--exclude-libs,libstdc++.a -Wl,--gc-sections"
}

# make_wheel NAME SOURCE DEFINE...
# With the torch that is here: an isolated build would load one down. DEFINE: options of CMake.
make_wheel() {
  local name=$1 source=$2 raw=$wheels/raw older
  shift 2
  link_older_libraries || return
  set -- "$@" "CMAKE_SHARED_LINKER_FLAGS=$older -Wl,-z,defs" "CMAKE_MODULE_LINKER_FLAGS=$older"
  rm -f "$raw/${name//-/_}"-[0-9]*.whl
  step "wheel-$name" "building $name" "$python" -m pip wheel -v --no-build-isolation --no-deps --no-index \
    "${@/#/--config-settings=cmake.define.}" -w "$raw" "$source" || return
  rm -f "$wheels/${name//-/_}"-[0-9]*.whl
  step "repair-$name" "naming the systems that it is for" \
    env "PYTHON=$python" "$root/scripts/repair_wheel.sh" "$raw/${name//-/_}"-[0-9]*.whl "$policy" "$wheels" || return
  set -- "$wheels/${name//-/_}"-[0-9]*.whl
  say "${1#"$root/"}: $(numfmt --to=iec "$(stat -c %s "$1")")B"
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
  [[ $which == cuda ]] || make_wheel fusedstep "$root" FUSEDSTEP_WITH_CUDA=OFF
  [[ $which == cpu ]] || make_wheel fusedstep-cuda "$root/packaging/cuda" "FUSEDSTEP_CUDA_ARCHITECTURES=$architectures"
}
