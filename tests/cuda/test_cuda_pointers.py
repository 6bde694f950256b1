"""The addresses in the nodes of captured graphs, and whose memory they are."""

from __future__ import annotations

import ctypes
import sys
import time
from contextlib import contextmanager

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from graphrt import GraphOptions, GraphRunner, InputSpec, get_platform
from graphrt.cuda.blocks import internal_sizes
from graphrt.cuda.driver.api import check, need, pointer
from graphrt.cuda.driver.nodes import destroy_graph, node_type, nodes_of
from graphrt.trust.watching.pointers import unknown_memory

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")

pytestmark = pytest.mark.cuda

WIDTH, MIB = 128, 1 << 20
MEMCPY, MEMSET, CHILD = 1, 2, 4
TABLE: torch.Tensor | None = None


@triton.jit
def add_table(x, table, out, WIDTH: tl.constexpr):
    column = tl.arange(0, WIDTH)
    at = tl.program_id(0) * WIDTH + column
    tl.store(out + at, tl.load(x + at) + tl.load(table + column))


def with_table(x):
    """No operator of torch's sees that the table is read."""
    out = torch.empty_like(x)
    add_table[(len(x),)](x, TABLE, out, WIDTH=WIDTH)
    return out


@pytest.fixture
def table(monkeypatch):
    made = torch.randn(WIDTH, device="cuda")
    monkeypatch.setattr(sys.modules[__name__], "TABLE", made)
    return made


@contextmanager
def captured_runner(forward, dtype=torch.float32, **options):
    runner = GraphRunner(
        forward,
        inputs={"x": InputSpec(dtype, ("tokens", WIDTH))},
        outputs=("tokens", WIDTH),
        mode="FULL",
        sizes=[2, 16, 64],
        platform="cuda",
        options=GraphOptions(**options),
    )
    with runner:
        runner.capture()
        yield runner


def unknown_of(runner):
    unknown = runner.graphs.checks.unknown_memory(runner.graphs)
    print(f"{len(unknown.blocks)} unknown blocks, {unknown.unread} unread nodes", *unknown.blocks)
    return unknown


def captured(work):
    """A graph of what `work` does, in a pool of its own."""
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph):
        work()
    return graph


def words_of(graph):
    pointers = get_platform("cuda").pointers(graph)
    assert pointers.unread == 0
    return {word for node in pointers.nodes for word in node}


def kinds_of(graph):
    return {node_type(node) for node in nodes_of(graph.raw_cuda_graph())}


# What watching does not see -----------------------------------------------------------------------


def test_a_tensor_read_only_by_a_raw_kernel_is_reported_by_name(table):
    with captured_runner(with_table) as runner:
        unknown = unknown_of(runner)
        assert [block.address for block in unknown.blocks] == [table.untyped_storage().data_ptr()]
        assert unknown.blocks[0].bytes == table.untyped_storage().nbytes()
        # One kernel in each of three graphs.
        assert unknown.blocks[0].nodes == 3
        assert "TABLE" in unknown.blocks[0].name
        assert unknown.unread == 0


def test_a_view_into_a_larger_tensor_is_reported_by_its_memory_block(monkeypatch):
    whole = torch.randn(1000, WIDTH, device="cuda")
    monkeypatch.setattr(sys.modules[__name__], "TABLE", whole[77])
    with captured_runner(with_table) as runner:
        assert [block.address for block in unknown_of(runner).blocks] == [whole.data_ptr()]


def test_a_workspace_sized_tensor_read_by_a_raw_kernel_is_reported(monkeypatch):
    large = torch.zeros(max(internal_sizes()) // 4, device="cuda")
    monkeypatch.setattr(sys.modules[__name__], "TABLE", large)
    with captured_runner(with_table) as runner:
        assert [block.address for block in unknown_of(runner).blocks] == [large.data_ptr()]


# Clean models -------------------------------------------------------------------------------------


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).view(1, len(x), 6, 64).transpose(1, 2).chunk(3, 1)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(attended.transpose(1, 2).reshape(len(x), WIDTH))


class Noisy(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.linear(x) + torch.rand_like(x)


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4096), nn.Linear(4096, WIDTH)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("model", [Layers, Attention, Noisy])
def test_a_clean_model_reports_no_unknown_memory(model, dtype):
    # What lies about must not be found.
    others = [torch.randn(WIDTH, 4096, device="cuda") for _ in range(8)]
    net = model().to("cuda", dtype).eval().requires_grad_(False)
    with captured_runner(net, dtype) as runner:
        unknown = unknown_of(runner)
        assert unknown.blocks == () and unknown.unread == 0 and others


def test_the_cublas_workspace_is_recognized_by_its_size():
    x = torch.randn(64, 64, device="cuda")
    torch.mm(x, x)
    blocks = get_platform("cuda").memory_blocks()
    own = [block for block in blocks if block.may_be_internal and block.bytes >= MIB]
    print("blocks of the sizes of workspaces:", own)
    assert own


# Kinds of nodes -----------------------------------------------------------------------------------


def test_addresses_of_a_copy_and_a_fill_in_a_graph_are_read():
    source, target, filled = (torch.randn(4096, device="cuda") for _ in range(3))

    def work():
        target.copy_(source)
        stream = pointer(torch.cuda.current_stream().cuda_stream)
        status = need().cuMemsetD8Async(
            ctypes.c_uint64(filled.data_ptr()), ctypes.c_ubyte(0), ctypes.c_size_t(4096), stream
        )
        check("cuMemsetD8Async", status)

    graph = captured(work)
    assert {MEMCPY, MEMSET} <= kinds_of(graph)
    assert words_of(graph) >= {each.data_ptr() for each in (source, target, filled)}
    known = [target.data_ptr()]
    unknown = unknown_memory(get_platform("cuda"), [graph], known)
    assert {each.address for each in unknown.blocks} == {source.data_ptr(), filled.data_ptr()}


class Template:
    """A template that is no graph of torch's."""

    def __init__(self, handle):
        self.handle = handle

    def raw_cuda_graph(self):
        return self.handle


def test_addresses_in_a_child_graph_are_read():
    source, target = (torch.randn(4096, device="cuda") for _ in range(2))
    inner = captured(lambda: torch.add(source, 1, out=target))
    outer, node = ctypes.c_void_p(), ctypes.c_void_p()
    check("cuGraphCreate", need().cuGraphCreate(ctypes.byref(outer), 0))
    status = need().cuGraphAddChildGraphNode(
        ctypes.byref(node), outer, None, ctypes.c_size_t(0), pointer(inner.raw_cuda_graph())
    )
    check("cuGraphAddChildGraphNode", status)
    try:
        graph = Template(outer.value)
        assert kinds_of(graph) == {CHILD}
        assert words_of(graph) >= {source.data_ptr(), target.data_ptr()}
    finally:
        destroy_graph(outer.value)


def test_pointers_of_a_graph_without_a_template_are_unknown():
    x = torch.zeros(8, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        x += 1
    platform = get_platform("cuda")
    assert platform.pointers(graph) is None
    assert platform.pointers(torch.cuda.CUDAGraph(keep_graph=True)) is None


# What it costs ------------------------------------------------------------------------------------


def best_ms(function):
    times = []
    for _ in range(7):
        started = time.perf_counter()
        function()
        times.append(time.perf_counter() - started)
    return 1000 * min(times)


@pytest.mark.parametrize("kind", ["elementwise", "strided", "linear"])
def test_reading_pointers_of_a_thousand_nodes_prints_its_time(kind):
    x = torch.randn(64, WIDTH, device="cuda")
    weight = torch.randn(WIDTH, WIDTH, device="cuda")
    # Broadcasts hand their kernels large structs of strides.
    work = {
        "elementwise": lambda: x.add_(1),
        "strided": lambda: torch.add(x.t(), weight[:, :1]),
        "linear": lambda: x @ weight,
    }[kind]

    def thousand():
        for _ in range(1000):
            work()

    graph = captured(thousand)
    platform = get_platform("cuda")
    pointers = platform.pointers(graph)
    assert len(pointers.nodes) >= 1000 and pointers.unread == 0
    words = sum(map(len, pointers.nodes)) / len(pointers.nodes)
    print(
        f"\n{kind}: {len(pointers.nodes)} nodes of {words:.1f} plausible words: "
        f"pointers {best_ms(lambda: platform.pointers(graph)):.2f} ms, "
        f"blocks {best_ms(platform.memory_blocks):.2f} ms, "
        f"all {best_ms(lambda: unknown_memory(platform, [graph], [x.data_ptr()])):.2f} ms"
    )
