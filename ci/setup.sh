#!/usr/bin/env bash
# Installs graphrt with one of its extras into a virtual environment:
#
#   ci/setup.sh demo|test|dev|docs|ascend-sim
#
#   PYTHON               the interpreter to build on (python3)
#   VENV                 where the environment goes (.venv)
#   GRAPHRT_TORCH        a torch version in place of the one in constraints.txt
#   GRAPHRT_TORCH_INDEX  an index with CPU builds of torch; nothing else comes from it
#   GRAPHRT_TORCH_BUILD  "any": where pip finds no CPU build, the default build (several GB) will do
#
# A torch that fits and that PYTHON or the environment has already is used as it is and never
# replaced; no network is needed if the other packages are there too. Else a CPU machine gets the
# CPU build of torch. An environment that was made here for another interpreter or torch is made
# anew. What is there already is only looked at, which takes a fraction of a second.
set -euo pipefail
cd "$(dirname "$0")/.."

extra=${1:?usage: ci/setup.sh demo|test|dev|docs|ascend-sim}
python=${PYTHON:-python3}
venv=${VENV:-.venv}
wanted=${GRAPHRT_TORCH:-}
made_for=$venv/.made-for
installed=$venv/.installed-$extra
before=$venv.before

say() { printf 'setup: %s\n' "$*"; }
fail() { printf 'setup: %s\n' "$@" >&2; exit 1; }
facts() { "$1" ci/facts.py "${@:2}"; }
torch_of() { facts "$1" torch ${wanted:+"$wanted"}; }
in_venv() { "$venv/bin/python" "$@"; }
pip() { in_venv -m pip --no-input "$@"; }
site_packages() { "$1" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }
has_accelerator() { nvidia-smi -L >/dev/null 2>&1 || npu-smi info >/dev/null 2>&1; }

# Runs a command behind one line; its output is shown only if it fails.
step() {
    local what=$1 began=$SECONDS
    shift
    printf 'setup: %s ... ' "$what"
    if "$@" >"$log" 2>&1; then
        printf 'done%s\n' "$(took "$began")"
    else
        printf 'failed%s\n' "$(took "$began")"
        cat "$log" >&2
        return 1
    fi
}
took() {
    local seconds=$((SECONDS - $1))
    [ "$seconds" -lt 2 ] || printf ' in %d s' "$seconds"
}

# Two lines: the interpreter, and the torch that an environment for it uses.
describe_target() {
    local torch found=0
    printf 'Python %s\n' "$(facts "$python" python)"
    torch=$(torch_of "$python") || found=$?
    case $found in
    0) printf 'the torch of that Python, %s\n' "$torch" ;;
    3 | 4) printf 'torch %s of its own\n' "$own_torch" ;;
    *) fail "ci/facts.py failed under $python" ;;
    esac
}

is_this_venv() { [ "$("$1" -c 'import os, sys; print(os.path.realpath(sys.prefix))')" = "$(cd "$venv" && pwd -P)" ]; }

use_or_make_venv() {
    if ! [ -d "$venv" ]; then
        make_venv
    elif [ -x "$venv/bin/python" ] && is_this_venv "$python"; then
        : # It is active: there is no other interpreter to compare it with.
    elif [ -f "$made_for" ]; then
        [ "$(cat "$made_for")" = "$target" ] && [ -x "$venv/bin/python" ] && return
        say "$venv was made for another Python or torch and is made anew; it was for"
        sed 's/^/setup:   /' "$made_for"
        rm -rf "$before"
        mv "$venv" "$before"
        make_venv
    elif [ -x "$venv/bin/python" ] && [ "$(in_venv -V)" = "$("$python" -V)" ]; then
        printf '%s\n' "$target" >"$made_for"
    else
        fail "$venv has no mark of ci/setup.sh and is not an environment of $("$python" -V)" \
            "try: rm -r $venv, or another place: VENV=... (make test VENV=.venv-other)"
    fi
}

make_venv() {
    local unfit
    case $target in
    *"the torch of that Python"*)
        say "using the installed torch, $(torch_of "$python")"
        step "making $venv on $("$python" -V)" \
            "$python" -m venv --system-site-packages "$venv" || fail "no environment in $venv"
        # Up to Python 3.11 a new environment has a setuptools of its own, too old to build with,
        # which would hide the installed one.
        pip uninstall --yes setuptools >/dev/null 2>&1
        # If PYTHON is itself of a virtual environment, the new one sees past it to its base.
        facts "$venv/bin/python" torch >/dev/null ||
            site_packages "$python" >"$(site_packages "$venv/bin/python")/base_environment.pth"
        ;;
    *)
        unfit=$(torch_of "$python") || [ -z "$unfit" ] ||
            say "torch ${unfit%% *} of $python is not ${wanted:-2.11 or later}: it is left alone"
        step "making $venv on $("$python" -V)" "$python" -m venv "$venv" ||
            fail "no environment in $venv"
        ;;
    esac
    printf '%s\n' "$target" >"$made_for"
}

install_torch() {
    local requirement="torch==$own_torch" from=()
    # With its dependencies torch would bring other packages of that index.
    [ -z "${GRAPHRT_TORCH_INDEX:-}" ] || from=(--no-deps --index-url "$GRAPHRT_TORCH_INDEX")
    if [ "$(uname -s)" = Linux ] && ! has_accelerator; then
        # Only the local version tells the CPU build from the CUDA build of the same number.
        step "installing $requirement+cpu" pip install ${from[@]+"${from[@]}"} "$requirement+cpu" && return
        [ "${GRAPHRT_TORCH_BUILD:-cpu}" = any ] || fail \
            "no $requirement+cpu for $("$python" -V) among what pip can reach" \
            "try: GRAPHRT_TORCH_INDEX or PIP_FIND_LINKS with a place that has CPU builds of torch," \
            "     a PYTHON that has torch>=2.11 installed, or, several GB, GRAPHRT_TORCH_BUILD=any"
    fi
    step "installing $requirement" pip install "$requirement" ||
        fail "no $requirement for $("$python" -V) among what pip can reach"
}

# Sets `torch` to what is in the environment, which from here on stays as it is.
settle_torch() {
    local found=0
    torch=$(torch_of "$venv/bin/python") || found=$?
    if [ "$found" = 3 ]; then
        install_torch
        found=0
        torch=$(torch_of "$venv/bin/python") || found=$?
    fi
    [ "$found" = 0 ] || fail \
        "$venv has torch ${torch:-nowhere}, and not ${wanted:-2.11 or later}; it is not replaced" \
        "try: rm -r $venv, or another place: VENV=... (make test VENV=.venv-other)"
}

# What the mark of a finished installation holds: another torch, checkout or list of needs differs.
state() {
    printf '%s\n' "$torch" "$(pwd -P)"
    local needs=(pyproject.toml constraints.txt ci/setup.sh ci/facts.py) each
    for each in packages/*/pyproject.toml; do
        [ ! -e "$each" ] || needs+=("$each")
    done
    cat "${needs[@]}" | cksum
}

install_graphrt() {
    local version=${torch%% *} follows packages=(--editable ".[$extra]")
    # The simulator is a distribution of its own, tested with graphrt's tests.
    [ "$extra" != ascend-sim ] ||
        packages=(--editable ".[test]" --editable packages/graphrt-ascend-sim)
    facts "$venv/bin/python" constraints constraints.txt >"$venv/constraints.txt" 2>"$log" ||
        fail "torch $version: $(tail -n 1 "$log")"
    grep '^torch==' "$venv/constraints.txt" >"$venv/torch-stays.txt"
    # First with what is there, of whatever version, so that a machine without a network needs
    # none. Its failure only says that something is missing; the second try reports what.
    printf 'setup: looking for what graphrt[%s] needs ... ' "$extra"
    if PIP_FIND_LINKS='' pip install --no-index --no-build-isolation \
        --constraint "$venv/torch-stays.txt" "${packages[@]}" >"$log" 2>&1; then
        echo 'all is there'
        return
    fi
    echo 'not all is there'
    follows=$(sed -n 's/^# follows torch: //p' "$venv/constraints.txt")
    [ -z "$follows" ] || say "torch $version asks for $follows, not for what constraints.txt pins"
    step "installing graphrt[$extra] beside torch $version" \
        pip install --constraint "$venv/constraints.txt" "${packages[@]}" ||
        fail "$(sed -n 's/^ERROR: //p' "$log" | head -n 1)" \
            "graphrt[$extra] could not be installed beside torch $version, which stays as it is" \
            "try: PIP_INDEX_URL or PIP_FIND_LINKS with a place that has what is missing (above)," \
            "     or another torch: VENV=.venv-other GRAPHRT_TORCH=..."
}

check_torch() {
    local now imported
    now=$(facts "$venv/bin/python" torch) || now=none
    [ "$now" = "$torch" ] || fail "installing graphrt[$extra] changed the torch of $venv" \
        "  from $torch" "  to   $now" "try: rm -r $venv and the same again; please report it"
    imported=$(in_venv -c 'import torch; print(torch.__version__)' 2>"$log") ||
        fail "torch ${torch%% *} cannot be imported: $(tail -n 1 "$log")"
    [ "$imported" = "${torch%% *}" ] ||
        fail "import torch gives $imported in $venv, not the ${torch%% *} that is installed there"
}

# An environment that could not be made anew is not lost.
clean_up() {
    local status=$?
    rm -f "$log"
    if [ "$status" = 0 ]; then
        rm -rf "$before"
    elif [ -d "$before" ]; then
        rm -rf "$venv"
        mv "$before" "$venv"
        say "$venv is again what it was"
    fi
}

"$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
    fail "graphrt needs Python 3.10 or later; $python is $("$python" -V 2>&1)" \
        "try: make PYTHON=/path/to/a/later/python"
export PIP_DISABLE_PIP_VERSION_CHECK=1
# Importing torch would import torch_npu, which cannot be without CANN or its simulator.
export TORCH_DEVICE_BACKEND_AUTOLOAD=0
log=$(mktemp)
trap clean_up EXIT

own_torch=${wanted:-$(sed -n 's/^torch==//p' constraints.txt)}
target=$(describe_target)
use_or_make_venv
settle_torch
if ! [ -f "$installed" ] || [ "$(cat "$installed")" != "$(state)" ]; then
    rm -f "$installed"
    install_graphrt
    check_torch
    state >"$installed"
fi
say "$extra is ready in $venv: $(in_venv -V), torch ${torch%% *}"
