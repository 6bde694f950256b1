"""Which words of a graph's nodes may be addresses, and whose memory they are."""

from __future__ import annotations

import struct

import pytest
import torch
from fake_nodes import CHILD, EMPTY, HOST, MEMCPY, MEMSET, FakeNodes, Node, kernel, words

from graphrt import GraphOptions, GraphRunner, InputSpec
from graphrt.core.device.graph import GraphPointers
from graphrt.cpu import CpuPlatform
from graphrt.cuda.driver import api
from graphrt.cuda.driver.pointers import pointers_of
from graphrt.cuda.platform import CudaPlatform
from graphrt.errors import StaleInputError

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


def test_every_aligned_word_of_wide_arguments_is_found(driver):
    count = struct.pack("<i", 4096)
    by_value = words(AT, 7, AT + 512) + struct.pack("<i", 3)
    driver(g1=[kernel(count, by_value, words(AT + 1024))])
    assert found() == ([(AT, AT + 512, AT + 1024)], 0)


def test_lengths_and_what_no_machine_has_as_address_are_left_out(driver):
    driver(g1=[kernel(words(1, 4096, (1 << 64) - 1, AT)), kernel(words(5), function=2)])
    assert found() == ([(AT,)], 0)


def test_sizes_are_asked_for_once_for_each_function(driver):
    fake = driver(g1=[kernel(words(AT + place)) for place in range(9)])
    assert found() == ([(AT + place,) for place in range(9)], 0)
    assert fake.asked_sizes == 1


def test_a_kernel_of_a_library_is_read_by_its_function(driver):
    driver(g1=[kernel(words(AT), function=1002)])
    assert found() == ([(AT,)], 0)


def test_arguments_in_one_buffer_are_read_by_its_size(driver):
    driver(g1=[kernel(words(AT, 3, AT + 8), packed=True)])
    assert found() == ([(AT, AT + 8)], 0)


def test_copies_and_fills_are_read(driver):
    copy = Node(MEMCPY, [words(0, 0, 0, 0, 2, 0, AT, 0, 0, 64, 1).ljust(256, b"\0")])
    fill = Node(MEMSET, [words(AT + 64, 0, 0, 4, 16)])
    driver(g1=[copy, fill])
    assert found() == ([(AT,), (AT + 64,)], 0)


def test_child_graphs_are_read_to_any_depth(driver):
    driver(
        g1=[kernel(words(AT)), Node(CHILD, child=2)],
        g2=[Node(CHILD, child=3), kernel(words(AT + 8))],
        g3=[kernel(words(AT + 16))],
    )
    assert found() == ([(AT,), (AT + 8,), (AT + 16,)], 0)


def test_an_empty_graph_has_nothing(driver):
    driver(g1=[], g2=[kernel()])
    assert found(1) == found(2) == ([], 0)


def test_what_cannot_be_read_is_counted_and_never_raises(driver):
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


def test_kernels_are_unread_where_the_driver_does_not_tell_sizes(driver):
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


def test_the_platform_cannot_tell_without_a_driver_or_a_template(driver, monkeypatch):
    platform = CudaPlatform()
    driver(g1=[kernel(words(AT))])
    assert platform.pointers(Graph(1)) == GraphPointers([(AT,)], 0)
    assert platform.pointers(Graph(None)) is None
    monkeypatch.setattr(api, "_library", lambda: None)
    assert platform.pointers(Graph(1)) is None


# The graphs of a runner ---------------------------------------------------------------------------

TABLE = torch.arange(4.0)


class Pointing(CpuPlatform):
    """Graphs that point to some tensors."""

    def __init__(self):
        super().__init__()
        self.tensors = []

    def pointers(self, graph):
        return GraphPointers([tuple(each.data_ptr() + 4 for each in self.tensors), ()], 0)


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


def reads_of(runner):
    return {each.name for each in runner.report().trust.reads}


def test_what_nodes_point_to_and_the_forward_holds_counts_as_read_once_a_graph_was_tried():
    model, stranger = Scaled(), torch.zeros(7)
    with pointing_runner(model) as runner:
        runner.capture()
        weights = {"model.linear.weight", "model.linear.bias"}
        runner.platform.tensors = [model.linear.weight, TABLE, stranger]
        runner.platform.tensors += runner.inputs.buffers.values()
        assert reads_of(runner) == weights
        with torch.no_grad():
            runner(x=torch.ones(2, 4))
        assert reads_of(runner) == {*weights, "global TABLE"}


def test_a_tensor_that_only_nodes_point_to_and_that_moves_is_named(monkeypatch):
    with pointing_runner(Scaled()) as runner, torch.no_grad():
        runner.capture()
        runner.platform.tensors = [TABLE]
        runner(x=torch.ones(2, 4))
        runner.weights_changed()
        monkeypatch.setitem(globals(), "TABLE", torch.arange(4.0))
        with pytest.raises(StaleInputError, match="TABLE"):
            runner.weights_changed()


def test_nothing_is_asked_where_nobody_watched():
    with pointing_runner(Scaled(), check="off") as runner, torch.no_grad():
        runner.capture()
        runner.platform.tensors = [TABLE]
        runner(x=torch.ones(2, 4))
        assert reads_of(runner) == set()


def test_what_cannot_tell_of_its_nodes_has_no_pointers():
    assert CpuPlatform().pointers(None) is None
