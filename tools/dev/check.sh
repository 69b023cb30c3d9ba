# Part of ./dev, which reads it: the commands check and format.
# shellcheck shell=bash

command_check() {
  local everything=''
  case ${1:-} in
    '') ;;
    --all) everything=1 ;;
    *) bad_usage "check does not know '$1'" ;;
  esac
  need "${packages_build[@]}" "${packages_clang[@]}" "${packages_format[@]}" "${packages_lint[@]}"
  local failed=() compiler preset header python=(-DLADON_PYTHON=OFF) targets=(ladon ladon_cli)
  if prepare_python; then
    python=(-DLADON_PYTHON=ON -DPython_EXECUTABLE="$PWD/$python_environment/bin/python")
    targets+=(_ladon)
  fi

  say "format"
  check_format || failed+=("format (try ./dev format)")

  say "file lengths"
  tools/check_file_length.sh || failed+=("file lengths")

  say "includes"
  tools/check_includes.sh || failed+=("includes")

  say "parameters"
  tools/check_parameters.py || failed+=("parameters")

  say "results on a GPU"
  check_gpu_results

  if command -v shellcheck >/dev/null; then
    say "shell scripts"
    shellcheck --external-sources dev .ci/run bench/peers/*.sh tools/*.sh tools/emulate/*.sh || failed+=("shell scripts")
  fi

  for preset in dev clang; do
    compiler=g++
    [[ $preset == clang ]] && compiler=clang++-14
    say "headers alone: $compiler"
    for header in include/ladon/*.h; do
      [[ $header == */mpi.h || $header == */nccl.h ]] && continue  # their engines' tests compile them
      "$compiler" -std=c++20 -fsyntax-only -Wall -Wextra -Wpedantic -Werror -Iinclude \
        -include "ladon/$(basename "$header")" -x c++ /dev/null || failed+=("$header: $compiler")
    done
    configure "$preset" "build/$preset" -DCMAKE_CXX_COMPILER="$compiler" "${python[@]}"
    if build "build/$preset" "${targets[@]}"; then
      say "symbols of the kernels: $compiler"
      tools/check_isa_symbols.sh "build/$preset"/src/CMakeFiles/ladon.dir/cpu/isa/*.o ||
        failed+=("symbols of the kernels: $compiler")
    else
      failed+=("warnings: $compiler")
    fi
  done

  say "lint"
  tools/lint.sh build/clang "$(jobs)" ${everything:+--all} || failed+=("lint")

  if ((${#failed[@]})); then
    printf 'dev: failed: %s\n' "${failed[@]}" >&2
    return 1
  fi
  say "all checks passed"
}

# The C++ files, each ended by a zero byte.
list_sources() {
  find include src cli python tests bench examples -type f \
    \( -name '*.h' -o -name '*.cpp' -o -name '*.inl' -o -name '*.cu' -o -name '*.cuh' \) -print0
}

check_format() {
  list_sources | xargs -0 clang-format-14 --dry-run --Werror
}

command_format() {
  (($# == 0)) || bad_usage "format takes no arguments"
  need "${packages_format[@]}"
  list_sources | xargs -0 clang-format-14 -i
}

# What docs/gpu_results.md says was tested, and whether that is what is here.
check_gpu_results() {
  local results=docs/gpu_results.md recorded
  if [[ ! -f $results ]]; then
    say "no $results: src/cuda has not been tested on a GPU"
    return
  fi
  recorded=$(sed -nE 's/^\| src\/cuda \| ([0-9a-f]+) \|$/\1/p' "$results")
  if [[ $recorded != "$(tools/cuda_digest.sh)" ]]; then
    say "src/cuda has changed since $results (commit $(
      sed -nE 's/^\| commit \| (.*) \|$/\1/p' "$results")): run ./dev gpu where there is a GPU"
  fi
}
