"""`GraphLimit`: under `max_graphs=` and `graph_bytes=`, which graph is captured and which one goes.

Its owner (a lazy wrapper or runner, or `KeyedGraphs`) captures by `capture`, and destroys what that
names. Which graphs exist is the owner's to say: this notes what they took and how they are used.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, TypeVar

from graphrt.core.base._undo import Undo, undoing
from graphrt.core.base.errors import InvalidOptionError, ResourceExhaustedError
from graphrt.core.base.log import logger
from graphrt.core.base.texts import counted, size_text
from graphrt.core.batch.descriptor import BatchDescriptor
from graphrt.core.batch.modes import GraphMode
from graphrt.core.capture.options import GraphOptions
from graphrt.core.replay.pool import GraphPool
from graphrt.core.replay.size_classes import POOL

T = TypeVar("T")
LimitKey = tuple[GraphMode, BatchDescriptor]

WINDOW = 10_000
"""The steps, replayed or missed, in which uses of a graph are counted."""
MISSES = 3
"""A full owner captures the graph of a batch that has missed it so often."""
REST = 1_000
"""A graph that was evicted is not captured again for so many steps."""
PACE = 100
"""A full owner captures at most once in so many steps."""
_NEVER_AGAIN = 1 << 62
"""In place of the step of an eviction."""


@dataclass(frozen=True)
class LimitReport:
    """The graphs of an owner with a limit, and what they hold; bytes are None where the platform
    cannot tell."""

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
        limits = []
        if self.max_graphs is not None:
            limits.append(f"of {self.max_graphs}")
        if self.graph_bytes is not None:
            limits.append(f"within {size_text(self.graph_bytes)}")
        held = ", ".join(
            f"{size_text(size)} of {whose}"
            for size, whose in ((self.pool_bytes, "pool"), (self.executable_bytes, "executables"))
            if size is not None
        )
        text = f"{counted(self.graphs, 'graph')} {', '.join(limits)}; {held or 'bytes unknown'}; "
        return text + f"{counted(self.captures, 'capture')}, {self.evictions} evicted"

    def to_dict(self) -> dict[str, Any]:
        """Only JSON types; `line` is all of it as text."""
        return {**asdict(self), "line": str(self)}


@dataclass(frozen=True)
class _Home:
    """Where a graph is, what the driver took for it, and by how much its capture grew all."""

    size_class: int
    executable_bytes: int | None
    took_bytes: int


class GraphLimit:
    """The limit of one owner, in whose pool its graphs are.

    Not full, it captures what is missed. Full, the graph that a batch has missed `MISSES` times
    takes the place of the least used ones for each byte that their end frees, if these are used
    less. The largest graph of a mode stays, and those that are always there. Time is counted in
    steps, so that the pieces of a step, whose wrappers have a limit each, decide alike.
    """

    def __init__(
        self,
        options: GraphOptions,
        pool: GraphPool,
        held: Callable[[], Iterable[LimitKey]],
        always: frozenset[LimitKey] = frozenset(),
    ) -> None:
        """`held` returns the graphs that exist, the oldest first; it must not keep the owner. The
        graphs of `always` are captured when they are missed, and stay.
        Raises `InvalidOptionError` where the bytes of a pool cannot be told."""
        self.max_graphs, self.graph_bytes = options.max_graphs, options.graph_bytes
        # The graphs of the steps since `_count`: that which was replayed, or was missing.
        self.asked: deque[LimitKey] = deque(maxlen=WINDOW)
        self._held, self._always = held, always
        # Those of the last `WINDOW` steps, and how often each is among them.
        self._window: deque[LimitKey] = deque()
        self._uses = Counter[LimitKey]()
        self._homes: dict[LimitKey, _Home] = {}
        # The class of the capture that is under way.
        self._captured_into: set[int] = set()
        # Misses of graphs since they were there last, and when those that are gone were evicted.
        self._missed = Counter[LimitKey]()
        self._evicted: dict[LimitKey, int] = {}
        self._misses = self._captures = self._evictions = 0
        self._last_swap = -PACE
        self.move_to(pool)

    def move_to(self, pool: GraphPool) -> None:
        """Of an owner without graphs: it captures in this pool from now on."""
        if self.graph_bytes is not None and pool.bytes() is None:
            raise InvalidOptionError(
                "graph_bytes needs a platform that tells the bytes of a pool",
                got=f"graph_bytes={self.graph_bytes} on {pool.platform.name!r}",
                expected="a limit that can be counted",
                advice="max_graphs= limits their number",
            )
        self._pool = pool

    # What a batch that misses its graph asks ------------------------------------------------------

    def admits(self, key: LimitKey) -> bool:
        """Count a step that misses this graph; says whether it is captured now."""
        self._misses += 1
        self.asked.append(key)
        self._count()
        if len(self._missed) >= WINDOW:
            self._missed.clear()
        self._missed[key] += 1
        missed, now, evicted = self._missed[key], self._now(), self._evicted.get(key)
        if evicted is not None and (missed < MISSES or now - evicted < REST):
            return False
        if key in self._always or not self._is_full():
            return True
        if missed < MISSES or now - self._last_swap < PACE:
            return False
        self.sync()
        return self._victims(key) is not None

    def capture(
        self,
        key: LimitKey,
        capture: Callable[[], T],
        evict: Callable[[LimitKey], object],
        *,
        forced: bool = False,
    ) -> T:
        """Call `capture`, which captures this graph, in the memory of its size; then `evict`
        destroys those in its way, after their last replay: see `GraphPool.destroy_after_replays`.
        They go after it, so that a capture that fails takes nobody's place. A `forced` capture is
        not weighed against their use.

        Raises `ResourceExhaustedError` if none of them may go, and `InvalidOptionError` if the very
        first graph, or a forced one, takes more bytes than all may. Another one that does is
        evicted at once, and not captured again.
        """
        self.sync()
        self._count()
        victims = self._victims(key, forced=forced or key in self._always)
        if victims is None:
            raise ResourceExhaustedError(
                "the limit of graphs is reached, and no other graph may make room",
                got=_name(key),
                expected=f"a graph that fits beside the largest of each mode: {self.report()}",
                advice="raise max_graphs or graph_bytes",
            )
        if victims or self._is_full():
            self._last_swap = self._now()
        size_class = self._pool.classes.of(key[1].num_tokens)
        pool_before, before = self._pool.bytes(), self._driver_bytes()
        try:
            result = self._in_memory_of(size_class, capture)
            took = _growth(before, self._driver_bytes())
            if key in set(self._held()):
                growth = _growth(pool_before, self._pool.bytes()) or 0
                self._homes[key] = _Home(size_class, took, growth + (took or 0))
                self._captures += 1
                del self._missed[key]
                self._evicted.pop(key, None)
        finally:
            self.sync()
        for victim in victims if key in self._homes else ():
            self._evict(victim, evict, key)
        self._fit(key, evict, forced)
        return result

    @undoing
    def _in_memory_of(self, undo: Undo, size_class: int, capture: Callable[[], T]) -> T:
        pool = self._pool
        undo.later(partial(pool.use_memory, *pool.memory_in_use))
        undo.later(self._captured_into.clear)
        # Before it has a graph: others would give it back.
        self._captured_into.add(size_class)
        self.sync()
        with pool.on_device():
            pool.use_memory(*pool.classes.memory(size_class))
        return capture()

    def within(
        self, key: LimitKey, capture: Callable[[], object], evict: Callable[[LimitKey], object]
    ) -> str | None:
        """As `capture`, into the pool's own memory, for a session that captures graph after graph,
        the most valuable first. Of what graphs share there only executables would come back, so
        none makes room. Returns why this one was left out, None for one that was captured.

        Raises `InvalidOptionError` if the first graph takes more bytes than all may.
        """
        self.sync()
        if self._lacks_room(self._homes):
            return f"{self.report()}"
        before = self._driver_bytes()
        capture()
        if key not in set(self._held()):
            return None  # the device had no room for it
        took = _growth(before, self._driver_bytes())
        self._homes[key] = _Home(POOL, took, took or 0)
        self._captures += 1
        held, is_first = self._bytes(self._homes), len(self._homes) == 1
        if self.graph_bytes is None or held <= self.graph_bytes:
            return None
        evict(key)
        self.sync()
        if is_first:
            raise self._too_small(key, held)
        return f"{size_text(held)} with it, of {size_text(self.graph_bytes)}"

    def _fit(self, key: LimitKey, evict: Callable[[LimitKey], object], forced: bool) -> None:
        """Evict what is too much, now that this graph was measured."""
        limit, home = self.graph_bytes, self._homes.get(key)
        if limit is None or home is None:
            return
        while self._bytes(self._homes) > limit:
            self._last_swap = self._now()
            alone = home.took_bytes > limit or len(self._homes) == 1
            stays = set() if alone else self._staying(self._homes) | ({key} if forced else set())
            others = [each for each in self._homes if each not in stays]
            victim = key if alone or not others else self._least_used(others, self._homes)
            is_first = self._captures == 1
            self._evict(victim, evict, key)
            if victim == key:
                if alone:
                    self._evicted[key] = _NEVER_AGAIN
                if alone and (forced or is_first):
                    raise self._too_small(key, home.took_bytes)
                return

    # The decision ---------------------------------------------------------------------------------

    def _is_full(self) -> bool:
        """Whether there may be no room for another graph: the largest is as much as one takes."""
        homes = self._homes
        if self.max_graphs is not None and len(homes) >= self.max_graphs:
            return True
        most = max((home.took_bytes for home in homes.values()), default=0)
        return self.graph_bytes is not None and self._bytes(homes) + most > self.graph_bytes

    def _lacks_room(self, homes: Mapping[LimitKey, _Home]) -> bool:
        """Whether another graph is too much beside these. Its tensors are not known before they are
        measured; its executables take as much as the largest."""
        if self.max_graphs is not None and len(homes) >= self.max_graphs:
            return True
        most = max((home.executable_bytes or 0 for home in homes.values()), default=0)
        return self.graph_bytes is not None and self._bytes(homes) + most > self.graph_bytes

    def _victims(self, key: LimitKey, *, forced: bool = False) -> list[LimitKey] | None:
        """The graphs that make room for this one, in their order; None if those that may go are too
        few, or are used as much as this one, unless it is `forced`."""
        homes = dict(self._homes)
        stays, victims = self._staying([*homes, key]), []
        while self._lacks_room(homes):
            others = [each for each in homes if each not in stays]
            if not others:
                return None
            victim = self._least_used(others, homes)
            if not forced and self._uses[victim] >= self._uses[key]:
                return None
            victims.append(victim)
            del homes[victim]
        return victims

    def _staying(self, keys: Iterable[LimitKey]) -> set[LimitKey]:
        return _largest(keys) | self._always

    def _least_used(self, keys: Iterable[LimitKey], homes: Mapping[LimitKey, _Home]) -> LimitKey:
        """The graph with the fewest uses for each byte that its end alone frees."""

        def worth(key: LimitKey) -> float:
            if self.graph_bytes is None:
                return self._uses[key]
            rest = {each: home for each, home in homes.items() if each != key}
            return self._uses[key] / max(1, self._bytes(homes) - self._bytes(rest))

        return min(keys, key=worth)

    def _evict(
        self, victim: LimitKey, evict: Callable[[LimitKey], object], room_for: LimitKey
    ) -> None:
        evict(victim)
        if len(self._evicted) >= WINDOW:
            self._evicted.clear()
        self._evicted[victim] = self._now()
        self._missed.pop(victim, None)
        self._evictions += 1
        self.sync()
        logger.info(
            "evicted %s, asked for in %d of the last %d steps, for %s: %s",
            _name(victim),
            self._uses[victim],
            len(self._window),
            _name(room_for),
            self.report(),
        )

    def _too_small(self, key: LimitKey, takes: int) -> InvalidOptionError:
        return InvalidOptionError(
            "graph_bytes is less than a graph alone takes",
            got=f"graph_bytes={self.graph_bytes}, and {_name(key)} takes {takes}",
            expected="room for the largest graph of each mode",
            advice=f"graph_bytes={2 * takes}, or smaller sizes",
        )

    # What there is --------------------------------------------------------------------------------

    def sync(self) -> None:
        """Forget graphs that are gone, whoever destroyed them, and give the memory of a size class
        without graphs back."""
        held = set(self._held())
        for key in self._homes.keys() - held:
            del self._homes[key]
        used = {home.size_class for home in self._homes.values()}
        self._pool.keep_classes(self, used | self._captured_into)

    def _count(self) -> None:
        """Count the graphs of the steps since the last call."""
        while self.asked:
            key = self.asked.popleft()
            self._window.append(key)
            self._uses[key] += 1
            if len(self._window) > WINDOW:
                oldest = self._window.popleft()
                self._uses[oldest] -= 1
                if not self._uses[oldest]:
                    del self._uses[oldest]

    def _now(self) -> int:
        """The number of steps so far: replays, and misses."""
        return self._pool.generation + self._misses

    def _bytes(self, homes: Mapping[LimitKey, _Home]) -> int:
        """What these graphs hold: the memory of their sizes, and their executables."""
        classes = {home.size_class for home in homes.values()}
        pools = sum(map(self._pool.class_bytes, classes))
        return pools + sum(home.executable_bytes or 0 for home in homes.values())

    def _driver_bytes(self) -> int | None:
        return None if self.graph_bytes is None else self._pool.platform.driver_bytes()

    def report(self) -> LimitReport:
        """Figures of now."""
        homes = list(self._homes.values())
        took = [each.executable_bytes for each in homes if each.executable_bytes is not None]
        return LimitReport(
            self.max_graphs,
            self.graph_bytes,
            len(homes),
            self._captures,
            self._evictions,
            self._pool.bytes(),
            sum(took) if took else None,
        )


def _growth(before: int | None, after: int | None) -> int | None:
    return None if before is None or after is None else max(0, after - before)


def _largest(keys: Iterable[LimitKey]) -> set[LimitKey]:
    """The largest graph of each mode, the oldest of several; none of a mode whose graphs are all of
    one size, such as those of keys without a size."""
    by_mode: dict[GraphMode, list[LimitKey]] = {}
    for key in keys:
        by_mode.setdefault(key[0], []).append(key)
    stays = set()
    for of_mode in by_mode.values():
        sizes = [descriptor.num_tokens for _, descriptor in of_mode]
        if len(sizes) == 1 or min(sizes) < max(sizes):
            stays.add(of_mode[sizes.index(max(sizes))])
    return stays


def _name(key: LimitKey) -> str:
    return f"{key[0].name} [{key[1]}]"
