"""cuBLAS's workspaces: one block of scratch memory for each stream, which captured graphs use too.

torch has them in a table by handle and stream. From 2.12 on it drops the entry of a stream when a
graph that was captured on it is reset. The block is free then, but other graphs still write to it.
So graphrt makes torch allocate it again at once, before another tensor gets it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import torch

from graphrt.core.base._undo import Undo, undoing
from graphrt.core.base.log import logger
from graphrt.core.base.thread_mode import unseen
from graphrt.cuda.blocks import workspace_sizes

_hosts: set[tuple[int, int]] = set()
"""(device, handle) of each stream on which the host captures too."""


def is_hosts(stream: torch.cuda.Stream) -> bool:
    """Whether the host captures on this stream too."""
    return (stream.device_index, stream.cuda_stream) in _hosts


def mark_as_hosts(stream: torch.cuda.Stream) -> None:
    """Note that the host captures on this stream too: its workspace may be outside of any pool."""
    _hosts.add((stream.device_index, stream.cuda_stream))


def streams_with_workspaces(segments: Iterable[Mapping[str, Any]]) -> set[int]:
    """The streams for which a block that may be a workspace is in use in these segments."""
    sizes = workspace_sizes()
    return {
        segment["stream"]
        for segment in segments
        for block in segment["blocks"]
        if block["state"] == "active_allocated" and block["requested_size"] in sizes
    }


class Workspaces:
    """Makes torch allocate workspaces of streams again, in the memory that the caller routes to."""

    def __init__(self) -> None:
        # Of the product that makes cuBLAS ask for a workspace; None before `prepare`.
        self._operand: torch.Tensor | None = None
        self._result: torch.Tensor | None = None

    def prepare(self) -> None:
        """Make the operands, outside of any pool."""
        if self._operand is None:
            device = torch.device("cuda", torch.cuda.current_device())
            options: Any = {"dtype": torch.float32, "device": device}
            self._operand = unseen(lambda: torch.ones(16, 16, **options))
            self._result = unseen(lambda: torch.empty(16, 16, **options))

    @undoing
    def ask(self, undo: Undo, streams: Iterable[torch.cuda.Stream]) -> None:
        """Have cuBLAS multiply once on each of the streams that is not being captured."""
        undo.later(partial(torch.cuda.set_stream, torch.cuda.current_stream()))
        for stream in streams:
            torch.cuda.set_stream(stream)
            if torch.cuda.is_current_stream_capturing():
                continue
            try:
                unseen(self._multiply)
            except torch.OutOfMemoryError as error:
                logger.warning(
                    "the workspace of cuBLAS, which torch dropped with a graph, could not be "
                    "taken back for the other graphs of its stream: %s",
                    str(error).splitlines()[0],
                )

    def _multiply(self) -> None:
        assert self._operand is not None and self._result is not None
        torch.mm(self._operand, self._operand, out=self._result)
