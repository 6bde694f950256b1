"""`layers`: milliseconds of each module of a replay.

1. A second runner of the same forward captures the batch's graph once more, in memory of its own.
   Its warm-up tells which modules the forward calls, of which the layers are chosen: the modules of
   one class beside each other that have the most modules in them, and all that is beside these.
2. In the capture a mark stands at each end of a layer: an external event on CUDA, an operator that
   notes the time on the CPU. Between two layers without a kernel in between is one mark.
3. The graph is replayed behind a kernel that waits until it is launched; the median of each span
   between two marks counts. State is put back after each replay, and the second graph is destroyed.

The served graphs are not touched. A mark takes a device about a microsecond: of small layers the
sum is longer than a replay of the served graph.
"""

from __future__ import annotations

import copy
import ctypes
import statistics
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cache, partial
from itertools import pairwise
from typing import Any

import torch

from graphrt._measure import run_by_graph, run_watched, step_of
from graphrt._runner import GraphRunner, runner_of
from graphrt.core.base import tree
from graphrt.core.base._undo import Undo, undoing
from graphrt.core.base.errors import CaptureError, InvalidOptionError, ResourceExhaustedError
from graphrt.core.base.option_values import check_kind, count_of
from graphrt.core.base.texts import aligned, counted
from graphrt.core.batch.descriptor import Batch, checked_batch
from graphrt.core.capture.options import NO_LIMIT
from graphrt.core.dispatch.reasons import Dispatch, Reason
from graphrt.core.inputs.buffers import StaticInputs, batch_of
from graphrt.core.replay.pool import GraphPool
from graphrt.core.replay.recording import refuse_inside_capture
from graphrt.core.runner.capture_session import RunnerCapture
from graphrt.core.runner.contract import Step
from graphrt.core.runner.runner import Runner
from graphrt.observe.captures import Listener, listening
from graphrt.observe.nodes import counter

REPLAYS, _WARM_UP = 20, 3
"""Replays whose median counts, and those before."""

_SPIN_CYCLES = 4_000_000
"""About 2 ms of a GPU. An idle one runs the first kernels while the host launches the others: on an
H200 the first layer took 11 % longer than its span in a trace."""

Path = tuple[str, ...]


@dataclass(frozen=True)
class LayerTime:
    """The time between two marks: of a module, of what is `(after x)` or `(before)` the modules, or
    of an `(eager part)`."""

    name: str
    ms: float


@dataclass(frozen=True)
class LayerTimes:
    """The times of one graph, in the order of the replay; `print` shows a table."""

    graph: str
    rows: tuple[LayerTime, ...]
    total_ms: float
    """Of all rows."""

    def __str__(self) -> str:
        total = self.total_ms or 1.0
        shown = [(row.name, f"{row.ms:.4f}", f"{row.ms / total:.0%}") for row in self.rows]
        head = f"{self.graph}: {self.total_ms:.4f} ms, the median of {counted(REPLAYS, 'replay')}"
        return "\n".join([head, "", *aligned([("module", "ms", "share"), *shown])])

    def to_dict(self) -> dict[str, Any]:
        """Only JSON types."""
        return asdict(self)


def layers(
    runner: GraphRunner[Any],
    batch: Batch | None = None,
    /,
    *,
    depth: int | None = None,
    updates: Any = None,
    metadata: Any = None,
    **values: Any,
) -> LayerTimes:
    """Time each layer of a replay of the graph that serves `batch`, by a second graph, which is
    captured for this call and destroyed. Its inputs are `values`, else the host's example, else
    rows of padding. `depth` times the modules at that depth of calls (0: the outermost) in place of
    the layers.

    Raises `InvalidOptionError` for a batch without a graph, for ranks, and for compiled modules;
    `CaptureError` for a layer on a side stream; `ResourceExhaustedError` where the device has no
    room for a second graph; and what captures raise.
    """
    check_kind("runner", runner, GraphRunner, optional=False, example="layers(runner, Batch(4))")
    check_kind("batch", batch, Batch)
    if depth is not None:
        count_of("depth", depth, least=0, example=1)
    refuse_inside_capture("layers()")
    setup = runner.graphs.setup
    if batch is None:
        batch = batch_of(runner.inputs, values)
    dispatch = runner.dispatcher.peek(checked_batch(batch))
    is_early = dispatch.reason is Reason.NOT_CAPTURED
    served = "capture() first" if is_early else "a batch that a graph serves"
    for is_refused, got, advice in (
        (dispatch.slot < 0, f"{batch}: {dispatch.reason.value}", served),
        (setup.host.ranks is not None, "Host(ranks=)", "a runner of one rank, without ranks="),
        (bool(setup.compiled), "compiled modules", "the model itself, or torch's profiler"),
    ):
        if is_refused:
            raise InvalidOptionError(
                "layers() cannot time this", got=got, expected="one graph", advice=advice
            )
    second = _second(runner)
    timed = partial(_timed, second, batch, dispatch, values, updates, metadata, depth)
    try:
        # In the runner's turn: meanwhile no step writes the state that is put back.
        return runner._in_turn(timed)
    finally:
        second.close()


def _second(runner: GraphRunner[Any]) -> Runner[Any]:
    """A runner of the same forward and plan, in memory of its own."""
    setup = copy.copy(runner.graphs.setup)
    setup.pool, setup.owns_pool = GraphPool(setup.pool.platform, device=setup.pool.device), True
    inputs = setup.inputs
    options: dict[str, Any] = {"lazy": False, "strict": False, "find_nan": False, **NO_LIMIT}
    options["warmups"] = setup.options.warmups or None  # a warm-up shows the modules
    setup.options = setup.options.merged(
        {name: value for name, value in options.items() if hasattr(setup.options, name)}
    )
    setup.inputs = StaticInputs(
        inputs.nest({**inputs.declared.specs}),
        platform=setup.pool.platform,
        tokens=inputs.tokens,
        reqs=inputs.reqs,
        device=inputs.transport.slab.device,
        fetched=setup.options.inputs_in_graph,
    )
    # As much as is known of outputs: to release the second graph forgets its own.
    setup.outputs = copy.deepcopy(setup.outputs)
    setup.wrappers = setup._wrappers()
    return runner_of(setup)


@undoing
def _timed(
    second: Runner[Any],
    undo: Undo,
    batch: Batch,
    served: Dispatch,
    values: Any,
    updates: Any,
    metadata: Any,
    depth: int | None,
) -> LayerTimes:
    graphs, executor, platform = second.graphs, second._executor, second.platform
    platform.synchronize()
    key = served.mode, served.descriptor
    marks = _Marks(platform, depth)
    with listening(platform, marks, eagerly=True):
        second._in_turn(lambda: RunnerCapture(graphs).run([key], more=True))
    dispatch = next((each for each in graphs.dispatcher.published), None)
    if dispatch is None:
        raise ResourceExhaustedError(
            "the device has no room for a second graph",
            got="; ".join(each.reason for each in graphs.dropped),
            advice="a smaller batch, or a run with fewer graphs",
        )
    step = step_of(executor, dispatch)
    if values:
        completed = executor.inputs.completed(batch, values)[1]
        checked = dict(executor.inputs.declared.check(completed, None, None))
        resolved = executor.updates_of(updates)
        step = Step(batch, dispatch, tree.cloned(executor.inputs.nest(checked)), resolved, metadata)
    watch = graphs.checks.runs(graphs.setup)
    undo.later(watch.state.generators.restore)
    undo.later(partial(watch.settle, lambda: None))

    def run(call: Callable[[], object]) -> None:
        try:
            call()
            platform.synchronize()
        finally:
            watch.restore()

    def all_runs() -> list[list[float]]:
        # The first run saves the state that the step writes.
        run(partial(run_watched, executor, step, watch))
        spans = []
        for count in range(_WARM_UP + REPLAYS):
            marks.occupy()
            run(partial(run_by_graph, executor, step))
            spans += [marks.read()] if count >= _WARM_UP else []
        return spans

    spans = second._in_turn(all_runs)
    medians = [statistics.median(each) for each in zip(*spans, strict=True)]
    rows = [
        LayerTime(name, ms)
        for name, ms in zip(marks.names, medians, strict=True)
        if name != _NOTHING
    ]
    # Not the median of sums: beside other processes one span or another of most replays waits.
    total = sum(row.ms for row in rows)
    return LayerTimes(f"{served.mode.name} [{served.descriptor}]", tuple(rows), total)


_NOTHING, _BEFORE, _EAGER_PART = "", "(before)", "(eager part)"


class _Marks(Listener):
    """The marks of one capture, and the names of the spans between them."""

    def __init__(self, platform: Any, depth: int | None) -> None:
        super().__init__()
        self._platform, self._depth = platform, depth
        self.names: list[str] = []
        """What is between each mark and the next one."""
        # The modules that are entered, and those that the forward calls: path -> class.
        self._path: list[str] = []
        self._called: dict[Path, type] = {}
        self._layers: frozenset[Path] | None = None
        # An event for each mark, or on the CPU the memory where each notes its time.
        self._events: list[Any] = []
        self._times = torch.zeros(1 << 14, dtype=torch.int64, device="cpu")
        self._stream: Any = None
        self._count: Callable[[], int] = int
        # How many nodes there were after the last mark.
        self._at_mark = -1

    def begun(self, graph: Any) -> None:
        if self._layers is None:
            self._layers = _chosen(self._called, self._depth)
            deepest = max(map(len, self._called), default=0) - 1
            if self._depth is not None and self._depth > max(deepest, 0):
                raise InvalidOptionError(
                    "no module is called at this depth",
                    got=f"depth={self._depth}",
                    expected=f"at most {max(deepest, 0)}",
                    advice=f"layers(runner, batch, depth={max(deepest, 0)})",
                )
        self._count, self._at_mark = counter(self._platform, graph), -1
        if self._platform.device_type == "cuda":
            self._stream = torch.cuda.current_stream()
        inside = next((path for path in self._open_layers()), None)
        self._mark(_BEFORE if not self.names else f"(in {inside[-1]})" if inside else "(after it)")

    def ending(self, graph: Any) -> None:
        self._mark(_EAGER_PART)
        self._count = int  # modules of an eager part have no marks: it runs outside of graphs

    def dropped(self, graph: Any) -> None:
        self.names.clear()
        self._events.clear()

    def entered(self, module: torch.nn.Module | None) -> None:
        if module is None:
            return
        self._path.append(self.frames[-1])
        if self._layers is None:
            self._called[(*self._path,)] = type(module)
        elif self._is_layer():
            self._mark(self._path[-1])

    def left(self, module: torch.nn.Module | None) -> None:
        if module is None:
            return
        if self._is_layer():
            self._mark(f"(after {self._path[-1]})")
        self._path.pop()

    def _open_layers(self) -> list[Path]:
        paths = [(*self._path[:end],) for end in range(1, len(self._path) + 1)]
        return [path for path in paths if path in (self._layers or ())]

    def _is_layer(self) -> bool:
        """Whether the last module is a layer, in a segment that is open."""
        return (*self._path,) in (self._layers or ()) and self._count is not int

    def _mark(self, name: str) -> None:
        """Set a mark here, behind which `name` begins, unless one is here."""
        if self._at_mark == self._count():
            self.names[-1] = name
            return
        self._platform_mark(name)
        self.names.append(name)
        self._at_mark = self._count()

    def _platform_mark(self, name: str) -> None:
        if self._stream is None:
            if len(self.names) == len(self._times):
                raise InvalidOptionError(
                    "too many layers", got=len(self.names), advice="layers(runner, batch, depth=1)"
                )
            _tick()(self._times, len(self.names))
            return
        now = torch.cuda.current_stream()
        if now != self._stream:
            raise CaptureError(
                "a layer runs on a side stream, beside others: it has no time of its own",
                got=self._path[-1] if self._path else name,
                expected="layers on the stream of the capture",
                advice="layers(runner, batch, depth=) with a module around the fork and the join",
            )
        event = torch.cuda.Event(enable_timing=True, external=True)  # type: ignore[no-untyped-call]
        event.record(now)
        self._events.append(event)

    def occupy(self) -> None:
        """Have the device wait, so that the next replay begins when all of it is launched."""
        if self._stream is not None:
            from graphrt.cuda.private_torch import spin

            if spin is not None:
                spin(_SPIN_CYCLES)

    def read(self) -> list[float]:
        """The milliseconds after each mark, in the last replay; after the last one 0."""
        if self._events:
            spans = [a.elapsed_time(b) for a, b in pairwise(self._events)]
        else:
            spans = [(b - a) / 1e6 for a, b in pairwise(self._times[: len(self.names)].tolist())]
        self.names[-1] = _NOTHING
        return [*spans, 0.0]


def _chosen(called: dict[Path, type], depth: int | None) -> frozenset[Path]:
    """The layers among the modules that a forward calls."""
    if depth is not None:
        return frozenset(path for path in called if len(path) == depth + 1)
    best: Path = ()
    most = 1
    groups = Counter[tuple[Path, type]]()
    several = Counter((path[:-1], kind) for path, kind in called.items())
    for path in called:
        # Each module counts for all groups around it.
        for end in range(1, len(path) + 1):
            groups[path[: end - 1], called[path[:end]]] += 1
    for (parent, kind), modules in groups.items():
        if several[parent, kind] > 1 and modules > most:
            best, most = parent, modules
    if most == 1:
        outermost = [path for path in called if len(path) == 1]
        best = outermost[0] if len(outermost) == 1 else ()
    around = {best[:end] for end in range(len(best) + 1)}
    layers = frozenset(path for path in called if path[:-1] in around and path not in around)
    return layers or frozenset(path for path in called if len(path) == 1)


@cache
def _tick() -> Callable[[torch.Tensor, int], None]:
    """The operator that notes the time on the CPU: a replay repeats it, as it does all others."""
    library: Any = torch.library.Library("graphrt_observe", "FRAGMENT")  # type: ignore[no-untyped-call]
    library.define("tick(Tensor(a!) times, int at) -> ()")

    def tick(times: torch.Tensor, at: int) -> None:
        ctypes.c_int64.from_address(times.data_ptr() + 8 * at).value = time.perf_counter_ns()

    library.impl("tick", tick, "CPU")
    _libraries.append(library)
    call: Callable[[torch.Tensor, int], None] = torch.ops.graphrt_observe.tick.default
    return call


_libraries: list[Any] = []
"""Kept: a library that is freed takes its operators with it."""
