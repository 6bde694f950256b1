"""The report of a runner: figures of its captures and of its steps, as values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from graphrt.core.base.homes import public
from graphrt.core.base.texts import aligned, counted, seconds_text, size_text
from graphrt.core.batch.descriptor import BatchDescriptor
from graphrt.core.batch.modes import GraphMode
from graphrt.core.dispatch.reasons import Reason
from graphrt.core.runner.checks import TrialRecord
from graphrt.core.runner.graph_table import DroppedGraph, GraphRecord, GraphTable
from graphrt.core.trust.reads import TensorUse
from graphrt.core.trust.watching.pointers import UnknownMemory


@public("graphrt.types")
@dataclass(frozen=True, repr=False)
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

    def __repr__(self) -> str:
        statuses = Counter[str](trial.status for trial in self.trials)
        trials = "".join(f", {count} {status}" for status, count in statuses.items())
        return f"TrustReport({len(self.reads)} tensors{trials})"


@public("graphrt")
@dataclass(frozen=True, repr=False)
class RunnerReport:
    """A snapshot of one runner; every figure is a count, in seconds or in bytes, as named.

    `print` shows it as a table. What deserves a look in it, its plain data, files and pages are
    told by others: see `docs/how-to/observing.md`. `steps` counts batches by graph, `reasons` by
    why they ran as they did; NO_CONTEXT and SEALED count calls of the runner's wrappers,
    MISSING_GRAPH steps. `live_tokens` and `padded_tokens` are over the steps that a graph served,
    or should have.
    """

    graphs: tuple[GraphRecord, ...]
    steps: dict[tuple[GraphMode, BatchDescriptor], int]
    reasons: dict[Reason, int]
    live_tokens: int
    pool_bytes: int | None
    dropped: tuple[DroppedGraph, ...] = ()
    """Planned graphs that did not fit on the device."""
    staging_waits: int = 0
    """Steps whose host had to wait until the memory that stages inputs was free again."""
    trust: TrustReport = TrustReport()
    mode: GraphMode = GraphMode.NONE
    device: str = ""
    sizes: dict[tuple[GraphMode, BatchDescriptor] | Reason, dict[int, int]] = field(
        default_factory=dict
    )
    """Live tokens to batches: of those that were dispatched to a graph, whether it served them or
    not, and of those that no graph serves, by reason."""
    not_served: dict[tuple[GraphMode, BatchDescriptor], dict[Reason, int]] = field(
        default_factory=dict
    )
    """The batches that were dispatched to a graph and ran otherwise, such as QUARANTINED ones."""

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
    def padded_tokens(self) -> int:
        """The tokens that graphs computed; 0 where nobody counts the live ones."""
        if not self.live_tokens:
            return 0
        steps = Counter(self.steps)
        for key, reasons in self.not_served.items():
            steps[key] += reasons.get(Reason.MISSING_GRAPH, 0)
        return sum(key[1].num_tokens * count for key, count in steps.items())

    @property
    def padding(self) -> float:
        """The share of the tokens that graphs computed which were padding, 0 to 1."""
        return 1 - self.live_tokens / self.padded_tokens if self.padded_tokens else 0.0

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def __repr__(self) -> str:
        steps, hits = sum(self.reasons.values()), self.reasons.get(Reason.HIT, 0)
        return (
            f"RunnerReport({self.mode.name}, {len(self.graphs)} graphs, {steps} steps, {hits} by "
            "graphs)"
        )

    def _lines(self) -> Iterator[str]:
        graphs = counted(len(self.graphs), "graph")
        line = f"{self.mode.name} on {self.device}, {graphs} in {seconds_text(self.capture_s)}"
        for held, where in ((self.pool_bytes, "the pool"), (self.driver_bytes, "the driver")):
            line += f", {size_text(held)} of {where}" if held else ""
        yield line
        trials = {(each.mode, each.descriptor): each.status for each in self.trust.trials}
        rows = [("graph", "steps", "eager", "capture", "pool", "trial")]
        for each in self.graphs:
            key = each.mode, each.descriptor
            rows.append(
                (
                    f"{each.mode.name} [{each.descriptor}]",
                    f"{self.steps.get(key, 0):,}",
                    f"{sum(self.not_served.get(key, {}).values()):,}",
                    seconds_text(each.capture_s),
                    "" if each.pool_bytes is None else size_text(each.pool_bytes),
                    trials.get(key, "unchecked"),
                )
            )
        yield from aligned(rows)
        for graph in self.dropped:
            yield f"dropped {graph.mode.name} [{graph.descriptor}]: {graph.reason}"
        for failure in dict.fromkeys(each.failure for each in self.trust.trials if each.failure):
            yield f"quarantined: {failure}"
        reasons = (f"{count:,} {reason.name}" for reason, count in self.reasons.items() if count)
        padding = f"; {self.padding:.0%} padding" if self.padded_tokens else ""
        yield f"Steps: {', '.join(reasons) or 'none'}{padding}"


def report_of(graphs: GraphTable, live_tokens: int, *, quick: bool = False) -> RunnerReport:
    """The figures of a runner's graphs, and of its steps with so many live tokens. A `quick` report
    says nothing of the memory that graphs read, which takes a walk to find."""
    pool, dispatcher = graphs.setup.pool, graphs.dispatcher
    reasons = Counter(dispatcher.counts())
    for owner in graphs.owners():
        # Their MISSING_GRAPH are calls of steps that the dispatcher has counted.
        reasons.update({**owner.eager_calls, Reason.MISSING_GRAPH: 0})
    return RunnerReport(
        graphs=tuple(graphs.records),
        steps=dispatcher.hits(),
        reasons={reason: reasons[reason] for reason in Reason},
        live_tokens=live_tokens,
        pool_bytes=pool.bytes(),
        dropped=graphs.dropped,
        staging_waits=graphs.setup.inputs.transport.waits,
        trust=_trust(graphs, quick=quick),
        mode=graphs.setup.plan.mode,
        device=str(pool.device),
        sizes=dispatcher.sizes(),
        not_served=dispatcher.not_served_by(),
    )


def _trust(graphs: GraphTable, *, quick: bool) -> TrustReport:
    trials = tuple(replace(record) for record in graphs.checks.records.values())
    reads, mixes_rows = graphs.reads, graphs.setup.host.mixes_rows
    if quick or not reads.watched:
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
