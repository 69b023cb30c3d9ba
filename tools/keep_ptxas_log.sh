#!/usr/bin/env bash
# Runs nvcc, and keeps what it says on standard error next to the object: what -Xptxas=-v reports of every
# kernel goes to OBJECT.ptxas alone, warnings and errors are shown too. tools/check_ptxas.sh reads it.
# Usage: keep_ptxas_log.sh COMMAND... -o OBJECT ...
set -euo pipefail
object=''
for ((i = 1; i < $#; ++i)); do
  [[ ${!i} != -o ]] || { next=$((i + 1)) && object=${!next}; }
done
log=${object:?no -o OBJECT in the command}.ptxas
status=0
"$@" 2>"$log" || status=$?
grep -vE '^(ptxas info|nvlink info|    [0-9]+ bytes stack frame,)|^$' "$log" >&2 || true
exit "$status"
