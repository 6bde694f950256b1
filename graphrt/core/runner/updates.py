"""The host arguments of tasks, step by step: what UNCHANGED stands for."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from graphrt.core.base.errors import InvalidUpdateError, MissingUpdateError
from graphrt.core.batch.descriptor import Batch
from graphrt.core.replay.host_args import DEFERRED, UNCHANGED
from graphrt.core.replay.tasks import check_names
from graphrt.core.runner.prepared import PreparedStep


class LastUpdates:
    """The updates of the last step that had some, and the graph that was given them last."""

    __slots__ = ("_failed", "_given", "_live", "_slot", "_steps")

    def __init__(self, steps: Sequence[PreparedStep | None]) -> None:
        """`steps` are those of graphs, by slot."""
        self._steps = steps
        self._given: Any = None
        self._live: tuple[int, int | None] | None = None
        self._slot = -1
        self._failed = False

    def forget_graphs(self) -> None:
        """Forget what graphs were given: they are destroyed, and others may take their slots."""
        self._slot = -1

    def step_failed(self, updates: Any) -> None:
        """Note that a step with these updates failed: nobody knows which of them its graph has."""
        if updates is UNCHANGED:
            self._slot = -1
        elif updates is not None:
            self._failed = True

    @contextmanager
    def set_aside(self) -> Iterator[None]:
        """Run steps that are none of the host's, after which UNCHANGED means what it did before."""
        before = self._given, self._live, self._failed
        try:
            yield
        finally:
            self._given, self._live, self._failed = before
            self._slot = -1

    def resolve(self, updates: Any, batch: Batch, slot: int = -1, *, replayed: bool = True) -> Any:
        """What the context of this step says: `updates` of the tasks that it has.

        `slot` is of the graph that the step is padded to, -1 where it is not padded. UNCHANGED
        stays what it is only where that graph is `replayed` and has been given those values
        already, for a `batch` of as many requests. Raises `InvalidUpdateError` for names of no
        task.
        """
        if updates is None:
            return None
        step = self._steps[slot] if slot >= 0 else None
        if not replayed:
            slot = -1
        if updates is DEFERRED:
            raise InvalidUpdateError(
                "the updates of a runner's step come with it",
                got="DEFERRED",
                expected="this step's updates, or UNCHANGED",
                advice="a GraphWrapper takes them after the call, with update()",
            )
        live = batch[0], batch[1]
        if updates is UNCHANGED:
            if self._failed:
                raise MissingUpdateError(
                    "the step before failed half-way, so its host arguments cannot be repeated",
                    got="UNCHANGED",
                    expected="updates for every task",
                    advice="pass the updates of this step",
                )
            if 0 <= slot == self._slot and live == self._live:
                return updates
            updates = self._given
            given = self._given
        else:
            # The host may change its own lists in place before it says UNCHANGED.
            given = _copied(updates)
            self._failed = False
        if step is not None and (type(updates) is dict or isinstance(updates, Mapping)):
            if not updates.keys() <= step.task_names:
                # The host need not know which of its batches run by pieces, without tasks.
                others = [each.task_names for each in self._steps if each is not None]
                check_names(updates, frozenset().union(*others))
                updates = {name: updates[name] for name in step.task_names & updates.keys()}
        else:
            slot = -1
        self._given, self._slot, self._live = given, slot, live
        return updates


def _copied(updates: Any) -> Any:
    if type(updates) is not dict and not isinstance(updates, Mapping):
        return updates
    return {
        name: (
            {key: _copied_value(value) for key, value in values.items()}
            if isinstance(values, Mapping)
            else values
        )
        for name, values in updates.items()
    }


def _copied_value(value: Any) -> Any:
    if type(value) is int:
        return value
    if isinstance(value, torch.Tensor):
        return value.clone()
    try:
        return copy.copy(value)
    except TypeError:
        # A generator, say, which is refused when it is fitted.
        return value
