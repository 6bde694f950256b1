#!/usr/bin/env bash
# Runs one row of ci/matrix.json on the machine it is meant for: ci/run_row.sh NAME
#
# PYTHON overrides the interpreter, which must have the row's version. ARGS goes to pytest. Each
# row has an environment of its own, .venv-rows/NAME, with the C part unless GRAPHRT_NATIVE=0.
set -euo pipefail
cd "$(dirname "$0")/.."

name=${1:?usage: ci/run_row.sh NAME (python3 ci/matrix.py --table lists them)}
host_python=${PYTHON:-python3}
row() { "$host_python" ci/matrix.py "$name" "$1"; }

enabled=$(row enabled)
if [ "$enabled" != true ]; then
    echo "row $name is not enabled: $(row reason)" >&2
    exit 1
fi
python=$(row python)
PYTHON=${PYTHON:-${python:+python$python}}
export PYTHON=${PYTHON:-python3}
version=$("$PYTHON" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
if [ -n "$python" ] && [ "$version" != "$python" ]; then
    echo "row $name is for Python $python; $PYTHON is Python $version" >&2
    exit 1
fi
# ci/setup.sh fails if it cannot provide this torch, tests/conftest.py if it is not the one in use.
GRAPHRT_TORCH=$(row torch)
export GRAPHRT_TORCH
# Without its C part the row would test Python's way alone, and pass.
export GRAPHRT_NATIVE=${GRAPHRT_NATIVE:-1}
export VENV=.venv-rows/$name ASCEND_VENV=.venv-rows/$name
# Empty: the simulator's default.
GRAPHRT_SIM_CANN=$(row cann)
export GRAPHRT_SIM_CANN
target=$(row target)

make "${target:-test}"
