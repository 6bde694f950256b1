"""One program, run with graphs and judged: right, named, or a defect."""

from __future__ import annotations

import contextlib
import warnings
from dataclasses import dataclass
from typing import Any

import torch

from graphrt import Batch, GraphPool, GraphRTError
from graphrt.core.base import tree
from graphrt.errors import GraphQuarantinedWarning
from tests.fuzz.comparing import copied, cut, difference
from tests.fuzz.eager import Seen, Twin, random_state, saved, set_random_state, usable
from tests.fuzz.growing import grown
from tests.fuzz.hosts import RunnerHost, WrapperHost
from tests.fuzz.program import Program, Step
from tests.fuzz.values import Values, blank, grad_mode, padded, values_of

DEFECTS = ("wrong", "raw", "crash")
"""Outcomes that must not be."""
_SEEDS = 100


@dataclass(frozen=True)
class Verdict:
    """`outcome` is right, named (at a step), refused (at a capture), invalid (eager raises) or a
    defect; `reason` the class of what was said, `detail` its text; `hits` the steps replayed."""

    outcome: str
    reason: str = ""
    detail: str = ""
    hits: int = 0

    @property
    def is_defect(self) -> bool:
        return self.outcome in DEFECTS


class _EagerRaises(Exception):
    """What a step raised, eager raises too."""


class _Differs(Exception):
    """A step gave other bits than eager."""


def judge(program: Program, platform: str = "cpu") -> Verdict:
    """Run the program on a platform of this name and say what came of it. Raises `PlatformError`
    where there is none."""
    setup = program.setup
    deterministic = torch.are_deterministic_algorithms_enabled()
    with contextlib.ExitStack() as stack:
        said = stack.enter_context(warnings.catch_warnings(record=True))
        warnings.simplefilter("always")
        stack.callback(torch.use_deterministic_algorithms, deterministic)
        pool = stack.enter_context(contextlib.closing(GraphPool(platform)))
        device = pool.platform.device_type
        if device == "cuda":
            torch.use_deterministic_algorithms(True, warn_only=True)
        torch.manual_seed(program.seed)
        kind = WrapperHost if setup.wrapper else RunnerHost
        run = _Run(program, device, [])
        try:
            for _ in range(setup.copies):
                host = stack.enter_context(contextlib.closing(kind(program, device, pool)))
                run.pairs.append((host, Twin(program, device)))
            run.all_steps()
        except _Differs as error:
            return Verdict("wrong", "differs", str(error), run.hits)
        except _EagerRaises as error:
            return Verdict("invalid", "eager", str(error), run.hits)
        except GraphRTError as error:
            return Verdict("named", type(error).__name__, str(error), run.hits)
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            if "OverwrittenOutputError" in text:
                return Verdict("named", "OverwrittenOutputError", text, run.hits)
            return Verdict("raw", type(error).__name__, text, run.hits)
        if run.refused is not None:
            return Verdict("refused", type(run.refused).__name__, str(run.refused), run.hits)
        for each in said:
            if issubclass(each.category, GraphQuarantinedWarning):
                return Verdict("named", "quarantined", str(each.message), run.hits)
    return Verdict("right", hits=run.hits)


class _Run:
    """The steps of one program."""

    def __init__(self, program: Program, device: str, pairs: list[tuple[Any, Twin]]) -> None:
        self.program = program
        self.device = device
        self.pairs = pairs
        self.hits = 0
        self.refused: GraphRTError | None = None

    def all_steps(self) -> None:
        setup = self.program.setup
        for host, twin in self.pairs:
            before = Seen(None, saved(twin.state), random_state(self.device))
            with self._modes(setup.capture_gradients):
                self._capture(host, twin)
            now = Seen(None, saved(host.state), random_state(self.device))
            self._compare("the capture", now, [before])
        kept: dict[int, tuple[Any, Any]] = {}
        for number, step in enumerate(setup.steps):
            for at, (host, twin) in enumerate(self.pairs):
                if number == setup.recapture_at:
                    with self._modes(setup.capture_gradients):
                        self._capture(host, twin, again=True)
                kept[at] = self._step(number, step, host, twin, kept.get(at))

    def _capture(self, host: Any, twin: Twin, *, again: bool = False) -> None:
        try:
            host.recapture() if again else host.capture()
        except GraphRTError as error:
            self.refused = error
        except Exception as error:
            # Other gradients than those of the steps, under which the program may be none.
            size = max(self.program.setup.sizes)
            values = blank(self.program.specs(), size, size)
            values = {name: value.to(self.device) for name, value in values.items()}
            _check_eager(twin, values, error)
            raise

    def _step(self, number: int, step: Step, host: Any, twin: Twin, last: Any) -> Any:
        setup, specs = self.program.setup, self.program.specs()
        values = values_of(specs, step.tokens, step.reqs, step.seed, self.device)
        inputs = dict(values)
        if setup.chain and last is not None:
            fed = next((t for t in last[1] if _like(t, values["x"])), None)
            if fed is not None:
                # What a step is fed may require a gradient, but the steps of a runner have none.
                values["x"], inputs["x"] = fed.detach().clone(), fed
        batch = Batch(step.tokens, step.reqs, 1 if step.decode else None)
        random = random_state(self.device)
        with self._modes(setup.gradients):
            try:
                outputs = host.step(batch, inputs)
            except Exception as error:
                if isinstance(error, GraphRTError):
                    raise
                set_random_state(self.device, random)
                _check_eager(twin, values, error)
                raise
            got = Seen(copied(outputs), saved(host.state), random_state(self.device))
            set_random_state(self.device, random)
            live = twin.tried(values)
            expected = [live]
            size = host.padded or host.tried
            if size is not None and size != (step.tokens, step.reqs):
                wide = padded(specs, values, *size, (step.tokens, step.reqs))
                seen = twin.tried(wide)
                expected.append(seen._replace(outputs=cut(seen.outputs, live.outputs)))
        self.hits += host.padded is not None
        self._compare(f"step {number}", got, expected)
        twin.put(got.state)
        set_random_state(self.device, got.random)
        if setup.outputs == "clone" and not setup.wrapper and last is not None:
            wrong = difference(last[0], last[2])
            if wrong is not None:
                raise _Differs(f"a clone of step {number - 1} changed: {wrong}")
        self._spoil(host, outputs)
        return outputs, tree.tensors(outputs), copied(outputs)

    def _spoil(self, host: Any, outputs: Any) -> None:
        """What a host may do to its outputs, where eager's are no state either."""
        if not self.program.setup.spoil:
            return
        own = {t.untyped_storage().data_ptr() for t in host.held()}
        with torch.no_grad():
            for tensor in tree.tensors(outputs):
                free = tensor.untyped_storage().data_ptr() not in own and 0 not in tensor.stride()
                if free and not tensor.is_inference():
                    tensor.fill_(1)

    def _compare(self, when: str, got: Seen, expected: list[Seen]) -> None:
        differences = []
        for each in expected:
            wrong = difference(got.outputs, each.outputs)
            if wrong is not None:
                differences.append(f"outputs {wrong}")
                continue
            wrong = difference(got.state, each.state)
            if wrong is not None:
                differences.append(f"state {wrong}")
            elif not torch.equal(got.random, each.random):
                differences.append("random numbers were drawn otherwise")
            else:
                return
        raise _Differs(f"{when}: {'; or '.join(differences)}")

    @contextlib.contextmanager
    def _modes(self, gradients: str) -> Any:
        autocast = torch.autocast(
            self.device, torch.bfloat16, enabled=self.program.setup.autocast, cache_enabled=False
        )
        with grad_mode(gradients), autocast:
            yield


def _check_eager(twin: Twin, values: Values, error: Exception) -> None:
    try:
        twin.tried(values)
    except Exception as other:
        if type(other) is type(error):
            raise _EagerRaises(str(other)) from other


def _like(tensor: torch.Tensor, x: torch.Tensor) -> bool:
    return (tensor.shape, tensor.dtype, tensor.device) == (x.shape, x.dtype, x.device)


def program_of(number: int, mode: str | None = None) -> Program:
    """The program of a number: the first of its seeds that runs eagerly at every size."""
    for seed in range(number * _SEEDS, (number + 1) * _SEEDS):
        program = grown(seed)
        if mode is not None:
            program = program.with_setup(mode=mode)
        found = usable(program)
        if found is not None:
            return found
    raise AssertionError(f"none of {_SEEDS} seeds of {number} gives a program")
