"""Random steps of runners whose graphs fetch their inputs, by Python and by the compiled replay:
both have to leave the same. A script of tests/core/test_native_replay.py."""

from __future__ import annotations

import random
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import MappingProxyType
from typing import Any

import torch

from graphrt import Batch, GraphOptions, GraphRunner, InputSpec
from graphrt.core.base._native_door import NativePath, NativeReplay
from graphrt.core.replay import handout
from graphrt.core.replay.pool import GraphPool
from graphrt.core.runner import engine, graph_table
from graphrt.errors import GraphRTError
from tests.core.soft_ring import RingGraph, RingPlatform

Kept = Callable[[torch.Tensor], Any]

HANDS: dict[str, Kept] = {
    "drops it": lambda out: None,
    "keeps it": lambda out: out,
    "keeps a view": lambda out: out[:1],
    "keeps an alias": lambda out: out.detach(),
    "keeps the storage": lambda out: out.untyped_storage(),
    "notes something at the storage": lambda out: setattr(out.untyped_storage(), "note", 1),
    "watches the storage": lambda out: weakref.ref(out.untyped_storage()),
    "shares it": lambda out: [out.share_memory_()].clear(),
    "gives it other memory": lambda out: [out.set_()].clear(),
    "takes the memory": lambda out: setattr(out, "data", torch.ones(1)),
}
FAULTS = (
    "launch fails",
    "interrupted",
    "busy",
    "wrong dtype",
    "wrong rows",
    "one more",
    "forward raises",
)


STEPS = 70
PYTHON = ("step", "check", "serve")
"""What a compiled path leaves a step to."""


class Device:
    """What goes wrong with the next launch, and what was made unreadable."""

    fault: str | None = None
    marked = 0
    pool: Any = None
    stream = 0
    # Whether another device is the current one, and how often this one was made it.
    elsewhere = False
    entered = 0


@contextmanager
def on_device() -> Iterator[None]:
    """As a pool's, which is not the current device's."""
    before, Device.elsewhere = Device.elsewhere, False
    Device.entered += before
    try:
        yield
    finally:
        Device.elsewhere = before


_replay = RingGraph.replay


def _launch(graph: RingGraph) -> None:
    fault, Device.fault = Device.fault, None
    if fault == "launch fails":
        raise RuntimeError("no launch")
    if fault == "interrupted":
        raise KeyboardInterrupt
    _replay(graph)


def _mark(cdata: int, message: str) -> None:
    Device.marked += 1


class Counted:
    """Makes the compiled path, and counts the steps that it was given and those that it left to
    Python: before they were dispatched, and after that."""

    def __init__(self, made: Callable[..., Any] | None) -> None:
        assert made is not None
        self.given, self.left = 0, Counter[str]()
        self._made = made

    def __call__(self, **parts: Any) -> Any:
        compiled = self._made(**(parts | {name: self._left(name, parts[name]) for name in PYTHON}))

        def given(*arguments: Any) -> Any:
            self.given += 1
            return compiled(*arguments)

        return given

    def _left(self, name: str, run: Callable[..., Any]) -> Callable[..., Any]:
        def left(*arguments: Any) -> Any:
            self.left[name] += 1
            return run(*arguments)

        return left

    def __str__(self) -> str:
        dispatched = self.given - self.left["step"]
        replayed = dispatched - self.left["check"]
        return f"{dispatched} of {self.given} and {replayed - self.left['serve']} of {replayed}"


PATHS = Counted(NativePath)


def use(*, native: bool) -> None:
    graph_table.NativeReplay = NativeReplay if native else None  # type: ignore[attr-defined]
    engine.NativePath = PATHS if native else None  # type: ignore[attr-defined]


def specs_of(rng: random.Random) -> dict[str, InputSpec]:
    dtypes = torch.int64, torch.int32, torch.float32
    specs = {"x": InputSpec(torch.float32, ("tokens", 2))}
    for number in range(rng.randint(0, 3)):
        axis = rng.choice(("tokens", "reqs", "reqs+1"))
        pad = "repeat" if rng.random() < 0.4 else rng.randint(0, 9)
        specs[f"y{number}"] = InputSpec(rng.choice(dtypes), (axis,), pad=pad)
    return specs


class Weighted(torch.nn.Module):
    """A forward that reads a weight, which may be moved."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((2,), 2.0), requires_grad=False)

    def forward(self, x: torch.Tensor, **others: torch.Tensor) -> torch.Tensor:
        if Device.fault == "forward raises":
            Device.fault = None
            raise RuntimeError("no forward")
        return x * self.weight + sum(other.sum() for other in others.values())


def runners_of(rng: random.Random, specs: dict[str, InputSpec]) -> tuple[GraphRunner, GraphRunner]:
    """A runner of single graphs, and one of pieces in the same pool."""
    pool: Any = GraphPool(RingPlatform())
    Device.pool = pool
    if rng.random() < 0.3:
        pool.elsewhere, pool.on_device = lambda: Device.elsewhere, on_device
    inputs: dict[str, Any] = {
        "inputs": specs,
        "outputs": (rng.choice(("tokens", "reqs")),),
        "sizes": [2, 4, 8],
        "max_num_reqs": 8,
        "pool": pool,
        "options": GraphOptions(
            inputs_in_graph=True,
            check=rng.choice(("off", "capture", "first", "sample")),
            lazy=rng.random() < 0.3,
        ),
    }
    runner = GraphRunner(Weighted(), mode="FULL", **inputs)
    if rng.random() < 0.5:
        pool.streams.read_id, pool.streams.last_id = lambda: Device.stream, 0
    other = GraphRunner(Weighted(), mode="PIECEWISE", **inputs)
    for each in runner, other:
        if not each.options.lazy:
            each.capture()
    return runner, other


def done(runner: GraphRunner, rng: random.Random, batch: Batch, values: Any, old: Any) -> Any:
    """What a step returned, by one of the ways to run it."""
    way = rng.random()
    if way < 0.1:
        return runner(batch, **MappingProxyType(values))
    if way < 0.2:
        slot = runner.slot(batch)
        for name, value in values.items():
            slot[name].copy_(value)
        return runner(slot)
    if way < 0.25 and old is not None:
        return runner(old)
    if way < 0.3:
        planned = [None, *(descriptor for _, descriptor in runner.plan.keys)]
        return runner(batch, **values, agreed=rng.choice(planned))
    if way < 0.35:
        return runner(None, **values)
    if way < 0.4:
        return runner(batch, updates={}, **values)
    return runner(batch, **values)


def program(seed: int, *, native: bool) -> list[Any]:
    """What every step came to."""
    use(native=native)
    rng = random.Random(seed)
    torch.manual_seed(seed)
    specs = specs_of(rng)
    Device.marked = Device.stream = Device.entered = 0
    handout._MOST_STEPS = rng.choice((3, 1024))  # type: ignore[attr-defined]
    runner, other = runners_of(rng, specs)
    pool, rows, reqs, old = runner.pool, 3, 3, None
    kept, seen = list[Any](), list[Any]()
    hand, weights = rng.choice([*HANDS]), list[Any]()
    for step in range(STEPS):
        if rng.random() < 0.2:
            rows = rng.randint(1, 8)
            reqs = rows if rng.random() < 0.6 else rng.randint(1, rows)
        if rng.random() < 0.3:
            hand = rng.choice(["drops it", *HANDS])
        batch = Batch(rows, reqs, 1) if rows == reqs and rng.random() < 0.8 else Batch(rows, reqs)
        values: Any = {n: torch.rand(s.sizes(rows, reqs)).to(s.dtype) for n, s in specs.items()}
        fault = rng.choice(FAULTS) if rng.random() < 0.15 else None
        if fault == "wrong dtype":
            values["x"] = values["x"].double()
        if fault == "wrong rows":
            values["x"] = torch.cat([values["x"]] * 2)
        if fault == "one more":
            values["more"] = values["x"]
        if rng.random() < 0.1:
            values["x"].requires_grad_()
        event, Device.stream = rng.random(), rng.choice((0, 0, 0, 1))
        Device.elsewhere = rng.random() < 0.1
        if step == STEPS - 1:
            pool.close()
        elif event < 0.03:
            runner.recapture()
        elif event < 0.08 and step > 30:
            pool.drop(runner.last_dispatch.descriptor)
        elif event < 0.15:
            other(batch, **values) if fault is None else None
        elif event < 0.2:
            old = runner.slot(batch)
            for place in old.values():
                place.fill_(1)
        elif event < 0.21:
            # Which no graph reads; those read the one of before.
            forward = runner.graphs.setup.forward
            weights.append(forward.weight)
            forward.weight = torch.nn.Parameter(torch.rand(2), requires_grad=False)
        elif event < 0.24:
            other.capture()
        elif event < 0.27:
            runner.dispatcher.max_padding = rng.choice((None, None, 1.0, 2.0))
        around = nullcontext if rng.random() < 0.95 else torch.autocast
        if fault == "busy":
            pool.owner = "another step"
        Device.fault = fault
        outcome: Any
        graded = False
        try:
            inference = torch.inference_mode() if rng.random() < 0.1 else nullcontext()
            with inference, around("cpu"):
                out = done(runner, rng, batch, values, old)
            outcome, graded = out.detach().clone(), out.requires_grad
            kept.append(HANDS[hand](out))
        except (GraphRTError, RuntimeError, LookupError, KeyboardInterrupt) as error:
            outcome = type(error), str(error).partition(" in thread ")[0]
        out = None
        kept = kept[-rng.randint(1, 3) :]
        if fault == "busy":
            pool.owner = None
        Device.fault, Device.elsewhere = None, False
        assert pool.owner is None
        ring = runner.inputs.transport.ring
        state = ring.count, ring.unsure, ring.pending is None, pool.generation, pool.streams.last_id
        steps = pool.pieces.replaying is None, pool.pieces.context is None, len(pool.handed_out)
        device = Device.marked, Device.entered
        told = runner.last_dispatch, runner.dispatcher.counts(), runner.report().live_tokens
        tried = [record.status for record in runner.report().trust.trials]
        seen.append((outcome, state, steps, device, told, tried, graded))
    kept.clear()
    runner.close()
    other.close()
    return seen


def is_equal(ours: Any, theirs: Any) -> bool:
    if isinstance(ours[0], torch.Tensor) and isinstance(theirs[0], torch.Tensor):
        return torch.equal(ours[0], theirs[0]) and ours[1:] == theirs[1:]
    return bool(ours == theirs)


def main(programs: int) -> None:
    RingGraph.replay = _launch  # type: ignore[method-assign]
    # A torch without CUDA can mark nothing; what would be marked is counted.
    handout.can_mark_unreadable = True  # type: ignore[attr-defined]
    handout.mark_unreadable = _mark  # type: ignore[attr-defined]
    for seed in range(programs):
        by_python, by_c = program(seed, native=False), program(seed, native=True)
        for step, (ours, theirs) in enumerate(zip(by_c, by_python, strict=True)):
            assert is_equal(ours, theirs), (seed, step, ours, theirs)
    print("fast:", PATHS)
