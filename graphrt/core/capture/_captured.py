"""One capture of a wrapper: its entry is there, or nothing is left of it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from graphrt.core.base import CaptureError, InvalidOptionError, shown, tree
from graphrt.core.batch import BatchDescriptor
from graphrt.core.capture._kept import Kept
from graphrt.core.capture.recorder import Capture
from graphrt.core.replay import Entry, GraphPool, arguments_of, pooled_paths


def capture_entry(
    owner: Any,
    kept: Kept,
    capture: Capture,
    body: Callable[[], Any],
    descriptor: BatchDescriptor,
    arguments: tuple[Any, Any],
) -> tuple[Entry, Any]:
    """Capture a call of a wrapper; the entry of it, and what it returned. If it raises, the pieces
    that the same step has captured before are gone too, unless a transaction sees to them."""
    pool, context = capture.pool, capture.context
    transaction = context.capture
    inputs, pooled = arguments_of(*arguments), pooled_paths(*arguments, pool)
    try:
        pool.pieces.check_held(arguments, context)
        result = capture.record(body)
        outputs = tree.map_tensors(capture.captured_ref, result)
        step = transaction or context.token
        entry = Entry(descriptor, tuple(capture.parts), outputs, inputs, step, pooled)
        if owner.options.outputs != "static":
            _hold_loosely(pool, outputs, result)
        if transaction is not None:
            transaction.add(owner, partial(owner.destroy_graphs, descriptor))
        # The one store from which on it is captured.
        kept.entries[descriptor] = entry
    except BaseException:
        if descriptor not in kept.entries:
            capture.discard()
        kept.clear_buffers()
        if transaction is None:
            pool.pieces.take_back(context)
        raise
    if transaction is None:
        pool.pieces.captured(owner, context)
    return entry, result


def _hold_loosely(pool: GraphPool, outputs: Any, result: Any) -> None:
    pairs = zip(tree.tensors(outputs), tree.tensors(result), strict=True)
    pool.pieces.hold_loosely(kept for kept, own in pairs if kept is not own)


def no_slot(slot: object) -> InvalidOptionError:
    """The error for a context whose slot is no index."""
    return InvalidOptionError(
        "the slot of a context is the dispatcher's number of its graph",
        got=shown(slot),
        expected="an integer, -1 for none",
        advice="forward_context(found.mode, found.descriptor, slot=found.slot)",
    )


def captured_already(descriptor: BatchDescriptor | None, *, in_this_step: bool) -> CaptureError:
    """That a wrapper would capture a descriptor that it has captured."""
    return CaptureError(
        "a wrapper was called twice in the step that captures it"
        if in_this_step
        else "a descriptor was captured a second time",
        got=descriptor,
        expected="one call for each descriptor",
        advice="give every call site its own wrapper"
        if in_this_step
        else "call clear_graphs() or drop(descriptor) before capturing again",
    )
