"""Task update on CUDA: parameters of captured kernels, copies and fills, set before the launch."""

from __future__ import annotations

import random

import pytest
import torch

from graphrt import UNCHANGED, Batch, GraphRunner, HostArg, InputSpec, UpdatableTask
from graphrt.core.base.errors import MissingUpdateError, TaskContractError, TaskError

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


def calls_of(updated: GraphRunner):
    """What the tasks of the graphs ask the driver through, one for each graph."""
    (wrapper,) = updated.graphs.owners()
    return [entry.tasks[0].handle.tasks.ladder.calls for entry in wrapper.entries.values()]


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
        (launches_another_kind, r"nodes of kinds \[1\] where it captured \[0\]"),
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
        assert "mix.0" in str(caught.value)
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


# Layers that are patched from one ----------------------------------------------------------------


@pytest.mark.parametrize("issue", ISSUES)
def test_identical_layers_are_patched_from_a_single_reissue(issue):
    chosen = random.Random(1)
    with runner(model(issue, row=HostArg(None))) as updated:
        updated.capture()
        for _ in range(40):
            check(updated, {"mix": {"row": chosen.randrange(ROWS)}}, chosen.randint(1, 4))
        figures = updated.pool.update_figures()
        print(figures)
        # Two sets of host arguments for each of two graphs, and those that changed nothing.
        assert figures.self_checks >= 4 and figures.self_check_failures == 0
        assert figures.shared_patches > 0
        before = figures.reissues
        rows = [row for row in range(ROWS) for _ in range(2)]
        for row in rows:
            check(updated, {"mix": {"row": row}})
        after = updated.pool.update_figures()
        # One for each row that was new, and none for the others.
        assert after.reissues - before <= ROWS
        assert after.memo_hits > figures.memo_hits


@pytest.mark.parametrize("issue", ISSUES)
def test_layers_with_their_own_arguments_are_patched_from_a_reissue_each(issue):
    chosen = random.Random(2)
    with runner(model(issue, row=HostArg(None))) as updated:
        updated.capture()
        for _ in range(60):
            updates = {"mix": {"row": chosen.randrange(8)}}
            for layer in range(LAYERS):
                if chosen.random() < 0.3:
                    updates[f"mix.{layer}"] = {"row": chosen.randrange(8)}
            check(updated, updates)
        assert updated.pool.update_figures().shared_patches > 0


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
def test_layers_whose_parameters_change_differently_are_issued_separately(issue_of):
    with runner(with_weights(issue_of)) as updated:
        updated.capture()
        for row in (3, 5, 7, 3, 9, 0, 2):
            check(updated, {"mix": {"row": row}})
        figures = updated.pool.update_figures()
        assert figures.self_check_failures == 1
        assert figures.shared_patches == 0
        # All but the row that came twice.
        assert figures.reissues == LAYERS * 6 and figures.memo_hits == LAYERS


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


# The way down ------------------------------------------------------------------------------------


def refuse(monkeypatch, updated, *names):
    for calls in calls_of(updated):
        for name in names:
            answer = {"update_whole": False, "can_instantiate": False}.get(name, 1)
            monkeypatch.setattr(calls, name, lambda *_, answer=answer: answer)


def launches_fewer(x, table, out, *, row):
    torch.add(x, table[0, : x.shape[0]], alpha=row + 1, out=out)
    if row % 2 == 0:
        out.add_(x)
        out.mul_(2)


@pytest.mark.parametrize("refused", [(), ("set_kernel",), ("set_kernel", "update_whole")])
def test_kernel_launches_that_a_step_does_not_need_are_disabled(monkeypatch, refused):
    with runner(model(launches_fewer, row=HostArg(None))) as updated:
        updated.capture()
        check(updated, {"mix": {"row": 0}})
        refuse(monkeypatch, updated, *refused)
        for row in (3, 2, 1, 1, 5, 4, 6, 3, 2, 9):
            check(updated, {"mix": {"row": row}})
        figures = updated.pool.update_figures()
        assert bool(figures.whole_updates) == (refused == ("set_kernel",))
        assert bool(figures.rebuilds) == ("update_whole" in refused)


@pytest.mark.parametrize("issue", ISSUES)
@pytest.mark.parametrize("whole", [True, False])
def test_a_refused_node_update_falls_back_to_whole_update_or_rebuild(issue, whole, monkeypatch):
    rows = [3, 9, 4, 11, 9, 6]
    with runner(model(issue, row=HostArg(None))) as updated:
        updated.capture()
        for row in rows:
            check(updated, {"mix": {"row": row}})
        torch.cuda._sleep(50_000_000)
        with monkeypatch.context() as refusing:
            refuse(refusing, updated, "set_kernel", "set_memory")
            if not whole:
                refuse(refusing, updated, "update_whole")
            x = torch.randn(4, WIDTH)
            steps = [(row, updated(x=x, updates={"mix": {"row": row}}).clone()) for row in rows]
        figures = updated.pool.update_figures()
        assert figures.whole_updates == (len(rows) if whole else 0)
        assert figures.rebuilds == (0 if whole else len(rows))
        for row, out in steps:
            assert torch.equal(out, eager(updated, x, {"mix": {"row": row}}))
        # From here on single nodes are set again, in the executable that there is now.
        for row in (1, 2, 9):
            check(updated, {"mix": {"row": row}})
        assert torch.equal(
            updated(x=x, updates=UNCHANGED).clone(), eager(updated, x, {"mix": {"row": 9}})
        )
        after = updated.pool.update_figures()
        assert (after.whole_updates, after.rebuilds) == (
            figures.whole_updates,
            figures.rebuilds,
        )


def test_the_driver_can_instantiate_an_updated_graph_template():
    with runner(model(scale, row=HostArg(None))) as updated:
        updated.capture()
        (calls, *_) = calls_of(updated)
        (wrapper,) = updated.graphs.owners()
        for entry in wrapper.entries.values():
            (part,) = entry.parts
            assert calls.can_instantiate(part.graph.raw_cuda_graph())


def test_a_graph_that_cannot_be_updated_raises_until_recapture(monkeypatch):
    with runner(model(scale, row=HostArg(None))) as updated:
        updated.capture()
        check(updated, {"mix": {"row": 5}})
        refuse(monkeypatch, updated, "set_kernel", "update_whole", "can_instantiate")
        for failed, row in enumerate((6, 7, 5), start=1):
            with pytest.raises(TaskError):
                updated(x=torch.randn(4, WIDTH), updates={"mix": {"row": row}})
            assert updated.pool.update_figures().failed == failed
        monkeypatch.undo()
        updated.recapture()
        check(updated, {"mix": {"row": 7}})


def test_kernel_parameters_that_cannot_be_read_are_updated_without_memoizing(monkeypatch):
    from graphrt.cuda.update import images

    monkeypatch.setattr(images, "argument_sizes", lambda function: None)
    with runner(model(fill, row=HostArg(None))) as updated:
        updated.capture()
        for row in (1, 2, 3, 1, 2):
            check(updated, {"mix": {"row": row}})
        with monkeypatch.context() as refusing:
            refuse(refusing, updated, "set_kernel")
            check(updated, {"mix": {"row": 3}})
        check(updated, {"mix": {"row": 0}})
        figures = updated.pool.update_figures()
        assert figures.whole_updates == 1 and figures.memo_hits == 0
