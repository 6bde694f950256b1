"""`ranges` and `annotate`: which module or range of a model each kernel of a replay is of.

1. `with ranges(runner): runner.capture()` notes how many nodes a graph has whenever the forward
   enters or leaves a module, a `record_function` range or an NVTX range. Nothing is added to the
   graph.
2. torch's profiler traces steps, and writes a Chrome trace. Its kernels of a replay have no ranges.
3. `annotate(path, runner)` finds the replays in the trace, by the numbers of nodes where the driver
   tells them, else by the names of kernels in their order; and writes the modules and ranges into
   the kernels' arguments, and as slices of tracks of their own.

Of a graph on several streams the order is not known without numbers: such kernels are paired by
name, and marked as unsure. On the CPU operators of compiled loops show nothing, graphs of the same
operators are not told apart, and an eager run of these operators looks like a replay.
"""

from __future__ import annotations

import gzip
import json
import os
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from graphrt._runner import GraphRunner
from graphrt.core.base.errors import InvalidOptionError
from graphrt.core.base.files import read_bounded, write_whole
from graphrt.core.base.option_values import check_kind, refused
from graphrt.core.base.texts import counted
from graphrt.core.replay.entry import graphs_of
from graphrt.observe.captures import Listener, listening
from graphrt.observe.nodes import Kernel, check_tells, counter, kernels_of

MOST_BYTES = 1 << 32
"""The largest trace that is read."""
CATEGORY = "graphrt range"
"""The category of the slices that `annotate` adds."""
_LAUNCHES = ("cudaGraphLaunch", "cuGraphLaunch")
_TRACKS_FROM = 1_000_000
"""Tracks of ranges have the number of their stream or thread, and this more."""

Event = dict[str, Any]
Stack = tuple[str, ...]


class _Noted(Listener):
    """Notes (nodes so far, stack) at each change of the stack, for every graph that is captured."""

    def __init__(self, platform: Any) -> None:
        super().__init__()
        self._platform = platform
        self._count: Callable[[], int] = int
        self._notes: list[tuple[int, Stack]] = []

    def begun(self, graph: Any) -> None:
        self._count = counter(self._platform, graph)
        self._notes = [(0, (*self.frames,))]
        _noted[graph] = self._notes

    def dropped(self, graph: Any) -> None:
        _noted.pop(graph, None)

    def entered(self, module: object) -> None:
        self._notes.append((self._count(), (*self.frames,)))

    def left(self, module: object) -> None:
        self._notes.append((self._count(), (*self.frames[:-1],)))


_noted: WeakKeyDictionary[Any, list[tuple[int, Stack]]] = WeakKeyDictionary()
"""graph -> (nodes so far, stack) at each change of the stack."""


@contextmanager
def ranges(runner: GraphRunner[Any]) -> Iterator[None]:
    """In a `with` block, note the modules and ranges of each kernel that this thread captures on
    the platform of `runner`, for `annotate`. Captures take a few microseconds a module longer;
    graphs and their steps are the same.

    Raises `MissingCapabilityError`, before anything is captured, on a platform that does not tell
    its kernels."""
    check_kind("runner", runner, GraphRunner, optional=False, example="ranges(runner)")
    if runner.platform.device_type != "cpu":
        check_tells(runner.platform)
    with listening(runner.platform, _Noted(runner.platform)):
        yield


@dataclass(frozen=True)
class Annotated:
    """What `annotate` has found in a trace: replays of the runners' graphs, their kernels, those
    whose range is known, and those of them that are `unsure`, as they are of several streams."""

    replays: int = 0
    kernels: int = 0
    annotated: int = 0
    unsure: int = 0
    unknown: int = 0
    """Replays of graphs that were captured outside of `ranges`, or are of other runners."""

    def __str__(self) -> str:
        found = f"{counted(self.replays, 'replay')}, {counted(self.kernels, 'kernel')}"
        parts = [f"{found}: {self.annotated} annotated"]
        parts += [f"{self.unsure} of them unsure (several streams)"] if self.unsure else []
        parts += [f"{counted(self.unknown, 'replay')} of unknown graphs"] if self.unknown else []
        return ", ".join(parts)


class _Graph(NamedTuple):
    """A graph whose capture was noted: its name, kernels, and the stack of each."""

    name: str
    kernels: list[Kernel]
    stacks: list[Stack]
    in_order: bool
    device: int | None


def annotate(
    trace: str | os.PathLike[str] | dict[str, Any], *runners: GraphRunner[Any]
) -> Annotated:
    """Write modules and ranges into the kernels of replays in a Chrome trace of torch's profiler: a
    file (also `.gz`), which is replaced, or its data, which is changed. The graphs were captured in
    `with ranges(runner)`. Called again it replaces what it has written.

    Raises `InvalidOptionError` for a file that is no trace, and where no graph was noted.
    """
    for runner in runners:
        check_kind("runner", runner, GraphRunner, optional=False, example="annotate(path, runner)")
    graphs = [graph for runner in runners for graph in _graphs_of(runner)]
    if not graphs:
        raise InvalidOptionError(
            "no graph of these runners has its ranges noted",
            got=counted(sum(len(runner.graphs.entries()) for runner in runners), "graph"),
            expected="graphs that were captured in ranges()",
            advice="with graphrt.observe.ranges(runner): runner.capture()",
        )
    data = trace if isinstance(trace, dict) else _read(trace)
    events = data.get("traceEvents")
    if not isinstance(events, list) or not all(isinstance(each, dict) for each in events):
        raise InvalidOptionError(
            "the data is no Chrome trace",
            got=", ".join(map(str, [*data][:5])) or "nothing",
            expected='a dict with "traceEvents", a list of dicts',
            advice="profiler.export_chrome_trace(path)",
        )
    events[:] = [each for each in events if not _is_ours(each)]
    found = _Found(events)
    by_device: dict[bool, list[_Graph]] = {True: [], False: []}
    for graph in graphs:
        by_device[graph.device is not None].append(graph)
    if by_device[True]:
        found.on_device(by_device[True])
    if by_device[False]:
        found.on_host(by_device[False])
    if not isinstance(trace, dict):
        _write(trace, data)
    return found.result()


def _is_ours(event: Event) -> bool:
    return event.get("cat") == CATEGORY or CATEGORY in event.get("args", ())


def _graphs_of(runner: GraphRunner[Any]) -> Iterator[_Graph]:
    on_device = runner.platform.device_type != "cpu"
    device = (runner.pool.device.index or 0) if on_device else None
    for owner in runner.graphs.owners():
        for entry in owner.entries.values():
            for graph in graphs_of(entry.parts):
                notes = _noted.get(graph)
                if notes is None:
                    continue
                kernels, in_order = kernels_of(graph)
                # A node belongs to the last note that was made before it was captured.
                at = [count for count, _ in notes]
                stacks = [notes[bisect_right(at, each.node) - 1][1] for each in kernels]
                name = f"{owner.runtime_mode.name} [{entry.descriptor}]"
                yield _Graph(name, kernels, stacks, in_order, device)


def _read(path: str | os.PathLike[str]) -> dict[str, Any]:
    try:
        at = Path(path)
        if at.suffix == ".gz":
            with gzip.open(at, "rt", encoding="utf-8") as file:
                data = json.loads(file.read(MOST_BYTES))
        else:
            data = json.loads(read_bounded(at, MOST_BYTES))
        if not isinstance(data, dict):
            raise ValueError(f"a {type(data).__name__}")
        return data
    except (OSError, TypeError, ValueError, EOFError, RecursionError) as error:
        advice = "profiler.export_chrome_trace(path), then annotate(path, runner)"
        expected = "a Chrome trace of torch's profiler"
        raise refused(f"no trace can be read: {error}", path, expected, advice) from error


def _write(path: str | os.PathLike[str], data: Mapping[str, Any]) -> None:
    at, text = Path(path), json.dumps(data)
    if at.suffix == ".gz":
        with gzip.open(at, "wt", encoding="utf-8") as file:
            file.write(text)
    else:
        write_whole(at, text, what="the trace")


class _Found:
    """Finds the replays among the events of a trace, and annotates their kernels."""

    def __init__(self, events: list[Event]) -> None:
        self._events = events
        # (process, thread or stream) whose ranges have a track.
        self._tracks: set[tuple[object, object]] = set()
        self._counts = dict.fromkeys(("replays", "kernels", "annotated", "unsure", "unknown"), 0)

    def result(self) -> Annotated:
        return Annotated(**self._counts)

    def on_device(self, graphs: Sequence[_Graph]) -> None:
        """Kernels of one launch have its number ("correlation")."""
        launches = {
            (each.get("args") or {}).get("correlation")
            for each in self._events
            if str(each.get("name", "")).startswith(_LAUNCHES)
        }
        groups: dict[tuple[object, object], list[Event]] = defaultdict(list)
        for event in self._events:
            args = event.get("args") or {}
            if event.get("cat") == "kernel" and args.get("correlation") in launches:
                groups[args.get("device"), args.get("correlation")].append(event)
        for launch, group in groups.items():
            group.sort(key=lambda each: each["ts"])
            self._note([each for each in graphs if each.device == launch[0]], group)

    def _note(self, graphs: Sequence[_Graph], group: list[Event]) -> None:
        """Annotate the kernels of one launch, if they are those of one of the graphs."""
        for match in (_by_number, _by_order, _by_name):
            answers = [(graph, match(graph, group)) for graph in graphs]
            fits = [(graph, stacks) for graph, stacks in answers if stacks is not None]
            if not fits:
                continue
            # Of several sizes with the same kernels, those with these grids.
            exact = [fit for fit in fits if _same_launches(fit[0], group)]
            _, stacks = (exact or fits)[0]
            others = [fit for fit in (exact or fits)[1:] if fit[1] != stacks]
            names = dict.fromkeys(fit[0].name for fit in exact or fits)
            sure = match is not _by_name and not others
            self._write(" or ".join(names), group, stacks or [], sure=sure)
            return
        self._counts["unknown"] += 1

    def on_host(self, graphs: Sequence[_Graph]) -> None:
        """A replay on the CPU issues its operators one after the other, in one thread."""
        threads: dict[object, list[Event]] = defaultdict(list)
        ended: dict[object, float] = {}
        operators = [e for e in self._events if e.get("cat") == "cpu_op" and e.get("ph") == "X"]
        for event in sorted(operators, key=lambda each: (each["ts"], -each["dur"])):
            thread = event.get("pid"), event.get("tid")
            # Not those that another operator has called.
            if event["ts"] >= ended.get(thread, -1.0):
                ended[thread] = event["ts"] + event["dur"]
                threads[thread].append(event)
        # Longer graphs first: the operators of a short one may be part of theirs.
        ordered = sorted(graphs, key=lambda each: -len(each.kernels))
        for events in threads.values():
            at = 0
            while at < len(events):
                for graph in ordered:
                    group = events[at : at + len(graph.kernels)]
                    if group and _by_order(graph, group) is not None:
                        self._note(graphs, group)
                        at += len(group)
                        break
                else:
                    at += 1

    def _write(self, name: str, group: list[Event], stacks: Sequence[Stack], *, sure: bool) -> None:
        self._counts["replays"] += 1
        self._counts["kernels"] += len(group)
        tracks: dict[tuple[object, object], list[tuple[Event, Stack]]] = defaultdict(list)
        for event, stack in zip(group, stacks, strict=True):
            args = event.setdefault("args", {})
            args["graphrt graph"], args["graphrt ranges"] = name, [*stack]
            args.pop("graphrt unsure", None)
            if not sure:
                args["graphrt unsure"] = "several streams, or several graphs with these kernels"
            self._counts["annotated"] += bool(stack)
            self._counts["unsure"] += bool(stack) and not sure
            tracks[event.get("pid"), event.get("tid")].append((event, stack))
        for (pid, tid), kernels in tracks.items():
            track = tid + _TRACKS_FROM if isinstance(tid, int) else f"{tid} ranges"
            self._events += _slices(kernels, pid, track, name)
            if (pid, tid) not in self._tracks:
                self._tracks.add((pid, tid))
                label = {"name": f"modules and ranges of graphs, {tid}", CATEGORY: True}
                named = {"ph": "M", "name": "thread_name", "pid": pid, "tid": track, "args": label}
                self._events.append(named)


def _by_number(graph: _Graph, group: Sequence[Event]) -> list[Stack] | None:
    """The stack of each kernel by the number of its node; None without numbers, or if one is not
    the graph's."""
    stacks = {
        kernel.number: (stack, kernel.names)
        for kernel, stack in zip(graph.kernels, graph.stacks, strict=True)
    }
    found = []
    for event in group:
        number = (event.get("args") or {}).get("graph node id")
        stack, names = stacks.get(number and number & 0xFFFFFFFF, ((), frozenset[str]()))
        if not number or event["name"] not in names:
            return None
        found.append(stack)
    return found if len(group) == len(graph.kernels) else None


def _by_order(graph: _Graph, group: Sequence[Event]) -> list[Stack] | None:
    """The stack of each kernel by its place; None if a name differs, or the graph has several
    streams."""
    is_same = graph.in_order and len(group) == len(graph.kernels)
    for kernel, event in zip(graph.kernels, group, strict=False) if is_same else ():
        # A driver before CUDA 12.3 tells no names.
        is_it = (
            event["name"] in kernel.names if kernel.names else _launch_of(event) == kernel.launch
        )
        if not is_it:
            return None
    return graph.stacks if is_same else None


def _by_name(graph: _Graph, group: Sequence[Event]) -> list[Stack] | None:
    """As `_by_order`, for several streams: the first kernel of a name is taken for the one that was
    captured first."""
    waiting: dict[str, list[Stack]] = defaultdict(list)
    for kernel, stack in zip(graph.kernels, graph.stacks, strict=True):
        for name in kernel.names:
            waiting[name].append(stack)
    if len(group) != len(graph.kernels) or graph.in_order:
        return None
    found = []
    for event in group:
        if not waiting[event["name"]]:
            return None
        found.append(waiting[event["name"]].pop(0))
    return found


def _same_launches(graph: _Graph, group: Sequence[Event]) -> bool:
    """Whether kernels have the grids and blocks of a graph, in any order."""
    return sorted(map(_launch_of, group)) == sorted(kernel.launch for kernel in graph.kernels)


def _launch_of(event: Event) -> tuple[int, ...]:
    args = event.get("args") or {}
    return (*args.get("grid", ()), *args.get("block", ()))


def _slices(
    kernels: Sequence[tuple[Event, Stack]], pid: object, track: object, graph: str
) -> Iterator[Event]:
    """A slice for each module and range, from its first kernel to its last one in a row."""
    opened: list[Event] = []
    for event, stack in kernels:
        names = [graph, *stack]
        end = event["ts"] + event["dur"]
        common = 0
        while common < min(len(names), len(opened)) and opened[common]["name"] == names[common]:
            common += 1
        yield from reversed(opened[common:])
        del opened[common:]
        for each in opened:
            each["dur"] = end - each["ts"]
        opened += [
            {"ph": "X", "cat": CATEGORY, "name": name, "pid": pid, "tid": track,
             "ts": event["ts"], "dur": event["dur"], "args": {}}
            for name in names[common:]
        ]  # fmt: skip
    yield from reversed(opened)
