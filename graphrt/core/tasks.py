"""Updatable tasks: operators whose host-side arguments change at every step.

Eager, a task is just issued. Captured, the platform brackets it as a task group that the captured
entry owns. Replayed, the new host arguments come with the context's `updates`; they are resolved
and validated first, and then the platform applies them in the order that its device needs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final, Literal

from graphrt.core import tree
from graphrt.core.breakable import Capture, current_capture
from graphrt.core.context import ForwardContext, current_context
from graphrt.core.descriptor import BatchDescriptor
from graphrt.core.errors import InvalidUpdateError, MissingUpdateError
from graphrt.core.segments import CapturedTask, HostValues


class _Unchanged:
    def __repr__(self) -> str:
        return "UNCHANGED"


UNCHANGED: Final = _Unchanged()
"""As `updates=`: every task keeps the host arguments of the replay before."""


@dataclass(frozen=True)
class HostArg:
    """One host argument of a task.

    `axis` None is a scalar. A list over "reqs" or "tokens" is padded to the graph's size: with
    `pad` "zero", with "repeat" of its last value, or as "cumulative" query lengths, whose padding
    ends at the graph's number of tokens.
    """

    axis: Literal["reqs", "tokens"] | None = "reqs"
    pad: Literal["zero", "repeat", "cumulative"] = "zero"

    def fitted(self, key: str, value: Any, descriptor: BatchDescriptor) -> Any:
        """`value` padded for `descriptor`; raises `InvalidUpdateError` if it does not fit."""
        if self.axis is None:
            return value
        values = [int(v) for v in value]
        size = descriptor.num_reqs if self.axis == "reqs" else descriptor.num_tokens
        if size is None:
            return values
        if not values or len(values) > size:
            raise InvalidUpdateError(
                f"host argument {key!r} has the wrong length",
                got=len(values),
                expected=f"1 to {size} ({self.axis} of the graph: {descriptor})",
                advice="pass one value for each live request",
            )
        missing = size - len(values)
        if self.pad == "zero":
            return values + [0] * missing
        if self.pad == "repeat":
            return values + [values[-1]] * missing
        _check_cumulative(key, values, descriptor)
        if missing:
            return values + [values[-1]] * (missing - 1) + [descriptor.num_tokens]
        return values


def _check_cumulative(key: str, values: list[int], descriptor: BatchDescriptor) -> None:
    rising = all(a <= b for a, b in pairwise(values))
    if not rising or values[0] < 0 or values[-1] > descriptor.num_tokens:
        raise InvalidUpdateError(
            f"cumulative host argument {key!r} does not add up",
            got=values,
            expected=f"rising values of at most {descriptor.num_tokens} tokens",
            advice="pass the running sum of the query lengths",
        )


class UpdatableTask:
    """An operator with host arguments, declared once and called in the forward.

    `issue(*tensors, **host_values)` calls the operator into given outputs and workspace: it may not
    allocate, synchronise, or touch other tensors than those it was captured with. `at_capture`
    gives the worst-case host values for a descriptor, used by warm-up and capture when the
    context carries no updates.
    """

    def __init__(
        self,
        group: str,
        issue: Callable[..., object],
        host_args: Mapping[str, HostArg],
        *,
        at_capture: Callable[[BatchDescriptor], HostValues] | None = None,
    ) -> None:
        self.group = group
        self.issue = issue
        self.host_args = dict(host_args)
        self.at_capture = at_capture

    def __call__(self, *args: Any, task: str | None = None, **kwargs: Any) -> None:
        """Issue, or capture, the task `task` of this group with this step's host values."""
        name = self.group if task is None else task
        context = current_context()
        capture = current_capture()
        values = self._values(context, name)
        if capture is None:
            self.issue(*args, **kwargs, **values)
        else:
            _record(capture, self, name, args, kwargs, values)

    def _values(self, context: ForwardContext | None, name: str) -> HostValues:
        descriptor = None if context is None else context.descriptor
        given = None if context is None else context.updates
        if given is None or given is UNCHANGED:
            if self.at_capture is None or descriptor is None:
                raise MissingUpdateError(
                    f"task {name!r} needs its host arguments",
                    got=given,
                    expected=f"updates={{{self.group!r}: {{{', '.join(self.host_args)}}}}}",
                    advice="pass updates= to the runner or forward_context(), and at_capture= to "
                    "the task",
                )
            given = {name: self.at_capture(descriptor)}
        assert descriptor is not None
        return self.fitted(name, given, descriptor)

    def fitted(
        self, name: str, updates: Mapping[str, HostValues], descriptor: BatchDescriptor
    ) -> HostValues:
        """The padded host values of task `name`, by its own name or else its group's."""
        values = updates.get(name)
        if values is None:
            values = updates.get(self.group)
        if values is None:
            raise MissingUpdateError(
                f"no update for task {name!r}",
                got=sorted(updates),
                expected=f"{name!r} or its group {self.group!r}",
                advice="a replay needs the host arguments of every task, or updates=UNCHANGED",
            )
        if values.keys() != self.host_args.keys():
            raise InvalidUpdateError(
                f"the update of task {name!r} has the wrong keys",
                got=sorted(values),
                expected=sorted(self.host_args),
                advice="pass exactly the declared host arguments",
            )
        return {
            key: host_arg.fitted(key, values[key], descriptor)
            for key, host_arg in self.host_args.items()
        }


def _record(
    capture: Capture,
    spec: UpdatableTask,
    name: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    values: HostValues,
) -> None:
    graph = capture.graph
    assert graph is not None
    platform = capture.pool.platform
    platform.task_begin(graph)
    spec.issue(*args, **kwargs, **values)
    handle = platform.task_end(graph)
    args, kwargs = tree.map_tensors(capture.captured_ref, (args, kwargs))
    capture.tasks.append(CapturedTask(spec, name, handle, args, kwargs, values))


def resolve_updates(
    tasks: Sequence[CapturedTask], updates: Any, descriptor: BatchDescriptor
) -> list[HostValues] | None:
    """The validated host values of every task, in order; None if nothing changed.

    Raises `MissingUpdateError` or `InvalidUpdateError`; nothing was launched then.
    """
    if updates is UNCHANGED:
        return None
    if updates is None:
        raise MissingUpdateError(
            "a graph with updatable tasks was replayed without updates",
            expected=", ".join(dict.fromkeys(task.spec.group for task in tasks)),
            advice="pass updates= for this step, or updates=UNCHANGED",
        )
    known = {name for task in tasks for name in (task.name, task.spec.group)}
    unknown = sorted(set(updates) - known)
    if unknown:
        raise InvalidUpdateError(
            "updates name tasks that the graph does not have",
            got=unknown,
            expected=sorted(known),
            advice="use the group's name to reach all of its layers",
        )
    values = [task.spec.fitted(task.name, updates, descriptor) for task in tasks]
    unchanged = all(new == task.values for new, task in zip(values, tasks, strict=True))
    return None if unchanged else values
