#!/usr/bin/env bash
# Fails where the assembler serialises the tensor cores' products of a kernel (its remarks C75xx, which
# are not warnings), or spills its registers.
# Usage: check_ptxas.sh NVCC FILE.cu...
set -euo pipefail
nvcc=$1
shift
cd "$(dirname "${BASH_SOURCE[0]}")/.."
log=$(mktemp)
trap 'rm -f "$log"' EXIT
for file in "$@"; do
  "$nvcc" -std=c++20 -DNDEBUG --expt-relaxed-constexpr --extended-lambda --fmad=false -cubin -o /dev/null \
    -gencode arch=compute_90a,code=sm_90a -Xptxas=-v -Isrc -Iinclude "$file" >>"$log" 2>&1 ||
    { cat "$log" && exit 1; }
done
if grep -E '\(C75[0-9]+\)|[1-9][0-9]* bytes spill' "$log"; then
  echo "check_ptxas: see above"
  exit 1
fi
echo "$# files, $(grep -c 'Compiling entry function' "$log") kernels: no product is serialised, no register spilled"
