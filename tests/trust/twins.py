"""The judge: runs a scenario by graphs and compares every step with a twin that knows no graphs."""

from __future__ import annotations

import contextlib
import os
import random
import threading
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch

import graphrt.errors
from graphrt import GraphOptions, GraphRTError, GraphRunner, Host, Reason
from graphrt.core.base import tree
from tests.trust.scenario import LONGER, Defect, Scenario, Word

LEVELS = ("off", "capture", "first", "sample", "always")
HAS_LEVELS = any(each.name == "check" for each in fields(GraphOptions))
SEED = 14

_OF_OTHER_THINGS = {"PlanChangedWarning", "GraphsDroppedWarning"}
"""Warnings of graphrt that are not about whether a graph stands for its forward."""

T = TypeVar("T")


@dataclass(frozen=True)
class Outcome:
    """What came of one run. `wrong_before` steps handed out wrong values before anything was said,
    `wrong_after` at or after the step at which it was; `hits` steps were dispatched to a graph."""

    word: Word
    wrong_before: int
    wrong_after: int
    said_at: int | None
    said: str
    hits: int


def run(defect: Defect, level: str, device: str = "cpu", mode: str | None = None) -> Outcome:
    """Run the defect's program by graphs at this level, after its twin without any; in `mode`, if
    it is given, in place of its own."""
    with ambient_state_put_back():
        expected = _twin(defect, device)
    with ambient_state_put_back():
        return _judged(defect, level, device, mode, expected)


class Record:
    """What was said and which steps were wrong, in order; step -1 is before the first one."""

    def __init__(self) -> None:
        self.said_at: int | None = None
        self.said = ""
        self.wrong: list[int] = []
        self.crashed = False

    def say(self, step: int, text: str) -> None:
        if self.said_at is None:
            self.said_at, self.said = step, text

    @contextlib.contextmanager
    def listening(self, step: int) -> Iterator[None]:
        """Note the warnings and errors of graphrt; anything else that is raised is a crash."""
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                yield
            except Exception as error:
                self._hear(caught, step)
                self.say(step, f"{type(error).__name__}: {error}")
                self.crashed = not _is_named(error)
                raise _Stopped from error
            self._hear(caught, step)

    def _hear(self, caught: list[warnings.WarningMessage], step: int) -> None:
        for each in caught:
            name = each.category.__name__
            if each.category.__module__.startswith("graphrt") and name not in _OF_OTHER_THINGS:
                self.say(step, f"{name}: {each.message}")

    def outcome(self, hits: int) -> Outcome:
        at = self.said_at
        before = [step for step in self.wrong if at is None or step < at]
        word: Word
        if self.crashed:
            word = "crash"
        elif before:
            word = "silent" if at is None else "late"
        else:
            word = "right" if at is None else "named"
        return Outcome(word, len(before), len(self.wrong) - len(before), at, self.said, hits)


class _Stopped(Exception):
    """The run ended with an error, which the record has."""


def _judged(
    defect: Defect, level: str, device: str, mode: str | None, expected: list[Any]
) -> Outcome:
    record, runner = Record(), None
    try:
        with record.listening(-1):
            scenario = _built(defect, device)
            scenario.mode = mode or scenario.mode
            runner = runner_of(scenario, level, device)
            if not runner.options.lazy:
                runner.capture()
        _seed(SEED + 1)
        for step, values in _steps(scenario, device):
            with record.listening(step):
                call = partial(_call, runner, scenario, values, step)
                outputs = _in_thread(scenario, call)
                seen = _observed(outputs, scenario)
                scenario.after(step, outputs)
            if not _right(scenario, step, values, seen, expected[step]):
                record.wrong.append(step)
    except _Stopped:
        pass
    hits = 0 if runner is None else runner.report().reasons[Reason.HIT]
    if runner is not None:
        runner.close()
    return record.outcome(hits)


def runner_of(scenario: Scenario, level: str, device: str) -> GraphRunner:
    """The scenario's runner, checked at this level where `GraphOptions` has levels."""
    options = {**scenario.options, "check": level}
    return GraphRunner(
        scenario.forward,
        inputs=scenario.inputs,
        outputs=scenario.outputs,
        sizes=list(scenario.sizes),
        mode=scenario.mode,
        host=Host(**_known(Host, scenario.host)),
        options=GraphOptions(**_known(GraphOptions, options)),
        platform=device,
    )


def _known(of: type, keywords: Any) -> dict[str, Any]:
    names = {each.name for each in fields(of)}
    return {name: value for name, value in keywords.items() if name in names}


def _call(runner: GraphRunner, scenario: Scenario, values: Any, step: int) -> Any:
    metadata = None if scenario.metadata is None else scenario.metadata(step)
    return runner(scenario.batch(step, scenario.rows[step]), metadata=metadata, **values)


def _twin(defect: Defect, device: str) -> list[Any]:
    """What the program gives at each step without graphs, on the live rows alone."""
    scenario = _built(defect, device)
    _seed(SEED + 1)
    found = []
    for step, values in _steps(scenario, device):
        outputs = _in_thread(scenario, partial(scenario.plain or scenario.forward, **values))
        found.append(_observed(outputs, scenario))
        scenario.after(step, outputs)
    return found


def _built(defect: Defect, device: str) -> Scenario:
    _seed(SEED)
    with torch.device(device):
        scenario = defect.build(device)
    return replace(scenario, rows=LONGER) if defect.long else scenario


def _seed(seed: int) -> None:
    # Beside GPUs that are not there `torch.manual_seed` prints the stack three times, for when
    # they come: a tenth of a run.
    on_gpus = torch.cuda.is_available()
    (torch.manual_seed if on_gpus else torch.default_generator.manual_seed)(seed)
    random.seed(seed)
    np.random.seed(seed)


def _steps(scenario: Scenario, device: str) -> Iterator[tuple[int, dict[str, torch.Tensor]]]:
    """Each step's number and its inputs, after what the host does before it."""
    generator = torch.Generator().manual_seed(SEED)
    for step, rows in enumerate(scenario.rows):
        values = scenario.values(step, rows, generator)
        with torch.device(device):
            scenario.between(step)
        yield step, {name: value.to(device) for name, value in values.items()}


def _in_thread(scenario: Scenario, call: Callable[[], T]) -> T:
    if not scenario.in_new_threads:
        return call()
    found: list[Any] = []

    def work() -> None:
        try:
            # Grad mode is a thread's own.
            with torch.no_grad():
                found.append((call(), None))
        except Exception as error:
            found.append((None, error))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    value, error = found[0]
    if error is not None:
        raise error
    return value


def _observed(outputs: Any, scenario: Scenario) -> list[tuple[str, Any]]:
    """Clones of all that the step gave and of the state that it left."""
    leaves = list(tree.leaves(outputs))
    leaves += [(f"state {n}", tensor) for n, tensor in enumerate(scenario.state())]
    return [
        (path, leaf.detach().cpu().clone() if isinstance(leaf, torch.Tensor) else leaf)
        for path, leaf in leaves
    ]


def _right(scenario: Scenario, step: int, values: Any, ours: Any, theirs: Any) -> bool:
    if scenario.judge is not None:
        return scenario.judge(step, values, ours[0][1])
    if [path for path, _ in ours] != [path for path, _ in theirs]:
        return False
    pairs = zip(ours, theirs, strict=True)
    return all(_equal(a, b, scenario.tolerance) for (_, a), (_, b) in pairs)


def _equal(a: Any, b: Any, tolerance: float) -> bool:
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        return type(a) is type(b) and a == b
    if a.shape != b.shape or a.dtype is not b.dtype:
        return False
    if not b.dtype.is_floating_point:
        return torch.equal(a, b)
    if b.dtype in (torch.bfloat16, torch.float16):
        tolerance *= 30
    wide = b.double()
    rms = wide.nan_to_num(0, 0, 0).pow(2).mean().sqrt().item() if b.numel() else 0.0
    return torch.allclose(a.double(), wide, rtol=0, atol=tolerance * max(rms, 1e-6), equal_nan=True)


def _is_named(error: BaseException) -> bool:
    # torch itself raises for memory that graphrt has marked.
    name = str(error).partition(":")[0].strip()
    marked = isinstance(getattr(graphrt.errors, name, None), type)
    return isinstance(error, GraphRTError) or marked


@contextlib.contextmanager
def ambient_state_put_back() -> Iterator[None]:
    """No gradients inside, and whatever of torch's and the process's settings was changed is put
    back after it."""
    environment = dict(os.environ)
    autocast = [
        (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
        for kind in ("cpu", "cuda")
    ]
    dtype, threads = torch.get_default_dtype(), torch.get_num_threads()
    deterministic = torch.are_deterministic_algorithms_enabled()
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    precision, tf32 = torch.get_float32_matmul_precision(), (matmul.allow_tf32, cudnn.allow_tf32)
    cache = torch.is_autocast_cache_enabled()
    of_torch, of_python, of_numpy = (
        torch.get_rng_state(),
        random.getstate(),
        np.random.get_state(),
    )
    try:
        with torch.no_grad():
            yield
    finally:
        for name in set(os.environ) - set(environment):
            del os.environ[name]
        os.environ.update(environment)
        for kind, enabled, of in autocast:
            torch.set_autocast_enabled(kind, enabled)
            torch.set_autocast_dtype(kind, of)
        torch.set_autocast_cache_enabled(cache)
        torch.clear_autocast_cache()
        torch.set_default_dtype(dtype)
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(deterministic)
        torch.set_float32_matmul_precision(precision)
        matmul.allow_tf32 = tf32[0]
        # Torch's own test helpers, once imported, let nobody write it.
        if cudnn.allow_tf32 != tf32[1]:
            cudnn.allow_tf32 = tf32[1]
        torch.set_rng_state(of_torch)
        random.setstate(of_python)
        np.random.set_state(of_numpy)
