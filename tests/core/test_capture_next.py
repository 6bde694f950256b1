"""`capture_next()` captures a graph per call, between steps, with the result of `capture()`."""

from __future__ import annotations

import contextlib
import gc
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from test_runner import INPUTS, rows, runner

from graphrt import (
    Batch,
    BatchDescriptor,
    Example,
    GraphMode,
    GraphOptions,
    GraphPool,
    GraphRunner,
    Host,
    InputSpec,
    Reason,
    _pacing,
    current_context,
    eager_break,
    forward_context,
    wrapper_class,
)
from graphrt.core.base.errors import (
    CaptureError,
    CaptureSealedError,
    GraphRTError,
    GraphsDroppedWarning,
    InvalidOptionError,
    NestedCaptureError,
    PoolBusyError,
    PoolClosedError,
    ResourceExhaustedError,
    StaleInputError,
    VerificationError,
)
from graphrt.core.replay import handout
from graphrt.core.replay.recording import current_capture
from graphrt.cpu import CpuPlatform
from graphrt.types import CaptureProgress

SIZES = [1, 2, 4, 8]
FULL, PIECEWISE = GraphMode.FULL, GraphMode.PIECEWISE


def several(forward: Any = lambda x: x + 1, **options: Any) -> GraphRunner:
    return runner(forward, **{"sizes": SIZES, **options})


def sizes_of(run: GraphRunner) -> list[int]:
    """The sizes of all graphs, in the order of their capture."""
    return [record.descriptor.num_tokens for record in run.report().graphs]


def captured_by(run: GraphRunner) -> list[int]:
    return [record.descriptor.num_tokens for record in run.capture_next().captured]


def finish(run: GraphRunner) -> None:
    while run.capture_next().left:
        pass


# What one call captures --------------------------------------------------------------------------


def test_capture_next_captures_the_largest_missing_graph_and_counts_those_left():
    run = several()
    for left, size in ((3, 8), (2, 4), (1, 2), (0, 1)):
        progress = run.capture_next()
        assert [record.descriptor.num_tokens for record in progress.captured] == [size]
        assert progress.left == left
    assert run.capture_next().captured == ()


def test_capture_next_captures_graphs_in_the_order_of_capture():
    runs = [several(mode="FULL_AND_PIECEWISE", traffic={1: 0.9, 8: 0.1}) for _ in range(2)]
    runs[0].capture()
    finish(runs[1])
    first, second = ([(g.mode, g.descriptor) for g in run.report().graphs] for run in runs)
    assert first == second


# Between calls -----------------------------------------------------------------------------------


def test_batches_between_captures_use_a_published_graph_or_run_eagerly():
    run = several(mode="FULL_AND_PIECEWISE")
    seen = []
    while True:
        progress = run.capture_next()
        for batch in (Batch(1, 1, 1), Batch(3, 3, 1), Batch(3, 2)):
            assert torch.equal(run(batch, x=rows(batch.num_tokens)), rows(batch.num_tokens, 2.0))
            dispatch = run.last_dispatch
            published = {(each.mode, each.descriptor) for each in run.dispatcher.published}
            assert dispatch.slot < 0 or (dispatch.mode, dispatch.descriptor) in published
            seen.append(dispatch.reason)
        if not progress.left:
            break
    assert set(seen) <= {Reason.HIT, Reason.NOT_CAPTURED}
    assert seen[-3:] == [Reason.HIT] * 3


def test_a_batch_with_too_much_padding_runs_eagerly_until_its_graph_is_captured():
    run = several(options=GraphOptions(max_padding=1.5))
    run.capture_next()
    run(x=rows(2))
    assert run.last_dispatch.mode is GraphMode.NONE
    finish(run)
    run(x=rows(2))
    assert run.last_dispatch.reason is Reason.HIT


@pytest.mark.parametrize("fails", [False, True])
def test_capture_next_expires_the_outputs_of_the_step_before(monkeypatch, fails):
    # Not every torch can make them unreadable.
    monkeypatch.setattr(handout, "mark_unreadable", lambda storage, _: None)

    def forward(x):
        if x.shape[0] == 4 and fails:
            raise ZeroDivisionError
        return x + 1

    run = several(forward)
    run.capture_next()
    held = handout.Shell(torch.ones(3)).hand_out((3,), run.pool.handed_out)
    with pytest.raises(ZeroDivisionError) if fails else contextlib.nullcontext():
        run.capture_next()
    assert run.pool.handed_out == [] and held is not None


def test_capture_after_capture_next_captures_the_remaining_graphs():
    run = several()
    run.capture_next()
    told = []
    run.capture(lambda done, total, descriptor: told.append((done, total)))
    assert told[-1] == (3, 3)
    assert sizes_of(run) == [8, 4, 2, 1]
    assert run.capture_next() == CaptureProgress((), 0, ready=True)
    assert run.graphs.sealing.closed


def test_a_lazy_step_between_captures_captures_its_missing_graph():
    run = several(options=GraphOptions(lazy=True))
    run.capture_next()
    run(x=rows(1))
    assert sizes_of(run) == [8, 1]
    finish(run)
    assert sizes_of(run) == [8, 1, 4, 2]
    assert run.graphs.sealing.closed


# The end -----------------------------------------------------------------------------------------


def test_after_the_last_capture_next_the_runner_is_sealed():
    run = several(options=GraphOptions(strict=True))
    finish(run)
    with pytest.raises(CaptureSealedError):
        run(x=rows(9))
    assert all(wrapper._sealing.closed for wrapper in run.graphs.owners())


@pytest.mark.trust
@pytest.mark.parametrize("check", ["capture", "first"])
def test_after_the_last_capture_next_the_same_graphs_await_trial_as_after_capture(check):
    apart, at_once = (several(options=GraphOptions(check=check)) for _ in range(2))
    finish(apart)
    at_once.capture()
    checks = [run.graphs.checks for run in (apart, at_once)]
    assert checks[0].pending == checks[1].pending or check == "first"
    tried = [{graph.descriptor for graph in each.to_try()} for each in checks]
    assert tried[0] == tried[1]


@pytest.mark.trust
def test_the_smallest_graph_captured_until_now_gets_no_extra_trial():
    run = several()
    for _ in range(3):
        run.capture_next()
        run(x=rows(3))
        run(x=rows(8))
    # The first step of the kind was a padded one, and both are of one kind.
    assert sum(record.steps for record in run.report().trust.trials) == 1


def example(batch: Batch, generator: torch.Generator) -> Example:
    return Example({"x": torch.rand(batch.num_tokens, 4, generator=generator)})


@pytest.mark.trust
def test_examples_are_tried_only_after_the_last_capture_next():
    run = several(host=Host(example=example))
    for _ in range(3):
        run.capture_next()
    assert {record.status for record in run.report().trust.trials} == {"untried"}
    run.capture_next()
    tried = {r.descriptor.num_tokens for r in run.report().trust.trials if r.status == "tried"}
    assert tried == {1, 8}


@pytest.mark.trust
def test_a_failed_trial_after_the_last_graph_releases_all_graphs_once():
    def mixes(x):
        return x + x.mean()

    run = several(mixes, host=Host(example=example))
    for _ in range(3):
        run.capture_next()
    with pytest.raises(VerificationError):
        run.capture_next()
    assert sizes_of(run) == []
    progress = run.capture_next()
    assert (progress.captured, progress.left) == ((), 0)
    assert torch.equal(run(x=rows(2)), mixes(rows(2)))
    run.release()
    assert captured_by(run) == [8]


@pytest.mark.parametrize("strict", [False, True])
def test_dropped_graphs_are_reported_after_the_last_capture_next(strict):
    def forward(x):
        return (x.repeat(1, 1 << (4 + 14 * (x.shape[0] == 2))) + 1)[:, :4]

    limited = CpuPlatform(max_pool_bytes=1 << 20)
    run = several(forward, platform=limited, options=GraphOptions(strict=strict))
    told = (
        pytest.raises(ResourceExhaustedError, match="1 of 4 graphs")
        if strict
        else pytest.warns(GraphsDroppedWarning, match="1 of 4 graphs")
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert [run.capture_next().left for _ in range(3)] == [3, 2, 1]
        assert [dropped.descriptor.num_tokens for dropped in run.report().dropped] == [2]
    with told:
        run.capture_next()
    assert sizes_of(run) == [8, 4, 1]
    assert run.capture_next().left == 0
    assert torch.equal(run(x=rows(2)), rows(2, 2.0))


def test_capture_next_seals_a_plan_without_graphs_at_once():
    run = several(mode="NONE")
    assert run.capture_next().left == 0
    assert run.graphs.sealing.closed
    assert torch.equal(run(x=rows(3)), rows(3, 2.0))


def test_capture_next_on_a_closed_runner_raises_pool_closed():
    run = several()
    run.close()
    with pytest.raises(PoolClosedError):
        run.capture_next()


# Failures ----------------------------------------------------------------------------------------


def test_a_failing_graph_raises_once_and_capture_next_continues_with_the_next():
    broken = [True]

    def forward(x):
        if broken[0] and x.shape[0] == 4:
            raise ZeroDivisionError
        return x + 1

    run = several(forward)
    run.capture_next()
    with pytest.raises(ZeroDivisionError) as raised:
        run.capture_next()
    assert any("[4 tokens" in note for note in getattr(raised.value, "__notes__", ["[4 tokens"]))
    assert [run.capture_next().left for _ in range(2)] == [1, 0]
    assert sizes_of(run) == [8, 2, 1]
    run(x=rows(3))
    assert run.last_dispatch.descriptor.num_tokens == 8
    broken[0] = False
    assert run.capture_next().captured == ()
    run.capture()
    assert sizes_of(run) == [8, 2, 1, 4]


def test_capture_next_seals_the_runner_after_a_last_graph_that_failed():
    def forward(x):
        if x.shape[0] == 1:
            raise ZeroDivisionError
        return x + 1

    run = several(forward)
    for _ in range(3):
        run.capture_next()
    with pytest.raises(ZeroDivisionError):
        run.capture_next()
    assert not run.graphs.sealing.closed
    assert run.capture_next().left == 0
    assert run.graphs.sealing.closed
    assert not run.graphs.sealing.may_capture


def test_unsupported_outputs_raise_once_for_each_graph_and_then_end():
    def forward(x):
        return {"y": x + 1, "n": object()}

    run = several(forward, outputs=None)
    for _ in SIZES:
        with pytest.raises(GraphRTError):
            run.capture_next()
    assert run.capture_next().left == 0


def test_weights_replaced_between_two_calls_are_refused_until_recapture():
    class Layer(torch.nn.Linear):
        def forward(self, x):
            return super().forward(x)

    linear = Layer(4, 4)
    run = several(linear)
    run.capture_next()
    linear.weight = torch.nn.Parameter(torch.zeros(4, 4))
    with pytest.raises(StaleInputError):
        run.capture_next()
    assert sizes_of(run) == [8]
    with torch.no_grad():
        run.recapture()
    assert sizes_of(run) == [8, 4, 2, 1]


@pytest.mark.trust
def test_capture_next_under_other_autocast_settings_is_refused():
    run = several(lambda x: torch.mm(x, x.new_ones(4, 4)))
    run.capture_next()
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(VerificationError):
        run.capture_next()
    assert sizes_of(run) == [8]
    assert captured_by(run) == [4]


@pytest.mark.trust
def test_a_lazy_step_under_other_autocast_settings_captures_no_graph():
    run = several(lambda x: torch.mm(x, x.new_ones(4, 4)), options=GraphOptions(lazy=True))
    run(x=rows(8))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = run(x=rows(2))
    assert out.dtype is torch.bfloat16
    assert sizes_of(run) == [8]
    assert run(x=rows(2)).dtype is torch.float32
    assert sizes_of(run) == [8, 2]


# Never in a step ---------------------------------------------------------------------------------


@pytest.mark.parametrize("phase", ["eager", "replay"])
def test_capture_next_called_inside_bind_of_a_step_is_refused(phase):
    errors: list[Exception] = []

    def bind(buffers, descriptor, now):
        if now == phase:
            with pytest.raises(PoolBusyError, match="under way") as raised:
                run.capture_next()
            errors.append(raised.value)

    run = several(host=Host(bind=bind))
    if phase == "replay":
        run.capture_next()
    before = sizes_of(run)
    assert torch.equal(run(x=rows(3)), rows(3, 2.0))
    assert len(errors) == 1
    assert sizes_of(run) == before
    run.capture_next()


def test_capture_next_called_in_an_eager_part_of_a_step_is_refused():
    raised = []

    @eager_break
    def between(x):
        if current_context().live is not None and not raised:
            raised.append(False)
            with pytest.raises(PoolBusyError):
                run.capture_next()
            raised.append(True)
        return x * 2

    run = several(lambda x: between(x + 1) + 1, mode="PIECEWISE", options=GraphOptions(check="off"))
    run.capture_next()
    assert torch.equal(run(x=rows(3)), rows(3, 5.0))
    assert raised == [False, True]
    finish(run)


def test_capture_next_from_another_thread_during_a_step_is_refused():
    entered, leave = threading.Event(), threading.Event()

    def bind(buffers, descriptor, phase):
        if phase == "eager":
            entered.set()
            assert leave.wait(60)

    run = several(host=Host(bind=bind))
    thread = threading.Thread(target=lambda: run(x=rows(3)))
    thread.start()
    assert entered.wait(60)
    with pytest.raises(PoolBusyError):
        run.capture_next()
    leave.set()
    thread.join()
    assert sizes_of(run) == []
    run.capture_next()


def call_here(function: Any) -> None:
    function()


def call_elsewhere(function: Any) -> None:
    with ThreadPoolExecutor(1) as threads:
        threads.submit(function).result()


def test_capture_next_between_the_pieces_of_a_step_is_refused():
    pool = GraphPool("cpu")
    pieces = [
        wrapper_class(pool.platform)(
            lambda x: x + 1, "PIECEWISE", pool=pool, options=GraphOptions(lazy=True)
        )
        for _ in range(2)
    ]
    run = several(pool=pool, platform=None)
    x = rows(2)
    for threads in ([call_here], [call_here, call_elsewhere]):  # captured, then replayed
        with forward_context("PIECEWISE", BatchDescriptor(2)):
            pieces[0](x)
            for thread in threads:
                with pytest.raises(PoolBusyError):
                    thread(run.capture_next)
            pieces[1](x)
    assert captured_by(run) == [8]


def test_capture_next_inside_the_capture_of_another_runner_is_refused():
    run = several()

    def forward(x):
        run.capture_next()
        return x + 1

    with pytest.raises((NestedCaptureError, PoolBusyError)):
        several(forward).capture()
    assert sizes_of(run) == []


# State -------------------------------------------------------------------------------------------


class Counting(torch.nn.Module):
    """What a forward may keep: found state, declared state, a Python number, random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("found", torch.zeros(4))
        self.register_buffer("rows", torch.zeros(32, 4))
        self.declared = [torch.zeros(1)]
        self.calls = 0

    def forward(self, x: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.found += 1
        self.declared[0].add_(2)
        self.rows.index_copy_(0, place, x)
        return x + self.found + self.declared[0] + torch.rand(())

    def state(self) -> list[torch.Tensor]:
        return [self.found.clone(), self.rows[1:].clone(), self.declared[0].clone()]


@pytest.mark.trust
@pytest.mark.parametrize("check", ["off", "capture"])
def test_captures_between_steps_leave_state_and_random_numbers_unchanged(check):
    models = Counting(), Counting()
    own = models[0].declared[0], *([models[0].found, models[0].rows] if check == "off" else [])
    run = GraphRunner(
        models[0],
        inputs={
            "x": INPUTS["x"],
            "place": InputSpec(torch.int64, ("tokens",), pad=0),
        },
        outputs=("tokens", 4),
        mode="FULL",
        sizes=SIZES,
        platform="cpu",
        host=Host(state=own),
        options=GraphOptions(check=check),
    )
    torch.manual_seed(7)
    for tokens in (3, 8, 2, 1, 5, 4):
        calls = models[0].calls
        run.capture_next()
        # A step that is tried runs several times; numbers are put back where a check is on.
        assert check == "off" or models[0].calls == calls
        x, place = rows(tokens, float(tokens)), torch.arange(tokens) + 1
        seed = torch.get_rng_state()
        out = run(x=x, place=place).clone()
        torch.set_rng_state(seed)
        expected = models[1](x, place)
        if run.last_dispatch.reason is not Reason.HIT or check == "off":
            assert torch.equal(out, expected)
        assert all(map(torch.equal, models[0].state(), models[1].state()))


def test_each_capture_next_enters_the_capture_context_and_enables_garbage_collection_again():
    entered = []

    @contextlib.contextmanager
    def around():
        entered.append("in")
        yield
        entered.append("out")

    run = several(host=Host(around_capture=around))
    for calls in range(1, 5):
        run.capture_next()
        assert entered == ["in", "out"] * calls
        assert gc.isenabled() and gc.get_freeze_count() < 5000
    assert run.pool.owner is None


@pytest.mark.trust
def test_state_written_only_at_a_small_size_is_restored_after_its_capture():
    state = torch.zeros(2)

    def forward(x):
        if x.shape[0] == 2:
            state.add_(1)
        return x + state[0]

    run = several(forward)
    finish(run)
    assert state.tolist() == [0, 0]


@pytest.mark.trust
def test_state_rows_written_only_at_certain_sizes_are_restored():
    state = torch.zeros(4, 4)

    def forward(x):
        if x.shape[0] in (2, 8):
            # No padding names this row.
            state.index_copy_(0, torch.full((1,), 3), x[:1] + 1)
        return x + state[3]

    run = several(forward)
    finish(run)
    assert torch.equal(state, torch.zeros(4, 4))


@pytest.mark.trust
def test_only_the_warm_up_of_the_largest_size_is_remembered():
    state = torch.zeros(1)

    def forward(x):
        state.add_(1)
        return x + state

    run = several(forward)
    finish(run)
    assert [warm.tokens for warm in run.graphs.checks.warmed_up.values()] == [8]


# Steps meanwhile ---------------------------------------------------------------------------------


def test_steps_between_capture_next_calls_do_not_look_for_missing_graphs():
    run = several()
    assert not run.graphs.sealing.may_capture
    run.capture_next()
    assert not run.graphs.sealing.may_capture
    finish(run)
    assert not run.graphs.sealing.may_capture


@pytest.mark.parametrize("end", ["release", "seal", "recapture"])
def test_capture_next_captures_all_missing_graphs_after_release_seal_or_recapture(end):
    run = several()
    run.capture_next()
    getattr(run, end)()
    assert torch.equal(run(x=rows(3)), rows(3, 2.0))
    finish(run)
    assert sorted(sizes_of(run)) == SIZES


@pytest.mark.parametrize("lazy", [False, True])
def test_after_seal_capture_next_still_captures_and_a_lazy_step_does_not(lazy):
    run = several(options=GraphOptions(lazy=lazy))
    run.capture_next()
    run.seal()
    run.capture_next()
    run(x=rows(1))
    assert sizes_of(run) == [8, 4]


def test_a_half_captured_runner_can_be_called_in_the_capture_of_another_runner():
    inner = several()
    inner.capture_next()
    outer = several(lambda x: inner(x=x))
    outer.capture()
    assert torch.equal(outer(x=rows(3)), rows(3, 2.0))


def test_capture_next_raises_the_same_error_type_as_capture():
    def forward(x):
        return x * float(x.sum().item())

    raised = []
    for call in ("capture", "capture_next"):
        with pytest.raises(CaptureError) as error:
            getattr(several(forward), call)()
        raised.append(type(error.value))
    assert raised[0] is raised[1]


def test_after_clear_graphs_capture_next_continues_and_recapture_restores_all_graphs():
    run = several()
    run.capture_next()
    run.pool.clear_graphs()
    finish(run)
    for tokens in (1, 2, 3, 5):
        assert torch.equal(run(x=rows(tokens)), rows(tokens, 2.0))
    run.recapture()
    assert sorted(sizes_of(run)) == SIZES
    assert torch.equal(run(x=rows(3)), rows(3, 2.0))
    assert run.last_dispatch.slot >= 0


# Beside steps, at a share of the time -----------------------------------------------------------


def captured_beside(run: GraphRunner) -> list[int]:
    return [graph.descriptor.num_tokens for graph in run.capture_next(share=1).captured]


def test_beside_steps_the_largest_and_the_smallest_graph_come_first_then_it_is_ready():
    run = several(mode="FULL_AND_PIECEWISE")
    keys, ready = [], []
    while True:
        progress = run.capture_next(share=1)
        keys += [(graph.mode, graph.descriptor.num_tokens) for graph in progress.captured]
        ready.append(progress.ready)
        if not progress:
            break
    modes = [*dict.fromkeys(mode for mode, _ in run.plan.keys)]
    assert keys[:4] == [(mode, size) for size in (8, 1) for mode in modes]
    assert ready == [False] * 3 + [True] * 5
    assert run.capture_next(share=1) == CaptureProgress((), 0, ready=True)
    assert run.graphs.sealing.closed


@pytest.mark.parametrize("traffic", [{3: 5, 2: 4}, {2: 5, 3: 4}])
def test_beside_steps_what_most_batches_have_missed_is_captured_first(traffic):
    run = several()
    while not run.capture_next(share=1).ready:
        pass
    for tokens, count in traffic.items():
        for _ in range(count):
            assert torch.equal(run(x=rows(tokens)), rows(tokens, 2.0))
            assert run.last_dispatch.reason is Reason.HIT
    first = [4, 2] if traffic[3] > traffic[2] else [2, 4]
    assert [captured_beside(run) for _ in first] == [[size] for size in first]


def test_batches_that_ran_eagerly_before_count_as_missed():
    run = several()
    for _ in range(3):
        run(x=rows(2))
    assert [captured_beside(run) for _ in SIZES] == [[8], [1], [2], [4]]


def test_captures_take_at_most_their_share_of_the_time_but_for_one(monkeypatch):
    now, longest = [0.0], 0.0
    monkeypatch.setattr(_pacing.time, "perf_counter", lambda: now[0])

    def forward(x):
        if current_capture() is not None:
            now[0] += x.shape[0] / 100
        return x + 1

    run, spent = several(forward, sizes=[*range(1, 33)]), []
    while now[0] < 40:
        began = now[0]
        progress = run.capture_next(share=0.1)
        spent.append((began, now[0] - began))
        assert len(progress.captured) <= 1
        now[0] += 0.05  # a step
    longest = max(seconds for _, seconds in spent)
    assert len(run.report().graphs) > 16 and 0.3 < longest < 0.4
    for at in range(30):
        within = sum(seconds for began, seconds in spent if at <= began < at + 10)
        assert within <= 1 + longest
    # Not after a pause either.
    now[0] += 1000
    assert [len(run.capture_next(share=0.1).captured) for _ in range(3)] == [1, 0, 0]


def test_a_capture_that_fails_beside_steps_counts_as_time_and_is_left_out(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(_pacing.time, "perf_counter", lambda: now[0])

    def forward(x):
        now[0] += 1
        if x.shape[0] == 8:
            raise ZeroDivisionError
        return x + 1

    run = several(forward)
    with pytest.raises(ZeroDivisionError):
        run.capture_next(share=0.5)
    assert run.capture_next(share=0.5) == CaptureProgress((), 3, ready=False)
    now[0] += 5
    assert [each.descriptor.num_tokens for each in run.capture_next(share=0.5).captured] == [1]


@pytest.mark.parametrize("share", [-1, 0, 2, "x"])
def test_a_share_that_is_none_is_named_with_its_bounds(share):
    with pytest.raises(InvalidOptionError, match="more than 0 and at most 1"):
        several().capture_next(share=share)


def test_graphs_that_were_released_are_captured_beside_steps_again():
    run = several()
    while run.capture_next(share=1):
        pass
    run.release()
    assert captured_beside(run) == [8]
    run.pool.clear_graphs()
    assert captured_beside(run) == [8]


@pytest.mark.parametrize("share", [0, -1, 1.5, "0.1", True])
def test_a_share_that_is_none_is_refused(share):
    with pytest.raises(InvalidOptionError, match="share"):
        several().capture_next(share=share)


def test_live_state_is_unchanged_by_each_of_a_hundred_captures_between_steps():
    torch.manual_seed(0)

    class Model(torch.nn.Module):
        """A KV cache with a spare row, a recurrent state, a count, and noise."""

        def __init__(self) -> None:
            super().__init__()
            self.cache, self.state = torch.zeros(65, 4), torch.zeros(4)
            self.weight, self.count = torch.randn(4, 4), torch.zeros(1)
            self.steps, self.seen = 0, []

        def forward(self, x, slot):
            self.steps += 1
            self.count += 1
            self.state.mul_(0.5).add_(x[:1].sum(0))
            hidden = x @ self.weight + torch.rand_like(x) * 0
            self.cache.index_copy_(0, slot, hidden)
            return hidden + self.cache[slot] + self.state * self.count

    def checksums() -> list[Any]:
        tensors = (model.cache, model.state, model.count, torch.get_rng_state())
        return [*(hash(each.numpy().tobytes()) for each in tensors), model.steps]

    model, twin = Model(), Model()
    twin.load_state_dict(model.state_dict())
    twin.weight = model.weight
    inputs = {
        "x": InputSpec(torch.float32, ("tokens", 4)),
        "slot": InputSpec(torch.int64, ("tokens",), pad=64, index=True),
    }
    run = GraphRunner(
        model,
        inputs=inputs,
        outputs=("tokens", 4),
        mode="FULL_AND_PIECEWISE",
        sizes=[*range(1, 51)],
        platform="cpu",
        host=Host(mixes_rows=True),
    )
    captures = 0
    while True:
        before = checksums()
        progress = run.capture_next(share=1)
        assert checksums() == before
        captures += len(progress.captured)
        if not progress:
            break
        tokens = int(torch.randint(1, 51, ()))
        step = {"x": torch.randn(tokens, 4), "slot": torch.randperm(64)[:tokens]}
        kept = torch.get_rng_state()
        expected = twin(**step)
        torch.set_rng_state(kept)
        assert torch.equal(run(**step), expected)
        assert torch.equal(model.cache[:64], twin.cache[:64])
    assert captures == 100
