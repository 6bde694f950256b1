#!/usr/bin/env bash
# What a release is made of, from a checkout, and tried: ci/wheels.sh [OUT]
#
#   OUT      where it all goes (dist)
#   PYTHONS  interpreters that get a wheel with the C part ("python3")
#
# An sdist, from which everything else is built: so it has to be whole. A wheel with the C part for
# each interpreter, and one without for all others ("py3-none-any"). On GitHub cibuildwheel builds
# those with the C part (pyproject.toml), inside manylinux; here they are for this machine.
set -euo pipefail
cd "$(dirname "$0")/.."

out=${1:-dist}
read -r -a pythons <<<"${PYTHONS:-python3}"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

"${pythons[0]}" -m venv "$work/tools"
tools=$work/tools/bin/python
"$tools" -m pip install --quiet --disable-pip-version-check build twine 'setuptools>=77'

rm -rf "$out"
"$tools" -m build -q --sdist --outdir "$out" .
tar -xzf "$out"/graphrt-*.tar.gz -C "$work"
source=$(echo "$work"/graphrt-*)
(cd "$source" && GRAPHRT_NATIVE=0 "$tools" -m build -q --wheel --outdir "$work/pure" .)
for python in "${pythons[@]}"; do
    GRAPHRT_NATIVE=1 "$python" -m pip wheel --quiet --disable-pip-version-check --no-deps \
        --wheel-dir "$work/native" "$source"
done
mv "$work"/pure/*-py3-none-any.whl "$work"/native/*.whl "$out"
"$tools" -m twine check --strict "$out"/*
ls -l "$out"
