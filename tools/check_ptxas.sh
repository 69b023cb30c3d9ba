#!/usr/bin/env bash
# Fails where the assembler serialised the tensor cores' products of a kernel (its remarks C75xx, which
# are not warnings), or spilled its registers. The build kept what it said (tools/keep_ptxas_log.sh).
# Usage: check_ptxas.sh OBJECT...
set -euo pipefail
logs=("${@/%/.ptxas}")
for log in "${logs[@]}"; do
  grep -q 'Compiling entry function' "$log" || { echo "check_ptxas: $log names no kernel" && exit 1; }
done
if grep -E '\(C75[0-9]+\)|[1-9][0-9]* bytes spill' "${logs[@]}"; then
  echo "check_ptxas: see above"
  exit 1
fi
echo "$# files, $(cat "${logs[@]}" | grep -c 'Compiling entry function') kernels: no product is serialised, no register spilled"
