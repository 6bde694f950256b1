"""`one`, the process of a configuration: both engines compared and timed, or one alone."""

import fcntl
import itertools
import json
import os
import statistics
import time
import traceback
from pathlib import Path
from typing import Any

from benchmarks.gpu.vllm_host.configurations import BATCHES, TIMED, configurations
from benchmarks.gpu.vllm_host.engines import Engines
from benchmarks.gpu.vllm_host.watching import Replays, steps_stamped


def run_alone(name: str, work: Path, contestant: str) -> dict[str, Any]:
    """The first capture of an engine, and nothing else."""
    from graphrt.hosts.vllm import uninstall

    engines = Engines(configurations()[name], work)
    if contestant == "vllm":
        uninstall()
    return engines.start(contestant)


def run_one(name: str, work: Path, barrier: float) -> dict[str, Any]:
    options = configurations()[name]
    result: dict[str, Any] = {"name": name, "began": time.time(), "stage": "import"}

    def reached(stage: str) -> None:
        result["stage"] = stage
        print(f"[{time.time() - result['began']:6.1f} s] {name}: {stage}", flush=True)

    import torch
    import vllm

    from graphrt.hosts.vllm import _state, install, report, uninstall

    reached("imported")
    try:
        result["versions"] = [vllm.__version__, torch.__version__, torch.cuda.get_device_name()]
        engines = Engines(options, work)
        replays = Replays()
        result["graphrt"] = engines.start("graphrt")
        pools = _state.state.pools
        result["graphrt"]["own_captures"] = pools.captures
        reached("graphrt's engine is there")
        uninstall()
        result["vllm"] = engines.start("vllm")
        reached("vLLM's engine is there")
        assert pools.captures == result["graphrt"]["own_captures"], "uninstalled, yet it captures"

        result["batches"] = {}
        eager = _state.state.eager.counts
        result["eager"] = {}
        for batch in BATCHES:
            before, steps = replays.count, pools.steps
            eager.clear()
            mine = engines.generate("graphrt", batch, batch, 48)
            counted = {"replays": replays.count - before, "graphrt_steps": pools.steps - steps}
            for reason, count in eager.items():
                result["eager"][reason] = result["eager"].get(reason, 0) + count
            theirs = engines.generate("vllm", batch, batch, 48)
            again = engines.generate("graphrt", batch, batch, 48)
            result["batches"][batch] = {
                "equal": mine == theirs,
                "same_again": mine == again,
                "share_equal": share(mine, theirs),
                "distinct": len({token for request in mine for token in request}),
                **counted,
            }
        mine_report = report()
        print(mine_report, flush=True)
        result["report"] = mine_report.to_dict()
        reached("compared")
        (work / f"{name}.compared").touch()
        wait_for_others(work, barrier)
        replays.restore()
        with open(work / f"gpu{os.environ.get('CUDA_VISIBLE_DEVICES', '')}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            reached("timing")
            again: dict[str, list[Any]] = {"graphrt": [], "vllm": []}
            for _ in range(0 if options.get("off") else 3):
                again["vllm"].append(engines.recapture("vllm"))
                install()
                again["graphrt"].append(engines.recapture("graphrt"))
                uninstall()
            result["recaptured"] = again
            reached("captured again")
            tokens = [engines.generate(each, 8, 8, 48) for each in ("graphrt", "vllm")]
            result["equal_after"] = tokens[0] == tokens[1]
            result["timed"] = {batch: timed(engines, batch) for batch in TIMED}
        reached("done")
    except BaseException:
        result["error"] = traceback.format_exc()
        print(result["error"], flush=True)
    finally:
        (work / f"{name}.compared").touch()
    return result


def share(mine: list[list[int]], theirs: list[list[int]]) -> float:
    pairs = [
        pair
        for one, other in zip(mine, theirs, strict=True)
        for pair in zip(one, other, strict=True)
    ]
    return round(sum(a == b for a, b in pairs) / len(pairs), 4)


def wait_for_others(work: Path, seconds: float) -> None:
    """Until all have compared, so that no engine starts while another one is timed."""
    expected = json.loads((work / "plan.json").read_text())
    until = expected["began"] + seconds
    while time.time() < until:
        if all((work / f"{name}.compared").exists() for name in expected["names"]):
            return
        time.sleep(0.5)


def timed(engines: Engines, batch: int, rounds: int = 5, tokens: int = 64) -> dict[str, Any]:
    """Median time of a decode step, us: median over turns of one engine, then the other one."""
    medians: dict[str, list[float]] = {"graphrt": [], "vllm": []}
    with steps_stamped() as ends:
        for turn in range(rounds):
            order = ("graphrt", "vllm") if turn % 2 else ("vllm", "graphrt")
            for name in order:
                ends.clear()
                engines.generate(name, batch, batch, tokens)
                steps = [(b - a) / 1e3 for a, b in itertools.pairwise(ends)][4:-2]
                medians[name].append(statistics.median(steps))
    found = {name: round(statistics.median(values), 1) for name, values in medians.items()}
    ratios = [a / b for a, b in zip(medians["graphrt"], medians["vllm"], strict=True)]
    return {**found, "ratio": round(statistics.median(ratios), 3), "turns": medians}
