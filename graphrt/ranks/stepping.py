"""`RankedRunner`: a runner whose every step is voted on."""

from __future__ import annotations

from typing import Any

import torch

from graphrt.core.base.errors import InvalidBatchError, InvalidOptionError
from graphrt.core.base.homes import public
from graphrt.core.base.option_values import shown
from graphrt.core.batch.descriptor import Batch
from graphrt.core.dispatch.reasons import Dispatch
from graphrt.core.runner.runner import GraphRunner
from graphrt.ranks.agreement import Agreement, Answer, PendingVote


@public("graphrt.ranks")
class RankedRunner:
    """Steps of one runner, with the graph that all ranks agree on.

    Made on every rank after `capture()`; raises what `Agreement.check` does, and
    `InvalidOptionError` for a runner that captures lazily.
    """

    def __init__(self, agreement: Agreement, runner: GraphRunner[Any]) -> None:
        if runner.options.lazy:
            raise InvalidOptionError(
                "a rank that captures at its own steps has other graphs than the others",
                got="lazy=True",
                expected="lazy=False",
                advice="runner.capture() on all ranks before the first step",
            )
        agreement.check(runner)
        self.agreement = agreement
        self.runner = runner

    def vote(self, batch: Batch | None) -> PendingVote:
        """Begin the vote on the next step, of `batch`; None where this rank is idle. Pass it to the
        step: `step(batch, vote=vote, ...)`."""
        to_try, failed = self.runner.graphs.checks.for_vote()
        dispatcher = self.runner.dispatcher
        return self.agreement.vote(dispatcher, batch, to_try=to_try, without=failed)

    def __call__(
        self,
        batch: Batch,
        /,
        *,
        vote: PendingVote | None = None,
        updates: Any = None,
        metadata: Any = None,
        **values: Any,
    ) -> Any:
        """Run a step as `GraphRunner.__call__` does, with the graph of its vote.

        Raises `RankLostError`, `RankStoppedError` and `RanksDifferError` before anything is
        launched. An error of the step itself is raised, and told to the other ranks: they raise
        `RankStoppedError`.
        """
        if vote is None:
            vote = self.vote(batch)
        elif vote.batch != batch:
            raise InvalidBatchError(
                "the vote was on another batch",
                got=shown(batch),
                expected=shown(vote.batch),
                advice="step(batch, vote=step.vote(batch), ...) with one batch",
            )
        return self._run(vote.result(), batch, values, updates, metadata)

    def idle(self, *, vote: PendingVote | None = None, updates: Any = None) -> Dispatch:
        """Make a step of one request of padding, because other ranks have work; returns its
        dispatch. Its outputs mean nothing."""
        answer = (self.vote(None) if vote is None else vote).result()
        descriptor = answer.agreed.descriptor
        query_len = descriptor.query_len or 1
        batch = Batch(
            query_len, 1, descriptor.query_len, descriptor.bounds, variant=descriptor.variant
        )
        self._run(answer, batch, self._padding(query_len), updates, None)
        dispatch = self.runner.last_dispatch
        assert dispatch is not None
        return dispatch

    def _run(
        self, answer: Answer, batch: Batch, values: dict[str, Any], updates: Any, metadata: Any
    ) -> Any:
        agreed, tried = answer
        checks = self.runner.graphs.checks
        try:
            if agreed.slot >= 0:
                checks.decide(agreed.slot, tried)
            return self.runner.step(
                batch, values, updates=updates, metadata=metadata, agreed=agreed
            )
        except Exception as error:
            explained = self.agreement.explained(error)
            self.agreement.fail(explained)
            if explained is error:
                raise
            raise explained from error
        except BaseException as error:  # a Ctrl-C: the others wait for this rank
            self.agreement.fail(error)
            raise
        finally:
            checks.undecided()

    def _padding(self, tokens: int) -> dict[str, Any]:
        """The inputs of one request of padding, nested as they were declared."""
        inputs = self.runner.inputs
        values: dict[str, Any] = {}
        for name, spec in inputs.declared.specs.items():
            *path, last = name.split(".")
            place = values
            for each in path:
                place = place.setdefault(each, {})
            device = self.runner.pool.device
            place[last] = torch.full(
                spec.sizes(tokens, 1), spec.pad_value, dtype=spec.dtype, device=device
            )
        return values
