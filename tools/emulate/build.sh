#!/usr/bin/env bash
# Builds what emulate.py needs: Bochs, an emulator of PCs, from its source; and the kernel in its ROM.
# Usage: build.sh DIRECTORY [JOBS]. Does nothing where all is there already.
#
# From source, because the Bochs of Debian 12 is too old to know tiles (AMX), and the library
# bochscpu-python from PyPI is compiled without them.
set -euo pipefail
[[ $# -ge 1 ]] || { echo "usage: build.sh DIRECTORY [JOBS]" >&2; exit 2; }
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
mkdir -p "$1"
directory=$(cd "$1" && pwd)
jobs=${2:-1}

die() { printf 'build.sh: %s\n' "$*" >&2; exit 1; }

version=3.0
# From Debian's archive, wherever this machine gets its packages from.
archive_site() {
  # shellcheck disable=SC2016  # apt expands it
  apt-get indextargets --format '$(SITE)' 'Created-By: Packages' | grep -m 1 '/debian/*$' ||
    die "apt names no archive of Debian's (LADON_BOCHS_URL may name the source of Bochs $version)"
}
source_sha256=78f6c73d4a6472d5130a87ab9dc306d02c7c71ed8e25b3a8ef642e2a7acd282b

build_bochs() {
  local tree=$directory/bochs-$version archive=$directory/bochs-$version.tar.xz
  if ! echo "$source_sha256  $archive" | sha256sum --check --status 2>/dev/null; then
    local source_url=${LADON_BOCHS_URL:-}
    [[ -n $source_url ]] || source_url=$(archive_site)/pool/main/b/bochs/bochs_3.0+dfsg.orig.tar.xz
    python3 -c 'import sys, urllib.request; urllib.request.urlretrieve(*sys.argv[1:])' \
      "$source_url" "$archive" || die "cannot fetch $source_url (LADON_BOCHS_URL names another place)"
    echo "$source_sha256  $archive" | sha256sum --check --status ||
      die "$archive is not the file that was expected: its SHA-256 differs"
  fi
  rm -rf "$tree"
  tar -xf "$archive" -C "$directory"
  cd "$tree"
  # Bochs 3.0 errs where it saves tiles, so that threads would spoil each other's: 8 rows of the 16,
  # rows and bytes of a row swapped in the configuration, used tiles called unused. And it takes
  # signed bytes for unsigned ones in products, does not know STTILECFG by its right code, and takes
  # no number of the first source when it rounds two vectors to bf16.
  # selftest.c looks at all of this.
  sed -i -e 's/row < BX_TILE_REGISTERS/row < BX_TILE_MAX_ROWS/' \
    -e '/vmm16u(8+n)/s/[.]rows;/.bytes_per_row;/' -e '/vmmubyte(48+n) =/s/[.]bytes_per_row;/.rows;/' \
    -e '/tile_use_tracker == 0/s/==/!=/' cpu/xsave.cc
  sed -i -e 's/Bit32s(\([xy]byte\[[0-3]\]\))/Bit32s(Bit8s(\1))/g' cpu/avx/amx.cc
  sed -i -e '/BX_IA_STTILECFG/s/VEX_W1/VEX_W0/' cpu/decoder/fetchdecode_opmap_avx.cc
  sed -i -e 's/bfloat16(op1.vmm32u(n));/bfloat16(op1.vmm32u(n - DWORD_ELEMENTS(len)));/' cpu/avx/avx512_bf16.cc
  # No screen, no debugger: the processor and a disk are all that is used.
  if ! { ./configure CXXFLAGS=-O2 --with-nogui --disable-plugins --disable-debugger \
    --disable-debugger-gui --disable-docbook --enable-cpu-level=6 --enable-x86-64 --enable-avx \
    --enable-evex --enable-amx --enable-long-phy-address --enable-all-optimizations &&
    make -j "$jobs" bochs; } >"$directory/bochs.log" 2>&1; then
    tail -n 5 "$directory/bochs.log" >&2
    die "Bochs does not build; see $directory/bochs.log"
  fi
  cd "$here"
  cp "$tree/bochs" "$directory/bochs.new"
  mv "$directory/bochs.new" "$directory/bochs"
  rm -rf "$tree"
}

build_kernel() {
  # General registers only: system calls then leave the program's vectors and tiles alone.
  gcc -std=c11 -O2 -Wall -Wextra -Werror -ffreestanding -fno-stack-protector -fPIE -mno-red-zone \
    -mgeneral-regs-only -fno-asynchronous-unwind-tables -fcf-protection=none \
    -fno-tree-loop-distribute-patterns -nostdlib -static -Wl,-T,"$here/kernel/kernel.ld" \
    -Wl,--build-id=none -Wl,--no-warn-rwx-segments -o "$directory/kernel.elf" \
    "$here"/kernel/boot.S "$here"/kernel/*.c
  objcopy -O binary -j .rom "$directory/kernel.elf" "$directory/kernel.rom"
}

build_selftest() {
  gcc -O2 -Wall -Wextra -Werror -static -mavx512f -mavx512bf16 -mamx-tile -mamx-bf16 -mamx-int8 \
    -o "$directory/selftest" "$here/selftest.c"
}

# This script says how Bochs is built: a newer one builds it anew.
[[ $directory/bochs -nt $here/build.sh ]] || build_bochs
build_kernel
build_selftest
