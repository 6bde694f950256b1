"""The platform of whatever registers graphs with torch, over a device that the CPU plays."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from stub_accelerator import StubDevice, StubGraph
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from graphrt.accelerator import AcceleratorGraphWrapper, AcceleratorPlatform
from graphrt.core.base.errors import CaptureError, NestedCaptureError
from graphrt.core.capture.guard import eager_break
from graphrt.core.device.contract import Capability, MemoryFigures
from graphrt.core.device.platform import Availability
from graphrt.core.replay.pool import GraphPool
from graphrt.testing import PlatformConformance
from graphrt.testing.conformance.base import D2, D4, FULL, PIECEWISE, ConformanceBase
from graphrt.trust.watching.watch import IssuedWatch

# Tests that collect garbage would look at the tests of all other files each time.
pytestmark = pytest.mark.usefixtures("frozen_heap")


class TestConformance(PlatformConformance):
    """With strong references, as on a device that cannot tell whose memory is."""

    notes_operators = True  # a tape of the CPU stands for the device

    @pytest.fixture(autouse=True)
    def _available(self, device: StubDevice) -> None:
        self.platform = AcceleratorPlatform()
        assert self.platform.availability() == Availability(True)
        assert Capability.SHARED_POOL not in self.platform.capabilities


class TestConformanceWithSnapshots(PlatformConformance):
    """With weak references, as on a device whose module tells which memory a pool has."""

    notes_operators = True  # a tape of the CPU stands for the device

    @pytest.fixture(autouse=True)
    def _available(self, device: StubDevice) -> None:
        device.tells_pools = True
        self.platform = AcceleratorPlatform()
        assert self.platform.availability() == Availability(True)
        assert Capability.SHARED_POOL in self.platform.capabilities


# Availability ------------------------------------------------------------------------------------


def why_not() -> str:
    availability = AcceleratorPlatform().availability()
    assert not availability.available
    return availability.reason


def test_a_torch_without_accelerator_graphs_is_reported_as_too_old(
    device: StubDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(torch.accelerator, "Graph")
    assert "no torch.accelerator.Graph (2.12" in why_not()
    monkeypatch.delattr(torch, "accelerator")
    assert "no torch.accelerator.Graph (2.12" in why_not()


def test_a_machine_without_accelerator_is_reported_as_unavailable(device: StubDevice) -> None:
    device.kind = None
    assert "no accelerator" in why_not()


@pytest.mark.parametrize(("kind", "own"), [("cuda", "cuda"), ("npu", "ascend")])
def test_a_device_with_its_own_platform_is_left_to_that_platform(
    device: StubDevice, monkeypatch: pytest.MonkeyPatch, kind: str, own: str
) -> None:
    def touched() -> bool:
        raise AssertionError("the device was touched")

    accelerator = type("Named", (), {"type": kind})()
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: accelerator)
    monkeypatch.setattr(torch.accelerator, "is_available", touched)
    assert why_not() == f"the accelerator is {kind}, which has a platform of its own: {own}"


def test_an_accelerator_without_a_device_is_reported_as_unavailable(device: StubDevice) -> None:
    device.available, device.kind = False, "xpu"
    assert why_not() == "torch supports xpu, but no such device is available"


def test_an_accelerator_without_graphs_reports_torchs_reason(device: StubDevice) -> None:
    device.no_graphs = "no graph is registered for MPS\nException raised from somewhere"
    device.kind = "mps"
    assert why_not() == "mps has no graphs: no graph is registered for MPS"


def test_a_failing_torch_accelerator_makes_availability_report_the_error(
    device: StubDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> bool:
        raise OSError("no driver library\nat all")

    monkeypatch.setattr(torch.accelerator, "is_available", broken)
    assert why_not() == "torch.accelerator failed: no driver library"


def test_the_accelerator_platform_touches_no_device_before_availability(
    device: StubDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.delattr(torch, "accelerator")
        platform = AcceleratorPlatform()
        assert torch.device(platform.device_type)
        assert platform.capabilities == {Capability.CAPTURE, Capability.STREAMS}
        assert platform.get_static_graph_wrapper_cls().endswith("AcceleratorGraphWrapper")


def test_after_availability_the_device_kind_is_known_without_asking_again(
    device: StubDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    device.kind = "xpu"
    platform = AcceleratorPlatform()
    assert platform.availability().available
    assert platform.device_type == "xpu"
    assert platform.versions()["accelerator"] == "xpu"
    # This torch has no kernels for it: what is only tried out is a missing capability then.
    assert Capability.SHARED_POOL not in platform.capabilities
    monkeypatch.delattr(torch.accelerator, "Graph")
    assert platform.availability().available


def test_memory_figures_are_read_from_the_device_if_available(device: StubDevice) -> None:
    platform = AcceleratorPlatform()
    platform.availability()
    assert platform.memory_figures() == MemoryFigures(3, 4)
    device.memory_info = None
    assert platform.memory_figures() is None


def test_a_memory_snapshot_of_unknown_form_disables_ownership(
    device: StubDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    device.tells_pools = True
    monkeypatch.setattr(device, "memory_snapshot", lambda: [{"address": 0, "total_size": 1 << 63}])
    platform = AcceleratorPlatform()
    assert platform.availability().available
    assert Capability.SHARED_POOL not in platform.capabilities


# Streams, pools and captures ---------------------------------------------------------------------


class TestGraphs(ConformanceBase):
    @pytest.fixture(autouse=True)
    def _available(self, device: StubDevice) -> Iterator[None]:
        self.device = device
        self.platform = self.new_platform()
        yield
        assert device.crashes == 0

    def new_platform(self, *, tells_pools: bool = False) -> AcceleratorPlatform:
        self.device.tells_pools = tells_pools
        platform = AcceleratorPlatform()
        assert platform.availability().available
        return platform

    def test_the_accelerator_wrapper_class_belongs_to_its_platform(self, pool: GraphPool) -> None:
        wrapper = self.wrap(lambda x: x + 1, FULL, pool)
        assert type(wrapper) is AcceleratorGraphWrapper
        assert wrapper.platform_name == self.platform.name == "accelerator"

    def test_the_capture_stream_is_ordered_behind_the_caller_and_back(
        self, pool: GraphPool
    ) -> None:
        read = self.platform.stream_id_reader()
        with self.platform.on_stream(pool.stream):
            assert read() == self.platform.current_stream_id() == pool.stream.stream_id
        assert read() == self.platform.current_stream_id() == 0
        capture = pool.stream.stream_id
        assert self.device.waits == [(capture, 0), (0, capture)]
        self.platform.order_after(pool.stream)
        assert self.device.waits[2:] == [(0, capture)]

    @pytest.mark.parametrize("tells_pools", [False, True])
    def test_graphs_of_a_shared_pool_give_right_results_in_any_order(
        self, tells_pools: bool
    ) -> None:
        """The eager part's arguments and the outputs must not be memory of a later capture."""
        pool = GraphPool(self.new_platform(tells_pools=tells_pools))
        attention = eager_break(lambda x, y: x * y)

        def forward(x: torch.Tensor) -> torch.Tensor:
            first = x + 1
            mixed = attention(first, x * 2)
            scratch = mixed * 100
            result: torch.Tensor = attention(scratch, first) - mixed
            return result

        wrapper = self.wrap(forward, PIECEWISE, pool, breakable=True)
        inputs = {D4: self.tensor(1, 2, 3, 4), D2: self.tensor(5, 6)}
        for descriptor, x in inputs.items():
            self.capture(wrapper, PIECEWISE, x, descriptor=descriptor)
        for turn in range(3):
            for descriptor, x in inputs.items():
                x.add_(turn)
                output = self.step(wrapper, PIECEWISE, x, descriptor=descriptor)
                assert torch.equal(output, forward(x))

    def test_no_torch_dispatch_mode_is_active_in_the_replay_after_a_capture(
        self, pool: GraphPool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """torch would make Python tensors of what a replay writes for its generators."""
        replay, modes = StubGraph.replay, []

        def replayed(graph: StubGraph) -> None:
            modes.append(list(_get_current_dispatch_mode_stack()))
            # As CUDA's does with the generator's offset.
            torch.zeros(1, dtype=torch.int64).fill_(3)
            replay(graph)

        monkeypatch.setattr(StubGraph, "replay", replayed)
        part = eager_break(lambda x: x * 3)
        wrapper = self.wrap(lambda x: part(x + 1) - 2, PIECEWISE, pool, breakable=True)
        x, watch = self.tensor(1, 2, 3, 4), IssuedWatch()
        watch.run(lambda: self.capture(wrapper, PIECEWISE, x), in_one=False)
        assert modes == [[], []]
        names = [operator.name() for operator in watch.operators]
        assert names == ["aten::add.Tensor", "aten::mul.Tensor", "aten::sub.Tensor"]

    def test_output_memory_is_shared_only_if_ownership_is_known(self) -> None:
        for tells_pools in (False, True):
            pool = GraphPool(self.new_platform(tells_pools=tells_pools))
            wrapper = self.wrap(lambda x: x + 1, FULL, pool)
            outputs = []
            for descriptor in (D4, D2):
                x = self.tensor(*[1.0] * descriptor.num_tokens)
                self.capture(wrapper, FULL, x, descriptor=descriptor)
                outputs.append(self.step(wrapper, FULL, x, descriptor=descriptor))
            assert (outputs[0].data_ptr() == outputs[1].data_ptr()) is tells_pools
            assert (pool.bytes() is not None) is tells_pools

    def test_the_memory_snapshot_is_reread_only_after_device_allocations(self) -> None:
        platform = self.new_platform(tells_pools=True)
        pool = GraphPool(platform)
        wrapper = self.wrap(lambda x: x + 1, FULL, pool)
        x = self.tensor(1, 2, 3, 4)
        self.capture(wrapper, FULL, x)
        before = self.device.snapshots
        assert not platform.owns(pool.memory, x)
        assert platform.owns(pool.memory, self.step(wrapper, FULL, x))
        assert self.device.snapshots == before

    def test_only_graphs_of_the_same_pool_share_an_allocator_pool(self, pool: GraphPool) -> None:
        x = self.tensor(1, 2, 3, 4)
        owners = (pool, pool, GraphPool(self.platform))
        wrappers = [self.wrap(lambda x: (x + 1) * 2, FULL, owner) for owner in owners]
        for wrapper in wrappers:
            self.capture(wrapper, FULL, x)
        assert sorted(self.device.users.values()) == [1, 2]

    def test_an_allocator_pool_is_not_reused_after_its_last_graph_reset(
        self, pool: GraphPool
    ) -> None:
        wrapper = self.wrap(lambda x: x + 1, FULL, pool)
        x = self.tensor(1, 2, 3, 4)
        for _ in range(2):
            self.capture(wrapper, FULL, x)
            assert self.first(self.step(wrapper, FULL, x)) == [2, 3, 4, 5]
            wrapper.clear_graphs()
        assert len(self.device.dead_pools) == 2
        pool.close()
        assert self.device.emptied == 1

    def test_a_capture_inside_a_foreign_capture_is_refused(self, pool: GraphPool) -> None:
        foreign = torch.accelerator.Graph()
        stream = self.device.current_stream()
        wrapper = self.wrap(lambda x: x + 1, FULL, pool)
        x = self.tensor(1, 2, 3, 4)
        foreign.capture_begin()
        try:
            with pytest.raises(NestedCaptureError, match=r"torch\.accelerator\.Graph"):
                self.capture(wrapper, FULL, x)
            assert pool.stream.drawn_into is None, "a fork must be joined"
        finally:
            foreign.capture_end()
        assert not stream.is_capturing()
        self.check_usable(pool, on_its_stream=True)

    def test_a_failed_capture_ends_on_the_stream_where_capture_began(self, pool: GraphPool) -> None:
        def forward(x: torch.Tensor) -> torch.Tensor:
            torch.accelerator.set_stream(torch.Stream())
            raise ValueError("boom")

        with pytest.raises(ValueError, match="boom"):
            self.capture(self.wrap(forward, FULL, pool), FULL, self.tensor(1, 2, 3, 4))
        assert not pool.stream.is_capturing()
        assert self.platform.current_stream_id() == 0
        self.check_usable(pool, on_its_stream=True)

    @pytest.mark.parametrize("what", ["fail_begin", "fail_end"])
    def test_a_capture_that_cannot_be_ended_loses_its_stream_but_not_the_pool(
        self, pool: GraphPool, what: str
    ) -> None:
        self.check_usable(pool, on_its_stream=True)
        shared = set(self.device.users)
        kept = len(self.device.resets)
        for _ in range(2):
            setattr(self.device, what, True)
            with pytest.raises(CaptureError, match=r"cannot begin|invalidated"):
                self.capture(self.wrap(lambda x: x + 1, FULL, pool), FULL, self.tensor(1, 2, 3, 4))
            setattr(self.device, what, False)
            assert self.platform.current_stream_id() == 0
            assert not self.device.current_stream().is_capturing(), "drawn into the open capture"
            assert len(self.device.resets) == kept, "allocators may still ask this graph"
            self.check_usable(pool, on_its_stream=False)
        assert set(self.device.users) > shared, "allocators may still route into that pool"
        lost = pool.stream.stream_id
        assert all(self.platform.new_stream().stream_id != lost for _ in range(40))

    def test_a_device_without_a_spare_stream_raises_a_capture_error(
        self, pool: GraphPool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(torch, "Stream", lambda: pool.stream)
        wrapper = self.wrap(lambda x: x + 1, FULL, pool, lazy=True)
        self.device.fail_begin = True
        with pytest.raises(CaptureError, match="cannot begin"):
            self.capture(wrapper, FULL, self.tensor(1, 2, 3, 4))
        self.device.fail_begin = False
        with pytest.raises(CaptureError, match="no further stream"):
            self.capture(wrapper, FULL, self.tensor(1, 2, 3, 4))

    def test_a_failure_after_the_capture_ended_only_resets_the_graph(
        self, pool: GraphPool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        graph = self.platform.new_graph()
        end = graph.capture_end

        def end_and_fail() -> None:
            end()
            raise RuntimeError("the graph cannot be instantiated")

        with self.platform.on_stream(pool.stream):
            self.platform.begin_capture(graph, pool.memory)
            monkeypatch.setattr(graph, "capture_end", end_and_fail)
            with pytest.raises(RuntimeError, match="instantiated"):
                self.platform.end_capture(graph)
            self.platform.abort_capture(graph)
        assert self.device.resets == [graph]
        self.check_usable(pool, on_its_stream=True)

    def check_usable(self, pool: GraphPool, *, on_its_stream: bool) -> None:
        """Capture and replay in `pool`, and keep the graph, so that its allocator pool lives."""
        streams: list[int] = []

        def forward(x: torch.Tensor) -> torch.Tensor:
            streams.append(self.platform.current_stream_id())
            return x + 1

        wrapper = self.wrap(forward, FULL, pool)
        self.kept = [*getattr(self, "kept", []), wrapper]
        x = self.tensor(1, 2, 3, 4)
        self.capture(wrapper, FULL, x)
        x.copy_(self.tensor(5, 6, 7, 8))
        assert self.first(self.step(wrapper, FULL, x)) == [6, 7, 8, 9]
        assert (streams == [pool.stream.stream_id]) is on_its_stream
