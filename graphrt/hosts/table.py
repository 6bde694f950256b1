"""The graphs of a process that serves an engine, as a report like that of a runner.

1. Each capture adds to the row of its batch: the seconds since the capture before it, so the
   engine's own work between them is included, and the bytes by which the pool and the driver grew.
   All pieces of a batch are one row: its bytes are asked for once, when the first piece of the next
   is there. A batch that is captured in a later session begins anew.
2. Each step counts for the row of its batch, from its last capture on.
3. `report()` gives a `RunnerReport`.

Limits: engines pad batches themselves, so live rows are unknown, and the report has no padding. It
has trials of FULL graphs alone. Graphs that an engine has destroyed stay in it until the engine
captures again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import NamedTuple
from weakref import WeakKeyDictionary

from graphrt import BatchDescriptor, GraphMode, GraphPool, Reason
from graphrt.core.plan.sizes import CaptureKey
from graphrt.core.runner.findings import TrialRecord, TrustReport
from graphrt.core.runner.graph_table import DroppedGraph, GraphRecord
from graphrt.core.runner.report import RunnerReport


class FullKey(NamedTuple):
    """The key of a FULL graph that an engine captures by itself, with its batch in the report."""

    number: int
    """Of all keys so far: an engine may capture one batch again."""
    descriptor: BatchDescriptor


@dataclass
class Row:
    """Steps, seconds and bytes of the graphs of one batch in one mode."""

    mode: GraphMode
    descriptor: BatchDescriptor
    steps: int = 0
    graphs: int = 0
    """Device graphs: 1, or one for each piece."""
    capture_s: float = 0.0
    began_s: float = 0.0
    """When the first of them was captured, by `perf_counter`."""
    pool_bytes: int | None = None
    """Bytes by which the pool grew, as the driver's memory by `driver_bytes`; None if unknown."""
    driver_bytes: int | None = None
    session: int = 0
    """The number of the session that captured them."""
    trial: TrialRecord | None = None
    """What came of trials of its FULL graph; None without."""


class Figures(NamedTuple):
    """At one moment: the bytes of a pool and those of the driver."""

    pool_bytes: int | None
    driver_bytes: int | None


class Table:
    """Collects captures and steps for the report: a row for each batch that was captured, or that
    the engine has dispatched."""

    def __init__(self) -> None:
        self._rows: dict[tuple[GraphMode, BatchDescriptor], Row] = {}
        # How many sessions of captures have begun.
        self._session = 0
        # Pool -> its figures before the next capture.
        self._before: WeakKeyDictionary[GraphPool, Figures] = WeakKeyDictionary()
        # When the last capture ended, or the session began.
        self._last_s: float | None = None
        # The row of the last capture, and its pool.
        self._last: tuple[Row, GraphPool] | None = None
        self.latest: Row | None = None
        """The row of the last capture or step."""

    def row(self, mode: GraphMode, descriptor: BatchDescriptor) -> Row:
        """The row of a batch; made if there is none."""
        return self._rows.setdefault((mode, descriptor), Row(mode, descriptor))

    def begin(self) -> None:
        """A session of captures begins."""
        self._session += 1
        self._last_s, self._last = perf_counter(), None

    def joined(self, pool: GraphPool) -> None:
        """Note the bytes of a pool before something is captured in it."""
        self._before[pool] = Figures(pool.bytes(), pool.platform.driver_bytes())

    def captured(self, mode: GraphMode, descriptor: BatchDescriptor, pool: GraphPool) -> None:
        """Something was captured in `pool`."""
        # The engine's own batch is inside the key.
        if isinstance(descriptor.variant, FullKey):
            descriptor = descriptor.variant.descriptor
        now_s = perf_counter()
        began = now_s if self._last_s is None else self._last_s
        row = self.row(mode, descriptor)
        if row.session != self._session or not row.graphs:
            new_row = Row(mode, descriptor, began_s=began, session=self._session)
            # In place: graphs and `Steps` hold the row and count in it.
            vars(row).update(vars(new_row))
            # Rows are in the order of their captures, also where the engine captures again.
            self._rows[mode, descriptor] = self._rows.pop((mode, descriptor))
        self.latest = row
        row.graphs += 1
        row.steps = 0
        row.capture_s += now_s - began
        if self._last is None or self._last[0] is not row or self._last[1] is not pool:
            # Of many pieces, nearly all is of those before this first one.
            had_pieces = self.end()
            if not had_pieces:
                self._grow(row, pool)
            self._last = row, pool
        self._last_s = perf_counter()

    def end(self) -> bool:
        """The last row has all of its pieces; returns whether they are several."""
        last, self._last = self._last, None
        if last is None or last[0].graphs < 2:
            return False
        self._grow(*last)
        return True

    def _grow(self, row: Row, pool: GraphPool) -> None:
        """Add the bytes by which a pool has grown to a row."""
        now = Figures(pool.bytes(), pool.platform.driver_bytes())
        before = self._before.get(pool, now)
        row.pool_bytes = _grown(row.pool_bytes, before.pool_bytes, now.pool_bytes)
        row.driver_bytes = _grown(row.driver_bytes, before.driver_bytes, now.driver_bytes)
        self._before[pool] = now

    def forget(self) -> None:
        """All graphs are gone. Rows stay, as steps count in them."""
        self._before.clear()
        for row in self._rows.values():
            row.graphs = 0

    def report(
        self,
        eager: Counter[Reason],
        pools: Sequence[GraphPool],
        missing: Sequence[CaptureKey] = (),
        dropped: Sequence[DroppedGraph] = (),
    ) -> RunnerReport:
        """The rows of what is captured in `pools`, and the eager steps by their reason; with graphs
        that are `missing` yet, and such as will not come."""
        rows = [row for row in self._rows.values() if row.graphs]
        sizes = Counter((row.mode, row.descriptor[:2]) for row in rows)
        records: list[GraphRecord] = []
        steps = dict.fromkeys([*missing, *((each.mode, each.descriptor) for each in dropped)], 0)
        trials: list[TrialRecord] = []
        for row in rows:
            tokens, reqs = row.descriptor.num_tokens, row.descriptor.num_reqs
            descriptor = row.descriptor
            if sizes[row.mode, descriptor[:2]] == 1:
                # No other row has these tokens and requests, so the variant can be left out.
                descriptor = BatchDescriptor(tokens, reqs)
            records.append(
                GraphRecord(
                    row.mode,
                    descriptor,
                    row.capture_s,
                    row.pool_bytes,
                    row.driver_bytes,
                    began_s=row.began_s,
                )
            )
            steps[row.mode, descriptor] = row.steps
            if row.trial is not None:
                trials.append(replace(row.trial, descriptor=descriptor))
        modes = {row.mode for row in rows}
        has_both_modes = len(modes) > 1
        pool_bytes = [pool.bytes() for pool in pools]
        return RunnerReport(
            graphs=tuple(records),
            steps=steps,
            reasons={Reason.HIT: sum(steps.values()), **eager},
            live_tokens=0,
            dropped=tuple(dropped),
            trust=TrustReport(trials=tuple(trials)),
            pool_bytes=None if None in pool_bytes else sum(each or 0 for each in pool_bytes),
            mode=(
                GraphMode.FULL_AND_PIECEWISE
                if has_both_modes
                else next(iter(modes), GraphMode.NONE)
            ),
            device=str(pools[0].device) if pools else "",
        )


def _grown(total: int | None, before: int | None, now: int | None) -> int | None:
    return None if before is None or now is None else (total or 0) + now - before
