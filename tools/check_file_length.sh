#!/usr/bin/env bash
# Fails on a source file longer than 400 lines: it wants splitting.
# Usage: check_file_length.sh; it looks at the checkout that it is in.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

limit=400
# Data tables, by path: exempt.
exempt=()

list_files() {
  local patterns=('*.h' '*.cpp' '*.inl' '*.cu' '*.cuh' '*.py' '*.sh' '*.js' '*.c' '*.S' '*.cmake' '*CMakeLists.txt' dev)
  # New files that are not added yet count too. Without git (a tarball), look at the tree itself.
  if ! git ls-files --cached --others --exclude-standard -- "${patterns[@]}" 2>/dev/null; then
    find . \( -name build -o -name install -o -name '.?*' \) -prune -o -type f \
      \( -name '*.h' -o -name '*.cpp' -o -name '*.inl' -o -name '*.cu' -o -name '*.cuh' \
      -o -name '*.py' -o -name '*.sh' -o -name '*.js' -o -name '*.c' -o -name '*.S' -o -name '*.cmake' -o -name CMakeLists.txt \
      -o -path ./dev \) -printf '%P\n'
  fi
}

files=$(list_files)
failures=0
count=0
while IFS= read -r file; do
  [[ -f $file ]] || continue  # deleted, not committed yet
  [[ " ${exempt[*]} " == *" $file "* ]] && continue
  count=$((count + 1))
  lines=$(wc -l <"$file")
  if ((lines > limit)); then
    echo "error: $file: $lines lines, at most $limit are allowed"
    failures=$((failures + 1))
  fi
done <<<"$files"

((count > 0)) || { echo "error: no source files found"; exit 1; }
echo "$count files, $failures too long"
((failures == 0))
