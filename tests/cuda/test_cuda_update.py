"""Task update on CUDA: parameters of captured kernels, copies and fills, set before the launch."""

from __future__ import annotations

import random

import pytest
import torch

from graphrt import UNCHANGED, Batch, GraphOptions, GraphRunner, HostArg, InputSpec, UpdatableTask
from graphrt.core.errors import TaskContractError

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
def test_every_step_has_its_own_arguments_while_earlier_ones_are_under_way(issue, mode):
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
            found = updated.dispatcher.dispatch(batch)
            assert found.slot >= 0
            eager = updated.run_padded_eagerly(batch, found, {"x": x}, updates)
            assert torch.equal(out, eager), updates


def test_unchanged_keeps_the_arguments_of_the_step_before():
    with runner(model(scale, row=HostArg(None))) as updated:
        updated.capture()
        x = torch.randn(4, WIDTH)
        first = updated(x=x, updates={"mix": {"row": 5}}).clone()
        other = updated(x=x, updates={"mix": {"row": 9}}).clone()
        assert not torch.equal(first, other)
        assert torch.equal(updated(x=x, updates=UNCHANGED), other)
        assert torch.equal(updated(x=x, updates={"mix": {"row": 5}}), first)


def test_graphs_with_tasks_are_updated_where_executables_are_shared():
    options = GraphOptions(share_executables=True)
    with runner(model(scale, row=HostArg(None)), options=options) as updated:
        updated.capture()
        assert updated.report().sharing is None
        for row, tokens in ((3, 4), (7, 2), (3, 4)):
            x, updates = torch.randn(tokens, WIDTH), {"mix": {"row": row}}
            batch = Batch(tokens, tokens, 1)
            out = updated(batch, x=x, updates=updates).clone()
            found = updated.dispatcher.dispatch(batch)
            eager = updated.run_padded_eagerly(batch, found, {"x": x}, updates)
            assert torch.equal(out, eager)


def by_type(x, table, out, *, row):
    torch.add(x, table[0 if type(row) is int else 1, : x.shape[0]], out=out)


def test_arguments_that_are_equal_but_of_another_type_are_told_apart():
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


@pytest.mark.parametrize(
    ("issue", "text"), [(allocates, "allocates"), (launches_more, "2 nodes where it captured 1")]
)
def test_what_breaks_the_contract_is_named_and_the_next_step_is_right(issue, text):
    with runner(model(issue, row=HostArg(None))) as updated:
        updated.capture()
        x = torch.randn(4, WIDTH)
        before = updated(x=x, updates={"mix": {"row": 0}}).clone()
        with pytest.raises(TaskContractError, match=text) as caught:
            updated(x=x, updates={"mix": {"row": 1}})
        assert "mix.0" in str(caught.value)
        assert torch.equal(updated(x=x, updates={"mix": {"row": 0}}), before)


def test_a_task_that_raises_launches_nothing_and_the_next_step_is_right():
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
            found = updated.dispatcher.dispatch(batch)
            eager = updated.run_padded_eagerly(batch, found, {"x": x}, {"mix": {"row": row}})
            assert torch.equal(out, eager)
