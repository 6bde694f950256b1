"""What adapters of engines do alike: they replace names, capture in an engine's memory, try graphs
inside of steps, and tell of eager steps."""

from __future__ import annotations

import functools
import logging
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from graphrt import (
    CaptureSession,
    GraphOptions,
    GraphPool,
    Reason,
    WrapperTrials,
    current_platform,
)
from graphrt.core.base import tree
from graphrt.core.base.option_values import shown
from graphrt.core.capture.wrapper import GraphWrapper
from graphrt.core.dispatch.reasons import Dispatch
from graphrt.errors import UnsupportedHostError
from graphrt.hosts.table import Row, Table
from graphrt.trust.checks import Checks
from graphrt.trust.compare import rounding_of
from graphrt.trust.host_watch import described_changes
from graphrt.trust.reads import ReadSet
from graphrt.trust.verdict import NOT_EAGER, TriedGraph, Verdict


def switched_on(variable: str) -> bool:
    """Whether an environment variable is 1; raises `UnsupportedHostError` if it is neither that nor
    0."""
    value = os.environ.get(variable, "")
    if value not in ("", "0", "1"):
        what = f"{variable} has a wrong value"
        advice = f"{variable}=1"
        raise UnsupportedHostError(what, got=shown(value), expected="0 or 1", advice=advice)
    return value == "1"


class Replaced:
    """Names of an engine that graphrt has replaced, and how to put them back."""

    def __init__(self, package: str) -> None:
        self._package = package
        self._undo: list[Callable[[], object]] = []

    def __bool__(self) -> bool:
        return bool(self._undo)

    def replace(self, owner: Any, name: str, value: Any) -> None:
        """Replace one name of a class or module."""
        self._undo.append(functools.partial(setattr, owner, name, vars(owner)[name]))
        setattr(owner, name, value)

    def rebind(self, name: str, old: Any, new: Any) -> None:
        """Replace an object wherever a module of the engine has it by this name. Put back, it is so
        too in modules that were imported since."""
        self._undo.append(functools.partial(self._everywhere, name, new, old))
        self._everywhere(name, old, new)

    def _everywhere(self, name: str, old: Any, new: Any) -> None:
        for module_name, module in list(sys.modules.items()):
            is_own = module_name.partition(".")[0] == self._package
            if is_own and vars(module).get(name) is old:
                setattr(module, name, new)

    def put_back(self) -> None:
        """Put all of them back, the last first."""
        while self._undo:
            self._undo.pop()()

    @contextmanager
    def all_or_none(self) -> Iterator[None]:
        """Put all of them back after an error or an interrupt inside."""
        try:
            yield
        except BaseException:
            self.put_back()
            raise


def session_in(pool: GraphPool, table: Table, stream: Any) -> CaptureSession:
    """A session of an engine's captures: on its stream, or on that of the pool's first captures,
    since the allocator uses blocks again on their own stream alone."""
    table.joined(pool)
    # Engines read nothing of what a capture returns.
    own_stream = None if pool.captures else stream
    return pool.capture_session(stream=own_stream, uses_results=False)


_SPREADS = 4
"""A graph may differ from an eager run by this many times the difference of two eager runs."""


class Apart(NamedTuple):
    """How far a replay is from an eager run of the same step."""

    found: float
    spread: float
    """How far two eager runs are from one another."""
    allowed: float

    @property
    def fails(self) -> bool:
        """Whether the replay is further away than is allowed."""
        return not self.found <= self.allowed

    def __str__(self) -> str:
        return (
            f"{self.found:.3g} of the norm of a row; two eager runs differ by {self.spread:.3g}, "
            f"and {self.allowed:.3g} are allowed"
        )


def _apart(replayed: Any, first: Any, last: Any, rows: slice) -> Apart:
    """Compare the outputs of a replay, and of two eager runs, in the `rows` that are no padding."""
    spread, found = (_rows_apart(each, last, rows) for each in (first, replayed))
    dtypes = {tensor.dtype for tensor in tree.tensors(last)}
    rounding = rounding_of(dtypes, (), current_platform().float32_precision)
    return Apart(found, spread, max(_SPREADS * spread, rounding))


def _rows_apart(ours: Any, theirs: Any, rows: slice) -> float:
    """The largest difference of two rows, as a part of the norm of the second one. By norms: an
    element of a large channel differs by more than a row's mean square if it is rounded once."""
    largest = 0.0
    for got, expected in zip(tree.tensors(ours), tree.tensors(theirs), strict=True):
        a, b = (each[rows].detach().flatten(1).double() for each in (got, expected))
        parts = (a - b).norm(dim=1) / b.norm(dim=1).clamp_min(1e-30)
        parts = parts.nan_to_num(nan=float("inf"))
        # NaN is itself.
        parts[((a == b) | (a.isnan() & b.isnan())).all(dim=1)] = 0.0
        largest = max(largest, *parts.tolist(), 0.0)
    return largest


def _verdict(outputs: Any, found: Apart, to_try: TriedGraph, graph: str, failure: str) -> Verdict:
    """The verdict of a trial whose last eager run had these `outputs`."""
    # One equal step proves little of a change, except of captures of other graphs before.
    is_doubtful = bool(to_try.changed) and to_try.record.steps > 0
    verdict = Verdict(outputs, deterministic=not found.spread, is_doubtful=is_doubtful)
    if failure:
        if to_try.changed:
            failure += f"\n    what changed since the capture: {described_changes(to_try.changed)}"
        verdict.failure = NOT_EAGER(failure, graph=graph, where="")
    return verdict


def _log_trial(log: logging.Logger, graph: str, seconds: float, verdict: Verdict) -> None:
    """Say what a trial has found."""
    ms = seconds * 1e3
    if verdict.failure is None:
        log.info("graphrt: tried %s in %.1f ms: as eager", graph, ms)
    else:
        text = "graphrt: tried %s in %.1f ms: in quarantine, its batches run eagerly. %s"
        log.error(text, graph, ms, verdict.failure)


@functools.cache
def log_untried(log: logging.Logger, reason: str) -> None:
    """Say once for each reason why graphs are not tried."""
    log.warning("graphrt: no graph is tried: %s", reason)


def may_try(reasons: Iterator[str], log: logging.Logger) -> bool:
    """Whether `GRAPHRT_CHECK` asks for trials, and there are no `reasons` against them: the first
    is logged."""
    if not GraphOptions().checks("first"):
        return False
    reason = next(reasons, "")
    if reason:
        log_untried(log, reason)
    return not reason


class EagerSteps:
    """Counts the steps that ran eagerly, by their reason; each reason is logged at its 1st, 10th,
    100th... time."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        # By the text of the log, and by graphrt's reason.
        self.counts: Counter[str] = Counter()
        self.reasons: Counter[Reason] = Counter()

    def note(self, reason: Reason, text: str, size: str = "") -> None:
        """A step ran eagerly: the log says so in a text, and of what size it was."""
        self.reasons[reason] += 1
        self.counts[text] += 1
        count = self.counts[text]
        if count == 10 ** (len(str(count)) - 1):
            times = "" if count == 1 else f", {count} times so far"
            self._log.info("graphrt: a step%s ran eagerly, as %s%s", size, text, times)


class StepTrials(WrapperTrials):
    """Trials of an engine's graphs inside of its steps: a replay beside two eager runs of the same
    step. Live rows may differ by as much as the two eager runs from one another, or as rounding."""

    has_ranks = False
    """Whether other ranks make the same runs, and would wait for this one."""

    @property
    def has_failed(self) -> bool:
        """Whether a trial has failed: the graph is in quarantine."""
        return any(each.failure for each in self.records)

    def begin(self, wrapper: GraphWrapper, model: Any) -> None:
        """Before the first capture: look from now on at what a model leads to."""
        if self._checks is None and model is not None:
            options = wrapper.options
            reads = ReadSet(model, watched=options.checks("capture"))
            self._checks = Checks(options, reads, wrapper.pool.platform.device_type)

    def compare(
        self,
        dispatch: Dispatch,
        graph: str,
        runs: Callable[[], tuple[Any, Any, Any]],
        rows: slice,
        differs: Callable[[Apart], str],
        log: logging.Logger,
        row: Row,
    ) -> Verdict | None:
        """Make the `runs`, the replay first, and note the verdict in the log and in the graph's
        row; None without memory for them. `differs` says in words how the replay differs too much,
        or ""."""
        assert self._checks is not None
        began, to_try = time.perf_counter(), self._checks.graph_to_try(dispatch)
        try:
            replayed, first, last = runs()
        except torch.OutOfMemoryError as error:
            if self.has_ranks:
                raise
            self._checks.cannot_try(dispatch.slot, error)
            return None
        finally:
            # What it changes in Python is no change of the host's.
            self._checks.ran_forward()
        found = _apart(replayed, first, last, rows)
        verdict = _verdict(last, found, to_try, graph, differs(found))
        _log_trial(log, graph, time.perf_counter() - began, verdict)
        row.trial = self._checks.records[dispatch.slot]
        return verdict
