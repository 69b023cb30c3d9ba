# Part of ./dev, which reads it: configuring and building, and the environment of the Python tests.
# shellcheck shell=bash

# Compile jobs: one per CPU, but the heaviest translation units take over 1 GiB each.
jobs() {
  local cpus available_kib=0 limit used by_memory
  cpus=$(nproc)
  if [[ -r /proc/meminfo ]]; then
    available_kib=$(awk '$1 == "MemAvailable:" { print $2 }' /proc/meminfo)
  fi
  if [[ -r /sys/fs/cgroup/memory.max && -r /sys/fs/cgroup/memory.current ]]; then
    limit=$(</sys/fs/cgroup/memory.max)
    used=$(</sys/fs/cgroup/memory.current)
    if [[ $limit != max ]] && (((limit - used) / 1024 < available_kib)); then
      available_kib=$(((limit - used) / 1024))
    fi
  fi
  by_memory=$((available_kib / (1536 * 1024)))
  ((available_kib == 0 || by_memory > cpus)) && by_memory=$cpus
  echo $((by_memory > 0 ? by_memory : 1))
}

# configure PRESET DIRECTORY [-D...]
configure() {
  local preset=$1 directory=$2
  shift 2
  local cache=$directory/CMakeCache.txt
  if [[ -f $cache ]] && ! grep -qxF "CMAKE_HOME_DIRECTORY:INTERNAL=$PWD" "$cache"; then
    say "$directory belongs to another checkout: starting over"
    rm -rf "$directory"
  fi
  say "configuring $directory"
  cmake --preset "$preset" -B "$directory" --log-level=WARNING "$@" >/dev/null ||
    die "cmake failed in $directory"
}

# build DIRECTORY [TARGET...]
build() {
  local directory=$1
  shift
  local targets=()
  (($#)) && targets=(--target "$@")
  say "building $directory${*:+: $*}"
  cmake --build "$directory" --parallel "$(jobs)" "${targets[@]}"
}

# A virtual environment with what the Python tests need, from PyPI. Fails, and says why, where that
# cannot be installed: the other tests run without it.
python_environment=build/venv
prepare_python() {
  local wanted=tests/python/requirements.txt stamp=$python_environment/requirements.txt
  local log=build/venv.log
  if [[ -x $python_environment/bin/python ]] && cmp -s "$wanted" "$stamp"; then return 0; fi
  if ! (need "${packages_python[@]}"); then
    say "skipped: the Python package, because Python is missing"
    return 1
  fi
  say "installing the Python tests' packages into $python_environment"
  mkdir -p build
  if rm -rf "$python_environment" && python3 -m venv "$python_environment" >"$log" 2>&1 &&
    "$python_environment/bin/python" -m pip install --disable-pip-version-check --quiet --retries 2 \
      --timeout 20 --requirement "$wanted" >>"$log" 2>&1; then
    cp "$wanted" "$stamp"
    return 0
  fi
  tail -n 3 "$log" >&2
  rm -rf "$python_environment"
  say "skipped: the Python package, because its build and test requirements could not be installed from PyPI (see $log)"
  return 1
}

# PyTorch for CPUs and transformers, for the tests that want them: 540 MB from PyPI, so only where LADON_TEST_TORCH is set.
prepare_torch() {
  local log=build/torch.log
  if "$python_environment/bin/python" -c 'import torch, transformers' 2>/dev/null; then return 0; fi
  say "installing PyTorch for CPUs (540 MB) and transformers into $python_environment"
  if python3 -B tools/torch_on_cpu.py "$python_environment/bin/python" >"$log" 2>&1; then return 0; fi
  tail -n 3 "$log" >&2
  say "skipped: the tests with PyTorch, which could not be installed from PyPI (see $log)"
}

# True where an NVIDIA driver runs.
has_gpu() { [[ -e /dev/nvidiactl || -e /dev/dxg ]]; }

# build_release [-D...] [TARGET...]
build_release() {
  need "${packages_build[@]}"
  local options=()
  while [[ ${1:-} == -D* ]]; do options+=("$1") && shift; done
  # A build tree that knows of the Python package cannot be configured without its environment.
  [[ -x $python_environment/bin/python ]] || options+=(-DLADON_PYTHON=OFF)
  # Almost half of a first build would be kernels that nothing here can run. A tree that has them keeps them.
  has_gpu || [[ -f build/release/CMakeCache.txt ]] || options=(-DLADON_CUDA=OFF "${options[@]}")
  configure release build/release -DCMAKE_CXX_COMPILER=g++ "${options[@]}"
  build build/release "$@"
}

# The instruction sets, as the library's own list has them.
isa_names() {
  echo reference "$(sed -nE 's/^  X\(k[A-Za-z0-9]+, ([a-z0-9_]+)\).*/\1/p' include/ladon/isa.h | xargs)"
}
