#!/usr/bin/env bash
# Runs clang-tidy on the host code (not on the kernels: they are slow to analyse and all intrinsics).
# A file that passed is skipped until it, a header or .clang-tidy changes.
# Usage: lint.sh BUILD_DIRECTORY JOBS [--all]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

build=$1
jobs=$2
stamps=$build/lint
[[ ${3:-} == --all ]] && rm -rf "$stamps"
mkdir -p "$stamps"

folders=(src cli bench examples)
# The Python package is linted where it is part of the build.
grep -q '/python/src/' "$build/compile_commands.json" && folders+=(python)

newest_input=$(find .clang-tidy include src cli bench python \( -name '*.h' -o -name '*.inl' -o -name .clang-tidy \) \
  -printf '%T@ %p\n' | sort -n | tail -n 1 | cut -d ' ' -f 2-)

sources=$(find "${folders[@]}" -name '*.cpp' -not -path '*/isa/*' -not -path '*/ceilings/*' | sort)
files=()
while IFS= read -r file; do
  # What is not built here, for want of a library, cannot be analysed.
  grep -qF "/$file\"" "$build/compile_commands.json" || continue
  stamp=$stamps/${file//\//_}
  if [[ ! $stamp -nt $file || ! $stamp -nt $newest_input ]]; then files+=("$file"); fi
done <<<"$sources"

echo "${#files[@]} files to lint"
((${#files[@]})) || exit 0

# shellcheck disable=SC2016  # expanded by the inner shell
printf '%s\n' "${files[@]}" | xargs -P "$jobs" -I '{}' bash -c '
  output=$(clang-tidy-14 --quiet --warnings-as-errors="*" -p "$1" "$3" 2>/dev/null) || {
    printf "%s\n%s\n" "--- $3" "$output"
    exit 1
  }
  touch "$2/${3//\//_}"
' lint "$build" "$stamps" '{}'
