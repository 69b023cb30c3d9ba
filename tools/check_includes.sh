#!/usr/bin/env bash
# Fails on an include that goes the wrong way, and on code above the Backend that touches the
# elements of a tensor by itself. (What a search for words cannot find, the tests on the pretended
# device do: tests/support/pretended_device.h.)
# Usage: check_includes.sh; it looks at the checkout that it is in.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# Each folder of src, and what its files may include besides themselves and ladon/.
allowed=(
  "core:"
  "reference: core"
  "cpu: core reference"
  "cuda: core"
  "attention: core"
  "io: core"
  "cache: core io"
  "layers: core attention cache"
  "models: core io layers"
  "convert: core layers"
  "parallel: core attention cache io layers models"
)
# The command, the bindings and the examples stand on the installed headers; bench may look inside.
outside=(include cli python examples)
internal='core|reference|cpu|cuda|attention|io|cache|layers|models|convert|parallel'

failures=0
complain() {
  echo "error: $1"
  failures=$((failures + 1))
}

# includes_of FOLDER: "file:line:folder" for every include of another folder's header, in quotes or
# in angle brackets.
includes_of() {
  grep -rnoE '^[[:space:]]*#[[:space:]]*include[[:space:]]*["<][^">/]+/' "$1" |
    sed -E 's/:[^:"<]*["<]([^"<]+)\/$/:\1/'
}

known=""
for entry in "${allowed[@]}"; do
  folder=${entry%%:*}
  known+=" $folder"
  while IFS=: read -r file line target; do
    [[ $target =~ ^($internal)$ || $target == .* ]] || continue
    case " $folder ${entry#*:} " in
      *" $target "*) ;;
      *) complain "$file:$line includes $target/, which src/$folder may not" ;;
    esac
  done < <(includes_of "src/$folder")
done
for folder in src/*; do
  name=$(basename "$folder")
  [[ " $known backends.cpp CMakeLists.txt " == *" $name "* ]] ||
    complain "src/$name is not in this script's list"
done
for folder in "${outside[@]}"; do
  while IFS=: read -r file line target; do
    [[ $target =~ ^($internal)$ || $target == .* ]] || continue
    complain "$file:$line includes $target/, which is internal"
  done < <(includes_of "$folder" || true)
done

# Layers, caches and attention() call operations; what runs elsewhere than on the host could not be
# read by a loop of theirs. A pointer may be cast to bytes or to void, to count and to compare; a
# cache passes its scales on as what they are.
bytes='_cast<(const )?(std::byte|void)( const)? ?\*>'
casts='(static|reinterpret|bit)_cast<[^()]*\*[^()]*>|\((const )?[A-Za-z_][A-Za-z0-9_:<>]*( const)? ?\*+\)[A-Za-z_(&]'
calls='(load|store)_element|\bmem(cpy|set|move)\b|\bdata_as\b|_scales\['
scales='^src/cache/kv_storage\.cpp:[0-9]+:  view\.[kv]_scales = static_cast<const float\*>'
while IFS= read -r place; do
  complain "$place touches elements; use an operation of the Backend"
done < <(grep -rnE "_cast<|\*\)|$calls" src/layers src/cache src/attention |
  grep -vE "$scales" | sed -E "s/$bytes//g" | grep -E "$casts|$calls" | cut -d: -f1,2 || true)

((failures == 0)) && echo "includes go one way; layers, caches and attention touch no elements"
((failures == 0))
