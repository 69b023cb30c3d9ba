# Part of ./dev, which reads it: the Debian packages, and installing those that are missing.
# shellcheck shell=bash

# What is needed from Debian 12: package | how to see that it is there | why.
packages_build=(
  "g++|command:g++|the compiler"
  "cmake|command:cmake|the build's description"
  "ninja-build|command:ninja|runs the build"
  "libgtest-dev|header:gtest/gtest.h|GoogleTest: the tests"
  "nlohmann-json3-dev|header:nlohmann/json.hpp|safetensors headers are JSON"
  "libeigen3-dev|file:/usr/include/eigen3/Eigen/Core|Eigen: the linear algebra of conversions"
  "libcli11-dev|header:CLI/CLI.hpp|CLI11: the options of the ladon command"
  "pkg-config|command:pkg-config|finds Cairo"
  "libcairo2-dev|header:cairo/cairo.h|Cairo: the ladon command's pictures"
)
packages_browser=(
  "chromium|command:chromium|the page of attention weights is tested in it"
)
packages_docs=(
  "doxygen|command:doxygen|the C++ reference"
)
packages_mpi=(
  "libopenmpi-dev|command:mpicxx|Open MPI: the tests of ladon/mpi.h"
  "openmpi-bin|command:mpirun|starts them"
)
packages_clang=(
  "clang-14|command:clang++-14|the second compiler"
)
packages_clang_sanitizers=(
  "libclang-rt-14-dev|file:/usr/lib/llvm-14/lib/clang/*/lib/linux/libclang_rt.asan-*.a|its sanitizers"
)
packages_emulator=(
  "make|command:make|builds Bochs, the emulator"
  "xz-utils|command:xz|its source is packed so"
  "python3|command:python3|runs the tests in it"
)
packages_format=(
  "clang-format-14|command:clang-format-14|formats the code"
)
packages_lint=(
  "clang-tidy-14|command:clang-tidy-14|lint"
)
# The interpreter is whichever python3 comes first; Debian's packages help where that is Debian's.
packages_python=(
  "python3|command:python3|the Python package"
  "python3-venv|python:import ensurepip, venv|its tests have their own packages"
  "python3-dev|python:import os, sysconfig; os.stat(sysconfig.get_path('include') + '/Python.h')|Python's headers"
)

# is_present command:NAME | header:NAME | file:PATTERN | python:CODE
is_present() {
  local kind=${1%%:*} what=${1#*:}
  case $kind in
    command) command -v "$what" >/dev/null ;;
    header) printf '#if !__has_include(<%s>)\n#error missing\n#endif\n' "$what" |
      g++ -E -x c++ - >/dev/null 2>&1 ;;
    file) compgen -G "$what" >/dev/null ;;
    python) python3 -c "$what" >/dev/null 2>&1 ;;
  esac
}

# need ENTRY...: installs those packages that are missing, or says which they are.
need() {
  local entry package probe why missing=() entries=()
  for entry in "$@"; do
    IFS='|' read -r package probe why <<<"$entry"
    is_present "$probe" && continue
    missing+=("$package")
    entries+=("$entry")
  done
  ((${#missing[@]})) || return 0

  local hint="install by hand: apt-get install --no-install-recommends ${missing[*]}"
  local as_root=()
  if ! command -v apt-get >/dev/null; then
    die "no apt-get here; install what other systems call these Debian packages: ${missing[*]}"
  elif [[ $(id -u) != 0 ]]; then
    command -v sudo >/dev/null || die "not root and no sudo; $hint"
    as_root=(sudo)
    if ! sudo -n true 2>/dev/null; then
      [[ -t 0 ]] || die "sudo needs a password, and there is no terminal to type it; $hint"
    fi
  fi
  for entry in "${entries[@]}"; do
    IFS='|' read -r package probe why <<<"$entry"
    say "installing $package ($why)"
  done
  as_root+=(env DEBIAN_FRONTEND=noninteractive apt-get -qq -o Dpkg::Use-Pty=0)
  local install=("${as_root[@]}" install -y --no-install-recommends "${missing[@]}")
  # The package lists may be there and fresh enough; fetching them is the slow part.
  if ! "${install[@]}" >/dev/null 2>&1; then
    "${as_root[@]}" update || die "apt-get update failed; $hint"
    "${install[@]}" >/dev/null || die "apt-get install failed; $hint"
  fi
  for entry in "${entries[@]}"; do
    IFS='|' read -r package probe why <<<"$entry"
    is_present "$probe" || die "$package is installed but $probe is not found"
  done
}
