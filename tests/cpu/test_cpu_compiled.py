from __future__ import annotations

import os
import shutil
import sys

import pytest
import torch
from cpu_capturing import capture, modes_left, same

import graphrt
from graphrt.core.base.errors import CaptureError
from tests import starts


@pytest.fixture(params=["eager", "inductor"])
def backend(request):
    if request.param == "inductor" and not (shutil.which("g++") or shutil.which("clang++")):
        print("skipped: inductor on the CPU needs a C++ compiler")
        pytest.skip("no C++ compiler")
    torch._dynamo.reset()
    yield request.param
    torch._dynamo.reset()


@pytest.mark.parametrize("warm", [False, True])
def test_a_torch_compiled_function_inside_a_capture_is_refused(backend, warm):
    inner = torch.compile(lambda x, y: ((x * 2 + y).sin(), x @ y), backend=backend)
    x = torch.randn(4, 4)
    with torch.no_grad():
        expected = inner(x + 1, x) if warm else None
    with pytest.raises(CaptureError, match=r"calls code of torch\.compile") as caught:
        capture(lambda x: inner(x + 1, x), x)
    assert "test_cpu_compiled.py" in str(caught.value.source)
    assert modes_left() == 0
    if expected is not None:
        with torch.no_grad():
            assert all(map(same, inner(x + 1, x), expected))


def test_a_compiled_function_without_operators_is_refused():
    inner = torch.compile(lambda x: x, backend="eager")
    with pytest.raises(CaptureError, match=r"calls code of torch\.compile"):
        capture(inner, torch.ones(3))
    graph, out = capture(lambda x: x + 1, torch.ones(3))
    graph.replay()
    assert out.tolist() == [2.0] * 3


def test_compiled_code_inside_a_custom_operator_is_replayed_with_the_operator(backend):
    inner = torch.compile(lambda x: (x * 2).sin(), backend=backend)

    @torch.library.custom_op("graphrt_tests::compiled_inside", mutates_args=())
    def operator(x: torch.Tensor) -> torch.Tensor:
        return inner(x) + 0

    x = torch.randn(4)
    graph, out = capture(lambda x: operator(x) + 1, x)
    x.copy_(torch.randn(4))
    graph.replay()
    assert same(out, operator(x) + 1)


def test_a_function_disabled_for_dynamo_is_captured():
    plain = torch._dynamo.disable(lambda x: x * 2)
    graph, out = capture(lambda x: plain(x) + 1, torch.ones(3))
    graph.replay()
    assert out.tolist() == [3.0] * 3


def test_a_compiled_function_calls_graphs_without_a_trace_of_them():
    """Dynamo compiled a hundred functions of graphrt at the first step, for a minute."""
    torch._dynamo.reset()
    model = torch.nn.Linear(4, 4).eval().requires_grad_(False)
    fast = graphrt.graphed(model, inputs=(torch.randn(4, 4),), sizes=[2, 4])
    calls = {
        "graphed": torch.compile(lambda x: fast(x) * 2, backend="eager"),
        "runner": torch.compile(lambda x: fast.runner(input=x) * 2, backend="eager"),
    }
    for name, call in calls.items():
        for rows in (4, 3, 2, 4):
            x = torch.randn(rows, 4)
            assert torch.equal(call(x), model(x) * 2), name
            assert fast.runner.last_dispatch.reason.name == "HIT"
    met = {code().co_filename for code in torch._dynamo.convert_frame.input_codes.seen}
    torch._dynamo.reset()
    assert __file__ in met
    assert not [name for name in met if name.startswith(os.path.dirname(graphrt.__file__))]
    fast.runner.close()


def test_inductor_code_called_directly_inside_a_capture_is_refused():
    if not (shutil.which("g++") or shutil.which("clang++")):
        print("skipped: inductor on the CPU needs a C++ compiler")
        pytest.skip("no C++ compiler")
    from torch._inductor.compile_fx import compile_fx
    from torch.fx.experimental.proxy_tensor import make_fx

    x = torch.randn(4)
    compiled = compile_fx(make_fx(lambda x: (x * 2).sin())(x), [x])
    with pytest.raises(CaptureError, match=r"calls code of torch\.compile"):
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
