#!/usr/bin/env bash
# A number of what src/cuda holds: docs/gpu_results.md says which was tested.
# Usage: cuda_digest.sh
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
find src/cuda -type f -print0 | LC_ALL=C sort -z | xargs -0 sha256sum | sha256sum | cut -c 1-16
