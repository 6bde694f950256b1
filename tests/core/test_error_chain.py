"""What an error came from, for those who look for its cause."""

from __future__ import annotations

from graphrt.core.device.error_chain import error_chain


def chained() -> tuple[Exception, list[Exception]]:
    """An error with a cause and a context, and a circle behind them."""
    first, cause, context, behind = (KeyError(place) for place in range(4))
    first.__cause__, first.__context__ = cause, context
    cause.__context__, behind.__context__ = behind, first
    return first, [first, cause, context, behind]


def test_every_error_comes_once_nearest_first() -> None:
    first, wanted = chained()
    assert list(error_chain(first)) == wanted


def test_what_is_left_out_hides_what_is_behind_it() -> None:
    first, (_, cause, context, _) = chained()
    explained = ValueError()
    explained.__context__ = context
    first.__context__ = explained
    cause.__context__ = None
    assert list(error_chain(first, leave_out=ValueError)) == [first, cause]
    assert list(error_chain(explained, leave_out=ValueError)) == [explained, context]
