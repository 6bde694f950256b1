"""Errors of a capture or trace of compiled code name the line of the forward."""

from __future__ import annotations

import gc
import inspect

import pytest
import torch
from torch import Tensor, nn

from graphrt import GraphPool, GraphRunner, InputSpec
from graphrt.compile import TraceError, compile_module, opaque
from graphrt.core.base.errors import CaptureError
from graphrt.core.capture import refusals


@opaque("graphrt_lines::half", mutates=["out"])
def half(x: Tensor, out: Tensor) -> None:
    out.copy_(x * 0.5)


def read_on_the_host(x: Tensor) -> Tensor:
    y = x * 2
    return y * x.sum().item()  # here


def masked(x: Tensor) -> Tensor:
    x = x + 1
    return x + x[x.sum(1) > 0].sum(0)  # here


def counted(x: Tensor) -> Tensor:
    x[:, 0] = 1.0
    x[:, 1] = x.nonzero().shape[0]  # here
    x[:, 2] = 2.0
    return x + 1


class Model(nn.Module):
    """A function on the far side of a splitting operator."""

    def __init__(self, function) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        half(x, out)
        return self.function(out) * 2


def here(function) -> str:
    lines, first = inspect.getsourcelines(function)
    index = next(index for index, line in enumerate(lines) if line.endswith("# here\n"))
    return f"at: {__file__}:{first + index} in {function.__name__}: {lines[index].strip()}"


@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE"])
@pytest.mark.parametrize("function", [read_on_the_host, masked, counted])
def test_a_refused_capture_of_compiled_code_names_the_line_of_the_forward(function, mode):
    pool = GraphPool("cpu")
    compiled = compile_module(Model(function), ["x"], pool=pool, in_place=False)
    runner = GraphRunner(
        compiled,
        mode=mode,
        sizes=[2, 4],
        inputs={"x": InputSpec(torch.float32, ("tokens", 4))},
        outputs=("tokens", 4),
        pool=pool,
    )
    with runner, pytest.raises(CaptureError) as caught:
        runner.capture()
    assert here(function) in str(caught.value)


def decided(x: Tensor) -> Tensor:
    if x.sum() > 0:  # here
        return x
    return x * 2


def test_a_trace_error_names_the_line_of_the_forward():
    with pytest.raises(TraceError) as caught:
        compile_module(Model(decided), ["x"], in_place=False)(torch.ones(4, 4))
    assert here(decided).replace("at: ", "got: ") in str(caught.value)


def six(x: Tensor) -> Tensor:
    return x.view(6, 2, 2)  # here


def printed(x: Tensor) -> Tensor:
    print(x)  # here
    return x


def mismatched(x: Tensor) -> Tensor:
    return x @ torch.ones(7, 3)  # here


def appended(x: Tensor) -> Tensor:
    calls: list[int] = []

    def one(x: Tensor) -> Tensor:
        calls.append(1)
        return x.sin()

    return torch.cond(x.sum() > 0, one, torch.cos, (x,))  # here


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (six, "always 6, by"),
        (printed, "builtin operator `print`"),
        (mismatched, "must have same reduction dim"),
        (appended, "torch.cond: Mutating a variable from outside"),
    ],
)
def test_a_trace_error_quotes_torch_once_without_advice_on_torch_settings(function, reason, capfd):
    with pytest.raises(TraceError) as caught:
        compile_module(function, ["x"])(torch.ones(6, 4))
    said = str(caught.value)
    assert reason in said and (function is appended or here(function)[4:] in said)
    assert "torch._dynamo" not in said and "TORCH" not in said and "L['x']" not in said
    assert capfd.readouterr().err == ""


def test_line_tables_of_dropped_pieces_are_freed():
    before = set(refusals._generated)
    compiled = compile_module(Model(masked), ["x"], in_place=False)
    compiled.ensure_compiled(torch.ones(4, 4))
    made = set(refusals._generated) - before
    assert made
    del compiled
    torch.compiler.reset()
    gc.collect()
    assert made.isdisjoint(refusals._generated)
