"""Random schedules: two threads with runners of their own, on streams that they share.

    python -m tests.ascend.random_schedules [--count 300] [--first 0]

On the simulator, with the environment of `make test-ascend`. A number draws the schedule of the
device, the update order, the pools, and what each thread does: steps with new lengths, repeated
ones, updates that raise in one layer, interrupts, captures of another runner, a recapture. Every
output is compared with eager bit for bit. Nothing waits for the device before the end. Exits with
1 if an output is wrong, or a process hangs or dies.
"""

from __future__ import annotations

import argparse
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterable
from typing import Any

A_PROCESS = 50
"""Schedules that one process goes through: enough that torch_npu has handed out all its streams."""


def schedule_of(seed: int) -> str:
    """How the device picks its tasks: mostly at random, lazily or not."""
    kinds = ("random:{}", "random:{}", "lazy-random:{}", "lazy", "eager", "slow:{}")
    kind = random.Random(f"schedule {seed}").choice(kinds)
    return kind.format(seed % 8 if kind.startswith("slow") else seed)


class Worker(threading.Thread):
    """One thread: one or two runners, perhaps of one pool, and steps on streams of both threads."""

    def __init__(self, seed: str, streams: list[Any], start: threading.Barrier) -> None:
        from protocol import WAYS, Failing, runner

        from graphrt import GraphPool
        from graphrt.ascend import AscendOptions, AscendPlatform

        super().__init__(daemon=True)
        self.draw, self.streams, self.barrier = random.Random(seed), streams, start
        self.counts: Counter[str] = Counter()
        self.error: BaseException | None = None
        platform = AscendPlatform(AscendOptions(**self.draw.choice(WAYS)))
        pool = GraphPool(platform) if self.draw.random() < 0.5 else None
        self.models = [
            Failing(self.draw.randint(1, 4), seed=place)
            for place in range(self.draw.choice((1, 1, 2)))
        ]
        self.runs = [runner(model, platform=platform, pool=pool) for model in self.models]
        self.platform = platform
        # Per runner the steps that came to their end, and their outputs.
        self.done: list[list[Any]] = [[] for _ in self.runs]
        self.outputs: list[list[Any]] = [[] for _ in self.runs]

    def run(self) -> None:
        import torch

        try:
            torch.npu.set_device(0)
            with torch.npu.stream(self.draw.choice(self.streams)):
                for model, run in zip(self.models, self.runs, strict=True):
                    run.capture()
                    model.watch(run)
            self.barrier.wait(60)
            for _ in range(self.draw.randint(6, 14)):
                self.act(self.draw.randrange(len(self.models)))
        except BaseException as error:
            self.error = error

    def act(self, place: int) -> None:
        import torch
        from protocol import steps

        (step,) = steps(1, most=8, seed=self.draw.randrange(1 << 30))
        kind = self.draw.choices(
            ("step", "repeat", "raise", "interrupt", "capture", "recapture"), (10, 4, 3, 2, 1, 1)
        )[0]
        with torch.npu.stream(self.draw.choice(self.streams)):
            if kind in ("raise", "interrupt"):
                self.fail(place, step, interrupt=kind == "interrupt")
            elif kind == "capture":
                self.beside(step)
            elif kind == "recapture":
                self.runs[place].recapture()
                self.models[place].watch(self.runs[place])
                self.replay(place, step)
            else:
                self.replay(place, step, repeats=kind == "repeat")
        self.counts[kind] += 1

    def replay(self, place: int, step: Any, *, repeats: bool = False) -> None:
        from protocol import UNCHANGED, replayed

        if repeats and self.done[place] and self.done[place][-1] is not None:
            step = self.done[place][-1]
            self.outputs[place].append(replayed(self.runs[place], step, UNCHANGED))
        else:
            self.outputs[place].append(replayed(self.runs[place], step))
        self.done[place].append(step)
        self.counts["replays"] += 1

    def fail(self, place: int, step: Any, *, interrupt: bool) -> None:
        """A step whose update raises in one layer, and then the same step."""
        from protocol import Boom, replayed

        model = self.models[place]
        model.error = KeyboardInterrupt if interrupt else Boom
        model.layer = f"layers.{self.draw.randrange(model.layers)}"
        model.late = self.draw.random() < 0.5
        try:
            replayed(self.runs[place], step)
        except (Boom, KeyboardInterrupt):
            pass
        else:
            raise AssertionError("the update did not raise")
        finally:
            model.layer = None
        self.replay(place, step)

    def beside(self, step: Any) -> None:
        """Another runner, captured while updates of others are under way."""
        from protocol import Decoder, replayed, runner

        run = runner(Decoder(2, seed=7), sizes=(8,), platform=self.platform)
        run.capture()
        self.runs.append(run)
        self.done.append([step])
        self.outputs.append([replayed(run, step)])
        self.counts["replays"] += 1

    def wrong(self) -> list[str]:
        """The steps that differ from eager."""
        from protocol import differing, eager_outputs

        found = []
        for place, run in enumerate(self.runs):
            outputs = [out.cpu() for out in self.outputs[place]]
            differ = differing(outputs, eager_outputs(run, self.done[place]))
            found += [f"runner {place}, step {each}" for each in differ]
        return found


def one(seed: int, streams: list[Any]) -> tuple[list[str], Counter[str]]:
    """What went wrong under one schedule, and what was done."""
    import torch
    from schedules import scheduled

    with scheduled(schedule_of(seed)):
        start = threading.Barrier(2)
        workers = [Worker(f"{seed} {number}", streams, start) for number in range(2)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join(120)
        faults = [f"{seed}: {w.error!r}" for w in workers if w.error is not None]
        faults += [f"{seed}: a thread hangs" for w in workers if w.is_alive()]
        if not faults:
            torch.npu.synchronize()
            faults = [f"{seed}: {each}" for w in workers for each in w.wrong()]
            for worker in workers:
                for run in worker.runs:
                    run.close()
    return faults, workers[0].counts + workers[1].counts


def under(seeds: Iterable[int]) -> None:
    """Print a line for each schedule."""
    import torch

    streams = [torch.npu.Stream() for _ in range(4)]
    for seed in seeds:
        faults, counts = one(seed, streams)
        print(f"{seed} | {schedule_of(seed)} | {dict(counts)} | {faults or 'right'}", flush=True)


def main() -> int:
    """Run them; returns how many schedules were not right."""
    from tests.ascend.schedules import python

    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--first", type=int, default=0)
    options = parser.parse_args()
    import graphrt

    graphrt.get_platform("ascend-sim")
    begin, right = time.monotonic(), 0
    for first in range(options.first, options.first + options.count, A_PROCESS):
        seeds = range(first, min(first + A_PROCESS, options.first + options.count))
        code = f"import random_schedules; random_schedules.under({seeds!r})"
        try:
            said = python(code, timeout_s=60 * len(seeds), hang_ms=5000)
        except Exception as error:
            said = str(error)
            print(error)
        lines = [line for line in said.splitlines() if " | " in line]
        print("\n".join(lines), flush=True)
        right += sum(line.endswith("| right") for line in lines)
    print(f"{right} of {options.count} right, in {time.monotonic() - begin:.0f} s")
    return options.count - right


if __name__ == "__main__":
    sys.exit(min(main(), 1))
