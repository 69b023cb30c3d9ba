#!/usr/bin/env python3
"""Installs PyTorch for CPUs, and transformers, from PyPI into a virtual environment.

torch_on_cpu.py PYTHON

PyPI's wheel of PyTorch for Linux is the one for GPUs: its libraries name CUDA's, and the packages that have those are 2 GB
more than PyTorch itself. On a machine without a GPU none of their functions runs. So this installs PyTorch without them
(about 540 MB to download, 1.2 GB on the disk) and compiles a stand-in for each missing library, in which every function
returns an error. CUDA's runtime, which PyTorch does ask whether there is a GPU, is the real one (3 MB).

What this leaves is PyTorch as it is on PyPI, whose results on CPUs are its own. It is for tests: a GPU is not found by it.
"""

import pathlib
import subprocess
import sys
import tempfile

TORCH = "torch==2.15.0"
TRANSFORMERS = "transformers==5.23.0"
# Of PyTorch's requirements those that are not for GPUs, and CUDA's runtime.
REQUIREMENTS = ["filelock", "typing-extensions", "setuptools>=77.0.3", "sympy", "networkx", "jinja2", "fsspec",
                "nvidia-cuda-runtime~=13.2.0"]  # fmt: skip
# Libraries whose symbols have no versions, by how their functions' names begin.
PREFIXES = {"libcusparseLt": "cusparseLt", "libnccl": "nccl", "libcufile": "cuFile"}


def output_of(*command):
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def needed_libraries(library):
    lines = output_of("readelf", "--wide", "--dynamic", str(library)).splitlines()
    return {line.split("[")[1].rstrip("]") for line in lines if "(NEEDED)" in line}


def undefined_symbols(library):
    """Pairs of a name and its version, which may be empty."""
    for line in output_of("nm", "--dynamic", "--undefined-only", str(library)).splitlines():
        name, _, version = line.split()[-1].partition("@")
        yield name, version.lstrip("@")


def belongs_to(symbol, version, library):
    stem = library.split(".so")[0]
    if version:
        return version == library or (version == "NVSHMEM" and stem == "libnvshmem_host")
    return stem in PREFIXES and symbol.startswith(PREFIXES[stem])


def write_stand_in(library, symbols, folder):
    """A library of functions that return an error: 999 is 'unknown' in most of CUDA's lists of errors."""
    source = "".join(f"int {name}(void) {{ return 999; }}\n" for name, _ in sorted(symbols))
    versions = "".join(f"{version} {{ global: *; }};\n" for version in sorted({version for _, version in symbols if version}))
    with tempfile.TemporaryDirectory() as scratch:
        code = pathlib.Path(scratch, "stand_in.c")
        script = pathlib.Path(scratch, "versions")
        code.write_text(source)
        script.write_text(versions)
        options = [f"-Wl,--version-script={script}"] if versions else []
        subprocess.run(["gcc", "-shared", "-fPIC", "-fno-builtin", "-w", f"-Wl,-soname,{library}", *options, str(code),
                        "-o", str(folder / library)], check=True)  # fmt: skip


def main():
    (python,) = sys.argv[1:]
    pip = [python, "-m", "pip", "install", "--disable-pip-version-check", "--quiet", "--retries", "2"]
    subprocess.run([*pip, "--no-deps", TORCH], check=True)
    subprocess.run([*pip, TRANSFORMERS, *REQUIREMENTS], check=True)
    site = pathlib.Path(output_of(python, "-c", "import sysconfig; print(sysconfig.get_path('platlib'))").strip())
    folder = site / "torch" / "lib"
    libraries = sorted(folder.glob("lib*.so"))
    own = {path.name for path in folder.iterdir()}
    system = {"libc", "libm", "libdl", "librt", "libpthread", "libgcc_s", "libstdc++", "ld-linux-x86-64", "libcudart", "libcuda"}
    missing = {name for library in libraries for name in needed_libraries(library)} - own
    symbols = {symbol for library in libraries for symbol in undefined_symbols(library)}
    for name in sorted(name for name in missing if name.split(".so")[0] not in system):
        write_stand_in(name, {symbol for symbol in symbols if belongs_to(*symbol, name)}, folder)
    version = output_of(python, "-c", "import torch; torch.ones(2) @ torch.ones(2); print(torch.__version__)").strip()
    print(f"PyTorch {version} is installed, for CPUs")


if __name__ == "__main__":
    main()
