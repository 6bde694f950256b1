"""The tasks of one entry, and the host values that a step gives to each of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from graphrt.core.base.errors import InvalidUpdateError, MissingUpdateError
from graphrt.core.batch.context import ForwardContext
from graphrt.core.replay.host_args import UNCHANGED, HostValues, Updates
from graphrt.core.replay.tasks import CapturedTask


class TaskTable:
    """The tasks of an entry, sorted once: layers that are told the same are resolved together."""

    __slots__ = ("_groups", "known", "mixed", "tasks")

    def __init__(self, tasks: Sequence[CapturedTask]) -> None:
        self.tasks = tuple(tasks)
        # Whether an update failed half-way: nobody knows which arguments the device has.
        self.mixed = False
        self.known = frozenset(name for task in tasks for name in (task.name, task.spec.group))
        groups: dict[tuple[int, frozenset[str]], list[int]] = {}
        for index, task in enumerate(tasks):
            groups.setdefault((id(task.spec), frozenset(task.values)), []).append(index)
        self._groups = [_Layers(self.tasks, indices) for indices in groups.values()]

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
            for index, new in zip(layers.indices, of_layers, strict=True):
                values[index] = new
        return values


class _Layers:
    """Tasks of one declaration that were captured with values for the same host arguments."""

    __slots__ = ("indices", "keys", "names", "spec", "tasks")

    def __init__(self, tasks: Sequence[CapturedTask], indices: list[int]) -> None:
        self.indices = indices
        self.tasks = [tasks[index] for index in indices]
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
