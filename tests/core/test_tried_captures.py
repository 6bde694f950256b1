"""Captures that are tried before a warm-up, on CPUs that say that a failed one costs nothing."""

from __future__ import annotations

import contextlib
import functools
import itertools
import queue
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch

from graphrt import (
    BatchDescriptor,
    ForwardContext,
    GraphMode,
    GraphOptions,
    GraphPool,
    GraphRunner,
    GraphWrapper,
    Host,
    InputSpec,
    KeyedGraphs,
    current_context,
    eager_break,
)
from graphrt.core.base.errors import (
    CaptureError,
    CaptureSyncError,
    RefusedOpError,
    ResourceExhaustedError,
    SideDoorError,
)
from graphrt.core.base.torch_names import dispatch_modes
from graphrt.core.device.contract import Capability, FirstCallError
from graphrt.core.replay.recording import active, current_capture
from graphrt.cpu import CpuPlatform
from graphrt.cpu.graph import TapeGraph

WIDTH = 4
SIZES = [2, 4, 6, 8]


class CountedGraph(TapeGraph):
    """A tape that counts its replays."""

    replays = 0

    def replay(self) -> None:
        type(self).replays += 1
        super().replay()


class Device(CpuPlatform):
    """The CPU, of which a failed capture costs nothing."""

    capabilities = CpuPlatform.capabilities | {Capability.FREE_FAILURES}
    can_upload = True

    def __init__(self) -> None:
        super().__init__()
        self.uploads = 0
        CountedGraph.replays = 0

    def new_graph(self) -> TapeGraph:
        return CountedGraph()

    def upload(self, graph: Any) -> None:
        self.uploads += 1


class Recording(Device):
    """A device that records what is captured, and runs it at replays alone: after a capture the
    tensors of `state` are as before it, and all that the capture made is garbage."""

    capture_executes = False

    def __init__(self, *state: torch.Tensor) -> None:
        super().__init__()
        self.state = state
        self._before: list[torch.Tensor] = []

    def begin_capture(self, graph: Any, memory: Any) -> None:
        self._before = [each.clone() for each in self.state]
        super().begin_capture(graph, memory)

    def end_capture(self, graph: Any) -> bool:
        recorded = super().end_capture(graph)
        self._undo()
        return recorded

    def abort_capture(self, graph: Any) -> None:
        super().abort_capture(graph)
        self._undo()

    def _undo(self) -> None:
        for each, was in zip(self.state, self._before, strict=True):
            each.copy_(was)


def runner_of(
    forward: Callable[..., Any],
    platform: CpuPlatform | None = None,
    mode: str = "FULL",
    host: Host | None = None,
    **options: Any,
) -> GraphRunner:
    return GraphRunner(
        forward,
        mode=mode,
        sizes=SIZES,
        inputs={"x": InputSpec(torch.float32, ("tokens", WIDTH))},
        outputs=("tokens", WIDTH),
        platform=Device() if platform is None else platform,
        options=GraphOptions(**options),
        **({} if host is None else {"host": host}),
    )


class Calls:
    """Doubles its input, and counts runs that are no captures, and captures, by size."""

    def __init__(self) -> None:
        self.eager: list[int] = []
        self.captured: list[int] = []

    def note(self, x: torch.Tensor) -> None:
        (self.captured if current_capture() is not None else self.eager).append(len(x))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        self.note(x)
        return x * 2


def by_calls(runner: GraphRunner) -> None:
    """Capture each size in a session of its own, the largest first."""
    while runner.capture_next():
        pass


def by_steps(runner: GraphRunner) -> None:
    """The same by steps of a runner that is lazy."""
    for size in reversed(SIZES):
        runner(x=torch.ones(size, WIDTH))


def attempts_of(runner: GraphRunner) -> dict[int, int]:
    return {each.descriptor.num_tokens: each.attempts for each in runner.report().graphs}


def report_of(runner: GraphRunner) -> Any:
    """What was captured, in the order of the captures."""
    return runner.report().graphs


def is_right(runner: GraphRunner, forward: Callable[..., torch.Tensor]) -> bool:
    given = [torch.randn(count, WIDTH) for count in (1, 2, 3, 5, 8, 7, 6, 4)]
    return all(torch.equal(runner(x=x), forward(x)) for x in given)


@pytest.mark.parametrize("check", ["off", "capture"])
def test_only_the_largest_size_of_a_kind_is_warmed_up(check):
    seen: list[tuple[bool, int]] = []

    def forward(x):
        note(x)
        return x * 2

    def note(x):
        seen.append((current_capture() is not None, len(x)))

    runner = runner_of(forward, check=check)
    runner.capture()
    sizes = [size for captured, size in seen if captured]
    assert sizes == [8, 6, 4, 2]
    # One watched run at most, and the runs that look for the axes of the outputs.
    assert {size for captured, size in seen if not captured}.isdisjoint({6, 4})
    assert attempts_of(runner) == dict.fromkeys(SIZES, 1)


@pytest.mark.parametrize("warmups", [1, 2])
def test_asked_for_warm_ups_each_size_has_as_many(warmups):
    calls = Calls()

    def forward(x):
        return calls(x)

    runner_of(forward, check="off", warmups=warmups).capture()
    assert [calls.eager.count(size) for size in (8, 6, 4)] == [warmups] * 3


def test_a_platform_that_does_not_say_so_warms_every_size_up():
    calls = Calls()

    def forward(x):
        return calls(x)

    runner_of(forward, CpuPlatform(), check="off").capture()
    assert {6, 4} <= set(calls.eager)


def failing_at_first(error: Callable[[], Exception], sizes: set[int]) -> Callable[..., Any]:
    """A forward whose first call at some sizes raises in a capture."""
    ready: set[int] = set()

    def forward(x):
        if len(x) in sizes and len(x) not in ready:
            if current_capture() is not None:
                raise error()
            ready.add(len(x))
        return x * 2

    return forward


FIRST_CALLS = [
    lambda: CaptureSyncError("the host waited"),
    lambda: FirstCallError("cuBLAS was used for the first time"),
    lambda: ValueError("cannot tune inside of a capture"),
]


@pytest.mark.parametrize("check", ["off", "capture"])
@pytest.mark.parametrize("error", FIRST_CALLS)
def test_a_capture_that_a_first_call_fails_is_warmed_up_and_captured_again(error, check):
    forward = failing_at_first(error, {4})
    runner = runner_of(forward, check=check)
    runner.capture()
    assert attempts_of(runner) == {2: 1, 4: 2, 6: 1, 8: 1}
    assert is_right(runner, forward)


def test_after_two_failures_the_sizes_left_of_a_kind_are_warmed_up_at_once():
    calls = Calls()
    fails = failing_at_first(FIRST_CALLS[0], {6, 4, 2})

    def forward(x):
        calls.note(x)
        return fails(x)

    runner = runner_of(forward, check="off")
    runner.capture()
    assert attempts_of(runner) == {2: 1, 4: 2, 6: 2, 8: 1}
    assert calls.captured == [8, 6, 6, 4, 4, 2]


def test_of_two_attempts_that_fail_the_second_error_is_raised():
    tries: list[int] = []

    def forward(x):
        if len(x) == 4 and current_capture() is not None:
            tries.append(len(x))
            raise CaptureSyncError(f"attempt {len(tries)}")
        return x * 2

    runner = runner_of(forward, check="off")
    with pytest.raises(CaptureSyncError, match="attempt 2"):
        runner.capture()
    assert len(tries) == 2
    # Those before it serve.
    assert runner(x=torch.ones(5, WIDTH)).equal(torch.full((5, WIDTH), 2.0))


@pytest.mark.parametrize(
    "error", [lambda: RefusedOpError("refused"), lambda: CaptureError("unjoined")]
)
def test_a_refusal_that_no_first_call_explains_is_raised_at_once(error):
    tries: list[int] = []

    def forward(x):
        if len(x) == 4 and current_capture() is not None:
            tries.append(len(x))
            raise error()
        return x * 2

    with pytest.raises(CaptureError):
        runner_of(forward, check="off").capture()
    assert len(tries) == 1


def test_a_size_that_has_no_room_is_dropped_and_not_tried_again():
    tries: list[int] = []

    def forward(x):
        if len(x) == 4 and current_capture() is not None:
            tries.append(len(x))
            raise ResourceExhaustedError("no room")
        return x * 2

    runner = runner_of(forward, check="off")
    with pytest.warns(UserWarning, match="1 of 4 graphs"):
        runner.capture()
    assert len(tries) == 1 and attempts_of(runner) == {2: 1, 6: 1, 8: 1}


def test_after_a_first_size_that_has_no_room_the_next_one_is_warmed_up():
    """Nothing is known yet of a capture of its kind."""
    eager: set[int] = set()

    def forward(x):
        if current_capture() is None:
            eager.add(len(x))
        elif len(x) == 8:
            raise ResourceExhaustedError("no room")
        return x * 2

    runner = runner_of(forward, check="off")
    with pytest.warns(UserWarning, match="1 of 4 graphs"):
        runner.capture()
    assert 6 in eager and 4 not in eager


def test_an_interrupted_attempt_is_not_repeated():
    # What a capture has changed in Python is taken back, but no walk knows how far an iterator is.
    tries = itertools.count()

    def forward(x):
        if len(x) == 4 and current_capture() is not None:
            next(tries)
            raise KeyboardInterrupt
        return x * 2

    with pytest.raises(KeyboardInterrupt):
        runner_of(forward).capture()
    assert next(tries) == 1


# What the first call of one size does, is found by its capture ------------------------------------


class Tables:
    """Keeps a table for each size, which the first call of the size makes."""

    def __init__(self) -> None:
        self.tables: dict[int, torch.Tensor] = {}

    def __call__(self, x):
        if len(x) not in self.tables:
            self.tables[len(x)] = torch.arange(float(len(x)))[:, None] * 2
        return x + self.tables[len(x)]


class Attributes(Tables):
    """The same in an attribute for each size."""

    def __call__(self, x):
        name = f"table_{len(x)}"
        if not hasattr(self, name):
            setattr(self, name, torch.arange(float(len(x)))[:, None] * 2)
        return x + getattr(self, name)


class Cached(Tables):
    """The same in a cache of functools; one that has a table of the first size, too."""

    def __init__(self) -> None:
        super().__init__()
        self.table_of = functools.cache(lambda size: torch.arange(float(size))[:, None] * 2)

    def __call__(self, x):
        return x + self.table_of(len(x))


class CachedBySmaller(Cached):
    """The largest size does without."""

    def __call__(self, x):
        return super().__call__(x) if len(x) < 8 else x * 2


class ByClass(Tables):
    """The same in attributes of the class."""

    def __call__(self, x):
        name = f"table_{len(x)}"
        if not hasattr(self, name):
            setattr(type(self), name, torch.arange(float(len(x)))[:, None] * 2)
        return x + getattr(self, name)


class OnWeights(Tables):
    """The same in attributes of a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.ones(WIDTH)

    def __call__(self, x):
        name = f"table_{len(x)}"
        if not hasattr(self.weight, name):
            setattr(self.weight, name, torch.arange(float(len(x)))[:, None] * 2)
        return x * self.weight + getattr(self.weight, name)


class Flags(Tables):
    """Takes another way at the first call of each size."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[int] = set()

    def __call__(self, x):
        is_first = len(x) not in self.seen
        self.seen.add(len(x))
        return x * 3 if is_first else x * 2


@pytest.mark.parametrize("capture", [GraphRunner.capture, by_calls, by_steps])
@pytest.mark.parametrize("platform", [Device, Recording])
@pytest.mark.parametrize(
    "kind", [Tables, Attributes, Cached, CachedBySmaller, ByClass, OnWeights, Flags]
)
def test_a_first_call_of_one_size_is_found_and_warmed_up(kind, platform, capture):
    # Each of a class of its own, as some tables are attributes of that.
    model, twin = (type(kind.__name__, (kind,), {})() for _ in range(2))
    for size in SIZES:
        twin(torch.zeros(size, WIDTH))
    runner = runner_of(model, platform(), lazy=capture is by_steps)
    capture(runner)
    # Its largest size is warmed up, and all of those that have a cache with tensors then, also of
    # a smaller size whose run has found the axes of the outputs.
    is_at_once = capture is GraphRunner.capture
    has_cache = kind is Cached or (kind is CachedBySmaller and not is_at_once)
    assert max(attempts_of(runner).values()) == (1 if has_cache else 2)
    # What changes with the calls of a size is in quarantine anyway.
    for size in SIZES if kind is not Flags else ():
        x = torch.randn(size, WIDTH)
        assert torch.equal(runner(x=x), twin(x))


@pytest.mark.parametrize("capture", [GraphRunner.capture, by_calls])
@pytest.mark.parametrize("platform", [Device, Recording])
def test_a_counter_of_calls_is_no_first_call(platform, capture):
    class Model:
        def __init__(self):
            self.calls = 0

        def __call__(self, x):
            self.calls += 1
            return x * 2

    model = Model()
    runner = runner_of(model, platform())
    capture(runner)
    assert attempts_of(runner) == dict.fromkeys(SIZES, 1)
    assert model.calls == 0


@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE"])
@pytest.mark.parametrize("records", [False, True])
def test_state_that_one_smaller_size_alone_writes_is_put_back(mode, records):
    state = torch.zeros(WIDTH)

    @eager_break
    def part(x):
        return x + 1

    def forward(x):
        if len(x) == 4:
            state.add_(1)
        return part(x * 2) + state

    runner = runner_of(forward, Recording(state) if records else Device(), mode)
    runner.capture()
    assert not state.any()
    x = torch.ones(4, WIDTH)
    assert torch.equal(runner(x=x), torch.full((4, WIDTH), 4.0))
    assert torch.equal(state, torch.ones(WIDTH))


@pytest.mark.parametrize("check", ["off", "capture"])
def test_draws_of_one_smaller_size_alone_are_looked_for_by_a_second_attempt(check):
    seen: list[tuple[int, bool]] = []

    def forward(x):
        context = current_context()
        if context is not None and context.capture is not None:
            seen.append((len(x), context.capture.may_draw))
        if len(x) == 4:
            torch.rand(())
        return x * 2

    runner = runner_of(forward, check=check)
    runner.capture()
    assert attempts_of(runner) == {2: 1, 4: 2, 6: 1, 8: 1}
    # At `off` nothing is known of the first; elsewhere the attempt that failed is taken back.
    first = [(4, False)] if check == "off" else []
    assert seen == [(8, check == "off"), (6, False), *first, (4, True), (2, True)]


class Allocating(Recording):
    """Counts blocks: two for each graph, as of a generator, and those in `kept`."""

    def __init__(self, kept: list[torch.Tensor] | deque[torch.Tensor]) -> None:
        super().__init__()
        self.kept = kept
        self.graphs = 0

    def end_capture(self, graph: Any) -> bool:
        self.graphs += 1
        return super().end_capture(graph)

    def allocations(self) -> int:
        return 2 * self.graphs + len(self.kept)


def test_memory_that_a_capture_leaves_where_no_walk_looks_is_found():
    kept: queue.Queue[torch.Tensor] = queue.Queue()

    def forward(x):
        if len(x) == 4 and not kept.qsize():
            kept.put(x + 1)
        return x * 2

    runner = runner_of(forward, Allocating(kept.queue))
    runner.capture()
    assert attempts_of(runner) == {2: 1, 4: 2, 6: 1, 8: 1}
    # It cannot be taken back, so it gets the values of the call.
    assert CountedGraph.replays == 1 and torch.equal(kept.get(), torch.ones(4, WIDTH))


def test_a_part_of_a_smaller_size_that_leaves_a_tensor_in_a_queue_is_refused():
    kept: queue.Queue[torch.Tensor] = queue.Queue()

    @eager_break
    def part(x):
        if len(x) == 4:
            while kept.qsize():
                kept.get()
            kept.put(x.new_ones(1))
        return x + 1

    def forward(x):
        return part(x + kept.queue[0] if len(x) == 4 and kept.qsize() else x)

    with pytest.raises(SideDoorError, match="made again at every step"):
        runner_of(forward, mode="PIECEWISE").capture()


def test_a_number_that_an_operator_is_given_is_not_recorded_as_a_tensor():
    """`0.1` as a tensor of float32 is another number beside float64."""
    state = torch.ones((), dtype=torch.float64)

    @eager_break
    def part(x):
        return x + 1

    def forward(x):
        return part(x) * torch.mul(state, 0.1, out=torch.empty_like(state))

    runner = runner_of(forward, mode="PIECEWISE")
    runner.capture()
    assert set(attempts_of(runner).values()) == {1, 2}
    x = torch.ones(4, WIDTH)
    assert torch.equal(runner(x=x), forward(x))


# Sessions after the first -------------------------------------------------------------------------


@pytest.mark.parametrize("check", ["off", "capture"])
@pytest.mark.parametrize("capture", [GraphRunner.capture, by_calls, by_steps])
def test_later_sessions_try_the_sizes_that_the_first_warm_up_has_told_of(capture, check):
    runner = runner_of(lambda x: x * 2, check=check, lazy=capture is by_steps)
    for _ in range(2):
        capture(runner)
        warm_ups = {each.descriptor.num_tokens: each.warm_up_s > 0 for each in report_of(runner)}
        assert warm_ups == {8: True, 6: False, 4: False, 2: False}
        # Nothing is known any more.
        runner.release()


def test_a_larger_size_than_was_warmed_up_is_warmed_up():
    runner = runner_of(lambda x: x * 2, lazy=True)
    for size in (4, 2, 8, 6):
        runner(x=torch.ones(size, WIDTH))
    warm_ups = {each.descriptor.num_tokens: each.warm_up_s > 0 for each in report_of(runner)}
    assert warm_ups == {4: True, 2: False, 8: True, 6: False}


def test_after_a_release_the_first_size_is_warmed_up():
    runner = runner_of(lambda x: x * 2, lazy=True, check="off")
    for size in (8, 4):
        runner(x=torch.ones(size, WIDTH))
        assert report_of(runner)[0].warm_up_s > 0
        runner.release()


def test_memory_that_every_call_writes_is_no_table_of_a_later_session():
    class Model:
        def __init__(self):
            self.calls, self.last = 0, torch.zeros(8, WIDTH)

        def __call__(self, x):
            self.calls += 1
            self.last[: len(x)] = x
            return x * 2

    model = Model()
    runner = runner_of(model)
    by_calls(runner)
    assert attempts_of(runner) == dict.fromkeys(SIZES, 1)
    assert model.calls == 0 and not model.last.any()


@pytest.mark.parametrize("capture", [by_calls, by_steps])
def test_two_failures_in_earlier_sessions_count(capture):
    runner = runner_of(
        failing_at_first(FIRST_CALLS[0], {6, 4, 2}), check="off", lazy=capture is by_steps
    )
    capture(runner)
    assert attempts_of(runner) == {2: 1, 4: 2, 6: 2, 8: 1}


@pytest.mark.parametrize("capture", [GraphRunner.capture, by_calls])
def test_a_number_that_a_part_keeps_of_padding_is_put_back_by_each_session(capture):
    class Model:
        scale = 0.0

        def __call__(self, x):
            return self.part(x * 2)

        @eager_break
        def part(self, x):
            self.scale = self.scale or float(len(x))
            return x * self.scale

    model = Model()
    runner = runner_of(model, mode="PIECEWISE")
    capture(runner)
    assert model.scale == 0.0
    assert torch.equal(runner(x=torch.ones(4, WIDTH)), torch.full((4, WIDTH), 8.0))


@pytest.mark.parametrize("error", [KeyboardInterrupt, RefusedOpError, CaptureSyncError])
@pytest.mark.parametrize("capture", [GraphRunner.capture, by_calls, by_steps])
@pytest.mark.parametrize("platform", [Device, Recording])
def test_a_tried_capture_that_fails_leaves_nothing_half_done(platform, capture, error):
    state = torch.zeros(WIDTH)

    class Model(Tables):
        def __init__(self):
            super().__init__()
            self.calls, self.fails = 0, True

        def __call__(self, x):
            self.calls += 1
            state.add_(1)
            result = super().__call__(x) + state
            if len(x) == 4 and self.fails and current_capture() is not None:
                raise error("at four")
            return result

    model = Model()
    device = platform() if platform is Device else platform(state)
    runner = runner_of(model, device, lazy=capture is by_steps, check="capture")
    if capture is by_steps:
        for size in (8, 6):
            runner(x=torch.zeros(size, WIDTH))
    before, calls = state.clone(), model.calls
    with pytest.raises(error):
        runner(x=torch.ones(4, WIDTH)) if capture is by_steps else capture(runner)
    assert torch.equal(state, before) and model.calls == calls
    # Others had a table from their warm-up, which a first call would have made.
    assert 4 not in model.tables or error is not KeyboardInterrupt
    assert not dispatch_modes() and active.get() is None and current_context() is None
    # Those before it serve, and its batches too: by a larger graph.
    assert [each.descriptor.num_tokens for each in report_of(runner)] == [8, 6]
    model.fails = False
    x = torch.randn(4, WIDTH)
    expected = x + torch.arange(6.0)[:4, None] * 2 + (before + 1)
    assert torch.equal(runner(x=x), expected)
    assert torch.equal(state, before + 1)


# Replays of captures ------------------------------------------------------------------------------


def test_a_sessions_capture_is_uploaded_and_not_replayed():
    platform = Recording()
    runner = runner_of(lambda x: x * 2, platform)
    runner.capture()
    assert (CountedGraph.replays, platform.uploads) == (0, len(SIZES))
    assert is_right(runner, lambda x: x * 2)


def test_segments_before_eager_parts_are_replayed_and_the_last_is_not():
    platform = Recording()
    given: list[float] = []

    @eager_break
    def part(x):
        given.append(float(x.sum()))
        return x + 1

    runner = runner_of(lambda x: part(x + 2) * 2, platform, "PIECEWISE")
    runner.capture()
    assert (CountedGraph.replays, platform.uploads) == (len(SIZES), len(SIZES))
    assert 0.0 not in given


def test_a_capture_that_leaves_its_tensor_in_python_is_replayed():
    class Model:
        last = torch.zeros(1)

        def __call__(self, x):
            self.last = x + 1
            return self.last * 2

    platform = Recording()
    with contextlib.suppress(UserWarning):
        runner_of(Model(), platform).capture()
    assert CountedGraph.replays >= len(SIZES)


def test_at_off_nothing_tells_what_a_capture_leaves_so_it_is_replayed():
    platform = Recording()
    runner_of(lambda x: x * 2, platform, check="off").capture()
    assert (CountedGraph.replays, platform.uploads) == (len(SIZES), 0)


@pytest.mark.parametrize("uses_results", [True, False])
def test_a_host_that_uses_no_results_says_so_for_its_session(uses_results):
    platform = Recording()
    x, pool = torch.ones(2, WIDTH), GraphPool(platform)
    graphs = KeyedGraphs(pool)
    with pool.capture_session(uses_results=uses_results):
        graphs.capture("in it", lambda: x * 2)
    assert (CountedGraph.replays, platform.uploads) == ((1, 0) if uses_results else (0, 1))
    graphs.capture("after it", lambda: x * 2)
    assert CountedGraph.replays == 1 + uses_results


@pytest.mark.parametrize("uses_results", [True, False])
def test_pieces_too_are_not_replayed_at_their_capture_for_such_a_host(uses_results):
    """vLLM's custom all-reduce gets the addresses of other ranks' memory after all captures: a
    piece that is replayed before reads any address."""
    platform = Recording()
    x, pool = torch.ones(2, WIDTH), GraphPool(platform)
    context = ForwardContext(GraphMode.PIECEWISE, BatchDescriptor(2))
    piece = GraphWrapper(
        lambda x: x * 2,
        GraphMode.PIECEWISE,
        pool=pool,
        options=GraphOptions(lazy=True),
        read_context=lambda: context,
    )
    with pool.capture_session(uses_results=uses_results):
        context.begin_step()
        piece(x)
    assert (CountedGraph.replays, platform.uploads) == ((1, 0) if uses_results else (0, 1))
    context.begin_step()
    assert piece(x).tolist() == (x * 2).tolist()


@pytest.mark.parametrize("uses_results", [True, False])
def test_no_segment_of_a_breakable_graph_is_replayed_at_its_capture_for_such_a_host(uses_results):
    """Each segment between two attentions has such all-reduces."""
    platform = Recording()
    x, pool = torch.ones(2, WIDTH), GraphPool(platform)
    scale = eager_break(lambda x: x * 3)
    context = ForwardContext(GraphMode.PIECEWISE, BatchDescriptor(2))
    forward = GraphWrapper(
        lambda x: scale(scale(x * 2) + 1) + 1,
        GraphMode.PIECEWISE,
        pool=pool,
        options=GraphOptions(lazy=True),
        read_context=lambda: context,
        breakable=True,
    )
    with pool.capture_session(uses_results=uses_results):
        context.begin_step()
        forward(x)
    assert (CountedGraph.replays, platform.uploads) == ((3, 0) if uses_results else (0, 3))
    context.begin_step()
    assert forward(x).tolist() == ((x * 2 * 3 + 1) * 3 + 1).tolist()


# The second watched run ---------------------------------------------------------------------------


def runs_of(write: Callable[[torch.Tensor, torch.Tensor], object]) -> int:
    """How many runs of the largest size a capture makes of a forward that writes a cache."""
    # No walk knows how far an iterator is.
    runs = itertools.count()
    cache = torch.zeros(32, WIDTH)

    def forward(x, slots):
        if current_capture() is None and len(x) == 8:
            next(runs)
        write(cache, slots)
        return x * 2

    runner = GraphRunner(
        forward,
        mode="FULL",
        sizes=[8],
        inputs={
            "x": InputSpec(torch.float32, ("tokens", WIDTH)),
            "slots": InputSpec(torch.int64, ("tokens",), pad=31, index=True),
        },
        outputs=("tokens", WIDTH),
        platform="cpu",
    )
    runner.capture()
    return next(runs)


def test_a_cache_written_at_the_rows_of_an_index_input_needs_one_watched_run():
    assert runs_of(lambda cache, slots: cache.index_put_((slots,), torch.ones(8, WIDTH))) == 1
    assert runs_of(lambda cache, slots: cache.index_fill_(0, slots + 0, 1.0)) == 1


def test_a_cache_that_is_written_elsewhere_is_watched_twice():
    assert runs_of(lambda cache, slots: cache[:8].fill_(1.0)) == 2
    rows = torch.arange(8)
    assert runs_of(lambda cache, slots: cache.index_fill_(0, rows, 1.0)) == 2
