# Part of ./dev, which reads it: the command gpu.
# shellcheck shell=bash

# True where gpu_tests can be built.
can_build_gpu() {
  command -v cmake >/dev/null && command -v ninja >/dev/null && command -v nvcc >/dev/null &&
    is_present header:gtest/gtest.h && is_present header:nlohmann/json.hpp &&
    is_present header:CLI/CLI.hpp
}

# Into build/gpu: gpu_tests, ladon, and what they were built from.
build_gpu() {
  # Without Cairo, which the other machine may not have.
  local directory=build/gpu_release
  configure release "$directory" -DCMAKE_CXX_COMPILER=g++ -DLADON_CUDA=ON -DLADON_PYTHON=OFF \
    -DLADON_CAIRO=OFF
  build "$directory" gpu_tests ladon_cli
  mkdir -p build/gpu
  strip -o build/gpu/gpu_tests "$directory/tests/gpu_tests"
  strip -o build/gpu/ladon "$directory/cli/ladon"
  { git describe --always --dirty --abbrev=12 2>/dev/null || echo unknown; } >build/gpu/built_from
  tools/cuda_digest.sh >>build/gpu/built_from
}

command_gpu() {
  local only_build='' arguments=()
  while (($#)); do
    case $1 in
      --build) only_build=1 && shift ;;
      --no-bench) arguments+=("$1") && shift ;;
      --filter | --under | --peers)
        [[ -n ${2:-} ]] || bad_usage "$1 needs a value"
        arguments+=("$1" "$2")
        shift 2
        ;;
      *) bad_usage "gpu does not know '$1'" ;;
    esac
  done
  if can_build_gpu; then
    build_gpu
  elif [[ -n $only_build || ! -x build/gpu/gpu_tests || ! -x build/gpu/ladon ]]; then
    die "gpu_tests cannot be built here (it takes nvcc, GoogleTest, CLI11 and nlohmann-json), and \
build/gpu does not have it: ./dev gpu --build makes it elsewhere"
  else
    say "using the programs in build/gpu"
    [[ $(tools/cuda_digest.sh) == "$(sed -n 2p build/gpu/built_from)" ]] ||
      die "build/gpu was built from another src/cuda"
  fi
  [[ -z $only_build ]] || { ls -l build/gpu && return; }
  build/gpu/ladon info | grep '^GPU'
  [[ $(build/gpu/ladon info --json) != *'"no_gpu"'* ]] || die "no GPU here that can be used"
  say "testing on the GPU"
  python3 tools/gpu_run.py --programs build/gpu "${arguments[@]}"
}
