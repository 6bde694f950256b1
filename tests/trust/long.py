"""Many random steps of clean models, checked at one level: nothing is said, and nothing is wrong.

    python -m tests.trust.long --steps 10000 [--device cuda] [--level always]

Prefills, decodes and mixed batches of several query lengths, with adapters and without, padded
and too large, beside a twin that knows no graphs; now and then weights are written in place, and
graphs are captured anew.
"""

from __future__ import annotations

import argparse
import gc
import random
import resource
import time
import warnings
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from graphrt import Batch, GraphRunner, Reason
from tests.models.served import Span, paged_step
from tests.trust.long_models import (
    ADAPTERS,
    LIMITS,
    NO_ADAPTER,
    QUERY_LENS,
    SIZES,
    Draft,
    Served,
    runners,
)
from tests.trust.twins import LEVELS

TOLERANCE = 1e-3
"""Of the root mean square: what other kernels for padded sizes may make of float32."""
SAMPLES = 10
"""How often tensors and bytes are counted."""
WEIGHTS_EVERY = 37
RECAPTURES = 20
"""How often all graphs are captured anew in a run; not more often than every 50 steps."""
LEVEL_FROM = 2000
"""Steps before which the bounded caches of layouts and copies still fill."""


@dataclass
class Totals:
    """What a run came to; `findings` must be empty."""

    steps: int = 0
    seconds: float = 0.0
    worst: float = 0.0
    """The largest difference of an output from its twin's, over the root mean square."""
    findings: list[str] = field(default_factory=list)
    ran: Counter[str] = field(default_factory=Counter)
    """Steps by runner, mode and reason."""
    tensors: list[int] = field(default_factory=list)
    bytes: list[int] = field(default_factory=list)
    """In use on the device, or the most that the process ever had; at the same times."""
    notes: set[str] = field(default_factory=set)
    """What trials have noted that is no finding, without its figures."""

    def levelled(self) -> bool:
        """Whether no tensors gather: in the last third of a run of at least `LEVEL_FROM` steps
        fewer than one in a hundred steps comes to one more."""
        if self.steps < LEVEL_FROM:
            return True
        before = self.tensors[len(self.tensors) * 2 // 3]
        return self.tensors[-1] - before < self.steps / 3 / 100

    def lines(self) -> list[str]:
        """The same for people."""
        mib = [f"{each / 2**20:.1f}" for each in self.bytes]
        return [
            f"{self.steps} steps in {self.seconds:.1f} s: {self.steps / self.seconds:.1f} a second",
            f"findings: {len(self.findings)}",
            *self.findings[:20],
            f"worst difference {self.worst:.1e} of the rms",
            *(f"  {count:>6} {name}" for name, count in sorted(self.ran.items())),
            f"live tensors: {self.tensors}{'' if self.levelled() else ', NOT LEVEL'}",
            f"MiB: {', '.join(mib)}",
            *(f"noted: {note}" for note in sorted(self.notes)),
        ]


class Traffic:
    """Random steps of up to eight requests whose contexts grow until they are full."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._generator = torch.Generator().manual_seed(seed)
        self._lengths = [0] * LIMITS.max_num_reqs

    def chance(self, share: float) -> bool:
        """True so often."""
        return self._random.random() < share

    def step(self) -> tuple[Batch, dict[str, Tensor]]:
        """A batch and its inputs, on the host."""
        number = self._random
        requests = number.sample(range(LIMITS.max_num_reqs), number.randint(1, 8))
        if self.chance(0.6):
            counts = [number.choice((*QUERY_LENS, 3))] * len(requests)
        else:
            counts = [number.randint(1, 6) for _ in requests]
        spans: list[Span] = []
        for request, count in zip(requests, counts, strict=True):
            if sum(span[2] for span in spans) + count > LIMITS.max_num_tokens:
                break
            if self._lengths[request] + count > LIMITS.context:
                self._lengths[request] = 0
            spans.append((request, self._lengths[request], count))
            self._lengths[request] += count
        batch, inputs = paged_step(spans, LIMITS, self._generator)
        active = number.choice((0, 0, 1, 2))
        first = number.randrange(NO_ADAPTER + 1, ADAPTERS - 1)
        numbers = [NO_ADAPTER, *range(first, first + active)]
        adapters = [number.choice(numbers) for _ in spans]
        inputs["adapters"] = torch.tensor(adapters)
        return batch._replace(num_active_loras=active), inputs


class Run:
    """One long run; `totals` after it."""

    def __init__(self, device: str, level: str, seed: int) -> None:
        self.device = device
        self.totals = Totals()
        self._recapture_every = 50
        self._traffic = Traffic(seed)
        self._served, self._twin = Served(device), Served(device)
        self._draft, self._draft_twin = Draft(device), Draft(device)
        self._main, self._small = runners(self._served, self._draft, device, level)

    def run(self, steps: int) -> Totals:
        """So many steps of the main runner, nearly each with one of the draft's."""
        totals = self.totals
        self._recapture_every = max(50, steps // RECAPTURES)
        with warnings.catch_warnings(record=True) as caught, torch.no_grad():
            warnings.simplefilter("always")
            try:
                self._main.capture()
                for step in range(steps):
                    if step % max(1, steps // SAMPLES) == 0:
                        self._count()
                    started = time.perf_counter()
                    self._step(step)
                    totals.seconds += time.perf_counter() - started
                    totals.steps += 1
                self._count()
                self._look_at_the_end()
            except Exception as error:
                totals.findings.append(f"step {totals.steps}: {type(error).__name__}: {error}")
            finally:
                self._small.close()
                self._main.close()
                self._main.pool.close()
        totals.findings += [
            f"{each.category.__name__}: {each.message}"
            for each in caught
            if each.category.__module__.startswith("graphrt")
        ]
        return totals

    def _step(self, step: int) -> None:
        traffic = self._traffic
        if step % WEIGHTS_EVERY == WEIGHTS_EVERY - 1:
            self._write_weights(step // WEIGHTS_EVERY)
        if step % self._recapture_every == self._recapture_every - 1:
            self._main.recapture()
        if step % self._recapture_every == self._recapture_every // 2:
            self._small.release()
        batch, inputs = traffic.step()
        on_device = {name: value.to(self.device) for name, value in inputs.items()}
        expected = self._twin(**on_device)
        given = on_device if traffic.chance(0.5) else inputs
        # Off is what it was at capture, however it is written.
        with torch.autocast(self.device, enabled=False):
            logits = self._main(batch, **given)
        wanted = Reason.HIT if batch.num_tokens <= SIZES[-1] else Reason.TOO_LARGE
        self._saw("main", self._main, wanted, batch)
        self._compare(f"step {step}, {batch}", logits, expected)
        if not torch.equal(self._served.steps, self._twin.steps):
            self.totals.findings.append(f"step {step}: the count of steps is not the twin's")
        if traffic.chance(0.9):
            expected = self._draft_twin(logits.clone())
            found = self._small(logits=logits)
            self._saw("draft", self._small, Reason.HIT, batch)
            self._compare(f"draft of step {step}, {batch}", found, expected)

    def _saw(self, name: str, runner: GraphRunner, wanted: Reason, batch: Batch) -> None:
        found = runner.last_dispatch
        assert found is not None
        adapters = ", adapters" if found.descriptor.has_lora else ""
        self.totals.ran[f"{name} {found.mode.name} {found.reason.name}{adapters}"] += 1
        if found.reason is not wanted:
            self.totals.findings.append(f"{name}: {batch} was {found.reason.name}")

    def _compare(self, what: str, found: Tensor, expected: Tensor) -> None:
        apart = ((found - expected).abs().max() / expected.square().mean().sqrt()).item()
        self.totals.worst = max(self.totals.worst, apart)
        if not apart <= TOLERANCE:
            self.totals.findings.append(f"{what}: {apart:.1e} of the rms from the twin")

    def _write_weights(self, turn: int) -> None:
        pairs = [
            *zip(self._served.written_in_place(), self._twin.written_in_place(), strict=True),
            (self._draft.weight, self._draft_twin.weight),
        ]
        for weight in pairs[turn % len(pairs)]:
            # It goes back and forth.
            weight.mul_(-1)
        self._main.weights_changed()
        self._small.weights_changed()

    def _count(self) -> None:
        """Count what is alive, with every graph captured."""
        for size in (1, 2, 4, 8):
            self._small(logits=torch.zeros(size, self._served.down.shape[1], device=self.device))
        gc.collect()
        alive = sum(issubclass(type(each), Tensor) for each in gc.get_objects())
        self.totals.tensors.append(alive)
        on_gpu = self.device == "cuda"
        used = torch.cuda.memory_allocated() if on_gpu else _peak_bytes()
        self.totals.bytes.append(used)

    def _look_at_the_end(self) -> None:
        totals = self.totals
        self._compare("the cache", self._served.cache[:, :, 1:], self._twin.cache[:, :, 1:])
        for name, runner in (("main", self._main), ("draft", self._small)):
            report = runner.report()
            for trial in report.trust.trials:
                if trial.failure is not None:
                    totals.findings.append(f"{name} [{trial.descriptor}]: {trial.failure}")
                totals.notes |= {f"{name}: {note.split(':')[0]}" for note in trial.notes}
            for reason, count in report.reasons.items():
                if count and reason not in (Reason.HIT, Reason.TOO_LARGE, Reason.NOT_CAPTURED):
                    totals.findings.append(f"{name}: {count} steps {reason.name}")


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def run(steps: int, device: str = "cpu", level: str = "always", seed: int = 0) -> Totals:
    """So many random steps at this level of checks."""
    return Run(device, level, seed).run(steps)


def main(arguments: Any = None) -> int:
    """Returns 0, or 1 where something was found or tensors gather."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--level", default="always", choices=LEVELS)
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args(arguments)
    print(f"torch {torch.__version__}, {chosen.device}, check={chosen.level!r}")
    totals = run(chosen.steps, chosen.device, chosen.level, chosen.seed)
    print("\n".join(totals.lines()))
    if chosen.device == "cuda":
        print(f"peak MiB: {torch.cuda.max_memory_allocated() / 2**20:.1f}")
    return 1 if totals.findings or not totals.levelled() else 0


if __name__ == "__main__":
    raise SystemExit(main())
