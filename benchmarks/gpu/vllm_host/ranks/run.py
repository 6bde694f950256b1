"""`ranks`: all engines of two GPUs, what they found, and a table.

1. All pairs of engines for tensor parallel 2 with FULL graphs start at once; with `--at-once` those
   of killed workers too.
2. Then, one pair after the other, tokens are compared, and steps timed and captures made again in
   turns; all other engines are paused.
3. Then workers are killed, and data parallel engines compared.
4. Then the pairs with PIECEWISE graphs alone.
"""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.gpu.vllm_host.processes import ROOT
from benchmarks.gpu.vllm_host.ranks import configurations as known
from benchmarks.gpu.vllm_host.ranks.compared import (
    TIMED,
    at_once,
    capture_in_turns,
    compare,
    compare_data_parallel,
    started,
    time_in_turns,
)
from benchmarks.gpu.vllm_host.ranks.handle import Handle
from benchmarks.gpu.vllm_host.ranks.killed import kill

PEERS = """
import json, torch
from vllm.distributed.device_communicators.all_reduce_utils import can_actually_p2p

if __name__ == "__main__":
    told = [torch.cuda.can_device_access_peer(0, 1), torch.cuda.can_device_access_peer(1, 0)]
    print("found " + json.dumps({
        "devices": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "torch": torch.__version__,
        "nccl": torch.cuda.nccl.version(),
        "driver_says_peer": told,
        "peer": all(told) and all(can_actually_p2p([0, 1], [1, 0])),
    }))
"""
"""What links the GPUs: as the driver says, and as vLLM finds by copies between two processes."""


class Run:
    """The engines of one run, and what is known of them."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.began = time.time()
        self.work: Path = args.work.resolve()
        known.prepare(self.work)
        paths = [str(ROOT), str(self.work / "installed"), *([str(args.site)] if args.site else [])]
        self.path = os.pathsep.join([*paths, os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
        self.results: dict[str, dict[str, Any]] = {}
        self.handles: list[Handle] = []
        self.port = 29700
        self._doomed: dict[str, dict[str, Handle]] | None = None
        self.has_peers = False

    def left_s(self) -> float:
        return float(self.args.seconds) - (time.time() - self.began)

    def asked(self, names: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
        asked = {name: each for name, each in names.items() if re.search(self.args.only, name)}
        for name, options in list(asked.items()):
            if options["reduce"] == "custom" and not self.has_peers:
                self.results[name] = {"error": "left out: the GPUs do not reach each other"}
                del asked[name]
        return asked

    def start(self, name: str, options: dict[str, Any], contestant: str, **more: str) -> Handle:
        full = f"{name}.{contestant}{more.get('VLLM_DP_RANK', '')}"
        environment = known.environment(options, contestant, self.work, self.path, full) | more
        handle = Handle(full, known.engine_options(options, self.work), self.work, environment)
        self.handles.append(handle)
        return handle

    def noting(self, name: str, call: Callable[..., None], *args: Any) -> Callable[[], None]:
        """`call` with the result of that name before its arguments; what it raises is noted."""
        result = self.results.setdefault(name, {})

        def noted() -> None:
            began = time.time()
            try:
                call(result, *args)
            except Exception:
                result["error"] = traceback.format_exc()[-3000:]
            took = round(time.time() - began, 1)
            result.setdefault("took_s", []).append([call.__name__, took])
            said = "failed" if "error" in result else "done"
            self.say(f"{name}: {call.__name__} {said} in {took} s")
            self.save()

        return noted

    def say(self, text: str) -> None:
        print(f"[{time.time() - self.began:5.0f} s] {text}", flush=True)

    def save(self) -> None:
        if self.args.out:
            self.args.out.parent.mkdir(parents=True, exist_ok=True)
            self.args.out.write_text(json.dumps(self.results, indent=1, default=str))

    def tensor_parallel(self, mode: str) -> None:
        """All pairs of one mode of vLLM's."""
        configurations = {
            name: options
            for name, options in self.asked(known.compared()).items()
            if options["compilation"]["cudagraph_mode"] == mode
        }
        if self.left_s() < 60:
            self.say(f"no time left for {mode}")
            return
        pairs = {
            name: {each: self.start(name, options, each) for each in known.CONTESTANTS}
            for name, options in configurations.items()
        }
        everything = list(pairs.items())
        if self.args.at_once and self._doomed is None:
            everything += self.doomed().items()
        until = min(time.time() + self.args.barrier, self.began + self.args.seconds)
        at_once([self.noting(name, started, pair, until) for name, pair in everything])
        for _, pair in everything:
            for engine in pair.values():
                engine.pause()
        for name, pair in pairs.items():
            for engine in pair.values():
                engine.resume()
            is_timed = configurations[name].get("timed", True)
            for call in (compare, time_in_turns, capture_in_turns) if is_timed else (compare,):
                if self.left_s() < 20:
                    self.results[name].setdefault("error", f"no time left for {call.__name__}")
                elif "error" not in self.results[name]:
                    self.noting(name, call, pair)()
            for engine in pair.values():
                engine.stop()

    def doomed(self) -> dict[str, dict[str, Handle]]:
        """The engines of which a worker is killed; they are started by the first call."""
        if self._doomed is None:
            self._doomed = {
                name: {each: self.start(name, options, each) for each in known.CONTESTANTS}
                for name, options in self.asked(known.killed()).items()
            }
        return self._doomed

    def killed_and_data_parallel(self) -> None:
        if self.left_s() < (14 if self.args.at_once else 60):
            self.say("no time left for killed workers and data parallel")
            return
        doomed = self.doomed()
        pairs = {}
        for name, options in self.asked(known.data_parallel()).items():
            pairs[name] = {
                each: self._data_parallel(name, options, each) for each in known.CONTESTANTS
            }
        until = self.began + self.args.seconds
        # Pairs one after the other: what spins on a GPU slows another one's end.
        for name, pair in doomed.items():
            point = known.killed()[name]["point"]
            for engine in pair.values():
                engine.resume()
            at_once(
                [
                    self.noting(f"{name}.{each}", kill, engine, point, self.work, until)
                    for each, engine in pair.items()
                ]
            )
            for engine in pair.values():
                engine.stop()
        for name, ranks in pairs.items():
            self.noting(name, compare_data_parallel, ranks, until)()

    def _data_parallel(self, name: str, options: dict[str, Any], each: str) -> list[Handle]:
        self.port += 20
        more = {
            "VLLM_DP_SIZE": "2",
            "VLLM_DP_MASTER_IP": "127.0.0.1",
            "VLLM_DP_MASTER_PORT": str(self.port),
        }
        return [
            self.start(
                name, options, each, VLLM_DP_RANK=str(rank), VLLM_DP_RANK_LOCAL=str(rank), **more
            )
            for rank in range(2)
        ]

    def machine(self) -> None:
        """What links the GPUs; custom all-reduce is left out where the driver says that they cannot
        reach each other. vLLM's check, by copies between two processes, goes on beside."""
        links = told(["nvidia-smi", "topo", "-p2p", "r"])
        rows = [line.split() for line in links.splitlines()]
        self.has_peers = any(row[:1] == ["GPU0"] and row[2:3] == ["OK"] for row in rows)
        self.results["machine"] = {
            "links": links,
            "topology": told(["nvidia-smi", "topo", "-m"]),
            "shared_memory": told(["df", "-h", "/dev/shm"]),
            "copies": None,
        }
        self.say(json.dumps(self.results["machine"], indent=1).replace("\\n", "\n"))
        threading.Thread(target=self._copies, daemon=True).start()

    def _copies(self) -> None:
        file = self.work / "peers.py"
        file.write_text(PEERS)
        environment = {**os.environ, **known.MULTICAST_OFF, "PYTHONPATH": self.path}
        said = told([sys.executable, str(file)], environment)
        found = [line for line in said.splitlines() if line.startswith("found ")]
        copies = json.loads(found[0].removeprefix("found ")) if found else {"error": said[-2000:]}
        self.results["machine"]["copies"] = copies
        self.say(f"vLLM's check of copies: {copies}")


def told(command: list[str], environment: dict[str, str] | None = None) -> str:
    """What a command prints, within 200 s."""
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, check=False, timeout=200
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return done.stdout + done.stderr


def run_ranks(args: argparse.Namespace) -> int:
    run = Run(args)
    signal.signal(signal.SIGALRM, _end)
    signal.alarm(int(args.seconds))
    try:
        run.machine()
        run.tensor_parallel("FULL_AND_PIECEWISE")
        run.killed_and_data_parallel()
        run.tensor_parallel("PIECEWISE")
    except TimeIsUp as error:
        run.say(str(error))
    finally:
        signal.alarm(0)
        for handle in run.handles:
            handle.stop()
        for handle in run.handles:
            name = handle.name
            result = run.results.get(name.rpartition(".")[0], run.results.get(name, {}))
            lines = [line for line in handle.lines() if "all-reduce backends" in line]
            result.setdefault("backends", {})[name] = lines[0][-260:] if lines else None
        run.save()
        print(table(run.results))
        for name, result in run.results.items():
            if "error" in result:
                print(f"== {name}: {result['error'][-1500:]}")
                for handle in run.handles:
                    if handle.name.startswith(name):
                        for line in [line for line in handle.lines() if "rror" in line][-8:]:
                            print(f"   {handle.name} ? {line[:300]}")
    return 0


class TimeIsUp(BaseException):
    """The seconds of the run are over. Not an `Exception`: no configuration notes it as its own."""


def _end(number: int, frame: Any) -> None:
    raise TimeIsUp("the time of the run is over; here is what was found until then")


def table(results: dict[str, Any]) -> str:
    """What was found, as rows."""
    rows = ["| configuration | equal at | steps g | captures g | capture s g v | MiB g v | "]
    rows[0] += " | ".join(f"step us (replay) B={batch} g v ratio" for batch in TIMED) + " | eager |"
    for name, result in results.items():
        if "batches" in result:
            equal = ",".join(
                batch if got["equal"] else f"{batch}:{got['share_equal']}"
                for batch, got in result["batches"].items()
            )
            again = result.get("captured_again", {})
            seconds = [min((c[0]["seconds"] for c in again[e]), default=None) for e in again]
            mib = [again[e][-1][0]["reserved_mib"] for e in again if again[e]]
            counts = result.get("counts", {}).get("graphrt", [{}, {}])
            row = [
                name,
                equal,
                [c.get("steps") for c in counts],
                [c.get("captures") for c in counts],
            ]
            row += [seconds, mib]
            for batch in TIMED:
                got = result.get("timed", {}).get(str(batch))
                if got:
                    us = [f"{got[e]} ({got['replay_us'][e]})" for e in known.CONTESTANTS]
                    row.append(f"{us[0]} {us[1]} {got['ratio']}")
                else:
                    row.append("-")
            row.append([sum(c.get("eager", {}).values()) for c in counts])
            rows.append("| " + " | ".join(map(str, row)) + " |")
            for batch, got in result.get("timed", {}).items():
                rows.append(f"|    B={batch}: {got['graphs']}, turns {got['turns']} |")
        elif "workers_ended_s" in result:
            rows.append(
                f"| {name} | workers ended {result['workers_ended_s']} s, all "
                f"{result.get('all_ended_s')} s, in time {result.get('in_time')} |"
            )
            log = sorted(result.get("log", []), key=lambda line: "graphrt: rank" not in line)
            rows += [f"|    {line[:200]}" for line in log[:4]]
        elif "loads" in result:
            for load in result["loads"]:
                shares = [rank["share_equal"] for rank in load["ranks"]]
                steps = [[c["steps"] for c in rank] for rank in load["counts"]]
                rows.append(
                    f"| {name} | loads {load['loads']}: share equal {shares}, steps {steps} |"
                )
    return "\n".join(rows)
