#!/usr/bin/env bash
# Installs the CPU build of torch from GRAPHRT_TORCH_INDEX, and nothing else from there:
# ci/cpu_torch.sh [PYTHON]
#
# Given to pip beside its own index, that place could supply every package. Without it pip finds
# torch with the other packages.
set -euo pipefail
[ -z "${GRAPHRT_TORCH_INDEX:-}" ] ||
    "${1:-python}" -m pip install --no-deps --index-url "$GRAPHRT_TORCH_INDEX" torch
