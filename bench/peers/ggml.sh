#!/usr/bin/env bash
# Times Ladon's attention and that of ggml, llama.cpp's library: bench/peers/ggml.sh [FOLDER [ROUNDS]].
# FOLDER has ggml's sources (ggml/ of a checkout of llama.cpp). Without one they are taken from llama-cpp-python, on PyPI (77 MB).
# Both are built in build/ggml_release, as Release for this machine.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

folder=${1:-}
build=build/ggml
mkdir -p "$build"
if [[ -z $folder ]]; then
  folder=$build/source
  if [[ ! -f $folder/CMakeLists.txt ]]; then
    python3 -m pip download --quiet --no-deps --no-binary llama-cpp-python --dest "$build" llama-cpp-python
    mkdir -p "$folder"
    tar -xzf "$build"/llama_cpp_python-*.tar.gz -C "$folder" --strip-components=4 --wildcards '*/vendor/llama.cpp/ggml'
  fi
fi
cmake --preset release -B "${build}_release" --log-level=WARNING -DLADON_GGML="$(realpath "$folder")" -DLADON_TESTS=OFF \
  -DLADON_EXAMPLES=OFF -DLADON_CUDA=OFF -DLADON_PYTHON=OFF >/dev/null
cmake --build "${build}_release" --target ggml_table
"${build}_release/bench/ggml_table" "${@:2}"
