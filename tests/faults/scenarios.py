"""The scenarios: what a host does, one fault at a time."""

from __future__ import annotations

from typing import Any

import torch

from graphrt import (
    Example,
    GraphOptions,
    Host,
)
from tests.faults.world import LARGEST, Model, Step, World, scale

PIECES = ("operator", "replay", "copy", "stream", "driver")
"""What is done between the pieces of a step: of what came before them there is no way back."""

OFF = GraphOptions(check="off")


class Create(World):
    """A pool and a runner are made."""

    def act(self) -> Any:
        self.runner()


class CaptureFull(World):
    """`capture()` of FULL graphs."""

    def prepare(self) -> None:
        self.run = self.runner()

    def act(self) -> Any:
        self.run.capture()


class CaptureNext(CaptureFull):
    """The last `capture_next()`, after a step that the first graph has served."""

    options = GraphOptions()

    def prepare(self) -> None:
        self.run = self.runner(options=self.options)
        self.run.capture_next()
        self.step(self.run, Step(3))

    def act(self) -> Any:
        self.run.capture_next()


class CaptureNextUnwatched(CaptureNext):
    """The same at check="off", where state is declared."""

    options = OFF

    def prepare(self) -> None:
        host = Host(state=(self.model.steps, self.model.cache))
        self.run = self.runner(options=self.options, host=host)
        self.run.capture_next()
        self.step(self.run, Step(3))


class StepMeanwhile(CaptureNext):
    """A step while a graph is missing."""

    options = OFF
    halves = ("operator",)

    def act(self) -> Any:
        return self.step(self.run, Step(2, value=9.0, factor=5.0))


class CapturePieces(CaptureFull):
    """`capture()` of PIECEWISE graphs with an eager break."""

    def make_model(self) -> Model:
        return Model(self.device, breaks=True)

    def prepare(self) -> None:
        self.run = self.runner(mode="PIECEWISE")


class CaptureStatic(CaptureFull):
    """`capture()` with outputs that are copied inside of the graph."""

    def prepare(self) -> None:
        self.run = self.runner(options=GraphOptions(outputs="static"))


class CaptureExample(CaptureFull):
    """`capture()` that tries its graphs with steps of the host."""

    def prepare(self) -> None:
        def example(batch: Any, generator: Any) -> Example:
            rows = batch.num_tokens
            return Example({"x": torch.ones(rows, 4), "slot": torch.arange(rows) + 20})

        self.run = self.runner(host=Host(example=example, state=(self.model.steps,)))


class Lazy(World):
    """A step that captures its graph, of both modes."""

    halves = PIECES
    halves_in = ("core/replay/", "cpu/graph")

    def make_model(self) -> Model:
        return Model(self.device, breaks=True)

    def prepare(self) -> None:
        options = GraphOptions(lazy=True, check="off")
        # What is not watched has to be declared.
        host = Host(state=(self.model.steps, self.model.cache))
        self.run = self.runner(mode="FULL_AND_PIECEWISE", options=options, host=host)

    def act(self) -> Any:
        return self.step(self.run, Step(3))


class Hit(World):
    """A step that its graph serves as it is, with random numbers."""

    halves = ("operator",)
    rows = 4
    options = OFF
    mode = "FULL"
    first: tuple[int, ...] = (4, 2, 7)

    def make_model(self) -> Model:
        return Model(self.device, noise=self.device == "cpu" and self.rows == LARGEST)

    def prepare(self) -> None:
        self.run = self.runner(options=self.options, mode=self.mode)
        self.run.capture()
        for rows in self.first:
            self.step(self.run, Step(rows))

    def act(self) -> Any:
        return self.step(self.run, Step(self.rows, value=9.0, factor=5.0))


class Padded(Hit):
    """A step with padding rows."""

    rows = 3


class Clone(Hit):
    """A step whose outputs are copied."""

    rows = 3
    options = GraphOptions(check="off", outputs="clone")


class Eager(Hit):
    """A step that no graph is large enough for."""

    rows = 7


class Pieces(Hit):
    """A step by pieces, with an eager break."""

    halves = PIECES
    rows = 3
    mode = "PIECEWISE"

    def make_model(self) -> Model:
        return Model(self.device, breaks=True)


class Tried(Hit):
    """The first step of a graph, which is tried (check="capture")."""

    halves = ()
    rows = 3
    options = GraphOptions()
    first = ()


class Always(Hit):
    """A step at check="always"."""

    halves = ()
    rows = 3
    options = GraphOptions(check="always")
    first = (4, 3)


class Verify(Padded):
    """`verify()` of a step."""

    halves = ()

    def act(self) -> Any:
        step = Step(self.rows, value=9.0)
        return self.run.verify(step.batch, updates=self.updates(step), **step.values)


class Recapture(Hit):
    """`recapture()`, after which weights are somewhere else."""

    halves = ()
    options = GraphOptions()

    def make_model(self) -> Model:
        return Model(self.device)

    def act(self) -> Any:
        self.run.recapture()


class Release(Recapture):
    """`release()`."""

    def act(self) -> Any:
        self.run.release()


class Close(Recapture):
    """`close()` of a runner."""

    def act(self) -> Any:
        self.run.close()


class TaskCapture(CaptureFull):
    """`capture()` of a forward with an updatable task."""

    def make_model(self) -> Model:
        return Model(self.device, tasks=scale)


class TaskStep(Padded):
    """A step that updates its task."""

    def prepare(self) -> None:
        super().prepare()
        if not self.platform.capture_executes:
            # Where a graph is launched before it is updated, it then runs with old arguments.
            self.halves = (*self.halves, "task", "event", "replay")

    def make_model(self) -> Model:
        return Model(self.device, tasks=scale)


class TaskPieces(TaskStep):
    """The same by pieces, with an eager break."""

    halves = (*PIECES, "task", "event")
    mode = "PIECEWISE"

    def make_model(self) -> Model:
        return Model(self.device, tasks=scale, breaks=True)


SCENARIOS: dict[str, type[World]] = {
    each.__name__: each
    for each in (
        Create, CaptureFull, CaptureNext, CaptureNextUnwatched, StepMeanwhile,
        CapturePieces, CaptureStatic,
        CaptureExample, Lazy, Hit, Padded, Clone, Eager,
        Pieces, Tried, Always, Verify, Recapture, Release, Close,
        TaskCapture, TaskStep, TaskPieces,
    )
}  # fmt: skip
