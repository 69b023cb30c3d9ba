#!/usr/bin/env bash
# Fails on an include that goes the wrong way, and on code above the Backend that touches the
# elements of a tensor by itself.
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
outside=(cli python examples)
internal='core|reference|cpu|cuda|attention|io|cache|layers|models|convert|parallel'

failures=0
complain() {
  echo "error: $1"
  failures=$((failures + 1))
}

# includes_of FOLDER: "file:line:folder" for every include of another folder's header.
includes_of() {
  grep -rnoE '^#include "[a-z_]+/' "$1" | sed -E 's/#include "([a-z_]+)\//\1/'
}

known=""
for entry in "${allowed[@]}"; do
  folder=${entry%%:*}
  known+=" $folder"
  while IFS=: read -r file line target; do
    case " $folder ladon ${entry#*:} " in
      *" $target "*) ;;
      *) complain "$file:$line includes $target/, which src/$folder may not" ;;
    esac
  done < <(includes_of "src/$folder")
done
for folder in src/*/; do
  name=$(basename "$folder")
  [[ " $known " == *" $name "* ]] || complain "src/$name is not in this script's list"
done
for folder in "${outside[@]}"; do
  while IFS=: read -r file line target; do
    [[ $target =~ ^($internal)$ ]] && complain "$file:$line includes $target/, which is internal"
  done < <(includes_of "$folder" || true)
done

# Layers, caches and attention() call operations; what runs elsewhere than on the host could not be
# read by a loop of theirs.
while IFS= read -r place; do
  complain "$place touches elements; use an operation of the Backend"
done < <(grep -rnE 'load_element|store_element|mem(cpy|set|move)\(|data_as<' \
  src/layers src/cache src/attention | cut -d: -f1,2 || true)

((failures == 0)) && echo "includes go one way; layers, caches and attention touch no elements"
((failures == 0))
