# shellcheck shell=bash
# Sourced by run.sh: finds a compiler, CMake and a Python with torch, and installs what is missing.
# Needs no network, and calls neither apt-get nor pip, when everything is there.

# at_least MINIMUM VERSION
at_least() { [[ -n $2 && $(printf '%s\n' "$1" "$2" | sort -V | head -n 1) == "$1" ]]; }

# ---- The system's packages ------------------------------------------------------------------------------

# Chooses CXX: the user's, or the first g++ that knows enough of C++20.
find_compiler() {
  local compiler
  for compiler in ${CXX:+"$CXX"} g++ g++-{15,14,13,12}; do
    if at_least 12 "$("$compiler" -dumpversion 2>/dev/null)"; then
      export CXX=$compiler
      return
    fi
  done
  return 1
}

missing_headers() {
  "$CXX" -x c++ -E -P - <<'END' | grep .
#if !__has_include(<gtest/gtest.h>)
libgtest-dev
#endif
#if !__has_include(<benchmark/benchmark.h>)
libbenchmark-dev
#endif
#if !__has_include(<zlib.h>)
zlib1g-dev
#endif
END
}

# Names the Debian packages that a build needs and that are not there.
missing_packages() {
  if find_compiler; then
    missing_headers || true
  else
    echo "$(command -v g++ >/dev/null && echo g++-12 || echo g++)" libgtest-dev libbenchmark-dev zlib1g-dev
  fi
  command -v cmake >/dev/null || echo cmake
  command -v ninja >/dev/null || echo ninja-build
  command -v nm >/dev/null || echo binutils
  if [[ ! -d $venv ]] && ! has_torch python3 && ! find_python_for_venv >/dev/null; then
    echo python3 python3-venv
  fi
}

has_jemalloc() { [[ $(/sbin/ldconfig -p) == *libjemalloc.so.2* ]]; }

# Succeeds if packages may be installed without a question; leaves the word to put before apt-get in $sudo.
may_install() {
  command -v apt-get >/dev/null || return
  sudo=
  [[ $(id -u) == 0 ]] || { sudo=sudo && sudo -n true 2>/dev/null; }
}

apt_install() {
  local apt=(${sudo:+"$sudo"} env DEBIAN_FRONTEND=noninteractive apt-get -q -o DPkg::Lock::Timeout=300)
  "${apt[@]}" "${apt_options[@]}" update && "${apt[@]}" "${apt_options[@]}" install -y --no-install-recommends "$@"
}

# install_packages PACKAGE...: needed ones. Brings along what is of use: jemalloc, and ccache, for the wheel that is
# tested has the very objects of the build.
install_packages() {
  local apt_options=()
  has_jemalloc || set -- "$@" libjemalloc2
  command -v ccache >/dev/null || set -- "$@" ccache
  may_install || die "missing: $*. Type: sudo apt-get install $*   (or your system's packages of that kind)"
  step apt "installing $*" apt_install "$@"
}

# Succeeds if there is a way out of this machine at all.
is_online() { awk '$2 == "00000000" { found = 1 } END { exit !found }' /proc/net/route 2>/dev/null; }

# once NAME COMMAND...: tries an optional thing, and does so only once in this build folder.
once() {
  local stamp=$root/build/.tried-$1
  shift
  [[ ! -e $stamp ]] && is_online || return
  mkdir -p "$root/build" && touch "$stamp"
  "$@"
}

# The headers of the Python that .venv is made of.
has_python_headers() {
  [[ -e $("$(find_python_for_venv)" -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h ]]
}

# bring PACKAGE: one that is of use and not needed, so that nobody waits long for it.
bring() {
  local apt_options=(-o Acquire::Retries=0 -o Acquire::http::Timeout=10 -o Acquire::https::Timeout=10)
  may_install && step "$1" "installing $1" apt_install "$1"
}

prepare_system() {
  local packages
  read -r -d '' -a packages < <(missing_packages && printf '\0')
  ((${#packages[@]} == 0)) || install_packages "${packages[@]}"
  find_compiler || { install_packages g++-12 && find_compiler; } || die "no C++20 compiler: g++ 12 or newer is needed"
  has_jemalloc || once jemalloc bring libjemalloc2 || true
  has_python_headers || once python-headers bring python3-dev || true
  command -v ccache >/dev/null || once ccache bring ccache || true
  command -v ccache >/dev/null || return 0
  export CMAKE_CXX_COMPILER_LAUNCHER=${CMAKE_CXX_COMPILER_LAUNCHER-ccache}
  export CMAKE_CUDA_COMPILER_LAUNCHER=${CMAKE_CUDA_COMPILER_LAUNCHER-ccache}
  # Another checkout of the same sources finds these objects.
  [[ -n $(ccache --get-config base_dir 2>/dev/null) ]] || export CCACHE_BASEDIR=$root
}

# ---- Python ---------------------------------------------------------------------------------------------

missing_python_packages() { "$1" "$root/scripts/missing_packages.py" "${@:2}"; }

is_recent_python() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; }

has_torch() { is_recent_python "$1" && [[ -z $(missing_python_packages "$1") ]]; }

# Prints a Python that can make a virtual environment. The first python3 may be a version manager's stand-in
# for nothing, or too old, so that each is tried.
find_python_for_venv() {
  local candidate
  for candidate in python3 /usr/bin/python3 python3.{13,12,11,10}; do
    if is_recent_python "$candidate" && "$candidate" -c 'import ensurepip, venv' 2>/dev/null; then
      echo "$candidate"
      return
    fi
  done
  return 1
}

# Sets $python: the repository's own .venv, else a python3 that has torch, else a new .venv.
prepare_python() {
  if [[ ! -d $venv ]] && has_torch python3; then
    python=$(python3 -c 'import sys; print(sys.executable)')
    return
  fi
  python=$venv/bin/python
  is_recent_python "$python" || step venv "making .venv" "$(find_python_for_venv)" -m venv --clear "$venv"
  export PATH=$venv/bin:$PATH
  need_python_packages test wheel bench examples digits lint
}

# need_python_packages EXTRA...: the extras of pyproject.toml, installed into .venv and asked for elsewhere.
need_python_packages() {
  local missing
  mapfile -t missing < <(missing_python_packages "$python" "$@")
  ((${#missing[@]})) || return 0
  [[ $python == "$venv/"* ]] || die "missing: ${missing[*]}. Type: $python -m pip install ${missing[*]@Q}"
  step pip "installing ${missing[*]} into .venv" \
    "$python" -m pip install -c "$root/scripts/constraints.txt" "${missing[@]}"
}

# install_peers EXTRA cpu|cuda: what the benchmark compares with. One that cannot be had does not stop the others.
install_peers() {
  local missing
  mapfile -t missing < <(missing_python_packages "$python" "$1")
  PYTHONPATH=$root/bench "$python" -m harness.peer_packages --device "$2" "${missing[@]}"
}

# In a folder of its own, and without most of what it asks for: its optimizers do not use that, and transformers needs a
# newer huggingface_hub than it allows.
install_torchtitan() {
  local packages=(torchtitan torch_checkpointing torchdata spmd_types tyro typeguard docstring_parser)
  step torchtitan "installing torchtitan for its tests" \
    "$python" -m pip install --no-deps --target "$root/build/torchtitan" "${packages[@]}"
}

# In a folder of its own too, with an OpenCV that needs no libGL. timm and transformers bring what else it imports.
install_ultralytics() {
  local packages=(ultralytics ultralytics-thop opencv-python-headless polars polars-runtime-32)
  step ultralytics "installing Ultralytics for its tests" \
    "$python" -m pip install --no-deps --target "$root/build/ultralytics" "${packages[@]}"
}

# In a folder of its own, without what its training scripts need: the optimizers import torch and numpy.
install_megatron() {
  step megatron "installing Megatron-Core for its tests" \
    "$python" -m pip install --no-deps --target "$root/build/megatron" megatron-core
}

# In a folder of its own too, which only their own tests have on the path: other frameworks behave otherwise beside them.
install_low_bit() {
  step low-bit "installing bitsandbytes, torchao and other optimizers for their tests" \
    "$python" -m pip install --no-deps --target "$root/build/low-bit" bitsandbytes torchao \
    galore-torch apollo-torch torch-optimi prodigyopt schedulefree lion-pytorch pytorch_optimizer
}

# Installs what tests train inside of, or compare with. The tests of one that cannot be had are skipped.
install_frameworks() {
  (need_python_packages frameworks) || say "some frameworks are missing: their tests are skipped"
  [[ -d $root/build/torchtitan ]] || once torchtitan install_torchtitan || say "no torchtitan: its tests are skipped"
  [[ -d $root/build/ultralytics ]] || once ultralytics install_ultralytics || say "no Ultralytics: its tests are skipped"
  [[ -d $root/build/megatron ]] || once megatron install_megatron || say "no Megatron-Core: one of its tests is skipped"
  [[ -d $root/build/low-bit ]] || once low-bit install_low_bit || say "no bitsandbytes, no torchao: their tests are skipped"
}

# Debian's and Ubuntu's older releases come with an older CMake.
prepare_cmake() {
  at_least 3.25 "$(cmake --version | sed -n '1s/.* //p')" && return
  [[ $python == "$venv/"* ]] || die "CMake 3.25 or newer is needed. Type: $python -m pip install cmake"
  step cmake "installing a newer CMake into .venv" "$python" -m pip install 'cmake>=3.25,<4'
}

# ---- The newest torch, for some of the laws -------------------------------------------------------------

newest=$root/build/newest-torch

# An environment for torch and what that needs. What else is imported is that of $python.
install_newest_torch() {
  local folder
  "$python" -m venv --without-pip "$newest" &&
    folder=$("$newest/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))') &&
    "$python" -c 'import sys; print(*sys.path, sep="\n")' | grep -e '-packages$' >"$folder/others.pth" &&
    timeout 600 "$newest/bin/python" -m pip install --retries 0 --timeout 10 --no-compile --upgrade torch &&
    touch "$newest/.looked-for"
}

# pip is asked once a week. Where that fails, the torch that is there serves.
prepare_newest_torch() {
  [[ -z $(find "$newest/.looked-for" -mtime -7 2>/dev/null) ]] || return 0
  is_online && step newest-torch "installing the newest torch" install_newest_torch
}

newest_torch_version() {
  [[ -e $newest/.looked-for ]] || return
  "$newest/bin/python" -c 'import importlib.metadata; print(importlib.metadata.version("torch"))'
}

prepare() {
  prepare_system
  prepare_python
  prepare_cmake
}
