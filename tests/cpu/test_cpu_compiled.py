from __future__ import annotations

import os
import shutil
import sys
from dataclasses import dataclass

import pytest
import torch
from cpu_capturing import capture, modes_left, same
from torch import nn

from graphrt.cpu import Arena
from tests import starts


@pytest.fixture(params=["eager", "inductor"])
def backend(request):
    if request.param == "inductor" and not (shutil.which("g++") or shutil.which("clang++")):
        print("skipped: inductor on the CPU needs a C++ compiler")
        pytest.skip("no C++ compiler")
    torch._dynamo.reset()
    yield request.param
    torch._dynamo.reset()


@pytest.mark.parametrize("inference", [False, True], ids=["no_grad", "inference_mode"])
def test_a_compiled_function_is_one_opaque_call(backend, inference):
    @torch.compile(backend=backend)
    def inner(x, y):
        return (x * 2 + y).sin(), x @ y

    def forward(x):
        y = x + 1
        a, b = inner(y, x)
        return a * b

    x = torch.randn(4, 4)
    with torch.inference_mode(inference), torch.no_grad():
        expected = forward(x)
    arena = Arena()
    graph, out = capture(forward, x, arena=arena, inference=inference)
    assert [s.label for s in graph._steps] == [
        "aten.add.Tensor",
        "compiled callable",
        "aten.mul.Tensor",
    ]
    assert same(out, expected)
    assert not any(arena.owns(t) for _, t in graph._steps[1].lowered.copies)
    for _ in range(2):
        x.copy_(torch.randn(4, 4))
        graph.replay()
        with torch.inference_mode(inference), torch.no_grad():
            assert same(out, forward(x))
    assert modes_left() == 0


def test_replay_does_not_compile_anew(backend):
    from torch._dynamo.utils import counters

    inner = torch.compile(lambda x, w: (x @ w).relu(), backend=backend)
    weight = nn.Parameter(torch.randn(4, 4))

    def forward(x):
        return inner(x + 1, weight) + 1

    x = torch.randn(4, 4)
    with torch.no_grad():
        forward(x)
    frames = counters["frames"]["total"]
    graph, _ = capture(forward, x)
    graph.replay()
    graph.replay()
    assert counters["frames"]["total"] == frames


def test_a_compiled_module_inside_a_forward_is_opaque(backend):
    module = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
    compiled = torch.compile(module, backend=backend)

    def forward(x):
        return compiled(x) + x

    x = torch.randn(2, 4)
    graph, out = capture(forward, x)
    assert [s.label for s in graph._steps] == ["compiled callable", "aten.add.Tensor"]
    x.copy_(torch.randn(2, 4))
    graph.replay()
    with torch.no_grad():
        assert same(out, forward(x))


def test_a_graph_break_inside_a_compiled_function_is_issued_again_at_replay():
    @torch.compile(backend="eager")
    def inner(x):
        y = x * 2
        torch._dynamo.graph_break()
        z = torch.tanh(y) if y.sum().item() > 0 else -y
        return z + 1

    x = torch.ones(3)
    graph, out = capture(lambda x: inner(x) * 2, x)
    assert [s.label for s in graph._steps] == ["compiled callable", "aten.mul.Tensor"]
    for value in (2.0, -2.0):
        x.fill_(value)
        graph.replay()
        assert same(out, inner(x) * 2)


def test_host_reads_outside_the_compiled_region_are_still_refused():
    from graphrt.core.base.errors import CaptureSyncError

    inner = torch.compile(lambda x: x + 1, backend="eager")
    with pytest.raises(CaptureSyncError):
        capture(lambda x: inner(x).tolist(), torch.ones(3))
    assert modes_left() == 0


def test_an_error_inside_a_compiled_region_leaves_nothing_behind():
    def boom(x):
        raise ValueError("inside")

    inner = torch.compile(boom, backend="eager")
    with pytest.raises(Exception, match="inside"):
        capture(inner, torch.ones(3))
    assert modes_left() == 0
    graph, out = capture(lambda x: x + 1, torch.ones(3))
    graph.replay()
    assert out.tolist() == [2.0] * 3


def test_a_compiled_callable_of_an_unknown_shape_is_refused(monkeypatch):
    from graphrt.core.base.errors import CaptureError
    from graphrt.cpu import compiled

    monkeypatch.setattr(compiled, "_NEEDED_LOCALS", frozenset({"not there"}))
    inner = torch.compile(lambda x: (x * 2).sin(), backend="eager")
    with pytest.raises(CaptureError, match=r"compiled callables of torch .* cannot be recorded"):
        capture(lambda x: inner(x) + 1, torch.randn(4))
    assert modes_left() == 0


def test_a_compiled_callable_whose_result_is_no_local_is_recorded_as_it_returns(monkeypatch):
    from graphrt.cpu import compiled

    # As torch 2.11 is, on any torch.
    monkeypatch.setattr(compiled, "_RESULT_LOCALS", frozenset({"not there"}))
    inner = torch.compile(lambda x: (x * 2).sin(), backend="eager")
    x = torch.randn(4)
    try:
        raise KeyError  # an exception that is being handled is not one of the callable
    except KeyError:
        graph, out = capture(lambda x: inner(x) + 1, x)
    assert [s.label for s in graph._steps] == ["compiled callable", "aten.add.Tensor"]
    x.copy_(torch.randn(4))
    graph.replay()
    assert same(out, (x * 2).sin() + 1)
    assert sys.getprofile() is None


def test_a_profiler_where_the_result_is_no_local_is_refused(monkeypatch):
    from graphrt.core.base.errors import CaptureError
    from graphrt.cpu import compiled

    monkeypatch.setattr(compiled, "_RESULT_LOCALS", frozenset({"not there"}))
    inner = torch.compile(lambda x: x + 1, backend="eager")
    sys.setprofile(lambda *event: None)
    try:
        with pytest.raises(CaptureError, match="under a profiler"):
            capture(lambda x: inner(x) + 1, torch.randn(4))
    finally:
        sys.setprofile(None)
    assert modes_left() == 0


@dataclass
class Pair:
    a: torch.Tensor
    b: list


def test_tensors_in_dataclasses_of_a_compiled_call_are_followed():
    inner = torch.compile(lambda pair: Pair(pair.a * 2, [pair.a + pair.b[0]]), backend="eager")

    def forward(x):
        given = Pair(x + 1, [x * 3])
        found = inner(given)
        given.a = given.b = None
        return found

    x = torch.randn(4)
    graph, out = capture(forward, x)
    x.copy_(torch.randn(4))
    graph.replay()
    assert same(out.a, (x + 1) * 2)
    assert same(out.b[0], (x + 1) + x * 3)


def test_a_container_of_a_compiled_call_that_cannot_be_searched_is_refused():
    from graphrt.core.base.errors import CaptureError

    class Box:
        def __init__(self, x):
            self.x = x

    inner = torch.compile(lambda x: Box(x + 1), backend="eager")
    with pytest.raises(CaptureError, match="container"):
        capture(lambda x: inner(x).x + 1, torch.ones(2))


def test_a_number_of_a_compiled_call_that_changes_is_named_at_replay():
    from graphrt.core.base.errors import BakedScalarError

    inner = torch.compile(lambda x: (x + 1, x.sum().item()), backend="eager")
    x = torch.ones(2)
    graph, _ = capture(lambda x: inner(x)[0] * inner(x)[1], x)
    graph.replay()
    x.fill_(2)
    with pytest.raises(BakedScalarError):
        graph.replay()


def test_code_of_inductor_that_is_called_without_dynamo_is_refused():
    from graphrt.core.base.errors import CaptureError

    if not (shutil.which("g++") or shutil.which("clang++")):
        print("skipped: inductor on the CPU needs a C++ compiler")
        pytest.skip("no C++ compiler")
    from torch._inductor.compile_fx import compile_fx
    from torch.fx.experimental.proxy_tensor import make_fx

    x = torch.randn(4)
    compiled = compile_fx(make_fx(lambda x: (x * 2).sin())(x), [x])
    with pytest.raises(CaptureError, match=r"other than through torch\.compile"):
        capture(lambda x: compiled(x + 1), x)
    compiled(x)
    assert modes_left() == 0


LATE = """
import sys, torch
from cpu_capturing import capture
from graphrt.core.base.errors import CaptureError

assert "torch._dynamo" not in sys.modules
try:
    capture(lambda x: torch.compile(lambda y: (y * 2).sin())(x + 1), torch.randn(4))
except CaptureError as error:
    assert "inside of the capture" in str(error), error
else:
    raise AssertionError
"""


def test_a_compiler_that_is_loaded_inside_of_the_capture_is_refused():
    if not (shutil.which("g++") or shutil.which("clang++")):
        print("skipped: inductor on the CPU needs a C++ compiler")
        pytest.skip("no C++ compiler")
    paths = [os.path.dirname(__file__), *sys.path]
    path = os.pathsep.join(filter(None, paths))
    ran = starts.run("-c", LATE, env=os.environ | {"PYTHONPATH": path})
    assert ran.returncode == 0, ran.stderr
