"""Scenarios of several runners in one pool, and of a host's own wrappers."""

from __future__ import annotations

from typing import Any

import torch

from graphrt import BatchDescriptor, GraphOptions, GraphPool, forward_context, wrapper_class
from tests.faults.scenarios import PIECES
from tests.faults.world import Step, World


class SharedCapture(World):
    """`capture()` of a second runner in the pool of a first."""

    def prepare(self) -> None:
        self.pool = GraphPool(self.platform)
        self.first = self.runner(pool=self.pool)
        self.run = self.runner(pool=self.pool)
        self.first.capture()
        self.step(self.first, Step(3))

    def act(self) -> Any:
        self.run.capture()


class SharedSteps(SharedCapture):
    """A step of one runner after one of another in its pool."""

    halves = ("operator",)

    def prepare(self) -> None:
        super().prepare()
        self.run.capture()
        for run in self.runners:
            for rows in (4, 2, 3, 4):
                self.step(run, Step(rows))

    def act(self) -> Any:
        return self.step(self.run, Step(3, value=9.0))


class SharedClose(SharedSteps):
    """`close()` of the pool of two runners."""

    halves = ()

    def act(self) -> Any:
        self.pool.close()


class Wrapper(World):
    """A host's own wrapper, by `get_static_graph_wrapper_cls()`: the step that captures."""

    def prepare(self) -> None:
        if self.platform.capture_executes:
            # Whoever has a wrapper by itself saves no state either.
            self.halves = ("memory", "buffer", *PIECES)
        self.pool = GraphPool(self.platform)
        self.pools.append(self.pool)
        wrap = wrapper_class(self.platform)
        self.wrapper = wrap(self.model, "FULL", pool=self.pool, options=GraphOptions(lazy=True))
        step = Step(4)
        self.given = {name: each.to(self.device) for name, each in step.values.items()}
        self.descriptor = BatchDescriptor(4)

    def act(self) -> Any:
        with forward_context("FULL", self.descriptor):
            return self.wrapper(**self.given).cpu().clone()

    def check_serves(self, sizes: Any = (), hits: bool = False) -> None:
        for value in (1.0, -2.0):
            step = Step(4, value)
            for name, each in step.values.items():
                self.given[name].copy_(each)
            wanted = self.expected(step)
            assert torch.equal(Wrapper.act(self), wanted), "a step of the wrapper is wrong"
            assert len(self.wrapper.entries) == 1

    def figures(self) -> dict[str, int]:
        return {**super().figures(), "entries": len(self.wrapper.entries)}


class WrapperStep(Wrapper):
    """The same: a step that replays."""

    def prepare(self) -> None:
        super().prepare()
        Wrapper.act(self)
        self.halves = ("operator",)


class WrapperClear(WrapperStep):
    """The same: `clear_graphs()`."""

    def act(self) -> Any:
        self.wrapper.clear_graphs()


SHARING: dict[str, type[World]] = {
    each.__name__: each
    for each in (
        SharedCapture, SharedSteps, SharedClose, Wrapper, WrapperStep, WrapperClear,
    )
}  # fmt: skip
