"""`Entry`: what a wrapper captured for one descriptor. Its parts are replayed in order: segments,
some with tasks, and eager parts, whose results are copied to where the segments after them read."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, cast, runtime_checkable

import torch

from graphrt.core.base import errors, settings, tree
from graphrt.core.base.option_values import shown, told
from graphrt.core.base.thread_mode import without_gradients
from graphrt.core.batch.context import ForwardContext
from graphrt.core.batch.descriptor import BatchDescriptor
from graphrt.core.device.contract import DeviceGraph
from graphrt.core.device.platform import Platform
from graphrt.core.dispatch.dispatcher import GraphDispatcher
from graphrt.core.replay.pool import GraphPool
from graphrt.core.replay.tasks import (
    UNCHANGED,
    WORST_CASE,
    CapturedTask,
    HostValues,
    check_names,
    failed_half_way,
)

Call = tuple[tuple[Any, ...], dict[str, Any]]
"""The arguments that a function is called with, and its keywords."""


TENSORS_ALONE = (
    "return tensors alone, in every branch: x.max() in place of float(x.max()) or x.max().item(); "
    "where a flag decides, torch.where(flag, a, b); read numbers of the host from "
    "current_context() where they are used"
)
"""Advice for an eager part that returns Python values."""


@dataclass(eq=False, repr=False)
class EagerPart:
    """A function that runs eagerly at every replay. Its results are copied into `recorded`, where
    the graphs after it read them. `aliased` holds the paths of results that were no new memory at
    capture, such as an argument or a view of it.
    """

    function: Callable[..., Any]
    call: Call
    recorded: Any
    aliased: frozenset[str]

    def __str__(self) -> str:
        return f"eager break {name_of(self.function)}"

    def replay(self) -> None:
        args, kwargs = self.call
        result = self.function(*args, **kwargs)
        if result is None and self.recorded is None:
            return
        self.deliver(result)

    def deliver(self, result: Any) -> None:
        """Copy a `result` to where the graphs read it.

        Raises `BakedScalarError` for another Python value, and `BreakError` for another structure,
        shape or dtype than recorded, and for new memory where there was none at capture: copying it
        would overwrite an argument.
        """
        recorded = self.recorded
        if isinstance(recorded, torch.Tensor) and isinstance(result, torch.Tensor):
            self._deliver_tensor("", recorded, result)
            return
        old, new = list(tree.leaves(recorded)), list(tree.leaves(result))
        if [path for path, _ in old] != [path for path, _ in new]:
            raise errors.BreakError(
                f"{self} returned another structure than at capture",
                got=", ".join(path or "one value" for path, _ in new) or "nothing",
                expected=", ".join(path or "one value" for path, _ in old) or "nothing",
                advice="return the same containers, of the same length, in every branch",
            )
        for (path, before), (_, now) in zip(old, new, strict=True):
            if isinstance(before, torch.Tensor) and isinstance(now, torch.Tensor):
                self._deliver_tensor(path, before, now)
            elif type(before) is not type(now) or not _is_same_value(before, now):
                raise errors.BakedScalarError(
                    f"{self} returned another value than at its capture"
                    f"{', at ' + path if path else ''}: its graph keeps that one",
                    got=told(now),
                    expected=f"{told(before)}, as at the capture",
                    advice=TENSORS_ALONE,
                )

    def _deliver_tensor(self, path: str, recorded: torch.Tensor, result: torch.Tensor) -> None:
        """`deliver`, of the one tensor at `path`."""
        if (
            recorded.shape != result.shape
            or recorded.dtype != result.dtype
            or result.layout is not torch.strided
        ):
            raise errors.BreakError(
                f"{self} returned another tensor than at capture{' at ' + path if path else ''}",
                got=f"{result.dtype} {tuple(result.shape)}"
                f"{'' if result.layout is torch.strided else f', {result.layout}'}",
                expected=f"{recorded.dtype} {tuple(recorded.shape)}",
                advice=advice_for_another(result, recorded),
            )
        if (
            recorded.data_ptr() == result.data_ptr()
            and recorded.stride() == result.stride()
            # x.conj() has the address of x, and other values.
            and (not recorded.dtype.is_complex or recorded.is_conj() == result.is_conj())
        ):
            return
        if path in self.aliased and recorded.numel():
            raise errors.BreakError(
                f"{self} returned a new tensor; at the capture it returned its argument"
                f"{', at ' + path if path else ''}",
                got="a new tensor",
                expected="its argument, or a view of it, as at the capture",
                advice="return a fresh tensor always (y.clone() in place of y), or write into the "
                "argument always",
            )
        recorded.copy_(result)


def _is_same_value(before: Any, now: Any) -> bool:
    if isinstance(before, float):
        return repr(before) == repr(now)  # NaN is itself, and -0.0 is not 0.0
    same: Any = before is now or before == now
    # Arrays have one answer for each element.
    return bool(same.all()) if hasattr(same, "all") else bool(same)


def advice_for_another(result: torch.Tensor, recorded: torch.Tensor) -> str:
    """What to return in place of a tensor that is none of the kind which a graph recorded."""
    if result.layout is not torch.strided:
        return "return to_dense() of it"
    if result.shape != recorded.shape:
        return "return the padded shape; mask the padding rows instead of dropping them"
    return f"return one dtype at every step: .to({recorded.dtype})"


def on_copies(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, called with copies of its containers. Without them a function that appends to a
    list argument would find it longer at each replay."""

    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = tree.copied((args, kwargs))
        return function(*args, **kwargs)

    return called


def name_of(function: Callable[..., Any]) -> str:
    if isinstance(function, torch.nn.Module):  # its text is a line for each of its modules
        return type(function).__qualname__
    return getattr(function, "__qualname__", None) or shown(function)


def under_settings(function: Callable[..., Any], around: Mapping[str, Any]) -> Callable[..., Any]:
    """`function` under the present autocast, if it differs from that `around` the forward.

    Raises `CaptureError` if another setting differs: a replay would not enter it.
    """
    casts = {}
    for each, value in settings.around_part().items():
        if value == around[each]:
            continue
        if not each.startswith(settings.AUTOCAST):
            raise errors.CaptureError(
                f"the forward enters another setting around eager break {name_of(function)}, which "
                "a replay calls by itself",
                got=f"{each}: {value}",
                expected=f"{around[each]}, as around the forward",
                advice="enter it inside of the eager part, or around the whole forward",
            )
        casts[each.removeprefix(settings.AUTOCAST)] = value
    if not casts:
        return function

    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        with ExitStack() as stack:
            for kind, dtype in casts.items():
                stack.enter_context(torch.autocast(kind, dtype, enabled=dtype is not None))
            return function(*args, **kwargs)

    return called


def bound_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call that a graph bakes in, by path: tensors by where and what they are,
    plain values as they are. It is taken before the call, which may clear a list of arguments."""
    return {
        path: tree.identity(leaf) if isinstance(leaf, torch.Tensor) else (leaf,)
        for path, leaf in tree.leaves((args, kwargs))
        if isinstance(leaf, torch.Tensor | int | float | str | None)
    }


class Part(Protocol):
    """One element of a captured step."""

    def replay(self) -> None: ...


@runtime_checkable
class SegmentHooks(Protocol):
    """What a weight offloader needs around each graph of a wrapper."""

    def before_capture(self) -> None:
        """Before a segment is captured: wait for what it will read."""

    def end_of_capture(self) -> None:
        """Inside the capture, at its end: join the streams that were forked."""

    def before_replay(self) -> None:
        """Before every replay of a segment."""


@dataclass(eq=False, repr=False)
class Segment:
    """A segment that is more than its graph: it has calls `before` each replay, or tasks, which are
    issued again at every replay. Any other segment is its graph itself. `name` is for errors."""

    platform: Platform
    graph: DeviceGraph
    tasks: list[CapturedTask]
    before: Sequence[Callable[[], object]] = ()
    name: str = "under capture"

    def replay(self) -> None:
        """Replay with the host arguments of the replay before."""
        self.replay_with(None)

    def replay_with(self, values: Sequence[HostValues] | None) -> None:
        """Replay with `values`, one for each task; None repeats those of the replay before."""
        for call in self.before:
            call()
        if not self.tasks:
            self.graph.replay()
            return
        replay = self.platform.replay_updated
        self.give(values, partial(replay, self.graph, self.tasks, name=self.name))

    def give(self, values: Sequence[HostValues] | None, act: Callable[..., object]) -> None:
        """Give the tasks their new `values`, None for the old ones, and call `act(changed=)`. If it
        raises, the tasks get the old ones back."""
        tasks = self.tasks
        if values is None:
            act(changed=False)
            return
        before = [task.values for task in tasks]
        try:
            for task, new in zip(tasks, values, strict=True):
                task.values = new
            act(changed=True)
        except BaseException:  # in place of `@undoing`, for speed
            for task, old in zip(tasks, before, strict=True):
                task.values = old
            raise


def graphs_of(parts: Iterable[Part]) -> list[DeviceGraph]:
    """The device graphs among the parts of a step, in order."""
    graphs: list[DeviceGraph] = []
    for part in parts:
        if not isinstance(part, EagerPart):
            graphs.append(part.graph if isinstance(part, Segment) else cast(Any, part))
    return graphs


class TaskTable:
    """The tasks of an entry: layers with the same updates are resolved together.

    `names` are those of tasks and of their groups. `mixed` says that an update failed: nobody knows
    which host arguments the tasks have.
    """

    __slots__ = ("mixed", "names", "tasks")

    def __init__(self, tasks: Sequence[CapturedTask]) -> None:
        self.tasks = tuple(tasks)
        self.names = frozenset(name for task in tasks for name in (task.name, task.spec.group))
        self.mixed = False

    def values(self, context: ForwardContext, *, all_known: bool) -> list[HostValues] | None:
        """The validated host values of every task, in order; None if none has changed.

        `all_known` says that the step has no tasks but these: another name in the updates is then
        an error, not a task of another piece.
        Raises `MissingUpdateError` or `InvalidUpdateError`; nothing was launched then.
        """
        updates = context.updates
        if updates is UNCHANGED:
            if self.mixed:
                raise failed_half_way()
            return None
        if updates is WORST_CASE and context.descriptor is not None:
            makers = {task.name: task.spec.at_capture for task in self.tasks}
            worst = {name: make(context.descriptor) for name, make in makers.items() if make}
            updates = worst or updates  # it is named where no task has one
        # Asking whether it is a mapping takes longer than the rest, and it is a dict as a rule.
        if type(updates) is not dict and not isinstance(updates, Mapping):
            raise errors.MissingUpdateError(
                "a graph with updatable tasks was replayed without updates",
                got=shown(updates),
                expected=", ".join(dict.fromkeys(task.spec.group for task in self.tasks)),
                advice="pass updates= for this step, or updates=UNCHANGED",
            )
        if all_known:
            check_names(updates, self.names)
        # Values that layers share are fitted, and compared, only once.
        fitted: dict[object, HostValues] = {}
        # Kept alive, as their ids are keys: a mapping may make its values when it is asked.
        kept_alive = []
        # ids of (new values, a task's old values) -> whether they differ.
        changes: dict[tuple[int, int], bool] = {}
        values = []
        for task in self.tasks:
            key: object = (task.name, task.spec) if task.name in updates else task.spec
            new = fitted.get(key)
            if new is None:
                host_values = task.spec.values_for(task.name, updates)
                kept_alive.append(host_values)
                shared = id(task.spec), id(host_values)
                new = fitted.get(shared) or task.spec.fitted(host_values, context)
                fitted[key] = fitted[shared] = new
            pair = id(new), id(task.values)
            if pair not in changes:
                changes[pair] = task.is_changed_by(new)
            values.append(new)
        return values if self.mixed or True in changes.values() else None


class Entry:
    """What a wrapper replays for one descriptor: its `parts` in their order, its `outputs`, and as
    `bound` the arguments that its graphs read, by path: see `bound_arguments`. A capture makes it;
    a runner replays `graph` where there is one, other steps call `launch`."""

    # Slots, because C reads these at fixed offsets.
    __slots__ = ("__dict__", "compares_next", "graph")

    def __init__(
        self,
        descriptor: BatchDescriptor,
        parts: tuple[Part, ...],
        outputs: Any,
        bound: dict[str, Any],
        captured_in: object,
    ) -> None:
        self.descriptor = descriptor
        self.parts = parts
        self.outputs = outputs
        self.bound = bound
        # The token of the step that captured it: that step may not replay it too.
        self.captured_in = captured_in
        # The dispatcher of the runner that captured it, and those that have announced its steps: it
        # is withdrawn there before it is destroyed.
        self.owner: GraphDispatcher | None = None
        self.announcers: set[GraphDispatcher] = set()
        # Makes new containers for each step, as the caller may change those that it gets.
        self.fresh = tree.copier(outputs)
        # Whether the next replay compares its arguments with those of the capture.
        self.compares_next = False
        tasked = [part for part in parts if isinstance(part, Segment) and part.tasks]
        for number, part in enumerate(tasked, 1):
            which = f" segment {number} of {len(tasked)}" if len(tasked) > 1 else ""
            part.name = f"[{descriptor}]{which}"
        self.table = TaskTable([task for part in tasked for task in part.tasks])
        self.tasks = self.table.tasks
        # For an entry of one graph without tasks, as most are. None once the graph is destroyed.
        alone = len(parts) == 1 and not tasked
        self.graph: Part | None = parts[0] if alone else None

    def check_arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any], name: str) -> None:
        """Raise `StaleInputError` unless the arguments of a call of `name` are what the graphs were
        captured with."""
        now, then = bound_arguments(args, kwargs), self.bound
        if now == then:
            return
        path = next(path for path in {**now, **then} if now.get(path) != then.get(path))
        raise errors.StaleInputError(
            f"argument {path} of {name} is not where the graph of [{self.descriptor}] reads it",
            got=now.get(path, "no such argument"),
            expected=then.get(path, "no such argument at capture"),
            advice="copy_() into the tensor that it was captured with, and pass that one at every "
            "step; or let GraphRunner own the buffers",
        )

    def results(self) -> list[torch.Tensor]:
        """The tensors in which eager parts and the entry itself leave results."""
        of_parts = [part.recorded for part in self.parts if isinstance(part, EagerPart)]
        return tree.tensors(self.outputs, of_parts)

    def launch(self, context: ForwardContext, pool: GraphPool, *, all_tasks: bool) -> None:
        """Replay segments, eager parts and tasks with their new host arguments, in order.

        All updates are validated before anything is launched. A step that goes on after the call,
        as one that waits for its updates, becomes the owner of its `pool`.
        """
        table, values = self.table, None
        if self.tasks:
            values = table.values(context, all_known=all_tasks)
            table.mixed = True
        # With gradients on, torch would record each copy of an eager result into its bridge.
        without_gradients(partial(self._replay_with, values))
        table.mixed = False

    def _replay_with(self, values: Sequence[HostValues] | None) -> None:
        remaining = iter(values or ())
        for part in self.parts:
            if values is not None and isinstance(part, Segment):
                part.replay_with([next(remaining) for _ in part.tasks])
            else:
                part.replay()
