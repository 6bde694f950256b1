#!/usr/bin/env bash
# Registers this machine as a runner, runs one job after the other, and takes itself off at the end.
#
#   REPOSITORY  https://github.com/OWNER/NAME
#   TOKEN       a registration token: Settings, Actions, Runners, New self-hosted runner
#   LABELS      "cuda" or "npu", as ci/matrix.json has it
#   RUNNER      the version of the runner (2.329.0)
set -euo pipefail
: "${REPOSITORY:?https://github.com/OWNER/NAME}" "${TOKEN:?a registration token}" "${LABELS:?cuda or npu}"
version=${RUNNER:-2.329.0}
case $(uname -m) in x86_64) machine=x64 ;; aarch64) machine=arm64 ;; *) echo "no runner for $(uname -m)" >&2; exit 1 ;; esac

mkdir -p "$HOME/actions-runner"
cd "$HOME/actions-runner"
if ! [ -x ./run.sh ]; then
    curl -fsSL "https://github.com/actions/runner/releases/download/v$version/actions-runner-linux-$machine-$version.tar.gz" | tar xz
fi
./config.sh --unattended --replace --url "$REPOSITORY" --token "$TOKEN" --labels "linux,$LABELS"
trap './config.sh remove --token "$TOKEN"' EXIT
./run.sh
