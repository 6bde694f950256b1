"""Brackets a task at capture and issues it again at replay: by two ways with the same methods."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from graphrt.ascend.driver.library import has_value_wait
from graphrt.core.base.errors import InvalidUpdateError, MissingCapabilityError, TaskContractError
from graphrt.core.device.contract import TaskUpdate


@dataclass(frozen=True)
class TaskHandle:
    """A task group of a graph, and the event for which every replay waits before it.

    `record` is torch_npu's own note of the call, if its automatic dispatch made the bracket.
    """

    group: Any
    event: Any
    record: Any = None


class Groups:
    """Captures and updates tasks by torch_npu's public functions for task groups."""

    def __init__(self, npu: Any) -> None:
        self._npu = npu
        # graph -> the event of its open task.
        self._open: dict[Any, Any] = {}
        # Streams beside the capture, whose work `settle` waits for.
        self._aside: list[Any] = []

    def begin(self, graph: Any) -> None:
        stream = self._npu.current_stream()
        event = self._npu.ExternalEvent()
        if not has_value_wait():
            self._create(event, stream)
        # Without a value wait of CANN a wait does not reset the signal.
        event.wait(stream)
        event.reset(stream)
        self._npu.graph_task_group_begin(stream)
        self._open[graph] = event

    def _create(self, event: Any, capturing: Any) -> None:
        """Record an event on a stream beside the capture. Without a value wait torch_npu creates an
        event at its first record, and a wait before that is ignored: no replay would wait."""
        side_stream = next(s for s in (self._npu.Stream() for _ in range(2)) if s != capturing)
        event.record(side_stream)
        event.reset(side_stream)
        self._aside.append(side_stream)

    def settle(self) -> None:
        """Wait after a capture for the resets of `_create`: one that is still under way would take
        the first signal of an update."""
        while self._aside:
            self._aside.pop().synchronize()

    def end(self, graph: Any) -> TaskHandle:
        event = self._open.pop(graph)
        return TaskHandle(self._npu.graph_task_group_end(self._npu.current_stream()), event)

    def abort(self, graph: Any) -> None:
        """Close the group that a failed task left open."""
        if self._open.pop(graph, None) is not None:
            # In an invalidated capture it raises the error that is being handled already.
            with suppress(RuntimeError):
                self._npu.graph_task_group_end(self._npu.current_stream())

    def issue(self, graph: Any, stream: Any, update: TaskUpdate) -> None:
        """Issue the task again on `stream`, which is current, and signal it."""
        try:
            # Inside the `try`, as an interrupt may come right after it.
            self._npu.graph_task_update_begin(stream, update.handle.group)
            update.issue()
            self._npu.graph_task_update_end(stream)
        except BaseException:  # `@undoing` written out, as every step with tasks comes here
            # This end raises that the tasks do not match, but frees the stream. The end above
            # closes nothing if it raises the operator's error from the launch queue.
            with suppress(RuntimeError):
                self._npu.graph_task_update_end(stream)
            raise
        update.handle.event.record(stream)


class AutoDispatch:
    """Captures and updates tasks by torch_npu's `auto_dispatch_capture` and `NPUGraph.update`.

    torch_npu updates on one stream for the whole process, in no order with the replay, ignores
    unknown names, and leaves its update open when the operator raises; so it is handed one record
    at a time, on the pool's stream, with names that the record has.
    """

    def __init__(self, npu: Any) -> None:
        """Raises `MissingCapabilityError` where torch_npu has no automatic dispatch."""
        self._npu = npu
        # graph -> how many records torch_npu had before its open task.
        self._open: dict[Any, int] = {}
        if not hasattr(npu.NPUGraph(), "graph_dispatch_mode"):
            raise MissingCapabilityError(
                "this torch_npu cannot capture updatable operators by itself",
                got="update_strategy='auto_dispatch'",
                expected="NPUGraph.graph_dispatch_mode",
                advice="update_strategy='groups'",
            )
        if not has_value_wait():
            raise MissingCapabilityError(
                "without a value wait of CANN torch_npu's automatic dispatch captures no wait for "
                "an update, so replays would run with old arguments",
                got="update_strategy='auto_dispatch'",
                expected="a CANN with aclrtValueWait",
                advice="update_strategy='groups', or a newer CANN",
            )

    def begin(self, graph: Any) -> None:
        graph.auto_dispatch_capture = True
        mode = graph.graph_dispatch_mode
        self._open[graph] = len(mode.graph_dispatch_records)
        mode.__enter__()

    def end(self, graph: Any) -> TaskHandle:
        mode = graph.graph_dispatch_mode
        mode.__exit__(None, None, None)
        new_records = mode.graph_dispatch_records[self._open.pop(graph) :]
        if len(new_records) != 1:
            raise TaskContractError(
                "a task is not one operator that torch_npu has a handler for",
                got=[record.op_cache_entry.__name__ for record in new_records],
                expected="one operator of register_npu_graph_handler()",
                advice="update_strategy='groups' takes any operator",
            )
        return TaskHandle(new_records[0].handle, new_records[0].event, new_records[0])

    def settle(self) -> None:
        """Nothing to wait for."""

    def abort(self, graph: Any) -> None:
        """Leave the mode and close the group that a failed task left open."""
        if self._open.pop(graph, None) is not None:
            graph.graph_dispatch_mode.__exit__(None, None, None)
            with suppress(RuntimeError):
                self._npu.graph_task_group_end(self._npu.current_stream())

    def issue(self, graph: Any, stream: Any, update: TaskUpdate) -> None:
        """Let torch_npu issue the task again on `stream` and signal it."""
        record, mode = update.handle.record, graph.graph_dispatch_mode
        values = _as_recorded(update, record)
        records = mode.graph_dispatch_records
        mode.update_stream, mode.graph_dispatch_records = stream, [record]
        try:
            graph.update([values])
        except BaseException:  # `@undoing` written out, as every step with tasks comes here
            with suppress(RuntimeError):
                self._npu.graph_task_update_end(stream)
            raise
        finally:
            mode.graph_dispatch_records = records


def _as_recorded(update: TaskUpdate, record: Any) -> dict[str, Any]:
    """The host values of a task in the types with which torch_npu recorded them.

    Raises `InvalidUpdateError` for a name that torch_npu would ignore.
    """
    arguments: dict[str, Any] = {}
    recorded = _recorded_arguments(record)
    for name, value in update.values.items():
        if name not in recorded:
            raise InvalidUpdateError(
                f"torch_npu does not update argument {name!r} of task {update.name!r}",
                got=name,
                expected=sorted(recorded),
                advice="update_strategy='groups'",
            )
        recorded_value = recorded[name]
        if isinstance(recorded_value, torch.Tensor) and isinstance(value, list):
            value = torch.tensor(value, dtype=recorded_value.dtype, device="cpu")
        arguments[name] = value
    return arguments


def _recorded_arguments(record: Any) -> dict[str, Any]:
    positional = zip(record.op_cache_entry._schema.arguments, record.args, strict=False)
    return {**{argument.name: value for argument, value in positional}, **record.kwargs}
