#!/usr/bin/env bash
# Runs one row of ci/matrix.json on the machine it is meant for: ci/run_row.sh NAME
#
# PYTHON overrides the interpreter. Each row has an environment of its own.
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
GRAPHRT_TORCH=$(row torch)
export GRAPHRT_TORCH
export VENV=.venv/rows/$name ASCEND_VENV=.venv/rows/$name
target=$(row target)

make "${target:-test}"
