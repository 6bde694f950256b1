#!/usr/bin/env bash
# Registers this machine as a runner for one job, and ends after it: a job finds nothing of another.
#
#   REPOSITORY  https://github.com/OWNER/NAME
#   TOKEN       a registration token: Settings, Actions, Runners, New self-hosted runner
#   LABELS      "cuda" or "npu", as ci/matrix.json has it
set -euo pipefail
: "${REPOSITORY:?https://github.com/OWNER/NAME}" "${TOKEN:?a registration token}" "${LABELS:?cuda or npu}"
version=2.329.0
case $(uname -m) in
x86_64) machine=x64 hash=194f1e1e4bd02f80b7e9633fc546084d8d4e19f3928a324d512ea53430102e1d ;;
aarch64) machine=arm64 hash=56768348b3d643a6a29d4ad71e9bdae0dc0ef1eb01afe0f7a8ee097b039bfaaf ;;
*) echo "no runner for $(uname -m)" >&2; exit 1 ;;
esac

mkdir -p "$HOME/actions-runner"
cd "$HOME/actions-runner"
if ! [ -x ./run.sh ]; then
    archive=actions-runner-linux-$machine-$version.tar.gz
    curl -fsSLO "https://github.com/actions/runner/releases/download/v$version/$archive"
    echo "$hash  $archive" | sha256sum --check --quiet
    tar xzf "$archive"
fi
./config.sh --unattended --ephemeral --replace --url "$REPOSITORY" --token "$TOKEN" --labels "linux,$LABELS"
# After its job the runner is taken off by GitHub, and has no settings any more.
trap '[ ! -e .runner ] || ./config.sh remove --token "$TOKEN"' EXIT
./run.sh
