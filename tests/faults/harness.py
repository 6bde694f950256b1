"""One fault after another: injected, judged, and what it left behind looked at."""

from __future__ import annotations

import gc
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch

from graphrt import GraphRTError, Platform
from graphrt.core.device.contract import error_chain
from graphrt.core.replay import recording
from graphrt.cuda.driver.api import DriverError
from tests.faults.inject import WAYS, Fault, Faults
from tests.faults.places import faulty, patched
from tests.faults.world import World, same, working


@dataclass
class Baseline:
    """The scenario without a fault: what it came to, and how many actions of each kind it had."""

    seen: dict[str, int]
    before: list[torch.Tensor]
    after: list[torch.Tensor]
    result: Any
    figures: dict[str, int]
    tensors: int


@dataclass
class Finding:
    """What one fault came to; `wrong` says what should not have."""

    fault: Fault
    where: str
    outcome: str
    wrong: str = ""

    def __str__(self) -> str:
        return f"{self.fault} ({self.where}): {self.wrong or self.outcome}"


HEAD = "| scenario | action | places | outcomes |\n|---|---|---|---|"


def row(scenario: str, kind: str, places: int, found: Iterable[Finding]) -> str:
    """A line of the table: what the faults of one kind of action came to."""
    of_kind = [each for each in found if each.fault.kind == kind]
    counted = Counter("wrong" if each.wrong else each.outcome for each in of_kind)
    text = ", ".join(f"{outcome} {n}" for outcome, n in sorted(counted.items()))
    return f"| {scenario} | {kind} | {places} | {text} |"


class Harness:
    """The faults of one scenario on one platform, of which `make_platform` makes an instance."""

    def __init__(self, scenario: type[World], make_platform: Any) -> None:
        self._scenario = scenario
        self._make_platform = make_platform
        # The second run: the first one imports, and fills caches of torch.
        self._run(None, None)
        # What is there already need not be looked at after every fault.
        gc.collect()
        gc.freeze()
        self.baseline = self._run(None, None)[1]
        assert self.baseline is not None

    def faults(self, ways: Iterable[tuple[str, bool]] = WAYS) -> Iterator[Fault]:
        """Every fault, kind by kind."""
        ways = list(ways)
        for kind, count in self.baseline.seen.items():
            for at in range(count):
                yield from (Fault(kind, at, error, late) for error, late in ways)

    def sample(self, count: int) -> list[Fault]:
        """At most so many of the faults, of all kinds of actions and all errors."""
        faults = list(self.faults())
        # A step that is no multiple of the ways, so that all of them have their turn.
        step = max(len(faults) // count, 1) | 1
        return faults[::step][:count]

    def doubled(self, count: int) -> list[Fault]:
        """As many faults, each followed by an interrupt while graphrt recovers."""
        return [
            replace(fault, second=1 + number % 5) for number, fault in enumerate(self.sample(count))
        ]

    def inject(self, fault: Fault) -> Finding:
        """Run the scenario with one fault and judge what came of it."""
        return self._run(fault, self.baseline)[0]

    def _run(self, fault: Fault | None, baseline: Baseline | None) -> tuple[Any, Baseline | None]:
        before = _live_tensors()
        finding, made = self._in_a_world(fault, baseline)
        left = _live_tensors() - before
        if made is not None:
            made.tensors = left
        elif baseline is not None and left > baseline.tensors and not finding.wrong:
            finding.wrong = f"{left - baseline.tensors} tensors more stay alive"
        return finding, made

    def _in_a_world(self, fault: Fault | None, baseline: Baseline | None) -> tuple[Any, Any]:
        platform: Platform = self._make_platform()
        faults = Faults(platform.device_type)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            # To count what is frozen takes longer than all the rest.
            many = mock.patch.object(recording, "_frozen_by_host", True)
            with many, patched(platform.device_type, faults):
                world = self._scenario(faulty(platform, faults))
                working.append(faults)
                try:
                    if fault is None:
                        return None, _without_fault(world, faults)
                    assert baseline is not None
                    return _with_fault(world, faults, fault, baseline), None
                finally:
                    working.remove(faults)


def _without_fault(world: World, faults: Faults) -> Baseline:
    before = world.model.state()
    with faults.armed(None):
        result = world.act()
    after = world.model.state()
    seen = dict(faults.seen)
    figures = _finish(world)
    return Baseline(seen, before, after, result, figures, 0)


def _with_fault(world: World, faults: Faults, fault: Fault, baseline: Baseline) -> Finding:
    error, result = None, None
    with faults.armed(fault):
        try:
            result = world.act()
        except BaseException as raised:
            error = raised
    where = faults.where
    if faults.happened is None and error is None and not world.platform.capture_executes:
        # How far staging memory grows depends on how far behind the device is.
        _finish(world)
        return Finding(fault, where, "not reached")
    try:
        outcome = _judge_error(error, faults)
        if error is None and isinstance(baseline.result, torch.Tensor):
            assert torch.equal(result.cpu(), baseline.result.cpu()), "a wrong result, silently"
        _forget(error)
        error = None
        world.check_idle()
        outcome += _judge_state(world, fault, where, outcome, baseline)
        world.check_serves((3, 7))
        if not outcome.startswith("survived"):
            world.again()
        figures = _finish(world)
        for name, value in baseline.figures.items():
            assert figures[name] <= value, f"{name}: {figures[name]} in place of {value}"
    except Exception as wrong:
        text = f"{type(wrong).__name__}: {wrong}".splitlines()
        _forget(wrong)
        _forget(error)
        return Finding(fault, where, "", " / ".join(text[:3]))
    return Finding(fault, where, outcome)


def _finish(world: World) -> dict[str, int]:
    world.check_serves()
    world.check_idle()
    figures = world.figures()
    world.close()
    world.close()
    return figures


def _judge_error(error: BaseException | None, faults: Faults) -> str:
    assert faults.happened is not None, "the fault never happened"
    interrupt = not issubclass(faults.happened, Exception)
    if error is None:
        assert not interrupt, "an interrupt was swallowed"
        return "survived"
    text = f"{type(error).__name__}: {error}"
    if faults.injected(error):
        return "interrupted" if interrupt else "passed on"
    assert not interrupt, f"an interrupt became {text}"
    assert isinstance(error, GraphRTError), f"not named: {text}"
    chain = list(error_chain(error))
    # What a driver's function answers is no exception, until graphrt makes one of it.
    known = any(map(faults.injected, chain)) or any(isinstance(e, DriverError) for e in chain)
    assert known, f"the cause is lost: {text}"
    return "named"


def _judge_state(world: World, fault: Fault, where: str, outcome: str, baseline: Baseline) -> str:
    state = world.model.state()
    if same(state, baseline.after):
        return ""
    assert outcome != "survived", "the state is not what the step leaves"
    if same(state, baseline.before):
        return ""
    half = fault.kind in world.halves and where.startswith(world.halves_in)
    assert half, "state is half-done"
    world.model.put_back(baseline.before)
    return ", half a step"


def _forget(error: BaseException | None) -> None:
    """Let go of what the frames of an error hold."""
    for link in [] if error is None else list(error_chain(error)):
        link.__traceback__ = None


def _live_tensors() -> int:
    gc.collect()
    return sum(issubclass(type(each), torch.Tensor) for each in gc.get_objects())
