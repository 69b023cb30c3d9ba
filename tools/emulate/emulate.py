#!/usr/bin/env python3
"""Runs a static x86-64 Linux program on an emulated processor, which need not be this machine's.

usage: emulate.py [options] PROGRAM [arguments...]

Bochs emulates a PC whose ROM is the kernel of tools/emulate/kernel. The program, its arguments and
environment are on the PC's disk. What the program writes comes out here, and its exit code is this
script's. There is one process, with threads that take turns; no signals; files can be read where
--file names them.
"""

import argparse
import os
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time

SECTOR_BYTES = 512
HEADS, SECTORS_PER_TRACK = 16, 63
CYLINDER_BYTES = HEADS * SECTORS_PER_TRACK * SECTOR_BYTES

# Per second of the emulated processor's own time; the kernel tells the time by it.
INSTRUCTIONS_PER_SECOND = 100_000_000

# What the program sees of the environment here.
PASSED_ON = ("LADON_", "GTEST_")

CONFIGURATION = """\
config_interface: textconfig
display_library: nogui
cpu: model={cpu}, count=1, ips={speed}, reset_on_triple_fault=0
memory: guest={memory}, host={memory}, block_size=512
romimage: file="{kernel}"
vgaromimage: file="{nothing}"
ata0: enabled=1, ioaddr1=0x1f0, ioaddr2=0x3f0, irq=14
ata0-master: type=disk, path="{disk}", mode=flat, cylinders={cylinders}, heads={heads}, spt={sectors}
port_e9_hack: enabled=1
clock: sync=none
log: "{log}"
panic: action=fatal
error: action=report
info: action=ignore
debug: action=ignore
"""


def build_disk(program, arguments, environment, files, ram_bytes):
    """The disk's bytes: struct Disk of kernel/program.c, and what it points to."""
    parts = []
    used = SECTOR_BYTES  # the header's

    def add(data):
        nonlocal used
        offset = used
        padding = -len(data) % 16
        parts.append(data + bytes(padding))
        used += len(data) + padding
        return offset

    strings = b"".join(os.fsencode(text) + b"\0" for text in arguments + environment)
    strings_offset = add(strings)
    entries = []
    for name in files:
        with open(name, "rb") as file:
            data = file.read()
        entries.append(struct.pack("<3Q", add(os.fsencode(name) + b"\0"), add(data), len(data)))
    files_offset = add(b"".join(entries))
    with open(program, "rb") as file:
        program_offset = add(file.read())
    used_bytes = used + -used % SECTOR_BYTES
    header = struct.pack("<8s8Q", b"emulate1", ram_bytes, used_bytes, program_offset, len(arguments),
                         len(environment), strings_offset, len(entries), files_offset)
    disk = header.ljust(SECTOR_BYTES, b"\0") + b"".join(parts)
    return disk + bytes(-len(disk) % CYLINDER_BYTES)


def relay(stream):
    """Copies the program's output from Bochs's. The exit code and the instruction count, or None."""
    mark = 0x10  # before it stands what is Bochs's own; kernel/processor.c writes it
    targets = {ord("1"): sys.stdout.buffer, ord("2"): sys.stderr.buffer}
    target = None
    while True:
        data = stream.read1(65536)
        if not data:
            return None
        while True:
            text, found, data = data.partition(bytes([mark]))
            if target is not None and text:
                target.write(text)
                target.flush()
            if not found:
                break
            if not data:
                data = stream.read1(65536)
            kind, data = data[:1], data[1:]
            if kind == bytes([mark]):
                target.write(kind)
            elif kind == b"x":
                code, _, count = (data + stream.readline()).decode().partition(" ")
                return int(code), int(count.split()[0])
            else:
                target = targets.get(kind[0] if kind else 0, target)


def main():
    here = os.path.dirname(os.path.abspath(__file__))
    build = os.path.join(here, "..", "..", "build", "emulator")
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--cpu", default="sapphire_rapids", help="a processor that Bochs knows")
    parser.add_argument("--memory", type=int, default=1024, help="RAM of the machine in MiB, at most 2048")
    parser.add_argument("--bochs", default=os.path.join(build, "bochs"), help="Bochs, with AMX")
    parser.add_argument("--kernel", default=os.path.join(build, "kernel.rom"))
    parser.add_argument("--file", action="append", default=[], help="a file that can be read there")
    parser.add_argument("--statistics", action="store_true", help="tell the speed on standard error")
    parser.add_argument("program")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    if not 64 <= options.memory <= 2048:  # Bochs's limit
        parser.error("--memory takes 64 to 2048")
    for needed in (options.bochs, options.kernel, options.program, *options.file):
        if not os.path.isfile(needed):
            sys.exit(f"emulate.py: no file {needed}")

    environment = [f"{name}={value}" for name, value in sorted(os.environ.items())
                   if name.startswith(PASSED_ON)]
    disk = build_disk(options.program, [options.program, *options.arguments], environment,
                      options.file, options.memory << 20)
    folder = tempfile.mkdtemp(prefix="emulate.")
    try:
        disk_path = os.path.join(folder, "disk")
        log_path = os.path.join(folder, "log")
        with open(disk_path, "wb") as file:
            file.write(disk)
        nothing_path = os.path.join(folder, "nothing")  # Bochs insists on a ROM for the screen
        with open(nothing_path, "wb") as file:
            file.write(bytes(SECTOR_BYTES))
        configuration_path = os.path.join(folder, "configuration")
        with open(configuration_path, "w", encoding="utf-8") as file:
            file.write(CONFIGURATION.format(
                cpu=options.cpu, speed=INSTRUCTIONS_PER_SECOND, memory=options.memory,
                kernel=os.path.abspath(options.kernel), disk=disk_path,
                cylinders=len(disk) // CYLINDER_BYTES, heads=HEADS, sectors=SECTORS_PER_TRACK,
                nothing=nothing_path, log=log_path))
        start = time.monotonic()
        errors_path = os.path.join(folder, "errors")
        with open(errors_path, "wb") as errors, subprocess.Popen(
                [options.bochs, "-q", "-f", configuration_path], stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE, stderr=errors) as bochs:
            try:
                result = relay(bochs.stdout)
            finally:
                bochs.kill()
        seconds = time.monotonic() - start
        if result is None:
            for path in filter(os.path.exists, (errors_path, log_path)):
                with open(path, encoding="utf-8", errors="replace") as file:
                    sys.stderr.writelines(file.readlines()[-20:])
            print("emulate.py: Bochs ended before the program did; its last words are above",
                  file=sys.stderr)
            return 125
        code, instructions = result
        if options.statistics:
            print(f"emulate.py: {instructions / 1e6:.1f} million instructions in {seconds:.2f} s, "
                  f"{instructions / 1e6 / seconds:.1f} million a second", file=sys.stderr)
        return code
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    # An end from outside must take Bochs along.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    sys.exit(main())
