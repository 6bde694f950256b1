"""The step of several pieces that is under way in a pool, and what such steps leave behind."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from contextvars import Token
from typing import Any

import torch

from graphrt.core.base import tree
from graphrt.core.base.errors import CaptureError
from graphrt.core.batch.context import ForwardContext
from graphrt.core.batch.descriptor import BatchDescriptor


class PieceSteps:
    """Which step of several pieces is under way in a pool, by the token of its context.

    It begins with the first piece that replays or captures, and ends where its context is left or,
    where a host only began it, with the next one. A step of one graph is none of them.
    """

    __slots__ = (
        "_begun",
        "_captured",
        "_loose",
        "_over",
        "_replayed",
        "_without_graph",
        "context",
    )

    def __init__(self) -> None:
        # Outputs that entries hold weakly, by their storage.
        self._loose: weakref.WeakValueDictionary[int, torch.Tensor] = weakref.WeakValueDictionary()
        # The last step that a host began, and that another one has followed.
        self._over: object = None
        # The step in which a piece had no graph.
        self._without_graph: object = None
        self.forget()

    def forget(self) -> None:
        """Forget the steps of threads that a child of the process does not have."""
        # The last step that replayed or captured, its token, and that of the last that replayed.
        self.context: ForwardContext | None = None
        self._begun: object = None
        self._replayed: object = None
        # What it has captured so far, to be taken back with what fails.
        self._captured: list[tuple[weakref.ref[Any], BatchDescriptor]] = []

    @property
    def entered(self) -> ForwardContext | None:
        """The context that is entered, in whatever thread, and in which pieces have run."""
        last = self.context
        if last is not None and last.token is self._begun and isinstance(self._begun, Token):
            return last
        return None

    def replays(self, context: ForwardContext) -> bool:
        """Note that a piece is replayed; False inside of another step, and of one that another one
        has followed."""
        if not self._begins(context):
            return False
        self._replayed = context.token
        return True

    def captures(self, context: ForwardContext) -> bool:
        """The same for one that is captured. Raises `CaptureError` behind a replay of the step:
        what that left in the pool nobody holds, and the capture may have its memory."""
        token = context.token
        if token is not None and token is self._begun and token is self._replayed:
            raise _behind_a_replay(context)
        return self._begins(context)

    def _begins(self, context: ForwardContext) -> bool:
        token = context.token
        if token is not None and token is self._begun:
            return True
        if (token is not None and token is self._over) or not self.leave(context):
            return False
        self._begun, self.context = token, context
        self._replayed = None
        self._captured = []
        return True

    def leave(self, context: ForwardContext | None) -> bool:
        """Forget the last step; False if it is not over."""
        last = self.context
        if last is not None and last is not context and last.token is self._begun is not None:
            if isinstance(self._begun, Token):
                return False
            # Nobody says where a step of a host's own context ends: here, at the latest.
            self._over = self._begun
        self._begun = self.context = None
        return True

    def captured(self, wrapper: Any, context: ForwardContext) -> None:
        """Note what the step has captured, which goes if another piece of it fails."""
        if context.token is not None and context.token is self._begun:
            self._captured.append((weakref.ref(wrapper), context.descriptor))  # type: ignore[arg-type]

    def take_back(self, context: ForwardContext) -> None:
        """Destroy what the step has captured so far: behind it nothing could be captured alone."""
        if context.token is None or context.token is not self._begun:
            return
        while self._captured:
            reference, descriptor = self._captured[-1]
            wrapper = reference()
            if wrapper is not None:
                wrapper.destroy_graphs(descriptor)
            self._captured.pop()

    def hold_loosely(self, aliases: Iterable[torch.Tensor]) -> None:
        """Note outputs that replays hand out, and that do not keep their memory."""
        for tensor in aliases:
            self._loose[tensor.untyped_storage()._cdata] = tensor

    def check_held(self, arguments: Any, context: ForwardContext) -> None:
        """Raise `CaptureError` for what a replay has handed out: see `captures`."""
        if not self._loose:
            return
        for tensor in tree.tensors(arguments):
            if tensor.layout is torch.strided and tensor.untyped_storage()._cdata in self._loose:
                raise _behind_a_replay(context)

    def misses(self, context: ForwardContext, generation: int) -> bool:
        """Note that a piece of a step runs eagerly; whether it is the first of the step, as far as
        can be told, so that what comes after it must look where its arguments are."""
        token = context.token
        seen = (context, generation) if token is None else token
        if seen == self._without_graph:
            return False
        self._without_graph = seen
        return True

    def is_behind_a_miss(self, context: ForwardContext) -> bool:
        """Whether a piece of the same step has run eagerly."""
        return context.token is not None and context.token is self._without_graph


def _behind_a_replay(context: ForwardContext) -> CaptureError:
    return CaptureError(
        "a piece would be captured behind a replay of its step: what that left in the pool nobody "
        "holds, and the capture may have its memory",
        got=f"{context.mode.name} [{context.descriptor}]",
        expected="all pieces of a step captured in one step, or replayed",
        advice="GraphPool.drop(descriptor), and run the step again; give a piece that two models "
        "share a wrapper for each",
    )
