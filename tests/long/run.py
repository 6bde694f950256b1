"""Many random steps of clean models in one process, checked at one level: nothing is said, nothing
is wrong, and nothing rises.

    python -m tests.long --steps 100000 [--device cuda] [--level always] [--plot FILE]

Prefills, decodes and mixed batches of several query lengths, with adapters and without, padded
and too large, beside a twin that knows no graphs, from changing threads; weights are written in
place, graphs are captured anew, released, and captured by the steps that ask for them. Beside them
run the others of `tests.long.beside`.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from graphrt import Batch, Dispatch, GraphRunner, Reason
from graphrt.core.inputs.buffers import StaticInputs
from tests.long.beside import Beside, Compiled, Hosted, Pair, Passing, in_thread
from tests.long.level import Figures, plot
from tests.long.models import SIZES, Draft, Served, runners
from tests.long.traffic import Traffic
from tests.trust.twins import LEVELS

TOLERANCE = 1e-3
"""Of the root mean square: what other kernels for padded sizes may make of float32."""
SAMPLES = 60
"""How often the process is measured; the first time after one in so many of the steps."""
WEIGHTS_EVERY = 37
RECAPTURES = 50
"""How often all graphs are captured anew in a run."""
LEAST_RECAPTURE = 50
"""The fewest steps between two of them."""
EXACT_EVERY = 7
"""How often a step is compared, bit for bit, with the forward on the same padded inputs."""
THREADS = 0.1
"""The share of the main runner's steps that new threads run."""
LEVEL_FROM = 6000
"""Steps before which the bounded caches of layouts and copies still fill."""


@dataclass
class Totals:
    """What a run came to; `findings` must be empty."""

    figures: Figures
    steps: int = 0
    seconds: float = 0.0
    worst: float = 0.0
    """The largest difference of an output from its twin's, over the root mean square."""
    exact: int = 0
    """Outputs that were compared bit for bit."""
    findings: list[str] = field(default_factory=list)
    ran: Counter[str] = field(default_factory=Counter)
    """Steps by runner, mode and reason."""
    notes: set[str] = field(default_factory=set)
    """What trials have noted that is no finding, without its figures."""

    def rising(self) -> list[str]:
        """What is not level; in a short run file descriptors and threads alone are looked at."""
        return self.figures.not_level(() if self.steps >= LEVEL_FROM else ("fds", "threads"))

    def lines(self) -> list[str]:
        """The same for people."""
        rate = self.steps / max(self.seconds, 1e-9)
        return [
            f"{self.steps} steps in {self.seconds:.1f} s: {rate:.1f} a second",
            f"findings: {len(self.findings)}",
            *self.findings[:20],
            f"worst difference {self.worst:.1e} of the rms; {self.exact} compared bit for bit",
            *(f"  {count:>6} {name}" for name, count in sorted(self.ran.items())),
            *self.figures.rows(),
            *(f"NOT LEVEL: {each}" for each in self.rising()),
            *(f"noted: {note}" for note in sorted(self.notes)),
        ]


class Run:
    """One long run; `totals` after it."""

    def __init__(self, device: str, level: str, seed: int) -> None:
        self.device, self.level = device, level
        self.totals = Totals(Figures(device))
        self._recapture_every = LEAST_RECAPTURE
        self._traffic = Traffic(seed)
        self._served, self._twin = Served(device), Served(device)
        self._draft, self._draft_twin = Draft(device), Draft(device)
        self._main, self._small = runners(self._served, self._draft, device, level)
        self._beside: dict[str, tuple[int, Beside]] = {}

    def run(self, steps: int, *, progress: bool = False) -> Totals:
        """So many steps of the main runner, nearly each with one of the draft's."""
        totals = self.totals
        self._recapture_every = max(LEAST_RECAPTURE, steps // RECAPTURES)
        every = max(1, steps // SAMPLES)
        started = time.perf_counter()
        with warnings.catch_warnings(record=True) as caught, torch.no_grad():
            warnings.simplefilter("always")
            try:
                self._main.capture()
                self._start_others()
                for step in range(steps):
                    self._step(step)
                    totals.steps += 1
                    totals.seconds = time.perf_counter() - started
                    if totals.steps % every == 0:
                        self._sample()
                        if progress:
                            print(f"{totals.steps} steps, {totals.seconds:.0f} s", flush=True)
                self._look_at_the_end()
            except Exception as error:
                totals.findings.append(f"step {totals.steps}: {type(error).__name__}: {error}")
            finally:
                for _, each in self._beside.values():
                    each.close()
                self._small.close()
                self._main.close()
                self._main.pool.close()
        totals.findings += [
            f"{each.category.__name__}: {each.message}"
            for each in caught
            if each.category.__module__.startswith("graphrt")
        ]
        return totals

    def _start_others(self) -> None:
        make = (self.device, self.level)
        self._beside = {
            "host with a wrapper": (3, Hosted(*make)),
            "compiled module": (11, Compiled(*make)),
            "threads, two pools": (23, Pair(*make, one_pool=False)),
            "threads, one pool": (29, Pair(*make, one_pool=True)),
            "runner that comes and goes": (101, Passing(*make)),
        }

    def _step(self, step: int) -> None:
        traffic = self._traffic
        if step % WEIGHTS_EVERY == WEIGHTS_EVERY - 1:
            self._write_weights(step // WEIGHTS_EVERY)
        if step % self._recapture_every == self._recapture_every - 1:
            self._capture_anew(step // self._recapture_every)
        if step % self._recapture_every == self._recapture_every // 2:
            self._small.release()
        batch, inputs = traffic.step()
        on_device = {name: value.to(self.device) for name, value in inputs.items()}
        expected = self._twin(**on_device)
        tensors = on_device if traffic.chance(0.5) else inputs
        served = partial(self._serve, step, batch, tensors)
        logits = in_thread(served) if traffic.chance(THREADS) else served()
        wanted = Reason.HIT if batch.num_tokens <= SIZES[-1] else Reason.TOO_LARGE
        self._saw("main", self._main, wanted, batch)
        self._compare(f"step {step}, {batch}", logits, expected)
        if not torch.equal(self._served.steps, self._twin.steps):
            self.totals.findings.append(f"step {step}: the count of steps is not the twin's")
        if traffic.chance(0.9):
            expected = self._draft_twin(logits.clone())
            drafted = self._small(logits=logits)
            self._saw("draft", self._small, Reason.HIT, batch)
            self._compare(f"draft of step {step}, {batch}", drafted, expected)
        for name, (every, other) in self._beside.items():
            if step % every == 0:
                wrong = other.step(traffic.random)
                self.totals.findings += [f"step {step}: {each}" for each in wrong]
                self.totals.ran[name] += 1

    def _serve(self, step: int, batch: Batch, tensors: dict[str, Tensor]) -> Tensor:
        # Off is what it was at capture, however it is written.
        with torch.autocast(self.device, enabled=False):
            before = self._state() if step % EXACT_EVERY == 0 else None
            logits: Tensor = self._main(batch, **tensors)
            dispatch = self._main.last_dispatch
            if before is not None and dispatch is not None and dispatch.reason is Reason.HIT:
                logits = self._compared_exactly(
                    step, batch, dispatch, tensors, logits.clone(), before
                )
        return logits

    def _compared_exactly(
        self,
        step: int,
        batch: Batch,
        dispatch: Dispatch,
        tensors: dict[str, Tensor],
        logits: Tensor,
        before: list[Tensor],
    ) -> Tensor:
        """The same step eagerly, padded as its graph was, from the same state."""
        after = self._state()
        self._put_back(before)
        again = self._main.run_padded_eagerly(batch, dispatch, tensors)
        pairs = zip([logits, *after], [again, *self._state()], strict=True)
        if not all(torch.equal(ours, theirs) for ours, theirs in pairs):
            self.totals.findings.append(f"step {step}, {dispatch}: not what eager gives")
        self.totals.exact += 1
        self._put_back(after)
        return logits

    def _state(self) -> list[Tensor]:
        return [self._served.cache.clone(), self._served.steps.clone()]

    def _put_back(self, state: list[Tensor]) -> None:
        self._served.cache.copy_(state[0])
        self._served.steps.copy_(state[1])

    def _capture_anew(self, turn: int) -> None:
        if turn % 2:
            self._main.recapture()
        else:
            self._main.release()
            self._main.capture()

    def _saw(self, name: str, runner: GraphRunner, wanted: Reason, batch: Batch) -> None:
        dispatch = runner.last_dispatch
        assert dispatch is not None
        adapters = ", adapters" if dispatch.descriptor.has_lora else ""
        self.totals.ran[f"{name} {dispatch.mode.name} {dispatch.reason.name}{adapters}"] += 1
        if dispatch.reason is not wanted:
            self.totals.findings.append(f"{name}: {batch} was {dispatch.reason.name}")

    def _compare(self, what: str, actual: Tensor, expected: Tensor) -> None:
        apart = ((actual - expected).abs().max() / expected.square().mean().sqrt()).item()
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
        # Unwatched warm-ups know of no weight outside of the module.
        if self.level != "off":
            self._main.weights_changed()
            self._small.weights_changed()

    def _sample(self) -> None:
        """Measure, with every graph captured."""
        for size in (1, 2, 4, 8):
            self._small(logits=torch.zeros(size, self._served.down.shape[1], device=self.device))
        for inputs in gc.get_objects():
            if type(inputs) is StaticInputs:
                # A bounded table of what each pair of counts moves: rare pairs come late.
                inputs._layouts.clear()
        self.totals.figures.sample(self.totals.steps, self._main.pool.bytes() or 0)

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


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Torch's own pool of threads would be grown by every thread that steps."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def run(
    steps: int,
    device: str = "cpu",
    level: str = "capture",
    seed: int = 0,
    *,
    progress: bool = False,
) -> Totals:
    """So many random steps at this level of checks."""
    with one_thread():
        return Run(device, level, seed).run(steps, progress=progress)


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 0, or 1 where something was found or rises."""
    parser = argparse.ArgumentParser(prog="python -m tests.long", description=__doc__)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--level", default="capture", choices=LEVELS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plot", metavar="FILE", help="draw the figures; needs matplotlib")
    chosen = parser.parse_args(arguments)
    print(f"torch {torch.__version__}, {chosen.device}, check={chosen.level!r}")
    totals = run(chosen.steps, chosen.device, chosen.level, chosen.seed, progress=True)
    print("\n".join(totals.lines()))
    if chosen.device == "cuda":
        print(f"peak MiB: {torch.cuda.max_memory_allocated() / 2**20:.1f}")
    if chosen.plot:
        plot(totals.figures, chosen.plot)
    return 1 if totals.findings or totals.rising() else 0
