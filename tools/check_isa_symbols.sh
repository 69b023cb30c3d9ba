#!/usr/bin/env bash
# Fails when an object file that was compiled for a newer CPU could leak code into the rest of the
# program. Of each weak symbol (an inline function, a template's instance) the linker keeps any one
# copy: should it keep the AVX-512 one, older CPUs crash far away from the kernels. So the kernel
# objects may define one global symbol, their kernel table, and no weak one.
# Usage: check_isa_symbols.sh OBJECT...
set -euo pipefail

(($# > 0)) || { echo "usage: $0 OBJECT..." >&2; exit 2; }

failures=0
for object in "$@"; do
  [[ -f $object ]] || { echo "error: no such object file: $object" >&2; exit 2; }
  symbols=$(nm --defined-only --demangle "$object")
  globals=0
  # nm prints "address type name"; the name may hold spaces when demangled.
  while read -r _ type name; do
    case $type in
      # Weak function, weak object, unique global. DW.ref.* is only a pointer to the personality
      # routine of exceptions, not code.
      W | V | w | v | u)
        [[ $name == DW.ref.* ]] && continue
        echo "error: $object: weak symbol ($type): $name"
        failures=$((failures + 1))
        ;;
      [a-z]) ;;  # local
      *)
        globals=$((globals + 1))
        if [[ ${name,,} != *kernel* ]]; then
          echo "error: $object: global symbol ($type) that is not a kernel table: $name"
          failures=$((failures + 1))
        fi
        ;;
    esac
  done <<<"$symbols"
  if ((globals != 1)); then
    echo "error: $object: $globals global symbols, expected the kernel table alone"
    failures=$((failures + 1))
  fi
done
echo "$# objects, $failures faults"
((failures == 0))
