"""The input ring on the host: each step reads its own inputs through failures and device lag."""

from __future__ import annotations

import random
import threading
import time
import warnings
from collections.abc import Callable
from contextlib import suppress

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from graphrt import Batch, GraphOptions, GraphPool, GraphRunner, Host, InputSpec
from graphrt.core.base._native_door import NativeWriter
from graphrt.core.inputs.buffers import StaticInputs
from graphrt.core.inputs.transport import Slab, Sources
from graphrt.cuda.ring.format import RingFormat
from graphrt.cuda.ring.slots import SlotRing
from graphrt.cuda.ring.writers import learn
from graphrt.errors import InputRingWarning, InvalidInputError, StaleInputError
from tests.core.ring_steps import Log, mixed_steps
from tests.core.soft_ring import RingPlatform, SoftRing

NBYTES = 32
compiled = pytest.mark.skipif(
    NativeWriter is None, reason="native/ is not built; test_native.py runs this with it"
)


class Lagging:
    """A ring over a device that does what it was given when it is let, and notes what it saw."""

    def __init__(self, slots: int) -> None:
        slab = torch.zeros(256, dtype=torch.uint8)
        self.device = SoftRing(slab, slots, NBYTES, 4)
        self.ring = SlotRing(self.device, NBYTES, 4)
        self.device.lag = True
        self.slab = slab
        self.fetch = self.device.prepare(NBYTES, 4)
        self.seen: list[int] = []
        self.given: list[int] = []

    def write(self, value: int) -> int:
        """The slot of the next step; returns its first word."""
        word, start = self.ring.take()
        self.device.memory[start : start + 8].view(torch.int64).fill_(value)
        return word

    def note(self) -> None:
        self.seen.append(int(self.slab[:8].view(torch.int64)))

    def launch(self) -> None:
        """What replays a graph: its fetch, and then what reads the inputs."""
        self.fetch()
        self.device.enqueue(self.note)

    def step(self, value: int, *, alone: bool, fails: str = "") -> None:
        word = self.write(value)
        if fails == "written":
            raise ArithmeticError
        if alone:
            self.ring.give(self.launch, word, RingFormat.WHOLE, False)
        else:
            self.ring.give(self.launch, word, RingFormat.WHOLE, True)
            if fails == "before":
                raise ArithmeticError
            self.launch()
        if fails == "after":
            # It was launched, and nobody counted it.
            self.given.append(value)
            self.ring.unsure = self.ring.unsure or alone
            raise ArithmeticError
        if not alone:
            self.ring.launched()
        self.given.append(value)


ACTIONS = st.one_of(
    st.tuples(st.just("step"), st.booleans(), st.sampled_from(["", "", "written", "before"])),
    st.tuples(st.just("step"), st.just(False), st.just("after")),
    st.tuples(st.just("device"), st.integers(1, 5), st.just("")),
    st.tuples(st.just("nothing"), st.booleans(), st.just("")),
    st.tuples(st.just("resync"), st.booleans(), st.just("")),
)


@settings(max_examples=200)
@given(st.integers(2, 5), st.lists(ACTIONS, max_size=60))
def test_any_order_of_steps_failures_and_device_lag_gives_each_step_its_inputs(slots, actions):
    lagging = Lagging(slots)
    for number, (action, argument, fails) in enumerate(actions):
        if action == "step":
            full = lagging.ring.count - lagging.ring.words[RingFormat.PROGRESS] >= slots
            if full and not lagging.ring.unsure:
                lagging.device.run(2)
            with suppress(ArithmeticError):
                lagging.step(number + 1, alone=argument, fails=fails)
        elif action == "device":
            lagging.device.run(argument)
        elif action == "nothing":
            # A capture, whose graph fetches a slot that moves nothing.
            full = lagging.ring.count - lagging.ring.words[RingFormat.PROGRESS] >= slots
            if full:
                lagging.device.run()
            lagging.ring.give_nothing(lagging.fetch)
            if argument:
                lagging.ring.fetch_pending()
        else:
            lagging.ring.resync()
    lagging.ring.resync()
    lagging.device.run()
    assert lagging.seen == lagging.given
    assert lagging.ring.words[RingFormat.FAULT] == 0
    assert lagging.ring.count == lagging.device.counter.value


def test_the_host_waits_and_counts_a_wait_only_for_slots_the_device_still_reads():
    lagging = Lagging(3)
    for value in range(3):
        lagging.step(value, alone=True)
    assert lagging.ring.waits == 0

    def later() -> None:
        time.sleep(0.05)
        lagging.device.run(2)

    thread = threading.Thread(target=later)
    thread.start()
    lagging.step(3, alone=True)
    thread.join()
    assert lagging.ring.waits == 1
    lagging.device.run()
    assert lagging.seen == [0, 1, 2, 3]


def test_a_device_error_while_the_host_waits_for_a_slot_is_raised(monkeypatch):
    lagging = Lagging(2)
    monkeypatch.setattr("graphrt.cuda.ring.slots._PATIENCE_S", 0.02)
    for value in range(2):
        lagging.step(value, alone=True)

    def dies() -> None:
        raise RuntimeError("the device is lost")

    monkeypatch.setattr(lagging.device, "wait", dies)
    with pytest.raises(RuntimeError, match="the device is lost"):
        lagging.step(2, alone=True)


def test_a_replay_outside_of_a_step_raises_at_the_next_step():
    lagging = Lagging(4)
    lagging.step(1, alone=True)
    lagging.launch()
    lagging.device.run()
    with pytest.raises(StaleInputError, match="never written"):
        lagging.step(2, alone=True)
    for value in (2, 3):
        lagging.step(value, alone=False)
    lagging.device.run()
    assert lagging.seen == [1, 1, 2, 3]


def test_a_device_that_does_not_fetch_gives_a_warning_and_copied_inputs():
    class Broken(RingPlatform):
        def new_ring(self, *args):
            ring = super().new_ring(*args)
            ring.fetch = lambda *args: None
            return ring

    specs = {"x": InputSpec(torch.int64, ("tokens",))}
    with pytest.warns(InputRingWarning, match="did not fetch the first slot"):
        inputs = StaticInputs(
            specs, platform=Broken(), tokens=4, reqs=4, device="cpu", fetched=True
        )
    assert inputs.transport.ring is None
    layout = inputs.layout(4, 4)
    inputs.fill({"x": torch.arange(3)}, layout, 3, 3)
    assert layout.views["x"].tolist() == [0, 1, 2, 0]


def test_a_deleted_rings_memory_is_kept_until_the_device_has_finished_reading():
    from graphrt.cuda.ring import slots as module

    lagging = Lagging(4)
    lagging.step(5, alone=True)
    device = lagging.device
    kept = [memory.data_ptr() for memory, _ in module._retired]
    assert device.memory.data_ptr() not in kept
    del lagging.ring
    assert device.memory.data_ptr() in [memory.data_ptr() for memory, _ in module._retired]
    device.run()
    Lagging(2)
    assert device.memory.data_ptr() not in [memory.data_ptr() for memory, _ in module._retired]


@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE", "FULL_AND_PIECEWISE"])
def test_mixed_steps_read_their_own_inputs_across_aborts_and_recaptures(mode):
    platform = RingPlatform()
    log = Log(platform, "cpu", 600, mode=mode)
    assert log.runner.inputs.transport.ring is not None
    assert mixed_steps(log, 600, 3, aborts=0.1, recaptures=0.01, slots=0.3) > 20
    ring = platform.rings[-1]
    # Steps that a graph serves launch no fetch of their own.
    assert ring.counter.value > 400 > ring.launches


def test_a_runner_without_inputs_in_graph_makes_no_ring():
    platform = RingPlatform()
    log = Log(platform, "cpu", 50, inputs_in_graph=False)
    mixed_steps(log, 50, 4)
    assert log.runner.inputs.transport.ring is None
    assert platform.rings == []


def test_inputs_are_fetched_before_a_bind_that_reads_or_writes_them():
    seen: list[int] = []

    def bind(buffers, descriptor, phase):
        if phase in ("replay", "eager"):
            seen.append(int(buffers["step"]))
            buffers["flags"].add_(1)

    log, rng = Log(RingPlatform(), "cpu", 100, mode="FULL", bind=bind), random.Random(0)
    for step in range(100):
        log.run(rng, step)
    assert seen == list(range(1, 101))
    assert log.runner.inputs.transport.ring.pending is None
    flags, tokens = log.rows[1:, 2], log.rows[1:, 1] // log.width
    assert bool((flags >= log.expected[:, 2] + tokens).all())


def test_two_runners_of_the_same_pool_have_separate_rings():
    platform = RingPlatform()
    pool, rng = GraphPool(platform), random.Random(1)
    logs = [Log(platform, "cpu", 200, pool=pool, mode="FULL") for _ in range(2)]
    for step in range(200):
        for log in rng.sample(logs, 2):
            log.run(rng, step)
    for log in logs:
        log.check(200)
    assert len(platform.rings) == 2


def test_inputs_larger_than_the_fetch_limit_are_copied_outside_of_the_graph():
    platform = RingPlatform()
    platform.fetched_bytes = 4096
    log = Log(platform, "cpu", 300, width=64)
    mixed_steps(log, 300, 5, aborts=0.1)
    fetched = log.runner.inputs.layout(4, 4).fetch, log.runner.inputs.layout(16, 16).fetch
    assert fetched[0] is not None
    assert fetched[1] is None


def test_a_wrong_input_raises_before_its_slot_is_given_to_the_device():
    platform = RingPlatform()
    log, rng = Log(platform, "cpu", 20, mode="FULL"), random.Random(2)
    values = log.values(rng, 0, 4, 1)
    before = platform.rings[-1].counter.value
    for name, wrong in (("ids", values["ids"][:2]), ("table", values["table"].int())):
        with pytest.raises(InvalidInputError, match=name):
            log.runner(Batch(4, 4, 1), **{**values, name: wrong})
    assert platform.rings[-1].counter.value == before
    log.runner(Batch(4, 4, 1), **values)
    log.check(1)


def test_wrong_inputs_after_several_right_steps_are_refused():
    log, rng = Log(RingPlatform(), "cpu", 20, mode="FULL"), random.Random(8)
    batch = Batch(4, 4, 1)
    for step in range(3):
        log.runner(batch, **log.values(rng, step, 4, 1))
    values = log.values(rng, 3, 4, 1)
    for name, wrong in (
        ("ids", values["ids"][:2]),
        ("table", values["table"].int()),
        ("step", 3),
        ("flags", torch.empty(4, dtype=torch.uint8, device="meta")),
        ("starts", values["starts"].to_sparse()),
    ):
        with pytest.raises(InvalidInputError, match=name):
            log.runner(batch, **{**values, name: wrong})
    strided = {
        "ids": torch.stack([values["ids"]] * 2, -1)[..., 0],
        "table": values["table"].t().contiguous().t(),
    }
    log.runner(batch, **{**values, **strided})
    log.check(4)


def test_strided_conjugated_and_negated_host_inputs_are_fetched_with_their_values():
    runner = GraphRunner(
        lambda x, z: x + z.imag,
        inputs={
            "x": InputSpec(torch.float32, ("tokens", 3)),
            "z": InputSpec(torch.complex64, ("tokens", 3)),
        },
        outputs=("tokens", 3),
        mode="FULL",
        sizes=[4],
        platform=RingPlatform(),
        options=GraphOptions(inputs_in_graph=True, check="off"),
    )
    runner.capture()
    x, z = torch.rand(3, 3).t(), torch.randn(3, 3, dtype=torch.complex64)
    assert torch.equal(runner(x=x, z=z.conj()), x - z.imag)
    x = torch.rand(3, 3, dtype=torch.complex64).conj().imag
    assert torch.equal(runner(x=x, z=z), x + z.imag)


def test_a_step_whose_wrapper_lost_its_graph_fetches_its_inputs_before_running_eagerly():
    log, rng = Log(RingPlatform(), "cpu", 20, mode="FULL"), random.Random(3)
    for wrapper in log.runner.graphs.owners():
        wrapper.clear_graphs()
        wrapper.seal()
    for step in range(20):
        log.run(rng, step)
    log.check(20)


def test_a_failed_capture_leaves_no_pending_fetch_in_the_ring():
    platform, fails = RingPlatform(), [False]

    def forward(x):
        if fails[0]:
            raise ValueError("the forward failed")
        return x + 1

    runner = GraphRunner(
        forward,
        inputs={"x": InputSpec(torch.float32, ("tokens",))},
        outputs=("tokens",),
        mode="FULL",
        sizes=[1, 2, 4],
        platform=platform,
        options=GraphOptions(inputs_in_graph=True, check="off", warmups=0),
    )
    fails[0] = True
    with pytest.raises(Exception, match="the forward failed"):
        runner.capture()
    assert runner.inputs.transport.ring.pending is None
    fails[0] = False
    runner.capture()
    for rows in (1, 2, 3, 4, 5):
        x = torch.rand(rows)
        assert torch.equal(runner(x=x), x + 1)


@pytest.mark.trust
def test_trials_and_verify_work_with_inputs_fetched_in_the_graph():
    state = torch.zeros(4)

    def forward(x: torch.Tensor) -> torch.Tensor:
        state.add_(1)
        return x * 2

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        runner = GraphRunner(
            forward,
            inputs={"x": InputSpec(torch.float32, ("tokens", 4))},
            outputs=("tokens", 4),
            mode="FULL",
            sizes=[2, 4],
            platform=RingPlatform(),
            host=Host(),
            options=GraphOptions(inputs_in_graph=True, check="always", strict=True),
        )
        runner.capture()
        for count in range(1, 9):
            x = torch.rand(1 + count % 4, 4)
            run: Callable[..., torch.Tensor] = runner.verify if count % 3 == 0 else runner
            assert torch.equal(run(x=x), x * 2)
            assert state.tolist() == [count] * 4


class OnDevice(torch.Tensor):
    """A tensor that says it is not the host's, whose memory the software ring can read all the
    same."""

    is_cpu = False


@pytest.mark.parametrize("rows", [8, 5, 1])
def test_device_inputs_are_moved_by_the_same_fetch_as_host_inputs(rows):
    platform, rng = RingPlatform(), random.Random(rows)
    log = Log(platform, "cpu", 200, mode="FULL")
    ring, launches = platform.rings[-1], platform.rings[-1].launches
    for step in range(200):
        values = log.values(rng, step, rows, 1)
        values["table"] = values["table"].t().contiguous().t() if step % 2 else values["table"]
        for name in rng.sample(sorted(values), rng.randint(0, 5)):
            values[name] = values[name].as_subclass(OnDevice)
        log.runner(Batch(rows, rows, 1), **values)
    log.check(200)
    # None of them was staged, nor fetched by itself.
    assert ring.launches == launches
    assert not log.runner.inputs.transport.staged._slots


def test_an_input_that_already_lies_in_its_buffer_is_not_moved():
    log = Log(RingPlatform(), "cpu", 4, mode="FULL")
    rng = random.Random(0)
    for step, rows in enumerate((8, 5)):
        values = log.values(rng, step, rows, 1)
        views = log.runner.inputs.layout(8, 8).views
        views["ids"][:rows] = values["ids"]
        in_place = views["ids"][:rows].as_subclass(OnDevice)
        version = views["ids"]._version
        log.runner(Batch(rows, rows, 1), **{**values, "ids": in_place})
        assert views["ids"]._version == version
        assert torch.equal(views["ids"][:rows], values["ids"])
    log.check(2)


def test_a_fill_with_all_inputs_in_their_buffers_launches_no_fetch():
    platform = RingPlatform()
    inputs = StaticInputs(
        {"x": InputSpec(torch.int64, ("tokens",))},
        platform=platform,
        tokens=4,
        reqs=4,
        device="cpu",
        fetched=True,
    )
    layout, launches = inputs.layout(4, 4), platform.rings[-1].launches
    inputs.fill({"x": layout.views["x"].as_subclass(OnDevice)}, layout, 4, 4)
    assert platform.rings[-1].launches == launches
    inputs.fill({"x": layout.views["x"][:2].as_subclass(OnDevice)}, layout, 2, 2)
    assert platform.rings[-1].launches == launches + 1


def test_a_ring_has_fewer_slots_for_larger_inputs():
    platform = RingPlatform()
    platform.fetched_bytes = 1 << 20
    for nbytes in (4096, 1 << 20):
        platform.new_input_transport(Slab(torch.zeros(nbytes, dtype=torch.uint8), nbytes, 2))
    small, large = platform.rings
    assert small.slots == 64
    assert 2 <= large.slots < 32


@pytest.mark.parametrize(
    ("ns_a_byte", "at_least", "at_most"),
    [(0, 65536, 65536), (100, 23 << 10, 23 << 10), (2000, 4096, 4096)],
)
def test_a_slower_device_gets_a_lower_limit_of_fetched_bytes(
    monkeypatch, ns_a_byte, at_least, at_most
):
    clock = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])

    class Slow(SoftRing):
        def fetch(self, nbytes: int, most: int) -> None:
            clock[0] += 1e-6 + ns_a_byte * nbytes / 1e9
            super().fetch(nbytes, most)

    slab = torch.arange(65536).to(torch.uint8)
    before = slab.clone()
    ring = SlotRing(Slow(slab, 2, 65536, 4), 65536, 4)
    ring.limit(0.0024)
    assert ring.fetch_of(at_least) is not None
    assert ring.fetch_of(at_most + 1) is None
    assert torch.equal(slab, before)


@compiled
@pytest.mark.parametrize("rows", [8, 5, 1])
def test_device_inputs_of_the_last_steps_layout_take_the_compiled_fast_path(rows):
    """Memory of the host stands for the device's, as the moves of a slot go by addresses."""
    log, rng = Log(RingPlatform(), "cpu", 60, mode="FULL"), random.Random(rows)
    inputs = log.runner.inputs
    layout = inputs.layout(8 if rows > 4 else rows, 8 if rows > 4 else rows)
    views = layout.views
    transport, moves = inputs.transport, layout.moves(rows, rows)
    right = log.values(rng, 0, rows, 1)
    tables = [transport._table(moves, kind * len(moves.fields)) for kind in "dk"]
    tensors = [right[move.field.name] for move in moves.fields]
    sources = Sources(tensors, [], "ddddd", True)
    learn(moves, sources, transport.ring, transport.slab, *tables)
    fast = moves.alike
    assert fast is not None
    moves.prepared.writers = []
    taken: dict[int, bool] = {}

    def alike(*args):
        taken[step] = fast(*args)
        return taken[step]

    for step in range(60):
        values = log.values(rng, step, rows, 1)
        if step % 3 == 2:
            live = {move.field.name: move.live for move in moves.fields}
            for name, value in values.items():
                live[name].copy_(value)
            values = live
        elif step % 10 == 7:
            # One of them lies under what is written next: it has to be looked at.
            views["ids"][: len(values["ids"])] = values["ids"]
            values["ids"] = views["ids"][: len(values["ids"])]
        elif step % 10 == 9:
            values["table"] = values["table"].t().contiguous().t()
        moves.alike, moves.prepared.writers = alike, [alike]
        log.runner(Batch(rows, rows, 1), **values)
    log.check(60)
    # Of one row, nothing tells a row from a column.
    unlike = (7,) if rows == 1 else (7, 9)
    apart = {step for step in taken if step % 3 != 2}
    looked_at = {step for step in apart if step % 10 in unlike}
    assert len(taken) > 50
    assert {step for step in apart if not taken[step]} == looked_at
    # In place, an input whose rows come second has gaps where it is padded.
    assert all(taken[step] == (rows != 5) for step in taken if step % 3 == 2)
    log.runner.close()
