"""Task update on CUDA: parameters of captured kernels, copies and fills, set before the launch."""

from __future__ import annotations

import random

import pytest
import torch

from graphrt import UNCHANGED, Batch, GraphRunner, HostArg, InputSpec, UpdatableTask
from graphrt.core.base.errors import MissingUpdateError, TaskContractError

pytestmark = pytest.mark.cuda

LAYERS, ROWS, WIDTH = 4, 64, 128


def runner(forward, **arguments) -> GraphRunner:
    return GraphRunner(
        forward,
        inputs={"x": InputSpec(torch.float32, ("tokens", WIDTH))},
        outputs=("tokens",),
        mode=arguments.pop("mode", "FULL"),
        sizes=[2, 4],
        max_num_reqs=4,
        platform="cuda",
        **arguments,
    )


def model(issue, **host_args):
    """Layers that each hand their result on through a task of their own."""
    task = UpdatableTask("mix", issue, host_args, at_capture=lambda _: dict.fromkeys(host_args, 0))
    table = torch.randn(ROWS, 4, WIDTH, device="cuda")

    def forward(x):
        for layer in range(LAYERS):
            hidden = x * 0.5
            out = torch.empty_like(hidden)
            task(hidden, table, out, task=f"mix.{layer}")
            x = out + hidden
        return x

    return forward


def eager(updated: GraphRunner, x: torch.Tensor, updates) -> torch.Tensor:
    """The same padded step without its graph."""
    batch = Batch(len(x), len(x), 1)
    return updated.run_padded_eagerly(batch, updated.dispatcher.dispatch(batch), {"x": x}, updates)


def check(updated: GraphRunner, updates, tokens: int = 4) -> None:
    """Run a step with these updates, and compare it with the eager one."""
    x = torch.randn(tokens, WIDTH)
    out = updated(Batch(tokens, tokens, 1), x=x, updates=updates).clone()
    assert torch.equal(out, eager(updated, x, updates)), updates


def scale(x, table, out, *, row):
    torch.add(x, table[row, : x.shape[0]], alpha=row / ROWS, out=out)


def copy(x, table, out, *, row):
    out.copy_(table[row, : x.shape[0]])


def fill(x, table, out, *, row):
    out.zero_()
    out[: row % x.shape[0] + 1].add_(x[: row % x.shape[0] + 1])


ISSUES = [scale, copy, fill]


@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE"])
@pytest.mark.parametrize("issue", ISSUES)
def test_steps_in_flight_each_keep_their_own_task_arguments(issue, mode):
    chosen = random.Random(0)
    with runner(model(issue, row=HostArg(None)), mode=mode) as updated:
        updated.capture()
        torch.cuda.synchronize()
        torch.cuda._sleep(50_000_000)
        steps = []
        for _ in range(500):
            tokens, row = chosen.randint(1, 4), chosen.randrange(ROWS)
            x = torch.full((tokens, WIDTH), float(row))
            updates = {"mix": {"row": row}}
            out = updated(Batch(tokens, tokens, 1), x=x, updates=updates).clone()
            steps.append((tokens, x, updates, out))
        for tokens, x, updates, out in steps:
            batch = Batch(tokens, tokens, 1)
            dispatch = updated.dispatcher.dispatch(batch)
            assert dispatch.slot >= 0
            eager = updated.run_padded_eagerly(batch, dispatch, {"x": x}, updates)
            assert torch.equal(out, eager), updates


def test_an_unchanged_update_keeps_the_arguments_of_the_previous_step():
    with runner(model(scale, row=HostArg(None))) as updated:
        updated.capture()
        x = torch.randn(4, WIDTH)
        first = updated(x=x, updates={"mix": {"row": 5}}).clone()
        other = updated(x=x, updates={"mix": {"row": 9}}).clone()
        assert not torch.equal(first, other)
        assert torch.equal(updated(x=x, updates=UNCHANGED), other)
        assert torch.equal(updated(x=x, updates={"mix": {"row": 5}}), first)


def by_type(x, table, out, *, row):
    torch.add(x, table[0 if type(row) is int else 1, : x.shape[0]], out=out)


def test_equal_task_arguments_of_different_types_give_different_results():
    with runner(model(by_type, row=HostArg(None))) as updated:
        updated.capture()
        x = torch.randn(4, WIDTH)
        first = updated(x=x, updates={"mix": {"row": 1}}).clone()
        updated(x=x, updates={"mix": {"row": 2.0}})
        again = updated(x=x, updates={"mix": {"row": 1}}).clone()
        updated(x=x, updates={"mix": {"row": 2}})
        other = updated(x=x, updates={"mix": {"row": 1.0}})
        assert torch.equal(first, again)
        assert not torch.equal(first, other)


def allocates(x, table, out, *, row):
    torch.add(x, x * row if row else x, out=out)


def launches_more(x, table, out, *, row):
    torch.add(x, table[0, : x.shape[0]], out=out)
    if row:
        out.mul_(2)


def launches_fewer(x, table, out, *, row):
    torch.add(x, table[0, : x.shape[0]], out=out)
    if row == 0:
        out.mul_(2)


def launches_another_kernel(x, table, out, *, row):
    (torch.mul if row else torch.add)(x, table[0, : x.shape[0]], out=out)


def launches_another_kind(x, table, out, *, row):
    if row:
        out.copy_(x)
    else:
        torch.add(x, table[0, : x.shape[0]], out=out)


def waits(x, table, out, *, row):
    torch.add(x, table[0, : x.shape[0]], alpha=table[0, 0, 0].item() if row else 2, out=out)


def other_tensor():
    tables = [torch.randn(4, WIDTH, device="cuda") for _ in range(2)]

    def issue(x, table, out, *, row):
        torch.add(x, tables[row][: x.shape[0]], out=out)

    return issue


@pytest.mark.parametrize(
    ("issue", "text"),
    [
        (allocates, "allocates"),
        (launches_more, "2 nodes where it captured 1"),
        (launches_fewer, "1 nodes where it captured 2"),
        (launches_another_kernel, "another kernel"),
        (launches_another_kind, "a node of kind 1 where it captured 0"),
        (waits, "host"),
        (other_tensor, "a tensor that it was not captured with"),
    ],
)
def test_a_broken_task_contract_raises_and_the_next_step_is_right(issue, text):
    issue = issue() if issue is other_tensor else issue
    with runner(model(issue, row=HostArg(None))) as updated:
        updated.capture()
        x = torch.randn(4, WIDTH)
        before = updated(x=x, updates={"mix": {"row": 0}}).clone()
        with pytest.raises(TaskContractError, match=text) as caught:
            updated(x=x, updates={"mix": {"row": 1}})
        assert "mix.0" in str(caught.value) and "pass lengths as tensors" in str(caught.value)
        assert torch.equal(updated(x=x, updates={"mix": {"row": 0}}), before)


def test_a_raising_task_launches_nothing_and_the_next_step_is_right():
    fail = [False]

    def issue(x, table, out, *, row):
        if fail[0] and row == 3:
            raise RuntimeError("in the task")
        torch.add(x, x, alpha=row, out=out)

    with runner(model(issue, row=HostArg(None))) as updated:
        updated.capture()
        x = torch.randn(4, WIDTH)
        fail[0] = True
        with pytest.raises(RuntimeError, match="in the task"):
            updated(x=x, updates={"mix": {"row": 3}})
        fail[0] = False
        assert not torch.cuda.is_current_stream_capturing()
        for row in (3, 4):
            out = updated(x=x, updates={"mix": {"row": row}}).clone()
            batch = Batch(4, 4, 1)
            dispatch = updated.dispatcher.dispatch(batch)
            eager = updated.run_padded_eagerly(batch, dispatch, {"x": x}, {"mix": {"row": row}})
            assert torch.equal(out, eager)


@pytest.mark.parametrize("issue", ISSUES)
def test_layers_with_their_own_arguments_equal_eager(issue):
    chosen = random.Random(2)
    with runner(model(issue, row=HostArg(None))) as updated:
        updated.capture()
        for _ in range(60):
            updates = {"mix": {"row": chosen.randrange(8)}}
            for layer in range(LAYERS):
                if chosen.random() < 0.3:
                    updates[f"mix.{layer}"] = {"row": chosen.randrange(8)}
            check(updated, updates)
        figures = updated.pool.update_figures()
        assert figures.tasks >= 2 * LAYERS and figures.reissues > 0 and figures.failed == 0


def with_weights(issue_of):
    """Like `model`, with a weight for each layer: `issue_of(weights)` issues the task."""
    weights = [torch.randn(ROWS, 4, WIDTH, device="cuda") for _ in range(LAYERS)]
    task = UpdatableTask(
        "mix", issue_of(weights), {"row": HostArg(None)}, at_capture=lambda _: {"row": 0}
    )

    def forward(x):
        for layer, weight in enumerate(weights):
            hidden = x * 0.5
            out = torch.empty_like(hidden)
            task(hidden, weight, out, task=f"mix.{layer}")
            x = out + hidden
        return x

    return forward


def scaled_by_layer(weights):
    factors = {weight.data_ptr(): 1.0 + layer for layer, weight in enumerate(weights)}

    def issue(x, weight, out, *, row):
        factor = factors[weight.data_ptr()]
        torch.add(x, weight[0, : x.shape[0]], alpha=row * factor, out=out)

    return issue


def moving_in_layer(weights):
    def issue(x, weight, out, *, row):
        torch.add(x, weight[row, : x.shape[0]], out=out)

    return issue


@pytest.mark.parametrize("issue_of", [scaled_by_layer, moving_in_layer])
def test_layers_whose_parameters_change_differently_equal_eager(issue_of):
    with runner(with_weights(issue_of)) as updated:
        updated.capture()
        for row in (3, 5, 7, 3, 3, 9, 0, 2):
            check(updated, {"mix": {"row": row}})
        # All but the row that came twice in a row.
        assert updated.pool.update_figures().reissues >= LAYERS * 7


def test_a_task_may_read_another_row_of_an_outside_tensor():
    table = torch.randn(ROWS, 4, WIDTH, device="cuda")

    def issue(x, weight, out, *, row):
        torch.add(x, table[row, : x.shape[0]], out=out)

    with runner(model(issue, row=HostArg(None))) as updated:
        updated.capture()
        for row in (3, 60, 1, 33):
            check(updated, {"mix": {"row": row}})


def test_a_step_of_a_graph_with_tasks_without_updates_is_refused():
    with runner(model(scale, row=HostArg(None))) as updated:
        updated.capture()
        with pytest.raises(MissingUpdateError):
            updated(x=torch.randn(4, WIDTH))
        check(updated, {"mix": {"row": 2}})


def test_a_runner_without_tasks_reports_no_updates():
    with runner(lambda x: x * 2) as plain:
        plain.capture()
        assert plain.pool.update_figures() is None


# What the driver does not take, or does not tell --------------------------------------------------


@pytest.mark.parametrize("issue", ISSUES)
def test_parameters_that_the_driver_refuses_are_a_named_error_and_the_next_step_is_right(
    issue, monkeypatch
):
    from graphrt.cuda.update import tasks

    with runner(model(issue, row=HostArg(None))) as updated:
        updated.capture()
        check(updated, {"mix": {"row": 5}})
        with monkeypatch.context() as refusing:
            refusing.setattr(tasks, "set_node", lambda *_: False)
            for failed in (1, 2):
                with pytest.raises(TaskContractError, match="the driver does not set"):
                    updated(x=torch.randn(4, WIDTH), updates={"mix": {"row": 6}})
                assert updated.pool.update_figures().failed == failed
        for row in (6, 5):
            check(updated, {"mix": {"row": row}})


def test_kernels_whose_arguments_cannot_be_read_are_updated(monkeypatch):
    from graphrt.cuda.driver import pointers

    monkeypatch.setattr(pointers, "argument_sizes", lambda function: None)
    with runner(model(fill, row=HostArg(None))) as updated:
        updated.capture()
        for row in (1, 2, 3, 1, 2, 0):
            check(updated, {"mix": {"row": row}})
