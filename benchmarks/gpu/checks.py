"""What watching warm-ups, trying graphs and checking steps costs, at each level of `check`.

    python3 -m benchmarks.gpu.checks [--older DIRECTORY] [--json FILE]

Capture: what benchmarks/gpu/capture.py times, with GRAPHRT_CHECK set, FULL and
FULL_AND_PIECEWISE. Steps: calls of a runner that hits a FULL graph, the device idle before each,
after everything was tried; and the first steps, which are the trials. Everything runs in processes
of its own, several times, all taking turns; figures are medians, ratios are within this run.

`--older` names the root of another tree, say of the commit before there were checks
(`git archive COMMIT | tar -x -C DIRECTORY`), which is then measured too, with its own benchmarks as
far as it has them.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.common import arguments, environment, finish, show
from benchmarks.gpu.capture import SIZES, in_process
from benchmarks.llama import CONFIGS

OWN = Path(__file__).resolve().parents[2]
STEPS = OWN / "benchmarks" / "gpu" / "checked_steps.py"
MODES = ("FULL_DECODE_ONLY", "FULL_AND_PIECEWISE")
LEVEL = "GRAPHRT_CHECK"
OLDER = "older"

Figures = dict[str, dict[str, float]]


def environment_of(tree: Path, level: str | None) -> dict[str, str]:
    """A process's, in which this tree is imported, and checked at this level by default."""
    found = {key: value for key, value in os.environ.items() if key != LEVEL}
    found["PYTHONPATH"] = str(tree)
    return found if level is None else {**found, LEVEL: level}


def captures(options: argparse.Namespace) -> dict[str, Figures]:
    """Seconds of capturing, by mode and contestant."""
    contestants: dict[str, tuple[Path, str | None]] = {
        level: (OWN, level) for level in ("off", "capture")
    }
    if options.older is not None:
        contestants[OLDER] = (options.older, None)
    asked = argparse.Namespace(**vars(options), breakdown=False, cold=False)
    runs: dict[str, dict[str, list[float]]] = {
        mode: {name: [] for name in contestants} for mode in MODES
    }
    for turn in range(options.repeats):
        for mode, of_mode in runs.items():
            for name, (tree, level) in contestants.items():
                done = in_process(mode, asked, tree=tree, env=environment_of(tree, level))
                if not all(done["equal_to_eager"].values()):
                    raise SystemExit(f"{mode}, {name}: {done['equal_to_eager']}")
                of_mode[name].append(done["seconds"])
                print(f"run {turn + 1}: {mode}, {name}: {done['seconds']:.3f} s", flush=True)
    return {
        mode: {
            name: {
                "seconds": statistics.median(seconds),
                "least": min(seconds),
                "most": max(seconds),
            }
            for name, seconds in of_mode.items()
        }
        for mode, of_mode in runs.items()
    }


def steps(options: argparse.Namespace) -> dict[str, Figures]:
    """The figures of `checked_steps.measure`, by model and contestant."""
    trees = {"": OWN} if options.older is None else {"": OWN, OLDER: options.older}
    found: dict[str, dict[str, list[dict[str, float]]]] = {}
    for turn in range(options.step_repeats):
        for own_name, tree in trees.items():
            for model, of_model in _measured(tree, options).items():
                for name, figures in of_model.items():
                    runs = found.setdefault(model, {})
                    # An older tree may have levels as well.
                    key = name if not own_name else _older(name)
                    runs.setdefault(key, []).append(figures)
            print(f"run {turn + 1}: steps{', ' * bool(own_name)}{own_name}", flush=True)
    return {
        model: {
            name: {kind: statistics.median(run[kind] for run in runs) for kind in runs[0]}
            for name, runs in of_model.items()
        }
        for model, of_model in found.items()
    }


def _older(name: str) -> str:
    return OLDER if name in ("no levels", "capture") else f"{OLDER}, {name}"


def _measured(tree: Path, options: argparse.Namespace) -> dict[str, Figures]:
    # As a file, so that what is imported is the tree's and not what lies beside us.
    command = [sys.executable, str(STEPS), "--device", options.device, "--model", options.model]
    env = environment_of(tree, None)
    done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=tree)
    if done.returncode:
        raise SystemExit(f"the steps of {tree.name} failed:\n{done.stdout}{done.stderr}")
    found: dict[str, Figures] = json.loads(done.stdout.splitlines()[-1])
    return found


def show_captures(found: dict[str, Figures]) -> None:
    """Add ratios, and print all of it as a table."""
    rows = []
    for mode, of_mode in found.items():
        off, older = of_mode["off"]["seconds"], of_mode.get(OLDER, {}).get("seconds")
        for name, figures in of_mode.items():
            figures["to_off"] = figures["seconds"] / off
            if older is not None:
                figures["to_older"] = figures["seconds"] / older
            span = f"{figures['least']:.3f} to {figures['most']:.3f}"
            ratios = [figures["to_off"], figures.get("to_older")]
            rows.append([f"{mode}, {name}", figures["seconds"], span, *ratios])
    show("Capture", ["", "s", "runs", "to off", "to older"], rows)


def show_steps(found: dict[str, Figures]) -> None:
    """Add what each costs above the others, and print all of it as tables."""
    for model, of_model in found.items():
        off, older = of_model["off"], of_model.get(OLDER)
        rows = []
        for name, figures in of_model.items():
            figures["above_off_us"] = figures["median_us"] - off["median_us"]
            figures["to_off"] = figures["median_us"] / off["median_us"]
            if older is not None:
                figures["above_older_us"] = figures["median_us"] - older["median_us"]
            kinds = ("median_us", "mean_us", "above_off_us", "to_off", "above_older_us")
            firsts = ("first_ms", "padded_ms", "capture_ms")
            lookups = ("dispatch_ns", "dispatch_and_clear_ns")
            rows.append([name, *map(figures.get, (*kinds, *firsts, *lookups))])
        columns = ["us a call", "mean", "above off", "to off", "above older"]
        columns += ["first ms", "padded ms", "capture ms", "dispatch ns", "+ clear ns"]
        show(f"Steps: {model}", ["", *columns], rows)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--model", choices=list(CONFIGS), default="1b")
    parser.add_argument("--sizes", nargs="+", type=int, default=SIZES)
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3, help="of the captures")
    parser.add_argument("--step-repeats", type=int, default=2)
    parser.add_argument("--older", type=Path, default=None, metavar="DIRECTORY")
    options = parser.parse_args()
    if options.older is not None:
        options.older = options.older.resolve()
        if not (options.older / "graphrt").is_dir():
            parser.error(f"--older: no graphrt/ in {options.older}")
    results: dict[str, Any] = {"steps": steps(options)}
    show_steps(results["steps"])
    results["capture"] = captures(options)
    show_captures(results["capture"])
    if options.older is not None:
        # Where it lay says nothing to those who read the results.
        options.older = options.older.name
    finish("checks", options, environment(options.device), results)


if __name__ == "__main__":
    main()
