"""Trying a graph: one step by replay and several times eagerly, all from the same state.

1. `Trial._judge` makes the runs. Where ranks try a step together, all make the same runs in the
   same order, whatever these give: else one would wait for ever in a collective of another. After
   each run the state is put back.
2. Each question about them is a method `_judge_...`; the words of its answer are in `verdict.py`.
3. The last run is eager, and its effects stay: it is the step that the host asked for.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter, eq
from types import FrameType, FunctionType, MappingProxyType, MethodType
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar

import torch

from graphrt.core.base._undo import Undo, undoing
from graphrt.core.batch.modes import GraphMode
from graphrt.core.capture.options import GraphOptions
from graphrt.core.capture.refusals import Refusal
from graphrt.core.device.platform import Platform
from graphrt.core.trust import snapshot
from graphrt.core.trust import verdict as verdicts
from graphrt.core.trust.compare import Difference, difference, rounding_of
from graphrt.core.trust.host_watch import described_changes
from graphrt.core.trust.places.walk import places_of
from graphrt.core.trust.warm_up import WarmedUp
from graphrt.core.trust.watching import watch as watching
from graphrt.core.trust.watching.watch import Deviation, Trace, Watch
from graphrt.core.trust.watching.writes import storage_of

T = TypeVar("T")

_SPREADS = 4
"""A replay may differ from eager by this many times the difference of two eager runs."""

_RUNS = 8
"""The usual most of runs in a trial, each of which saves rows that index writes touch."""

_STEPS_AFTER = 4
"""Steps after a padded one that may show what it has left in Python: a value may go another way
round before it reaches an output."""

_NEXT_RUNS = 3
"""Runs that each begin with the Python state that the one before left: a list may be emptied at
every third run."""

_STEPS = (1, 999_983, -999_983)
"""How far Python numbers that a run moves are moved further, in steps of that run."""

_NONE: Mapping[str, Any] = MappingProxyType({})

_Start: TypeAlias = tuple[Sequence[Any], Mapping[str, Any]]
"""What a run finds in Python: values as a run has left them, and numbers that were moved since."""

_IGNORED_CALLERS = ("torch", "graphrt")
"""Packages whose questions for the gradient mode are no branch of the forward: entering `no_grad`
asks too. Where torch's own layers branch on it, the results differ by rounding only."""


Rows = Literal["padded", "padding", "disturbed", "alone"]
"""Of an eager run: those of the graph; nothing but padding, as in a warm-up; padding that holds
live rows, in all inputs whose padding addresses nothing; or the live rows alone."""


class TriedStep:
    """One step that can be run again and again; each run returns copies of the live outputs."""

    forward: Any
    """What graphs stand for: its Python side is put back after each run."""
    inputs: frozenset[int] = frozenset()
    """The addresses of the storages of its inputs."""
    sizes: Sequence[tuple[int, int]] = ()
    """Padded and live tokens, and requests; none where all are live, or live rows may depend on
    padding."""
    pads: Sequence[int] = ()
    """Rows that only padding addresses: runs with and without it may leave other values there."""
    has_gradients = False
    """Whether its caller has gradients on."""
    has_metadata = False
    """Whether operators may be given numbers of its metadata."""
    together = False
    """Whether other ranks try the step too, on other values: then no run depends on results."""

    def eager(self, watch: Watch, rows: Rows = "padded") -> Any:
        """The forward under `watch`, on such `rows`; of "alone" None where all are live."""
        raise NotImplementedError

    def with_gradients(self, watch: Watch, inference: bool) -> Any:
        """`eager`, where torch reports that gradients are on, and `inference` mode as on or off: a
        forward may branch on them, and a graph has one branch."""
        return self.eager(watch)

    def replay(self) -> Any:
        """The graph on the padded inputs."""
        raise NotImplementedError


class Run(NamedTuple):
    """One run: its live outputs, and what it has left."""

    outputs: Any
    left: snapshot.Left
    watch: Watch


@dataclass
class Trial:
    """Tries one step of one graph: compares its runs with one another, and with the operators that
    the warm-up of its kind issued. With strict options a failed trial leaves no effects.
    """

    step: TriedStep
    graph: verdicts.TriedGraph
    warm: WarmedUp | None
    platform: Platform
    options: GraphOptions

    def __post_init__(self) -> None:
        record, warm, platform = self.graph.record, self.warm, self.platform
        self._has_parts = record.mode is GraphMode.PIECEWISE
        # Whether the warm-up had the size of this graph.
        self._same_size = warm is not None and warm.tokens == record.descriptor.num_tokens
        # Each run saves the rows that its index writes touch; all of them count for one limit.
        limit_bytes = self.options.state_limit(platform) * _RUNS
        self._state = snapshot.StateSnapshot(platform.device_type, limit_bytes, sums=False)
        self._state.reach(places_of(self.step.forward))
        self._verdict = verdicts.Verdict()
        # The first operator that the capture issued otherwise than eager runs, as text; "": none.
        self._another_way = ""

    @undoing
    def run(self, undo: Undo, *, undone: bool = False) -> verdicts.Verdict:
        """Run the trial; if `undone`, its last run leaves no effects either. After an error, of the
        forward or of anything else, the state is as before the trial."""
        undo.after_error(self._state.restore)
        self._judge()
        if undone or (self.options.strict and self._verdict.failure is not None):
            self._state.restore()
        return self._verdict

    def _judge(self) -> None:
        step, state, verdict = self.step, self._state, self._verdict
        # Padded and live tokens, if there is a run without padding to compare with.
        rows = step.sizes[0] if step.sizes else None
        first = self._watch(rows=rows, keeps_sources=True, compared=True)
        outputs, asked = _asked_in(partial(step.eager, first))
        eager, used = Run(outputs, state.take(), first), first.uses
        self._eager = eager
        rebound = state.python.rebound(eager.left.python, used)
        state.restore()
        # A run of padding comes between: if the replay needed something that the eager run left in
        # memory that is not saved, it would find the padding's instead.
        step.eager(self._watch(), "padding")
        state.restore()
        replayed = Run(step.replay(), state.take(), first)
        state.restore()
        alone, compared = (None, None) if rows is None else self._padding(rows)
        dtypes = map(attrgetter("dtype"), used.values())
        precision = self.platform.float32_precision
        self._rounding = rounding_of(dtypes, first.trace.overloads(), precision)
        verdict.asks = asked and self._depends_on_modes()
        moved = state.python.changed(state.python.was, eager.left.python)
        numbers = self._numbers(moved)
        # Rebound tensors are a failure of their own, below.
        if moved or numbers:
            self._judge_moved({} if rebound else moved, numbers)
        last = self._watch()
        again = Run(step.eager(last), state.take(), last)
        verdict.outputs = again.outputs
        self._judge_constants(first, last)
        if rebound:
            self._fail(verdicts.REBOUND, ", ".join(rebound))
        self._note_another_way(first)
        spread = difference(again.outputs, eager.outputs)
        self._rounding = max(self._rounding, 1e-6)
        if self._has_parts and (spread is not None or step.together):
            self._look_for_clocks(again, spread)
        self._judge_replay("", "differ", spread, again.outputs, replayed.outputs)
        if eager.left.memory:
            before, after, by_replay = _memory(eager, again, replayed)
            where, how = " in the state that it writes", "leave different state"
            self._judge_replay(where, how, difference(after, before), after, by_replay)
        self._judge_change(first.trace)
        if compared is not None:
            self._judge_python(again, compared)
            self._judge_padding(compared)
        self._leave_what_was_asked(alone)

    def _leave_what_was_asked(self, alone: Run | None) -> None:
        """Leave the step that the host asked for, if the last run was another one: after a failure
        the run without padding; else one under the caller's modes, if results depend on them."""
        step, state, verdict = self.step, self._state, self._verdict
        if alone is not None and verdict.failure is not None:
            # The step as it is without graphs. Not run again: ranks whose trial passed would make
            # no such run, and a collective in it would wait for them.
            state.restore(alone.left)
            verdict.outputs = alone.outputs
        elif verdict.asks and step.has_gradients:
            state.restore()
            inference = torch.is_inference_mode_enabled()
            verdict.outputs = step.with_gradients(self._watch(), inference)

    # Runs ----------------------------------------------------------------------------------------

    def _watch(self, *, compared: bool = False, **more: Any) -> Watch:
        memory, generators = self._state.memory, self._state.generators
        more |= {"compared": compared, "reads_arrays": self.platform.device_type == "cpu"}
        return Watch(self.step.inputs, memory, generators=generators, **more)

    def _extra_run(
        self, how: str, call: Callable[[Watch], Any], start: _Start | None = None, **watch: Any
    ) -> Run | None:
        """Make a run beyond the host's step, which finds in Python what `start` has, and put the
        state back. An error is noted as `how` and is no failure: returns None. A run that leaves
        the operators that it `follows` has a `Deviation` in place of outputs."""
        seen = self._watch(**watch)
        try:
            if start is not None:
                self._state.python.begin(*start)
            try:
                outputs = call(seen)
            except Deviation as deviation:
                outputs = deviation
            return Run(outputs, self._state.take(), seen)
        except (MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            self._verdict.notes.append(f"{how}: {type(error).__name__}: {error}"[:300])
            return None
        finally:
            self._state.restore()

    def _padding(self, rows: tuple[int, int]) -> tuple[Run | None, Run | None]:
        """The run without padding, and the run that shows whether live rows depend on padding.

        Both are one run, unless the step draws random numbers: fewer rows would draw others. Then
        the second is a run with changed padding rows, or None if that draws other numbers too.
        """
        run, live = self.step.eager, (rows[1], rows[1])
        generators, drawn = self._state.generators, self._eager.left.generators
        # It may be made for the sizes of graphs alone.
        how = "does not run without padding"
        alone = self._extra_run(how, partial(run, rows="alone"), rows=live, compared=True)
        if alone is None or not generators.have_drawn(drawn):
            return alone, alone
        how = "with changed padding rows"
        disturbed = self._extra_run(how, partial(run, rows="disturbed"), rows=rows, compared=True)
        if disturbed is not None and generators.have_drawn(drawn, disturbed.left.generators):
            self._verdict.notes.append(
                "how many random numbers it draws depends on their parameters (as in a Poisson "
                "distribution), so whether it mixes rows cannot be tried"
            )
            return alone, None
        return alone, disturbed

    def _depends_on_modes(self) -> bool:
        """Whether the forward does something else with gradients on (graphs have none) and with
        inference mode switched."""
        otherwise = not torch.is_inference_mode_enabled()
        call = partial(self.step.with_gradients, inference=otherwise)
        # With the mode switched torch may refuse to change a tensor in place: that tells nothing.
        run = self._extra_run("with inference mode changed", call)
        apart = None if run is None else _apart(run, self._eager, rounded=True)
        return apart is not None and apart.relative > self._rounding

    def _look_for_clocks(self, again: Run, spread: Difference | None) -> None:
        """Allow any distance where two eager runs differ by more than rounding because of eager
        parts alone, which read a clock at every replay too."""
        self._state.restore()
        third = self._extra_run("once more", self.step.eager, compared=True)
        self._state.restore(again.left)
        if third is None or spread is None:
            return
        # Two draws of a part may be near one another.
        apart = difference(third.outputs, self._eager.outputs) or spread
        if max(spread.relative, apart.relative) <= self._rounding:
            return
        if third.watch.trace.same_captured(self._eager.watch.trace, has_parts=True):
            self._verdict.notes.append(
                "eager parts give something else at every call, as a clock does, so replays are "
                f"not compared: {spread.text}"
            )
            self._rounding = float("inf")

    # Questions -----------------------------------------------------------------------------------

    def _fail(self, refusal: Refusal, got: str, **more: Any) -> None:
        """Note a failure; the first one counts. `more` is for its texts."""
        graph, record = self.graph, self.graph.record
        for who, changes in (("the host has", graph.changed), ("eager steps have", graph.moved)):
            if changes:
                text = described_changes(changes)
                got += f"\n    what {who} changed since the capture: {text}"
        failure = refusal(got, graph=f"{record.mode.name} [{record.descriptor}]", **more)
        self._verdict.failure = self._verdict.failure or failure

    def _judge_constants(self, first: Watch, last: Watch) -> None:
        """Does it make tensors of Python data that is other data now?"""
        has_parts = self._has_parts
        other_data = last.trace.first_other_data(first.trace, has_parts=has_parts)
        if other_data is None and self.warm is not None and self._same_size:
            other_data = first.trace.first_other_data(self.warm.trace, has_parts=has_parts)
        if other_data is not None:
            got, then = other_data
            self._fail(verdicts.CONSTANT, got, then=then)

    def _judge_replay(
        self, where: str, how: str, spread: Difference | None, again: Any, replay: Any
    ) -> None:
        """Does the replay give, or leave, what eager runs do, as far as these repeat one another?
        `again` is of an eager run, by `spread` apart from another one."""
        rounding = self._rounding
        if spread is not None and spread.relative > rounding:
            self._fail(verdicts.NOT_REPEATED, spread.text, how=how)
            return
        if spread is not None:
            self._verdict.deterministic = False
            self._verdict.notes.append(f"not deterministic: eager runs {how} in {spread.text}")
        apart = difference(replay, again, rounded=bool(self._another_way))
        allowed = 0.0 if spread is None else _SPREADS * max(spread.relative, 1e-7)
        # Equal bits are meant where eager runs have them: another bit may be a difference of 0.
        if apart is None or rounding == float("inf") or (spread and apart.relative <= allowed):
            return
        if self._another_way and apart.relative <= rounding:
            self._verdict.notes.append(
                f"the replay differs by rounding{where} ({apart.text}): the forward takes another "
                f"way while it is captured, first {self._another_way}"
            )
            return
        self._fail(verdicts.NOT_EAGER, apart.text + self._guilty(), where=where)

    def _note_another_way(self, now: Watch) -> None:
        """Find the first operator that the capture issued otherwise than eager runs do. The capture
        may have had another size, and other operators for that alone; so then the warm-up of that
        size must differ from it too. So must it after a change of the host's: else the change is
        the other way, whose effect may be as small as rounding."""
        warm, record = self.warm, self.graph.record
        issued = None if warm is None else warm.captured.get(record.mode)
        if warm is None or issued is None:
            return
        other = watching.first_difference(now.trace.overloads(), issued)
        is_own = self._same_size and not self.graph.changed
        if is_own or watching.first_difference(warm.trace.overloads(), issued):
            self._another_way = now.trace.at_source(other)

    def _judge_change(self, now: Trace) -> None:
        """Fail where eager runs issue other operators than the graph since a change of the host's,
        or give them other numbers or tensors. Equal results are then those of these inputs alone:
        `clamp(max=self.bound)` with another bound is equal wherever no value exceeds the lower one.

        What differs in a trial without a change as well does not count: lengths in metadata, and
        buffers that no operator makes. Before there was one only numbers count, in a graph of the
        warm-up's size whose host has no metadata. Else what differs is doubtful.
        """
        graph, verdict = self.graph, self._verdict
        if self.warm is None:
            return
        with_addresses = graph.varying is not None or not graph.changed
        ours, theirs = [
            each.captured(has_parts=self._has_parts).described(with_addresses=with_addresses)
            for each in (now, self.warm.trace)
        ]
        same = eq if self._same_size else watching.same_but_for_size
        others = dict(watching.differences(ours, theirs, same))
        if not graph.changed:
            verdict.varying = frozenset(others)
        elif not with_addresses and (self.step.has_metadata or not self._same_size):
            verdict.is_doubtful = bool(others)
        else:
            at = next((each for each in others if each not in (graph.varying or ())), None)
            if at is not None:
                self._fail(verdicts.CHANGED, ours.at_source((at, others[at])))

    def _guilty(self) -> str:
        """What the difference of a replay may come from: the first operator that this step does
        otherwise than the graph was captured with, else random numbers."""
        text, now = self._another_way, self._eager.watch.trace
        if not text and self.warm is not None:
            same = eq if self._same_size else watching.same_but_for_size
            text = now.at_source(watching.first_difference(now, self.warm.trace, same))
        if text:
            return f"\n    the first operator that is another one now is {text}"
        if not self._state.generators.have_drawn(self._eager.left.generators):
            return ""
        return (
            "\n    the forward draws random numbers: a graph draws torch's anew, and repeats those "
            "that Python and NumPy drew at its capture"
        )

    def _judge_padding(self, alone: Run) -> None:
        """Are live rows, and state, what they are without padding?"""
        eager, rounding = self._eager, self._rounding
        how = "live rows are not what they are without padding"
        if self._state.generators.have_drawn(eager.left.generators):
            how = "live rows are other ones where padding rows have changed"
            self._verdict.notes.append("draws random numbers: padding was changed, not left out")
        apart = difference(eager.outputs, alone.outputs, rounded=True)
        if apart is not None and apart.relative <= rounding:
            why = "by rounding" if rounding < float("inf") else "as in any two runs"
            self._verdict.notes.append(f"{how}, {why}: {apart.text}")
        elif apart is not None:
            trace = eager.watch.trace
            mixing = trace.at_source(trace.first_mixed(alone.watch.trace, rounding))
            first = mixing and f"\n    the first operator that mixes rows is {mixing}"
            self._fail(verdicts.ROWS_MIXED, apart.text + first, how=how, rounding=rounding)
        spoilt = self._state.memory.spoilt(
            eager.left.memory, alone.left.memory, self.step.pads, self.step.sizes, rounding
        )
        if spoilt is not None:
            use, text = spoilt
            how = "padding rows change state that later steps read"
            self._fail(verdicts.ROWS_MIXED, f"{text} of {use}", how=how, rounding=rounding)

    def _judge_python(self, again: Run, alone: Run) -> None:
        """Compare the Python values that eager parts leave with padding and without it: a failure
        where outputs depend on them, else a note."""
        if not self._has_parts or self._rounding == float("inf"):
            return
        python, padded = self._state.python, self._eager.left.python
        differing = python.diff(padded, alone.left.python)
        # Two equal runs differ in these too, such as in times and latencies.
        for path in python.diff(padded, again.left.python):
            differing.pop(path, None)
        if not differing:
            return
        self._state.restore()
        how = self._reaches(differing, alone.left.python)
        self._state.restore(again.left)
        if how is None:
            self._verdict.notes.append(
                f"padded steps leave other Python state, on which no output depends: "
                f"{', '.join(differing)}"[:300]
            )
            return
        got = (
            snapshot.described(differing, "{path} = {0}, not {1}")
            + f"; results differ in {how} then"
        )
        how = "padding rows change Python state that later steps depend on"
        self._fail(verdicts.PYTHON_MOVES, got, how=how)

    def _reaches(self, differing: snapshot.Changes, alone: Sequence[Any]) -> str | None:
        """Do the next steps differ if a padded step left its Python values, and not a step without
        padding? Returns how, or None."""
        padded, rounding = self._eager.left.python, self._rounding
        # Memory that only later runs write is left out of the comparison.
        count = len(self._state.memory.take())

        def steps(watch: Watch) -> list[Any]:
            runs = range(_STEPS_AFTER)
            return [(self.step.eager(watch), self._state.memory.take()[:count]) for _ in runs]

        numbers = {
            path: (theirs, ours)
            for path, (ours, theirs) in differing.items()
            # Floats that come of live rows are rounded otherwise without padding.
            if snapshot.step_of(theirs, ours) is not None
            and not _is_rounded(ours, theirs, rounding)
        }
        starts: list[_Start] = [(alone, _NONE), (padded, _NONE)]
        for far in _STEPS[1:] if numbers else ():
            on = {path: snapshot.further(*both, far) for path, both in numbers.items()}
            starts.append((padded, on))
        expected, *later = [self._extra_run("after a padded step", steps, each) for each in starts]
        for run in later:
            if run is not None and expected is not None:
                apart = difference(run.outputs, expected.outputs)
                if apart is not None and apart.relative > rounding:
                    return apart.text
        return None

    def _numbers(self, moved: snapshot.Changes) -> snapshot.Changes:
        """The numbers that a run has moved and that can be moved further, or that steps before this
        one have: what they were, and what they are."""
        both = {**moved, **self.graph.moved}
        paths = [slot.path for slot in self._state.python.numbers if slot.writable] if both else ()
        return {
            path: both[path]
            for path in paths
            if path in both and snapshot.step_of(*both[path]) is not None
        }

    def _judge_moved(self, moved: snapshot.Changes, numbers: snapshot.Changes) -> None:
        """Does the forward do something else later? The runs find its own Python values as later
        steps would: numbers that it moves (a counter) further on, lists and texts longer or empty.

        Where ranks try a step together, all of these runs are made.
        """
        for kind, changes, effect in self._moved_on(moved, numbers):
            if effect is not None:
                how = (
                    f"the forward moves a Python {kind} and does something else later; replays "
                    "repeat what it was at capture"
                )
                self._fail(
                    verdicts.PYTHON_MOVES,
                    f"{snapshot.described(changes)}; moved on, {effect}",
                    how=how,
                )
                if not self.step.together:
                    return
        self._verdict.harmless = tuple(numbers)

    def _moved_on(
        self, moved: snapshot.Changes, numbers: snapshot.Changes
    ) -> Iterator[tuple[str, snapshot.Changes, str | None]]:
        """For each run with later values: the kind of value, the changes, and their effect."""
        python, left = self._state.python, self._eager.left.python
        how = f"with {', '.join(numbers)} moved on"
        for steps in _STEPS if numbers else ():
            on = {path: snapshot.further(*both, steps) for path, both in numbers.items()}
            yield "number", numbers, self._effect(how, python.was, moved=on)
        values = {
            path: both
            for path, both in moved.items()
            if path not in numbers and not all(isinstance(each, torch.Tensor) for each in both)
        }
        if not values:
            return
        starts = [left]
        for _ in range(_NEXT_RUNS):
            yield "value", values, self._effect("run again", starts[-1], leaves=starts)
        later = python.much_later(left)
        if later is not None:
            yield "value", values, self._effect("much later", later)

    def _effect(
        self,
        how: str,
        start: Sequence[Any],
        *,
        moved: Mapping[str, Any] = _NONE,
        leaves: list[list[Any]] | None = None,
    ) -> str | None:
        """What the step does otherwise if it finds `start` in Python, with numbers `moved` on;
        None if nothing, or if it raises. What the run leaves in Python is added to `leaves`.

        Without `leaves` the values are made up, and the run may do harm. So it ends at the first
        operator that the first run did not issue; not among ranks, which would wait for it in the
        next collective.
        """
        follows = None if self.step.together or leaves is not None else self._eager.watch.trace
        found = start, moved
        run = self._extra_run(how, self.step.eager, found, follows=follows, compared=True)
        if run is None:
            return None
        if leaves is not None:
            leaves.append(run.left.python)
        effect = self._otherwise(run, how, found)
        first = run.watch.deviation and f", first {run.watch.deviation}"
        return effect and effect + first

    def _otherwise(self, run: Run, how: str, start: _Start) -> str | None:
        """What a run does otherwise than the first, and than a replay from its `start`."""
        eager, has_parts, together = self._eager, self._has_parts, self.step.together
        if isinstance(run.outputs, Deviation):
            # In an eager part: a replay runs that part too, so it deviates as well.
            return None if has_parts and run.outputs.in_part else "it does other things"
        # Replays run eager parts, with the same Python values and clocks: only segments count.
        is_same = run.watch.trace.same_captured(eager.watch.trace, has_parts=has_parts)
        if is_same and not together:
            return None
        # Rows of an index are saved anew in each run.
        apart = difference(run.outputs, eager.outputs) or difference(*_memory(run, eager))
        is_same |= apart is None and not _writes_elsewhere(run.watch, eager)
        if has_parts and (together or not is_same):
            # Tensors that they make anew may be elsewhere in each run.
            replayed = self._extra_run(how, lambda _: self.step.replay(), start)
            is_same |= replayed is None or _apart(replayed, run) is None
        if is_same:
            return None
        return "it writes other memory" if apart is None else f"the results differ in {apart.text}"


def _memory(*runs: Run) -> list[list[torch.Tensor]]:
    """For each run, the memory that it left, as far as all runs have it and none was freed."""
    left = zip(*[run.left.memory for run in runs], strict=False)
    kept = [each for each in left if len({tensor.shape for tensor in each}) == 1]
    return [[each[at] for each in kept] for at in range(len(runs))]


def _is_rounded(ours: Any, theirs: Any, rounding: float) -> bool:
    """Whether two numbers are floats that differ by such a `rounding` at most."""
    return isinstance(ours, float) and abs(ours - theirs) <= rounding * max(abs(ours), abs(theirs))


def _writes_elsewhere(watch: Watch, eager: Run) -> bool:
    """Whether a run has written memory that `eager` has not, and that is still there. Compiled code
    allocates past all operators, somewhere else in each run: that is gone."""
    elsewhere = watch.written().keys() - eager.watch.written().keys()
    return any(storage_of(watch.uses[key].ref) is not None for key in elsewhere)


def _apart(ours: Run, theirs: Run, *, rounded: bool = False) -> Difference | None:
    """The difference of two runs: of their outputs, and of the memory that they left."""
    now, before = _memory(ours, theirs)
    return difference([ours.outputs, now], [theirs.outputs, before], rounded=rounded)


def _asked_in(function: Callable[[], T]) -> tuple[T, bool]:
    """Call `function`; returns its result, and whether code called by it asked for gradients or
    inference mode, by which it may take another way. Under a profiler in C nobody can tell, so it
    counts as asked; one in Python is told of everything as before."""
    outer, asked = sys.getprofile(), False
    if not isinstance(outer, FunctionType | MethodType | None):
        return function(), True

    def look(frame: FrameType, event: str, called: Any) -> None:
        nonlocal asked
        if called is torch.is_grad_enabled or called is torch.is_inference_mode_enabled:
            name: str = frame.f_globals.get("__name__", "")
            asked |= name.partition(".")[0] not in _IGNORED_CALLERS
        if outer is not None:
            outer(frame, event, called)

    try:
        sys.setprofile(look)
        result = function()
    finally:
        sys.setprofile(outer)
    return result, asked
