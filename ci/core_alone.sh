#!/usr/bin/env bash
# Runs tests/core in a copy of this tree without graphrt/trust, with the C part in use:
#
#   ci/core_alone.sh PYTHON [arguments of pytest]
#
# Left out are tests marked `trust`, and the files that import graphrt.compile, which uses
# graphrt.trust. Runners have `check="off"`: GRAPHRT_CHECK goes before the level that a test asks for.
set -euo pipefail
cd "$(dirname "$0")/.."

python=$(command -v "${1:?usage: ci/core_alone.sh PYTHON [arguments of pytest]}")
python=$(realpath --no-symlinks "$python")
copy=$(mktemp -d)
trap 'rm -rf "$copy"' EXIT

git ls-files -z --cached --others --exclude-standard -- graphrt native tests docs \
    setup.py pyproject.toml README.md LICENSE ci | xargs -0 cp --parents --target-directory "$copy" --
rm -r "$copy/graphrt/trust"
# The modules of an editable install are found even where the copy lacks them.
cat >"$copy/sitecustomize.py" <<'PYTHON'
import sys

sys.meta_path[:] = [each for each in sys.meta_path if "editable" not in repr(each)]
PYTHON

cd "$copy"
export PYTHONPATH=$copy GRAPHRT_CHECK=off GRAPHRT_NATIVE=1
"$python" setup.py --quiet build_ext --inplace
"$python" -c 'import graphrt, importlib.util
assert importlib.util.find_spec("graphrt.trust") is None, graphrt.__path__'
left_out=()
for file in advice_followed odd_arguments options; do
    echo "core_alone: tests/core/test_$file.py imports graphrt.compile, and is left out"
    left_out+=(--ignore "tests/core/test_$file.py")
done
OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} "$python" -m pytest tests/core -q \
    -m "not trust and not long" "${left_out[@]}" "${@:2}"
