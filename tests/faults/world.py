"""What faults are injected into: a small model with state, what serves it, and what is checked."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch

from graphrt import (
    Batch,
    GraphPool,
    GraphRunner,
    HostArg,
    InputSpec,
    Platform,
    UpdatableTask,
    eager_break,
)
from graphrt.core.base.torch_names import dispatch_modes
from graphrt.core.batch.context import current_context
from graphrt.core.replay.recording import current_capture, under_way, warming_up
from tests.faults.inject import Faults
from tests.faults.places import seed_device

WIDTH = 4
SLOTS = 32
SIZES = (2, 4)
LARGEST = max(SIZES)

INPUTS = {
    "x": InputSpec(torch.float32, ("tokens", WIDTH)),
    "slot": InputSpec(torch.int64, ("tokens",), pad=0, index=True),
}

working: list[Faults] = []
"""Whose fault an operator of the model may be."""


def _work(x: torch.Tensor) -> None:
    for faults in working:
        faults.hit("operator")()


work = torch.library.custom_op(
    "graphrt_faults::work", _work, mutates_args=("x",), schema="(Tensor(a!) x) -> ()"
)
work.register_fake(lambda x: None)

scale = UpdatableTask(
    "scale",
    lambda x, out, factor: torch.mul(x, factor, out=out),
    {"factor": HostArg(axis=None)},
    at_capture=lambda descriptor: {"factor": 1.0},
)


@eager_break
def in_between(hidden: torch.Tensor) -> torch.Tensor:
    return hidden * 2


class Model:
    """Rows of a cache, a counter and, if wanted, random numbers: all that a forward advances.

    Only elementary operators, so that rows are equal to the bit whatever the padding is.
    """

    def __init__(
        self,
        device: str,
        *,
        breaks: bool = False,
        noise: bool = False,
        tasks: Callable[..., Any] | None = None,
        works: bool = True,
        counts: bool = True,
    ) -> None:
        self.weight = torch.arange(1.0, 1.0 + WIDTH).to(device)
        self.cache = torch.zeros(SLOTS, WIDTH).to(device)
        self.steps = torch.zeros(1).to(device)
        self.breaks, self.noise, self.tasks, self.works = breaks, noise, tasks, works
        self.counts = counts

    def __call__(self, x: torch.Tensor, slot: torch.Tensor) -> torch.Tensor:
        if self.counts:
            self.steps += 1
        hidden = x * self.weight
        if self.works:
            work(hidden)
        if self.noise:
            hidden = hidden + torch.rand_like(hidden)
        if self.breaks:
            hidden = in_between(hidden)
        if self.tasks is not None:
            out = torch.empty_like(hidden)
            self.tasks(hidden, out)
            hidden = out
        self.cache.index_copy_(0, slot, hidden)
        return hidden + self.cache[slot] * self.steps

    def twin(self) -> Model:
        """Another model in the same state."""
        other = Model(
            str(self.weight.device),
            breaks=self.breaks,
            noise=self.noise,
            tasks=self.tasks,
            works=self.works,
            counts=self.counts,
        )
        for own, its in zip(self.tensors(), other.tensors(), strict=True):
            its.copy_(own)
        return other

    def tensors(self) -> list[torch.Tensor]:
        return [self.weight, self.cache, self.steps]

    def state(self) -> list[torch.Tensor]:
        """All that steps advance, but for the slot that is nobody's."""
        device = self.weight.device.type
        tensors = [
            self.weight.cpu().clone(),
            self.cache[1:].cpu().clone(),
            self.steps.cpu().clone(),
        ]
        return tensors + seed_device(device)

    def put_back(self, state: Sequence[torch.Tensor]) -> None:
        """What a host does after a step that was cut short."""
        weight, cache, steps, *seeds = state
        self.weight.copy_(weight)
        self.cache[1:].copy_(cache)
        self.steps.copy_(steps)
        torch.set_rng_state(seeds[0])
        if len(seeds) > 1:
            torch.get_device_module(self.weight.device.type).set_rng_state(seeds[1])


def same(one: Sequence[torch.Tensor], other: Sequence[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


class Step:
    """The inputs of one step of so many rows."""

    def __init__(self, rows: int, value: float = 1.0, factor: float = 3.0) -> None:
        x = torch.arange(float(rows * WIDTH)).view(rows, WIDTH) + value
        self.batch = Batch(rows, rows)
        self.values = {"x": x, "slot": torch.arange(rows) + 1 + rows}
        self.factor = factor


class World:
    """One scenario, built anew for each fault: `act` is what a fault is injected into."""

    halves: tuple[str, ...] = ()
    """The kinds of actions in the midst of `act` whose failure may leave half a step, as it does
    where a forward runs eagerly."""
    halves_in: tuple[str, ...] = ("",)
    """Where in graphrt, as a path begins."""

    def __init__(self, platform: Platform) -> None:
        self.platform = platform
        self.device = platform.device_type
        torch.manual_seed(0)
        self.model = self.make_model()
        self.pools: list[GraphPool] = []
        self.runners: list[GraphRunner] = []
        self.prepare()

    def make_model(self) -> Model:
        return Model(self.device)

    def prepare(self) -> None:
        """What there is before the fault."""

    def act(self) -> Any:
        raise NotImplementedError

    def again(self) -> Any:
        """What a host does after `act` failed."""
        return self.act()

    def updates(self, step: Step) -> Mapping[str, Any] | None:
        return None if self.model.tasks is None else {"scale": {"factor": step.factor}}

    def runner(self, **options: Any) -> GraphRunner:
        arguments: dict[str, Any] = {
            "inputs": INPUTS,
            "outputs": ("tokens", WIDTH),
            "mode": "FULL",
            "sizes": list(SIZES),
            "platform": None if "pool" in options else self.platform,
            **options,
        }
        run = GraphRunner(arguments.pop("forward", self.model), **arguments)
        self.runners.append(run)
        if run.pool not in self.pools:
            self.pools.append(run.pool)
        return run

    def step(self, run: GraphRunner, step: Step) -> torch.Tensor:
        output = run(step.batch, **step.values, updates=self.updates(step))
        return output.cpu().clone()

    def expected(self, step: Step) -> torch.Tensor:
        """What the step gives eagerly, from the state that there is now, which stays."""
        state = self.model.state()
        twin, factor = self.model.twin(), step.factor
        if twin.tasks is not None:
            twin.tasks = lambda x, out: torch.mul(x, factor, out=out)
        output = twin(**{name: each.to(self.device) for name, each in step.values.items()})
        after = twin.state()
        self.model.put_back(state)
        self._after = after
        return output.cpu()

    def check_serves(self, sizes: Sequence[int] = (1, 2, 3, 4, 7), hits: bool = False) -> None:
        """Every runner serves these sizes, equal to eager to the bit."""
        for run in [run for run in self.runners if not run.graphs.closed and not run.pool.closed]:
            for number, rows in enumerate(sizes):
                if self.model.noise and rows not in (2, 4, 7):
                    continue  # padding rows draw numbers too
                step = Step(rows, value=float(number), factor=0.5 + number)
                wanted = self.expected(step)
                got = self.step(run, step)
                assert torch.equal(got, wanted), (
                    f"a step of {rows} rows is wrong: {got.tolist()} in place of {wanted.tolist()}"
                )
                assert same(self.model.state(), self._after), f"state after {rows} rows is wrong"
                dispatch = run.last_dispatch
                assert dispatch is not None
                if hits and rows <= LARGEST:
                    assert dispatch.slot >= 0, f"{rows} rows: {dispatch.reason}"

    def check_idle(self) -> None:
        """Nothing of what was going on has stayed."""
        assert current_context() is None, "a context was not left"
        assert current_capture() is None and not under_way, "a capture was not left"
        assert not warming_up.get(), "a warm-up was not left"
        assert not dispatch_modes(), "a dispatch mode was not left"
        assert torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
        assert gc.isenabled(), "the collector was not enabled again"
        for pool in self.pools:
            assert pool.owner is None, "the pool is busy"
        for run in self.runners:
            keys = [(each.mode, each.descriptor) for each in run.graphs.records]
            assert len(keys) == len(set(keys)), "a graph is recorded twice"
            published = {(each.mode, each.descriptor) for each in run.dispatcher.published}
            assert set(keys) == published, "what is recorded is not what is published"

    def figures(self) -> dict[str, int]:
        """What must be the same whether a fault was in between or not."""
        gc.collect()
        if self.device != "cpu":
            torch.get_device_module(self.device).empty_cache()
        totals = {"graphs": 0, "entries": 0, "pool bytes": 0}
        for run in self.runners:
            totals["graphs"] += len(run.graphs.records)
            totals["entries"] += sum(len(getattr(o, "entries", ())) for o in run.graphs.owners())
        for pool in self.pools:
            totals["pool bytes"] += pool.bytes() or 0
            live = getattr(pool.memory, "live_bytes", None)
            if live is not None:
                totals["live bytes"] = totals.get("live bytes", 0) + live
        return totals

    def close(self) -> None:
        for run in self.runners:
            run.close()
        for pool in self.pools:
            pool.close()
        with suppress(AttributeError):
            del self._after
