"""A runner with `Host(ranks=)`, on one rank in this process: its API."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from graphrt import Batch, GraphOptions, GraphRunner, Host, InputSpec, Reason
from graphrt.core.base._native_door import NativeWatch
from graphrt.errors import InvalidBatchError, InvalidOptionError
from graphrt.ranks import Agreement, RankStoppedError

WIDTH = 4


@pytest.fixture(scope="module", autouse=True)
def group() -> Iterator[None]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def agreement() -> Iterator[Agreement]:
    with Agreement(timeout_s=20) as agreement:
        yield agreement


def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2.0


def runner_of(
    agreement: Agreement, forward: Callable[..., torch.Tensor] = double, **options: Any
) -> GraphRunner[torch.Tensor]:
    return GraphRunner(
        forward,
        mode="FULL",
        sizes=[1, 2, 4],
        inputs={"x": InputSpec(torch.float32, ("tokens", WIDTH))},
        host=Host(ranks=agreement),
        options=GraphOptions(**options),
        platform="cpu",
    )


def assert_steps(runner: GraphRunner[torch.Tensor], tokens: int, reason: Reason) -> None:
    x = torch.randn(tokens, WIDTH)
    assert torch.equal(runner(x=x), x * 2.0)
    assert runner.last_dispatch is not None
    assert runner.last_dispatch.reason is reason


def test_a_ranked_runner_votes_before_each_step_and_when_idle(agreement: Agreement) -> None:
    runner = runner_of(agreement)
    assert_steps(runner, 3, Reason.RANKS_DISAGREE)
    runner.capture()
    assert_steps(runner, 3, Reason.HIT)
    assert_steps(runner, 5, Reason.RANKS_DISAGREE)
    assert agreement.idle(runner).descriptor.num_tokens == 1
    assert runner.report().reasons[Reason.HIT] == 2


def test_a_batch_of_more_requests_than_any_graph_has_a_vote_for_none(agreement: Agreement) -> None:
    """Before, this rank alone raised, and the others replayed."""
    inputs = {
        "x": InputSpec(torch.float32, ("tokens", WIDTH)),
        "factor": InputSpec(torch.float32, ("reqs", 1)),
    }
    runner = GraphRunner(
        lambda x, factor: x * factor.sum(),
        mode="PIECEWISE",
        sizes=[1, 2, 4],
        max_num_reqs=2,
        inputs=inputs,
        host=Host(ranks=agreement),
        platform="cpu",
    )
    runner.capture()
    for reqs, reason in ((3, Reason.RANKS_DISAGREE), (2, Reason.HIT)):
        x = torch.randn(4, WIDTH)
        out = runner(Batch(4, reqs), x=x, factor=torch.ones(reqs, 1))
        assert torch.equal(out, x * float(reqs))
        assert runner.last_dispatch is not None and runner.last_dispatch.reason is reason


def test_two_runners_that_share_an_agreement_both_replay(agreement: Agreement) -> None:
    target, draft = runner_of(agreement), runner_of(agreement)
    target.capture()
    draft.capture()
    for _ in range(2):
        assert_steps(target, 4, Reason.HIT)
        assert_steps(draft, 2, Reason.HIT)


def test_a_step_uses_the_vote_begun_for_its_batch(agreement: Agreement) -> None:
    runner, x = runner_of(agreement), torch.ones(2, WIDTH)
    runner.capture()
    batch = Batch(2)
    vote = agreement.begin(runner, batch)
    with pytest.raises(InvalidBatchError, match="no step has taken it"):
        agreement.begin(runner, batch)
    with pytest.raises(InvalidBatchError, match="another batch"):
        runner(Batch(1), x=x[:1])
    vote = agreement.begin(runner, batch)
    assert torch.equal(runner(batch, x=x), x * 2.0)
    assert runner.last_dispatch == vote.result().agreed


def test_a_step_of_a_slot_replays_the_voted_graph(agreement: Agreement) -> None:
    runner, batch = runner_of(agreement), Batch(2, 2)
    runner.capture()
    vote = agreement.begin(runner, batch)
    slot = runner.slot(batch)
    slot["x"].fill_(3.0)
    assert torch.equal(runner(slot), torch.full((2, WIDTH), 6.0))
    assert runner.last_dispatch == vote.result().agreed


def test_a_ranked_step_with_an_explicit_agreed_graph_is_refused(agreement: Agreement) -> None:
    runner = runner_of(agreement)
    runner.capture()
    agreed = runner.dispatcher.peek(Batch(2))
    with pytest.raises(InvalidBatchError, match="its runner votes"):
        runner(Batch(2), agreed=agreed, x=torch.ones(2, WIDTH))


def test_a_lazy_ranked_runner_captures_the_voted_graph_except_under_autocast(
    agreement: Agreement,
) -> None:
    runner = runner_of(agreement, lazy=True)
    assert_steps(runner, 3, Reason.HIT)
    assert [graph.descriptor.num_tokens for graph in runner.report().graphs] == [4]
    with torch.autocast("cpu"):
        # It would be captured under other settings than the first one.
        assert_steps(runner, 1, Reason.HIT)
        assert len(runner.report().graphs) == 1
    assert_steps(runner, 1, Reason.HIT)
    assert len(runner.report().graphs) == 2


def test_a_ranked_runner_recaptures_released_graphs_by_capture_next(agreement: Agreement) -> None:
    runner = runner_of(agreement)
    runner.capture()
    runner.release()
    assert_steps(runner, 2, Reason.RANKS_DISAGREE)
    assert runner.capture_next().left == 2
    assert_steps(runner, 2, Reason.HIT)
    runner.recapture()
    assert len(runner.report().graphs) == 3


def test_a_ranked_runner_captures_what_new_weights_outdate(agreement: Agreement) -> None:
    model = torch.nn.Linear(WIDTH, WIDTH, bias=False)
    runner = runner_of(agreement, lambda x: model(x))
    runner.capture()
    counts = [runner.pool.captures]
    for load in (model.weight.data.mul_, lambda factor: model.double().float()):
        load(2.0)
        runner.recapture(only_outdated=True)
        counts.append(runner.pool.captures)
        x = torch.ones(2, WIDTH)
        assert torch.equal(runner(Batch(2), x=x), model(x))
    assert counts == [3, 3, 6]


def test_ranks_do_not_choose_what_to_capture_by_their_own_clocks(agreement: Agreement) -> None:
    with pytest.raises(InvalidOptionError, match="let one rank decide"):
        runner_of(agreement).capture_next(share=0.1)


def test_a_changed_host_value_is_tried_at_the_next_vote(agreement: Agreement) -> None:
    model = SimpleNamespace(level=0)

    def forward(x: torch.Tensor) -> torch.Tensor:
        return x * 2.0 if model.level < 100 else x * 3.0

    runner = runner_of(agreement, forward)
    runner.capture()
    for _ in range(3):
        assert_steps(runner, 4, Reason.HIT)
    tried = sum(record.steps for record in runner.report().trust.trials)
    model.level = 5
    x, reasons = torch.randn(4, WIDTH), []
    for _ in range(runner.report().trust.glance_steps + 4):
        assert torch.equal(runner(x=x), x * 2.0)
        assert runner.last_dispatch is not None
        reasons.append(runner.last_dispatch.reason)
    assert sum(record.steps for record in runner.report().trust.trials) == tried + 1
    # Where nobody tells of changes a step finds it after its vote.
    assert set(reasons) - {Reason.CHANGED} == {Reason.HIT}
    assert reasons.count(Reason.CHANGED) == (1 if NativeWatch is None else 0)


def test_a_ranked_step_that_raises_ends_the_agreement(agreement: Agreement) -> None:
    runner = runner_of(agreement)
    runner.capture()
    with pytest.raises(Exception, match="x"):
        runner(Batch(2), x=torch.ones(3, WIDTH))
    with pytest.raises(RankStoppedError, match="has left the agreement"):
        runner(Batch(2), x=torch.ones(2, WIDTH))


def test_a_ranks_argument_that_cannot_vote_is_refused() -> None:
    with pytest.raises(InvalidOptionError, match="ranks"):
        Host(ranks=object())  # type: ignore[arg-type]


def test_a_number_of_graphs_leaves_out_the_same_ones_on_all_ranks(agreement: Agreement):
    runner = runner_of(agreement, max_graphs=2)
    runner.capture()
    assert [graph.descriptor.num_tokens for graph in runner.report().graphs] == [4, 1]
    assert_steps(runner, 2, Reason.HIT)
