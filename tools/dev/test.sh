# Part of ./dev, which reads it: the command test.
# shellcheck shell=bash

command_test() {
  if (($# == 0)); then
    test_all
    return
  fi
  test_with "$@"
}

# What continuous integration runs.
test_all() {
  need "${packages_build[@]}" "${packages_format[@]}" "${packages_browser[@]}"
  say "format"
  check_format || die "the code is not formatted as .clang-format says: try ./dev format"
  test_with
  say "some of the tests with sanitizers"
  configure asan build/asan -DCMAKE_CXX_COMPILER=g++ -DLADON_PYTHON=OFF
  build build/asan sanitized_tests
  ctest --test-dir build/asan --output-on-failure --no-tests=error --parallel "$(jobs)" \
    --label-regex sanitized
}

# test_with [options] [-- ctest's arguments...]
test_with() {
  local sanitize='' compiler=g++ isa='' emulate=''
  while (($#)); do
    case $1 in
      --sanitize | --compiler | --isa | --emulate)
        [[ -n ${2:-} ]] || bad_usage "$1 needs a value"
        local "${1#--}"="$2"
        shift 2
        ;;
      --) shift && break ;;
      *) bad_usage "test does not know '$1'" ;;
    esac
  done

  local preset=release runner=()
  case $sanitize in
    '') ;;
    address,undefined) preset=asan ;;
    thread) preset=tsan ;;
    *) bad_usage "--sanitize takes address,undefined or thread, not '$sanitize'" ;;
  esac
  if [[ -n $isa && " $(isa_names) " != *" $isa "* ]]; then
    bad_usage "--isa takes one of $(isa_names), not '$isa'"
  fi
  if [[ -n $emulate ]]; then
    [[ -z $sanitize && $compiler == g++ ]] || bad_usage "--emulate goes with --isa alone"
    test_emulated "$emulate" "${isa:-amx}" "$@"
    return
  fi
  local directory=build/$preset
  need "${packages_build[@]}"
  [[ -n $sanitize ]] || need "${packages_mpi[@]}"
  case $compiler in
    g++) ;;
    clang++-14)
      need "${packages_clang[@]}"
      [[ -z $sanitize ]] || need "${packages_clang_sanitizers[@]}"
      [[ -n $sanitize ]] || preset=clang
      directory=build/${sanitize:+$preset-}clang
      ;;
    *)
      command -v "$compiler" >/dev/null || die "no compiler named '$compiler' here"
      directory=$directory-$(basename "$compiler")
      ;;
  esac
  local python=(-DLADON_PYTHON=OFF) torch=''
  if [[ -n $sanitize ]]; then
    say "skipped: the Python tests, because the interpreter has no sanitizer in it"
  elif prepare_python; then
    python=(-DLADON_PYTHON=ON -DPython_EXECUTABLE="$PWD/$python_environment/bin/python")
    # Only the tests need PyTorch: it is fetched while the compiler works.
    [[ -z ${LADON_TEST_TORCH:-} ]] || { prepare_torch & torch=$!; }
  fi
  local cuda=(-DLADON_CUDA=AUTO)
  [[ -z $sanitize ]] || cuda=()
  configure "$preset" "$directory" -DCMAKE_CXX_COMPILER="$compiler" "${cuda[@]}" "${python[@]}"
  build "$directory"
  [[ -z $torch ]] || wait "$torch"

  if [[ $sanitize == thread ]] && setarch -R true 2>/dev/null; then
    runner=(setarch -R)  # older thread sanitizers die where addresses are randomised widely
  fi
  [[ -z $isa ]] || export LADON_ISA=$isa
  say "testing $directory${isa:+ on $isa}"
  local log=$directory/test.log status=0
  "${runner[@]}" ctest --test-dir "$directory" --output-on-failure --no-tests=error \
    --parallel "$(jobs)" "$@" 2>&1 | tee "$log" || status=$?
  # Why whole tests were skipped; ctest shows only which.
  grep -h '^skipped: ' "$directory/Testing/Temporary/LastTest.log" | sort -u || true
  grep -E '^[0-9]+% tests passed' "$log" || die "ctest gave no summary"
  return "$status"
}

# The tests that emulated_tests.txt names, those cases of them that are of the instruction set.
# test_emulated CPU ISA [ctest's arguments...]
test_emulated() {
  local cpu=$1 isa=$2 directory=build/emulated emulator=tools/emulate tests
  shift 2
  mapfile -t tests < <(grep -v '^#' "$emulator/emulated_tests.txt")
  need "${packages_build[@]}" "${packages_emulator[@]}"
  say "building the emulator"
  "$emulator/build.sh" build/emulator "$(jobs)"
  say "does the emulated $cpu have what the kernels use?"
  "$emulator/emulate.py" --cpu "$cpu" build/emulator/selftest || say "no: see above"
  # Static, because the emulator's kernel knows no shared libraries.
  configure release "$directory" -DCMAKE_CXX_COMPILER=g++ -DLADON_PYTHON=OFF -DLADON_EXAMPLES=OFF \
    -DLADON_CLI=OFF -DLADON_INSTALL=OFF -DLADON_CUDA=OFF -DCMAKE_EXE_LINKER_FLAGS=-static \
    -DCMAKE_CROSSCOMPILING_EMULATOR="$PWD/$emulator/emulate.py;--cpu;$cpu"
  build "$directory" "${tests[@]}"
  say "testing $directory on $isa of an emulated $cpu"
  LADON_ISA=$isa GTEST_FILTER="*/$isa:IsaTest.*" ctest --test-dir "$directory" --output-on-failure \
    --no-tests=error --parallel "$(jobs)" --tests-regex "^($(IFS='|' && echo "${tests[*]}"))\$" "$@"
}
