"""The checks of a runner's steps: which are tried, which run eagerly, what is known of a graph."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Literal

from graphrt.core.base import GraphQuarantinedWarning, VerificationError, warn_caller
from graphrt.core.batch import BatchDescriptor, GraphMode
from graphrt.core.capture import GraphOptions
from graphrt.core.dispatch import Dispatch, Reason
from graphrt.core.trust import Ambient, Reads, Verdict, while_holding

_SAMPLED = 64
"""Steps between two that are tried at the level `sample`."""


def _hold() -> bool:
    return True


@dataclass
class TrialRecord:
    """What trials have found of one graph. `notes` are differences that are no failure."""

    mode: GraphMode
    descriptor: BatchDescriptor
    status: Literal["untried", "tried", "quarantined"] = "untried"
    steps: int = 0
    """How many steps were tried."""
    deterministic: bool = True
    failure: str | None = None
    notes: tuple[str, ...] = ()


class Checks:
    """What is looked at before a step of a graph: `clear` says that nothing is to be done for it.

    At `capture` the first step of each kind of graph is tried, its first padded step, and the
    first of its largest and of its smallest graph; at `first` that of every graph, at `sample` one
    step in 64 too, at `always` every step.
    """

    def __init__(self, options: GraphOptions, reads: Reads | None, device_type: str) -> None:
        self.on = options.checks("capture")
        self._each = options.checks("first")
        self._sampled = options.checks("sample")
        self.always = options.checks("always")
        self.strict = options.strict
        self._device_type = device_type
        self._reads = reads
        self._warned_of: set[str] = set()
        self.reset()

    def reset(self) -> None:
        """Forget everything: there are no graphs."""
        self.records: dict[int, TrialRecord] = {}
        self._kinds: dict[int, Hashable] = {}
        # Graphs to be tried whatever the step, kinds of which no step was, or no padded one.
        self._to_try: set[int] = set()
        self._untried: set[Hashable] = set()
        self._unpadded: set[Hashable] = set()
        # By slot, the batches that need no trial: of so many tokens; none for -1.
        self.pending: dict[int, int] = {}
        self._quarantined: dict[int, str] = {}
        self._steps = 0
        self._ambient: Ambient | None = None
        self._settings_hold: Callable[[], bool] = _hold
        self._look_at(repeat(True))

    def captured(self, graphs: Iterable[Dispatch], *, more: bool = False) -> None:
        """Graphs were captured; called with all that there are. With `more` to come it is not known
        yet which of a kind are its smallest and its largest."""
        if not self.on:
            return
        if self._ambient is None:
            self._ambient = Ambient(self._device_type)
            self._settings_hold = self._ambient.holds
        self._go_round()
        kinds: dict[Hashable, list[tuple[int, int]]] = {}
        for graph in graphs:
            slot, descriptor = graph.slot, graph.descriptor
            if slot not in self.records:
                self.records[slot] = TrialRecord(graph.mode, descriptor)
            kind: Hashable = (graph.mode, *descriptor.kind)
            self._kinds[slot] = kind
            kinds.setdefault(kind, []).append((descriptor.num_tokens, slot))
        for kind, of_kind in kinds.items():
            self._share_quarantine([slot for _, slot in of_kind])
            ends = () if more else (min(of_kind), max(of_kind))
            slots = [slot for _, slot in (of_kind if self._each else ends)]
            self._to_try |= {slot for slot in slots if self.records[slot].status == "untried"}
            if all(self.records[slot].status == "untried" for _, slot in of_kind):
                self._untried.add(kind)
                self._unpadded.add(kind)
        self._note_pending()

    def _share_quarantine(self, slots: Sequence[int]) -> None:
        """Graphs of a kind that failed are in quarantine with it, also those captured later."""
        failure = next((self._quarantined[s] for s in slots if s in self._quarantined), None)
        if failure is None:
            return
        for slot in slots:
            self._quarantined[slot] = failure
            self.records[slot].status, self.records[slot].failure = "quarantined", failure

    def to_try(self) -> list[Dispatch]:
        """The graphs that are tried whatever the step, the largest first."""
        slots = sorted(self._to_try, key=lambda s: -self.records[s].descriptor.num_tokens)
        return [
            Dispatch(self.records[s].mode, self.records[s].descriptor, Reason.HIT, s) for s in slots
        ]

    def clear(self, slot: int, tokens: int) -> bool:
        """Whether the step of this graph, of so many live tokens, is simply replayed."""
        return (not self.pending or self.pending.get(slot, tokens) == tokens) and next(self.looks)

    def check_settings(self) -> None:
        """Raise `VerificationError` where a graph would be captured under other settings than the
        graphs that there are."""
        changed = self.changed_settings()
        if changed:
            raise VerificationError(
                "a setting is not what it was when the other graphs were captured",
                got="; ".join(changed),
                expected="the settings of the first capture, for all graphs of a runner",
                advice="capture under the settings of the steps, or recapture()",
            )

    def changed_settings(self) -> list[str]:
        """The settings that are not what they were at the first capture; none before it."""
        ambient = self._ambient
        if ambient is None or ambient.holds():
            return []
        changed = ambient.differences()
        self._settings_hold = ambient.holds
        self._look_at(self._glances)
        return changed

    def why_eager(self, found: Dispatch) -> Reason | None:
        """Why the step of a graph must not be replayed; None if it may.

        Strictly, raises what is wrong.
        """
        changed = self.changed_settings()
        if changed:
            self._say(
                VerificationError(
                    "a setting is not what it was when the graphs were captured; steps run "
                    "eagerly as long as it is not",
                    got="; ".join(changed),
                    expected="the settings of the capture",
                    advice="call capture() under the settings of the steps, or recapture()",
                )
            )
            return Reason.SETTINGS_CHANGED
        reads = self._reads
        # A walk takes milliseconds, and a graph in quarantine is replayed no more.
        looks = reads is not None and found.slot not in self._quarantined
        if reads is not None and looks and not all(link.holds() for link in reads.links):
            self._look_for_moved(reads)
        failure = self._quarantined.get(found.slot)
        if failure is None:
            return None
        if self.strict:
            raise VerificationError(
                f"{found.mode.name} [{found.descriptor}] is in quarantine",
                got=failure,
                advice="mend what it says and recapture(); or strict=False, which runs its batches "
                "eagerly",
            )
        return Reason.QUARANTINED

    def wants_trial(self, slot: int, *, padded: bool) -> bool:
        """Whether this step of the graph is tried."""
        kind = self._kinds[slot]
        if slot in self._to_try or kind in self._untried or (padded and kind in self._unpadded):
            return True
        self._steps += 1
        return self.always or (self._sampled and self._steps % _SAMPLED == 0)

    def tried(self, slot: int, verdict: Verdict, *, padded: bool) -> None:
        """Note what came of a trial; a graph that failed is quarantined, and those of its kind.

        Strictly, raises the failure.
        """
        record, kind = self.records[slot], self._kinds[slot]
        record.steps += 1
        record.deterministic &= verdict.deterministic
        record.notes = tuple(dict.fromkeys((*record.notes, *verdict.notes)))[:8]
        if verdict.failure is not None:
            alike = [other for other, its in self._kinds.items() if its == kind]
            self.quarantine(alike, verdict.failure)
            return
        record.status = "tried"
        self._to_try.discard(slot)
        self._untried.discard(kind)
        if padded:
            self._unpadded.discard(kind)
        self._note_pending()

    def quarantine(self, slots: Iterable[int], failure: Exception) -> None:
        """Let the batches of these graphs run eagerly; strictly, raises `failure`."""
        for slot in slots:
            self._quarantined[slot] = str(failure)
            record = self.records[slot]
            record.status, record.failure = "quarantined", str(failure)
        self._note_pending()
        self._say(failure)

    def _note_pending(self) -> None:
        pending = {}
        for slot, kind in self._kinds.items():
            always = self._sampled or slot in self._quarantined
            if always or slot in self._to_try or kind in self._untried:
                pending[slot] = -1
            elif kind in self._unpadded:
                pending[slot] = self.records[slot].descriptor.num_tokens
        self.pending = pending

    def look_again(self) -> None:
        """More is known of what graphs read."""
        self._go_round()

    def _go_round(self) -> None:
        self._look_at(repeat(True) if self._reads is None else self._reads.glances())

    def _look_at(self, glances: Iterator[bool]) -> None:
        self._glances = glances
        # A step takes one of them.
        self.looks = while_holding(self._settings_hold, glances)

    def _look_for_moved(self, reads: Reads) -> None:
        moved = reads.moved()
        if not moved:
            # Something on the way was replaced, and leads to the same tensors.
            reads.settle()
            self._go_round()
            return
        self._look_at(repeat(True))
        self.quarantine([*self.records], reads.stale(moved))

    def _say(self, failure: Exception) -> None:
        if self.strict:
            raise failure
        text = str(failure)
        if text not in self._warned_of:
            self._warned_of.add(text)
            warn_caller(f"steps run eagerly from here on: {text}", GraphQuarantinedWarning)
