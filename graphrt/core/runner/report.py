"""The report of a runner: figures of its captures and of its steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

from graphrt.core.base.homes import public
from graphrt.core.batch.descriptor import BatchDescriptor
from graphrt.core.batch.modes import GraphMode
from graphrt.core.device.figures import UpdateFigures
from graphrt.core.dispatch.reasons import Reason
from graphrt.core.runner.checks import TrialRecord
from graphrt.core.runner.graph_table import DroppedGraph, GraphRecord, GraphTable
from graphrt.core.trust.compare import listed
from graphrt.core.trust.reads import TensorUse
from graphrt.core.trust.watching.pointers import UnknownMemory


@public("graphrt.types")
@dataclass(frozen=True)
class TrustReport:
    """What is known of whether the graphs stand for their forward.

    `reads` is what watched warm-ups read and wrote beside the inputs, kept alive until `release()`;
    `trials` what came of trying each graph, "untried" until a step or `Host(example=)` has.
    `protected` is memory too large to be saved, and which rows of it warm-ups wrote. `unknown` is
    what nodes of tried graphs point to and nobody has named, None where a device cannot tell. With
    `mixes_rows` live rows depend on padding by design.

    What a host changes in Python is seen at the next step where it lies in one of the `watched`
    dicts, and after `glance_steps` steps at most elsewhere; `not_watched` says why there are none.
    `harmless` are the attributes whose changes are looked at no more, as three made no difference.
    """

    reads: tuple[TensorUse, ...] = ()
    trials: tuple[TrialRecord, ...] = ()
    protected: tuple[str, ...] = ()
    unknown: UnknownMemory | None = None
    mixes_rows: bool = False
    watched: int = 0
    glance_steps: int = 0
    not_watched: str = ""
    harmless: tuple[str, ...] = ()

    @property
    def only_graphs_bytes(self) -> int:
        """Bytes that only graphs hold: the forward has let go of them."""
        return sum(use.bytes for use in self.reads if use.moved)

    def lines(self) -> list[str]:
        """How changes in Python are seen, for people."""
        if not self.glance_steps:
            return []
        seen = (
            f"{self.watched} dicts watched" if self.watched else f"not told of: {self.not_watched}"
        )
        lines = [f"Changes in Python: {seen}; others seen after {self.glance_steps} steps at most"]
        if self.harmless:
            lines.append(
                f"  make no difference, and are looked at no more: {listed(self.harmless)}"
            )
        return lines


@public("graphrt")
@dataclass(frozen=True)
class RunnerReport:
    """A snapshot of one runner; every figure is a count, in seconds or in bytes, as named.

    `steps` counts batches by graph, `reasons` by why they ran as they did; NO_CONTEXT, SEALED
    and UPDATE_FAILED count calls of the runner's wrappers, MISSING_GRAPH steps. `live_tokens` and
    `padded_tokens` are over the steps that a graph served, or should have.
    """

    graphs: tuple[GraphRecord, ...]
    steps: dict[tuple[GraphMode, BatchDescriptor], int]
    reasons: dict[Reason, int]
    live_tokens: int
    padded_tokens: int
    pool_bytes: int | None
    dropped: tuple[DroppedGraph, ...] = ()
    """Planned graphs that did not fit on the device."""
    updates: UpdateFigures | None = None
    """Of the tasks of the whole pool, where the platform counts them."""
    staging_waits: int = 0
    """Steps whose host had to wait until the memory that stages inputs was free again."""
    inputs_in_graph: bool = False
    """Whether the device fetches the inputs of steps, unless they are too large."""
    unbroken: int = 0
    """PIECEWISE graphs in which nothing broke: each is one graph of the whole forward."""
    trust: TrustReport = TrustReport()

    @property
    def capture_s(self) -> float:
        """The seconds of all captures."""
        return sum(record.capture_s for record in self.graphs)

    @property
    def driver_bytes(self) -> int | None:
        """What the driver took for the executables of all graphs: see `GraphRecord`."""
        known = [each.driver_bytes for each in self.graphs if each.driver_bytes is not None]
        return sum(known) if known else None

    @property
    def padding(self) -> float:
        """The share of the tokens that graphs computed which were padding, 0 to 1."""
        return 1 - self.live_tokens / self.padded_tokens if self.padded_tokens else 0.0

    def __str__(self) -> str:
        """For people, in a few lines; the fields have the rest."""
        modes = Counter(record.mode.name for record in self.graphs)
        reasons = {reason.name: count for reason, count in self.reasons.items() if count}
        trials = Counter[str](record.status for record in self.trust.trials)
        failures = {
            record.failure.splitlines()[0]: 0 for record in self.trust.trials if record.failure
        }
        return "\n".join(
            [
                f"Graphs: {_counted(modes)}; captured in {self.capture_s:.2f} s",
                *(f"  dropped: {each.mode.name} [{each.descriptor}]" for each in self.dropped),
                *(
                    [f"  {self.unbroken} PIECEWISE without an eager break, captured as FULL ones"]
                    if self.unbroken
                    else []
                ),
                f"Steps: {_counted(reasons)}; {self.padding:.0%} of the tokens of graphs padding",
                f"Trials: {_counted(trials)}",
                *(f"  {failure}" for failure in failures),
                *self.trust.lines(),
            ]
        )


def report_of(graphs: GraphTable, live_tokens: int) -> RunnerReport:
    """The figures of a runner's graphs, and of its steps with so many live tokens."""
    pool, inputs = graphs.setup.pool, graphs.setup.inputs
    steps, announced = graphs.dispatcher.hits(), graphs.dispatcher.hits(announced=True)
    reasons = Counter(graphs.dispatcher.counts())
    for owner in graphs.owners():
        # Their MISSING_GRAPH are calls of steps that the dispatcher has counted.
        reasons.update({**owner.eager_calls, Reason.MISSING_GRAPH: 0})
    breakable = graphs.wrappers.get(GraphMode.PIECEWISE)
    in_pieces = () if breakable is None else breakable.entries.values()
    return RunnerReport(
        graphs=tuple(graphs.records),
        steps=steps,
        reasons={reason: reasons[reason] for reason in Reason},
        live_tokens=live_tokens,
        padded_tokens=sum(key[1].num_tokens * count for key, count in announced.items()),
        pool_bytes=pool.bytes(),
        updates=pool.update_figures(),
        dropped=graphs.dropped,
        staging_waits=inputs.transport.waits,
        inputs_in_graph=inputs.ring is not None,
        unbroken=sum(not entry.breaks for entry in in_pieces),
        trust=_trust(graphs),
    )


def _trust(graphs: GraphTable) -> TrustReport:
    trials = tuple(replace(record) for record in graphs.checks.records.values())
    reads, mixes_rows = graphs.reads, graphs.setup.host.mixes_rows
    if not reads.watched:
        return TrustReport(trials=trials, mixes_rows=mixes_rows)
    tried = [record.descriptor for record in trials if record.steps]
    unknown = graphs.unknown_memory(tried) if tried else None
    return TrustReport(
        reads.table(),
        trials,
        tuple(reads.protected),
        unknown,
        mixes_rows,
        watched=reads.host.watched,
        glance_steps=reads.rounds,
        not_watched=reads.host.why_not,
        harmless=tuple(graphs.checks.harmless),
    )


def _counted(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in counts.items()) or "none"
