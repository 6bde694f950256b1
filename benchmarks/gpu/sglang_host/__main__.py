"""SGLang's engine with random weights, on a GPU without a network.

    python -m benchmarks.gpu.sglang_host run --site SITE --work DIR [--only REGEX] [--out FILE]

SITE is a folder with SGLang 0.5.17 and what it imports. Each configuration is an engine in
processes of its own, all at once on one GPU; each generates greedily for the same prompts. SITE
may lack packages that SGLang imports without a need: they are stood in for. A name of theirs
raises when it is used (`offline/sitecustomize.py`), and all names looked up are printed.
"""

import argparse
import sys
from pathlib import Path

from benchmarks.gpu.sglang_host.kernels import build
from benchmarks.gpu.sglang_host.one import run_one
from benchmarks.gpu.sglang_host.run import run_all


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python3 -m benchmarks.gpu.sglang_host", description=__doc__
    )
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("one")
    one.add_argument("name", help="a configuration, or `kernels`")
    everything = commands.add_parser("run")
    everything.add_argument("--site", type=Path, required=True, help="a folder with SGLang")
    everything.add_argument("--out", type=Path, help="a JSON file; logs are beside it")
    everything.add_argument("--only", default="", help="regular expression on names")
    everything.add_argument("--seconds", type=float, default=150, help="stop what runs then")
    everything.add_argument(
        "--in-turns", action="store_true", help="one engine at a time captures and makes steps"
    )
    everything.add_argument("--kernels", type=Path, help="a folder with some that are compiled")
    for command in (one, everything):
        command.add_argument("--work", type=Path, required=True)
    args = parser.parse_args()
    if args.command == "run":
        return run_all(args)
    if args.name == "kernels":
        return 1 if build() else 0
    return run_one(args.name, args.work.resolve())


if __name__ == "__main__":
    sys.exit(main())
