"""vLLM's own graphs against graphrt's, in one process each: the same tokens, and what a step costs.

    python -m benchmarks.gpu.vllm_host run --site SITE --work DIR [--only REGEX] [--out FILE]
    python -m benchmarks.gpu.vllm_host memory --site SITE --work DIR --only REGEX [--out FILE]
    python -m benchmarks.gpu.vllm_host tried --site SITE --work DIR [--defect none|baked|stale]
    python -m benchmarks.gpu.vllm_host serving --site SITE --work DIR [--only REGEX] [--out FILE]
    python -m benchmarks.gpu.vllm_host ranks --site SITE --work DIR [--only REGEX] [--out FILE]

SITE is a folder with vLLM and what it imports (left out: where Python finds them). Every
configuration is a process of its own, all at once, on the GPUs in turn; in it one engine has
graphrt's graphs and another one vLLM's own. Both generate greedily for the same prompts, then are
timed in turns, one process a GPU at a time. Weights are random normals, so that tokens depend on
attention. `memory` compares the first capture of one engine that has its process, and its GPU, to
itself, as what one engine has made is there for the next one. `ranks` is for two GPUs: tensor and
data parallel engines, and engines of which a worker is killed. `serving` captures
beside steps; with `--logprobs 5` all engines run on the same tokens, and what they say of them is
compared with the eager engine. `tried` puts defects into vLLM's model, which trials have to find.
"""

import argparse
import json
import logging
import sys
from pathlib import Path

from benchmarks.gpu.vllm_host.configurations import SERVING_STEPS
from benchmarks.gpu.vllm_host.memory import run_memory
from benchmarks.gpu.vllm_host.one import run_alone, run_one
from benchmarks.gpu.vllm_host.ranks.run import run_ranks
from benchmarks.gpu.vllm_host.run import run_all
from benchmarks.gpu.vllm_host.serving import Load, run_all_serving, run_serving
from benchmarks.gpu.vllm_host.tried import run_all_tried, run_tried


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python3 -m benchmarks.gpu.vllm_host", description=__doc__
    )
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("one")
    one.add_argument("name")
    one.add_argument("--alone", choices=["graphrt", "vllm"], help="start that engine alone")
    everything = commands.add_parser("run")
    memory = commands.add_parser("memory")
    ranks = commands.add_parser("ranks")
    ranks.add_argument("--at-once", action="store_true", help="start killed engines with the first")
    tried = commands.add_parser("tried")
    serving = commands.add_parser("serving")
    tried.add_argument("--defect", choices=["none", "baked", "stale"], help="this one alone")
    for command in (everything, memory, ranks, tried, serving):
        command.add_argument("--site", type=Path, help="a folder with vLLM")
        command.add_argument("--out", type=Path, help="a JSON file for all results")
        command.add_argument("--only", default="", help="regular expression on names")
        command.add_argument("--gpus", type=int, default=2)
    for command in (everything, ranks, tried, serving):
        command.add_argument("--seconds", type=float, default=270, help="stop what runs then")
    for command in (one, everything, memory, ranks, tried, serving):
        command.add_argument("--work", type=Path, required=True)
    for command in (one, everything, ranks):
        command.add_argument(
            "--barrier", type=float, default=190, help="time from then at the latest"
        )
    for command in (one, serving):
        command.add_argument("--steps", type=int, default=SERVING_STEPS, help="under load")
        command.add_argument(
            "--logprobs",
            type=int,
            default=0,
            help="compare that many a token with eager; not timed",
        )
    args = parser.parse_args()
    if args.command == "run":
        return run_all(args)
    if args.command == "tried":
        args.only = args.only if args.defect is None else f"{args.only}.*-{args.defect}$"
        return run_all_tried(args)
    if args.command == "serving":
        return run_all_serving(args)
    if args.command == "ranks":
        return run_ranks(args)
    if args.command == "memory":
        return run_memory(args)
    logging.basicConfig(level=logging.WARNING)
    args.work = args.work.resolve()
    if args.alone:
        result = run_alone(args.name, args.work, args.alone)
        (args.work / f"{args.name}.{args.alone}.result.json").write_text(json.dumps(result))
        return 0
    if "-tried-" in args.name:
        result = run_tried(args.name, args.work)
    elif "-serving-" in args.name:
        result = run_serving(args.name, args.work, Load(args.steps, args.logprobs))
    else:
        result = run_one(args.name, args.work, args.barrier)
    (args.work / f"{args.name}.result.json").write_text(json.dumps(result))
    return 1 if "error" in result else 0


if __name__ == "__main__":
    sys.exit(main())
