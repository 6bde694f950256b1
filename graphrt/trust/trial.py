"""Tries a graph: runs a step by replay and several times eagerly, each time from the same state,
and compares what the runs return and leave.

1. `Trial._judge` makes the runs, and puts the state back after each. Ranks that try a step together
   make the same runs in the same order, whatever these give: else one would wait for ever in a
   collective of a run that another does not make.
2. Each question about the runs is a method `_judge_...`; `verdict.py` has the errors.
3. One eager run is made last, and its effects stay: it is the step that the host asked for.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter, eq
from types import FrameType, FunctionType, MappingProxyType, MethodType
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar

import torch

from graphrt.core.base._undo import Undo, undoing
from graphrt.core.base.errors import BreakError
from graphrt.core.base.texts import error_line
from graphrt.core.base.thread_mode import unseen
from graphrt.core.base.torch_names import untraced
from graphrt.core.batch.modes import GraphMode
from graphrt.core.capture.options import GraphOptions
from graphrt.core.capture.refusals import Refusal
from graphrt.core.capture.state import State
from graphrt.core.device.platform import Platform
from graphrt.trust import snapshot
from graphrt.trust import verdict as verdicts
from graphrt.trust.compare import Difference, difference, rounding_of
from graphrt.trust.host_watch import described_changes
from graphrt.trust.reads import ReadSet
from graphrt.trust.warm_up import WarmedUp
from graphrt.trust.watching import watch as watching
from graphrt.trust.watching.padding import IndexValues, PaddingRow, PaddingRows
from graphrt.trust.watching.rows import draws
from graphrt.trust.watching.watch import Deviation, Trace, Use, Watch
from graphrt.trust.watching.writes import storage_of

T = TypeVar("T")

_SPREADS = 4
"""A replay may differ from eager by this many times the difference of two eager runs."""

_RUNS = 8
"""How many runs a trial has at most, as a rule. Each saves the rows that its index writes touch, so
together they may take as many times the limit."""

_STEPS_AFTER = 4
"""How many steps are run after a padded one, to see whether an output depends on what it left in
Python: a value may take several steps to reach one."""

_NEXT_RUNS = 3
"""How many runs in a row each begin with the Python state that the run before left: a list may be
emptied at every third run."""

_MULTIPLES = (1, 999_983, -999_983)
"""How far a Python number that a run changes is moved on: by so many times that change."""

_NO_NUMBERS: Mapping[str, Any] = MappingProxyType({})

_Start: TypeAlias = tuple[Sequence[Any], Mapping[str, Any]]
"""The Python state in which a run begins: values that another run left, and, by path, numbers that
are put in place of some of them."""

_IGNORED_CALLERS = ("torch", "graphrt")
"""Packages that may ask for the gradient mode without a branch of the forward, as `no_grad` does
when it is entered. Where torch's own layers branch on the mode, results differ by rounding only."""


Rows = Literal["padded", "padding", "disturbed", "alone"]
"""Which rows an eager run has. "padded": live rows and padding, as the graph has. "padding":
padding alone, as a warm-up has. "disturbed": as "padded", but padding rows hold values of live
rows, except in inputs whose padding is an address. "alone": live rows without padding."""


class TriedStep:
    """A step that a trial runs several times, for a runner (`StepRuns`) or a wrapper
    (`WrapperStep`). Each run returns copies of the live outputs."""

    inputs: frozenset[int] = frozenset()
    """The addresses of the storages of its inputs."""
    sizes: Sequence[tuple[int, int]] = ()
    """(padded, live) of tokens, then of requests. Empty if there is no padding, or if the host says
    that live rows may depend on it."""
    unused_rows: Sequence[int] = ()
    """Rows of state that only padding addresses: there runs with and without padding may differ."""
    has_gradients = False
    """Whether its caller has gradients on."""
    has_metadata = False
    """Whether the host has metadata for its steps: numbers of it may be arguments of operators."""
    is_padded = False
    """Whether its graph has more rows than it has live ones."""
    padding = PaddingRows()
    """The rows that padding writes."""
    index_values: IndexValues = MappingProxyType({})
    """The values of its index inputs."""
    declared: Iterable[State | torch.Tensor] = ()
    """State of the host's, which is put back around each run too."""
    is_served = True
    """Whether its live rows are a host's, not an example's, which address scratch memory."""
    together = False
    """Whether other ranks try their part of the step now. Results differ from rank to rank, so
    which runs are made must not depend on them."""

    def eager(self, watch: Watch, rows: Rows = "padded") -> Any:
        """Run the forward under `watch`, on these `rows`."""
        raise NotImplementedError

    def with_gradients(self, watch: Watch, inference: bool) -> Any:
        """`eager`, with torch reporting that gradients are on, and inference mode as `inference`
        says: a forward may branch on either, and a graph has one branch."""
        return self.eager(watch)

    def replay(self) -> Any:
        """Replay the graph on the padded inputs."""
        raise NotImplementedError


class Run(NamedTuple):
    """One run of a step: its live outputs, the state that it left, and the watch that saw it (a
    replay has that of the first eager run)."""

    outputs: Any
    left: snapshot.Left
    watch: Watch


@dataclass
class Trial:
    """One trial of one graph. It compares runs of one step with one another, and with the operators
    that the warm-up of the kind issued. With strict options a failed trial leaves no effects.
    """

    step: TriedStep
    graph: verdicts.TriedGraph
    warm: WarmedUp | None
    platform: Platform
    options: GraphOptions
    reads: ReadSet
    """What graphs use, and where the forward has it."""

    def __post_init__(self) -> None:
        record, warm, platform = self.graph.record, self.warm, self.platform
        # Whether the graph may have eager parts, which a replay runs again.
        self._has_parts = record.mode is GraphMode.PIECEWISE
        # Whether the warm-up had the size of this graph.
        self._same_size = warm is not None and warm.tokens == record.descriptor.num_tokens
        # Rows that index writes touch are saved anew in each run, all in one snapshot.
        limit_bytes = self.options.state_limit(platform) * _RUNS
        self._padding = self.step.padding
        self._padding.begin()
        regions = [row.region for row in self._padding.rows]
        self._state = snapshot.StateSnapshot(
            platform.device_type, limit_bytes, self.step.declared, sums=False, padding=regions
        )
        self._state.reach(self.reads.places())
        self._verdict = verdicts.Verdict()
        # The first operator that the capture has and eager runs do not, as text; "" without one.
        self._another_way = ""
        # `_judge` adds `_eager`, its first run, and `_rounding`: how far results of other kernels
        # may differ, over the root mean square.

    @undoing
    def run(self, undo: Undo, *, undone: bool = False) -> verdicts.Verdict:
        """Run the trial; if `undone`, its last run leaves no effects either. After an error, of the
        forward or of anything else, the state is as before the trial."""
        undo.after_error(self._state.restore)
        self._judge()
        if undone or (self.options.strict and self._verdict.failure is not None):
            self._state.restore()
        stays = not undone and self._verdict.failure is None
        self._padding.end(padded=self.step.is_padded, stays=stays)
        return self._verdict

    @undoing
    def look_at_padding(self, undo: Undo) -> None:
        """Find out whether an eager step of live rows alone uses rows that padding writes. All is
        put back."""
        undo.after_error(self._state.restore)
        alone = self._extra_run("alone", self.step.eager, compared=True)
        if alone is not None:
            dtypes = map(attrgetter("dtype"), alone.watch.uses.values())
            operators, precision = alone.watch.trace.overloads(), self.platform.float32_precision
            self._rounding = rounding_of(dtypes, operators, precision)
            self._judge_live_rows(alone, alone)
        self._padding.end(padded=False)

    def _judge(self) -> None:
        step, state, verdict = self.step, self._state, self._verdict
        # Padded and live tokens; None if no run can differ in padding.
        rows = step.sizes[0] if step.sizes else None
        first_watch = self._watch(rows=rows, keeps_sources=True, compared=True)
        outputs, asks_modes = _asks_modes(partial(step.eager, first_watch))
        used = first_watch.uses
        self._judge_scratch(used)
        eager = Run(outputs, state.take(), first_watch)
        self._eager = eager
        rebound = state.python.rebound(eager.left.python, used)
        state.restore()
        # Between the eager run and the replay, a run of padding. If the replay reads memory that is
        # not saved, it finds padding's values there, not those of the eager run, and differs.
        # It goes on with the random numbers: a forward that seeds a generator does not.
        state.generators.restore(eager.left.generators)
        step.eager(self._watch(), "padding")
        later = state.generators.take()
        state.restore()
        try:
            replayed = Run(step.replay(), state.take(), first_watch)
        except BreakError as error:
            if step.together or not error.by_part:
                raise
            state.restore()
            verdict.failure = error
            verdict.outputs = step.eager(self._watch())
            return
        state.restore()
        # Else another thread has drawn meanwhile, as one that samples does.
        if any(draws(func) for func in first_watch.trace.overloads()):
            ends = eager.left.generators, replayed.left.generators
            suspected = state.generators.are_reset(*ends, later)
            if suspected or step.together:
                self._judge_seeds(suspected)
        unpadded, other_padding = (None, None) if rows is None else self._padding_runs(rows)
        dtypes = map(attrgetter("dtype"), used.values())
        precision = self.platform.float32_precision
        self._rounding = rounding_of(dtypes, first_watch.trace.overloads(), precision)
        verdict.asks = asks_modes and self._depends_on_modes()
        moved = state.python.changed(state.python.was, eager.left.python)
        numbers = self._movable_numbers(moved)
        # A replaced tensor fails as `REBOUND` below.
        if moved or numbers:
            self._judge_moved({} if rebound else moved, numbers)
        without_padding = None if step.is_padded else eager
        self._judge_live_rows(without_padding if rows is None else unpadded, eager)
        last_watch = self._watch()
        # The step that the host asked for: its effects stay.
        again = Run(step.eager(last_watch), state.take(), last_watch)
        verdict.outputs = again.outputs
        self._judge_runs(again, replayed, rebound)
        if other_padding is not None:
            self._judge_python(again, other_padding)
            self._judge_padding(other_padding)
        self._leave_asked_step(unpadded)

    def _judge_runs(self, again: Run, replayed: Run, rebound: Collection[str]) -> None:
        """Compare the replay with the first eager run and the last one, `again`. `rebound` are
        paths where eager runs put another tensor."""
        eager, watch = self._eager, self._eager.watch
        self._judge_constants(watch, again.watch)
        if rebound:
            self._fail(verdicts.REBOUND, ", ".join(rebound))
        self._note_another_way(watch)
        spread = difference(again.outputs, eager.outputs)
        self._rounding = max(self._rounding, 1e-6)
        # Ranks that try together all make this run: on some of them the two runs may be equal.
        if self._has_parts and (spread is not None or self.step.together):
            self._look_for_clocks(again, spread)
        self._judge_replay("", "differ", spread, again.outputs, replayed.outputs)
        if eager.left.memory:
            before, after, by_replay = _memory(eager, again, replayed)
            where, how = " in the state that it writes", "leave different state"
            self._judge_replay(where, how, difference(after, before), after, by_replay)
        self._judge_change(watch.trace)

    def _leave_asked_step(self, unpadded: Run | None) -> None:
        """Leave the effects of the step that the host asked for. After a failure that is the run
        without padding; if results depend on gradient modes, a run under the caller's."""
        step, state, verdict = self.step, self._state, self._verdict
        if unpadded is not None and verdict.failure is not None:
            # That run is not made again: ranks whose trial passed would make no such run, and a
            # collective in it would wait for them.
            state.restore(unpadded.left)
            verdict.outputs = unpadded.outputs
        elif verdict.asks and step.has_gradients:
            state.restore()
            inference = torch.is_inference_mode_enabled()
            verdict.outputs = step.with_gradients(self._watch(), inference)

    # Runs ----------------------------------------------------------------------------------------

    def _watch(self, *, compared: bool = False, **options: Any) -> Watch:
        """A watch for one run of the step, which saves what the run is about to write."""
        memory, generators = self._state.memory, self._state.generators
        options |= {"compared": compared, "reads_arrays": self.platform.device_type == "cpu"}
        return Watch(self.step.inputs, memory, generators=generators, **options)

    def _extra_run(
        self, how: str, call: Callable[[Watch], Any], start: _Start | None = None, **watch: Any
    ) -> Run | None:
        """Make a run for comparison, with the Python state `start`, and put the state back.

        An error is no failure of the graph: it is noted, after `how`, and None is returned. A run
        that deviates from the trace that it `follows` has the `Deviation` as outputs."""
        run_watch = self._watch(**watch)
        try:
            if start is not None:
                self._state.python.begin(*start)
            try:
                outputs = call(run_watch)
            except Deviation as deviation:
                outputs = deviation
            return Run(outputs, self._state.take(), run_watch)
        except (MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            self._verdict.notes.append(f"{how}: {error_line(error)}"[:300])
            return None
        finally:
            self._state.restore()

    def _padding_runs(self, rows: tuple[int, int]) -> tuple[Run | None, Run | None]:
        """The run without padding, and the run to compare live rows with, whose padding differs.

        Both are one run, unless the step draws random numbers: a run with fewer rows draws others.
        Then the second has changed padding rows; it is None if it draws other numbers all the same.
        """
        run, live = self.step.eager, (rows[1], rows[1])
        generators, drawn = self._state.generators, self._eager.left.generators
        # A forward that runs at the sizes of graphs alone raises here.
        how = "does not run without padding"
        unpadded = self._extra_run(how, partial(run, rows="alone"), rows=live, compared=True)
        if unpadded is None or not generators.have_drawn(drawn):
            return unpadded, unpadded
        how = "with changed padding rows"
        disturbed = self._extra_run(how, partial(run, rows="disturbed"), rows=rows, compared=True)
        if disturbed is not None and generators.have_drawn(drawn, disturbed.left.generators):
            self._verdict.notes.append(
                "how many random numbers it draws depends on their parameters (as in a Poisson "
                "distribution), so whether it mixes rows cannot be tried"
            )
            return unpadded, None
        return unpadded, disturbed

    def _depends_on_modes(self) -> bool:
        """Whether the forward does something else with gradients on (graphs have none) and with
        inference mode switched."""
        switched = not torch.is_inference_mode_enabled()
        call = partial(self.step.with_gradients, inference=switched)
        # With inference mode switched torch may refuse to change a tensor in place: no answer.
        run = self._extra_run("with inference mode changed", call)
        apart = None if run is None else _run_difference(run, self._eager, rounded=True)
        return apart is not None and apart.relative > self._rounding

    def _look_for_clocks(self, again: Run, spread: Difference | None) -> None:
        """Let replays differ by anything (`_rounding` is infinite) if eager runs differ, by more
        than rounding, through eager parts alone: such a part reads a clock at every replay too."""
        self._state.restore()
        third = self._extra_run("once more", self.step.eager, compared=True)
        self._state.restore(again.left)
        if third is None or spread is None:
            return
        # Two random draws may be near one another by chance: the third run decides then.
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

    def _fail(self, refusal: Refusal, got: str, **words: Any) -> None:
        """Note a failure; the first one counts. `words` are for its text."""
        graph, record = self.graph, self.graph.record
        for who, changes in (("the host has", graph.changed), ("eager steps have", graph.moved)):
            if changes:
                text = described_changes(changes)
                got += f"\n    what {who} changed since the capture: {text}"
        failure = refusal(got, graph=f"{record.mode.name} [{record.descriptor}]", **words)
        self._verdict.failure = self._verdict.failure or failure

    def _judge_scratch(self, used: Mapping[int, Use]) -> None:
        """Does this graph read values from before the step in memory that is scratch elsewhere?

        After a change eager runs may have other scratch memory than the graph: a long prompt may
        have made a larger buffer. What they leave there is not compared: the graph fills its own.
        """
        graph = self.graph
        for path, key in graph.replaced.items():
            use = used.get(key)
            if use is not None and not use.is_scratch:
                self._fail(verdicts.CHANGED, f"{path} was replaced, and is read: {use}")
        if graph.changed or graph.moved or graph.has_other_scratch:
            scratch = {key for key, use in used.items() if use.is_scratch}
            self._verdict.scratch = frozenset(scratch - {*self.reads.held})
            self._state.memory.leave_out(self._verdict.scratch)

    def _judge_constants(self, first: Watch, last: Watch) -> None:
        """Does the forward make a tensor of Python data that is other data now?"""
        has_parts = self._has_parts
        other_data = last.trace.first_other_data(first.trace, has_parts=has_parts)
        if other_data is None and self.warm is not None and self._same_size:
            other_data = first.trace.first_other_data(self.warm.trace, has_parts=has_parts)
        if other_data is not None:
            got, then = other_data
            self._fail(verdicts.CONSTANT, got, then=then)

    def _judge_seeds(self, suspected: bool) -> None:
        """Does the forward, if it is suspected, seed a generator of torch's outside of eager parts?
        From random numbers further on a replay then draws others than an eager run, or leaves
        another state."""
        generators, left = self._state.generators, self._eager.left.generators

        def run(start: Sequence[Any], call: Callable[[Watch], Any]) -> Run | None:
            generators.restore(start)
            return self._extra_run("with later random numbers", call)

        # A thread that draws beside it moves the generator in some of five eager runs too: then the
        # forward seeds nothing. Ranks that try together all make one round, or a collective waits.
        for _ in range(1 if self.step.together else 5):
            eager, replayed = run(left, self.step.eager), run(left, lambda _: self.step.replay())
            later = None if eager is None else run(eager.left.generators, self.step.eager)
            if eager is None or replayed is None or later is None or not suspected:
                return
            ends = eager.left.generators, replayed.left.generators
            if not generators.have_drawn(*ends) and _run_difference(replayed, eager) is None:
                return
            if not generators.are_reset(*ends, later.left.generators, since=left):
                return
        self._fail(verdicts.SEEDED, "a generator's state that the forward sets itself")

    def _judge_replay(
        self, where: str, how: str, spread: Difference | None, again: Any, replay: Any
    ) -> None:
        """Does the replay return (or leave) what an eager run does, in `replay` and `again`? It may
        differ about as much as two eager runs do, `spread`. `where` and `how` are for texts."""
        rounding = self._rounding
        if spread is not None and spread.relative > rounding:
            self._fail(verdicts.NOT_REPEATED, spread.text, how=how)
            return
        if spread is not None:
            self._verdict.deterministic = False
            self._verdict.notes.append(f"not deterministic: eager runs {how} in {spread.text}")
        apart = difference(replay, again, rounded=bool(self._another_way))
        allowed = 0.0 if spread is None else _SPREADS * max(spread.relative, 1e-7)
        # Without a spread bits must be equal: 0.0 and -0.0 have a difference of 0, and fail.
        if apart is None or rounding == float("inf") or (spread and apart.relative <= allowed):
            return
        if self._another_way and apart.relative <= rounding:
            self._verdict.notes.append(
                f"the replay differs by rounding{where} ({apart.text}): the forward takes another "
                f"way while it is captured, first {self._another_way}"
            )
            return
        self._fail(verdicts.NOT_EAGER, apart.text + self._likely_cause(), where=where)

    def _note_another_way(self, now: Watch) -> None:
        """Note the first operator of the capture that eager runs do not issue: the forward takes
        another way under captures, so rounding is allowed. If the capture had another size, or came
        before a change of the host's, its warm-up has to differ from it too: else the size or the
        change may be the cause, and a change may have an effect as small as rounding."""
        warm, record = self.warm, self.graph.record
        captured_operators = None if warm is None else warm.captured.get(record.mode)
        if warm is None or captured_operators is None:
            return
        first = watching.first_difference(now.trace.overloads(), captured_operators)
        is_comparable = self._same_size and not self.graph.changed
        if is_comparable or watching.first_difference(warm.trace.overloads(), captured_operators):
            self._another_way = now.trace.at_source(first)

    @property
    def result(self) -> Any:
        """That of the first eager run."""
        return self._eager.outputs

    def scratch_spans(self) -> list[tuple[int, int]]:
        """`Watch.scratch_spans` of the first eager run."""
        return self._eager.watch.scratch_spans(self.result)

    def _judge_change(self, now: Trace) -> None:
        """After a change of the host's, fail if eager runs issue other operators than the graph, or
        give them other numbers or tensors. Equal results of one step prove nothing then: with
        another bound `clamp(max=self.bound)` is equal wherever no value exceeds the lower one.

        Arguments that differ without a change too do not count, such as lengths in metadata: a
        trial before the change notes them as `varying`. Without such a trial addresses do not count
        either, and a graph of another size than the warm-up's, or with metadata, is only doubtful.
        """
        graph, verdict = self.graph, self._verdict
        if self.warm is None:
            return
        with_addresses = graph.varying is not None or not graph.changed
        has_parts = self._has_parts
        spans, of_graph = self.scratch_spans(), self.warm.scratch
        ours, theirs = [
            trace.captured(has_parts=has_parts).described(
                with_addresses=with_addresses, scratch=scratch
            )
            for trace, scratch in ((now, spans), (self.warm.trace, of_graph))
        ]
        same = eq if self._same_size else watching.same_but_for_size
        differing = dict(watching.differences(ours, theirs, same))
        if not graph.changed:
            verdict.varying = frozenset(differing)
        elif not with_addresses and (self.step.has_metadata or not self._same_size):
            verdict.is_doubtful = bool(differing)
        else:
            at = next((each for each in differing if each not in (graph.varying or ())), None)
            if at is not None:
                self._fail(verdicts.CHANGED, ours.at_source((at, differing[at])))

    def _likely_cause(self) -> str:
        """The likely cause of a difference, for an error: the first operator that differs between
        this step and the capture, else random numbers."""
        text, now = self._another_way, self._eager.watch.trace
        if not text and self.warm is not None:
            same = eq if self._same_size else watching.same_but_for_size
            ours = now.described(with_addresses=True, scratch=self.scratch_spans())
            theirs = self.warm.trace.described(with_addresses=True, scratch=self.warm.scratch)
            text = now.at_source(watching.first_difference(ours, theirs, same))
        if text:
            return f"\n    the first operator that is another one now is {text}"
        if not self._state.generators.have_drawn(self._eager.left.generators):
            return ""
        return (
            "\n    the forward draws random numbers: a graph draws torch's anew, and repeats those "
            "that Python and NumPy drew at its capture"
        )

    def _judge_padding(self, other_padding: Run) -> None:
        """Do live rows, or state, differ from the run whose padding differs?"""
        eager, rounding = self._eager, self._rounding
        how = "padding rows change the results of real rows"
        if self._state.generators.have_drawn(eager.left.generators):
            how = "other padding rows change the results of real rows"
            self._verdict.notes.append("draws random numbers: padding was changed, not left out")
        apart = difference(eager.outputs, other_padding.outputs, rounded=True)
        if apart is not None and apart.relative <= rounding:
            why = "by rounding" if rounding < float("inf") else "as in any two runs"
            self._verdict.notes.append(f"{how}, {why}: {apart.text}")
        elif apart is not None:
            trace = eager.watch.trace
            mixing = trace.at_source(trace.first_mixed(other_padding.watch.trace, rounding))
            first = mixing and f"\n    the first operator that mixes rows is {mixing}"
            self._fail(verdicts.ROWS_MIXED, apart.text + first, how=how, rounding=rounding)
        left = [eager.left, other_padding.left]
        spoilt = self._spoilt(*[each.memory for each in left])
        if spoilt is not None and self._padding.rows:
            # A spare row is no one's: without the rows that have the address of padding.
            spoilt = self._spoilt(*map(self._without_padding_rows, left))
        if spoilt is not None:
            use, text = spoilt
            how = "padding rows change state that later steps read"
            self._fail(verdicts.ROWS_MIXED, f"{text} of {use}", how=how, rounding=rounding)

    def _spoilt(
        self, padded: Sequence[torch.Tensor], alone: Sequence[torch.Tensor]
    ) -> tuple[object, str] | None:
        """The first memory that padding has changed, of what two runs have left."""
        step, memory = self.step, self._state.memory
        return memory.spoilt_by_padding(padded, alone, step.unused_rows, step.sizes, self._rounding)

    def _without_padding_rows(self, left: snapshot.Left) -> list[torch.Tensor]:
        """The memory that a run has left, but for the address of padding. The state is put back."""
        now = self._state.take()
        self._state.restore(left._replace(padding=[row.region.was for row in self._padding.rows]))
        memory = self._state.memory.take()
        self._state.restore(now)
        return memory

    def _judge_live_rows(self, alone: Run | None, padded: Run) -> None:
        """Do live rows use rows that padding writes, in this step or in an earlier one? `alone` is
        the run without padding; None if there is none."""
        padding, was = self._padding, [row.region.was for row in self._padding.rows]
        if alone is not None and was:
            padding.note_padded(alone.left.padding, padded.left.padding, served=self.step.is_served)
            if self.step.is_served:
                left = alone.left.padding
                padding.note_used(padding.rows, was, left, self.step.index_values)
                self._note_reads(alone)
        got = padding.conflict()
        if got is not None:
            self._fail(verdicts.PADDING_ON_LIVE_ROW, got)

    def _note_reads(self, alone: Run) -> None:
        """Note the rows of padding on which results of live rows depend. Unused entries of a block
        table point at the spare page too: it is read, and masked."""
        rows = [row for row in self._padding.rows if row.live is None or not row.is_carried]
        others = [(row, row.other()) for row in rows]
        known = [(row, value) for row, value in others if value is not None]

        def depends(on: Sequence[tuple[PaddingRow, torch.Tensor]]) -> bool:
            def call(watch: Watch) -> Any:
                for row, value in on:
                    unseen(partial(row.region.write, value))
                return self.step.eager(watch, "alone" if self.step.sizes else "padded")

            run = self._extra_run("with other contents in rows of padding", call)
            if run is None:
                return False
            self._padding.note_carried(on, run.left.padding, alone.left.padding)
            apart = difference(run.outputs, alone.outputs, rounded=True)
            return apart is not None and apart.relative > self._rounding

        # Ranks that try together make the same runs. A clock differs without any change too.
        if known and not self.step.together and depends(known) and not depends(()):
            for row, value in known:
                if depends([(row, value)]):
                    self._padding.note_read(row, value)

    def _judge_python(self, again: Run, other_padding: Run) -> None:
        """Compare the Python values that eager parts leave with padding and without it: a failure
        where outputs depend on them, else a note."""
        if not self._has_parts or self._rounding == float("inf"):
            return
        python, padded = self._state.python, self._eager.left.python
        differing = python.diff(padded, other_padding.left.python)
        # Values in which two equal runs differ too, such as times, do not count.
        for path in python.diff(padded, again.left.python):
            differing.pop(path, None)
        if not differing:
            return
        self._state.restore()
        how = self._later_effect(differing, other_padding.left.python)
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

    def _later_effect(self, differing: snapshot.Changes, unpadded: Sequence[Any]) -> str | None:
        """How later steps differ if a padded step has left its Python values, in place of those of
        a step without padding; None if they do not."""
        padded, rounding = self._eager.left.python, self._rounding
        # Memory that only these steps write is not compared.
        count = len(self._state.memory.take())

        def steps(watch: Watch) -> list[Any]:
            runs = range(_STEPS_AFTER)
            return [(self.step.eager(watch), self._state.memory.take()[:count]) for _ in runs]

        numbers = {
            path: (theirs, ours)
            for path, (ours, theirs) in differing.items()
            # A float computed from live rows may be rounded differently without padding.
            if snapshot.step_of(theirs, ours) is not None
            and not _is_rounded(ours, theirs, rounding)
        }
        starts: list[_Start] = [(unpadded, _NO_NUMBERS), (padded, _NO_NUMBERS)]
        for times in _MULTIPLES[1:] if numbers else ():
            moved_on = {path: snapshot.further(*both, times) for path, both in numbers.items()}
            starts.append((padded, moved_on))
        expected, *later = [self._extra_run("after a padded step", steps, each) for each in starts]
        for run in later:
            if run is not None and expected is not None:
                apart = difference(run.outputs, expected.outputs)
                if apart is not None and apart.relative > rounding:
                    return apart.text
        return None

    def _movable_numbers(self, moved: snapshot.Changes) -> snapshot.Changes:
        """The Python numbers that this run or earlier eager steps changed, and that can be moved
        on: path -> what they were, what they are."""
        moves = {**moved, **self.graph.moved}
        paths = [slot.path for slot in self._state.python.numbers if slot.writable] if moves else ()
        return {
            path: moves[path]
            for path in paths
            if path in moves and snapshot.step_of(*moves[path]) is not None
        }

    def _judge_moved(self, moved: snapshot.Changes, numbers: snapshot.Changes) -> None:
        """Will a later step do something else? Runs begin with the Python values that the forward
        changes as a later step would find them: counters further on, lists longer or empty.

        Ranks that try a step together make all of these runs.
        """
        for kind, changes, effect in self._runs_moved_on(moved, numbers):
            if effect is not None:
                how = (
                    f"the forward changes a Python {kind} and computes something else then; "
                    "replays repeat what it was at capture"
                )
                self._fail(
                    verdicts.PYTHON_MOVES,
                    f"{snapshot.described(changes)}; moved on, {effect}",
                    how=how,
                )
                if not self.step.together:
                    return
        self._verdict.harmless = tuple(numbers)

    def _runs_moved_on(
        self, moved: snapshot.Changes, numbers: snapshot.Changes
    ) -> Iterator[tuple[str, snapshot.Changes, str | None]]:
        """Make the runs with later values. For each: the kind of value, changes, their effect."""
        python, left = self._state.python, self._eager.left.python
        how = f"with {', '.join(numbers)} moved on"
        for times in _MULTIPLES if numbers else ():
            moved_on = {path: snapshot.further(*both, times) for path, both in numbers.items()}
            yield "number", numbers, self._effect(how, python.was, moved=moved_on)
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
        moved: Mapping[str, Any] = _NO_NUMBERS,
        leaves: list[list[Any]] | None = None,
    ) -> str | None:
        """What the step does differently, in words, if it begins with `start` in Python and numbers
        `moved`; None if nothing, or if it raises. Appends to `leaves` what it leaves there.

        Without `leaves` the values are made up, and the run may do harm with them. Once its
        operators differ from those of the first run, it ends at the first that may do harm. Among
        ranks it does not end: others would wait for it in the next collective.
        """
        follows = None if self.step.together or leaves is not None else self._eager.watch.trace
        begin = start, moved
        run = self._extra_run(how, self.step.eager, begin, follows=follows, compared=True)
        if run is None:
            return None
        if leaves is not None:
            leaves.append(run.left.python)
        effect = self._what_differs(run, how, begin)
        first = run.watch.deviation and f", first {run.watch.deviation}"
        return effect and effect + first

    def _what_differs(self, run: Run, how: str, start: _Start) -> str | None:
        """What a run does differently from the first, and from a replay with the same `start`."""
        eager, has_parts, together = self._eager, self._has_parts, self.step.together
        if isinstance(run.outputs, Deviation):
            # A replay runs the eager parts too, so it deviates there as well.
            return None if has_parts and run.outputs.in_part else "it does other things"
        # Replays run the eager parts too: only the operators of segments count.
        is_same = run.watch.trace.same_captured(eager.watch.trace, has_parts=has_parts)
        if is_same and not together:
            return None
        # Index rows that only one of the runs has saved are not compared.
        apart = difference(run.outputs, eager.outputs) or difference(*_memory(run, eager))
        is_same |= apart is None and not _writes_elsewhere(run.watch, eager)
        if has_parts and (together or not is_same):
            # A tensor that a part makes may have another address in each run: a replay decides.
            replayed = self._extra_run(how, lambda _: self.step.replay(), start)
            is_same |= replayed is None or _run_difference(replayed, run) is None
        if is_same:
            return None
        return "it writes other memory" if apart is None else f"the results differ in {apart.text}"


def _memory(*runs: Run) -> list[list[torch.Tensor]]:
    """For each run, the memory that it left; only what all runs have, and what none has freed."""
    left = zip(*[run.left.memory for run in runs], strict=False)
    kept = [each for each in left if len({tensor.shape for tensor in each}) == 1]
    return [[each[at] for each in kept] for at in range(len(runs))]


def _is_rounded(ours: Any, theirs: Any, rounding: float) -> bool:
    """Whether two numbers are floats that differ by `rounding` times the larger one at most."""
    return isinstance(ours, float) and abs(ours - theirs) <= rounding * max(abs(ours), abs(theirs))


def _writes_elsewhere(watch: Watch, eager: Run) -> bool:
    """Whether a run has written memory that `eager` has not, and that is still there. Memory that
    compiled code allocates, which no operator shows, is gone after a run."""
    elsewhere = watch.written().keys() - eager.watch.written().keys()
    return any(storage_of(watch.uses[key].ref) is not None for key in elsewhere)


def _run_difference(ours: Run, theirs: Run, *, rounded: bool = False) -> Difference | None:
    """The difference of two runs: of their outputs, and of the memory that they left."""
    now, before = _memory(ours, theirs)
    return difference([ours.outputs, now], [theirs.outputs, before], rounded=rounded)


def _asks_modes(function: Callable[[], T]) -> tuple[T, bool]:
    """Call `function`; returns its result, and whether code in it asked for the gradient or
    inference mode, on which it may branch. Under a profiler in C that cannot be seen, so the answer
    is yes. A profiler in Python gets its events as before."""
    outer, asked = sys.getprofile(), False
    if not isinstance(outer, FunctionType | MethodType | None):
        return function(), True

    @untraced
    def profile(frame: FrameType, event: str, called: Any) -> None:
        nonlocal asked
        if called is torch.is_grad_enabled or called is torch.is_inference_mode_enabled:
            name: str = frame.f_globals.get("__name__", "")
            asked |= name.partition(".")[0] not in _IGNORED_CALLERS
        if outer is not None:
            outer(frame, event, called)

    try:
        sys.setprofile(profile)
        result = function()
    finally:
        sys.setprofile(outer)
    return result, asked
