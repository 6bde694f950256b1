"""A worker that is killed: how long the others live, and what the log names."""

import re
import time
from pathlib import Path
from typing import Any

from benchmarks.gpu.vllm_host.ranks.handle import EngineFailed, Handle

LIMIT_S = 30.0
NAMING = re.compile(
    r"graphrt: rank|died unexpectedly|EngineDeadError|SIGTERM|SIGKILL|[Ww]atchdog"
    r"|Connection (reset|closed)"
)


def kill(result: dict[str, Any], engine: Handle, point: str, work: Path, until: float) -> None:
    """Have rank 1 killed at `point`, and wait until nothing is left of the engine."""
    stamp = work / f"{engine.name}.died"
    stamp.unlink(missing_ok=True)
    result["started"] = engine.started(until - time.time())["start_s"]
    if point == "replay":  # the first batch of its size, so that all is loaded
        engine.ask(60, do="generate", batch=4, seed=1, tokens=4)
    result["processes"] = engine.left()
    engine.ask(30, do="rpc", method="bench_die", args=[1, point, str(stamp)])
    generate = {"do": "generate", "batch": 4, "seed": 2, "tokens": 40}
    if point in ("exchange", "capture"):
        engine.send(do="rpc", method="bench_recapture", args=[])
    elif point == "replay":
        engine.send(**generate)
    died = wait_for(stamp, 20)
    while engine.workers() and time.time() - died < LIMIT_S:
        time.sleep(0.05)
    result["workers_ended_s"] = round(time.time() - died, 2)
    result["workers_left"] = engine.workers()
    asked = time.time()
    if point == "between":
        engine.send(**generate)
    try:
        engine.reply(LIMIT_S)
        result["told"] = "a reply, though a worker is dead"
    except EngineFailed as error:
        result["told"] = str(error)[-300:]
    while engine.left() and time.time() - asked < LIMIT_S:
        time.sleep(0.05)
    result["all_ended_s"] = round(time.time() - died, 2)
    result["left"] = engine.left()
    result["log"] = [line[:300] for line in engine.lines() if NAMING.search(line)][:20]
    result["in_time"] = not result["workers_left"] and not result["left"]


def wait_for(stamp: Path, seconds: float) -> float:
    """The time that a worker wrote before it was killed."""
    until = time.time() + seconds
    while time.time() < until:
        if stamp.exists() and (text := stamp.read_text()):
            return float(text)
        time.sleep(0.02)
    raise EngineFailed(f"no worker was killed in {seconds:.0f} s: {stamp.name}")
