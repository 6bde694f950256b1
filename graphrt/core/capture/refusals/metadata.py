"""What a context says of one live step, withheld from what is being captured."""

from __future__ import annotations

import functools
from typing import Any

from graphrt.core.base import FrozenMetadataError
from graphrt.core.batch import ForwardContext
from graphrt.core.capture.refusals.source import user_source


class _Withholding:
    """A context while a segment is open: a graph would keep one step's values for ever.

    A class of its own, given to the context for that time, so that a replay's context pays nothing.
    """

    __slots__ = ()

    @property
    def metadata(self) -> Any:
        source = user_source()
        raise FrozenMetadataError(
            "the forward read a step's metadata while it was being captured: every replay would "
            "have what this step says",
            source=None if source is None else str(source),
            advice="read it in an eager break (under PIECEWISE), pass it as an input or as a host "
            "argument of a task; or, if one value is right for every step of a graph, such as the "
            "longest context, declare it with Host(metadata=...)",
        )

    @metadata.setter
    def metadata(self, value: Any) -> None:
        _METADATA.__set__(self, value)

    @property
    def query_len(self) -> int | None:
        # As where nobody said it: a graph of mixed batches serves others than this one too.
        return None

    @query_len.setter
    def query_len(self, value: int | None) -> None:
        _QUERY_LEN.__set__(self, value)


# The slots, below the properties.
_METADATA: Any = vars(ForwardContext)["metadata"]
_QUERY_LEN: Any = vars(ForwardContext)["query_len"]


def withhold(context: ForwardContext) -> None:
    """Until `hand_back`, nothing in `context` is of one live step, and its metadata is refused,
    unless the capture it allows says that it is declared."""
    kind: Any = type(context)
    if context.capture is not None and context.capture.metadata_is_declared:
        return
    if not issubclass(kind, _Withholding):
        _set_class(context, _withholding(kind))


def hand_back(context: ForwardContext) -> None:
    """End `withhold`."""
    kind = type(context)
    if issubclass(kind, _Withholding):
        _set_class(context, kind.__bases__[1])


def _set_class(context: ForwardContext, kind: type) -> None:
    object.__setattr__(context, "__class__", kind)


@functools.cache
def _withholding(kind: type) -> type:
    return type(kind.__name__, (_Withholding, kind), {"__slots__": ()})
