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

# What builds is pinned by hash, and no build fetches more.
tools_of() {
    "$1" -m venv "$2"
    "$2/bin/python" -m pip install --quiet --disable-pip-version-check \
        --require-hashes --requirement ci/locks/build.txt
}
tools_of "${pythons[0]}" "$work/tools"
tools=$work/tools/bin/python

rm -rf "$out"
"$tools" -m build -q --no-isolation --sdist --outdir "$out" .
tar -xzf "$out"/graphrt-*.tar.gz -C "$work"
source=$(echo "$work"/graphrt-*)
(cd "$source" && GRAPHRT_NATIVE=0 "$tools" -m build -q --no-isolation --wheel --outdir "$work/pure" .)
for python in "${pythons[@]}"; do
    rm -rf "$work/native-tools"
    tools_of "$python" "$work/native-tools"
    (cd "$source" && GRAPHRT_NATIVE=1 "$work/native-tools/bin/python" -m build -q --no-isolation \
        --wheel --outdir "$work/native" .)
done
mv "$work"/pure/*-py3-none-any.whl "$work"/native/*.whl "$out"
ls -l "$out"
