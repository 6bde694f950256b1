#!/usr/bin/env bash
# Runs the rows of ci/matrix.json that this machine can run, each from a clean environment, and
# prints a table: ci/rows_here.sh [NAME...]
#
#   ARGS     handed to pytest
#   KEEP=1   leaves the environments (several GB each where pip finds no CPU build of torch)
#
# Without names: every enabled row. Logs and results stay in .venv-rows/NAME.log and .xml.
# Exits with 1 if a row failed or could not run.
set -uo pipefail
cd "$(dirname "$0")/.." || exit

host_python=${PYTHON:-python3}
row() { "$host_python" ci/matrix.py "$1" "$2"; }
line() { printf '%-22s %-7s %-14s %7s %7s %8s %8s  %s\n' "$@"; }

# The interpreter of a version: on PATH, or one that pyenv keeps.
find_python() {
    local found
    for found in "python$1" "$(pyenv root 2>/dev/null)/versions/$1".*/bin/python; do
        "$found" -c '' 2>/dev/null && printf '%s\n' "$found" && return
    done
    return 1
}

# passed, failed (errors are failures) and skipped, out of pytest's JUnit file.
counts() {
    "$host_python" - "$1" <<'PY'
import sys
import xml.etree.ElementTree as xml

suite = xml.parse(sys.argv[1]).getroot().find("testsuite").attrib
failed = int(suite["failures"]) + int(suite["errors"])
print(int(suite["tests"]) - failed - int(suite["skipped"]), failed, suite["skipped"])
PY
}

run_row() {
    local name=$1 python interpreter torch said="" passed=- failed=- skipped=- began=$SECONDS ok=0
    local rows=.venv-rows
    python=$(row "$name" python) && torch=$(row "$name" torch) || return 1
    rm -rf "${rows:?}/$name" "$rows/$name.xml"
    if ! interpreter=$(find_python "$python"); then
        line "$name" "$python" "$torch" - - - - "no python$python here"
        return 1
    fi
    PYTHON=$interpreter ARGS="${ARGS:-} --junitxml=$PWD/$rows/$name.xml" GRAPHRT_TORCH_BUILD=any \
        bash ci/run_row.sh "$name" >"$rows/$name.log" 2>&1 || ok=1
    if [ -f "$rows/$name.xml" ]; then
        read -r passed failed skipped < <(counts "$rows/$name.xml")
        torch=$("$rows/$name/bin/python" ci/facts.py torch | cut -d ' ' -f 1)
    fi
    [ "$ok" = 0 ] || said="see $rows/$name.log"
    line "$name" "$python" "$torch" "$passed" "$failed" "$skipped" \
        "$(((SECONDS - began) / 60)).$(((SECONDS - began) % 60 / 6))" "$said"
    [ -n "${KEEP:-}" ] || rm -rf "${rows:?}/$name"
    return "$ok"
}

if [ $# -eq 0 ]; then
    mapfile -t names < <("$host_python" ci/matrix.py --names)
    set -- "${names[@]}"
fi
mkdir -p .venv-rows
status=0
line row python torch passed failed skipped minutes ""
for name in "$@"; do
    run_row "$name" || status=1
done
exit "$status"
