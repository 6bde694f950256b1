"""`explain`: what keeps a forward out of graphs, and how much faster they are.

1. Capture it as one graph. Each operator that is refused is noted with its line, and the forward is
   captured again in pieces, around functions that are marked @eager_break and around that operator,
   until nothing is refused: then all of them are known. A read that is no operator (`if tensor:`,
   `tensor.numpy()`) ends the search unless it is in such a function, as nothing can break there.
2. Run steps, the first of which is a trial: does the replay equal the forward? If one graph does
   not, pieces may.
3. Time steps, by graphs and eagerly on the same live rows.

Inputs are made up: random numbers, and 0 and 1 where they are integers, so that live rows differ
from their padding. An operator that only other values reach is not found.
"""

from __future__ import annotations

import random
import statistics
import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from time import perf_counter
from types import FrameType
from typing import Any

import torch

from graphrt._runner import GraphRunner
from graphrt.core.base.errors import (
    BreakWarning,
    CaptureError,
    GraphQuarantinedWarning,
    GraphRTError,
    InvalidOptionError,
)
from graphrt.core.base.texts import aligned, counted, error_line, size_text
from graphrt.core.base.torch_names import untraced
from graphrt.core.batch.descriptor import Batch
from graphrt.core.batch.modes import GraphMode
from graphrt.core.capture.guard import check_break
from graphrt.core.capture.options import GraphOptions
from graphrt.core.capture.refusals import HOST_DRAW, Source
from graphrt.core.device.platform import Platform
from graphrt.core.inputs.spec import InputSpec
from graphrt.core.replay.entry import EagerPart
from graphrt.core.runner.report import GAIN_TITLES, gain_of

_MOST_BREAKS = 32
"""Operators to break at, after which the search ends."""
_STEPS, _ROUNDS = 20, 7
"""Steps of one measurement, and measurements, of which the median counts."""
_MOST_NAMES = 6
"""Names in a line."""


@dataclass(frozen=True)
class Obstacle:
    """Something that no graph can hold, with its operator and line if they are known."""

    what: str
    advice: str
    op: str | None = None
    source: str | None = None


@dataclass(frozen=True)
class Explanation:
    """The result of `explain`. Without `mode` nothing could be captured."""

    obstacles: tuple[Obstacle, ...]
    mode: str | None = None
    breaks: tuple[str, ...] = ()
    graphs: int = 0
    """Graphs of one step."""
    eager_parts: int = 0
    """Eager parts between these graphs."""
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    """Names of the tensors besides inputs that a step writes, or only reads, with their size."""
    trial: str | None = None
    """Why the replay does not equal the forward; None if it does."""
    eager_s: float = 0.0
    graph_s: float = 0.0
    """Seconds of a step eagerly, and by graphs."""
    timed: str = ""
    """The graph that was timed."""
    code: str = ""
    """Python that makes such a runner."""

    def __str__(self) -> str:
        lines = ["Nothing stands in the way of one graph (FULL)."]
        if self.trial is not None:
            lines = ["No operator stands in the way of one graph (FULL)."]
        if self.obstacles:
            lines = ["In the way of one graph (FULL):"]
        for number, each in enumerate(self.obstacles, 1):
            where = f" at {each.source}" if each.source else ""
            lines.append(f"{number}. {each.op or each.what}{where}")
            lines += [f"   {each.what}"] if each.op else []
            lines.append(f"   try: {each.advice}")
        if self.mode is None:
            lines.append("Nothing was captured, so more may stand in the way behind the last one.")
            return "\n".join(lines)
        parts = f"{counted(self.graphs, 'graph')}, {counted(self.eager_parts, 'eager part')}"
        lines.append(f"Captured as {self.mode}: a step is {parts}")
        lines.append(f"It reads: {_listed(self.reads) or 'nothing but its inputs'}")
        lines.append(f"It writes: {_listed(self.writes) or 'nothing'}")
        if self.trial is not None:
            return "\n".join([*lines, f"But no graph stands for it yet: {self.trial}"])
        lines.append("The replay equals the forward.")
        times = gain_of({"replay_s": self.graph_s, "eager_s": self.eager_s})
        table = aligned([("graph", *GAIN_TITLES), (self.timed, *times)])
        return "\n".join([*lines, "", self.code, "", *table])


def _listed(names: tuple[str, ...]) -> str:
    shown = ", ".join(names[:_MOST_NAMES])
    return f"{len(names)} tensors: {shown}, ..." if len(names) > _MOST_NAMES else shown


def explain(
    forward: Callable[..., Any],
    inputs: Mapping[str, InputSpec],
    *,
    tokens: int = 8,
    platform: Platform | str | None = None,
) -> Explanation:
    """Capture `forward` for `tokens` tokens, and try it. Errors that are no refusal of a capture,
    such as those of the forward itself, are raised."""
    obstacles: dict[tuple[object, ...], Obstacle] = {}
    breaks: list[str] = []
    one_graph: Explanation | None = None
    mode = GraphMode.FULL
    while True:
        with GraphRunner(
            forward,
            mode=mode,
            sizes=[tokens],
            inputs=inputs,
            platform=platform,
            options=GraphOptions(breaks=tuple(breaks)),
        ) as runner:
            refusal = _refusal_of(runner)
            if refusal is None:
                explanation = _explained(runner, forward, inputs, tokens, obstacles, tuple(breaks))
                if explanation.trial is None or mode is GraphMode.PIECEWISE:
                    # Without an eager part the pieces are the one graph that was tried before.
                    return (
                        explanation if one_graph is None or explanation.eager_parts else one_graph
                    )
                one_graph, mode = explanation, GraphMode.PIECEWISE
                continue
        obstacle = Obstacle(
            refusal.what.splitlines()[0],
            refusal.advice or "capture it in pieces around this",
            refusal.op,
            refusal.source,
        )
        obstacles.setdefault((obstacle.op, obstacle.source), obstacle)
        if mode is GraphMode.FULL:
            # Functions marked @eager_break, which run between pieces alone, may be all it takes.
            mode = GraphMode.PIECEWISE
            continue
        name = _break_at(refusal.op)
        if name is None or name in breaks or len(breaks) == _MOST_BREAKS:
            # Nothing can break there, or breaking there did not help; or there are too many.
            return Explanation(tuple(obstacles.values()))
        breaks.append(name)


def _refusal_of(runner: GraphRunner[Any]) -> CaptureError | None:
    try:
        with torch.no_grad(), warnings.catch_warnings():
            # The trial after it tells whether the number stays.
            warnings.simplefilter("ignore", BreakWarning)
            runner.capture()
    except CaptureError as error:
        return error
    return None


def _break_at(op: str | None) -> str | None:
    """`aten.nonzero.default` as `GraphOptions(breaks=)` names it; None for what cannot be a break,
    as `Tensor.__bool__`, which never gets to the dispatcher."""
    namespace, _, rest = (op or "").partition(".")
    name = f"{namespace}::{rest.removesuffix('.default')}"
    try:
        check_break(name)
    except InvalidOptionError:
        return None
    return name


def _explained(
    runner: GraphRunner[Any],
    forward: Callable[..., Any],
    inputs: Mapping[str, InputSpec],
    tokens: int,
    obstacles: dict[tuple[object, ...], Obstacle],
    breaks: tuple[str, ...],
) -> Explanation:
    """Try and time the captured `runner` on made-up inputs; adds a host draw to `obstacles` if the
    replay does not equal the forward because of one."""
    live = max(tokens - 1, 1)
    values = _made_up(inputs, live, runner.pool.device)
    batch, sync = Batch(live, live), runner.platform.synchronize
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", GraphQuarantinedWarning)
        failure, by_graph = None, 0.0
        try:
            for _ in range(2):
                runner(batch, **values)
            by_graph = _seconds(lambda: runner(batch, **values), sync)
        except GraphRTError as error:
            # An eager part may return other values, or shapes, than at capture.
            failure = error_line(error)
        eagerly = _seconds(lambda: forward(**values), sync)
    report = runner.report()
    parts = [part for entry in runner.graphs.entries() for part in entry.parts]
    eager_parts = sum(isinstance(part, EagerPart) for part in parts)
    uses = [(use.name or "memory without a name", use) for use in report.trust.reads]
    failures = (each.failure for each in report.trust.trials if each.failure)
    failure = failure or next(failures, None)
    if failure is not None:
        draw = _host_draw(lambda: forward(**values))
        if draw is not None:
            obstacles.setdefault((draw.op, draw.source), draw)
    return Explanation(
        tuple(obstacles.values()),
        mode=report.mode.name,
        breaks=breaks,
        graphs=len(parts) - eager_parts,
        eager_parts=eager_parts,
        reads=tuple(f"{name} ({size_text(use.bytes)})" for name, use in uses if not use.written),
        writes=tuple(f"{name} ({size_text(use.bytes)})" for name, use in uses if use.written),
        trial=failure,
        eager_s=eagerly,
        graph_s=by_graph,
        timed="".join(f"{each.mode.name} [{each.descriptor}]" for each in report.graphs),
        code=_code(report.mode.name, inputs, tokens, breaks),
    )


def _made_up(
    inputs: Mapping[str, InputSpec], rows: int, device: torch.device
) -> dict[str, torch.Tensor]:
    """Random inputs of a step of `rows` tokens, each a request of its own."""
    generator = torch.Generator().manual_seed(0)
    values = {}
    for name, spec in inputs.items():
        shape, (axis, dim) = spec.sizes(rows, rows), spec.batch_axis()
        if spec.dtype.is_floating_point:
            value = torch.randn(shape, generator=generator, device="cpu", dtype=torch.float32)
        elif spec.index:
            value = torch.zeros(shape, device="cpu", dtype=torch.int64)
        elif axis is not None and shape[dim] > rows:
            # "reqs+1": where each request starts, and the last one ends.
            of_rows = [-1 if at == dim else 1 for at in range(len(shape))]
            value = torch.arange(shape[dim], device="cpu").reshape(of_rows).expand(shape)
        else:
            # Rows differ: equal ones would hide a mean over them.
            value = torch.randint(2, shape, generator=generator, device="cpu")
        values[name] = value.to(spec.dtype).to(device)
    return values


def _host_draw(call: Callable[[], object]) -> Obstacle | None:
    """The first line, if any, that draws from a generator of Python or NumPy. No operator shows the
    draw, and every replay has the numbers of the capture."""
    draws = _Draws()
    before = sys.gettrace()
    sys.settrace(draws.enter)
    try:
        with torch.no_grad():
            call()
    finally:
        sys.settrace(before)
    if draws.first is None:
        return None
    module, source = draws.first
    return Obstacle(HOST_DRAW.what, HOST_DRAW.advice, module, str(source))


class _Draws:
    """Finds the first line of a run after which the state of a host generator has changed."""

    def __init__(self) -> None:
        self.first: tuple[str, Source] | None = None
        self._before = _host_generators()
        # Frame -> its last line: Python calls the tracer before a line runs.
        self._lines: dict[FrameType, int] = {}

    @untraced
    def enter(self, frame: FrameType, event: str, arg: object) -> Any:
        """The tracer of a function's lines; None for functions of the generators and of torch."""
        module = str(frame.f_globals.get("__name__"))
        if self.first is not None or module.partition(".")[0] in ("numpy", "random", "torch"):
            return None
        return self._line

    @untraced
    def _line(self, frame: FrameType, event: str, arg: object) -> Any:
        if self.first is None and event in ("line", "return"):
            now = _host_generators()
            moved = [name for name, state in now.items() if state != self._before.get(name)]
            line = self._lines.get(frame, frame.f_lineno)
            if moved:
                code = frame.f_code
                self.first = moved[0], Source(code.co_filename, line, code.co_name)
            self._lines[frame] = frame.f_lineno
        return self._line


def _host_generators() -> dict[str, object]:
    states: dict[str, object] = {"random": random.getstate()}
    numpy = sys.modules.get("numpy.random")
    if numpy is not None:
        name, key, *rest = numpy.get_state()
        states["numpy.random"] = (name, key.tobytes(), *rest)
    return states


def _seconds(step: Callable[[], object], sync: Callable[[], object]) -> float:
    """Seconds of one step: the median of several rounds."""
    rounds = []
    for _ in range(_ROUNDS):
        sync()
        began = perf_counter()
        for _ in range(_STEPS):
            step()
        sync()
        rounds.append((perf_counter() - began) / _STEPS)
    return statistics.median(rounds)


def _code(mode: str, inputs: Mapping[str, InputSpec], tokens: int, breaks: tuple[str, ...]) -> str:
    names = ["GraphOptions"] * bool(breaks) + ["GraphRunner", "InputSpec"]
    options = [f"    options=GraphOptions(breaks={list(breaks)}),"] if breaks else []
    arguments = ", ".join(f"{name}={name}" for name in inputs)
    return "\n".join(
        [
            "import torch",
            f"from graphrt import {', '.join(names)}",
            "runner = GraphRunner(",
            "    forward,",
            f'    mode="{mode}",',
            f"    sizes=[{tokens}],",
            "    inputs={",
            *(f'        "{name}": {_spec(spec)},' for name, spec in inputs.items()),
            "    },",
            *options,
            ")",
            "runner.capture()",
            f"# with torch.no_grad(): output = runner({arguments})",
        ]
    )


def _spec(spec: InputSpec) -> str:
    more = "" if spec.pad is None else f", pad={spec.pad!r}"
    return f"InputSpec({spec.dtype}, {spec.shape!r}{more}{', index=True' * spec.index})"
