"""Finding the line of the user's code that an error came through."""

from __future__ import annotations

import traceback

import pytest
import torch

from graphrt import BatchDescriptor, GraphMode, GraphPool, forward_context
from graphrt.core.base.errors import GraphRTError
from graphrt.core.batch.context import CaptureTransaction
from graphrt.core.capture.refusals import Source, source_of, stands_for, user_source
from graphrt.cpu import CPUGraphWrapper


def fails(x: torch.Tensor) -> torch.Tensor:
    return x.view(-1, 3)  # 8 elements


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
