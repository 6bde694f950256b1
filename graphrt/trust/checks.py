"""The checks of a runner's steps: which steps are tried, which run eagerly, and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import repeat
from operator import eq, not_
from types import MappingProxyType
from typing import Any

import torch.distributed as dist

from graphrt.core.base import errors, torch_names
from graphrt.core.base._native_door import NativeGlances
from graphrt.core.base._undo import undo_after
from graphrt.core.base.log import logger
from graphrt.core.base.settings import ASKED, READ, TURN, settings
from graphrt.core.base.texts import error_text
from graphrt.core.batch.descriptor import room_for_reqs
from graphrt.core.capture.options import GraphOptions
from graphrt.core.dispatch.reasons import Dispatch, Reason
from graphrt.core.runner.contract import Looks, StepChecks
from graphrt.core.runner.findings import TrialRecord
from graphrt.core.runner.weights import stale
from graphrt.trust.glances import in_rotation
from graphrt.trust.host_watch import HostChanges, described_changes, is_of_tensor
from graphrt.trust.padded_inputs import Differing
from graphrt.trust.picture import Picture, Told
from graphrt.trust.places.slots import MISSING, Place, call, same_value
from graphrt.trust.reads import ReadSet, each_call, keys_at
from graphrt.trust.verdict import PADDING_ON_LIVE_ROW, TriedGraph, Verdict
from graphrt.trust.watching.padding import PaddingRows

_SAMPLED = 64
"""Steps between two that are tried at the level `sample`."""

_PASSED = 3
"""Trials with other values after which a Python value counts as harmless. For a number that only
the forward changes one is enough: its trial also runs with the number moved further."""

_COMPARED = 64
"""Padded steps of a kind that still compare inputs with their padding, once one input was seen to
differ. Without a limit inputs that never differ would be compared at every step."""

_DOUBTFUL = 8
"""Trials that a change of the host has to pass where the runs do not show whether the forward
issues other operators or numbers for it."""


_EVERY = 4
"""Of so many steps one reads a setting that takes long to read. There are seven."""

NO_MEMORY = "no memory was left for a trial"

NO_INPUTS: Differing = {"tokens": frozenset()}
"""No input can show that rows are mixed: only the first padded step is tried."""


class _Kind:
    """Which steps of one kind of graph are still to be tried: the first one, and padded ones.

    A live row that equals the padding shows little there: a mean over equal rows stays as it is,
    however many of them are padding. So padded steps are tried until each input has differed from
    its padding in a trial. A step with all of its tokens may have fewer requests than its graph: it
    shows nothing of the padding of tokens, so each axis is awaited by itself.
    """

    def __init__(self, inputs: Differing) -> None:
        # Whether no step of this kind has been tried yet.
        self.untried = True
        # path -> how many trials have passed with another Python value there.
        self.passed = Counter[str]()
        # axis -> what no trial has shown yet: "", any padded step, and inputs that have not
        # differed from their padding. An axis is removed when all is shown, or after `_COMPARED`.
        self.awaited = {axis: {"", *names} for axis, names in inputs.items()}
        # axis, once an input of it has differed -> how many more padded steps are compared.
        self._left: dict[str, int] = {}

    def await_padding(self, axes: Iterable[str]) -> None:
        """Have the next padded step tried, along whichever of these axes."""
        for axis in axes:
            self.awaited.setdefault(axis, set()).add("")

    def wants_padded(self, differing: Differing) -> bool:
        """Whether a padded step with these inputs that differ is to be tried."""
        is_wanted = False
        for axis, names in differing.items():
            if not self.awaited[axis].isdisjoint({"", *names}):
                is_wanted = True
            elif axis in self._left:
                self._left[axis] -= 1
                if not self._left[axis]:
                    del self.awaited[axis]
        return is_wanted

    def tried_padded(self, differing: Differing) -> None:
        """Note that a padded step with these inputs that differ was tried."""
        for axis in differing.keys() & self.awaited.keys():
            if differing[axis]:
                self._left.setdefault(axis, _COMPARED)
            self.awaited[axis] -= {"", *differing[axis]}
            if not self.awaited[axis]:
                del self.awaited[axis]


@dataclass
class _Graph(TriedGraph):
    """What the checks know of one graph. It is tried after the forward has moved Python values, or
    the host has changed some."""

    kind: _Kind = field(default_factory=lambda: _Kind({}))
    """Shared by all graphs of one mode and kind."""
    to_try: bool = False
    """Whether its next step is tried in any case."""
    doubts: int = 0
    """Trials passed since the host's change, up to `_DOUBTFUL`."""
    passed: Counter[str] = field(default_factory=Counter)
    """path -> how many trials have passed after a change of the host there"""
    baked: dict[str, Any] = field(default_factory=dict)
    """harmless path -> the value that the graph has baked in, until it is tried with another one"""

    @property
    def is_wanted(self) -> bool:
        """Whether its next step is a trial: it is due, it is the first of its kind, the host has
        changed a value, or the forward has changed one that fewer than `_PASSED` trials had."""
        passed = min(map(self.kind.passed.__getitem__, self.moved), default=_PASSED)
        return self.to_try or passed < _PASSED or bool(self.changed) or self.kind.untried

    def note(self, path: str, was: Any, now: Any) -> bool:
        """Note that the host has changed a value. One that is back at that of the last trial is no
        change. False if trials have shown that it makes no difference at this path."""
        if self.passed[path] >= _PASSED or self.kind.passed[path] >= _PASSED:
            return False
        if not self.changed:
            self.doubts = 0
        was, _ = self.changed.get(path, (was, now))
        self.changed[path] = was, now
        if not isinstance(was, Told) and same_value(was, now):
            del self.changed[path]
        return True

    def note_unlike_baked(self, places: Mapping[str, Place | None]) -> None:
        """Note as changed each harmless path whose value now is not the one that the graph has
        baked in. What is no plain value cannot be compared, and counts as changed."""
        for path, was in [*self.baked.items()]:
            place = places[path]
            now = Told("this one") if place is None else place.get()
            if isinstance(was, Told) or not same_value(was, now):
                self.changed[path] = was, now
                del self.baked[path]

    def note_harmless(self, places: Mapping[str, Place | None]) -> None:
        """Note paths where changes made no difference to another graph. This one is tried once
        more, at the first value that is not the one that it has baked in."""
        for path, place in places.items():
            if self.passed[path] < _PASSED:
                self.passed[path] = _PASSED - 1
                now = Told("another value") if place is None else place.get()
                self.baked[path], _ = self.changed.pop(path, (now, now))

    def note_moved(self, path: str, was: Any, now: Any) -> bool:
        """Note a change that the forward itself has made in an eager step. False if trials of its
        kind have shown that it makes no difference."""
        if self.kind.passed[path] >= _PASSED:
            return False
        self.moved[path] = self.moved.get(path, (was, now))[0], now
        return True

    def note_passed(self, numbers: Iterable[str]) -> list[str]:
        """Note that a trial has passed with all that had moved or changed. `numbers` are paths that
        it moved further without a difference. Returns the paths that the host had changed."""
        tried = [*self.changed]
        self.passed.update(tried)
        self.kind.passed.update(self.moved.keys())
        for path in numbers:
            self.kind.passed[path] = _PASSED
        self.changed, self.moved = {}, {}
        return tried


class Ambient:
    """Compares torch's settings, such as autocast, with those at capture, which graphs have baked
    in. `looks` has an answer for each step, `differences` names what has changed.

    Settings that take long to read have their turn at one step in `_EVERY`. Gradients and inference
    mode count only if the forward `asks` for them, the number of threads never: a replay depends on
    it no more than an eager step does.
    """

    def __init__(self, device_type: str) -> None:
        self._rows = [row for row in settings(device_type) if row.step]
        # Whether the forward asks for gradients or inference mode.
        self._asks = False
        # Graphs have no gradients, whatever was on around their capture.
        self._captured = {row.name: row.read() for row in self._rows} | {"gradients": False}
        self.looks = self._new_looks()
        """Whether the settings hold, without end; False for all steps once some were found to
        differ, until `differences` finds none."""

    def differences(self) -> list[str]:
        """The settings that are not what they were at capture, in words."""
        changed = self._changed()
        if changed:
            self.looks = repeat(False)
        elif not next(self.looks):
            # Torch's guard differs for what is harmless, such as the number of threads.
            self.looks = self._new_looks()
        return [
            f"{name}: {_setting_text(now)}, {_setting_text(self._captured[name])} at capture"
            for name, now in changed.items()
        ]

    def ask(self) -> None:
        """From now on compare gradients and inference mode too: the forward reads them."""
        self._asks = True
        self.looks = repeat(False)  # until they are compared

    def _changed(self) -> dict[str, Any]:
        """name -> value now, of each setting that has another one than at capture."""
        now = {row.name: row.read() for row in self._rows if self._asks or row.step != ASKED}
        return {name: value for name, value in now.items() if value != self._captured[name]}

    def _new_looks(self) -> Iterator[bool]:
        """`looks` that take the present settings for those of the capture, put together of
        functions that run in C."""
        guard, modes = torch_names.state_guard, self._modes_now()
        if not guard:
            return map(not_, each_call(self._changed))
        reads: list[tuple[Callable[[], Any], object]] = [(guard().check, True)]
        turns: list[tuple[Callable[[], Any], object]] = []
        for row in self._rows:
            look = row.read, self._captured[row.name]
            if row.step == READ or (row.step == ASKED and self._asks):
                reads.append(look)
            elif row.step == TURN:
                turns += look, *[(bool, False)] * (_EVERY - 1)
        if modes or not torch_names.function_mode_is_on:
            reads.append((self._modes_now, modes))
        else:
            reads += (torch_names.function_mode_is_on, False), (torch_names.count_dispatch_modes, 0)
            if NativeGlances is not None:
                slots = tuple([(read, None, was) for read, was in reads])
                parts = tuple([(read, call, was) for read, was in turns])
                return NativeGlances(slots, parts, (len(slots), 1), MISSING, repeat(True))
        reads.append((in_rotation(eq, turns).__next__, True))
        gets, was = zip(*reads, strict=True)
        return map(eq, zip(*map(each_call, gets), strict=False), repeat(was))

    def _modes_now(self) -> list[object]:
        return [*torch_names.all_function_modes(), *torch_names.dispatch_modes()]


def _setting_text(value: object) -> object:
    """A setting as error texts show it; of modes, outermost first, their classes."""
    if not isinstance(value, tuple):
        return value
    return ", ".join(type(each).__name__ for each in value) or "none"


class Glances(Looks):
    """What a step asks before it is replayed without a trial: are the settings those of the
    capture, has the host changed nothing in Python, and is a tensor that graphs read where it was?

    `looks` has one answer for each step: False sends it to `Checks.why_eager`. Changes that CPython
    does not report are looked for at a few places in turn: `ReadSet.rounds` steps find them.
    """

    __slots__ = ()

    def __init__(self, reads: ReadSet, device_type: str) -> None:
        self.reads = reads
        self._device_type = device_type
        self.reset()

    def reset(self) -> None:
        """Forget the settings of the capture, as there are no graphs: all looks are True."""
        # The settings of the first capture; None without graphs.
        self._ambient: Ambient | None = None
        self.aim(tensors=False)

    def begin(self) -> None:
        """Look from now on: graphs were captured, or more is known of what they read."""
        self._ambient = self._ambient or Ambient(self._device_type)
        self.aim()

    def aim(self, *, tensors: bool = True) -> None:
        """Make `looks` anew: at settings, at changes that CPython reports, and with `tensors` at
        what graphs read now. Without `tensors` no graph is replayed."""
        self._sees_tensors = tensors
        looks: Iterator[bool] = repeat(True) if self._ambient is None else self._ambient.looks
        looks = self.reads.glances(looks) if tensors else looks
        self.looks = self.reads.host.over(looks)

    def ask(self) -> None:
        """The forward asks for gradients, or for inference mode: these are settings too."""
        if self._ambient is not None:
            self._ambient.ask()
            self.aim(tensors=self._sees_tensors)

    def changed_settings(self) -> errors.VerificationError | None:
        """The error for settings that are not what they were at the first capture, or None."""
        ambient = self._ambient
        if ambient is None:
            return None
        before, changed = ambient.looks, ambient.differences()
        if ambient.looks is not before:
            self.aim(tensors=self._sees_tensors)
        if not changed:
            return None
        return errors.VerificationError(
            "a setting of torch has changed since the graphs were captured",
            got="; ".join(changed),
            expected="the settings of the first capture, for all graphs and steps of a runner",
            advice="capture and step under the same settings, or recapture(); gradients: step "
            "under torch.no_grad()",
        )


class Checks(StepChecks):
    """Decides which steps are replayed, tried or run eagerly, and keeps the findings of trials.

    At `capture` the first step of each kind of graph is tried, its first padded step, and the
    first of its largest and of its smallest graph; at `first` that of every graph, at `sample` one
    step in 64 too, at `always` every step. `pending` and `glances` say which step is simply
    replayed: see `StepEngine.is_clear`.
    """

    __slots__ = ()

    def __init__(
        self,
        options: GraphOptions,
        reads: ReadSet,
        device_type: str,
        *,
        inputs: Differing = NO_INPUTS,
        reqs: int = 1,
        pads: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        """`inputs` are those whose padding rows may show that rows are mixed, by their axes, and
        `reqs` the most requests that there are rows for. `pads` are those of index inputs."""
        super().__init__()
        self.on = options.checks("capture")
        self.strict = options.strict
        self._levels = set(filter(options.checks, ("first", "sample", "always")))
        self._inputs, self._reqs = inputs, reqs
        self.tries_all = "always" in self._levels
        self.padding = PaddingRows(pads, sees_all=self.tries_all)
        # Warnings that were given: each is given once.
        self._warned_of: set[str] = set()
        self.reads = reads
        self.glances: Glances = Glances(reads, device_type)
        self.reset()

    def reset(self) -> None:
        """Forget everything: there are no graphs."""
        # All that the forward reached at the last capture.
        self.picture: Picture | None = None
        # slot -> what is known of the graph there.
        self._graphs: dict[int, _Graph] = {}
        self.pending = {}
        # Steps so far that `wants_trial` was asked about and that were not due for a trial.
        self._steps = 0
        # After a trial for which there was no memory: steps until the next one, and twice as many
        # after that one.
        self._wait = self._last_wait = 0
        self.decided = None
        # path at which changes of the host make no difference -> the place of its plain value.
        self.harmless: dict[str, Place | None] = {}
        # The paths at which the host has changed something else than one tensor for another.
        self._of_others: set[str] = set()
        self.padding.clear()
        self.glances.reset()

    @property
    def records(self) -> dict[int, TrialRecord]:
        """The findings of trials, by the graph's slot."""
        return {slot: graph.record for slot, graph in self._graphs.items()}

    def captured(self, graphs: Iterable[Dispatch], *, more: bool = False) -> None:
        """Note captured graphs, some of which may have been noted before. With `more` to come none
        is taken for the smallest or the largest of its kind."""
        if not self.on:
            return
        self.glances.begin()
        self.picture = self.reads.host.picture
        self.padding.end(padded=False)
        left_behind = self.reads.left_behind
        if left_behind and self._graphs:
            # The warm-up of a later size has made a new cache: older graphs go on reading the old.
            self._quarantine(self._graphs.values(), stale(left_behind))
        kinds = dict[Hashable, list[_Graph]]()
        for graph in self._graphs.values():
            key = graph.record.mode, *graph.record.descriptor.kind
            kinds.setdefault(key, []).append(graph)
        for mode, descriptor, _, slot in graphs:
            if slot in self._graphs:
                continue
            record, key = TrialRecord(mode, descriptor), (mode, *descriptor.kind)
            of_kind = kinds.setdefault(key, [])
            kind = of_kind[0].kind if of_kind else _Kind(self._inputs)
            self._graphs[slot] = graph = _Graph(record, kind=kind)
            of_kind.append(graph)
            if self.harmless:
                # It has baked in the values that are there now.
                graph.note_harmless(self.harmless)
        for of_kind in kinds.values():
            of_kind.sort(key=lambda graph: graph.record.descriptor.num_tokens)
            failure = next((each.record.failure for each in of_kind if each.record.failure), None)
            if failure is not None:
                # A graph captured after another of its kind has failed is in quarantine too.
                self._mark_quarantined(of_kind, failure)
            ends = [] if more else [of_kind[0], of_kind[-1]]
            for graph in of_kind if "first" in self._levels else ends:
                graph.to_try |= graph.record.status == "untried"
        self._note_pending()

    def dropped(self, slot: int) -> None:
        """Forget a graph that was destroyed, where others remain."""
        graph = self._graphs.pop(slot, None)
        if graph is None:
            return
        kind = graph.record.descriptor.kind
        if kind not in {each.record.descriptor.kind for each in self._graphs.values()}:
            self.forget_kind(kind)
        self._note_pending()

    def forget_kind(self, kind: Hashable) -> None:
        """Let go of what only graphs of this kind have read: they are all destroyed."""
        self.reads.forget_kind(kind)

    def outdated(self, graphs: Any) -> Collection[int]:
        if not self.on:
            return super().outdated(graphs)
        slots = [*self._graphs]
        kinds = self.reads.stale_kinds()
        if kinds is None or self.changed_settings():
            return slots
        stale = [slot for slot in slots if self._graphs[slot].record.descriptor.kind in kinds]
        if stale:
            return stale
        try:
            self.check_weights(graphs)
        except (errors.StaleInputError, errors.UntrackedWeightsError):
            return slots
        records = sorted(self.records.items(), key=lambda each: each[1].descriptor.num_tokens)
        largest = {(record.mode, record.descriptor.kind): slot for slot, record in records}
        for slot in largest.values():
            self._graphs[slot].to_try = True
        self._note_pending()
        return [
            slot
            for slot, graph in self._graphs.items()
            if graph.record.failure is not None or not self._of_others.isdisjoint(graph.changed)
        ]

    def to_try(self) -> list[Dispatch]:
        """The graphs that are tried whatever the step, the largest first."""
        dispatches = [
            Dispatch(graph.record.mode, graph.record.descriptor, Reason.HIT, slot)
            for slot, graph in self._graphs.items()
            if graph.to_try
        ]
        return sorted(dispatches, key=lambda each: -each.descriptor.num_tokens)

    def changed_settings(self) -> errors.VerificationError | None:
        return self.glances.changed_settings()

    def why_eager(self, dispatch: Dispatch, *, agreed: bool = False) -> Reason | None:
        """Why the step of a graph must not be replayed; None if it may. A graph that ranks have
        `agreed` on is not tried for what the host of one of them has changed: the others would not
        make the runs of the trial, and collectives in it would wait for them for ever.

        With `strict` raises the error instead.
        """
        changed = self.glances.changed_settings()
        if changed:
            self._warn_or_raise(changed)
            return Reason.SETTINGS_CHANGED
        graph = self._graphs[dispatch.slot]
        record = graph.record
        # A graph in quarantine is replayed no more.
        if record.failure is None:
            self.look_at_host()
            if graph.baked:
                graph.note_unlike_baked(self.harmless)
            if agreed and graph.changed and self.decided is not None:
                # Found after the vote on this step: the next vote asks for a trial.
                return Reason.CHANGED
            if agreed and graph.changed:
                self._give_up(graph, "ranks have agreed on the step, so it cannot be tried")
        if record.failure is None:
            return None
        if self.strict:
            raise errors.VerificationError(
                f"{dispatch.mode.name} [{dispatch.descriptor}] is in quarantine",
                got=record.failure,
                advice="mend the cause above and recapture(); or strict=False, to run eagerly",
            )
        return Reason.QUARANTINED

    def look_at_host(self, *, by_forward: bool = False) -> None:
        """Note what the host has changed; with `by_forward` an eager step, whose numbers a trial
        also moves further. If a tensor that graphs read has moved, all of them go into quarantine;
        after any other change the next step of each graph is a trial."""
        reads = self.reads
        is_served = any(each.record.failure is None for each in self._graphs.values())
        if reads.host.picture is None or not is_served:
            return
        try:
            changes = reads.host.take()
            if changes is not None:
                self._note_changes(reads, self._served(), changes, by_forward=by_forward)
        except BaseException as error:
            # Maybe a Ctrl-C. A change is reported only once, so some may be lost.
            undo_after(error, partial(self._cut_short, error))
            raise

    def note_unread(self, names: Iterable[str]) -> None:
        """Note tensors that have moved and that no watched run has read. A graph of another size
        may read them all the same, so the next step of each is a trial."""
        for name in names:
            for graph in self._served():
                graph.note(name, Told("a tensor"), Told("another one, or none"))
        self._note_pending()

    def _cut_short(self, error: BaseException) -> None:
        """After `error` in a look at the host's changes: put all graphs into quarantine."""
        served = self._served()
        if served:
            what = f"a look at what the host has changed ended in {error!r}"
            advice = "recapture(): changes are told once, and some may be lost"
            self._quarantine(served, errors.VerificationError(what, advice=advice))

    def _note_changes(
        self, reads: ReadSet, served: list[_Graph], changes: HostChanges, *, by_forward: bool
    ) -> None:
        """Note changes for the graphs that are `served`: see `look_at_host`."""
        places = reads.walk() if changes.is_structural else None
        gone = [] if places is None else reads.stale_paths(places)
        if gone:
            self.glances.aim(tensors=False)
            self._quarantine(self._graphs.values(), stale(gone))
            return
        # Graphs go on with their own scratch memory and tables: trials show whether this is right.
        moved = [] if places is None else reads.moved(places)
        paths = {each.place.path for each in moved}
        changes.changes |= dict.fromkeys(paths, (Told("a tensor"), Told("another one, or none")))
        scratch = {each.place.path for each in moved if reads.is_scratch(each.key)}
        for graph in served if scratch else ():
            graph.replaced |= keys_at(places, scratch)
        self._of_others |= changes.of_others
        for path, (was, now) in changes.changes.items():
            if path in self.harmless:
                # A new object at a harmless path: the watch ignores only the old one.
                reads.host.ignore(path)
                continue
            note = _Graph.note_moved if by_forward else _Graph.note
            if sum(note(graph, path, was, now) for graph in served) == 0 and by_forward:
                # Without this line each eager step would cost a walk, for an attribute that it
                # sets and no graph depends on.
                reads.host.ignore(path)
        if places is not None:
            reads.settle(places)
        # After a walk a path may lead to another object.
        self.harmless = reads.host.places_at(self.harmless)
        self.glances.aim()
        self._note_pending()

    def ran_forward(self) -> None:
        """Note that a trial has run the forward: its runs have made the changes since the last
        look, see `HostWatch.forget`. Its last run may have replaced a tensor that graphs read."""
        reads, served = self.reads, self._served()
        changed = reads.host.forget()
        if changed:
            self.glances.aim()
        if served and any(map(is_of_tensor, changed)):
            self._note_changes(reads, served, HostChanges(is_structural=True), by_forward=True)

    def _served(self) -> list[_Graph]:
        """The graphs that are not in quarantine."""
        return [graph for graph in self._graphs.values() if graph.record.failure is None]

    def awaited_padding(self, slot: int) -> Collection[str]:
        """The axes along which a padded step of the graph may still be tried."""
        return self._graphs[slot].kind.awaited

    def wants_trial(self, slot: int, differing: Differing | None) -> bool:
        """Whether this step of the graph is tried; `differing` is None unless the step is padded
        along an axis of `awaited_padding`."""
        if self.decided is not None:
            self._steps += 1
            return self.decided
        graph = self._graphs[slot]
        kind = graph.kind
        if self._wait and not graph.changed:
            self._wait -= 1
            self.padding.forget_contents()
            return False
        if graph.is_wanted:
            return True
        if differing is not None:
            axes_before = len(kind.awaited)
            if kind.wants_padded(differing):
                return True
            if len(kind.awaited) < axes_before:
                self._note_pending()
        self._steps += 1
        return self._is_sampled(self._steps)

    def _is_sampled(self, step: int) -> bool:
        """Whether the level of checks alone has this step tried, which is counted in `_steps`."""
        return self.tries_all or ("sample" in self._levels and step % _SAMPLED == 0)

    def for_vote(self) -> tuple[Collection[int], Collection[int]]:
        """For ranks that vote on the next step: the slots of graphs whose next step has to be tried
        whatever its batch is, and of those in quarantine."""
        if not self.on:
            return (), ()
        if self.reads.host.has_change:
            self.look_at_host()
        is_sampled = self._is_sampled(self._steps + 1)
        to_try, failed = [], []
        for slot in (slot for slot, rows in self.pending.items() if rows == -1):
            graph = self._graphs[slot]
            graph.note_unlike_baked(self.harmless)
            if graph.record.failure is not None:
                failed.append(slot)
            elif is_sampled or graph.is_wanted:
                to_try.append(slot)
        return to_try, failed

    def decide(self, slot: int, tried: bool) -> None:
        """Note the ranks' vote on whether the next step, of this graph, is a trial: all of them do
        the same, whatever each has seen. It holds until `decided` is None again."""
        if self.on:
            self.decided = tried
            if tried:
                self.pending = self.pending | {slot: -1}

    def tried(self, slot: int, verdict: Verdict, differing: Differing | None) -> None:
        """Note the verdict of a trial; if it failed, all graphs of its kind go into quarantine.

        With `strict` raises the failure.
        """
        graph = self._graphs[slot]
        record, kind = graph.record, graph.kind
        record.steps += 1
        if verdict.asks:
            self.glances.ask()
        record.deterministic &= verdict.deterministic
        record.notes = tuple(dict.fromkeys((*record.notes, *verdict.notes)))[:8]
        if verdict.failure is not None:
            self.failed(slot, verdict.failure)
            return
        if record.failure is not None:
            # The step itself has replaced a tensor that graphs read: see `ran_forward`.
            return
        record.status = "tried"
        if verdict.varying is not None:
            graph.varying = verdict.varying.union(graph.varying or ())
        if verdict.scratch:
            graph.has_other_scratch = True
            self._warn_of_scratch(self.reads.paths_of(verdict.scratch))
        graph.doubts += 1
        if not verdict.is_doubtful or graph.doubts >= _DOUBTFUL:
            for path in graph.note_passed(verdict.harmless):
                if graph.passed[path] >= _PASSED:
                    self._mark_harmless(path)
        graph.to_try = kind.untried = False
        if differing is not None:
            kind.tried_padded(differing)
        self._note_pending()
        self.look_at_padding()

    def failed(self, slot: int, failure: Exception) -> None:
        """Put all graphs of this one's kind into quarantine; with `strict` raises the failure."""
        kind = self._graphs[slot].kind
        # Graphs of other kinds write the same rows of padding.
        spoils_all = self.padding.conflict() is not None
        graphs = self._graphs.values()
        self._quarantine([each for each in graphs if spoils_all or each.kind is kind], failure)

    def look_at_padding(self) -> None:
        """After a step: if live rows have the address of padding, put all graphs into quarantine;
        if no trial has shown whether padding writes there, try the next padded steps."""
        padding, served = self.padding, self._served()
        conflict = padding.conflict()
        if conflict is not None and served:
            failure = PADDING_ON_LIVE_ROW(conflict, graph="all graphs")
            self._quarantine(served, failure)
        elif padding.has_new:
            padding.has_new = False
            for graph in served:
                graph.kind.await_padding(self._inputs)
            self._note_pending()

    def _warn_of_scratch(self, paths: Iterable[str]) -> None:
        """Warn once of each path where eager steps fill other memory than graphs."""
        for path in paths:
            text = (
                f"{path} was replaced after the capture; graphs go on with the old tensor, which "
                "they fill before they read it\n  expected: nobody else reads results there\n"
                "  try: return the results; or recapture()"
            )
            if text not in self._warned_of:
                self._warned_of.add(text)
                errors.warn_caller(text, errors.StaleTensorWarning)

    def graph_to_try(self, dispatch: Dispatch) -> TriedGraph:
        """What a trial has to know of a graph; a new record where steps are not checked."""
        record = TrialRecord(dispatch.mode, dispatch.descriptor)
        return self._graphs.get(dispatch.slot) or TriedGraph(record)

    def after_eager_step(self) -> None:
        self.padding.forget_contents()
        # The run may have replaced a tensor that graphs read: a long prompt makes a new cache.
        self.look_at_host(by_forward=True)

    def _mark_harmless(self, path: str) -> None:
        """Ignore changes at a path from now on: three made no difference to one graph. Every other
        graph is tried once more, at the first value that is not the one that it has baked in."""
        if path in self.harmless:
            return
        self.harmless[path] = None
        host = self.reads.host
        host.ignore(path)
        self.harmless.update(host.places_at([path]))
        for graph in self._served():
            graph.note_harmless({path: self.harmless[path]})

    def in_ranks(self, agreed: bool) -> bool:
        """Whether other ranks may run the same step."""
        return agreed or (dist.is_available() and dist.is_initialized())

    def cannot_try(self, slot: int, error: Exception, *, agreed: bool = False) -> Reason | None:
        """Decide how the step of a graph runs after `error`: too little memory for its trial. After
        a change of the host the graph goes into quarantine. Else, where the device is full, it is
        replayed untried, with one warning. Raises `error` for state above its limit, and among
        ranks: the replay's collectives would meet those of their trials."""
        graph = self._graphs[slot]
        record = graph.record
        if graph.changed:
            self._give_up(graph, f"it cannot be tried: {error_text(error)}")
            return Reason.QUARANTINED
        if isinstance(error, errors.StateTooLargeError) or self.in_ranks(agreed):
            raise error
        self.ran_forward()
        self.padding.forget_contents()
        is_first, self._last_wait = not self._last_wait, max(_SAMPLED, 2 * self._last_wait)
        self._wait = self._last_wait
        record.notes = tuple(dict.fromkeys((*record.notes, NO_MEMORY)))
        if is_first:
            errors.warn_caller(
                f"{record.mode.name} [{record.descriptor}] is replayed unchecked: {NO_MEMORY}\n"
                f"  got: {error_text(error)}\n  expected: memory for an eager step beside the "
                "graphs\n  try: leave the KV cache less memory; or Host(example=), which checks "
                f"graphs in capture(). Steps are checked again after {self._wait} steps",
                errors.GraphMemoryWarning,
            )
        return None

    def _give_up(self, graph: _Graph, why: str) -> None:
        """Put a graph into quarantine that may be wrong after a change of the host, where no trial
        can tell."""
        record = graph.record
        failure = errors.VerificationError(
            f"{record.mode.name} [{record.descriptor}]: the host has changed Python state; {why}",
            got=described_changes(graph.changed),
            expected="the Python state of the capture",
            advice="recapture() after a change that is for good; or keep what changes out of the "
            "forward's reach",
        )
        self._quarantine([graph], failure)

    def set_aside(self, failure: Exception) -> None:
        """Let all batches run eagerly; the caller raises `failure` itself."""
        if self.on:
            self.glances.aim(tensors=False)
            self._mark_quarantined(self._graphs.values(), failure)

    def _mark_quarantined(self, graphs: Iterable[_Graph], failure: object) -> None:
        for graph in graphs:
            graph.record.status, graph.record.failure = "quarantined", str(failure)
        self._note_pending()

    def _quarantine(self, graphs: Collection[_Graph], failure: Exception) -> None:
        """Let the batches of these graphs run eagerly; with `strict` raises `failure`."""
        self._mark_quarantined(graphs, failure)
        # Only INFO: users who have set up no logging see the warning.
        logger.info("%d graphs are in quarantine: %s", len(graphs), failure)
        self._warn_or_raise(failure)

    def _note_pending(self) -> None:
        """Work out `pending` again, after anything that it depends on has changed."""
        pending: dict[int, int | tuple[int, int]] = {}
        for slot, graph in self._graphs.items():
            record, kind = graph.record, graph.kind
            always = "sample" in self._levels or record.failure is not None
            if always or graph.is_wanted or graph.baked:
                pending[slot] = -1
            elif kind.awaited:
                tokens = record.descriptor.num_tokens
                pending[slot] = tokens
                # A step with all tokens of a uniform graph has all of its requests too.
                if "reqs" in kind.awaited and not record.descriptor.uniform:
                    pending[slot] = tokens, room_for_reqs(record.descriptor, self._reqs)
        self.pending = pending

    def _warn_or_raise(self, failure: Exception) -> None:
        if self.strict:
            raise failure
        text = f"steps run eagerly from here on: {failure}"
        if text not in self._warned_of:
            self._warned_of.add(text)
            errors.warn_caller(text, errors.GraphQuarantinedWarning)
