"""`RankedSteps`: the entrance of a runner with `Host(ranks=)`, where each step is voted on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import torch

from graphrt.core.base.errors import InvalidBatchError
from graphrt.core.base.option_values import shown
from graphrt.core.batch.descriptor import Batch
from graphrt.core.dispatch.reasons import Agreed, Dispatch
from graphrt.core.inputs.buffers import StaticInputs, batch_of
from graphrt.core.replay.recording import is_inside_capture, under_way
from graphrt.core.runner.graph_table import GraphTable
from graphrt.core.runner.host import Run


class Answer(NamedTuple):
    """The graph of one step, the same on all ranks; of mode NONE if no graph can be used by all of
    them. With `tried`, all ranks make a trial of the step."""

    agreed: Dispatch
    tried: bool


class Vote(Protocol):
    """A vote that is under way; `result` waits for it."""

    def result(self) -> Answer: ...


class Voting(Protocol):
    """The part of an `Agreement` that steps need."""

    def take(self, graphs: GraphTable, batch: Batch | None) -> Vote: ...

    def explained(self, error: Exception) -> Exception: ...

    def fail(self, error: BaseException) -> None: ...


class RankedSteps:
    """Calls `run`, the entrance of a runner's engine, with the graph of each step's vote.

    Errors of a vote are raised before anything is launched. An error of the step itself is raised,
    and told to the other ranks: they raise `RankStoppedError`.
    """

    def __init__(self, agreement: Voting, graphs: GraphTable, run: Run) -> None:
        self._agreement = agreement
        self._graphs = graphs
        self._run = run

    def __call__(
        self,
        batch: Batch | None,
        values: Mapping[str, Any],
        updates: Any,
        metadata: Any,
        agreed: Agreed | None,
    ) -> Any:
        if under_way and is_inside_capture():
            # The step is part of a capture of another runner: no vote.
            return self._run(batch, values, updates, metadata, agreed)
        if agreed is not None:
            raise InvalidBatchError(
                "a step came with an agreed graph, and its runner votes on each step",
                got=f"agreed={shown(agreed)}",
                advice="leave agreed= out, or make the runner without Host(ranks=)",
            )
        pool = self._graphs.setup.pool
        if pool.asleep:  # before the vote: after an error in a step no rank makes another one
            raise pool.busy_error(self._graphs.setup.owner)
        if batch is None:
            batch = batch_of(self._graphs.setup.inputs, values)
        answer = self._agreement.take(self._graphs, batch).result()
        checks = self._graphs.checks
        try:
            if answer.agreed.slot >= 0:
                checks.decide(answer.agreed.slot, answer.tried)
            return self._run(batch, values, updates, metadata, answer.agreed)
        except Exception as error:
            explained = self._agreement.explained(error)
            self._agreement.fail(explained)
            if explained is error:
                raise
            raise explained from error
        except BaseException as error:  # a Ctrl-C: the others wait for this rank
            self._agreement.fail(error)
            raise
        finally:
            checks.decided = None


def padding_of(inputs: StaticInputs, tokens: int, device: torch.device) -> dict[str, Any]:
    """The inputs of one request of padding, nested as they were declared."""
    specs = inputs.declared.specs
    padding = {
        name: torch.full(spec.sizes(tokens, 1), spec.pad_value, dtype=spec.dtype, device=device)
        for name, spec in specs.items()
    }
    return inputs.nest(padding)
