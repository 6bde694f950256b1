"""`GraphPool`: the memory, the capture stream and the step counter that graphs share.

`in_turn` says who has a pool to itself, from before a graph is looked up until its outputs are out.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from contextvars import Token
from functools import partial
from threading import RLock, get_ident
from typing import Any, Final, Protocol, TypeVar

import torch

from graphrt.core.base import errors, tree
from graphrt.core.base._undo import Undo
from graphrt.core.base.option_values import check_callable, check_takes
from graphrt.core.batch.context import ForwardContext
from graphrt.core.batch.descriptor import BatchDescriptor
from graphrt.core.batch.modes import GraphMode
from graphrt.core.device.contract import Capability, DeviceGraph, UpdateFigures
from graphrt.core.device.platform import Platform, capture_lock, device_of
from graphrt.core.device.pool_memory import never_destroy
from graphrt.core.device.registry import resolve_platform
from graphrt.core.replay.handout import HandedOut, expire
from graphrt.core.replay.recording import freeze_garbage
from graphrt.core.replay.sleep import Asleep

T = TypeVar("T")


def in_turn(pool: GraphPool, owner: object, call: Callable[[], T], next_owner: object = None) -> T:
    """Run `call`, which uses or changes the graphs of a pool, while `owner` has the pool: nobody
    else steps, captures or destroys graphs in it. `owner` is a context, or a text for errors. A
    turn never waits: raises `PoolBusyError` while a step is under way, or has pieces to come, and
    `PoolAsleepError`. If nothing raises, `next_owner` has the pool then.

    A step takes its turn first. Then it dispatches, is checked, fills its buffers, launches and
    hands out. So no step sees half of a change, and a call that finds the pool taken has done
    nothing. Inside of a turn the context of a forward owns the pool while the forward runs: a
    wrapper replays and captures only in a context that owns its pool.

    Between the look at the owner and the store there is no call: Python switches threads, and
    delivers interrupts, at calls and backward jumps only. And the turn ends inside of `try`: a
    Ctrl-C as a `finally` begins would leave the pool taken. `StepEngine.step` (and native/path.c)
    and `GraphWrapper.__call__` repeat this code inline: one more call costs a step 0.2 us.
    """
    if pool.owner is not None:
        raise pool.busy_error(owner)
    try:
        pool.owner = owner
        if pool.pieces.entered is None:
            result = call()
            # Whoever the owner is: an interrupt may have kept a context from giving it back.
            pool.owner = next_owner
            return result
        pool.owner = None
    except BaseException:
        pool.owner = None
        raise
    raise pool.busy_error(owner)


def in_last_turn(pool: GraphPool, owner: object, call: Callable[[], T]) -> T:
    """As `in_turn`, for a `call` that only destroys graphs: it may while the pool sleeps."""
    if not pool.asleep:
        return in_turn(pool, owner, call)
    with pool.capture_lock:
        return call()


OnCapture = Callable[[Any, BatchDescriptor], object]
"""Called after a capture, with the wrapper and the descriptor."""


# Process-wide because a fork is. In a forked child `_LEFT_BEHIND` owns all pools of the parent for
# good: another thread of the parent may have been inside of a step, and the device does not know
# the child. `_pools` are all open or closed pools, `_left_behind` those of the parent; it is empty
# where nothing was forked.
_LEFT_BEHIND: Final = "the parent of this process"
_pools: weakref.WeakSet[GraphPool] = weakref.WeakSet()
_left_behind: list[GraphPool] = []


def _in_child() -> None:
    _left_behind.extend(_pools)
    for pool in _left_behind:
        pool.owner = _LEFT_BEHIND


def _left_behind_error() -> errors.PoolError:
    return errors.PoolError(
        "the process had graph pools when it was forked: neither they nor new ones can be used in "
        "the child",
        expected="a process of its own for model, pool and runner",
        advice="start it with multiprocessing's 'spawn', or fork before the first pool is made",
    )


if hasattr(os, "register_at_fork"):  # nothing forks on Windows
    os.register_at_fork(after_in_child=_in_child)


class HoldsGraphs(Protocol):
    """An owner of graphs in a pool, such as a wrapper."""

    runtime_mode: GraphMode
    """The mode of its graphs."""

    @property
    def entries(self) -> Mapping[BatchDescriptor, Any]:
        """Its graphs."""

    def destroy_graphs(self, descriptor: BatchDescriptor | None) -> None:
        """Destroy the graphs of one descriptor, or all. Called in a turn of the pool."""

    def in_session(self, begun: bool) -> None:
        """A session in the pool has begun, or ended: a lazy wrapper captures only in one."""


_NOWHERE_ELSE: Final[AbstractContextManager[object]] = nullcontext()
"""In place of a change of the current device, where there is only one."""

_NO_STEP: Final = object()
"""What `PieceSteps.without_graph` is until there is such a step."""

_CAPTURED: Final = object()
"""What `PieceSteps.replaying` is after a capture."""

SIZE_CLASSES: Final = 4
"""The most memories of graphs under a limit, of one pool."""

_GIVEN_BACK: Final = object()
"""What `GraphPool.memory` is after `close()`."""


class PieceSteps:
    """Tells the pieces of one PIECEWISE step of a pool from those of the next: the last step, and
    what its pieces have done.

    A step begins with the first piece that replays or captures. It ends where its context is left;
    a step of a host's own context, which nobody leaves, ends where the next one begins. FULL steps
    are not noted here.
    """

    # A slot, because C reads `replaying` at a fixed offset.
    __slots__ = ("__dict__", "context", "replaying")

    def __init__(self) -> None:
        # The last step: its context, and the token that this had.
        self.context: ForwardContext | None = None
        self._token: object = None
        # The token of the step that replayed last: its further pieces skip `begin`.
        self.replaying: object = None
        # The token of the last step of a host's own context that another one has followed.
        self._followed: object = None
        # The token of the last step in which a piece ran eagerly: its results are not where its
        # graph would leave them, so the pieces after it are not replayed.
        self.without_graph: object = _NO_STEP
        # Of wrappers under a limit: the token of the last step that replayed; and that of the last
        # one that captured, with the limit.
        self.counted: object = _NO_STEP
        self.admitted: tuple[object, object] = _NO_STEP, None
        # The mode and descriptor of a lazy step, with its limit, whose first pieces replayed and
        # another had no graph.
        self.unfinished: tuple[GraphMode, BatchDescriptor, object] | None = None
        # Outputs that entries hold weakly, by their storage.
        self._loose: weakref.WeakValueDictionary[int, torch.Tensor] = weakref.WeakValueDictionary()

    def _is_last(self, context: ForwardContext | None) -> bool:
        """Whether a context is in the last step. Without a token each of its calls is a step."""
        if self.context is None or context is None or self._token is None:
            return False
        return context.token is self._token

    @property
    def entered(self) -> ForwardContext | None:
        """The context of the last step as long as it is entered, in any thread; else None."""
        last = self.context
        return last if isinstance(self._token, Token) and self._is_last(last) else None

    def begin(self, context: ForwardContext) -> bool:
        """Note that a piece of this context's step replays or captures. False if another step is
        not over, or if another one has followed this one."""
        token = context.token
        if self.context is not None and token is not None and token is self._token:
            return True
        if (token is not None and token is self._followed) or not self.end(context):
            return False
        self._token = token
        # Last: interrupted before it, no step takes another one's captures for its own.
        self.context = context
        return True

    def end(self, context: ForwardContext | None) -> bool:
        """Forget the last step, as `context` begins another one; False if it is not over."""
        last = self.context
        if last is not context and self._is_last(last):
            if isinstance(self._token, Token):
                return False
            # A host's own context is never left: its step ends where the next begins.
            self._followed = self._token
        self.context = None
        return True

    def is_behind_replay(self, token: object) -> bool:
        """Whether earlier pieces of this step have replayed, and none ran eagerly."""
        replayed = token is self.replaying or token is self.counted
        return token is not None and replayed and token is not self.without_graph

    def follows(self, token: object, limit: object, is_admitted: bool) -> bool:
        """Whether a lazy wrapper captures in this step, as those before it did."""
        if token is None:
            return is_admitted
        if token is self.without_graph or self.is_behind_replay(token):
            return False
        return is_admitted or (self.admitted[0] is token and self.admitted[1] == limit)

    def is_new(self, token: object) -> bool:
        """Whether no piece of this step has replayed, captured or run eagerly, and none is open."""
        done = self._token, self.counted, self.admitted[0], self.without_graph
        return self.entered is None and all(token is not each for each in done)

    def hold_loosely(self, aliases: Iterable[torch.Tensor]) -> None:
        """Note outputs of replays, tensors that do not keep their memory alive."""
        for tensor in aliases:
            self._loose[tensor.untyped_storage()._cdata] = tensor

    def holds(self, arguments: Any) -> bool:
        """Whether arguments are outputs of a replay, whose memory a capture may be given."""
        return any(
            tensor.layout is torch.strided and tensor.untyped_storage()._cdata in self._loose
            for tensor in (tree.tensors(arguments) if self._loose else ())
        )

    def check_held(self, arguments: Any, context: ForwardContext) -> None:
        """Raise `CaptureError` if it `holds` arguments of a call that is captured."""
        if self.holds(arguments):
            raise _behind_a_replay(context)


def _behind_a_replay(context: ForwardContext) -> errors.CaptureError:
    return errors.CaptureError(
        "a piece would be captured after other pieces of its step were replayed: the capture could "
        "reuse the memory of their results",
        got=f"{context.mode.name} [{context.descriptor}]",
        expected="all pieces of a step captured in one step, or replayed",
        advice="GraphPool.drop(descriptor), and run the step again; give a piece that two models "
        "share a wrapper for each",
    )


class PoolStreams:
    """The stream that a pool captures on, and the one that replayed in it last, which the next
    waits for."""

    # Slots, as every step reads them, and C reads `last_id` at a fixed offset.
    __slots__ = ("_index", "_platform", "for_captures", "last", "last_id", "read_id")

    def __init__(self, platform: Platform, index: int | None, stream: Any) -> None:
        """`index` is that of the pool's device, which is current; None if there is only one. The
        pool captures on the host's `stream`, or on one of its own."""
        self._platform = platform
        self._index = index
        self.for_captures = (
            platform.new_stream() if stream is None else platform.adopt_stream(stream)
        )
        # Returns the current stream's id; None where the device has no streams.
        self.read_id: Callable[[], int] | None = None
        if Capability.STREAMS in platform.capabilities:
            self.read_id = platform.stream_id_reader()
        # The stream that used the pool last, and its id; None before the first use.
        self.last: Any = None
        self.last_id: int | None = None

    def follow(self) -> Any:
        """Let the current stream wait if another one used the pool last; returns the current."""
        if self.read_id is not None:
            current_id = self.read_id()
            if current_id != self.last_id:
                self.change(current_id)
        return self.last

    def change(self, current_id: int) -> None:
        """Make the current stream, which has this id, wait for the one that replayed last."""
        platform = self._platform
        with _NOWHERE_ELSE if self._index is None else platform.on_device(self._index):
            current = platform.current_stream()
            if self.last_id is not None:
                platform.order_after(self.last)
        # After the calls: interrupted in one of them, the stream waits once more.
        self.last = current
        self.last_id = current_id


class PoolHolders:
    """The wrappers that have graphs in a pool, held weakly; and the host's sessions."""

    def __init__(self) -> None:
        self._each: weakref.WeakSet[HoldsGraphs] = weakref.WeakSet()
        # The sessions of the host that have begun and not ended.
        self._sessions: list[CaptureSession] = []

    def __iter__(self) -> Iterator[HoldsGraphs]:
        return iter(list(self._each))

    def add(self, holder: HoldsGraphs) -> None:
        """Note a holder, whose graphs `close` must destroy."""
        self._each.add(holder)
        if self._sessions:
            holder.in_session(True)

    def remove(self, holder: HoldsGraphs) -> None:
        """Forget a holder without graphs here; a session ends for it now."""
        self._each.discard(holder)
        if self._sessions:
            holder.in_session(False)

    @property
    def in_session(self) -> bool:
        """Whether a session of the host has begun, and not ended."""
        return bool(self._sessions)

    @property
    def uses_results(self) -> bool:
        """Whether the host uses results of captures, by the session that was entered last."""
        return not self._sessions or self._sessions[-1].uses_results

    def note_session(self, session: CaptureSession, *, begun: bool) -> None:
        """A session has begun, or ended."""
        if begun:
            self._sessions.append(session)
        elif session in self._sessions:
            self._sessions.remove(session)
        for holder in self:
            holder.in_session(self.in_session)


class CaptureSession:
    """What was captured in a pool since this, of `GraphPool.capture_session()`, was entered."""

    def __init__(self, pool: GraphPool, *, uses_results: bool = True) -> None:
        self._pool = pool
        self.uses_results = uses_results
        """Whether the host reads what calls that capture return, and write."""
        # What ends the session.
        self._undo = Undo()
        # The pool's count of captures, and its bytes, when this was made.
        self._captures, self._bytes = pool.captures, pool.bytes()

    def __enter__(self) -> CaptureSession:
        pool, undo = self._pool, self._undo
        try:
            freeze_garbage(undo, self)
            undo.later(partial(pool.holders.note_session, self, begun=False))
            pool.holders.note_session(self, begun=True)
        except BaseException:  # also an interrupt
            undo.now()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self._undo.now()

    def __repr__(self) -> str:
        return f"CaptureSession({self.captures} captures)"

    @property
    def captures(self) -> int:
        """Entries that were captured."""
        return self._pool.captures - self._captures

    @property
    def pool_bytes(self) -> int | None:
        """Bytes by which the pool grew, what the host captured into it included; None where the
        platform cannot tell."""
        now = self._pool.bytes()
        return None if now is None or self._bytes is None else now - self._bytes


class GraphPool(errors.Uncopied):
    """Memory that graphs share when they never run concurrently: sizes, pieces, target and draft.

    A replay may overwrite the outputs of any other graph in the pool, so outputs are valid until
    the next step. `generation` counts the steps. A step that begins before another one is over,
    in another thread or inside of it, raises `PoolBusyError`; replays from two streams are ordered
    by an event.

    A pool belongs to one `device`, whichever is current. It captures on `stream`, None where the
    device has none. `captures` counts what was captured in it; `on_capture`, which may be set, is
    called after each with the wrapper and the descriptor. `after_segment`, which may be set too,
    is called before each eager break of a capture, where ranks may wait for one another.
    """

    # Slots, because C accesses these at fixed offsets.
    __slots__ = ("__dict__", "__weakref__", "closed", "generation", "owner")

    def __init__(
        self,
        platform: Platform | str | None = None,
        *,
        device: torch.device | str | int | None = None,
        handle: Any = None,
        stream: Any = None,
        around_memory: Callable[[], AbstractContextManager[object]] | None = None,
    ) -> None:
        """On a platform, by default the current one, and a device of it, by default the current.

        `handle` is an allocator pool of the host's: what both capture shares its memory. The host's
        graphs keep theirs whatever happens to this pool, which must be the only one of graphrt over
        that handle: two do not see each other's steps. `stream` is the one that the host captures
        on: blocks of a pool are used again by captures on the same stream alone. `around_memory`
        says that the pool may sleep (`suspend`): it makes the context in which the host's allocator
        takes memory whose pages it can take away. It is entered around each capture, and not around
        eager parts. Raises `MissingCapabilityError`, `InvalidOptionError`, `PoolError` for a handle
        that cannot be entered, and the named errors of platforms.
        """
        if _left_behind:
            raise _left_behind_error()
        check_takes("around_memory", around_memory, "around_memory()", optional=True)
        self.around_memory = around_memory
        self.platform = resolve_platform(platform)
        self.device = device_of(self.platform, device)
        # Whether this thread's current device is another one; None where there is only one.
        self.elsewhere: Callable[[], bool] | None = None
        if self.platform.device_count() > 1:
            index, current = self.device.index, self.platform.current_device
            # A forked child must not ask the device: its error would come in place of ours.
            self.elsewhere = lambda: not _left_behind and current() != index
        self.closed = False
        self.generation = 0
        # What steps of runners have handed out and no step has overwritten yet.
        self.handed_out: HandedOut = []
        # Whose turn it is (see `in_turn`).
        self.owner: object | None = None
        self.pieces = PieceSteps()
        self.holders = PoolHolders()
        # The captured graphs that are not destroyed -> the memory of each.
        self.graphs: weakref.WeakKeyDictionary[DeviceGraph, Any] = weakref.WeakKeyDictionary()
        # Memories beside `memory`, by size class: see `_capture_into`.
        self.classes: dict[int, tuple[Any, Any]] = {}
        self.captures = 0
        self.on_capture: OnCapture | None = None
        self.after_segment: Callable[[], object] | None = None
        # Without it an output could be read after the pool has freed its memory.
        weakref.finalize(self, expire, self.handed_out).atexit = False
        with self.on_device():
            only = None if self.elsewhere is None else self.device.index
            self.streams = PoolStreams(self.platform, only, stream)
            if handle is None:
                self.memory: Any = self.platform.new_memory()
            else:
                with self.capture_lock:
                    self.memory = self.platform.adopt_memory(handle)
        _pools.add(self)

    @property
    def capture_lock(self) -> RLock:
        """Held by the thread that captures on the device."""
        return capture_lock(self.device)

    @property
    def stream(self) -> Any:
        """The stream that it captures on; None where the device has none."""
        return self.streams.for_captures

    @property
    def handle(self) -> Any:
        """What the host passes as the pool of its own captures, to share this memory.

        It stays the same from now on until `close()`. Raises `MissingCapabilityError`.
        """
        self.check_open()
        with self.capture_lock, self.on_device():
            return self.platform.memory_handle(self.memory)

    def capture_session(self, *, stream: Any = None, uses_results: bool = True) -> CaptureSession:
        """A context around many captures, such as those of a host that captures piece by piece.

        Garbage is frozen once; beside a heap that the host has frozen it is only not collected.
        Wrappers with `GraphOptions(lazy=True)` may capture inside, those included that come into
        the pool meanwhile, and are sealed where it ends, however it ends. It holds no lock and owns
        no pool: the host runs and captures in it what it likes. `stream` is where the pool captures
        from now on, as in `GraphPool(stream=)`. Without `uses_results` no graph is replayed at its
        capture: what eager parts read there was not written yet. May be nested.
        """
        self.check_open()
        if stream is not None:
            with self.on_device():
                self.streams.for_captures = self.platform.adopt_stream(stream)
        return CaptureSession(self, uses_results=uses_results)

    def _captured(self, wrapper: HoldsGraphs, descriptor: BatchDescriptor) -> None:
        """Count a capture, and tell who wants to know."""
        self.captures += 1
        if self.on_capture is not None:
            check_callable("on_capture", self.on_capture)
            self.on_capture(wrapper, descriptor)

    def clear_graphs(self) -> None:
        """Destroy the graphs of every wrapper in the pool, which can capture again.

        Memory that the host shares stays the pool's, for what is captured next; other memory is the
        allocator's again. Raises `PoolBusyError` while a step is under way.
        """
        in_turn(self, "GraphPool.clear_graphs()", partial(self._destroy_graphs, None))

    def drop(self, descriptor: BatchDescriptor) -> None:
        """Destroy the graphs of one descriptor of every wrapper in the pool, so that the pieces of
        its step can be captured again. Raises `PoolBusyError` while a step is under way."""
        in_turn(self, "GraphPool.drop()", partial(self._destroy_graphs, descriptor))

    def _destroy_graphs(self, descriptor: BatchDescriptor | None) -> None:
        for holder in self.holders:
            holder.destroy_graphs(descriptor)

    # Sleep ------------------------------------------------------------------------------------

    def suspend(self) -> None:
        """Get ready for the host to take the pages of the pool's memory away, at addresses that
        stay: what must keep its contents is copied to the host (graphrt/core/replay/sleep.py).
        Until `resume()` each step, capture or change raises `PoolAsleepError`. What steps have
        handed out is unreadable from now on.

        All ranks call it between the same steps, and `resume()` too. Raises `PoolError` without
        `around_memory`, `PoolBusyError`, `PoolAsleepError`, and `MissingCapabilityError`.
        """
        self.check_open()
        if self.around_memory is None:
            raise errors.PoolError(
                "the pool was not made to sleep",
                expected="GraphPool(around_memory=)",
                advice="around_memory=contextlib.nullcontext, if the allocator needs no context",
            )
        asleep = Asleep(self.platform)
        in_turn(self, "GraphPool.suspend()", partial(self._suspend, asleep), asleep)

    def _suspend(self, asleep: Asleep) -> None:
        with self.capture_lock, self.on_device():
            self.streams.follow()
            asleep.save(self._memories())
        self._expire_outputs()

    def resume(self) -> tuple[str, ...]:
        """Go on after `suspend()`: the host has given the pages back, at their addresses.

        Where some are not there, all graphs of the pool are destroyed, with a
        `GraphsDroppedWarning`, and named in the result. Their steps run eagerly until
        `recapture()`, `capture_next()` or a lazy capture, into memory of the pool's own. Raises
        `PoolError` for a pool that is not asleep. Interrupted, a second call ends it.
        """
        self.check_open()
        with self.capture_lock, self.on_device():
            asleep = self.owner
            if not isinstance(asleep, Asleep):
                raise (
                    self.busy_error("GraphPool.resume()")
                    if asleep
                    else errors.PoolError(
                        "the pool is not asleep",
                        expected="suspend() before",
                        advice="suspend() first",
                    )
                )
            gone = () if asleep.restore() else self._replace_memory()
            self.owner = None
        if gone:
            errors.warn_caller(
                "the pool's memory did not come back after a sleep; its graphs are destroyed, and "
                f"their batches run eagerly until recapture(): {', '.join(gone)}",
                errors.GraphsDroppedWarning,
            )
        return gone

    def _replace_memory(self) -> tuple[str, ...]:
        """Destroy all graphs, and capture into other memory from now on; returns their names."""
        each = ((of.runtime_mode.name, key) for of in self.holders for key in of.entries)
        names = dict.fromkeys(f"{mode} [{descriptor}]" for mode, descriptor in each)
        self._keep_streams()
        self._destroy_graphs(None)
        lost = self.memory
        self._use(self.platform.new_memory(), self.platform.new_stream())
        self.platform.release_memory(lost)
        return tuple(names)

    def _keep_streams(self) -> None:
        """Let nobody capture on its streams any more: their scratch memory, such as cuBLAS's, is in
        memory that may not come back."""
        for stream in (self.stream, *(stream for _, stream in self.classes.values())):
            never_destroy(stream)

    @property
    def asleep(self) -> bool:
        """Whether it was suspended, and not resumed."""
        return isinstance(self.owner, Asleep)

    @property
    def left_behind(self) -> bool:
        """Whether this process is a child that cannot use the pool: nothing is left to close."""
        return self.owner is _LEFT_BEHIND

    def on_device(self) -> AbstractContextManager[object]:
        """Makes its device the current one of this thread, if there are several."""
        if self.elsewhere is None or _left_behind:
            return _NOWHERE_ELSE
        return self.platform.on_device(self.device.index)

    def _enter_step(self, context: ForwardContext) -> None:
        """Note that a step of several pieces replays one. Raises `PoolBusyError` where another step
        is not over, or has followed this one."""
        if not self.pieces.begin(context):
            raise self.busy_error(context)
        self.pieces.replaying = context.token
        self.generation += 1
        if self.handed_out:
            expire(self.handed_out)

    def _enter_capture(self, context: ForwardContext) -> None:
        """Note that a step captures something. Raises as `_enter_step` does, and `CaptureError`
        after a replay in this step: nothing keeps its results in the pool, and the capture may be
        given their memory."""
        if context.mode is GraphMode.FULL:
            self._leave_step(context)
            return
        if not self.pieces.begin(context):
            raise self.busy_error(context)
        if context.token is not None and self.pieces.replaying is context.token:
            raise _behind_a_replay(context)
        # Equal to no step's token: the next replay, of any step, goes through `begin`.
        self.pieces.replaying = _CAPTURED

    def _leave_step(self, context: ForwardContext | None) -> None:
        """Forget the last step of several pieces; raises `PoolBusyError` if it is not over."""
        if not self.pieces.end(context):
            raise self.busy_error(context)
        self.pieces.replaying = None

    def _expire_outputs(self) -> None:
        """Make what runners have handed out unreadable: its memory is about to be written."""
        if self.handed_out:
            expire(self.handed_out)

    def check_idle(self) -> None:
        """Raise `PoolBusyError` while a step or a capture is under way, or a context is entered in
        which pieces have run: others may be to come."""
        if self.owner is not None or self.pieces.entered is not None:
            raise self.busy_error(None)

    def busy_error(self, context: object) -> errors.GraphRTError:
        """The error for `context`, which finds the pool taken. A step of this thread that still
        waits for its updates is ended by its `refusal`, so that the next can run; that error is
        returned then.
        """
        if self.left_behind:
            return _left_behind_error()
        # Read once: another thread's next step may own it meanwhile.
        owner = self.owner
        return self.end_waiting(owner) or errors.PoolBusyError(
            "two steps use one graph pool at the same time",
            got=f"{context} in thread {get_ident()} while {owner or self.pieces.context} is under "
            "way",
            expected="one step at a time, from one thread at a time",
            advice="let one step end before the next begins; or give what runs at the same time a "
            "GraphPool of its own",
        )

    def end_waiting(self, owner: object) -> errors.GraphRTError | None:
        """End `owner` if it is a step of this thread that waits for its updates; returns its error.
        None where it is anything else."""
        refuse = getattr(owner, "refusal", None)
        error: errors.GraphRTError | None = None if refuse is None else refuse(self)
        return error

    def _reset_graphs(self, graphs: Sequence[DeviceGraph]) -> None:
        """Destroy graphs of this pool; waits for captures of other threads on the device."""
        if graphs:
            self._expire_outputs()
            # It may synchronise the device, which would break a capture that is open.
            with self.capture_lock, self.on_device():
                self.streams.follow()
                if self.asleep:  # none runs, and a platform may use memory that is not there
                    for graph in graphs:
                        graph.reset()
                else:
                    self.platform.reset_graphs(graphs)
            for graph in graphs:
                self.graphs.pop(graph, None)
            self._release_unused()

    def _capture_into(self, undo: Undo, tokens: int) -> None:
        """Until `undo`, capture into the memory of graphs of about this size, which comes back with
        the last of them: graphs of one memory share its blocks. A pool has `SIZE_CLASSES` of them,
        for sizes of as many binary digits; others are in the nearest.

        Each has a stream to capture on: a scratch block that belongs to a stream, such as cuBLAS's
        workspace, is in the memory of the first capture on it, and goes with that.
        """
        size_class = tokens.bit_length()
        if size_class not in self.classes and len(self.classes) == SIZE_CLASSES:
            size_class = min(self.classes, key=lambda each: abs(each - tokens.bit_length()))
        undo.later(self._release_unused)
        undo.later(partial(self._use, self.memory, self.streams.for_captures))
        with self.on_device():
            if size_class not in self.classes:
                self.classes[size_class] = self.platform.new_memory(), self.platform.new_stream()
        self._use(*self.classes[size_class])

    def _use(self, memory: Any, stream: Any) -> None:
        self.memory, self.streams.for_captures = memory, stream

    def _release_unused(self) -> None:
        """Give the memory of size classes without graphs back."""
        used = {id(memory) for memory in (self.memory, *self.graphs.values())}
        for size_class, (memory, _) in list(self.classes.items()):
            if id(memory) not in used:
                with self.capture_lock, self.on_device():
                    self.platform.release_memory(memory)
                del self.classes[size_class]

    def _memories(self) -> list[Any]:
        # During a capture into a class that is `memory`.
        every = self.memory, *(memory for memory, _ in self.classes.values())
        return list({id(memory): memory for memory in every}.values())

    def _is_in_graphs(self, tensor: torch.Tensor) -> bool:
        """Whether `tensor` is in the memory of graphs, of any size."""
        return any(self.platform.owns(memory, tensor) for memory in self._memories())

    def _owns(self, tensor: torch.Tensor) -> bool:
        """Whether `tensor` is memory of the pool; never for a sparse one, which has several."""
        has_one = tensor.layout is torch.strided and not self.closed
        return has_one and self.platform.owns(self.memory, tensor)

    def bytes(self) -> int | None:
        """Bytes the pool holds from the device, where that can be told."""
        if self.closed:
            return None
        held = [self.platform.memory_bytes(each) for each in self._memories()]
        return None if None in held else sum(filter(None, held))

    def update_figures(self) -> UpdateFigures | None:
        """How tasks were updated; None where that is not counted, or there are none."""
        return None if self.closed else self.platform.update_figures(self.memory)

    def close(self) -> None:
        """Destroy all graphs of the pool and give its memory back, or its share of the host's.

        Raises `PoolBusyError` while a step is under way. Interrupted, a second call ends it.
        """
        if self.left_behind:
            self.closed = True
        elif self.memory is not _GIVEN_BACK:
            in_last_turn(self, "GraphPool.close()", self._close)

    def _close(self) -> None:
        if self.asleep:
            self._keep_streams()
        self._destroy_graphs(None)
        self.closed, self.owner = True, None
        self._leave_step(None)
        with self.capture_lock, self.on_device():
            self.platform.release_memory(self.memory)
        # A stream that was lent to this pool can then go to another one.
        self.streams.for_captures = None
        # Last: before it, an interrupt would leave memory that no further call gives back.
        self.memory = _GIVEN_BACK

    def check_open(self) -> None:
        """Raise `PoolClosedError` after `close()`."""
        if self.closed:
            raise errors.PoolClosedError(
                "the graph pool is closed",
                expected="an open pool",
                advice="create a new GraphPool and new wrappers or runners over it",
            )

    def check_is_of(self, platform: Platform | str, device: torch.device | None = None) -> None:
        """Raise `InvalidOptionError` if the pool is another platform's, or on another device."""
        name = platform if isinstance(platform, str) else platform.name
        if name != self.platform.name or (
            device is not None and device_of(self.platform, device) != self.device
        ):
            raise errors.InvalidOptionError(
                "the pool belongs to another platform or another device",
                got=f"a pool of {self.platform.name!r} on {self.device}",
                expected=f"one of {name!r}" + (f" on {device}" if device else ""),
                advice="leave platform= and device= out where pool= is given",
            )
