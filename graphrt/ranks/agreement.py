"""`Agreement`: one vote a step, and an error with the rank's number where there is no agreement."""

from __future__ import annotations

import platform as host
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from types import TracebackType
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from typing_extensions import Self

from graphrt._runner import GraphRunner
from graphrt._version import __version__
from graphrt.core.base.errors import GraphRTError, InvalidBatchError, InvalidOptionError
from graphrt.core.base.log import logger
from graphrt.core.base.option_values import shown
from graphrt.core.base.texts import error_line
from graphrt.core.batch.descriptor import (
    Batch,
    BatchDescriptor,
    checked_batch,
    idle_batch_of,
    settled,
    unpadded,
)
from graphrt.core.batch.modes import GraphMode
from graphrt.core.capture.limit import GraphLimit
from graphrt.core.dispatch.dispatcher import GraphDispatcher
from graphrt.core.dispatch.reasons import Dispatch, Reason
from graphrt.core.runner.graph_table import GraphTable
from graphrt.core.runner.host import Run
from graphrt.ranks.ballot import (
    MISSING,
    TRIED,
    UNUSABLE,
    USABLE,
    Ballot,
    Facts,
    Tally,
    decoded,
    digest_of,
    encoded,
)
from graphrt.ranks.errors import RankLostError, RanksDifferError, RankStoppedError
from graphrt.ranks.heartbeat import Heartbeat, Sign, named
from graphrt.ranks.stepping import Answer, RankedSteps, padding_of


class Agreement:
    """Lets the ranks of one group vote on the graph of each step, so that all of them replay the
    same one.

    Every method but `close()` and `fail()` is collective: all ranks call it, in the same order, and
    from one thread. A rank that raises a `Rank...Error` has not launched its step; no rank makes
    another one afterwards.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        *,
        timeout_s: float = 60.0,
        same: Mapping[str, object] | None = None,
        abort: Iterable[dist.ProcessGroup] = (),
    ) -> None:
        """`group` is used for nothing else; by default a gloo group of all ranks, made here. Its
        backend decides which device holds a vote: with NCCL the host waits for it at every step.
        `timeout_s` is how long a rank may be late. `same` are values of the host that must be equal
        on all ranks, as text: a checkpoint's name, a LoRA's revision. `abort` are the groups whose
        collectives graphs hold: they are aborted once a rank has been silent for `timeout_s`, so
        that a host which waits for such a collective gets an error (NCCL; gloo raises by itself).

        Raises `InvalidOptionError` where there is no process group, and `RanksDifferError`.
        """
        if not dist.is_initialized():
            raise InvalidOptionError(
                "there is no process group",
                advice="torch.distributed.init_process_group(...) first, or start with torchrun",
            )
        if not timeout_s > 0:
            raise InvalidOptionError(
                "timeout_s is no number of seconds",
                got=shown(timeout_s),
                expected="timeout_s > 0",
                advice="timeout_s=60.0",
            )
        # The last third is for finding out which rank is missing.
        self._timeout = timedelta(seconds=timeout_s * 2 / 3)
        self._timeout_s = timeout_s
        self._abort = tuple(abort)
        try:
            if group is None:
                group = dist.new_group(backend="gloo", timeout=self._timeout)
            self._heartbeat = Heartbeat(group, timeout_s, self._note_silence)
        except RuntimeError as error:  # all network errors of torch are of this class
            raise RankLostError(
                "the ranks did not come together: one is dead or late",
                got=error_line(error),
                expected=f"an Agreement on each rank within {timeout_s:g} s",
                advice="look for the first error on any rank; if one was only slow to start, a "
                "barrier of all ranks before, or a larger timeout_s",
            ) from error
        self._group: Any = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self._device = _device_of(group)
        # What all votes of this rank claim to be equal on all ranks.
        self._facts: Facts = {
            "graphrt": [__version__],
            "torch": [torch.__version__],
            "python": [host.python_version()],
            **{f"same[{name!r}]": [str(value)] for name, value in (same or {}).items()},
        }
        # The ballots of runners; and that of the last dispatcher given to `vote`.
        self._ballots: WeakKeyDictionary[GraphTable, Ballot] = WeakKeyDictionary()
        self._ballot: Ballot | None = None
        # The vote of `begin`, until a step takes it.
        self._begun: PendingVote | None = None
        # The number of the last vote.
        self._step = 0
        self._is_closed = False
        # Why this rank makes no more steps; None while it does.
        self._failure: str | None = None

    # What is equal -------------------------------------------------------------------------------

    def check(self, runner: GraphRunner[Any]) -> None:
        """Raise `RanksDifferError` on every rank unless all have the same plan, graphs, checks and
        versions. Votes compare them too; ranks of one model that need no vote call this alone,
        after `capture()` and after `recapture()`."""
        self._refuse_differences(Ballot(runner.dispatcher, self._facts_of(runner.graphs)).facts)

    def _facts_of(self, graphs: GraphTable) -> dict[str, list[str]]:
        setup, sizes = graphs.setup, graphs.setup.plan.sizes
        bounds = f"{sizes.max_num_tokens} tokens of {sizes.max_num_reqs} requests at most"
        return {
            **self._facts,
            "plan": [*str(setup.plan).splitlines(), bounds],
            "check": [str(setup.options.check)],
            "outputs": [str(setup.options.outputs)],
            "lazy": [str(setup.options.lazy)],
            "limit": [f"{setup.options.max_graphs} graphs, {setup.options.graph_bytes} bytes"],
        }

    # Votes ---------------------------------------------------------------------------------------

    def vote(self, dispatcher: GraphDispatcher, batch: Batch | None) -> PendingVote:
        """Begin the vote on the graph of the next step of a host that has a dispatcher of its own,
        and go on: `result()` has the answer. `batch` None is an idle rank."""
        ballot = self._ballot
        if ballot is None or ballot.dispatcher is not dispatcher:
            ballot = self._ballot = Ballot(dispatcher, self._facts)
        return self._vote_by(ballot, batch, {})

    def begin(self, runner: GraphRunner[Any], batch: Batch | None) -> PendingVote:
        """Begin the vote on the next step of a runner with `Host(ranks=)`, and go on: that step
        takes its answer. Begun while the step before runs on the device, it costs the host the
        launch alone. `batch` None is for `idle`."""
        if self._begun is not None:
            raise InvalidBatchError(
                "a vote was begun, and no step has taken it",
                got=shown(self._begun.batch),
                advice="runner(batch, ...) or agreement.idle(runner) after each begin()",
            )
        self._begun = self._vote_of(runner.graphs, batch)
        return self._begun

    def idle(self, runner: GraphRunner[Any], *, updates: Any = None) -> Dispatch:
        """Make a step of one request of padding, because other ranks have work; returns its
        dispatch. Its outputs mean nothing."""
        self._begun = vote = self.take(runner.graphs, None)
        batch = vote.batch = idle_batch_of(vote.result().agreed.descriptor)
        padding = padding_of(runner.inputs, batch.num_tokens, runner.pool.device)
        runner(batch, **padding, updates=updates)
        dispatch = runner.last_dispatch
        assert dispatch is not None
        return dispatch

    def entrance(self, graphs: GraphTable, run: Run) -> Run:
        """See `graphrt.types.Ranks`: a runner with `Host(ranks=)` calls it."""
        return RankedSteps(self, graphs, run)

    def agree_on_captures(self, graphs: GraphTable, wanted: Sequence[str]) -> None:
        """See `graphrt.types.Ranks`: a runner with `Host(ranks=)` calls it."""
        captures = [f"captures {graph}" for graph in wanted] or ["captures nothing"]
        facts = {**self._facts_of(graphs), "next": captures}
        self._tally(self._send(facts, digest_of(facts), bytes([USABLE])))

    def agree_on_attempt(self, graphs: GraphTable, again: bool | None) -> bool:
        """See `graphrt.types.Ranks`: a runner with `Host(ranks=)` calls it."""
        facts = {**self._facts_of(graphs), "next": ["the outcome of a capture"]}
        own = UNUSABLE if again is None else TRIED if again else USABLE
        return self._tally(self._send(facts, digest_of(facts), bytes([own]))).least == TRIED

    def take(self, graphs: GraphTable, batch: Batch | None) -> PendingVote:
        """The vote on the next step of a runner, begun before or now."""
        vote, self._begun = self._begun, None
        if vote is None:
            return self._vote_of(graphs, batch)
        if vote.batch != batch:
            raise InvalidBatchError(
                "the vote was on another batch",
                got=shown(batch),
                expected=shown(vote.batch),
                advice="agreement.begin(runner, batch) and runner(batch, ...) with one batch",
            )
        return vote

    def _vote_of(self, graphs: GraphTable, batch: Batch | None) -> PendingVote:
        ballot = self._ballots.get(graphs)
        if ballot is None:
            ballot = Ballot(graphs.dispatcher, self._facts_of(graphs))
            self._ballots[graphs] = ballot
        to_try, failed = graphs.checks.for_vote()
        weaker = dict.fromkeys(to_try, TRIED) | dict.fromkeys(failed, UNUSABLE)
        lazy = graphs.sealing.may_capture and not graphs.checks.changed_settings()
        again = partial(self._vote_by, ballot, batch, weaker)
        vote = again(graphs.left_out if lazy else None)
        live = idle_batch_of(BatchDescriptor(1)) if batch is None else settled(checked_batch(batch))
        tokens = live.num_tokens
        vote.rows = tokens, live.num_reqs or min(tokens, graphs.setup.inputs.reqs)
        if lazy and graphs.limit is not None:
            vote.limit, vote.without_captures = graphs.limit, partial(again, None)
        return vote

    def _vote_by(
        self,
        ballot: Ballot,
        batch: Batch | None,
        weaker: Mapping[int, int],
        not_captured: Collection[int] | None = None,
    ) -> PendingVote:
        """Begin a vote. `weaker` maps slots to votes below `USABLE`, whatever the ballot says of
        them. A missing graph is captured unless its slot is in `not_captured`; None captures
        none."""
        ballot.renew()
        graphs = ballot.usable(batch)
        if not_captured is None:
            graphs = graphs.replace(bytes([MISSING]), bytes([UNUSABLE]))
        else:
            weaker = {**weaker, **dict.fromkeys(not_captured, UNUSABLE)}
        if weaker:
            slots = (graph.slot for graph in ballot.graphs)
            graphs = bytes(map(min, graphs, (weaker.get(slot, USABLE) for slot in slots)))
        vote = self._send(ballot.facts, ballot.digest, graphs)
        vote.batch, vote.graphs = batch, ballot.graphs
        return vote

    def _send(self, facts: Facts, digest: bytes, graphs: bytes) -> PendingVote:
        if self._failure is not None:
            raise RankStoppedError(
                "this rank has left the agreement",
                got=self._failure,
                advice="start all ranks again; a rank that has left makes no more steps",
            )
        self._step += 1
        sent = encoded(digest, self._step, graphs)
        votes = torch.frombuffer(sent, dtype=torch.uint8).to(self._device)
        self._heartbeat.now(self._step, "voting")
        began = time.monotonic()
        try:
            work = dist.all_reduce(votes, dist.ReduceOp.MIN, self._group, async_op=True)
        except RuntimeError as error:
            raise self._lost(began, error) from error
        return PendingVote(self, facts, graphs, votes, work, began)

    def _tally(self, pending: PendingVote) -> Tally:
        """Wait for the votes of all ranks; raise if ranks are missing, or at different steps."""
        try:
            if not pending.work.wait(self._timeout):
                # `votes` has this rank's own vote only: it would go on alone.
                raise RuntimeError("the vote did not end")
            least = pending.votes.tolist()
        except RuntimeError as error:
            raise self._lost(pending.began, error) from error
        tally = decoded(least)
        if not (tally.same and tally.same_step):
            raise self._no_agreement(pending.facts)
        self._heartbeat.now(self._step, "in its step")
        return tally

    def _result(self, pending: PendingVote) -> Answer:
        tally, batch = self._tally(pending), pending.batch
        if tally.graph is None:
            none = BatchDescriptor(1) if batch is None else unpadded(batch)
            if pending.rows is not None:
                none = BatchDescriptor(*self._largest(*pending.rows))
            return Answer(Dispatch(GraphMode.NONE, none, Reason.RANKS_DISAGREE), tried=False)
        graph = pending.graphs[tally.graph]
        if tally.least == MISSING and pending.sent[tally.graph] != MISSING:
            # The others would run warm-ups, and this rank its graph.
            error = RanksDifferError(
                "ranks do not agree: other ranks have to capture a graph that this one has",
                got=f"{graph.mode.name} [{graph.descriptor}]",
                advice="capture(), release() and recapture() on all ranks at the same step",
            )
            self.fail(error)
            raise error
        limit = pending.limit
        if tally.least == MISSING and limit is not None and not limit.admits(graph[:2]):
            # All ranks count the same misses: all of them vote again, on what is captured.
            second = pending.without_captures()
            second.rows = pending.rows
            return self._result(second)
        return Answer(graph, tally.least == TRIED)

    def _largest(self, tokens: int, reqs: int) -> tuple[int, int]:
        """The most tokens and requests of any rank in a step without a graph for all: each runs
        eagerly on so many rows, because collectives of other sizes end the process (gloo), or hang.
        """
        sizes, began = torch.tensor([tokens, reqs], device=self._device), time.monotonic()
        try:
            work: Any = dist.all_reduce(sizes, dist.ReduceOp.MAX, self._group, async_op=True)
            if not work.wait(self._timeout):
                raise RuntimeError("the ranks' sizes did not come")
            tokens, reqs = sizes.tolist()
        except RuntimeError as error:
            raise self._lost(began, error) from error
        return tokens, reqs

    # What ends it --------------------------------------------------------------------------------

    def fail(self, error: BaseException) -> None:
        """Say that this rank makes no more steps because of `error`: the others raise
        `RankStoppedError` at their next vote, or within the time-out. Not collective."""
        is_cause = not isinstance(error, RankLostError | RankStoppedError)
        self._leave(error_line(error).splitlines()[0], is_cause=is_cause)

    def close(self) -> None:
        """Leave the agreement: a rank that votes afterwards gets a `RankStoppedError`. Not
        collective, but rank 0, which holds the store, waits for the others, for `timeout_s` at most
        and after an error twice as long. Before `torch.distributed.destroy_process_group()`."""
        has_failed = self._failure is not None
        self._leave("it has left the agreement")
        if not self._is_closed:
            self._is_closed = True
            self._heartbeat.close(self._timeout_s * (2 if has_failed else 1))

    def _leave(self, why: str, *, is_cause: bool = True) -> None:
        if self._failure is None:
            self._failure = why
            self._heartbeat.say(why, is_cause=is_cause)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is not None:
            self.fail(error)
        self.close()

    def _no_agreement(self, facts: Facts) -> Exception:
        """The error of a vote in which ranks differ. All ranks compare their facts."""
        facts = {**facts, "step": [str(self._step)]}
        try:
            self._refuse_differences(facts)
        except (RanksDifferError, RankLostError) as error:
            return error
        return RanksDifferError("ranks sent different votes, though nothing differs now")

    def _refuse_differences(self, facts: Facts) -> None:
        everybody: list[Any] = [None] * self.size
        began = time.monotonic()
        try:
            dist.all_gather_object(everybody, facts, group=self._group)
        except RuntimeError as error:
            raise self._lost(began, error) from error
        differs = difference_of(everybody)
        if differs is not None:
            self._leave(differs.what)
            raise differs

    def _note_silence(self, who: str) -> None:
        """Log that a rank is silent, and abort groups: the host may be waiting for a device. Runs
        in the heartbeat's thread."""
        logger.error("a rank is dead or stopped: %s", who)
        for group in self._abort:
            group.abort()

    def explained(self, error: Exception) -> Exception:
        """The error to raise for a step's `error`: a `RankLostError` or `RankStoppedError` if it
        comes from a collective that another rank has left, else `error` itself."""
        if isinstance(error, GraphRTError) or not isinstance(error, RuntimeError):
            return error
        signs = self._heartbeat.missing(-1, 0.0, 0.0)
        return self._missing(signs, "was broken off") if signs else error

    def _lost(self, began: float, error: Exception) -> Exception:
        """The error for a collective that failed or did not end, which names the missing ranks."""
        waited = time.monotonic() - began
        left = max(self._timeout_s - waited, 0.0)
        signs = self._heartbeat.missing(self._step, waited, left)
        return self._missing(signs, "has no agreement")

    def _missing(self, signs: Sequence[Sign], what: str) -> Exception:
        has_said = any(sign.error is not None for sign in signs)
        who = named(signs) or "nobody is missing"
        self._leave(who, is_cause=False)
        kind: type[GraphRTError] = RankLostError
        why = "a rank is dead or late"
        if has_said:
            kind, why = RankStoppedError, "a rank makes no more steps"
        return kind(
            f"step {self._step} {what}: {why}",
            got=who,
            expected=f"a vote of each of {self.size} ranks within {self._timeout_s:g} s",
            advice="look at the log of that rank first, and start all ranks again; if it was only "
            "slow, a larger timeout_s",
        )


class PendingVote:
    """A vote that is under way: `result()` waits for it.

    It is on one of `graphs` for `batch`. This rank has `sent` a byte for each graph, and claims its
    `facts`. The collective `work`, begun at `began`, puts the least of all votes into `votes`.
    """

    def __init__(
        self,
        agreement: Agreement,
        facts: Facts,
        sent: bytes,
        votes: torch.Tensor,
        work: Any,
        began: float,
    ) -> None:
        self.batch: Batch | None = None
        # The rows of a runner's batch: without a graph for all, each rank takes the most of any.
        self.rows: tuple[int, int] | None = None
        self.graphs: Sequence[Dispatch] = ()
        # Of a runner that captures lazily under a limit: that, and what votes again.
        self.limit: GraphLimit | None = None
        self.without_captures: Callable[[], PendingVote]
        self.facts = facts
        self.sent = sent
        self.votes = votes
        self.work = work
        self.began = began
        self._agreement = agreement
        self._answer: Answer | None = None

    def result(self) -> Answer:
        """Wait for the other ranks. Raises `RankLostError`, `RankStoppedError` and
        `RanksDifferError`."""
        if self._answer is None:
            self._answer = self._agreement._result(self)
        return self._answer


def difference_of(everybody: Sequence[Facts]) -> RanksDifferError | None:
    """An error that names the first fact in which ranks differ, and the ranks that differ from
    most; None if all facts are equal."""
    for fact in dict.fromkeys(name for facts in everybody for name in facts):
        values = [tuple(facts.get(fact, ())) for facts in everybody]
        if len(set(values)) == 1:
            continue
        usual = max(values, key=values.count)
        differing = [rank for rank, value in enumerate(values) if value != usual]
        other = values[differing[0]]
        first = next(
            (pair for pair in zip(_filled_up(other, usual), _filled_up(usual, other), strict=True)
             if pair[0] != pair[1]),
            ("nothing", "nothing"),
        )  # fmt: skip
        return RanksDifferError(
            f"ranks do not agree: {fact} is another one on "
            + ", ".join(f"rank {rank}" for rank in differing),
            got=f"on rank {differing[0]}: {first[0]}",
            expected=f"as on rank {values.index(usual)}: {first[1]}",
            advice="start all ranks with the same code, plan and options, and make the same steps "
            "on all of them; a rank without work calls idle()",
        )
    return None


def _filled_up(lines: Sequence[str], others: Sequence[str]) -> list[str]:
    """`lines`, with "nothing" for each line that `others` have more."""
    return [*lines, *["nothing"] * (len(others) - len(lines))]


def _device_of(group: Any) -> torch.device:
    """The device that holds votes of this group."""
    if dist.get_backend(group) == "gloo":
        return torch.device("cpu")
    return torch.device(torch.accelerator.current_accelerator() or "cpu")
