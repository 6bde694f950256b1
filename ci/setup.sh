#!/usr/bin/env bash
# Installs graphrt with one of its extras into a virtual environment:
#
#   ci/setup.sh demo|test|dev|ascend-sim
#
#   PYTHON         the interpreter to build on (python3)
#   VENV           where the environment goes (.venv)
#   GRAPHRT_TORCH  a torch version in place of the one in constraints.txt
#
# A torch that fits and that PYTHON has already is used as it is: then no network is needed, if
# the other packages are there too. Else a CPU machine gets the CPU build of torch, never the
# CUDA build, which is several GB.
set -euo pipefail
cd "$(dirname "$0")/.."

extra=${1:?usage: ci/setup.sh demo|test|dev|ascend-sim}
python=${PYTHON:-python3}
venv=${VENV:-.venv}

say() { printf 'setup: %s\n' "$*"; }
fail() { printf 'setup: %s\n' "$@" >&2; exit 1; }
in_venv() { "$venv/bin/python" "$@"; }
site_packages() { "$1" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }

# The version of the torch that an interpreter has, if graphrt can use it.
fitting_torch() {
    GRAPHRT_TORCH=${GRAPHRT_TORCH:-} "$1" - <<'PY'
import os, sys
from importlib.metadata import PackageNotFoundError, version

try:
    found = version("torch")
except PackageNotFoundError:
    sys.exit(1)
public, wanted = found.split("+")[0], os.environ["GRAPHRT_TORCH"]
fits = public == wanted if wanted else tuple(map(int, public.split(".")[:2])) >= (2, 11)
print(found)
sys.exit(not fits)
PY
}

has_accelerator() { nvidia-smi -L >/dev/null 2>&1 || npu-smi info >/dev/null 2>&1; }

make_venv() {
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
        fail "graphrt needs Python 3.10 or later; $python is $("$python" -V 2>&1)" \
            "try: make PYTHON=/path/to/a/later/python"
    local torch
    if torch=$(fitting_torch "$python"); then
        say "using the installed torch $torch"
        "$python" -m venv --system-site-packages "$venv"
        # Up to Python 3.11 a new environment has a setuptools of its own, too old to build with,
        # which would hide the installed one.
        in_venv -m pip uninstall --quiet --yes setuptools >/dev/null 2>&1
        # If PYTHON is itself of a virtual environment, the new one sees past it to its base.
        in_venv -c 'import torch' 2>/dev/null ||
            site_packages "$python" >"$(site_packages "$venv/bin/python")/base_environment.pth"
    else
        "$python" -m venv "$venv"
    fi
}

install_torch() {
    local version=${GRAPHRT_TORCH:-$(sed -n 's/^torch==//p' constraints.txt)}
    local requirement="torch==$version"
    if has_accelerator; then
        say "installing $requirement for this machine's accelerator"
    elif [ "$(uname -s)" = Linux ]; then
        # Only the local version tells the CPU build from the CUDA build of the same number.
        requirement="$requirement+cpu"
    fi
    in_venv -m pip install --quiet "$requirement" ||
        fail "no $requirement for $("$python" -V 2>&1) among what pip can reach" \
            "try: PIP_EXTRA_INDEX_URL or PIP_FIND_LINKS with a place that has CPU builds of torch," \
            "     or a PYTHON that has torch>=2.11 installed"
}

install_graphrt() {
    local packages=(--editable ".[$extra]")
    # The simulator is a distribution of its own, tested with graphrt's tests.
    [ "$extra" != ascend-sim ] ||
        packages=(--editable ".[test]" --editable packages/graphrt-ascend-sim)
    # torch is settled; what is left of the constraints is the tools.
    sed '/^torch==/d' constraints.txt >"$venv/constraints.txt"
    # First with what is there, so that a machine without a network needs none. Its failure only
    # says that something is missing; the second try reports what.
    in_venv -m pip install --quiet --no-index --no-build-isolation "${packages[@]}" \
        >/dev/null 2>&1 && return
    say "installing graphrt[$extra]"
    in_venv -m pip install --quiet --constraint "$venv/constraints.txt" "${packages[@]}" ||
        fail "graphrt[$extra] could not be installed; pip says why above"
}

export PIP_DISABLE_PIP_VERSION_CHECK=1
# Importing torch would import torch_npu, which cannot be without CANN or its simulator.
export TORCH_DEVICE_BACKEND_AUTOLOAD=0
[ -x "$venv/bin/python" ] || make_venv
fitting_torch "$venv/bin/python" >/dev/null || install_torch
install_graphrt
say "$extra is ready in $venv, with torch $(fitting_torch "$venv/bin/python")"
