"""Trying a graph: one step by replay and several times eagerly, all from the same state."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch

from graphrt.core.base._undo import Undo
from graphrt.core.base.errors import PythonStateError, RowsMixedError, VerificationError
from graphrt.core.trust._asked import asked_in
from graphrt.core.trust._constants import baked
from graphrt.core.trust._verdict import Verdict, mixing
from graphrt.core.trust.compare import Difference, difference, rounding_of
from graphrt.core.trust.moving import Moving, further
from graphrt.core.trust.parts import PartResults
from graphrt.core.trust.places.walk import Places
from graphrt.core.trust.snapshot import (
    Left,
    PythonLeft,
    StateSnapshot,
    changed,
    described,
    only_tensors_differ,
    step_of,
)
from graphrt.core.trust.watching.draws import Draws
from graphrt.core.trust.watching.trace import Trace, first_difference, first_other
from graphrt.core.trust.watching.watch import Deviation, Watch
from graphrt.core.trust.watching.writes import still_there

_SPREADS = 4
"""A replay may be so many times as far from eager as two eager runs are from one another."""

_UNSTEADY = 64
"""The same where eager parts give something else at every call: of numbers drawn anew, three runs
may be close to one another by chance."""

_RUNS = 8
"""Of a trial, at most, mostly."""

_STEPS_AFTER = 4
"""Steps after a padded one that may show what it has left in Python: a value may go another way
round before it reaches an output."""

_STEPS = (1, 999_983, -999_983)
"""How far Python numbers that a run moves are moved further, in steps of that run."""


class TriedStep(Protocol):
    """One step that can be run again and again; each returns copies of the live outputs."""

    rows: int
    """Tokens of the graph."""
    live_rows: int
    sizes: Sequence[tuple[int, int]]
    """Padded and live tokens, and requests."""
    has_gradients: bool
    """Whether its caller has gradients on."""
    finds_gradients: bool
    """Whether nobody knows yet which gradients of its caller's it ends."""

    def eager(self, watch: Watch | None, parts: PartResults | None = None) -> Any:
        """The forward on the padded inputs, under `watch`, its eager parts seen by `parts`."""

    def where_asked(self, watch: Watch, gradients: bool, inference: bool) -> Any:
        """`eager`, but that the forward finds these on or off where it asks."""

    def find_gradients(self, watch: Watch) -> None:
        """`eager`, which finds out which gradients it ends."""

    def of_padding(self, watch: Watch) -> Any:
        """The forward with nothing but padding rows, as in a warm-up."""

    def replay(self) -> Any:
        """The graph on the same inputs."""

    def other_padding(self, watch: Watch) -> Any:
        """The forward, with the padding rows holding what live rows hold; None without any."""

    def unpadded(self, watch: Watch) -> Any:
        """The forward on the live rows alone; None where they are all."""

    def disturbed(self, watch: Watch) -> Any:
        """The forward, with padding rows of all inputs that address nothing holding live rows."""


class Trial:
    """Tries one step of one graph: the same runs in the same order, whatever they give, so that
    several ranks that try it at once wait for one another nowhere.

    `own` are the addresses of the storages of the step's inputs, `captured` is what the warm-up of
    the graph's kind did and `issued` the operators of the capture after it, `same_size` whether at
    the same size; `precision` is that of float32 in each use. `mixes_rows` says that live rows
    may depend on padding, `has_parts` that the graph may have eager parts. What `pads` address is
    nobody's. With `strict` a failed trial leaves no effects. `moved` are the Python values that
    eager steps have moved since the capture: what they were, and what they are.
    """

    def __init__(
        self,
        step: TriedStep,
        *,
        name: str,
        own: frozenset[int],
        device_type: str,
        limit_bytes: int,
        places: Places,
        precision: Callable[[str], str],
        captured: Trace | None = None,
        issued: Sequence[Any] | None = None,
        same_size: bool = False,
        mixes_rows: bool = False,
        pads: Sequence[int] = (),
        strict: bool = False,
        has_parts: bool = False,
        moved: Mapping[str, tuple[Any, Any]] | None = None,
    ) -> None:
        self._step = step
        self._name = name
        self._own = own
        self._reads_arrays = device_type == "cpu"
        # The rows that index writes save are saved anew in each run.
        self._state = StateSnapshot(places, device_type, limit_bytes * _RUNS, sums=False)
        self._saves = self._state.writes
        self._moving = Moving(self._state.python)
        self._moved = moved or {}
        self._moving.note(self._moved)
        self._captured = captured
        self._issued = issued
        self._precision = precision
        self._same_size = same_size
        self._mixes_rows = mixes_rows
        self._pads = pads
        self._strict = strict
        self._has_parts = has_parts
        self._verdict = Verdict()
        # How far apart results may be because of eager parts.
        self._unsteady = 0.0
        # In words, where the capture issued other operators than eager runs do.
        self._another_way = ""

    def run(self, *, undone: bool = False) -> Verdict:
        """Run the trial; `undone`, its last run leaves no effects either. What a forward itself
        raises is raised, and what else goes wrong, with its state as it was."""
        verdict, step = self._verdict, self._step
        try:
            draws = Draws(self._state.generators)
            first = self._watch(rows=(step.rows, step.live_rows), draw=draws.record)
            eager, asked = asked_in(lambda: step.eager(first))
            padded = self._state.left()
            drawn = self._state.generators.of_python()
            written = padded.memory
            self._moving.look()
            self._back()
            # What a run leaves where nobody looks must not be what the replay needs.
            step.of_padding(self._watch())
            self._back()
            replayed = step.replay()
            after_replay = self._state.left()
            left = after_replay.memory[: len(written)]
            self._back()
            other = None if self._mixes_rows else step.other_padding(self._watch())
            self._back()
            drawn_alone = Draws(self._state.generators)
            without = self._watch(rows=(step.live_rows, step.live_rows), draw=drawn_alone.record)
            alone = None if self._mixes_rows else self._alone(without)
            left_alone = matched_left = self._state.left()
            drew_otherwise = drawn != self._state.generators.of_python()
            matched, disturbed = alone, None
            self._back()
            if alone is not None and not draws.like(drawn_alone):
                # With the numbers that the padded run has drawn.
                again_alone = self._watch(rows=(step.live_rows, step.live_rows), draw=draws.repeat)
                found, found_left = self._alone(again_alone), self._state.left()
                self._back()
                if found is not None and not draws.lost:
                    matched, matched_left, without = found, found_left, again_alone
            if alone is not None and drew_otherwise and self._has_parts:
                # Draws of Python's and NumPy's cannot be repeated: as many rows draw as many.
                disturbed = step.disturbed(self._watch())
                self._back()
            rounding = rounding_of(
                (use.dtype for use in first.uses.values()),
                (op.func for op in first.trace),
                self._precision,
            )
            verdict.asks = asked and self._goes_by_it(eager, written, rounding)
            if step.finds_gradients:
                self._find_gradients()
            self._move_numbers(first, eager, written)
            if matched is not None and self._has_parts:
                self._judge_python(
                    padded, after_replay.python, matched_left.python, eager, rounding
                )
            last = self._watch()
            again = verdict.outputs = step.eager(last)
            rewritten = self._saves.values()[: len(written)]
            self._judge_constants(first, last)
            rebound = self._moving.rebound(first.uses)
            if rebound:
                self._fail_rebound(rebound)
            self._note_another_way(first)
            self._look_at_parts(eager, again, rounding)
            rounding = max(rounding, self._unsteady)
            self._judge_repeats(eager, again, replayed, first, rounding)
            now = still_there(written, rewritten, left)
            self._judge_writes(now[0], now[1], now[2], first, rounding)
            if disturbed is not None and not _differ(eager, disturbed, rounding):
                matched = None
                verdict.notes.append(
                    "draws other numbers of Python or NumPy without padding: padding rows were "
                    "changed instead, and no live row changes with them"
                )
            self._judge_padding(eager, other, matched, rounding, (first, without))
            if matched is not None:
                self._judge_state(written, matched_left.memory, rounding)
            if alone is not None and verdict.failure is not None:
                # What the step is without graphs; by no run more, which other ranks would not do.
                self._state.put(left_alone)
                verdict.outputs = alone
            elif verdict.asks and step.has_gradients:
                self._back()
                verdict.outputs = step.where_asked(
                    self._watch(), True, torch.is_inference_mode_enabled()
                )
            if undone or (self._strict and verdict.failure is not None):
                self._back()
            return verdict
        except BaseException:
            # As an undo: a second interrupt must not leave half of it.
            undo = Undo()
            undo.later(self._back)
            undo.now()
            raise

    def _look_at_parts(self, eager: Any, again: Any, rounding: float) -> None:
        """Where two eager runs differ, find out whether that is because of eager parts alone, which
        read a clock at every replay too."""
        spread = difference(again, eager)
        if not self._has_parts or spread is None or spread.relative <= rounding:
            return
        left, parts = self._state.left(), PartResults()
        self._back()
        first = self._step.eager(self._watch(), parts)
        written = self._saves.values()
        self._back()
        second = self._step.eager(self._watch(), parts.again())
        rewritten = self._saves.values()[: len(written)]
        self._back()
        self._state.put(left)
        if parts.differs or _differ(second, first, rounding):
            return
        now, before = still_there(rewritten, written)
        if _differ(now, before, rounding):
            return
        third = difference(first, eager)
        furthest = max(spread.relative, 0.0 if third is None else third.relative)
        self._unsteady = _UNSTEADY * furthest
        self._verdict.notes.append(
            f"eager parts give something else at every call, as a clock does: {spread.text}"
        )

    def _goes_by_it(self, eager: Any, written: list[torch.Tensor], rounding: float) -> bool:
        """Whether the forward does something else where gradients are on, of which graphs have
        none, and where inference mode is as it is not now."""
        otherwise = not torch.is_inference_mode_enabled()
        try:
            result = self._step.where_asked(self._watch(), True, otherwise)
            left = self._saves.values()[: len(written)]
        except (MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            # It may change in place what is none of inference mode's: that is no other way.
            self._verdict.notes.append(f"with inference mode changed: {error}"[:200])
            return False
        finally:
            self._back()
        apart = (difference(result, eager, rounded=True), difference(left, written, rounded=True))
        return any(each is not None and each.relative > rounding for each in apart)

    def _find_gradients(self) -> None:
        try:
            self._step.find_gradients(self._watch())
        except (MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            # It may be written for steps without gradients alone: its outputs have none.
            self._verdict.notes.append(f"with gradients: {error}"[:200])
        finally:
            self._back()

    def _alone(self, watch: Watch) -> Any:
        try:
            return self._step.unpadded(watch)
        except (MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            # It may be made for the sizes of graphs alone.
            self._verdict.notes.append(f"does not run without padding: {error}"[:200])
            return None

    def _watch(self, follows: Trace | None = None, **more: Any) -> Watch:
        return Watch(
            self._own,
            self._saves,
            follows,
            self._state.generators,
            keeps_sources=True,
            reads_arrays=self._reads_arrays,
            **more,
        )

    def _back(self) -> None:
        """Put back what a run has changed: memory, generators, Python values."""
        self._state.restore()

    def _fail(self, failure: VerificationError) -> None:
        self._verdict.failure = self._verdict.failure or failure

    def _judge_constants(self, first: Watch, last: Watch) -> None:
        found = baked(self._name, last, first.trace, has_parts=self._has_parts)
        if found is None and self._captured is not None and self._same_size:
            found = baked(self._name, first, self._captured, has_parts=self._has_parts)
        if found is not None:
            self._fail(found)

    def _judge_repeats(
        self, eager: Any, again: Any, replayed: Any, first: Watch, rounding: float
    ) -> None:
        spread = difference(again, eager)
        if spread is not None and spread.relative > max(rounding, 1e-6):
            self._fail(self._not_repeated(spread, " differ"))
            return
        if spread is not None:
            self._verdict.deterministic = False
            self._verdict.notes.append(f"not deterministic: eager runs differ in {spread.text}")
        self._judge_replay(replayed, again, spread, "", first, rounding)

    def _judge_replay(
        self,
        replayed: Any,
        again: Any,
        spread: Difference | None,
        what: str,
        first: Watch,
        rounding: float,
    ) -> None:
        """Fail where the replay is not as near to eager as its operators let it be."""
        by_rounding = bool(self._another_way)
        apart = difference(replayed, again, rounded=by_rounding)
        if apart is None:
            return
        if spread is not None:
            allowed = max(_SPREADS * max(spread.relative, 1e-7), self._unsteady)
            if apart.relative <= allowed:
                return
        if not by_rounding or apart.relative > rounding:
            self._fail(self._differs(apart, what, first))
            return
        self._verdict.notes.append(
            f"the replay differs by rounding{what} ({apart.text}): the forward takes another way "
            f"while it is captured, first {self._another_way}"
        )

    def _not_repeated(self, spread: Difference, how: str) -> VerificationError:
        moved = ", ".join(self._moving.names()) or "nothing that could be found"
        return PythonStateError(
            f"{self._name}: two eager runs of one step, from the same state,{how}, so no graph can "
            "stand for the forward",
            got=f"{spread.text}; Python state that moved: {moved}",
            expected="a function of its inputs and of tensors",
            advice="keep what advances in a tensor and write it in place (add_, copy_), read "
            "clocks and files outside of the forward, or run it in an eager break",
        )

    def _judge_writes(
        self, eager: Any, again: Any, replayed: Any, first: Watch, rounding: float
    ) -> None:
        spread = difference(again, eager)
        if spread is not None and spread.relative > rounding:
            self._fail(self._not_repeated(spread, " leave different state"))
            return
        if spread is not None:
            self._verdict.deterministic = False
        self._judge_replay(replayed, again, spread, " in the state that it writes", first, rounding)

    def _differs(self, apart: Difference, what: str, first: Watch) -> VerificationError:
        return VerificationError(
            f"{self._name}: the replay of its graph differs from eager{what}",
            got=f"{apart.text}{self._guilty(first)}{self._since_the_capture()}",
            expected="equal bits" if self._verdict.deterministic else "the spread of eager runs",
            advice="pass what changes as an input or write it in place into a tensor; recapture() "
            "after what the forward reads was replaced",
        )

    def _since_the_capture(self) -> str:
        """The Python values that eager steps have moved, in words."""
        if not self._moved:
            return ""
        return f"\n    Python values that eager steps have moved: {changed(self._moved)}"

    def _note_another_way(self, now: Watch) -> None:
        """Find the first operator that the capture issued otherwise than eager runs do. A graph of
        another size may have others for that alone: there both sizes must show it."""
        if self._issued is None:
            return
        found = first_other(now.trace, self._issued)
        if found is None:
            return
        if not (self._same_size or first_other(self._captured or [], self._issued)):
            return
        place, text = found
        source = now.sources.get(place)
        self._another_way = text if source is None else f"{text}, at {source}"

    def _guilty(self, now: Watch) -> str:
        """The first operator that this step does otherwise than the graph was captured with."""
        if self._another_way:
            return f"\n    the first operator that is another one now is {self._another_way}"
        if self._captured is None:
            return ""
        found = first_difference(now.trace, self._captured, same_size=self._same_size)
        if found is None:
            return ""
        place, text = found
        source = now.sources.get(place)
        return f"\n    the first operator that is another one now is {text}" + (
            "" if source is None else f", at {source}"
        )

    def _judge_padding(
        self,
        eager: Any,
        other: Any,
        alone: Any,
        rounding: float,
        runs: tuple[Watch, Watch],
    ) -> None:
        for result, how, rounded in (
            (other, "what is in padding rows that are kept changes live rows", False),
            (alone, "live rows are not what they are without padding", True),
        ):
            apart = None if result is None else difference(eager, result, rounded=rounded)
            if apart is None:
                continue
            if apart.relative <= rounding:
                self._verdict.notes.append(f"{how}, by rounding: {apart.text}")
                continue
            self._fail(
                RowsMixedError(
                    f"{self._name}: {how}",
                    got=apart.text + (mixing(*runs, rounding) if result is alone else ""),
                    expected=f"differences of at most {rounding:.3g} of their root mean square",
                    advice="let each row depend on its own request only (mask the padding rows, "
                    "take the last token of each request by an index input); where rows are mixed "
                    "by design, Host(mixes_rows=True) says so",
                )
            )

    def _judge_state(
        self, padded: list[torch.Tensor], alone: list[torch.Tensor], rounding: float
    ) -> None:
        def differs(ours: torch.Tensor, theirs: torch.Tensor) -> str | None:
            apart = difference(ours, theirs)
            return None if apart is None or apart.relative <= rounding else apart.text

        found = self._saves.spoilt(padded, alone, self._pads, self._step.sizes, differs)
        if found is not None:
            use, text = found
            self._fail(
                RowsMixedError(
                    f"{self._name}: padding rows change state that later steps read",
                    got=f"{text} of {use}",
                    expected="state as a step without padding leaves it",
                    advice="mask the padding rows, or address them by an index input whose padding "
                    "is a row that is nobody's: InputSpec(index=True, pad=...); where rows are "
                    "mixed by design, Host(mixes_rows=True) says so",
                )
            )

    def _judge_python(
        self, padded: Left, replayed: PythonLeft, alone: PythonLeft, eager: Any, rounding: float
    ) -> None:
        """Compare the Python values that eager parts leave with padding and without it: a failure
        where outputs depend on them, else a warning."""
        python = self._state.python
        # What captured parts move no replay does: it leaves that as it was.
        captured = set(python.differences(replayed, padded.python))
        captured -= set(python.differences(replayed, python.was))
        apart = python.differences(padded.python, alone)
        found = {path: both for path, both in apart.items() if path not in captured}
        if not found:
            return
        for _ in range(2):
            # Times and latencies, say, are others without padding too, and may be equal by chance.
            repeated = self._step.eager(self._watch())
            for path in python.differences(padded.python, python.left()):
                found.pop(path, None)
            self._back()
            if not found or _differ(repeated, eager, rounding):
                return
        how = self._reaches(found, padded.python, alone, rounding)
        if how is not None:
            self._fail(
                PythonStateError(
                    f"{self._name}: padding rows change Python state that later steps depend on",
                    got=f"{described(found)}; from there {how}",
                    expected="the Python state that a step without padding leaves",
                    advice="advance it by the live rows, current_context().live.num_tokens, or "
                    "keep it out of the forward",
                )
            )
            return
        named = [path for path, both in found.items() if not only_tensors_differ(*both)]
        if named:
            self._verdict.padded_state = tuple(named)
            self._verdict.notes.append(
                f"padded steps leave other Python state, on which no output depends: "
                f"{', '.join(named)}"[:300]
            )

    def _reaches(
        self,
        found: Mapping[str, tuple[Any, Any]],
        padded: PythonLeft,
        alone: PythonLeft,
        rounding: float,
    ) -> str | None:
        """How outputs of this step differ where it starts from what a padded step has left, and not
        from what one without padding has; None if they do not."""
        # What later runs write for the first time is of these runs alone.
        count = len(self._saves.values())
        expected, raised = self._steps_from(alone, {}, count)
        if raised is not None:
            return None
        numbers = {
            path: both for path, both in found.items() if step_of(both[1], both[0]) is not None
        }
        for steps in (0, *_STEPS[1:]):
            moved = {path: further(both[1], both[0], steps) for path, both in numbers.items()}
            got, raised = self._steps_from(padded, moved if steps else {}, count)
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
        self, start: PythonLeft, moved: Mapping[str, Any], count: int
    ) -> tuple[list[Any], str | None]:
        """The outputs of a few steps, one after the other, from `start` with `moved`, and the first
        `count` pieces of memory that they write; or what they raise."""
        runs: list[Any] = []
        self._state.python.put(start)
        for path, value in moved.items():
            self._state.python.move(path, value)
        try:
            for _ in range(_STEPS_AFTER):
                runs.append(self._step.eager(self._watch()))
                runs.append(self._saves.values()[:count])
            return runs, None
        except (MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            return runs, f"{type(error).__name__}: {error}"[:200]
        finally:
            self._back()

    def _move_numbers(self, first: Watch, eager: Any, written: list[torch.Tensor]) -> None:
        names = self._moving.names()
        if not names:
            return
        found = self._depends_on(names, first, eager, written)
        if found is None:
            self._verdict.harmless = tuple(names)
            return
        if len(names) > 1:
            for name in names:
                alone = self._depends_on([name], first, eager, written)
                if alone is not None:
                    names, found = [name], alone
                    break
        self._fail(
            PythonStateError(
                f"{self._name}: the forward moves a Python number and does something else when it "
                "has moved on; replays repeat what it was at capture",
                got=f"{self._moving.described(names)}; moved on, {found}",
                expected="Python state that changes nothing, as a count of calls does",
                advice="keep it in a tensor that is written in place, or pass it as an input; for "
                "a sliding-window cache use a static cache of full length",
            )
        )

    def _depends_on(
        self, names: list[str], first: Watch, eager: Any, written: list[torch.Tensor]
    ) -> str | None:
        for steps in _STEPS:
            watch = self._watch(first.trace)
            found = None
            try:
                self._moving.move(names, steps)
                result = self._step.eager(watch)
                if watch.deviates:
                    left = self._saves.values()
                    apart = difference(result, eager) or difference(left, written)
                    found = None if apart is None else f"the results differ in {apart.text}"
                if found is not None and self._has_parts:
                    # Eager parts go by what the number is at the replay.
                    self._back()
                    self._moving.move(names, steps)
                    apart = difference(self._step.replay(), result)
                    apart = apart or difference(self._saves.values()[: len(left)], left)
                    found = None if apart is None else found
            except Deviation as deviation:
                # What an eager part would do it does at the replay too.
                part = self._has_parts and deviation.in_part
                found = None if part else "it does other things"
            except (MemoryError, torch.OutOfMemoryError):
                raise
            except Exception as error:
                # An assertion about the number, say: it says nothing about other steps.
                self._verdict.notes.append(
                    f"with {', '.join(names)} moved on: {type(error).__name__}: {error}"[:300]
                )
            finally:
                self._back()
            if found is not None:
                return found + (f", first {watch.deviation}" if watch.deviation else "")
        return None

    def _fail_rebound(self, places: list[str]) -> None:
        self._fail(
            PythonStateError(
                f"{self._name}: the forward reads a tensor and puts another one in its place; "
                "replays go on reading the one of the capture",
                got=", ".join(places),
                expected="state that is written in place",
                advice="self.h.copy_(new) in place of self.h = new",
            )
        )


def _differ(ours: Any, theirs: Any, rounding: float) -> bool:
    apart = difference(ours, theirs)
    return apart is not None and apart.relative > rounding
