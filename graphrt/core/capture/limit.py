"""`GraphLimit`: under `max_graphs=` and `graph_bytes=`, which graph is captured and which one goes.

A lazy wrapper, a runner or `KeyedGraphs` has one. It asks `admits` at a step that misses its graph,
captures by `capture`, and appends the graph of each replay to `asked`.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable
from math import inf
from typing import Any, Final, NamedTuple, TypeVar

from graphrt.core.base._undo import Undo, undoing
from graphrt.core.base.errors import (
    GraphsDroppedWarning,
    InvalidOptionError,
    ResourceExhaustedError,
    warn_caller,
)
from graphrt.core.base.log import logger
from graphrt.core.base.texts import counted, size_text
from graphrt.core.batch.modes import GraphMode
from graphrt.core.capture.options import GraphOptions
from graphrt.core.device.contract import DeviceGraph
from graphrt.core.plan.sizes import CaptureKey, graph_name, largest_of
from graphrt.core.replay.pool import GraphPool

T = TypeVar("T")

WINDOW: Final = 10_000
"""The steps, replayed or missed, in which uses of a graph are counted."""
MISSES: Final = 3
"""A graph without a place is captured after so many misses."""
REST: Final = 1_000
"""A graph that was evicted is not captured again for so many steps."""
PACE: Final = 100
"""Graphs take one another's place at most once in so many steps."""


class LimitReport(NamedTuple):
    """The graphs under a limit, and the bytes they hold; None where the device tells no bytes."""

    max_graphs: int | None
    graph_bytes: int | None
    graphs: int
    captures: int
    evictions: int
    pool_bytes: int | None
    """Bytes of the pool: the graphs' tensors."""
    executable_bytes: int | None
    """Bytes of the device's driver: the executables. Counted with `graph_bytes` alone."""

    def __str__(self) -> str:
        most = [] if self.max_graphs is None else [f"of {self.max_graphs}"]
        most += [] if self.graph_bytes is None else [f"within {size_text(self.graph_bytes)}"]
        held = [] if self.pool_bytes is None else [f"{size_text(self.pool_bytes)} of pool"]
        if self.executable_bytes is not None:
            held.append(f"{size_text(self.executable_bytes)} of executables")
        return (
            f"{counted(self.graphs, 'graph')} {', '.join(most)}; "
            f"{', '.join(held) or 'bytes unknown'}; "
            f"{counted(self.captures, 'capture')}, {self.evictions} evicted"
        )


class _Held(NamedTuple):
    """The device's graphs of one key, their memory, and the bytes of their capture: the driver's,
    and all."""

    graphs: list[DeviceGraph]
    memory: Any
    executable_bytes: int | None
    took_bytes: int


class GraphLimit:
    """The limit of one owner, whose graphs are in `pool`.

    As long as there is room it captures what is missed. Then a graph that was missed `MISSES` times
    takes the place of the one with the fewest uses for each byte that its end alone frees, if that
    was used less. The largest of each mode stays. Time is counted in steps, so that the pieces of a
    step, whose wrappers have a limit each, decide alike, and so do ranks.
    """

    @classmethod
    def of(
        cls, options: GraphOptions | None, pool: GraphPool, *, ranked: bool = False
    ) -> GraphLimit | None:
        """The limit that options set, if any. `ranked` leaves out what ranks count differently: the
        bytes of one graph. Raises `InvalidOptionError`."""
        limited = options is not None and (options.max_graphs or options.graph_bytes)
        return cls(options, pool, ranked) if options is not None and limited else None

    def __init__(self, options: GraphOptions, pool: GraphPool, ranked: bool) -> None:
        self.max_graphs, self.graph_bytes = self.most = options.max_graphs, options.graph_bytes
        if self.graph_bytes is not None and pool.bytes() is None:
            raise InvalidOptionError(
                "graph_bytes needs a platform that tells the bytes of a pool",
                got=f"graph_bytes={self.graph_bytes} on {pool.platform.name!r}",
                expected="a limit that can be counted",
                advice="max_graphs= limits their number",
            )
        self.pool = pool
        self._weighs_bytes = self.graph_bytes is not None and not ranked
        # The graphs of the steps since `_count`: that which was replayed, or was missing.
        self.asked: deque[CaptureKey] = deque(maxlen=WINDOW)
        # Those of the last `WINDOW` steps, how often each is among them, and the steps so far.
        self._window: deque[CaptureKey] = deque()
        self._uses = Counter[CaptureKey]()
        self._steps = 0
        self._graphs: dict[CaptureKey, _Held] = {}
        # Whether bytes were exceeded since a graph went by other means than an eviction.
        self._is_full = False
        # Misses in about as many steps, since the graph was there; the steps of evictions.
        self._missed = Counter[CaptureKey]()
        self._evicted: dict[CaptureKey, float] = {}
        self._last_swap = -PACE
        self._captures = self._evictions = 0
        self._has_told = False
        # Modes of which no graph fits, and whose steps have said so.
        self._said: set[GraphMode] = set()

    def admits(self, key: CaptureKey) -> bool:
        """Count a step that misses this graph; says whether it is captured now."""
        self.asked.append(key)
        self._count()
        self._missed[key] += 1
        missed, evicted = self._missed[key], self._evicted.get(key)
        if evicted is not None and (missed < MISSES or self._steps - evicted < REST):
            return False
        if self.has_room():
            return True
        if missed < MISSES or self._steps - self._last_swap < PACE:
            return False
        victim = self._victim(key)
        return victim is not None and self._uses[victim] < self._uses[key]

    def has_room(self) -> bool:
        """Whether a further graph may fit."""
        gone = [key for key, held in self._graphs.items() if not self._is_alive(held)]
        for key in gone:  # whoever has destroyed it
            del self._graphs[key]
            self._is_full = False
        self._is_full = self._is_full and bool(self._graphs)
        return not self._is_full and len(self._graphs) < (self.max_graphs or inf)

    def capture(
        self,
        key: CaptureKey,
        capture: Callable[[], T],
        evict: Callable[[CaptureKey], object],
        *,
        wanted: bool = False,
        shared: bool = False,
        warns: bool = False,
        agree: Callable[[bool], bool] | None = None,
    ) -> T:
        """Call `capture`, which captures this graph, in the memory of its size. Then `evict` ends
        those in its way: a capture that fails takes nobody's place. Where none may go it ends this
        one, which is not captured again; what it grew a shared memory by comes back with others.

        One that is `wanted` is not weighed against the uses of others. A `shared` one is captured
        into the pool's own memory. Ranks `agree` on whether one of them lacks bytes.

        If the first graph of a mode finds no room, one that `warns`, whose call the host has made,
        does so once, with its result returned. Else that is an `InvalidOptionError`, in steps once.
        Raises
        `ResourceExhaustedError` for a wanted one that finds no place.
        """
        self.has_room()
        result = self._measured(key, None if shared else key[1].num_tokens, capture)
        self._count()
        while key in self._graphs and self._is_over(agree):
            self._is_full, self._last_swap = True, self._steps
            report, took = self.report(), self._graphs[key].took_bytes
            is_huge = self._weighs_bytes and took > (self.graph_bytes or inf)
            victim = None if is_huge else self._victim(key)
            if victim is None:
                self._evict_new(key, evict, agree)
                if self.graph_bytes is not None:
                    self._evicted[key] = inf
                    self._check_first(key, took, warns, again=wanted or shared)
                if wanted:
                    raise ResourceExhaustedError(
                        "the limit of graphs is reached, and no other graph may make room",
                        got=graph_name(key),
                        expected=f"a graph that fits beside the largest of each mode: {report}",
                        advice="raise max_graphs or graph_bytes",
                    )
            elif wanted or key in largest_of(self._graphs) or self._uses[victim] < self._uses[key]:
                self._evict(victim, evict, key)
            else:
                self._evict_new(key, evict, agree)
        return result

    def _evict_new(
        self,
        key: CaptureKey,
        evict: Callable[[CaptureKey], object],
        agree: Callable[[bool], bool] | None,
    ) -> None:
        """Evict the graph that was just captured. Its memory keeps what it grew by while others are
        in it: these go too, and then others, as long as the bytes are exceeded."""
        memory, goes = self._graphs[key].memory, key
        while True:
            self._evict(goes, evict, goes)
            if not self._is_over(agree):
                break
            stay = largest_of(self._graphs)
            if self._is_over(agree, stay):  # no end of others would do
                if not self._has_told:
                    self._has_told = True
                    logger.warning(
                        "graph_bytes is exceeded: the memory of the largest graphs alone, which "
                        "has grown, holds %s until they are cleared: %s",
                        size_text(self._bytes(stay)),
                        self.report(),
                    )
                break
            kept = {id(self._graphs[each].memory) for each in stay}
            # Whose end frees bytes: all of one memory go in turn. Ranks count executables unlike.
            others = [
                (held.memory is not memory, self._worth(each), each)
                for each, held in self._graphs.items()
                if each not in stay
                and (id(held.memory) not in kept or held.executable_bytes or not self._weighs_bytes)
            ]
            goes = min(others, key=lambda other: other[:2])[2]
            memory = self._graphs[goes].memory
        if goes is not key and largest_of(self._graphs) == set(self._graphs):
            self._is_full = False  # else nothing would be captured: there is no place to take

    def _check_first(self, key: CaptureKey, took: int, warns: bool, *, again: bool) -> None:
        """Raise `InvalidOptionError`, or warn, if no graph of this mode fits: `again`, or once."""
        if all(mode is not key[0] for mode, _ in self._graphs):
            if key[0] in self._said and not again:
                return
            self._said.add(key[0])
            error = InvalidOptionError(
                "graph_bytes is too small for a single graph",
                got=f"graph_bytes={self.graph_bytes}, and {graph_name(key)} takes {took}",
                expected="room for the largest graph of each mode",
                advice=f"graph_bytes={2 * took}, or smaller sizes",
            )
            if not warns:
                raise error
            warn_caller(f"{error}\nit runs eagerly", GraphsDroppedWarning)

    @undoing
    def _measured(
        self, undo: Undo, key: CaptureKey, tokens: int | None, capture: Callable[[], T]
    ) -> T:
        pool, before = self.pool, set(self.pool.graphs)
        held, driver = pool.bytes(), self._driver_bytes()
        if tokens is not None:
            pool._capture_into(undo, tokens)
        result = capture()
        graphs = [graph for graph in pool.graphs if graph not in before]
        if graphs:  # else the device had no room for it
            took = _growth(driver, self._driver_bytes())
            grown = (_growth(held, pool.bytes()) or 0) + (took or 0)
            self._graphs[key] = _Held(graphs, pool.memory, took, grown)
            self._captures += 1
            self._missed.pop(key, None)
            self._evicted.pop(key, None)
        return result

    def _is_over(
        self, agree: Callable[[bool], bool] | None, keys: Iterable[CaptureKey] | None = None
    ) -> bool:
        if len(self._graphs) > (self.max_graphs or inf):
            return True
        if self.graph_bytes is None:
            return False
        is_over = self._bytes(self._graphs if keys is None else keys) > self.graph_bytes
        return is_over if agree is None else agree(is_over)

    def _victim(self, key: CaptureKey) -> CaptureKey | None:
        """The graph that would make room for this one; None where none may go."""
        stays = {key, *largest_of([*self._graphs, key])}
        others = [each for each in self._graphs if each not in stays]
        return min(others, key=self._worth, default=None)

    def _worth(self, key: CaptureKey) -> float:
        """The uses of a graph, where bytes are weighed for each byte that its end alone frees."""
        if not self._weighs_bytes:
            return self._uses[key]
        rest = [each for each in self._graphs if each != key]
        return self._uses[key] / max(1, self._bytes(self._graphs) - self._bytes(rest))

    def _evict(
        self, victim: CaptureKey, evict: Callable[[CaptureKey], object], room_for: CaptureKey
    ) -> None:
        evict(victim)
        self._graphs.pop(victim, None)
        self._missed.pop(victim, None)
        self._evicted[victim] = self._steps
        self._evictions += 1
        logger.info(
            "evicted %s, asked for in %d of the last %d steps, for %s: %s",
            graph_name(victim),
            self._uses[victim],
            len(self._window),
            "want of room" if room_for == victim else graph_name(room_for),
            self.report(),
        )

    def _count(self) -> None:
        """Count the graphs of the steps since the last call."""
        while self.asked:
            key = self.asked.popleft()
            self._window.append(key)
            self._uses[key] += 1
            self._steps += 1
            if len(self._window) > WINDOW:
                self._uses[self._window.popleft()] -= 1
            if self._steps % WINDOW == 0:  # hosts may have any number of keys
                self._uses, self._missed = +self._uses, Counter()
                rested = self._steps - REST
                self._evicted = {k: at for k, at in self._evicted.items() if at > rested}

    def _is_alive(self, held: _Held) -> bool:
        return any(graph in self.pool.graphs for graph in held.graphs)

    def _bytes(self, keys: Iterable[CaptureKey]) -> int:
        """What these graphs hold: the memories that they are in, and their executables."""
        each = [self._graphs[key] for key in keys]
        memories = {id(held.memory): held.memory for held in each}.values()
        pools = sum(self.pool.platform.memory_bytes(memory) or 0 for memory in memories)
        return pools + sum(held.executable_bytes or 0 for held in each)

    def _driver_bytes(self) -> int | None:
        return None if self.graph_bytes is None else self.pool.platform.driver_bytes()

    def report(self) -> LimitReport:
        """Figures of now."""
        alive = [held for held in list(self._graphs.values()) if self._is_alive(held)]
        took = [held.executable_bytes for held in alive if held.executable_bytes is not None]
        return LimitReport(
            self.max_graphs,
            self.graph_bytes,
            len(alive),
            self._captures,
            self._evictions,
            self.pool.bytes(),
            sum(took) if took else None,
        )


def _growth(before: int | None, after: int | None) -> int | None:
    return None if before is None or after is None else max(0, after - before)
