"""The compiled step in C gives the same results and errors as the step in Python."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.core.native_build import LOAD, run

STEPS = f"""{LOAD}
from tests.core import native_replays
native_replays.main(int(sys.argv[1]))
"""


@pytest.mark.parametrize("programs", [8, pytest.param(60, marks=pytest.mark.long)])
def test_random_steps_and_faults_give_equal_results_in_c_and_python(
    built: Path, programs: int
) -> None:
    for each in run(STEPS, programs, built).rpartition("fast: ")[2].split(" and "):
        fast, _, steps = each.split()
        assert int(fast) > int(steps) / 5, each


GRADED = f"""{LOAD}
import torch
from graphrt import GraphRunner, InputSpec, Reason
from graphrt.core.replay import handout
from graphrt.core.runner import engine, graph_table
from tests.core.soft_ring import RingPlatform

handout.can_mark_unreadable, handout.mark_unreadable = True, lambda *_: None
native = graph_table.NativeReplay
assert native is module.Replay
for kind in None, native:
    graph_table.NativeReplay = kind
    engine.NativePath = kind and module.Path
    runner = GraphRunner(
        lambda x, ids: x * 2 + ids[:, None],
        inputs={{
            "x": InputSpec(torch.float32, ("tokens", 2)), "ids": InputSpec(torch.int64, ("tokens",))
        }},
        outputs=("tokens", 2), sizes=[4], mode="FULL", platform=RingPlatform(),
    )
    runner.capture()
    found = []
    for needs in (0, 0, 0, 1, 0, 1, 1, 0):
        x, ids = torch.randn(4, 2, requires_grad=bool(needs)), torch.arange(4)
        for around in (torch.enable_grad, torch.no_grad):
            with around():
                out = runner(x=x, ids=ids)
            assert torch.equal(out.detach(), x.detach() * 2 + ids[:, None])
            assert runner.last_dispatch.reason is Reason.HIT
            found.append(int(out.requires_grad))
    print(*found)
"""


@pytest.mark.trust
def test_inputs_that_require_gradients_are_served_alike_in_c_and_python(built: Path) -> None:
    expected = "0 0 0 0 0 0 1 0 0 0 1 0 1 0 0 0"
    assert run(GRADED, built).splitlines() == [expected, expected]


NESTED = f"""{LOAD}
import gc, torch, warnings
from graphrt import Batch, GraphOptions, GraphRunner, InputSpec, Reason
from graphrt.core.replay.pool import GraphPool
from graphrt.core.replay import handout
from graphrt.core.runner import engine, graph_table
from graphrt.errors import GraphQuarantinedWarning, GraphRTError, PoolBusyError
from tests.core.soft_ring import RingPlatform

handout.can_mark_unreadable, handout.mark_unreadable = True, lambda *_: None
native, x = graph_table.NativeReplay, torch.ones(8)
two, five = Batch(8, 2), Batch(8, 5)
assert native is module.Replay
# Of steps under other settings.
warnings.simplefilter("ignore", GraphQuarantinedWarning)

def made(kind):
    graph_table.NativeReplay = kind
    engine.NativePath = kind and module.Path
    runner = GraphRunner(
        lambda x: x * 2, inputs={{"x": InputSpec(torch.float32, ("tokens",))}}, outputs=("reqs",),
        sizes=[8], mode="FULL", platform=RingPlatform(),
        options=GraphOptions(inputs_in_graph=True, check="off"),
    )
    todo = []

    def read_stream_id():
        while todo:
            todo.pop()()
        return 0

    streams = runner.pool.streams
    streams.read_id, streams.last_id = read_stream_id, 0
    runner.capture()
    for _ in range(3):
        runner(two, x=x), runner(five, x=x)
    return runner, todo

def in_the_look_for_the_stream(runner, todo):
    todo.append(lambda: runner(five, x=x))
    try:
        runner(two, x=x)
    except PoolBusyError:
        assert runner.pool.owner is None
        return "busy", len(runner(two, x=x))

def where_a_batch_is_compared(runner, todo):
    class Steps:
        def __hash__(self):
            return 3

        def __eq__(self, other):
            if todo:
                todo.pop()()
            return type(other) is Steps

    def steps():
        try:
            runner(five, x=x)
        except PoolBusyError:
            busy.append(len(busy))

    busy, batches = [], [Batch(8, 2, variant=Steps()) for _ in range(3)]
    found = []
    for batch in batches:
        todo[:] = [steps]
        found.append(len(runner(batch, x=x)))
    return found, busy, runner.dispatcher.counts()[Reason.HIT]

def where_a_batch_cannot_be_compared(runner, todo):
    class Wrong:
        def __hash__(self):
            return 3

        def __eq__(self, other):
            raise errors.pop()

    found, errors = [], []
    for kind in ValueError, ZeroDivisionError, KeyboardInterrupt:
        errors[:] = [kind("told")] * 4
        for _ in range(2):
            try:
                found.append(len(runner(Batch(8, 2, variant=Wrong()), x=x)))
            except (ValueError, ZeroDivisionError, KeyboardInterrupt) as error:
                found.append(type(error).__name__)
            assert runner.pool.owner is None
        found.append(len(runner(two, x=x)))
    return found

def where_garbage_is_collected(runner, todo):
    class Dies:
        def __del__(self):
            try:
                runner.pool.close()
            except PoolBusyError:
                pass

    found = set()
    for later in range(1, 15):
        runner, _ = made(graph_table.NativeReplay)
        runner(two, x=x)
        gc.collect()
        dies = Dies()
        dies.cycle = dies
        del dies
        # Wherever garbage ends the pool, a graph that is gone with it is not replayed.
        gc.set_threshold(gc.get_count()[0] + later)
        try:
            found.add(len(runner(two, x=x)))
        except GraphRTError as error:
            found.add(type(error).__name__)
        gc.set_threshold(100_000)
    return found - {{2, "PoolClosedError"}}

def in_a_capture(runner, todo):
    outer = GraphRunner(
        lambda x: runner(five, x=x).sum() + x,
        inputs={{"x": InputSpec(torch.float32, ("tokens",))}}, outputs=("tokens",),
        sizes=[8], mode="FULL", options=GraphOptions(check="off"),
    )
    before = runner.report().live_tokens
    outer.capture()
    return outer(x=x).tolist(), runner.report().live_tokens - before

def where_a_lazy_step_could_not_capture(runner, todo):
    lazy = GraphRunner(
        lambda x: x * 2, inputs={{"x": InputSpec(torch.float32, ("tokens",))}},
        outputs=("tokens",), sizes=[4, 8], mode="FULL", options=GraphOptions(lazy=True),
    )
    lazy(x=x)
    found = []
    for other_settings in True, False, False:
        with torch.autocast("cpu", enabled=other_settings):
            lazy(Batch(3, 3), x=x[:3])
        found.append(lazy.last_dispatch.slot)
    return found

def in_a_pool_of_the_host(runner, todo):
    class Owned(GraphPool):
        # Python's way reads and writes it by its name.
        owner = property(lambda self: self.now, lambda self, owner: setattr(self, "now", owner))

    hosts = GraphRunner(
        lambda x: x * 2, inputs={{"x": InputSpec(torch.float32, ("tokens",))}},
        outputs=("tokens",), sizes=[8], mode="FULL", pool=Owned(RingPlatform()),
        options=GraphOptions(inputs_in_graph=True),
    )
    hosts.capture()
    return sum(hosts(five, x=x).sum().item() for _ in range(4)), hosts.pool.now

gc.set_threshold(100_000)
for nested in (
    in_the_look_for_the_stream, where_a_batch_is_compared, where_a_batch_cannot_be_compared,
    where_garbage_is_collected, in_a_capture, where_a_lazy_step_could_not_capture,
    in_a_pool_of_the_host,
):
    by_python, by_c = nested(*made(None)), nested(*made(native))
    assert by_python == by_c, (nested, by_python, by_c)
    print(by_c)
"""


@pytest.mark.trust
def test_nested_and_interrupted_steps_behave_alike_in_c_and_python(built: Path) -> None:
    assert run(NESTED, built).splitlines() == [
        "('busy', 2)",
        "([8, 8, 8], [0, 1, 2], 6)",
        f"{[8, 8, 2, *2 * ['ZeroDivisionError'], 2, *2 * ['KeyboardInterrupt'], 2]}",
        "set()",
        f"({[17.0] * 8}, 0)",
        "[-1, 1, 1]",
        "(64.0, None)",
    ]
