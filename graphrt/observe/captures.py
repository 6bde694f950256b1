"""Captures as they are made, for observers from outside: the modules and ranges around each node.

`listening(platform, listener)` tells a `Listener` of every segment that this thread captures on the
platform, and of the modules and ranges that the forward enters and leaves while one is open.
`begin_capture` and `end_capture` of the platform are wrapped meanwhile, as `Tap` wraps a runner's
steps; `Module.__call__`, `record_function` and NVTX ranges are while a segment is open. Outside of
`listening` nothing is wrapped, so captures and steps cost nothing more.

Ranges that C++ opens, and `_RecordFunctionFast`, are not seen.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from threading import get_ident
from typing import Any

import torch

from graphrt.core.base._undo import ProcessChange
from graphrt.core.device.platform import Platform


class Listener:
    """Told of the captures of one thread. `frames` has the names of the modules and ranges that are
    entered now, the outermost first."""

    def __init__(self) -> None:
        self.frames: list[str] = []

    def begun(self, graph: Any) -> None:
        """A segment has begun, which `graph` will hold."""

    def ending(self, graph: Any) -> None:
        """The open segment is about to end."""

    def dropped(self, graph: Any) -> None:
        """The open segment has failed."""

    def entered(self, module: torch.nn.Module | None) -> None:
        """The last of `frames` was entered: a module, or None for a range."""

    def left(self, module: torch.nn.Module | None) -> None:
        """A module or range is about to be left: the last of `frames`."""


class _Heard:
    """The listener of one thread, and the segment that is open in it."""

    def __init__(self, listener: Listener, platform: Platform, *, eagerly: bool) -> None:
        self.listener, self.platform, self.eagerly = listener, platform, eagerly
        self.graph: Any = None
        # Modules that are entered; None stands for a range.
        self._entered: list[torch.nn.Module | None] = []
        # id of an outermost module -> it, and the names of its modules by id.
        self._names: dict[int, tuple[torch.nn.Module, dict[int, str]]] = {}

    def begin(self, graph: Any) -> None:
        self.graph = graph
        _patches.enter(self)
        self.listener.begun(graph)

    def end(self) -> None:
        graph, self.graph = self.graph, None
        self._unpatch()
        if graph is not None:
            self.listener.ending(graph)

    def drop(self, graph: Any) -> None:
        self.graph = None
        self._unpatch()
        self.listener.dropped(graph)

    def _unpatch(self) -> None:
        if not self.eagerly:
            _patches.leave(self)

    def enter(self, name: str, module: torch.nn.Module | None = None) -> None:
        self._entered.append(module)
        self.listener.frames.append(name)
        self.listener.entered(module)

    def leave(self) -> None:
        if self._entered:
            self.listener.left(self._entered[-1])
            self._entered.pop()
            self.listener.frames.pop()

    def name_of(self, module: torch.nn.Module) -> str:
        """The module's path in the outermost module that is entered. That one, and a module that is
        none of its parts, has the name of its class."""
        outer = next((each for each in self._entered if each is not None), module)
        if id(outer) not in self._names:
            self._names[id(outer)] = outer, {id(m): name for name, m in outer.named_modules()}
        return self._names[id(outer)][1].get(id(module)) or type(module).__name__


_heard: dict[int, _Heard] = {}
"""thread -> who listens to its captures."""
_lock = threading.Lock()
_listened = Counter[int]()
"""id of a platform -> how many listen to it."""


@contextmanager
def listening(platform: Platform, listener: Listener, *, eagerly: bool = False) -> Iterator[None]:
    """Tell `listener` of the captures of this thread on `platform`; with `eagerly` also of modules
    and ranges where no segment is open. Inside of another one it is told in the place of that."""
    thread, heard = get_ident(), _Heard(listener, platform, eagerly=eagerly)
    outer = _heard.get(thread)
    with _lock:
        _listened[id(platform)] += 1
        if _listened[id(platform)] == 1:
            _wrap(platform)
    try:
        _heard[thread] = heard
        if eagerly:
            _patches.enter(heard)
        yield
    finally:
        _patches.leave(heard)
        if outer is None:
            _heard.pop(thread, None)
        else:
            _heard[thread] = outer
        with _lock:
            _listened[id(platform)] -= 1
            if not _listened[id(platform)]:
                del _listened[id(platform)]
                for name in ("begin_capture", "end_capture", "abort_capture"):
                    vars(platform).pop(name, None)


def _wrap(platform: Any) -> None:
    """Let `listening` threads hear of the segments of a platform."""
    begin, end, abort = platform.begin_capture, platform.end_capture, platform.abort_capture

    def of_thread() -> _Heard | None:
        heard = _heard.get(get_ident())
        return heard if heard is not None and heard.platform is platform else None

    def begin_capture(graph: Any, memory: Any) -> None:
        begin(graph, memory)
        heard = of_thread()
        if heard is not None:
            heard.begin(graph)

    def end_capture(graph: Any) -> Any:
        heard = of_thread()
        if heard is not None:
            heard.end()
        return end(graph)

    def abort_capture(graph: Any) -> None:
        heard = of_thread()
        try:
            if heard is not None:
                heard.drop(graph)
        finally:
            abort(graph)

    platform.begin_capture, platform.end_capture = begin_capture, end_capture
    platform.abort_capture = abort_capture


# What opens a module or a range ------------------------------------------------------------------


def _open() -> _Heard | None:
    """The listener of this thread, if it is told of modules and ranges now."""
    heard = _heard.get(get_ident())
    return heard if heard is not None and (heard.eagerly or heard.graph is not None) else None


def _call_of(original: Callable[..., Any]) -> Callable[..., Any]:
    def __call__(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        heard = _open()
        if heard is None:
            return original(self, *args, **kwargs)
        heard.enter(heard.name_of(self), self)
        try:
            return original(self, *args, **kwargs)
        finally:
            heard.leave()

    return __call__


def _enter_of(original: Callable[..., Any]) -> Callable[..., Any]:
    def __enter__(self: Any) -> Any:
        result = original(self)
        heard = _open()
        self.graphrt_heard = heard
        if heard is not None:
            heard.enter(str(self.name))
        return result

    return __enter__


def _exit_of(original: Callable[..., Any]) -> Callable[..., Any]:
    def __exit__(self: Any, *error: Any) -> Any:
        heard = vars(self).pop("graphrt_heard", None)
        if heard is not None:
            heard.leave()
        return original(self, *error)

    return __exit__


def _push_of(original: Callable[..., Any]) -> Callable[..., Any]:
    def range_push(msg: Any) -> Any:
        heard = _open()
        if heard is not None:
            heard.enter(str(msg))
        return original(msg)

    return range_push


def _pop_of(original: Callable[..., Any]) -> Callable[..., Any]:
    def range_pop() -> Any:
        heard = _open()
        if heard is not None:
            heard.leave()
        return original()

    return range_pop


def _patch(undo: list[Callable[[], object]]) -> None:
    ranges = torch.autograd.profiler.record_function
    for owner, name, around in (
        (torch.nn.Module, "__call__", _call_of),
        (ranges, "__enter__", _enter_of),
        (ranges, "__exit__", _exit_of),
        (torch.cuda.nvtx, "range_push", _push_of),
        (torch.cuda.nvtx, "range_pop", _pop_of),
    ):
        original = getattr(owner, name)
        undo.append(partial(setattr, owner, name, original))
        setattr(owner, name, around(original))


_patches = ProcessChange(_patch)
