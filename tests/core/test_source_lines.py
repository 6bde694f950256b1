"""Finding the line of the user's code that an error came through."""

from __future__ import annotations

import functools
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from graphrt import (
    BatchDescriptor,
    GraphMode,
    GraphOptions,
    GraphPool,
    GraphRunner,
    InputSpec,
    eager_break,
    errors,
    forward_context,
    wrapper_class,
)
from graphrt.core.base.errors import GraphRTError
from graphrt.core.batch.context import CaptureTransaction
from graphrt.core.capture.refusals import Source, source_of, stands_for, user_source
from graphrt.core.replay.recording import current_capture
from graphrt.cpu import CPUGraphWrapper, CpuPlatform
from graphrt.cuda.explain import explain


def fails(x: torch.Tensor) -> torch.Tensor:
    return x.view(-1, 3)  # 8 elements


class Outer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Identity(), Inner())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


class Inner(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(-1, 3)  # blamed: nested


class Hooked(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 4).requires_grad_(False)
        self.layer.register_forward_pre_hook(self.hook)

    def hook(self, module: torch.nn.Module, args: Any) -> None:
        raise ValueError("of the hook")  # blamed: hook

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


@eager_break
def part(x: torch.Tensor) -> torch.Tensor:
    return x * {}["factor"]  # blamed: eager break


@torch.library.custom_op("source_lines::raises", mutates_args=())
def raises(x: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("of the operator")  # blamed: custom op


def halves(x: torch.Tensor) -> torch.Tensor:  # blamed: compiled
    return (x * 2)[torch.full((1,), 99)]


@functools.cache
def compiled(backend: str) -> Callable[[torch.Tensor], torch.Tensor]:
    return torch.compile(halves, backend=backend)


def in_compiled_code(x: torch.Tensor) -> torch.Tensor:
    if current_capture() is None:
        return compiled("eager")(x)
    return compiled("eager")(x)  # captured: compiled


def in_code_of_inductor(x: torch.Tensor) -> torch.Tensor:
    if current_capture() is None:
        return compiled("inductor")(x)
    return compiled("inductor")(x)  # captured: compiled


def runtime_error(x: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("of the model")  # blamed: runtime error


def index_error(x: torch.Tensor) -> torch.Tensor:
    return x * [1.0][5]  # blamed: index error


def key_error(x: torch.Tensor) -> torch.Tensor:
    return x * {}["scale"]  # blamed: key error


def type_error(x: torch.Tensor) -> torch.Tensor:
    return x + object()  # blamed: type error


def attribute_error(x: torch.Tensor) -> torch.Tensor:
    return x.nothing  # blamed: attribute error


def assertion(x: torch.Tensor) -> torch.Tensor:
    assert x.shape[1] == 5  # blamed: assertion
    return x


def shape_of_torch(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.linear(x, x.new_ones(3, 3))  # blamed: torch


def out_of_memory(x: torch.Tensor) -> torch.Tensor:
    raise torch.OutOfMemoryError("CUDA out of memory")  # blamed: out of memory


def chained(x: torch.Tensor) -> torch.Tensor:
    try:
        return x * {}["scale"]
    except KeyError as error:
        raise ValueError("no scale") from error  # blamed: chained


KINDS: dict[str, tuple[Callable[..., Any], type[Exception]]] = {
    "nested": (Outer(), RuntimeError),
    "hook": (Hooked(), ValueError),
    "eager break": (lambda x: part(x) + 1, KeyError),
    "custom op": (lambda x: torch.ops.source_lines.raises(x), RuntimeError),
    "compiled": (in_compiled_code, IndexError),
    "inductor": (in_code_of_inductor, RuntimeError),
    "runtime error": (runtime_error, RuntimeError),
    "index error": (index_error, IndexError),
    "key error": (key_error, KeyError),
    "type error": (type_error, TypeError),
    "attribute error": (attribute_error, AttributeError),
    "assertion": (assertion, AssertionError),
    "torch": (shape_of_torch, RuntimeError),
    "out of memory": (out_of_memory, torch.OutOfMemoryError),
    "chained": (chained, ValueError),
}
CODE = Path(__file__).read_text(encoding="utf-8").splitlines()
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]
needs_notes = pytest.mark.skipif(sys.version_info < (3, 11), reason="no notes; the log has them")


def line_of(mark: str) -> str:
    """`file:line` of the line that ends in a mark."""
    (number,) = (number for number, line in enumerate(CODE, 1) if line.endswith(f"# {mark}"))
    return f"{__file__}:{number} in "


def text_of(error: BaseException) -> str:
    return "\n".join([str(error), *getattr(error, "__notes__", ())])


def made(forward: Callable[..., Any], mode: str, device: str, **options: Any) -> GraphRunner:
    return GraphRunner(
        forward,
        inputs={"x": InputSpec(torch.float32, ("tokens", 4))},
        outputs=("tokens", 4),
        sizes=[4],
        mode=mode,
        platform=device,
        **options,
    )


@needs_notes
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("warmups", [1, 0], ids=["warm-up", "capture"])
@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_failed_capture_names_the_line_of_any_error_of_the_forward(kind, mode, warmups, device):
    forward, error = KINDS[kind]
    is_compiled = kind in ("compiled", "inductor")
    if device == "cuda" and is_compiled:
        pytest.skip("an index out of range on a GPU is a fault of the device")
    runner = made(forward, mode, device, options=GraphOptions(warmups=warmups))
    if device == "cuda" and kind == "out of memory":
        with pytest.warns(errors.GraphsDroppedWarning, match="CUDA out of memory") as warned:
            runner.capture()
        assert line_of(f"blamed: {kind}") in str(warned[0].message)
        return
    # The tape refuses compiled code, at the line that calls it.
    refused = is_compiled and not warmups
    with pytest.raises(errors.CaptureError if refused else error) as caught:
        runner.capture()
    text = text_of(caught.value)
    assert f"while capturing {mode} [4 tokens" in text
    assert text.count("  at: ") == 1
    if not refused:
        assert line_of("blamed: compiled" if is_compiled else f"blamed: {kind}") in text
    else:
        assert text.count("# captured: compiled") == 1


@needs_notes
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE"])
@pytest.mark.parametrize("kind", ["nested", "key error", "torch", "eager break"])
def test_a_failed_capture_of_a_bare_wrapper_names_graph_and_line(kind, mode, device):
    forward, error = KINDS[kind]
    wrapper = wrapper_class(device)(
        forward, mode, pool=GraphPool(device), breakable=True, options=GraphOptions(lazy=True)
    )
    with pytest.raises(error) as caught, forward_context(mode, BatchDescriptor(4)):
        wrapper(torch.zeros(4, 4, device=device))
    text = text_of(caught.value)
    assert f"while capturing {mode} [4 tokens]" in text and line_of(f"blamed: {kind}") in text


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", KINDS)
def test_without_graphs_a_step_raises_the_forwards_own_error_as_it_is(kind, device):
    forward, error = KINDS[kind]
    if device == "cuda" and kind in ("compiled", "inductor"):
        pytest.skip("an index out of range on a GPU is a fault of the device")
    runner = made(forward, "NONE", device)
    runner.capture()
    with pytest.raises(error) as caught:
        runner(x=torch.zeros(4, 4))
    assert not getattr(caught.value, "__notes__", ())
    files = [frame.filename for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert __file__ in files[-5:] or kind in ("custom op", "compiled", "inductor")


# Compiled apart, as a driver is: it has no file.
FAILS = """
def begin_capture(self, graph, memory):
    raise RuntimeError("no capture can be begun")

def end_capture(self, graph):
    graph.capture_end()
    raise RuntimeError("the graph cannot be instantiated")
"""


@needs_notes
@pytest.mark.parametrize("phase", ["began", "ended"])
@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE"])
def test_a_capture_that_fails_at_its_begin_or_end_names_graph_and_phase_and_says_no_line(
    mode, phase
):
    methods: dict[str, Any] = {}
    exec(compile(FAILS, "<driver>", "exec"), methods)
    name = {"began": "begin_capture", "ended": "end_capture"}[phase]
    platform = type("Failing", (CpuPlatform,), {name: methods[name]})()
    runner = made(lambda x: x + 1, mode, platform)
    with pytest.raises(RuntimeError, match=r"can(not)? be") as caught:
        runner.capture()
    text = text_of(caught.value)
    assert f"while capturing {mode} [4 tokens" in text and f", as a segment {phase}" in text
    assert text.endswith("at: no line of the forward is known")


@needs_notes
def test_a_fault_of_the_device_in_a_warm_up_names_the_graph_and_no_line():
    def forward(x: torch.Tensor) -> torch.Tensor:
        # Raised here, and caused by an earlier call.
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    with pytest.raises(torch.AcceleratorError) as caught:
        made(forward, "FULL", "cpu").capture()
    text = text_of(caught.value)
    assert "while capturing FULL [4 tokens" in text and "reports a fault late" in text
    assert "in forward" not in text


def test_a_fault_of_a_gpu_in_a_capture_is_explained_without_a_line():
    explained = explain(RuntimeError("CUDA error: an illegal memory access was encountered"))
    located = explained.at(Source(__file__, 1, "forward"))
    assert type(located) is errors.CaptureError and "a kernel failed" in str(located)
    assert "at: no line of the forward is known; a device reports a fault late" in str(located)


def test_the_source_of_an_error_is_the_innermost_user_line():
    try:
        fails(torch.zeros(8))
    except RuntimeError as error:
        source = source_of(error)
    assert source is not None
    assert source.function == "fails"
    assert str(source).endswith("in fails: return x.view(-1, 3)  # 8 elements")


def test_user_source_called_from_user_code_gives_the_calling_line():
    source = user_source()
    assert source is not None
    assert str(source).endswith("user_code_gives_the_calling_line: source = user_source()")


def test_an_error_raised_by_no_user_code_has_no_source():
    assert source_of(RuntimeError("never raised")) is None


def test_a_failed_capture_raises_the_forwards_own_error_with_its_traceback():
    wrapper = CPUGraphWrapper(fails, GraphMode.FULL, pool=GraphPool("cpu"))
    context = forward_context("FULL", None)
    context.capture = CaptureTransaction()
    context.descriptor = BatchDescriptor(8)
    with pytest.raises(RuntimeError, match="is invalid for input of size 8") as caught, context:
        wrapper(torch.zeros(8))
    # The forward's own error, by its own traceback.
    assert not isinstance(caught.value, GraphRTError)
    assert "fails" in [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]


def test_source_lines_of_generated_code_are_mapped_until_forgotten():
    made = compile("def made():\n    return user_source()\n", "<generated>", "exec")
    names = {"user_source": user_source}
    exec(made, names)
    forget = stands_for("<generated>", lambda line: Source("model.py", line + 10, "forward"))
    assert names["made"]() == Source("model.py", 12, "forward")
    forget()
    source = names["made"]()
    assert source is None or source.filename != "model.py"
