"""Threads step runners of one pool while another thread has their graphs appear and go.

Every output is compared with what the forward gives eagerly, bit for bit. Each thread
retries `PoolBusyError`, as a host does; any other error is a finding.
"""

from __future__ import annotations

import random
import sys
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from graphrt import GraphOptions, GraphPool, GraphRunner, InputSpec, eager_break
from graphrt.errors import PoolBusyError

WIDTH = 8
SIZES = [1, 2, 4, 8]
MOST = 10
"""Tokens of the largest step: more than any graph has, so some steps run eagerly."""
SHOWN = 10
"""Findings that a report keeps."""

KINDS = {
    "lazy": {"mode": "FULL", "options": GraphOptions(lazy=True)},
    "full": {"mode": "FULL"},
    "pieces": {"mode": "FULL_AND_PIECEWISE"},
    "clone": {"mode": "FULL", "options": GraphOptions(lazy=True, outputs="clone")},
}
"""Arguments of the runners, in the order they are taken."""


@eager_break
def between(hidden: Tensor) -> Tensor:
    """An eager part."""
    return hidden + 1


class Model(nn.Module):
    """Rows by rows, so that padding changes no bit. Each runner has weights of its own."""

    def __init__(self, seed: int, device: str, *, breaks: bool) -> None:
        super().__init__()
        numbers = torch.Generator().manual_seed(seed)
        self.register_buffer("weight", torch.randn(WIDTH, generator=numbers).to(device))
        self.breaks = breaks

    def forward(self, x: Tensor) -> Tensor:
        """[tokens, WIDTH] of the same."""
        hidden = torch.tanh(x * self.weight)
        if self.breaks:
            hidden = between(hidden)
        return hidden * 2 + x.roll(1, 1)


@dataclass
class Found:
    """What a run came to."""

    steps: int = 0
    busy: int = 0
    seconds: float = 0.0
    done: Counter[str] = field(default_factory=Counter)
    wrong: Counter[str] = field(default_factory=Counter)
    lines: list[str] = field(default_factory=list)

    def add(self, kind: str, line: str) -> None:
        """Count a finding, and keep the first lines."""
        self.wrong[kind] += 1
        if len(self.lines) < SHOWN:
            self.lines.append(f"{kind}: {line}")

    def __str__(self) -> str:
        told = ", ".join(f"{name} {count}" for name, count in sorted(self.done.items()))
        wrong = ", ".join(f"{name} {count}" for name, count in sorted(self.wrong.items()))
        head = f"{self.steps} steps, {self.busy} busy, {self.seconds:.1f} s; beside: {told}"
        return "\n".join([head, f"wrong: {wrong or 'none'}", *self.lines])


class Load:
    """Runners of one pool, and what may be done to them."""

    def __init__(self, kinds: list[str], device: str) -> None:
        self.device = device
        self.pool = GraphPool(device)
        self.found = Found()
        self.models: list[Model] = []
        self.runners: list[GraphRunner] = []
        for seed, kind in enumerate(kinds):
            model = Model(seed, device, breaks=kind == "pieces")
            arguments: dict[str, Any] = dict(KINDS[kind])
            if device != "cpu" or torch.version.cuda is not None:
                # The next step of the pool, which is another thread's, makes others unreadable.
                options = arguments.get("options") or GraphOptions()
                arguments["options"] = options.merged({"outputs": "clone"})
            self.models.append(model)
            self.runners.append(
                GraphRunner(
                    model,
                    sizes=SIZES,
                    inputs={"x": InputSpec(torch.float32, ("tokens", WIDTH))},
                    outputs=("tokens", WIDTH),
                    pool=self.pool,
                    **arguments,
                )
            )
        for kind, runner in zip(kinds, self.runners, strict=True):
            if kind not in ("lazy", "clone"):
                runner.capture()

    def retried(self, call: Callable[[], Any]) -> Any:
        """What `call` returns once the pool is free."""
        while True:
            try:
                return call()
            except PoolBusyError:
                self.found.busy += 1
                time.sleep(0.0002)

    def run(self, steps: int, threads: int, beside: list[str], seed: int = 0) -> Found:
        """Run at least so many steps in so many threads, beside one that does what is named, each
        at least once."""
        left, totals, started = [steps], self.found, time.perf_counter()
        over = threading.Event()
        names = {
            "capture_next": self._capture_next,
            "release": self._release,
            "recapture": self._recapture,
            "verify": self._verify,
        }

        def serve(at: int) -> None:
            numbers = random.Random(f"{seed} {at}")
            cases = self._cases(at)
            # Until each of `beside` had its turn: a fast machine is through with its steps before.
            while (left[0] > 0 or set(beside) - set(totals.done)) and totals.wrong.total() < 1000:
                left[0] -= 1
                self._step(*numbers.choice(cases))
                if numbers.random() < 0.2:
                    # Or the pool is never free for what is done beside.
                    time.sleep(numbers.random() * 0.001)

        def disturb() -> None:
            numbers = random.Random(seed)
            while not over.is_set():
                name = numbers.choice(beside)
                try:
                    with torch.no_grad():
                        names[name](numbers)
                    totals.done[name] += 1
                except Exception as error:
                    totals.add(type(error).__name__, f"{name}: {error}")
                over.wait(numbers.random() * 0.01)

        workers = [threading.Thread(target=serve, args=(at,)) for at in range(threads)]
        other = threading.Thread(target=disturb)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            for each in (*workers, other):
                each.start()
            for each in workers:
                each.join()
            over.set()
            other.join()
        for each in told:
            totals.add(each.category.__name__, str(each.message))
        for runner in self.runners:
            for trial in runner.report().trust.trials:
                if trial.status == "quarantined":
                    totals.add("quarantined", str(trial.failure))
        totals.seconds = time.perf_counter() - started
        return totals

    def close(self) -> None:
        """Give everything back."""
        for runner in self.runners:
            runner.close()
        self.pool.close()

    def _cases(self, at: int) -> list[tuple[int, Tensor, Tensor]]:
        """Inputs of one thread alone, and what the forwards give for them."""
        numbers, cases = torch.Generator().manual_seed(at), []
        with torch.no_grad():
            for place, model in enumerate(self.models):
                for tokens in range(1, MOST + 1):
                    x = torch.randn(tokens, WIDTH, generator=numbers).to(self.device)
                    cases.append((place, x, model(x).clone()))
        return cases

    def _step(self, place: int, x: Tensor, expected: Tensor) -> None:
        runner = self.runners[place]
        try:
            output = self.retried(lambda: runner(x=x))
        except Exception as error:
            self.found.add(type(error).__name__, f"{len(x)} rows: {error}")
            return
        self.found.steps += 1
        if output.shape != expected.shape:
            self.found.add("wrong shape", f"{tuple(output.shape)} for {tuple(expected.shape)}")
        elif not torch.equal(output, expected):
            self.found.add("wrong value", f"{len(x)} rows of runner {place}")

    def _one(self, numbers: random.Random) -> int:
        return numbers.randrange(len(self.runners))

    def _capture_next(self, numbers: random.Random) -> None:
        runner = self.runners[self._one(numbers)]
        self.retried(runner.release)
        while self.retried(runner.capture_next).left:
            time.sleep(0.001)

    def _release(self, numbers: random.Random) -> None:
        runner = self.runners[self._one(numbers)]
        self.retried(runner.release)
        time.sleep(numbers.random() * 0.005)
        if not runner.options.lazy:
            self.retried(runner.capture)

    def _recapture(self, numbers: random.Random) -> None:
        runner = self.runners[self._one(numbers)]
        self.retried(runner.recapture)
        if runner.options.lazy:
            self.retried(runner.release)

    def _verify(self, numbers: random.Random) -> None:
        place = self._one(numbers)
        x = torch.randn(numbers.randint(1, SIZES[-1]), WIDTH).to(self.device)
        runner, expected = self.runners[place], self.models[place](x)
        if runner.options.lazy:
            # A lazy runner has the graph once a step has asked for it.
            self.retried(lambda: runner(x=x))
        try:
            output = self.retried(lambda: runner.verify(x=x))
        except Exception as error:
            if "no graph yet" not in str(error):
                raise
            return
        if not torch.equal(output, expected):
            self.found.add("wrong value", f"verify, {len(x)} rows of runner {place}")


BESIDE = ["capture_next", "release", "recapture", "verify"]


def run(
    steps: int,
    kinds: list[str],
    *,
    device: str = "cpu",
    threads: int = 8,
    beside: list[str] | None = None,
    seed: int = 0,
    switch_s: float | None = None,
) -> Found:
    """One load, from the making of its runners to their end; `switch_s` is how long Python lets a
    thread run."""
    before = sys.getswitchinterval()
    if switch_s is not None:
        sys.setswitchinterval(switch_s)
    try:
        load = Load(kinds, device)
        try:
            return load.run(steps, threads, beside or BESIDE, seed)
        finally:
            load.close()
    finally:
        sys.setswitchinterval(before)
