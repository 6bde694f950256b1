"""Two engines side by side, one with graphrt: tokens, steps and captures."""

import os
import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.gpu.vllm_host.ranks.configurations import CONTESTANTS
from benchmarks.gpu.vllm_host.ranks.handle import Handle

ASKED = ((1, False), (3, False), (8, False), (37, False), (64, False), (96, True))
TIMED = (1, 8, 64)
TOKENS = 48
TURNS = 16


def started(result: dict[str, Any], engines: dict[str, Handle], until: float) -> None:
    """Wait until both have started."""
    for contestant, engine in engines.items():
        result[contestant] = engine.started(until - time.time())


def compare(result: dict[str, Any], engines: dict[str, Handle]) -> None:
    """The same prompts for both, one after the other: two that spin in collectives on the same
    GPUs wait for each other's share of time at each of them."""
    mine, theirs = engines["graphrt"], engines["vllm"]
    result["batches"] = {}
    for batch, mixed in ASKED:
        asked = {"do": "generate", "batch": batch, "seed": batch, "tokens": TOKENS, "mixed": mixed}
        before = counts(mine)
        tokens = mine.ask(60, **asked)["tokens"]
        steps = [a["steps"] - b["steps"] for a, b in zip(counts(mine), before, strict=True)]
        other = theirs.ask(60, **asked)["tokens"]
        found = told(tokens, other)
        if not found["equal"]:  # whether vLLM repeats its own
            found["vllm_again"] = told(theirs.ask(60, **asked)["tokens"], other)
        if batch == 37:
            found["same_again"] = mine.ask(60, **asked)["tokens"] == tokens
        result["batches"][f"{batch}{' mixed' * mixed}"] = {**found, "steps": steps}
    result["counts"] = {name: counts(engine) for name, engine in engines.items()}


def counts(engine: Handle) -> list[dict[str, Any]]:
    """What graphrt has captured and replayed, for each worker."""
    found: list[dict[str, Any]] = engine.ask(30, do="rpc", method="bench_counts", args=[])
    return found


def told(mine: list[list[int]], theirs: list[list[int]]) -> dict[str, Any]:
    """Whether tokens are equal, their share, and how many differ from one another."""
    pairs = [
        pair
        for one, other in zip(mine, theirs, strict=True)
        for pair in zip(one, other, strict=True)
    ]
    return {
        "equal": mine == theirs,
        "share_equal": round(sum(a == b for a, b in pairs) / len(pairs), 4),
        "distinct": len({token for request in mine for token in request}),
    }


def time_in_turns(result: dict[str, Any], engines: dict[str, Handle]) -> None:
    """Steps in turns, and replays of their graphs alone. The other engine is paused, and both run
    on the same cores. Two with unlike neighbours differed by 1.4 in either direction."""
    result["cores"] = {role: sorted(cores) for role, cores in pinned().items()}
    for engine in engines.values():
        if result["cores"]:
            engine.pin(pinned())
        engine.ask(30, do="rpc", method="bench_watch", args=[])
        engine.pause()
    result["timed"] = {}
    for batch in TIMED:
        medians: dict[str, list[float]] = {name: [] for name in CONTESTANTS}
        replays: dict[str, list[Any]] = {name: [] for name in CONTESTANTS}
        graphs: dict[str, Any] = {}
        for turn in range(TURNS):
            for name in CONTESTANTS if turn % 2 else CONTESTANTS[::-1]:
                engine = engines[name]
                engine.resume()
                got = engine.ask(60, do="generate", batch=batch, seed=batch, tokens=64)
                medians[name].append(got["step_us"])
                graphs[name] = engine.ask(30, do="rpc", method="bench_dispatched", args=[])[0]
                replays[name].append(engine.ask(30, do="rpc", method="bench_replay", args=[]))
                engine.pause()
        ratios = [a / b for a, b in zip(medians["graphrt"], medians["vllm"], strict=True)]
        result["timed"][str(batch)] = {
            **{name: round(statistics.median(values), 1) for name, values in medians.items()},
            "ratio": round(statistics.median(ratios), 3),
            "turns": medians,
            "graphs": graphs,
            "replay_us": {  # of the slower rank
                name: round(statistics.median(map(max, values)), 1)
                for name, values in replays.items()
            },
            "replays": replays,
        }
    result["kernels"] = {}
    for name, engine in engines.items():
        engine.resume()
        found = engine.ask(60, do="rpc", method="bench_kernels", args=[])
        result["kernels"][name] = found[0]
        engine.pause()
    for engine in engines.values():
        engine.resume()


def pinned() -> dict[str, set[int]]:
    """Cores for the workers of two ranks, and for all else; {} if there are too few."""
    cores: list[set[int]] = []
    for cpu in sorted(os.sched_getaffinity(0)):
        file = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/core_cpus_list")
        siblings = set(cpus_of(file.read_text())) if file.exists() else {cpu}
        if siblings not in cores:
            cores.append(siblings & os.sched_getaffinity(0))
    each = min(len(cores) // 3, 4)
    roles = ("", "TP0", "TP1")
    return {
        role: set().union(*cores[at * each : (at + 1) * each])
        for at, role in enumerate(roles)
        if each
    }


def cpus_of(text: str) -> list[int]:
    """The numbers of a list such as `0-3,8`."""
    found: list[int] = []
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return found


def capture_in_turns(result: dict[str, Any], engines: dict[str, Handle]) -> None:
    """Captures made again, in turns, and tokens once more."""
    captures: dict[str, list[Any]] = {name: [] for name in CONTESTANTS}
    result["captured_again"] = captures
    for name in ("vllm", "graphrt", "graphrt", "vllm"):
        captures[name].append(engines[name].ask(60, do="rpc", method="bench_recapture", args=[]))
    asked = {"do": "generate", "batch": 8, "seed": 8, "tokens": TOKENS}
    tokens = {name: engine.ask(60, **asked)["tokens"] for name, engine in engines.items()}
    result["equal_after"] = tokens["graphrt"] == tokens["vllm"]


LOADS = (((8, 24), (8, 24)), ((8, 24), (3, 24)), ((37, 24), (1, 1)), ((1, 1), (8, 24)))
"""For each rank of data parallel engines: requests and tokens of each. With one token a rank is
idle soon, and runs along."""


def compare_data_parallel(
    result: dict[str, Any], engines: dict[str, list[Handle]], until: float
) -> None:
    """The same for engines of two ranks with batches of their own."""
    for contestant, ranks in engines.items():
        result[contestant] = [engine.started(until - time.time()) for engine in ranks]
    result["loads"] = []
    for loads in LOADS:
        tokens: dict[str, list[Any]] = {}
        # vLLM's twice: a rank that begins a step later has other batches, which sum otherwise.
        for time_of, ranks in (*engines.items(), ("again", engines["vllm"])):
            for rank, (engine, (batch, most)) in enumerate(zip(ranks, loads, strict=True)):
                engine.send(do="generate", batch=batch, seed=10 * batch + rank, tokens=most)
            tokens[time_of] = [engine.reply(60)["tokens"] for engine in ranks]
        pairs = zip(tokens["graphrt"], tokens["vllm"], strict=True)
        own = zip(tokens["again"], tokens["vllm"], strict=True)
        result["loads"].append(
            {
                "loads": loads,
                "ranks": [told(*pair) for pair in pairs],
                "vllm_again": [told(*pair) for pair in own],
                "counts": [counts(engine) for engine in engines["graphrt"]],
            }
        )


def at_once(calls: list[Callable[[], None]]) -> None:
    """Run calls in threads, and wait for all."""
    threads = [threading.Thread(target=call, daemon=True) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
