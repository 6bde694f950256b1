"""A forward that decides by a size that the trace does not know is told what to write instead."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from graphrt.compile import CompileOptions, TraceError, compile_module


class Buffered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("buffer", torch.zeros(64, 4))


class Sliced(Buffered):
    """Dynamo knows of no torch (2.11 to 2.13) that the slice has n rows, where n is unbacked."""

    def forward(self, x):
        n = x.shape[0]
        return torch.add(x, 1, out=self.buffer[:n])


class SlicedBefore(Buffered):
    def forward(self, x):
        n = x.shape[0]
        out = self.buffer[:n, :4]
        out = out.view(out.shape)
        return torch.add(x, 1, out=out)


def added(x, out):
    return torch.add(x, 1, out=out)


class SlicedForAnother(Buffered):
    def forward(self, x):
        n = x.shape[0]
        return added(x, self.buffer[:n])


class Checked(Buffered):
    def forward(self, x):
        n = x.shape[0]
        torch._check(n <= self.buffer.shape[0])
        return torch.add(x, 1, out=self.buffer[:n])


class Written(Buffered):
    """Torch 2.11 does not trace it, 2.13 does."""

    def forward(self, x):
        n = x.shape[0]
        self.buffer[:n].copy_(x)
        return self.buffer[:n] * 2


class WrittenAndChecked(Buffered):
    def forward(self, x):
        n = x.shape[0]
        torch._check(n <= self.buffer.shape[0])
        self.buffer[:n].copy_(x)
        return self.buffer[:n] * 2


class Branching(nn.Module):
    def forward(self, x):
        n = x.long().sum().item()
        if n > 4:
            return x[:n]
        return x + 1


def refusal(model: nn.Module, dynamic_shapes: str) -> TraceError:
    compiled = compiled_of(model, dynamic_shapes)
    with pytest.raises(TraceError) as caught:
        compiled.ensure_compiled(torch.ones(5, 4))
    return caught.value


def compiled_of(model: nn.Module, dynamic_shapes: str) -> Any:
    options = CompileOptions(dynamic_shapes=dynamic_shapes)
    return compile_module(model, ["x"], options=options, in_place=False)


@pytest.mark.parametrize("kind", [Sliced, SlicedBefore, SlicedForAnother])
def test_a_refused_slice_advises_torch_check(kind):
    said = str(refusal(kind(), "unbacked"))
    assert "torch._check(n <= buffer.shape[0]) before buffer[:n]" in said
    assert f"{__file__}:" in said


@pytest.mark.parametrize("kind", [Checked, WrittenAndChecked])
@pytest.mark.parametrize("dynamic_shapes", ["backed", "unbacked"])
def test_a_forward_with_the_advised_torch_check_compiles(kind, dynamic_shapes):
    model = kind()
    compiled = compiled_of(model, dynamic_shapes)
    for size in (5, 7, 2, 64):
        x = torch.randn(size, 4)
        assert torch.equal(compiled(x).clone(), model(x).clone())


@pytest.mark.parametrize("dynamic_shapes", ["backed", "unbacked"])
def test_a_write_to_a_slice_of_unknown_size_works_or_advises_torch_check(dynamic_shapes):
    model = Written()
    compiled = compiled_of(model, dynamic_shapes)
    x, said = torch.randn(5, 4), ""
    try:
        compiled.ensure_compiled(x)
    except TraceError as error:
        said = str(error)
    if said:
        assert "torch._check(n <= buffer.shape[0])" in said
    else:
        assert torch.equal(compiled(x), model(x))


def test_a_refused_branch_on_data_advises_torch_where_and_names_its_line():
    said = str(refusal(Branching(), "backed"))
    assert "it decides by what no trace knows, u0 > 4" in said
    assert f"{__file__}:" in said and "if n > 4:" in said
    assert "torch.where" in said
