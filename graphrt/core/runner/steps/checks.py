"""The checks of a runner's steps: which are tried, which run eagerly, what is known of a graph."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any, Literal

from graphrt.core.base._warnings import GraphQuarantinedWarning, PaddedStateWarning, warn_caller
from graphrt.core.base.errors import VerificationError
from graphrt.core.batch.descriptor import BatchDescriptor
from graphrt.core.batch.modes import GraphMode
from graphrt.core.capture.options import GraphOptions
from graphrt.core.dispatch.reasons import Dispatch, Reason
from graphrt.core.trust._verdict import Verdict
from graphrt.core.trust.ambient import Ambient
from graphrt.core.trust.gradients import Gradients
from graphrt.core.trust.reads import ReadSet

_SAMPLED = 64
"""Steps between two that are tried at the level `sample`."""

_LOOKS = 64
"""Padded steps of a kind, after its first padded trial, of which inputs are looked at for what that
trial could not show."""

_PASSED = 3
"""Trials with other values after which a Python value that is no number counts as harmless."""


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


class PaddedTrials:
    """The padded trials of one kind of graph: what they could show of mixed rows.

    A live row that equals the padding shows nothing: a mean over rows of zeros stays as it is. So
    each of the `inputs` has to differ from its padding in some trial, as far as it ever does.
    """

    def __init__(self, inputs: frozenset[str]) -> None:
        self._left = set(inputs)
        self._begun = not inputs
        self._looks = _LOOKS

    def want(self, differing: frozenset[str]) -> bool:
        """Whether a padded step in which these inputs differ from their padding is to be tried."""
        if self._begun:
            self._looks -= 1
        return not self._left or not self._left.isdisjoint(differing)

    def tried(self, differing: frozenset[str]) -> None:
        """Such a step was tried."""
        self._left -= differing
        self._begun |= bool(differing)

    @property
    def done(self) -> bool:
        return self._begun and (not self._left or self._looks <= 0)


class Checks:
    """What is looked at before a step of a graph: `clear` says that nothing is to be done for it.

    At `capture` the first step of each kind of graph is tried, its first padded step, and the
    first of its largest and of its smallest graph; at `first` that of every graph, at `sample` one
    step in 64 too, at `always` every step.
    """

    def __init__(
        self,
        options: GraphOptions,
        reads: ReadSet | None,
        device_type: str,
        inputs: frozenset[str],
        gradients: Gradients,
    ) -> None:
        """`inputs` are those whose padding rows may show that rows are mixed."""
        self.on = options.checks("capture")
        self._each = options.checks("first")
        self._sampled = options.checks("sample")
        self.always = options.checks("always")
        self.strict = options.strict
        self._device_type = device_type
        self._reads = reads
        self._inputs = inputs
        self._gradients = gradients
        self._warned_of: set[str] = set()
        self.reset()

    def reset(self) -> None:
        """Forget everything: there are no graphs."""
        self.records: dict[int, TrialRecord] = {}
        self._kinds: dict[int, Hashable] = {}
        # Graphs to be tried whatever the step, kinds of which no step was, or no padded one.
        self._to_try: set[int] = set()
        self._untried: set[Hashable] = set()
        self._unpadded: dict[Hashable, PaddedTrials] = {}
        # By slot, the Python values that eager steps have moved since its capture: it is tried
        # with them once. By kind and path, how many trials have passed with other values.
        self._moved: dict[int, dict[str, tuple[Any, Any]]] = {}
        self._passed: Counter[tuple[Hashable, str]] = Counter()
        # By slot, the batches that need no trial: of so many tokens; none for -1.
        self.pending: dict[int, int] = {}
        self._quarantined: dict[int, str] = {}
        self._steps = 0
        self._ambient: Ambient | None = None
        self._gradients.reset()
        self._look_at(repeat(True))

    def captured(self, graphs: Iterable[Dispatch], *, more: bool = False) -> None:
        """Graphs were captured; called with all that there are. With `more` to come it is not known
        yet which of a kind are its smallest and its largest."""
        if not self.on:
            return
        if self._ambient is None:
            self._ambient = Ambient(self._device_type)
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
                self._unpadded[kind] = PaddedTrials(self._inputs)
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
                    advice="run steps under torch.no_grad(): graphs have no gradients"
                    if any(each.startswith("gradients") for each in changed)
                    else "call capture() under the settings of the steps, or recapture()",
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

    def awaits_padding(self, slot: int) -> bool:
        """Whether padded steps of the graph may be tried for being padded."""
        return self._kinds[slot] in self._unpadded

    def wants_trial(self, slot: int, differing: frozenset[str] | None) -> bool:
        """Whether this step of the graph is tried; `differing` are the inputs of a padded one in
        which live rows differ from the padding, where it `awaits_padding`."""
        kind = self._kinds[slot]
        if slot in self._to_try or slot in self._moved or kind in self._untried:
            return True
        if self._gradients.wanted:
            return True
        trials = None if differing is None else self._unpadded.get(kind)
        if differing is not None and trials is not None:
            if trials.want(differing):
                return True
            self._settle_padding(kind, trials)
        self._steps += 1
        return self.always or (self._sampled and self._steps % _SAMPLED == 0)

    def _settle_padding(self, kind: Hashable, trials: PaddedTrials) -> None:
        if trials.done:
            del self._unpadded[kind]
            self._note_pending()

    def tried(self, slot: int, verdict: Verdict, differing: frozenset[str] | None) -> None:
        """Note what came of a trial; a graph that failed is quarantined, and those of its kind.

        Strictly, raises the failure.
        """
        record, kind = self.records[slot], self._kinds[slot]
        record.steps += 1
        if verdict.asks and self._ambient is not None:
            self._ambient.ask()
            self._look_at(self._glances)
        record.deterministic &= verdict.deterministic
        record.notes = tuple(dict.fromkeys((*record.notes, *verdict.notes)))[:8]
        if verdict.failure is not None:
            alike = [other for other, its in self._kinds.items() if its == kind]
            self.quarantine(alike, verdict.failure)
            return
        if verdict.padded_state:
            self._warn_of_padded_state(", ".join(verdict.padded_state))
        record.status = "tried"
        self._note_harmless(slot, verdict.harmless)
        self._to_try.discard(slot)
        self._untried.discard(kind)
        trials = None if differing is None else self._unpadded.get(kind)
        if differing is not None and trials is not None:
            trials.tried(differing)
            self._settle_padding(kind, trials)
        self._note_pending()

    def moved(self, slot: int) -> Mapping[str, tuple[Any, Any]]:
        """The Python values that eager steps have moved since the graph was captured: what they
        were then, and what they are."""
        return self._moved.get(slot, {})

    def look_after_eager_step(self) -> None:
        """An eager step is over: what it has moved in Python the graphs may have baked in, so the
        next step of each is a trial."""
        values = None if self._reads is None else self._reads.values
        if values is None or len(self._quarantined) == len(self._kinds):
            return
        moved = values.moved()
        if not moved:
            return
        for slot, kind in self._kinds.items():
            if slot in self._quarantined:
                continue
            for path, (was, now) in moved.items():
                if self._passed[kind, path] < _PASSED:
                    own = self._moved.setdefault(slot, {})
                    own[path] = own.get(path, (was, now))[0], now
        self._note_pending()

    def _note_harmless(self, slot: int, numbers: Iterable[str]) -> None:
        """A trial of a graph has passed, with Python values that had moved; `numbers` were moved
        further, and change nothing."""
        kind = self._kinds[slot]
        for path in self._moved.pop(slot, {}):
            self._passed[kind, path] += 1
        for path in numbers:
            self._passed[kind, path] = _PASSED
        for other, moved in [*self._moved.items()]:
            left = {p: v for p, v in moved.items() if self._passed[self._kinds[other], p] < _PASSED}
            self._moved[other] = left
            if not left:
                del self._moved[other]

    def quarantine(self, slots: Iterable[int], failure: Exception) -> None:
        """Let the batches of these graphs run eagerly; strictly, raises `failure`."""
        self._quarantine(slots, failure)
        self._say(failure)

    def set_aside(self, failure: Exception) -> None:
        """Let all batches run eagerly: a host that asked is told of `failure` itself."""
        if self.on:
            self._look_at(repeat(True))
            self._quarantine([*self.records], failure)

    def _quarantine(self, slots: Iterable[int], failure: Exception) -> None:
        for slot in slots:
            self._quarantined[slot] = str(failure)
            record = self.records[slot]
            record.status, record.failure = "quarantined", str(failure)
        self._note_pending()

    def _note_pending(self) -> None:
        pending = {}
        for slot, kind in self._kinds.items():
            always = self._sampled or slot in self._quarantined
            to_try = slot in self._to_try or slot in self._moved
            if always or to_try or kind in self._untried:
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
        self.looks = glances if self._ambient is None else self._ambient.looks(glances)

    def _look_for_moved(self, reads: ReadSet) -> None:
        moved = reads.moved()
        if not moved:
            # Something on the way was replaced, and leads to the same tensors.
            reads.settle()
            self._go_round()
            return
        self._look_at(repeat(True))
        self.quarantine([*self.records], reads.stale(moved))

    def _warn_of_padded_state(self, paths: str) -> None:
        if paths in self._warned_of:
            return
        self._warned_of.add(paths)
        told = VerificationError(
            "padded steps leave other Python state than steps without padding, though no output "
            "depends on it",
            got=paths,
            expected="state that advances by live rows alone",
            advice="advance it by current_context().live.num_tokens, or keep it outside of the "
            "forward",
        )
        warn_caller(str(told), PaddedStateWarning)

    def _say(self, failure: Exception) -> None:
        if self.strict:
            raise failure
        text = str(failure)
        if text not in self._warned_of:
            self._warned_of.add(text)
            warn_caller(f"steps run eagerly from here on: {text}", GraphQuarantinedWarning)
