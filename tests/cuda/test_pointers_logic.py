"""Which words of a graph's nodes count as addresses, and which memory blocks they point into."""

from __future__ import annotations

import gc
import struct
import warnings

import pytest
import torch
from fake_nodes import CHILD, EMPTY, HOST, MEMCPY, MEMSET, FakeNodes, Node, kernel, words
from torch._subclasses.fake_tensor import FakeTensorMode

from graphrt import GraphOptions, GraphRunner, InputSpec
from graphrt.core.device.contract import GraphPointers, MemoryBlock
from graphrt.cpu import CpuPlatform
from graphrt.cuda.blocks import blocks_of
from graphrt.cuda.driver import api
from graphrt.cuda.driver.pointers import pointers_of
from graphrt.cuda.platform import CudaPlatform
from graphrt.trust.watching.pointers import (
    UnknownBlock,
    tensor_addresses,
    unknown_blocks,
    unknown_memory,
)

AT = 0x7F10_0000_0000
MIB = 1 << 20


@pytest.fixture
def driver(monkeypatch):
    def install(**graphs):
        fake = FakeNodes({int(name[1:]): nodes for name, nodes in graphs.items()})
        monkeypatch.setattr(api, "_library", lambda: fake)
        return fake

    return install


def found(graph=1):
    """The words of each node, in the order of their smallest, and the count of unread nodes."""
    pointers = pointers_of(graph)
    return sorted(map(tuple, pointers.nodes)), pointers.unread


# The words of nodes -------------------------------------------------------------------------------


def test_every_aligned_address_in_wide_kernel_arguments_is_found(driver):
    count = struct.pack("<i", 4096)
    by_value = words(AT, 7, AT + 512) + struct.pack("<i", 3)
    driver(g1=[kernel(count, by_value, words(AT + 1024))])
    assert found() == ([(AT, AT + 512, AT + 1024)], 0)


def test_small_numbers_and_impossible_addresses_are_not_reported(driver):
    driver(g1=[kernel(words(1, 4096, (1 << 64) - 1, AT)), kernel(words(5), function=2)])
    assert found() == ([(AT,)], 0)


def test_argument_sizes_are_queried_once_per_kernel_function(driver):
    fake = driver(g1=[kernel(words(AT + place)) for place in range(9)])
    assert found() == ([(AT + place,) for place in range(9)], 0)
    assert fake.asked_sizes == 1


def test_arguments_of_a_library_kernel_are_read(driver):
    driver(g1=[kernel(words(AT), function=1002)])
    assert found() == ([(AT,)], 0)


def test_kernel_arguments_packed_in_a_buffer_are_read(driver):
    driver(g1=[kernel(words(AT, 3, AT + 8), packed=True)])
    assert found() == ([(AT, AT + 8)], 0)


def test_addresses_in_memcpy_and_memset_nodes_are_read(driver):
    copy = Node(MEMCPY, [words(0, 0, 0, 0, 2, 0, AT, 0, 0, 64, 1).ljust(256, b"\0")])
    fill = Node(MEMSET, [words(AT + 64, 0, 0, 4, 16)])
    driver(g1=[copy, fill])
    assert found() == ([(AT,), (AT + 64,)], 0)


def test_addresses_in_nested_child_graphs_are_read(driver):
    driver(
        g1=[kernel(words(AT)), Node(CHILD, child=2)],
        g2=[Node(CHILD, child=3), kernel(words(AT + 8))],
        g3=[kernel(words(AT + 16))],
    )
    assert found() == ([(AT,), (AT + 8,), (AT + 16,)], 0)


def test_an_empty_graph_has_no_addresses(driver):
    driver(g1=[], g2=[kernel()])
    assert found(1) == found(2) == ([], 0)


def test_unreadable_nodes_are_counted_and_never_raise(driver):
    driver(
        g1=[
            kernel(words(AT)),
            Node(EMPTY),
            Node(HOST),
            Node(13),
            Node(4711),
            Node(CHILD, child=9),
            Node(0, [words(AT)], refused=True),
        ]
    )
    assert found() == ([(AT,)], 5)


def test_kernels_count_as_unread_if_the_driver_gives_no_sizes(driver):
    fake = driver(g1=[kernel(words(AT)), kernel(words(AT), function=2, packed=True)])
    fake.cuFuncGetParamInfo = None
    assert found() == ([(AT,)], 1)


class Graph:
    def __init__(self, template):
        self.template = template

    def raw_cuda_graph(self):
        if self.template is None:
            raise RuntimeError("no template was kept")
        return self.template


def test_pointers_are_unknown_without_a_driver_or_a_graph_template(driver, monkeypatch):
    platform = CudaPlatform()
    driver(g1=[kernel(words(AT))])
    assert platform.pointers(Graph(1)) == GraphPointers([(AT,)], 0)
    assert platform.pointers(Graph(None)) is None
    monkeypatch.setattr(api, "_library", lambda: None)
    assert platform.pointers(Graph(1)) is None


# The blocks of a snapshot -------------------------------------------------------------------------


def segment(address, *blocks, pool=(0, 0)):
    """A segment of blocks of (size, bytes asked for, state)."""
    parts = [{"size": size, "requested_size": asked, "state": s} for size, asked, s in blocks]
    return {"address": address, "segment_pool_id": pool, "blocks": parts}


def test_memory_blocks_in_use_are_located_from_an_allocator_snapshot():
    used, free, pending = "active_allocated", "inactive", "active_pending_free"
    snapshot = [
        segment(AT, (512, 8, used), (1024, 0, free), (512, 500, used), (512, 512, pending)),
        segment(AT + MIB, (2 * MIB, 2 * MIB, used), pool=(0, 3)),
    ]
    assert blocks_of(snapshot, frozenset({8})) == [
        MemoryBlock(AT, AT + 512, 8, may_be_internal=True),
        MemoryBlock(AT + 1536, AT + 2048, 500),
        MemoryBlock(AT + MIB, AT + 3 * MIB, 2 * MIB, in_graph_pool=True),
    ]


# What nobody has named ----------------------------------------------------------------------------


def block(place, asked=1000, **more):
    """The block number `place` of 1024 bytes each."""
    return MemoryBlock(AT + 1024 * place, AT + 1024 * (place + 1), asked, **more)


def test_an_unknown_block_is_counted_once_per_node_that_points_inside():
    nodes = [(AT + 5, AT + 1023), (AT,), (AT + 1024,), (AT - 1, AT + 2048)]
    assert unknown_blocks(nodes, [block(1), block(0)], known=[]) == (
        UnknownBlock(AT, 1000, 2),
        UnknownBlock(AT + 1024, 1000, 1),
    )


def test_addresses_outside_of_all_blocks_are_not_reported():
    nodes = [(1, AT + 1024, AT + 4096, 1 << 60)]
    assert unknown_blocks(nodes, [block(0), block(2)], known=[]) == ()
    assert unknown_blocks(nodes, [], known=[AT]) == ()


def test_a_block_that_holds_a_known_address_is_not_reported():
    nodes = [(AT, AT + 1024)]
    assert unknown_blocks(nodes, [block(0), block(1)], known=[AT + 300, 12]) == (
        UnknownBlock(AT + 1024, 1000, 1),
    )


def test_memory_of_graph_pools_is_never_reported():
    pooled = block(0, in_graph_pool=True)
    assert unknown_blocks([(AT,)], [pooled], known=[]) == ()


def test_a_workspace_sized_block_is_reported_only_if_a_tensor_begins_inside():
    blocks = [block(0, may_be_internal=True), block(1, may_be_internal=True)]
    nodes = [(AT, AT + 1024)]
    assert unknown_blocks(nodes, blocks, known=[], tensors=lambda: [AT + 1024]) == (
        UnknownBlock(AT + 1024, 1000, 1),
    )


def test_live_tensors_are_searched_only_for_unknown_workspace_sized_blocks():
    def tensors():
        raise AssertionError("asked")

    blocks = [block(0), block(1, may_be_internal=True), block(2, may_be_internal=True)]
    unknown = unknown_blocks([(AT, AT + 1024)], blocks, known=[AT + 1024], tensors=tensors)
    assert unknown == (UnknownBlock(AT, 1000, 1),)


def test_tensor_addresses_has_all_live_tensors_and_skips_tensors_without_memory():
    held = [torch.zeros(4), torch.nn.Parameter(torch.zeros(4)), torch.zeros(8)[3:]]
    odd = [torch.empty(4, device="meta"), torch.zeros(2, 2).to_sparse(), torch.empty(0)]
    gc.collect()
    addresses = tensor_addresses()
    assert {each.untyped_storage().data_ptr() for each in held} <= addresses
    assert 0 not in addresses and odd


def test_tensor_addresses_skips_fake_tensors_without_a_warning():
    with FakeTensorMode():
        fake = torch.ones(4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert isinstance(tensor_addresses(), set) and fake is not None


class Told(CpuPlatform):
    """A platform whose graphs are their pointers."""

    def __init__(self, *blocks):
        self.blocks = blocks

    def pointers(self, graph):
        return graph

    def memory_blocks(self):
        return self.blocks or None


def test_nodes_of_several_graphs_are_summed_per_unknown_block():
    graphs = [GraphPointers([(AT,), (AT + 1024,)], 1), GraphPointers([(AT + 8, AT + 2048)], 2)]
    unknown = unknown_memory(Told(block(0), block(1), block(2)), graphs, known=[AT + 1024])
    assert unknown.blocks == (UnknownBlock(AT, 1000, 2), UnknownBlock(AT + 2048, 1000, 1))
    assert unknown.unread == 3
    assert str(unknown.blocks[0]) == "1000 bytes at 0x7f1000000000, in 2 nodes"


def test_unknown_memory_is_not_reported_where_the_platform_cannot_tell():
    known = GraphPointers([], 0)
    assert unknown_memory(Told(block(0)), [known, None], known=[]) is None
    assert unknown_memory(Told(), [known], known=[]) is None
    assert CpuPlatform().pointers(None) is None and CpuPlatform().memory_blocks() is None


# The graphs of a runner ---------------------------------------------------------------------------

TABLE = torch.arange(4.0)


class Pointing(CpuPlatform):
    """Graphs that point to some tensors, which are all that its allocator has given away."""

    def __init__(self):
        super().__init__()
        self.tensors = []

    def pointers(self, graph):
        return GraphPointers([tuple(each.data_ptr() for each in self.tensors)], 0)

    def memory_blocks(self):
        starts = [(each.data_ptr(), each.untyped_storage().nbytes()) for each in self.tensors]
        return [MemoryBlock(start, start + size, size) for start, size in starts]


def raw_table():
    """Stands for a kernel that no operator of torch's launches."""
    return TABLE.shape[0]


class Scaled(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, x):
        return self.linear(x) * raw_table()


def pointing_runner(forward, **options):
    return GraphRunner(
        forward,
        inputs={"x": InputSpec(torch.float32, ("tokens", 4))},
        outputs=("tokens", 4),
        mode="FULL",
        sizes=[1, 2],
        platform=Pointing(),
        options=GraphOptions(**options),
    )


def unknown_of(runner):
    checks = runner.graphs.checks
    return checks.unknown_memory(runner.graphs) if checks.on else runner.report().trust.unknown


def test_memory_that_neither_warm_ups_nor_inputs_used_is_reported_by_name():
    model, stranger = Scaled(), torch.zeros(7)
    with pointing_runner(model) as runner:
        assert unknown_of(runner) is None
        runner.capture()
        runner.platform.tensors = [model.linear.weight, model.linear.bias, TABLE, stranger]
        runner.platform.tensors += runner.inputs.buffers.values()
        unknown = {each.address: each for each in unknown_of(runner).blocks}
        assert unknown.keys() == {TABLE.data_ptr(), stranger.data_ptr()}
        assert "TABLE" in unknown[TABLE.data_ptr()].name
        assert unknown[stranger.data_ptr()][1:] == (28, 2, "")
        largest = [runner.graphs.records[0].descriptor]
        some = runner.graphs.checks.unknown_memory(runner.graphs, largest)
        assert {each.nodes for each in some.blocks} == {1}


def test_unknown_memory_is_not_reported_with_checks_off():
    with pointing_runner(Scaled(), check="off") as runner:
        runner.capture()
        assert unknown_of(runner) is None
