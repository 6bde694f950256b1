"""Updatable tasks: operators whose host-side arguments change at every step.

Eager, a task is just issued. Captured, the platform brackets it as a task group that the captured
entry owns. Replayed, the new host arguments come with the context's `updates`; they are resolved
and validated first, and then the platform applies them in the order that its device needs.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final, Literal

from graphrt.core.base import tree
from graphrt.core.base.errors import InvalidUpdateError, MissingUpdateError
from graphrt.core.batch.context import ForwardContext, current_context
from graphrt.core.batch.descriptor import BatchDescriptor
from graphrt.core.capture.recorder import Capture, current_capture
from graphrt.core.replay.segments import CapturedTask, HostValues

Updates = Mapping[str, HostValues]
"""The host values of a step by the name of their task or its group."""


class _Marker:
    def __init__(self, name: str) -> None:
        self._name = name

    def __repr__(self) -> str:
        return self._name


UNCHANGED: Final = _Marker("UNCHANGED")
"""As `updates=`: every task keeps the host arguments of the step before; to a wrapper by itself, of
the replay before of the same graph."""
WORST_CASE: Final = _Marker("WORST_CASE")
"""As `updates=`: every task takes its `at_capture` arguments, for warm-up and capture."""


@dataclass(frozen=True)
class HostArg:
    """One host argument of a task.

    `axis` None is a scalar. A list over "reqs" or "tokens" is padded to the graph's size: with
    `pad` "zero", with "repeat" of its last value, or as "cumulative" query lengths, whose padding
    ends at the graph's number of tokens. "reqs+1" has room for one request more, to which padding
    tokens can belong when all requests are live. An `optional` one may be left out of updates.
    """

    axis: Literal["reqs", "reqs+1", "tokens"] | None = "reqs"
    pad: Literal["zero", "repeat", "cumulative"] = "zero"
    optional: bool = False

    def fitted(self, key: str, value: Any, tokens: int, reqs: int | None) -> Any:
        """`value` padded for a graph of `tokens` and `reqs`; raises `InvalidUpdateError`."""
        if self.axis is None:
            # A copy, so that a list that the host changes in place is seen as changed.
            return value if type(value) is int else copy.copy(value)
        values = list(map(int, value))
        if self.pad == "cumulative":
            _check_rising(key, values, tokens)
        size = self._size(tokens, reqs)
        missing = 0 if size is None else size - len(values)
        if not values or missing < 0:
            raise InvalidUpdateError(
                f"host argument {key!r} has the wrong length",
                got=len(values),
                expected=f"1 to {size} ({self.axis} of the graph)",
                advice="pass one value for each live request",
            )
        if self.pad == "zero":
            return values + [0] * missing
        if self.pad == "repeat":
            return values + [values[-1]] * missing
        if not missing and values[-1] != tokens:
            raise InvalidUpdateError(
                f"cumulative host argument {key!r} does not add up",
                got=values,
                expected=f"the last one to be {tokens}, as the padding tokens need a request too",
                advice='declare it with axis "reqs+1", or pad the batch to its own tokens',
            )
        return values + [values[-1]] * (missing - 1) + [tokens] * (missing > 0)

    def _size(self, tokens: int, reqs: int | None) -> int | None:
        if self.axis == "tokens":
            return tokens
        return reqs if reqs is None or self.axis == "reqs" else reqs + 1


def _check_rising(key: str, values: list[int], tokens: int) -> None:
    rising = all(a <= b for a, b in pairwise(values))
    if not values or not rising or values[0] < 0 or values[-1] > tokens:
        raise InvalidUpdateError(
            f"cumulative host argument {key!r} does not add up",
            got=values,
            expected=f"rising values of at most {tokens} tokens",
            advice="pass the running sum of the query lengths",
        )


class UpdatableTask:
    """An operator with host arguments, declared once and called in the forward.

    `issue(*tensors, **host_values)` calls the operator into given outputs and workspace: it may not
    allocate, synchronise, or touch other tensors than those it was captured with. With other host
    values it may launch fewer kernels than at its capture, but no more. `at_capture`
    gives the worst-case host values for a descriptor, which warm-up and capture use.
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
        if context is not None and context.capture is not None:
            context.capture.task_names.update((name, self.group))
        values = self._values(context, name)
        if capture is None:
            self.issue(*args, **kwargs, **values)
        else:
            _record(capture, self, name, args, kwargs, values)

    def _values(self, context: ForwardContext | None, name: str) -> HostValues:
        descriptor = None if context is None else context.descriptor
        given = None if context is None else context.updates
        if given is None and context is not None and context.capture is not None:
            given = WORST_CASE
        if given is WORST_CASE and self.at_capture is not None and descriptor is not None:
            given = {name: self.at_capture(descriptor)}
        if context is None or descriptor is None or not isinstance(given, Mapping):
            raise MissingUpdateError(
                f"task {name!r} needs its host arguments",
                got=given,
                expected=f"updates={{{self.group!r}: {{{', '.join(self.host_args)}}}}}",
                advice="pass updates= to the runner or forward_context(), and at_capture= to the "
                "task for warm-up and capture",
            )
        return self.fitted(self.given(name, given), context)

    def given(self, name: str, updates: Mapping[str, HostValues]) -> HostValues:
        """The host values of task `name` as passed, by its own name or else its group's.

        Raises `MissingUpdateError` if there are none, `InvalidUpdateError` for wrong keys.
        """
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
        declared = self.host_args
        if values.keys() == declared.keys():
            return values
        missing = [key for key, arg in declared.items() if key not in values and not arg.optional]
        if missing or not values.keys() <= declared.keys():
            raise InvalidUpdateError(
                f"the update of task {name!r} has the wrong keys",
                got=sorted(values),
                expected=", ".join(
                    f"{key!r}{' (optional)' * arg.optional}" for key, arg in declared.items()
                ),
                advice="pass exactly the declared host arguments",
            )
        return values

    def fitted(self, values: HostValues, context: ForwardContext) -> HostValues:
        """`values` padded to the graph of the context; raises `InvalidUpdateError`."""
        descriptor = context.descriptor
        assert descriptor is not None
        reqs = context.num_reqs if descriptor.num_reqs is None else descriptor.num_reqs
        return {
            key: host_arg.fitted(key, values[key], descriptor.num_tokens, reqs)
            for key, host_arg in self.host_args.items()
            if key in values
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


class TaskTable:
    """The tasks of an entry, sorted once: layers that are told the same are resolved together."""

    __slots__ = ("_groups", "known", "tasks")

    def __init__(self, tasks: Sequence[CapturedTask]) -> None:
        self.tasks = tuple(tasks)
        self.known = frozenset(name for task in tasks for name in (task.name, task.spec.group))
        groups: dict[tuple[int, frozenset[str]], list[int]] = {}
        for place, task in enumerate(tasks):
            groups.setdefault((id(task.spec), frozenset(task.values)), []).append(place)
        self._groups = [_Layers(self.tasks, places) for places in groups.values()]

    def resolve(self, updates: Updates, context: ForwardContext) -> list[HostValues] | None:
        """The host values of every task, in order; None if all are what they were."""
        groups = self._groups
        if len(groups) == 1:
            only = groups[0].resolve(updates, context)
            return None if groups[0].unchanged(only) else only
        found = [layers.resolve(updates, context) for layers in groups]
        if all(map(_Layers.unchanged, groups, found)):
            return None
        values: list[HostValues] = [{}] * len(self.tasks)
        for layers, of_layers in zip(groups, found, strict=True):
            for place, new in zip(layers.places, of_layers, strict=True):
                values[place] = new
        return values


class _Layers:
    """Tasks of one declaration that were captured with values for the same host arguments."""

    __slots__ = ("keys", "names", "places", "spec", "tasks")

    def __init__(self, tasks: Sequence[CapturedTask], places: list[int]) -> None:
        self.places = places
        self.tasks = [tasks[place] for place in places]
        self.spec = self.tasks[0].spec
        self.names = frozenset(task.name for task in self.tasks) - {self.spec.group}
        self.keys = self.tasks[0].values.keys()

    def resolve(self, updates: Updates, context: ForwardContext) -> list[HostValues]:
        first = self.tasks[0]
        if updates.keys().isdisjoint(self.names):
            given = self.spec.given(first.name, updates)
            return [self._fitted(first, given, context)] * len(self.tasks)
        # Values that layers share are fitted, and compared, only once.
        shared: dict[int, tuple[HostValues, HostValues]] = {}
        values = []
        for task in self.tasks:
            given = self.spec.given(task.name, updates)
            if id(given) not in shared:
                shared[id(given)] = given, self._fitted(task, given, context)
            values.append(shared[id(given)][1])
        return values

    def unchanged(self, values: Sequence[HostValues]) -> bool:
        """Whether these values are equal to those of the replay before."""
        new, old = values[0], self.tasks[0].values
        if new != old:
            return False
        # Layers share their values, as a rule, and a step that changes nothing ends here.
        for task, own in zip(self.tasks, values, strict=True):
            if (own is not new or task.values is not old) and task.values != own:
                return False
        return True

    def _fitted(self, task: CapturedTask, given: HostValues, context: ForwardContext) -> HostValues:
        fitted = self.spec.fitted(given, context)
        if fitted.keys() != self.keys:
            raise InvalidUpdateError(
                f"the update of task {task.name!r} has other keys than its capture",
                got=sorted(fitted),
                expected=sorted(self.keys),
                advice="leave an optional host argument out everywhere, at_capture too, or nowhere",
            )
        return fitted


def resolve_updates(
    table: TaskTable, context: ForwardContext, *, all_known: bool
) -> list[HostValues] | None:
    """The validated host values of every task, in order; None if nothing changed.

    With `all_known` these are all tasks of the step, and other names in the updates are errors.
    Raises `MissingUpdateError` or `InvalidUpdateError`; nothing was launched then.
    """
    updates = context.updates
    if updates is UNCHANGED:
        return None
    # Asking whether it is a mapping takes longer than the rest, and it is a dict as a rule.
    if type(updates) is not dict and not isinstance(updates, Mapping):
        raise MissingUpdateError(
            "a graph with updatable tasks was replayed without updates",
            got=updates,
            expected=", ".join(dict.fromkeys(task.spec.group for task in table.tasks)),
            advice="pass updates= for this step, or updates=UNCHANGED",
        )
    if all_known:
        check_names(updates, table.known)
    return table.resolve(updates, context)


def check_names(updates: Updates, known: frozenset[str]) -> None:
    """Raise `InvalidUpdateError` for updates of tasks that the step does not have."""
    if not updates.keys() <= known:
        raise InvalidUpdateError(
            "updates name tasks that the graph does not have",
            got=sorted(updates.keys() - known),
            expected=sorted(known),
            advice="use the group's name to reach all of its layers",
        )
