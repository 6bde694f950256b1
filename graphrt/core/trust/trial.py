"""Trying a graph: one step by replay and several times eagerly, all from the same state.

1. `Trial._judge` makes the runs, the same in the same order whatever they give, so that several
   ranks that try a step at once wait for one another nowhere. After each the state is put back.
2. Each question about them is a method `_judge_...`; the words of its answer are in `verdict.py`.
3. The last run is eager, and what it has left remains: it is the step that the host asked for.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from itertools import starmap
from operator import attrgetter, eq, sub
from types import FrameType, FunctionType, MappingProxyType, MethodType
from typing import Any, NamedTuple, Protocol, TypeVar

import torch

from graphrt.core.base._undo import Undo, undoing
from graphrt.core.capture.options import GraphOptions
from graphrt.core.capture.refusals import Refusal
from graphrt.core.device.platform import Platform
from graphrt.core.trust.compare import Difference, difference, differs, rounding_of
from graphrt.core.trust.places.walk import Places
from graphrt.core.trust.snapshot import (
    Changes,
    Left,
    StateSnapshot,
    described,
    further,
    is_rounded,
    step_of,
)
from graphrt.core.trust.verdict import (
    CHANGED,
    CONSTANT,
    NOT_EAGER,
    NOT_REPEATED,
    NUMBER_MOVED,
    PYTHON_OF_PADDING,
    REBOUND,
    ROWS_MIXED,
    STATE_OF_PADDING,
    Verdict,
)
from graphrt.core.trust.watching.watch import (
    Deviation,
    Trace,
    Watch,
    differences,
    first_difference,
    same_but_for_size,
)
from graphrt.core.trust.watching.writes import still_there

T = TypeVar("T")

_SPREADS = 4
"""A replay may differ from eager by this many times the difference of two eager runs."""

_UNSTEADY = 64
"""The same factor where eager parts return other values at every call (a clock, fresh random
numbers): three runs of those may be close to one another by chance."""

_MOST_UNSTEADY = 5
"""Runs more of such parts, while the replay is further off than that: of three runs with one random
number each, some are this close (by arithmetic one trial of 4,000)."""

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

_IGNORED_CALLERS = ("torch", "graphrt")
"""Packages whose questions for the gradient mode are no branch of the forward: entering `no_grad`
asks too. Where torch's own layers branch on it, the results differ by rounding only."""


class TriedStep(Protocol):
    """One step that can be run again and again; each returns copies of the live outputs."""

    rows: int
    """Tokens of the graph."""
    live_rows: int
    sizes: Sequence[tuple[int, int]]
    """Padded and live tokens, and requests."""
    has_gradients: bool
    """Whether its caller has gradients on."""
    together: bool
    """Whether other ranks try the step too, on other values: then no run depends on results."""

    def eager(self, watch: Watch) -> Any:
        """The forward on the padded inputs, under `watch`."""

    def where_asked(self, watch: Watch, gradients: bool, inference: bool) -> Any:
        """`eager`, where torch reports `gradients` and `inference` mode as on or off: a forward may
        branch on them, and a graph has one branch."""

    def of_padding(self, watch: Watch) -> object:
        """The forward with nothing but padding rows, as in a warm-up."""

    def replay(self) -> Any:
        """The graph on the same inputs."""

    def unpadded(self, watch: Watch) -> Any:
        """The forward on the live rows alone; None where they are all."""

    def disturbed(self, watch: Watch) -> Any:
        """The forward, with padding rows of all inputs that address nothing holding live rows."""


class TriedGraph(NamedTuple):
    """The facts about a graph that its trial compares with."""

    name: str
    captured: Trace | None = None
    """The operators of the warm-up of its kind."""
    issued: Sequence[Any] | None = None
    """The operators of the capture after that warm-up."""
    same_size: bool = False
    """Whether that warm-up had the size of this graph."""
    has_parts: bool = False
    """Whether it may have eager parts."""
    moved: Changes | None = None
    """Python values that eager steps have changed since the capture: path -> (then, now)."""
    changed: str = ""
    """What the host has changed since, in words."""
    has_metadata: bool = False
    """Whether operators may be given numbers of a step's metadata."""
    varying: Collection[int] | None = None
    """See `Verdict`: that of the trials before; None: there was none without a change."""


class Run(NamedTuple):
    """One run: its live outputs, and what it has left."""

    outputs: Any
    left: Left
    watch: Watch


class Trial:
    """Tries one step of one graph, of a forward that holds `places`.

    `inputs` are the addresses of the storages of the step's inputs. `mixes_rows` says that live
    rows may depend on padding. `pads` are rows that only padding addresses, so padded and unpadded
    runs may leave different values there. With strict options a failed trial leaves no effects.
    """

    def __init__(
        self,
        step: TriedStep,
        graph: TriedGraph,
        places: Places,
        platform: Platform,
        options: GraphOptions,
        *,
        inputs: frozenset[int] = frozenset(),
        mixes_rows: bool = False,
        pads: Sequence[int] = (),
    ) -> None:
        self._step = step
        self._graph = graph
        # Whether an operator is the graph's; its warm-up may have had another size.
        self._same: Callable[[Any, Any], bool] = eq if graph.same_size else same_but_for_size
        self._platform = platform
        self._strict = options.strict
        # The rows that index writes save are saved anew in each run.
        limit_bytes = options.state_limit(platform) * _RUNS
        self._state = StateSnapshot(platform.device_type, limit_bytes, sums=False)
        self._state.reach(places)
        self._inputs = inputs
        self._mixes_rows = mixes_rows
        self._pads = pads
        self._verdict = Verdict()
        # How far apart results may be because of eager parts.
        self._unsteady = 0.0
        # In words, where the capture issued other operators than eager runs do.
        self._another_way = ""

    @undoing
    def run(self, undo: Undo, *, undone: bool = False) -> Verdict:
        """Run the trial; `undone`, its last run leaves no effects either. What a forward itself
        raises is raised, and what else goes wrong, with its state as it was."""
        undo.after_error(self._state.restore)
        self._judge()
        if undone or (self._strict and self._verdict.failure is not None):
            self._state.restore()
        return self._verdict

    def _judge(self) -> None:
        step, state, verdict = self._step, self._state, self._verdict
        rows = self._rows()
        first = self._watch(rows=rows, keeps_sources=True, compared=True)
        outputs, asked = _asked_in(partial(step.eager, first))
        eager, used = Run(outputs, state.take(), first), first.uses
        rebound = state.python.rebound(eager.left.python, used)
        state.restore()
        # A run of padding comes between: if the replay needed something that the eager run left in
        # memory that is not saved, it would find the padding's instead.
        step.of_padding(self._watch())
        state.restore()
        replayed = Run(step.replay(), state.take(), first)
        state.restore()
        alone, compared = (None, None) if rows is None else self._padding(eager, rows)
        dtypes = map(attrgetter("dtype"), used.values())
        rounding = rounding_of(dtypes, first.trace.overloads(), self._platform.float32_precision)
        verdict.asks = asked and self._depends_on_modes(eager, rounding)
        moved = state.python.changed(state.python.was, eager.left.python)
        numbers = self._numbers(moved)
        if numbers:
            self._judge_numbers(eager, numbers)
        if moved and not rebound:
            # Tensors that are rebound have a name for it already.
            self._judge_values(eager, moved, numbers)
        if compared is not None:
            self._judge_python(eager, replayed, compared, rounding)
        last = self._watch()
        again = Run(step.eager(last), state.take(), last)
        verdict.outputs = again.outputs
        self._judge_constants(first, last)
        if rebound:
            self._fail(REBOUND, ", ".join(rebound))
        self._note_another_way(first)
        spread = difference(again.outputs, eager.outputs)
        if self._graph.has_parts and (spread is not None or step.together):
            self._look_at_parts(eager, again, replayed, spread)
        rounding = max(rounding, self._unsteady)
        self._judge_replay(eager, again, replayed, spread, rounding, numbers)
        self._judge_change(first.trace)
        if compared is not None:
            self._judge_padding(eager, compared, rounding)
        self._leave_what_was_asked(alone)

    def _leave_what_was_asked(self, alone: Run | None) -> None:
        """Have the step end without padding, or as its caller's modes are, where that is another
        step than the last run was."""
        step, state, verdict = self._step, self._state, self._verdict
        if alone is not None and verdict.failure is not None:
            # The step as it is without graphs. Not run again: ranks whose trial passed would make
            # no such run, and a collective in it would wait for them.
            state.restore(alone.left)
            verdict.outputs = alone.outputs
        elif verdict.asks and step.has_gradients:
            state.restore()
            verdict.outputs = step.where_asked(
                self._watch(), True, torch.is_inference_mode_enabled()
            )

    # Runs ----------------------------------------------------------------------------------------

    def _watch(self, follows: Trace | None = None, *, compared: bool = False, **more: Any) -> Watch:
        return Watch(
            self._inputs,
            self._state.memory,
            follows,
            self._state.generators,
            reads_arrays=self._platform.device_type == "cpu",
            compared=compared,
            **more,
        )

    def _rows(self) -> tuple[int, int] | None:
        """All rows and the live ones, where they are to be compared with a run without padding."""
        rows, live_rows = self._step.rows, self._step.live_rows
        left = {*starmap(sub, ((rows, live_rows), *self._step.sizes))}
        return None if self._mixes_rows or left == {0} else (rows, live_rows)

    def _once(self, call: Callable[[Watch], Any], **more: Any) -> Run:
        """Make one run, and put the state back."""
        watch = self._watch(**more)
        run = Run(call(watch), self._state.take(), watch)
        self._state.restore()
        return run

    def _attempt(self, how: str, call: Callable[[], T]) -> T | None:
        """Make a run that only a trial makes: where it raises it is noted `how`, and no failure."""
        try:
            return call()
        except (MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            self._verdict.notes.append(f"{how}: {type(error).__name__}: {error}"[:300])
            return None
        finally:
            self._state.restore()

    def _padding(self, eager: Run, rows: tuple[int, int]) -> tuple[Run | None, Run | None]:
        """The step without padding, and what tells whether live rows, and state, depend on padding
        rows: the same, or, where fewer rows would draw other random numbers, the step with changed
        padding rows. No such run where those draw others too."""
        step, live_rows = self._step, rows[1]
        # It may be made for the sizes of graphs alone.
        alone = self._attempt(
            "does not run without padding",
            lambda: self._once(step.unpadded, rows=(live_rows, live_rows), compared=True),
        )
        if alone is None or alone.outputs is None:
            return None, None
        if not self._state.generators.have_drawn(eager.left.generators):
            return alone, alone
        disturbed = self._attempt(
            "with changed padding rows",
            lambda: self._once(step.disturbed, rows=rows, compared=True),
        )
        if disturbed is None:
            return alone, None
        drawn = eager.left.generators, disturbed.left.generators
        if self._state.generators.have_drawn(*drawn):
            self._verdict.notes.append(
                "how many random numbers it draws depends on their parameters (as in a Poisson "
                "distribution), so whether it mixes rows cannot be tried"
            )
            return alone, None
        return alone, disturbed

    def _depends_on_modes(self, eager: Run, rounding: float) -> bool:
        """Whether the forward does something else with gradients on (graphs have none) and with
        inference mode switched."""
        otherwise = not torch.is_inference_mode_enabled()
        # With the mode switched torch may refuse to change a tensor in place: that tells nothing.
        run = self._attempt(
            "with inference mode changed",
            lambda: self._once(lambda watch: self._step.where_asked(watch, True, otherwise)),
        )
        if run is None:
            return False
        return _differ(run, eager, rounding, rounded=True)

    def _look_at_parts(
        self, eager: Run, again: Run, replayed: Run, spread: Difference | None
    ) -> None:
        """Where two eager runs differ, by `spread`, find out whether that is because of eager parts
        alone, which read a clock at every replay too."""
        furthest = 0.0 if spread is None else spread.relative
        apart = difference(replayed.outputs, again.outputs)
        for _ in range(1 if self._step.together else _MOST_UNSTEADY):
            self._state.restore()
            run = self._once(self._step.eager, compared=True)
            self._state.restore(again.left)
            if not run.watch.trace.same_captured(eager.watch.trace, has_parts=True):
                return
            third = difference(run.outputs, eager.outputs)
            furthest = max(furthest, 0.0 if third is None else third.relative)
            if apart is None or apart.relative <= _UNSTEADY * furthest:
                break
        if spread is None:
            return
        self._unsteady = _UNSTEADY * furthest
        self._verdict.notes.append(
            f"eager parts give something else at every call, as a clock does: {spread.text}"
        )

    # Questions -----------------------------------------------------------------------------------

    def _fail(self, refusal: Refusal, got: str, **more: Any) -> None:
        """Note a failure; the first one counts. `more` is for its texts."""
        if self._graph.changed:
            got += f"\n    what the host has changed since the capture: {self._graph.changed}"
        failure = refusal(got, graph=self._graph.name, **more)
        self._verdict.failure = self._verdict.failure or failure

    def _judge_constants(self, first: Watch, last: Watch) -> None:
        """Does it make tensors of Python data that is other data now?"""
        graph = self._graph
        other_data = last.trace.first_other_data(first.trace, has_parts=graph.has_parts)
        if other_data is None and graph.captured is not None and graph.same_size:
            other_data = first.trace.first_other_data(graph.captured, has_parts=graph.has_parts)
        if other_data is not None:
            got, then = other_data
            self._fail(CONSTANT, got, then=then)

    def _judge_replay(
        self,
        eager: Run,
        again: Run,
        replayed: Run,
        spread: Difference | None,
        rounding: float,
        numbers: Changes,
    ) -> None:
        """Does the replay give and leave what eager runs do, as far as these repeat one another?
        Their outputs differ by `spread`."""
        results = again.outputs, replayed.outputs
        questions = [("", "differ", spread, results, max(rounding, 1e-6))]
        if eager.left.memory:
            before, two, replay = _memory(eager, again, replayed)
            where, apart = " in the state that it writes", difference(two, before)
            questions.append((where, "leave different state", apart, (two, replay), rounding))
        for where, how, spread, (two, replay), least in questions:
            if spread is not None and spread.relative > least:
                python = ", ".join(numbers) or "nothing that could be found"
                got = f"{spread.text}; Python state that moved: {python}"
                self._fail(NOT_REPEATED, got, how=how)
                continue
            if spread is not None:
                self._verdict.deterministic = False
                self._verdict.notes.append(f"not deterministic: eager runs {how} in {spread.text}")
            apart = difference(replay, two, rounded=bool(self._another_way))
            if apart is not None:
                self._compare(apart, spread, where, rounding, eager)

    def _compare(
        self,
        apart: Difference,
        spread: Difference | None,
        where: str,
        rounding: float,
        eager: Run,
    ) -> None:
        """Fail where the replay is not as near to eager as its operators let it be."""
        if spread is not None:
            allowed = max(_SPREADS * max(spread.relative, 1e-7), self._unsteady)
            if apart.relative <= allowed:
                return
        if self._another_way and apart.relative <= rounding:
            self._verdict.notes.append(
                f"the replay differs by rounding{where} ({apart.text}): the forward takes another "
                f"way while it is captured, first {self._another_way}"
            )
            return
        since = ""
        guilty = self._guilty(eager.watch)
        if not guilty and self._state.generators.have_drawn(eager.left.generators):
            since = (
                "\n    the forward draws random numbers: a graph draws torch's anew, and repeats "
                "those that Python and NumPy drew at its capture"
            )
        if self._graph.moved:
            moved = described(self._graph.moved)
            since += f"\n    Python values that eager steps have moved: {moved}"
        self._fail(
            NOT_EAGER,
            f"{apart.text}{guilty}{since}",
            where=where,
            allowed="equal bits" if self._verdict.deterministic else "the spread of eager runs",
        )

    def _note_another_way(self, now: Watch) -> None:
        """Find the first operator that the capture issued otherwise than eager runs do. The capture
        may have had another size, and other operators for that alone; so then the warm-up of that
        size must differ from it too. So must it after a change of the host's: else the change is
        the other way, whose effect may be as small as rounding."""
        graph = self._graph
        if graph.issued is None:
            return
        other = first_difference(now.trace.overloads(), graph.issued)
        is_own = graph.same_size and not graph.changed
        if is_own or first_difference((graph.captured or Trace()).overloads(), graph.issued):
            self._another_way = now.trace.at_source(other)

    def _judge_change(self, now: Trace) -> None:
        """Fail where eager runs issue other operators than the graph since a change of the host's,
        or give them other numbers or tensors. Equal results are then those of these inputs alone:
        `clamp(max=self.bound)` with another bound is equal wherever no value exceeds the lower one.

        What differs in a trial without a change as well does not count: lengths in metadata, and
        buffers that no operator makes. Before there was one only numbers count, in a graph of the
        warm-up's size whose host has no metadata. Else what differs is doubtful.
        """
        graph, verdict = self._graph, self._verdict
        if graph.captured is None:
            return
        with_addresses = graph.varying is not None or not graph.changed
        ours, theirs = [
            each.captured(has_parts=graph.has_parts).described(with_addresses=with_addresses)
            for each in (now, graph.captured)
        ]
        others = dict(differences(ours, theirs, self._same))
        if not graph.changed:
            verdict.varying = frozenset(others)
        elif not with_addresses and (graph.has_metadata or not graph.same_size):
            verdict.is_doubtful = bool(others)
        else:
            at = next((each for each in others if each not in (graph.varying or ())), None)
            if at is not None:
                self._fail(CHANGED, ours.at_source((at, others[at])))

    def _guilty(self, now: Watch) -> str:
        """The first operator that this step does otherwise than the graph was captured with."""
        graph, text = self._graph, self._another_way
        if not text and graph.captured:
            other = first_difference(now.trace, graph.captured, self._same)
            text = now.trace.at_source(other)
        return text and f"\n    the first operator that is another one now is {text}"

    def _judge_padding(self, eager: Run, alone: Run, rounding: float) -> None:
        """Are live rows, and state, what they are without padding?"""
        how = "live rows are not what they are without padding"
        if self._state.generators.have_drawn(eager.left.generators):
            how = "live rows are other ones where padding rows have changed"
            self._verdict.notes.append("draws random numbers: padding was changed, not left out")
        apart = difference(eager.outputs, alone.outputs, rounded=True)
        if apart is not None and apart.relative <= rounding:
            self._verdict.notes.append(f"{how}, by rounding: {apart.text}")
        elif apart is not None:
            trace = eager.watch.trace
            mixing = trace.at_source(trace.first_mixed(alone.watch.trace, rounding))
            first = mixing and f"\n    the first operator that mixes rows is {mixing}"
            self._fail(ROWS_MIXED, apart.text + first, how=how, rounding=rounding)
        spoilt = self._state.memory.spoilt(
            eager.left.memory, alone.left.memory, self._pads, self._step.sizes, rounding
        )
        if spoilt is not None:
            use, text = spoilt
            self._fail(STATE_OF_PADDING, f"{text} of {use}")

    def _judge_python(self, eager: Run, replayed: Run, alone: Run, rounding: float) -> None:
        """Compare the Python values that eager parts leave with padding and without it: a failure
        where outputs depend on them, else a note."""
        if not self._graph.has_parts:
            return
        python, padded = self._state.python, eager.left.python
        # What captured parts move no replay does: it leaves that as it was.
        captured = set(python.diff(replayed.left.python, padded))
        captured -= set(python.diff(replayed.left.python, python.was))
        apart = python.diff(padded, alone.left.python)
        differing = {path: both for path, both in apart.items() if path not in captured}
        for _ in range(2 if differing else 0):
            # Times and latencies, say, are others without padding too, and may be equal by chance.
            repeated = self._once(self._step.eager)
            for path in python.diff(padded, repeated.left.python):
                differing.pop(path, None)
            if not differing or differs(repeated.outputs, eager.outputs, rounding):
                return
        how = self._reaches(differing, padded, alone.left.python, rounding) if differing else None
        if how is not None:
            got = f"{described(differing, '{path} = {0}, not {1}')}; from there {how}"
            self._fail(PYTHON_OF_PADDING, got)
            return
        if differing:
            self._verdict.notes.append(
                f"padded steps leave other Python state, on which no output depends: "
                f"{', '.join(differing)}"[:300]
            )

    def _reaches(
        self, differing: Changes, padded: Sequence[Any], alone: Sequence[Any], rounding: float
    ) -> str | None:
        """How outputs of this step differ where it starts from what a padded step has left, and not
        from what one without padding has; None if they do not."""
        # Memory that only later runs write is left out of the comparison.
        count = len(self._state.memory.take())
        expected, raised = self._steps_from(alone, count)
        if raised is not None:
            return None
        numbers = {
            path: (theirs, ours)
            for path, (ours, theirs) in differing.items()
            # Floats that come of live rows are rounded otherwise without padding.
            if step_of(theirs, ours) is not None and not is_rounded(ours, theirs, rounding)
        }
        for steps in (0, *_STEPS[1:]):
            moved = {path: further(*both, steps) for path, both in numbers.items()}
            got, raised = self._steps_from(padded, count, moved if steps else _NONE)
            if raised is not None:
                if steps:
                    # An index out of range, say: it says nothing about other steps.
                    continue
                return f"it raises {raised}"
            apart = difference(got, expected)
            if apart is not None and apart.relative > rounding:
                return f"the results differ in {apart.text}"
        return None

    def _steps_from(
        self, start: Sequence[Any], count: int, numbers: Mapping[str, Any] = _NONE
    ) -> tuple[list[Any], str | None]:
        """The outputs of a few steps, one after the other, where the first finds `start` in Python,
        with other `numbers`, and the first `count` pieces of memory that they write; or what they
        raise."""
        runs: list[Any] = []
        self._state.python.begin(start, numbers)
        try:
            for _ in range(_STEPS_AFTER):
                runs.append(self._step.eager(self._watch()))
                runs.append(self._state.memory.take()[:count])
            return runs, None
        except (MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            return runs, f"{type(error).__name__}: {error}"[:200]
        finally:
            self._state.restore()

    def _numbers(self, moved: Changes) -> Changes:
        """The numbers that a run has moved and that can be moved further, or that steps before this
        one have: what they were, and what they are."""
        python, earlier = self._state.python, self._graph.moved or {}
        if not moved and not earlier:
            return {}
        both = dict(moved)
        for slot, now in zip(python.slots, python.was, strict=True):
            if slot.path in earlier:
                both[slot.path] = earlier[slot.path][0], now
        paths = [slot.path for slot in python.numbers if slot.writable]
        return {
            path: both[path] for path in paths if path in both and step_of(*both[path]) is not None
        }

    def _judge_numbers(self, eager: Run, numbers: Changes) -> None:
        """Does it do something else when the numbers that it moves have moved on?"""
        effect = self._depends_on(numbers, eager)
        if effect is None:
            self._verdict.harmless = tuple(numbers)
            return
        is_one_of_many = len(numbers) > 1 and not self._step.together
        for path, both in numbers.items() if is_one_of_many else ():
            alone = self._depends_on({path: both}, eager)
            if alone is not None:
                numbers, effect = {path: both}, alone
                break
        got = f"{described(numbers)}; moved on, {effect}"
        self._fail(NUMBER_MOVED, got, kind="number")

    def _judge_values(self, eager: Run, moved: Changes, numbers: Changes) -> None:
        """Does it do something else in one of the next runs, or when lists and texts that it moves
        are much longer, or empty?"""
        left, failed = eager.left.python, self._verdict.failure is not None
        moved = {
            path: both
            for path, both in moved.items()
            if path not in numbers and not all(isinstance(each, torch.Tensor) for each in both)
        }
        if not moved or (failed and not self._step.together):
            return
        starts = [left]

        def runs() -> Iterator[str | None]:
            for _ in range(_NEXT_RUNS):
                watch = self._watch(compared=True)
                yield self._effect("run again", starts[-1], watch, eager, note=starts.append)
            later = self._state.python.much_later(left)
            if later is not None:
                yield self._effect("much later", later, self._follow(eager), eager)

        effect = self._first(runs())
        if effect is not None:
            self._fail(NUMBER_MOVED, f"{described(moved)}; moved on, {effect}", kind="value")

    def _depends_on(self, numbers: Changes, eager: Run) -> str | None:
        """What is another result, or another operator, when `numbers` have moved on."""
        was, how = self._state.python.was, f"with {', '.join(numbers)} moved on"
        starts = [
            {path: further(*both, steps) for path, both in numbers.items()} for steps in _STEPS
        ]
        return self._first(
            self._effect(how, was, self._follow(eager), eager, moved=each) for each in starts
        )

    def _first(self, effects: Iterator[str | None]) -> str | None:
        """The first effect. Where ranks try a step together all of the runs are made."""
        first = next(filter(None, effects), None)
        for _ in effects if self._step.together else ():
            pass
        return first

    def _follow(self, eager: Run) -> Watch:
        """A watch that ends a run at the first operator that `eager` did not issue. Where other
        ranks run too it ends none: they would wait for it in the next collective."""
        follows = None if self._step.together else eager.watch.trace
        return self._watch(follows, compared=True)

    def _effect(
        self,
        how: str,
        start: Sequence[Any],
        watch: Watch,
        eager: Run,
        *,
        moved: Mapping[str, Any] = _NONE,
        note: Callable[[list[Any]], object] = lambda _: None,
    ) -> str | None:
        """What is otherwise where the step finds `start` in Python, with numbers that have `moved`;
        `note` is given what the run has left there. None where nothing is, or it raises."""
        begin = partial(self._state.python.begin, start, moved)
        effect = self._attempt(how, lambda: self._from(begin, watch, eager, note))
        return effect and effect + (f", first {watch.deviation}" if watch.deviation else "")

    def _from(
        self,
        begin: Callable[[], None],
        watch: Watch,
        eager: Run,
        note: Callable[[list[Any]], object],
    ) -> str | None:
        python, memory = self._state.python, self._state.memory
        try:
            begin()
            result = self._step.eager(watch)
        except Deviation as deviation:
            # What an eager part would do it does at the replay too.
            part = self._graph.has_parts and deviation.in_part
            return None if part else "it does other things"
        note(python.take())
        together = self._step.together
        # Eager parts go by what is in Python, and by clocks, at the replay too.
        is_same = watch.trace.same_captured(eager.watch.trace, has_parts=self._graph.has_parts)
        if is_same and not together:
            return None
        left, then = memory.take(), eager.left.memory
        apart = difference(result, eager.outputs)
        # Rows of an index are saved anew in each run.
        apart = apart or difference(*still_there(left[: len(then)], then))
        is_same |= apart is None and not _writes_elsewhere(watch, eager)
        if self._graph.has_parts and (together or not is_same):
            # Tensors that they make anew may be elsewhere in each run.
            self._state.restore()
            begin()
            replayed = difference(self._step.replay(), result)
            is_same |= (replayed or difference(memory.take()[: len(left)], left)) is None
        if is_same:
            return None
        return "it writes other memory" if apart is None else f"the results differ in {apart.text}"


def _memory(*runs: Run) -> list[list[torch.Tensor]]:
    """What several runs have left in memory that each of them has written, or found written."""
    count = min([len(run.left.memory) for run in runs])
    return still_there(*[run.left.memory[:count] for run in runs])


def _writes_elsewhere(watch: Watch, eager: Run) -> bool:
    """Whether a run has written memory that `eager` has not, and that is still there. Compiled code
    allocates past all operators, somewhere else in each run: that is gone."""
    elsewhere = watch.written().keys() - eager.watch.written().keys()
    return any(watch.uses[key].storage() is not None for key in elsewhere)


def _differ(ours: Run, theirs: Run, rounding: float, *, rounded: bool = False) -> bool:
    """Whether two runs have given something else, or left something else in memory."""
    now, before = _memory(ours, theirs)
    return differs([ours.outputs, now], [theirs.outputs, before], rounding, rounded=rounded)


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
