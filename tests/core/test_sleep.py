"""`GraphPool.suspend` and `resume`: the host takes the pages of a pool, and gives them back."""

from __future__ import annotations

import ctypes
import gc
import mmap
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch

from graphrt import (
    BatchDescriptor,
    GraphMode,
    GraphOptions,
    GraphPool,
    GraphRunner,
    GraphWrapper,
    InputSpec,
    KeyedGraphs,
    Reason,
    eager_break,
    forward_context,
)
from graphrt.cpu import CpuPlatform
from graphrt.errors import (
    GraphsDroppedWarning,
    InvalidOptionError,
    MissingCapabilityError,
    PoolAsleepError,
    PoolBusyError,
    PoolClosedError,
    PoolError,
    RefusedOpError,
)
from tests.core.test_pool_memory import Memory

WIDTH = 8
WEIGHT = torch.randn(WIDTH, WIDTH)

pytestmark = pytest.mark.skipif(
    not hasattr(mmap, "MADV_DONTNEED"), reason="pages of an address are given back by madvise()"
)


def take_pages(pool: GraphPool) -> None:
    """Give the pages of a CPU pool to the system: they are read as zeros from then on."""
    arenas = pool._memories()
    arenas += [arena._constants for arena in arenas if arena._constants is not None]
    for chunk in (chunk for arena in arenas for chunk in arena._chunks):
        chunk.buffer.obj.madvise(mmap.MADV_DONTNEED)


def sleeping_pool(platform: Any = "cpu") -> GraphPool:
    return GraphPool(platform, around_memory=nullcontext)


def with_constant(x: torch.Tensor) -> torch.Tensor:
    hidden = torch.tanh(x @ WEIGHT)
    return hidden + torch.tensor([1.0, 2.0, 3.0, 4.0] * 2)


def runner_in(
    pool: GraphPool,
    forward: Callable[..., Any] = with_constant,
    mode: str = "FULL",
    **options: Any,
) -> GraphRunner[torch.Tensor]:
    return GraphRunner(
        forward,
        mode=mode,
        sizes=[1, 2, 4],
        inputs={"x": InputSpec(torch.float32, ("rows", WIDTH))},
        outputs=("rows", WIDTH),
        options=GraphOptions(**options),
        pool=pool,
    )


def assert_replays(runner: GraphRunner[torch.Tensor], forward: Any = with_constant) -> None:
    for rows in (1, 2, 3, 4):
        x = torch.randn(rows, WIDTH)
        assert torch.allclose(runner(x=x), forward(x))
        assert runner.last_dispatch is not None and runner.last_dispatch.reason is Reason.HIT


# What comes back ----------------------------------------------------------------------------------


@eager_break
def doubled(hidden: torch.Tensor) -> torch.Tensor:
    return hidden * 2


def in_pieces(x: torch.Tensor) -> torch.Tensor:
    return doubled(with_constant(x)) + torch.ones(WIDTH)


@pytest.mark.parametrize("outputs", ["pool", "static", "clone"])
@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE", "FULL_AND_PIECEWISE"])
def test_graphs_replay_after_fifty_sleeps_without_a_capture(mode, outputs):
    pool = sleeping_pool()
    with runner_in(pool, in_pieces, mode, outputs=outputs) as runner:
        runner.capture()
        captures, held = pool.captures, pool.bytes()
        for _ in range(50):
            pool.suspend()
            take_pages(pool)
            assert pool.asleep
            assert pool.resume() == ()
            assert not pool.asleep
            assert_replays(runner, in_pieces)
        assert (pool.captures, pool.bytes()) == (captures, held)


def test_static_outputs_of_a_wrapper_keep_their_contents_over_a_sleep():
    pool = sleeping_pool()
    wrapper = GraphWrapper(
        with_constant, "FULL", pool=pool, options=GraphOptions(outputs="static", lazy=True)
    )
    x = torch.randn(2, WIDTH)
    with forward_context(GraphMode.FULL, BatchDescriptor(2)):
        wrapper(x)
    with forward_context(GraphMode.FULL, BatchDescriptor(2)):
        out = wrapper(x)
    expected = out.clone()
    pool.suspend()
    take_pages(pool)
    pool.resume()
    assert torch.equal(out, expected)


def test_a_tensor_that_the_forward_keeps_in_python_has_its_contents_after_a_sleep():
    class Model(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.last = x * 3
            return self.last + 1

    pool, model = sleeping_pool(), Model()
    wrapper = GraphWrapper(model, "FULL", pool=pool, options=GraphOptions(lazy=True))
    x = torch.randn(2, WIDTH)
    with forward_context(GraphMode.FULL, BatchDescriptor(2)):
        wrapper(x)
    pool.suspend()
    take_pages(pool)
    assert not model.last.any()  # the pages are gone
    pool.resume()
    assert torch.equal(model.last, x * 3)


def test_random_numbers_go_on_after_a_sleep():
    def noisy(x: torch.Tensor) -> torch.Tensor:
        return x + torch.rand_like(x)

    pool, x = sleeping_pool(), torch.zeros(2, WIDTH)
    with runner_in(pool, noisy) as runner:
        runner.capture()
        torch.manual_seed(7)
        runner(x=x)
        pool.suspend()
        take_pages(pool)
        pool.resume()
        drawn = runner(x=x).clone()
    torch.manual_seed(7)
    noisy(x)
    assert torch.equal(drawn, noisy(x))


def test_graphs_under_a_limit_sleep_in_all_their_memories():
    pool = sleeping_pool()
    graphs = KeyedGraphs(pool, options=GraphOptions(max_graphs=4))
    inputs = {rows: torch.randn(rows, WIDTH) for rows in (1, 8, 64)}
    for rows, x in inputs.items():
        graphs.run(rows, lambda x=x: with_constant(x))
    assert len(pool._memories()) > 1
    pool.suspend()
    take_pages(pool)
    pool.resume()
    for rows, x in inputs.items():
        assert torch.allclose(graphs[rows].replay(), with_constant(x))


# While it sleeps ----------------------------------------------------------------------------------


def test_steps_captures_and_changes_raise_while_the_pool_sleeps():
    pool = sleeping_pool()
    wrapper = GraphWrapper(with_constant, "FULL", pool=pool)
    keyed, x = KeyedGraphs(pool), torch.randn(2, WIDTH)
    with runner_in(pool) as runner:
        runner.capture()
        keyed.capture("a", lambda: with_constant(x))
        pool.suspend()
        take_pages(pool)

        def call_wrapper() -> None:
            with forward_context(GraphMode.FULL, BatchDescriptor(2)):
                wrapper(x)

        calls: list[Callable[[], object]] = [
            lambda: runner(x=x),
            lambda: runner(
                x=torch.randn(5, WIDTH)
            ),  # no graph has this size: weights may sleep too
            lambda: runner.verify(x=x),
            runner.capture,
            runner.capture_next,
            runner.recapture,
            runner.release,
            runner.weights_changed,
            call_wrapper,
            wrapper.clear_graphs,
            pool.clear_graphs,
            pool.suspend,
            lambda: keyed.replay("a"),
            lambda: keyed.capture("b", lambda: with_constant(x)),
        ]
        for call in calls:
            with pytest.raises(PoolAsleepError, match="sleeps") as raised:
                call()
            assert "resume()" in str(raised.value)
        assert "asleep" not in str(runner.report())  # figures need no turn
        pool.resume()
        assert_replays(runner)
        runner.recapture()
        assert_replays(runner)


def test_a_step_of_another_thread_raises_while_the_pool_sleeps():
    pool, raised = sleeping_pool(), []
    with runner_in(pool) as runner:
        runner.capture()
        pool.suspend()

        def step() -> None:
            try:
                runner(x=torch.randn(2, WIDTH))
            except PoolAsleepError as error:
                raised.append(error)

        thread = threading.Thread(target=step)
        thread.start()
        thread.join()
        pool.resume()
    assert len(raised) == 1


def test_two_runners_of_one_pool_sleep_together_and_a_closed_one_wakes_nobody():
    pool = sleeping_pool()
    target, draft = runner_in(pool), runner_in(pool)
    target.capture()
    draft.capture()
    pool.suspend()
    take_pages(pool)
    for runner in (target, draft):
        with pytest.raises(PoolAsleepError):
            runner(x=torch.randn(2, WIDTH))
    draft.close()
    assert pool.asleep and len(pool.graphs) == 3
    with pytest.raises(PoolAsleepError):
        target(x=torch.randn(2, WIDTH))
    assert pool.resume() == ()
    assert_replays(target)
    target.close()


def test_runner_and_pool_close_while_they_sleep():
    pool = sleeping_pool()
    runner = runner_in(pool)
    runner.capture()
    pool.suspend()
    take_pages(pool)
    runner.close()
    assert not pool.graphs
    pool.close()
    pool.close()
    assert not pool.asleep
    for call in (pool.suspend, pool.resume):
        with pytest.raises(PoolClosedError):
            call()
    with pytest.raises(PoolClosedError):
        runner(x=torch.randn(2, WIDTH))


def test_a_pool_that_is_closed_asleep_destroys_the_graphs_of_its_runners():
    pool = sleeping_pool()
    runner = runner_in(pool)
    runner.capture()
    pool.suspend()
    pool.close()
    assert not runner.report().graphs
    runner.close()


# Wrong orders -------------------------------------------------------------------------------------


def test_resume_without_suspend_and_suspend_of_another_pool_are_refused():
    with pytest.raises(PoolError, match="not asleep"):
        sleeping_pool().resume()
    with pytest.raises(PoolError, match="not made to sleep"):
        GraphPool("cpu").suspend()
    with pytest.raises(InvalidOptionError, match="around_memory"):
        GraphPool("cpu", around_memory="graphs")  # type: ignore[arg-type]


def test_an_around_memory_that_takes_an_argument_or_makes_no_context_is_refused_by_name():
    with pytest.raises(InvalidOptionError, match="'around_memory' is called without arguments"):
        GraphPool("cpu", around_memory=lambda tag: nullcontext())  # type: ignore[arg-type]
    pool = GraphPool("cpu", around_memory=lambda: 3)  # type: ignore[arg-type,return-value]
    with runner_in(pool) as runner, pytest.raises(InvalidOptionError, match="around_memory"):
        runner.capture()


def test_a_pool_in_a_step_does_not_fall_asleep():
    pool, raised = sleeping_pool(), []

    @eager_break
    def sleeping(hidden: torch.Tensor) -> torch.Tensor:
        for call in (pool.suspend, pool.resume):
            with pytest.raises(PoolBusyError) as error:
                call()
            raised.append(error)
        return hidden + 1

    with runner_in(pool, lambda x: sleeping(x * 2) + 1, "PIECEWISE") as runner:
        runner.capture()
        raised.clear()
        runner(x=torch.randn(2, WIDTH))
        assert len(raised) == 2 and not pool.asleep


class Fails(CpuPlatform):
    """The CPU, whose copies fail at the `fails`-th memory."""

    fails = 0

    def save(self, memory: Any) -> Any:
        self.fails -= 1
        if not self.fails:
            raise KeyboardInterrupt
        return super().save(memory)


@pytest.mark.parametrize("fails", [1, 2])
def test_an_interrupt_half_way_through_suspend_leaves_the_pool_awake(fails):
    platform = Fails()
    pool = sleeping_pool(platform)
    with runner_in(pool) as runner:
        runner.capture()
        graphs = KeyedGraphs(pool, options=GraphOptions(max_graphs=2))
        x = torch.randn(2, WIDTH)
        graphs.run(2, lambda: with_constant(x))
        platform.fails = fails
        with pytest.raises(KeyboardInterrupt):
            pool.suspend()
        assert not pool.asleep
        assert_replays(runner)
        assert torch.allclose(graphs[2].replay(), with_constant(x))
        pool.suspend()
        take_pages(pool)
        pool.resume()
        assert_replays(runner)


class Interrupted(CpuPlatform):
    """The CPU, whose first restore is interrupted."""

    restores = 0

    def restore(self, memory: Any, saved: Any) -> bool:
        back = super().restore(memory, saved)
        self.restores += 1
        if self.restores == 1:
            raise KeyboardInterrupt
        return back


def test_a_resume_that_was_interrupted_is_ended_by_the_next():
    pool = sleeping_pool(Interrupted())
    with runner_in(pool) as runner:
        runner.capture()
        pool.suspend()
        take_pages(pool)
        with pytest.raises(KeyboardInterrupt):
            pool.resume()
        assert pool.asleep
        assert pool.resume() == ()
        assert_replays(runner)


class Strange(CpuPlatform):
    """A device that cannot save graph memory."""

    def save(self, memory: Any) -> Any:
        return super(CpuPlatform, self).save(memory)


def test_a_platform_that_cannot_save_memory_says_so():
    pool = sleeping_pool(Strange())
    with runner_in(pool) as runner:
        runner.capture()
        with pytest.raises(MissingCapabilityError, match="save"):
            pool.suspend()
        assert_replays(runner)


# Addresses that did not come back -----------------------------------------------------------------


class Forgetful(CpuPlatform):
    """The CPU, whose memory does not come back after the first sleep."""

    lost = True

    def restore(self, memory: Any, saved: Any) -> bool:
        lost, self.lost = self.lost, False
        return not lost and super().restore(memory, saved)


@pytest.mark.parametrize("again", ["recapture", "capture_next", "capture", "lazy"])
@pytest.mark.parametrize("mode", ["FULL", "FULL_AND_PIECEWISE"])
def test_graphs_whose_memory_did_not_come_back_are_named_and_captured_again(again, mode):
    pool = sleeping_pool(Forgetful())
    runner = runner_in(pool, in_pieces, mode, lazy=again == "lazy")
    runner.capture()
    if again == "lazy":
        runner.release()
        runner(x=torch.randn(4, WIDTH))
    graphs = {f"{graph.mode.name} [{graph.descriptor}]" for graph in runner.report().graphs}
    memory = pool.memory
    pool.suspend()
    take_pages(pool)
    with pytest.warns(GraphsDroppedWarning, match="did not come back") as warned:
        gone = pool.resume()
    assert set(gone) == graphs and all(name in str(warned[0].message) for name in gone)
    assert pool.memory is not memory and not pool.graphs and not runner.report().graphs
    if again != "lazy":
        x = torch.randn(2, WIDTH)
        assert torch.allclose(runner(x=x), in_pieces(x))
        assert runner.last_dispatch is not None and runner.last_dispatch.slot < 0
    if again == "capture_next":
        while runner.capture_next():
            pass
    elif again != "lazy":
        getattr(runner, again)()
    assert_replays(runner, in_pieces)
    pool.suspend()
    take_pages(pool)
    assert pool.resume() == ()
    assert_replays(runner, in_pieces)
    runner.close()
    pool.close()


def test_all_runners_of_a_pool_and_its_size_classes_lose_their_graphs_together():
    pool = sleeping_pool(Forgetful())
    target, draft = runner_in(pool), runner_in(pool)
    graphs = KeyedGraphs(pool, options=GraphOptions(max_graphs=2))
    target.capture()
    draft.capture()
    x = torch.randn(2, WIDTH)
    graphs.run(2, lambda: with_constant(x))
    pool.suspend()
    with pytest.warns(GraphsDroppedWarning):
        pool.resume()
    assert not pool.graphs and not pool.classes
    for runner in (target, draft):
        runner.recapture()
    assert_replays(draft)
    assert_replays(target)


def test_an_empty_pool_loses_nothing_in_silence():
    pool = sleeping_pool(Forgetful())
    with runner_in(pool) as runner, warnings.catch_warnings():
        warnings.simplefilter("error")
        pool.suspend()
        assert pool.resume() == ()
        runner.capture()
        assert_replays(runner)


class Lends(Forgetful):
    """The CPU, with streams to capture on; and what core asked of it, in order."""

    def __init__(self, *, lost: bool = False) -> None:
        super().__init__()
        self.lost = lost
        self.streams: weakref.WeakSet[Any] = weakref.WeakSet()
        self.calls: list[str] = []

    def new_stream(self) -> Any:
        made = type("Stream", (), {})()
        self.streams.add(made)
        return made

    def synchronize(self) -> None:
        self.calls.append("synchronize")

    def save(self, memory: Any) -> Any:
        self.calls.append("save")
        return super().save(memory)

    def restore(self, memory: Any, saved: Any) -> bool:
        self.calls.append("restore")
        return super().restore(memory, saved)

    def reset_graphs(self, graphs: Any) -> None:
        self.calls.append("reset")
        super().reset_graphs(graphs)


@pytest.mark.parametrize("how", ["awake", "asleep", "lost"])
def test_streams_whose_scratch_memory_may_be_gone_are_lent_to_nobody_else(how):
    platform = Lends(lost=how == "lost")
    pool, x = sleeping_pool(platform), torch.randn(2, WIDTH)
    graphs = KeyedGraphs(pool, options=GraphOptions(max_graphs=2))
    graphs.run(2, lambda: with_constant(x))
    if how != "awake":
        pool.suspend()
    if how == "lost":
        with pytest.warns(GraphsDroppedWarning):
            pool.resume()
    pool.close()
    gc.collect()
    assert len(platform.streams) == {"awake": 0, "asleep": 2, "lost": 2}[how]


def test_the_device_is_idle_before_the_copies_and_after_them():
    platform = Lends()
    pool = sleeping_pool(platform)
    pool.suspend()
    pool.resume()
    assert platform.calls == ["synchronize", "save", "restore", "synchronize"]


def test_graphs_that_are_destroyed_in_a_sleep_are_reset_alone():
    """A platform may use the graphs' memory around a reset, as for scratch memory of others."""
    platform = Lends()
    pool = sleeping_pool(platform)
    with runner_in(pool) as runner:
        runner.capture()
        pool.suspend()
        platform.calls.clear()
        pool.close()
        assert platform.calls == [] and not pool.graphs


# The host's context -------------------------------------------------------------------------------


class Around:
    """The context around memory, and how often it was entered and left."""

    def __init__(self) -> None:
        self.entered = self.left = 0
        self.fails = False

    def __enter__(self) -> None:
        if self.fails:
            raise OSError("no tag")
        self.entered += 1

    def __exit__(self, *error: object) -> None:
        self.left = self.entered  # may be called twice

    @property
    def inside(self) -> int:
        return self.entered - self.left


def test_the_context_is_around_segments_and_not_around_eager_parts_or_warm_ups():
    around, seen = Around(), []

    @eager_break
    def part(hidden: torch.Tensor) -> torch.Tensor:
        seen.append(around.inside)
        return hidden * 2

    def forward(x: torch.Tensor) -> torch.Tensor:
        seen.append(around.inside)
        return part(x * 2) + 1

    pool = GraphPool("cpu", around_memory=lambda: around)
    # Trials put back what a forward changes in Python, as this list.
    with runner_in(pool, forward, "PIECEWISE", check="off") as runner:
        runner.capture()
        assert around.entered == around.left == 2 * 3
        # A warm-up, then a capture, of each size.
        assert seen == [0, 0, 1, 0] * 3
        runner(x=torch.randn(2, WIDTH))
        assert around.entered == 2 * 3


def test_the_context_is_left_after_a_capture_that_fails_and_one_that_fails_takes_nothing():
    around, fails = Around(), [True]

    def forward(x: torch.Tensor) -> torch.Tensor:
        if fails and around.inside:
            raise OSError("fails")
        return x * 2

    pool = GraphPool("cpu", around_memory=lambda: around)
    with runner_in(pool, forward) as runner:
        with pytest.raises(OSError, match="fails"):
            runner.capture()
        assert around.entered == around.left >= 1
        fails.clear()
        around.fails = True
        with pytest.raises(OSError, match="no tag"):
            runner.recapture()
        around.fails = False
        runner.recapture()
        assert around.inside == 0
        assert_replays(runner, lambda x: x * 2)


def test_a_context_without_finally_runs_its_last_lines_after_a_good_capture_alone():
    lines: list[str] = []

    @contextmanager
    def around() -> Iterator[None]:
        lines.append("entered")
        yield
        lines.append("left")

    fails: list[bool] = []

    def forward(x: torch.Tensor) -> torch.Tensor:
        if fails:
            raise OSError("fails")
        return x * 2

    pool = GraphPool("cpu", around_memory=around)
    wrapper = GraphWrapper(forward, "FULL", pool=pool, options=GraphOptions(lazy=True))
    with forward_context("FULL", BatchDescriptor(4)):
        wrapper(torch.ones(4))
    assert lines == ["entered", "left"]
    fails.append(True)
    with pytest.raises(OSError, match="fails"), forward_context("FULL", BatchDescriptor(2)):
        wrapper(torch.ones(2))
    assert lines == ["entered", "left", "entered"]


@pytest.mark.parametrize("sleeps", [False, True])
def test_a_custom_all_reduce_that_registers_graph_memory_is_refused_if_it_sleeps(sleeps):
    library = torch.library.Library("_C_custom_ar", "FRAGMENT")
    library.define("all_reduce(int fa, Tensor inp, Tensor! out, int reg_buffer, int nbytes) -> ()")

    def all_reduce(handle: int, inp: Any, out: Any, buffer: int, nbytes: int) -> None:
        out.copy_(inp)

    library.impl("all_reduce", all_reduce, "CPU")

    def reduced(buffer: int) -> Callable[[torch.Tensor], torch.Tensor]:
        def forward(x: torch.Tensor) -> torch.Tensor:
            out = torch.empty_like(x)
            torch.ops._C_custom_ar.all_reduce(1, x * 2, out, buffer, 0)
            return out

        return forward

    try:
        for buffer in (0, 4096):
            pool = sleeping_pool() if sleeps else GraphPool("cpu")
            with runner_in(pool, reduced(buffer)) as runner:
                if sleeps and not buffer:
                    with pytest.raises(RefusedOpError, match="custom all-reduce") as raised:
                        runner.capture()
                    assert "_C_custom_ar.all_reduce" in str(raised.value)
                else:
                    runner.capture()
                    assert_replays(runner, lambda x: x * 2)
    finally:
        library._destroy()


# Memory of a caching allocator --------------------------------------------------------------------


class Pages:
    """Two segments at real addresses, of which blocks are in use; and where there is memory."""

    def __init__(self) -> None:
        self.device = Memory()
        self.handle = self.device.memory.handle()
        self.buffer = ctypes.create_string_buffer(bytes(range(1, 101)), 100)
        self.at = ctypes.addressof(self.buffer)
        self.mapped = True
        self.show([("active_allocated", 16), ("inactive", 34)], [("active_allocated", 50)])

    def show(self, *segments: list[tuple[str, int]]) -> None:
        """Let the allocator have these segments of 50 bytes, one behind the other."""
        self.device.has(*((self.at + 50 * i, 50, self.handle) for i in range(len(segments))))
        for segment, blocks in zip(self.device.segments, segments, strict=True):
            segment["blocks"] = [{"state": state, "size": size} for state, size in blocks]  # type: ignore[index]

    def is_mapped(self, address: int) -> bool:
        return self.mapped

    def save(self) -> Any:
        return self.device.memory.save(torch.device("cpu"), self.is_mapped)

    def restore(self, saved: Any) -> bool:
        return self.device.memory.restore(saved, self.is_mapped)


def test_blocks_in_use_are_saved_and_others_are_not():
    pages = Pages()
    saved = pages.save()
    ctypes.memset(pages.at, 0, 100)
    assert pages.restore(saved)
    expected = bytes(range(1, 17)) + bytes(34) + bytes(range(51, 101))
    assert pages.buffer.raw == expected


def test_blocks_that_came_into_use_without_a_new_segment_are_saved():
    pages = Pages()
    pages.device.memory.bytes()
    pages.device.segments[0]["blocks"][1]["state"] = "active_allocated"
    saved = pages.save()
    ctypes.memset(pages.at, 0, 100)
    assert pages.restore(saved)
    assert pages.buffer.raw == bytes(range(1, 101))


def test_memory_is_lost_if_a_segment_is_gone_or_has_no_pages():
    pages = Pages()
    saved = pages.save()
    pages.mapped = False
    assert not pages.restore(saved)
    pages.mapped = True
    pages.show([("active_allocated", 50)])
    assert not pages.restore(saved)


def test_a_driver_that_never_knows_of_memory_loses_no_graph():
    pages = Pages()
    pages.mapped = False
    saved = pages.save()
    assert pages.restore(saved)
