"""`CaptureGuard`: what a capture lets pass, and what it refuses because a graph would freeze it.

A segment of graph repeats its operators on the memory of the capture. So the guard looks

1. at operators of an open segment, where a row of `OPERATORS` or another check has to see them
   (`CaptureGuard.begin`), and at every operator of an eager part between two;
2. at what the forward reads from its context, while a segment is open.

The rules are a table, `refusals.py`. Which operators a device itself cannot capture is for that
device to say: `Platform.explain`, and on the CPU the tape's own table.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextvars import ContextVar
from functools import partial
from types import CodeType, FunctionType
from typing import Any, ParamSpec, TypeVar, cast

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from graphrt.core.base import torch_names, tree
from graphrt.core.base._undo import Undo, undoing
from graphrt.core.base.errors import (
    BreakWarning,
    CaptureError,
    GraphRTError,
    InvalidOptionError,
    warn_caller,
)
from graphrt.core.base.option_values import check_callable, shown
from graphrt.core.base.thread_mode import ThreadMode, remove_dispatch_mode
from graphrt.core.batch.context import ForwardContext
from graphrt.core.capture import refusals
from graphrt.core.capture.constants import Constants
from graphrt.core.capture.operators import LIFT_FRESH, facts_of, written
from graphrt.core.capture.refusals import OperatorRule, Source, described, user_source
from graphrt.core.device.contract import DeviceGraph
from graphrt.core.replay.entry import TENSORS_ALONE, name_of
from graphrt.core.replay.recording import Recording, counted, current_capture, issued

_aten = torch.ops.aten
_READ = _aten._local_scalar_dense.default
"""The operator by which the host reads a number of a tensor."""
_COPIES = ("aten.copy_.default", "aten._to_copy.default")
"""The operators that copy between the host and a device."""


class CaptureGuard(ThreadMode):
    """Sees the operators of an open segment: breaks at those of `breaks`, and refuses those of
    `rules`, and what no replay would repeat.

    A FULL graph has no eager parts: there it looks only at `rules`, at work of the host, and at the
    context. With `constants`, tensors that the forward makes on the host are lifted out of the
    graph. If `issued` has a list, operators are noted there. The dispatch mode is entered only if
    one of these needs to see operators: it takes microseconds an operator.
    """

    supports_higher_order_operators = True

    def __init__(
        self,
        recorder: Recording,
        context: ForwardContext,
        breaks: frozenset[str],
        check_host: HostCheck | None,
        constants: Constants | None,
        owns: Callable[[torch.Tensor], bool],
        rules: Mapping[str, tuple[OperatorRule, ...]],
        *,
        is_watched: bool = True,
    ) -> None:
        """`owns` says whether a tensor's memory is of the pool, which graphs of all sizes share:
        when this graph is replayed, another one may have written there. With `is_watched` eager
        parts are, for tensors that leave or enter them by side doors."""
        super().__init__()  # type: ignore[no-untyped-call]
        # None once the capture is over, so that neither keeps the other alive.
        self.recorder: Recording | None = recorder
        self.issued = issued.get()
        self._context = context
        self._breaks = breaks
        # Whether tensors may leave an eager part by a side door, as only captures in pieces have
        # eager parts.
        self._in_pieces = recorder.breakable or bool(breaks)
        self.is_watched = is_watched
        self._check_host = check_host
        self.constants = constants
        self.owns = owns
        self._rules = rules
        self.doors = SideDoors() if (doors := side_doors.get()) is None else doors
        self.doors.begin_capture()
        # Copies of memory that an eager part returned and others hold too, with the name of the
        # part. Graphs read the copy, so a write of it would not reach the others.
        self.copies: dict[StorageWeakRef, str] = {}
        # Whether this mode was entered for the open segment; whether it handles an operator now.
        self._entered = self._handling = False

    def begin(self, graph: DeviceGraph) -> None:
        """A segment has begun, which `graph` will hold."""
        withhold(self._context)
        if self.constants is not None:
            self.constants.begin(graph)
        in_pieces = self._in_pieces and (self._breaks or self.doors.made or self.copies)
        looks_at_host = self._check_host or self.constants
        noted = self.issued is not None
        wanted = in_pieces or looks_at_host is not None or noted or self._rules
        # In `handle` torch has taken this mode off its stack, and puts it back afterwards.
        if wanted and not (self._handling or self._entered):
            self.__enter__()
            self._entered = True

    def end(self) -> None:
        """The segment ends; raises for what a replay of it would not repeat."""
        hand_back(self._context)
        if self._entered and not self._handling:
            top = torch_names.dispatch_modes()[-1]
            if top is not self:
                raise refusals.MODE_STILL_ACTIVE(type(top).__name__)
            self._entered = False
            self.__exit__()
        if self.constants is not None:
            self.constants.end()

    def remove(self) -> None:
        """Leave the mode after a segment has failed, whatever modes the forward left above it. May
        be called again."""
        hand_back(self._context)
        self._entered = False
        remove_dispatch_mode(self)
        if self.constants is not None:
            self.constants.end()

    def handle(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        run: Callable[..., Any] = func
        if self._breaks and is_listed(func, self._breaks):
            recorder = self.recorder
            if recorder is None or not recorder.breakable:
                raise refusals.MISSED_BREAK(op=func)
            run, args, kwargs = recorder.run_eagerly, (func, args, kwargs), {}
        else:
            if self.issued is not None:
                self.issued.append(func)
            if self._rules:
                self.check_rules(func, args, kwargs)
            if self._in_pieces and self.doors.made:
                self.doors.check(tree.tensors(args, kwargs), "the graph reads", func)
            if self.copies:
                self.check_written(func, args, kwargs)
            if self._check_host is not None:
                self._check_host(func, args, kwargs)
            if self.constants is not None:
                run, args, kwargs = self.constants.run, (func, args, kwargs), {}
        # A break, or a kernel (vLLM's breakable attention), may end the segment while torch has
        # this mode off its stack: without the flag `end` finds no mode to leave.
        self._handling = True
        try:
            return run(*args, **kwargs)
        finally:
            self._handling = False

    def check_rules(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Raise the error of the first of the `rules` that a call breaks."""
        for name in names_of(func):
            for rule in self._rules.get(name, ()):
                if rule.is_broken(args, kwargs):
                    raise rule.refusal(op=func)

    def check_written(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Raise `BreakError` if an operator is about to write one of the `copies`."""
        for tensor in written(facts_of(func), args, kwargs):
            if tensor.layout is torch.strided:
                ref = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
                part = self.copies.get(ref)
                if part is not None:
                    at = user_source() or "some line"
                    raise refusals.WRITTEN_COPY(
                        f"{func} of {described(tensor)}, at {at}", part=part
                    )


def is_listed(func: Any, breaks: frozenset[str]) -> bool:
    """Whether an operator is one of `breaks`, by its name or that of its overload."""
    return not breaks.isdisjoint(names_of(func)) if breaks else False


def names_of(func: Any) -> tuple[str, ...]:
    """The names of an operator: with and without its overload. A higher-order one has none."""
    schema = getattr(func, "_schema", None)
    return () if schema is None else (schema.name, f"{schema.name}.{func._overloadname}")


# Work of the host ---------------------------------------------------------------------------------


HostCheck = Callable[[Any, Sequence[Any], Mapping[str, Any]], None]
"""Raises for a call of an operator that would do work on the host: see `host_check`."""


def host_check(
    tensors: Iterable[torch.Tensor], error: type[CaptureError], *, may_draw: bool
) -> HostCheck | None:
    """Return a check that refuses work on the host, which no replay on a device repeats.

    Drawing random numbers there is a `RefusedOpError`; reading or writing one of the caller's
    `tensors` there is an `error`. Views, and copies of pinned memory, pass. Returns None if there
    is nothing to refuse: a check takes some microseconds an operator.
    """
    # Nothing is read of an empty tensor.
    withheld = {_address(each) for each in tensors if _is_on_host(each) and each.numel()}
    refusal = refusals.HOST_ARGUMENT._replace(error=error)

    def check(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        if _draws_on_host(func, args, kwargs):
            raise refusals.HOST_DRAW(op=func)
        if not withheld or facts_of(func).is_view:
            return
        for tensor in tree.tensors(args, kwargs):
            if not _is_on_host(tensor) or _address(tensor) not in withheld:
                continue
            # A copy of pinned memory is captured: every replay reads what is there then.
            if str(func) not in _COPIES or not tensor.is_pinned():
                raise refusal(described(tensor), op=func)

    return check if withheld or may_draw else None


def _is_on_host(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.layout is torch.strided


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _draws_on_host(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether an operator draws from the host's generator, and not from a device's."""
    if not facts_of(func).draws:
        return False
    of_tensors = [tensor.device.type for tensor in tree.tensors(args, kwargs)]
    device = kwargs.get("device")
    devices = of_tensors or ["cpu" if device is None else torch.device(device).type]
    return "cpu" in devices


# A step's metadata --------------------------------------------------------------------------------


class _Withholding:
    """The class of a context while a segment is open: the graph would keep what it reads for ever.

    The context gets another class for that time, so that at replays reads of it cost nothing more.
    """

    __slots__ = ()

    def __getattribute__(self, name: str) -> Any:
        # Not by `super()`: another thread that finds the pool busy may be in here when the segment
        # ends, and the context is of its own class again.
        kind: Any = type(self)
        if not issubclass(kind, _Withholding):
            return kind.__getattribute__(self, name)
        if name == "metadata":
            raise refusals.METADATA()
        if name == "query_len":
            return None  # a graph of mixed batches serves batches of other query lengths too
        return kind.__bases__[1].__getattribute__(self, name)


def withhold(context: ForwardContext) -> None:
    """Until `hand_back`, `context` refuses to give its metadata, and has no query length; unless
    its capture says that the host has declared the metadata."""
    kind: Any = type(context)
    declared = context.capture is not None and context.capture.metadata_is_declared
    if not declared and not issubclass(kind, _Withholding):
        object.__setattr__(context, "__class__", _withholding(kind))


def hand_back(context: ForwardContext) -> None:
    """End `withhold`."""
    kind = type(context)
    if issubclass(kind, _Withholding):
        object.__setattr__(context, "__class__", kind.__bases__[1])


@functools.cache
def _withholding(kind: type) -> type:
    """The class that contexts of `kind` get while they withhold their metadata."""
    return type(kind.__name__, (_Withholding, kind), {"__slots__": ()})


# Tensors that leave an eager part by a side door --------------------------------------------------


_Made = tuple[str, Source | None, int]
"""Which eager part, and which line of it, made a tensor, and in which capture (0: in a warm-up)."""


class SideDoors:
    """Finds tensors that leave an eager part by a side door: not as a result, but in an attribute
    or a list. It notes what eager parts made in the warm-ups and captures of one session.

    A graph that reads such a tensor reads the one of its capture at every replay, while the eager
    part makes another. One that an earlier run made may be read (a workspace that the first run
    allocates, say), unless the same line makes another one in this capture.

    Limit: memory that no operator makes is not seen, such as results of compiled functions, or a
    tensor that a custom operator's body keeps.
    """

    def __init__(self) -> None:
        # Key of a storage -> memory that no graph may read. While there is the weak reference, no
        # other storage gets the key.
        self.made: dict[int, tuple[StorageWeakRef, _Made]] = {}
        # The number of the capture under way, or of the last one.
        self._capture = 0
        # Eager parts that were warned of.
        self._warned_of: set[str] = set()
        # For tensors of earlier runs that a graph has read: (part, line) that made it -> the error
        # to raise if the line makes another one in this capture.
        self._remade: dict[tuple[str, Source | None], GraphRTError] = {}

    def begin_capture(self) -> None:
        """A capture begins: what was made before is older than it."""
        self._capture += 1
        self._remade.clear()

    @undoing
    def watched(
        self,
        undo: Undo,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        guard: CaptureGuard | None = None,
    ) -> Any:
        """Run an eager part, and note what it makes; a part inside of it belongs to it. In a
        capture (`guard`) it may read pool memory only if it was given that, and write no copy."""
        for mode in torch_names.dispatch_modes():
            if isinstance(mode, _PartWatch) and mode.doors is self:
                return function(*args, **kwargs)
        if guard is None:  # in a capture `run_eagerly` has called it
            refuse_transform(function)
        # Autocast keeps casts of weights. Without this line a part would read a cast that the graph
        # has made, or the graph one of the part; at a replay each makes its own.
        torch.clear_autocast_cache()
        watch = None
        if guard is None or guard.is_watched or guard.copies:
            memory = _memory_of(tree.tensors(args, kwargs))
            undo.set(in_eager_part, frozenset(memory))
            watch = _PartWatch(self, name_of(function), memory, guard)
            result = watch.around(partial(function, *args, **kwargs))
        else:
            result = function(*args, **kwargs)
        torch.clear_autocast_cache()
        if guard is not None and watch is not None and watch.reads_data:
            self._warn_of_numbers(name_of(function), result)
        return result

    def holds_new(self) -> bool:
        """Whether memory that parts have made in the last capture is still there."""
        made = (ref for ref, (*_, capture) in self.made.values() if capture == self._capture)
        return not all(ref.expired() for ref in made)  # type: ignore[no-untyped-call]

    def _warn_of_numbers(self, part: str, result: Any) -> None:
        """Warn once of a part that has read data on the host and returns a Python number."""
        numbers = [leaf for _, leaf in tree.leaves(result) if isinstance(leaf, bool | int | float)]
        if numbers and part not in self._warned_of:
            self._warned_of.add(part)
            warn_caller(
                f"eager break {part} read tensors on the host and returned a Python number: graphs "
                "keep the number of their capture, and a step with another one runs eagerly\n"
                f"  got: {numbers[0]!r}\n  expected: tensors\n  try: {TENSORS_ALONE}",
                BreakWarning,
            )

    def settle(self) -> None:
        """After an eager part, when its results are copied: forget memory that is freed.

        Raises `SideDoorError` if the part made anew what the graph has read.
        """
        self.made = {
            key: each
            for key, each in self.made.items()
            if not each[0].expired()  # type: ignore[no-untyped-call]
        }
        if self._remade:
            self._check_remade()

    def check(self, tensors: Iterable[torch.Tensor], what: str, op: object = None) -> None:
        """Raise `SideDoorError` if the open capture may not read one of these."""
        for key, tensor in _memory_of(tensors).items():
            # Of an empty one nothing can be read.
            _, made = self.made.get(key, (None, None)) if tensor.numel() else (None, None)
            if made is None:
                continue
            part, source, capture = made
            got = f"{described(tensor)}, made at {source or 'an unknown line'}"
            is_older = capture != self._capture
            how = " again at every step" if is_older else ""
            refusal = refusals.SIDE_DOOR(got, op=op, what=what, part=part, how=how)
            if not is_older:
                raise refusal
            self._remade.setdefault((part, source), refusal)
            self._check_remade()

    def _check_remade(self) -> None:
        for _, (part, source, capture) in self.made.values():
            if capture == self._capture and (part, source) in self._remade:
                raise self._remade.pop((part, source))

    def note_made(
        self, part: str, result: Any, arguments: Mapping[int, torch.Tensor]
    ) -> Collection[int]:
        """Note the storages that an operator returned and was not given in its `arguments`;
        returns the keys of those that were not known before."""
        results = _memory_of(tree.tensors(result))
        new_keys = results.keys() - self.made.keys() - arguments.keys()
        if new_keys:
            made = part, user_source(), self._capture
            for key in new_keys:
                storage = results[key].untyped_storage()
                self.made[key] = StorageWeakRef(storage), made  # type: ignore[no-untyped-call]
        return new_keys


class _PartWatch(ThreadMode):
    """Sees the operators of an eager part: notes memory that they make, and refuses reads and
    writes that no replay would repeat."""

    supports_higher_order_operators = True

    def __init__(
        self,
        doors: SideDoors,
        part: str,
        arguments: Mapping[int, torch.Tensor],
        guard: CaptureGuard | None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.doors = doors
        # Whether the part has asked for a tensor's number: `item()`, `float()`, a branch.
        self.reads_data = False
        self._part = part
        self._guard = guard
        # Memory that the part was given, and may read: key of the storage -> storage. Held, as
        # another storage may get the key of a freed one.
        self._arguments: dict[int, torch.UntypedStorage] = {}
        # Where these storages begin: another storage over the same memory may be read too.
        self._addresses: set[int] = set()
        # Keys of storages that its operators made: to ask the pool about one takes 20 us.
        self._fresh: set[int] = set()
        for key, each in arguments.items() if guard is not None else ():
            storage = self._arguments[key] = each.untyped_storage()
            self._addresses.add(storage.data_ptr())

    def handle(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        guard, facts = self._guard, facts_of(func)
        self.reads_data |= func is _READ
        if guard is None and facts.makes_no_memory:
            return func(*args, **kwargs)
        tensors = tree.tensors(args, kwargs)
        memory = _memory_of(tensors)
        if guard is not None:
            if guard.issued is not None:
                guard.issued.append(func)
            for key, tensor in memory.items():
                if key not in self._arguments and key not in self._fresh:
                    self._check_read(guard, tensor, func)
            if guard.copies:
                guard.check_written(func, args, kwargs)
        result = func(*args, **kwargs)
        if not facts.makes_no_memory:
            if facts.writes:
                memory = _memory_of(tensors)  # `set_` gives a tensor other memory
            # LIFT_FRESH is given the tensor that torch made of Python data: the part made it.
            made = self.doors.note_made(self._part, result, {} if func is LIFT_FRESH else memory)
            # A custom operator's result may be a graph's tensor, kept in a registry: check it.
            if facts.is_aten:
                self._fresh.update(made)
        return result

    def _check_read(self, guard: CaptureGuard, tensor: torch.Tensor, func: Any) -> None:
        """Raise `SideDoorError` for pool memory that the part was not given."""
        if tensor.untyped_storage().data_ptr() not in self._addresses and guard.owns(tensor):
            raise refusals.HIDDEN_TENSOR(described(tensor), op=func, part=self._part)


in_eager_part: ContextVar[frozenset[int] | None] = ContextVar("graphrt_eager_part", default=None)
"""Keys of the storages that were given to the eager part that this thread runs, if it is
watched: replays give it the same."""

side_doors: ContextVar[SideDoors | None] = ContextVar("graphrt_side_doors", default=None)
"""`SideDoors` of the session whose runs and captures this thread makes, if some are in pieces."""


def refuse_transform(function: Callable[..., Any]) -> None:
    """Raise `CaptureError` inside of a transform: a replay calls the eager part outside of it, and
    what the transform hands it is no tensor with memory."""
    if torch_names.in_transform():
        raise refusals.TRANSFORMED_BREAK(
            "an eager part of a transformed function", part=name_of(function)
        )


def _memory_of(tensors: Iterable[torch.Tensor]) -> dict[int, torch.Tensor]:
    """key of a storage -> a tensor in it, for all tensors and those inside of subclasses. That
    tensor is empty only if all in the storage are."""
    memory: dict[int, torch.Tensor] = {}
    for tensor in tensors:
        # Parts see each operator: most have plain tensors alone.
        is_bare = type(tensor) in tree.BARE and tensor.layout is torch.strided
        for part in (tensor,) if is_bare else _parts_of(tensor):
            key = part.untyped_storage()._cdata
            if key not in memory or not memory[key].numel():
                memory[key] = part
    return memory


def _parts_of(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The tensors with memory that a tensor consists of: itself, or those inside of a subclass."""
    return [part for part, name, _ in tree.placed((tensor,), parts=True) if name is not None]


P = ParamSpec("P")
R = TypeVar("R")


def eager_break(
    function: Callable[P, R], *, capture_stub: Callable[P, R] | None = None
) -> Callable[P, R]:
    """Mark a function to run eagerly between two segments of a PIECEWISE capture.

    At replay it is called with the captured tensors and the captured Python values; what changes
    from step to step it must read from `current_context()`. A fresh tensor that it returns is
    copied into a fixed buffer. One that it leaves elsewhere (in a list, an attribute) is for other
    eager parts: where a graph reads it, the capture raises `SideDoorError`. In a PIECEWISE wrapper
    that is not breakable the capture raises `RefusedOpError`. Outside of PIECEWISE captures it is
    just called. A `capture_stub` is called in its place during a capture alone, for results of the
    same shapes: a function that waits for other ranks need not run then. Raises
    `InvalidOptionError` for what is no function.
    """
    check_callable("function", function, "@eager_break above the function's def")
    if capture_stub is not None:
        check_callable("capture_stub", capture_stub)

    @functools.wraps(function)
    def breaking(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.compiler.is_compiling():
            return function(*args, **kwargs)
        capture = current_capture()
        if capture is not None and capture.breakable:
            return cast(R, capture.run_eagerly(function, args, kwargs, capture_stub))
        if capture is not None and capture.must_break:
            raise refusals.MISSED_BREAK(name_of(function))
        work = counted.get()
        if work is not None:
            work.breaks += 1
        doors = None if capture is not None else side_doors.get()
        if doors is not None:
            return cast(R, doors.watched(function, args, kwargs))
        return function(*args, **kwargs)

    _codes.add(cast(FunctionType, breaking).__code__)
    return breaking


def operator_break(call: Callable[P, R]) -> Callable[P, R]:
    """`eager_break` of a function that calls one splitting operator: a trace has the operator, at
    which it is split, and no eager part."""
    breaking = eager_break(call)

    @functools.wraps(call)
    def splitting(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.compiler.is_compiling():
            return call(*args, **kwargs)
        return breaking(*args, **kwargs)

    return splitting


# The code of `breaking`, which all marked functions share.
_codes: set[CodeType] = set()


def check_traced(codes: Iterable[CodeType]) -> None:
    """Raise `RefusedOpError` if code that a compiler has traced, `codes`, calls a function that
    is marked `@eager_break`: it is part of what was compiled."""
    if not _codes.isdisjoint(codes):
        raise refusals.MISSED_BREAK("a function that was traced")


def check_break(name: str) -> None:
    """Raise `InvalidOptionError` for an operator that cannot be seen, and so would not break."""
    base, _, overload = name.partition(".")
    # Overloads for named dimensions do not count: they call another overload.
    composites = {
        each: _is_composite(f"{base}.{each}" if each else base)
        for each in (schema.overload_name for schema in torch_names.schemas_of_operator(base))
        if overload in ("", each) and "dimname" not in each.lower() and not each.startswith("names")
    }
    overloads = {each: composite for each, composite in composites.items() if composite is not None}
    if not overloads:
        raise InvalidOptionError(
            "no operator of that name is registered",
            got=shown(name),
            expected='"namespace::name" or "namespace::name.overload"',
            advice="import the module that registers it before the capture",
        )
    functional = {each for each in overloads if not each.endswith("out")} or overloads.keys()
    if any(overloads[each] for each in functional):
        raise InvalidOptionError(
            "a composite operator cannot be a break: torch takes it apart before a capture",
            got=shown(name),
            expected="an operator with a kernel of its own",
            advice="mark its caller @eager_break, or name the operators that it calls",
        )


def _is_composite(operator: str) -> bool | None:
    """Whether an operator has no kernel of its own; None if it is not for tensors, as TorchScript's
    overloads for lists and numbers."""
    try:
        return torch_names.has_kernel(operator, "CompositeImplicitAutograd")
    except RuntimeError:
        return None
