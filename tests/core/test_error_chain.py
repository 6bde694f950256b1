"""`error_chain` walks the causes of an error; an error with a source line is a new object."""

from __future__ import annotations

from graphrt.core.base.errors import CaptureError
from graphrt.core.device.contract import error_chain


def chained() -> tuple[Exception, list[Exception]]:
    """An error with a cause and a context, and a circle behind them."""
    first, cause, context, behind = (KeyError(place) for place in range(4))
    first.__cause__, first.__context__ = cause, context
    cause.__context__, behind.__context__ = behind, first
    return first, [first, cause, context, behind]


def test_error_chain_yields_each_error_once_nearest_first() -> None:
    first, wanted = chained()
    assert list(error_chain(first)) == wanted


def test_error_chain_omits_left_out_errors_and_their_causes() -> None:
    first, (_, cause, context, _) = chained()
    explained = ValueError()
    explained.__context__ = context
    first.__context__ = explained
    cause.__context__ = None
    assert list(error_chain(first, leave_out=ValueError)) == [first, cause]
    assert list(error_chain(explained, leave_out=ValueError)) == [explained, context]


def test_adding_a_source_line_to_an_error_makes_a_new_error() -> None:
    """A frame that raised an object of its own would keep the memory of a failed capture."""
    bare = CaptureError("no room", op="aten::mm", got=1, expected=2, advice="less")
    told = bare.at("model.py:3")
    assert told is not bare and (bare.source, told.source) == (None, "model.py:3")
    assert str(told) == str(bare).replace("aten::mm", "aten::mm\n  at: model.py:3")
    assert told.at("other.py:1") is told and bare.at(None) is bare
