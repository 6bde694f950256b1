"""The runner on the CPU: padding, fallbacks and their reasons, hooks, threads, weights."""

from __future__ import annotations

import contextlib
import functools
import threading
from typing import Any

import pytest
import torch

from graphrt import (
    Batch,
    BatchDescriptor,
    Budget,
    GraphCost,
    GraphMode,
    GraphOptions,
    GraphPool,
    GraphRunner,
    Host,
    HostArg,
    InputSpec,
    Reason,
    UpdatableTask,
    current_context,
    eager_break,
    get_platform,
)
from graphrt.core.base.errors import (
    CaptureSealedError,
    GraphQuarantinedWarning,
    GraphRTError,
    GraphsDroppedWarning,
    InvalidBatchError,
    InvalidInputError,
    InvalidModeError,
    InvalidOptionError,
    PlatformError,
    PoolBusyError,
    ResourceExhaustedError,
    StaleInputError,
    StateTooLargeError,
    VerificationError,
)
from graphrt.core.device.contract import MemoryFigures
from graphrt.core.replay.recording import current_capture
from graphrt.cpu import CpuPlatform

INPUTS = {"x": InputSpec(torch.float32, ("tokens", 4))}


def runner(forward: Any = lambda x: x + 1, **options: Any) -> GraphRunner:
    arguments: dict[str, Any] = {
        "inputs": INPUTS,
        "outputs": ("tokens", 4),
        "mode": "FULL",
        "sizes": [2, 4],
        "platform": "cpu",
        **options,
    }
    return GraphRunner(forward, **arguments)


def rows(count: int, value: float = 1.0) -> torch.Tensor:
    return torch.full((count, 4), value)


def test_a_step_without_a_batch_derives_its_tokens_from_input_shapes():
    captured = runner()
    captured.capture()
    assert captured(x=rows(3)).shape == (3, 4)
    assert captured.last_dispatch.descriptor.num_tokens == 4


@pytest.mark.parametrize(
    ("count", "reason"),
    [(1, Reason.HIT), (4, Reason.HIT), (5, Reason.TOO_LARGE)],
)
def test_a_batch_larger_than_all_buffers_runs_eagerly_on_its_own_tensors(count, reason):
    captured = runner()
    captured.capture()
    assert torch.equal(captured(x=rows(count)), rows(count, 2.0))
    assert captured.last_dispatch.reason is reason
    assert captured.report().reasons[reason] == 1


@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE", "FULL_AND_PIECEWISE"])
def test_a_batch_of_more_requests_than_any_graph_runs_eagerly_in_each_mode(mode, lazy):
    """Before, a graph for any number of requests was chosen, and the step raised."""
    block_tables = {"table": InputSpec(torch.int64, ("reqs", 2), pad=0)}
    captured = runner(
        lambda x, table: x + table.sum(),
        inputs=INPUTS | block_tables,
        mode=mode,
        max_num_reqs=2,
        options=GraphOptions(lazy=lazy),
    )
    captured.capture()
    for batch, reqs, hits in (
        (Batch(4, 3), 3, False),
        (Batch(3, 3, 1), 3, False),
        (Batch(4, query_len=1), 4, False),
        (None, 3, False),
        (Batch(4, 2), 2, True),
    ):
        tokens = 3 if batch is None else batch.num_tokens
        out = captured(batch, x=rows(tokens), table=torch.ones(reqs, 2, dtype=torch.int64))
        assert torch.equal(out, rows(tokens, 1.0 + 2 * reqs))
        wanted = Reason.HIT if hits else Reason.NO_GRAPH
        assert captured.last_dispatch.reason is wanted
        assert batch is None or captured.dispatcher.peek(batch).reason is wanted
    with pytest.raises(InvalidBatchError, match="1 to 2") as caught:
        captured(Batch(4), x=rows(4), table=torch.ones(3, 2, dtype=torch.int64))
    assert "Batch(num_tokens, num_reqs)" in caught.value.advice


def test_the_report_counts_live_and_padded_tokens_of_replays():
    captured = runner()
    captured.capture()
    captured(x=rows(3))
    captured(x=rows(4))
    report = captured.report()
    assert (report.live_tokens, report.padded_tokens) == (7, 8)
    assert report.padding == 1 - 7 / 8
    assert report.pool_bytes > 0
    assert [record.descriptor.num_tokens for record in report.graphs] == [4, 2]


def test_excluded_modes_and_agreed_graphs_of_a_step_reach_the_dispatcher():
    captured = runner()
    captured.capture()
    captured(Batch(1, 1, 1, exclude=frozenset({GraphMode.FULL})), x=rows(1))
    assert captured.last_dispatch.reason is Reason.EXCLUDED
    captured(Batch(1, 1, 1), x=rows(1), agreed=BatchDescriptor(3))
    assert captured.last_dispatch.reason is Reason.RANKS_DISAGREE
    agreed = captured.dispatcher.peek(Batch(4, 4, 1))
    captured(Batch(1, 1, 1), x=rows(1), agreed=agreed)
    assert captured.last_dispatch == agreed
    captured(captured.slot(Batch(1, 1, 1)), agreed=agreed.descriptor)
    assert captured.last_dispatch == agreed
    assert captured.dispatcher.counts()[Reason.HIT] == 2


def test_strict_refuses_a_batch_that_no_graph_serves_after_capture():
    strict = runner(options=GraphOptions(strict=True))
    strict(x=rows(9))
    strict.capture()
    with pytest.raises(CaptureSealedError, match="more tokens"):
        strict(x=rows(9))
    assert strict(x=rows(2)).shape == (2, 4)


def test_a_lazy_step_captures_the_graph_that_its_batch_needs():
    lazy = runner(options=GraphOptions(lazy=True))
    assert torch.equal(lazy(x=rows(3)), rows(3, 2.0))
    assert lazy.last_dispatch.reason is Reason.HIT
    assert len(lazy.report().graphs) == 1
    lazy.seal()
    lazy(x=rows(1))
    assert lazy.last_dispatch.descriptor.num_tokens == 4


def test_bind_is_called_in_every_phase_with_the_views_of_the_step():
    calls = []

    def bind(buffers, descriptor, phase):
        calls.append((phase, descriptor.num_tokens, buffers["x"].shape[0]))

    options = GraphOptions(check="off")
    bound = runner(host=Host(bind=bind), sizes=[2], outputs=("tokens", 4), options=options)
    bound(x=rows(1))
    bound.capture()
    bound(x=rows(1))
    assert calls == [("eager", 1, 1), ("warmup", 2, 2), ("capture", 2, 2), ("replay", 2, 2)]


def test_the_capture_context_is_entered_once_around_all_captures():
    events = []

    @contextlib.contextmanager
    def capture_context():
        events.append("enter")
        yield
        events.append("exit")

    def forward(x):
        events.append("forward")
        return x + 1

    captured = runner(forward, host=Host(around_capture=capture_context))
    captured.capture()
    assert events == ["enter", *["forward"] * 4, "exit"]


def test_segment_hooks_run_around_each_capture_and_before_each_replay():
    events = []

    class Hooks:
        def before_capture(self):
            events.append("before_capture")

        def end_of_capture(self):
            events.append("end_of_capture")

        def before_replay(self):
            events.append("before_replay")

    captured = runner(host=Host(around_graph=Hooks()), sizes=[2])
    captured.capture()
    captured(x=rows(2))
    assert events == ["before_capture", "end_of_capture", "before_replay"]


def test_capture_reports_progress_before_each_graph_and_at_the_end():
    seen = []
    runner().capture(lambda done, total, descriptor: seen.append((done, total)))
    assert seen == [(0, 2), (1, 2), (2, 2)]


@pytest.mark.trust
def test_weights_changed_refuses_a_replaced_weight_and_recapture_reads_the_new_weight():
    weight = torch.nn.Linear(4, 4, bias=False)
    captured = runner(lambda x: weight(x))
    captured.capture()
    with torch.no_grad():
        weight.weight.copy_(torch.eye(4))
    captured.weights_changed()
    assert torch.equal(captured(x=rows(2)), rows(2))
    weight.weight = torch.nn.Parameter(torch.eye(4) * 3)
    with pytest.raises(StaleInputError, match="weight"):
        captured.weights_changed()
    captured.recapture()
    assert torch.equal(captured(x=rows(2)), rows(2, 3.0))


def test_two_runners_in_two_threads_return_the_right_outputs():
    failures = []

    def work(offset: float) -> None:
        own = runner(lambda x: (x + offset) * 2, mode="FULL_AND_PIECEWISE", max_num_reqs=4)
        own.capture()
        for turn in range(200):
            count = turn % 4 + 1
            batch = Batch(count, count, 1) if turn % 2 else Batch(count, 1)
            out = own(batch, x=rows(count, float(turn)))
            if not torch.equal(out, rows(count, (turn + offset) * 2)):
                failures.append((offset, turn))

    threads = [threading.Thread(target=work, args=(offset,)) for offset in (1.0, 50.0)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_a_second_threads_call_during_a_step_of_a_runner_is_refused():
    caught = []

    @eager_break
    def other_thread(x):
        def call():
            try:
                shared(x=rows(2))
            except PoolBusyError as error:
                caught.append(error)

        if current_context().metadata == "go":
            thread = threading.Thread(target=call)
            thread.start()
            thread.join()
        return x * 1

    shared = runner(lambda x: other_thread(x + 1), mode="PIECEWISE")
    shared.capture()
    shared(x=rows(2), metadata="go")
    # What other runs of the trial have put there is gone.
    assert len(caught) == 1
    shared(x=rows(3))
    shared(x=rows(2), metadata="go")
    assert len(caught) == 2


def test_runners_that_share_a_pool_share_its_memory():
    pool = GraphPool("cpu")
    first, second = runner(pool=pool), runner(lambda x: x * 5, pool=pool)
    first.capture()
    alone = pool.bytes()
    second.capture()
    assert pool.bytes() == alone
    assert torch.equal(first(x=rows(3)), rows(3, 2.0))
    assert torch.equal(second(x=rows(3)), rows(3, 5.0))
    first.close()
    assert torch.equal(second(x=rows(3)), rows(3, 5.0))


def test_updates_give_host_arguments_to_replayed_and_eager_steps():
    scale = UpdatableTask(
        "scale",
        lambda x, out, lengths: torch.add(x, x, alpha=sum(lengths), out=out),
        {"lengths": HostArg("reqs")},
        at_capture=lambda descriptor: {"lengths": [0]},
    )

    def forward(x):
        out = torch.empty_like(x)
        scale(x, out)
        return out

    tasked = runner(forward, max_num_reqs=4)
    tasked.capture()
    batch = Batch(3, 3, 1)
    assert torch.equal(
        tasked(batch, x=rows(3), updates={"scale": {"lengths": [1, 2, 3]}}), rows(3, 7.0)
    )
    assert torch.equal(tasked(x=rows(9), updates={"scale": {"lengths": [1]}}), rows(9, 2.0))


def test_outputs_by_token_and_by_request_are_cut_to_their_live_rows():
    inputs = {**INPUTS, "last": InputSpec(torch.int64, ("reqs",), pad=0, index=True)}
    captured = GraphRunner(
        lambda x, last: {"hidden": x + 1, "picked": x[last], "constant": 3},
        inputs=inputs,
        outputs={"hidden": ("tokens", 4), "picked": ("reqs", 4)},
        mode="FULL",
        sizes=[4],
        platform="cpu",
    )
    captured.capture()
    out = captured(Batch(3, 2), x=rows(3), last=torch.tensor([0, 2]))
    assert (out["hidden"].shape, out["picked"].shape, out["constant"]) == ((3, 4), (2, 4), 3)


def test_a_capture_that_fails_half_way_keeps_its_graphs_and_can_continue():
    broken = [True]

    def forward(x):
        if broken[0] and x.shape[0] == 2 and torch.is_grad_enabled() is False:
            raise ValueError("small batches fail")
        return x + 1

    captured = runner(forward, options=GraphOptions(warmups=0))
    with pytest.raises(ValueError, match="small batches fail"):
        captured.capture()
    assert [graph.descriptor.num_tokens for graph in captured.dispatcher.published] == [4]
    assert torch.equal(captured(x=rows(3)), rows(3, 2.0))
    broken[0] = False
    captured.capture()
    assert len(captured.dispatcher.published) == 2


def test_a_declared_counter_advances_equally_in_full_piecewise_and_eager_mode():
    def make(mode: str) -> list[float]:
        counter = torch.zeros((), dtype=torch.int64)

        def forward(x):
            counter.add_(1)
            return x * counter

        with runner(forward, mode=mode, host=Host(state=[counter])) as decoding:
            decoding.capture()
            return [float(decoding(x=rows(2))[0, 0]) for _ in range(4)]

    assert make("FULL") == make("PIECEWISE") == make("NONE") == [1.0, 2.0, 3.0, 4.0]


@pytest.mark.trust
def test_verify_advances_declared_state_once_and_returns_the_steps_output():
    counter = torch.zeros(())

    def forward(x):
        counter.add_(1)
        return {"sum": x + counter, "nan": x * float("nan")}

    captured = runner(forward, outputs={"sum": ("tokens", 4)}, host=Host(state=[counter]))
    captured.capture()
    assert torch.equal(captured.verify(x=rows(3))["sum"], rows(3, 2.0))
    assert counter == 1
    assert torch.equal(captured.verify(x=rows(9))["sum"], rows(9, 3.0))
    assert counter == 2
    captured.release()
    with pytest.raises(VerificationError, match="no graph yet"):
        captured.verify(x=rows(3))
    assert counter == 2


@pytest.mark.trust
def test_verify_finds_a_changed_python_value_that_the_graph_baked_in():
    scale = [2.0]
    captured = runner(lambda x: x * scale[0])
    captured.capture()
    captured.verify(x=rows(3))
    scale[0] = 3.0
    with pytest.raises(VerificationError, match="12 of 12 values, by at most 1"):
        captured.verify(x=rows(3))


@pytest.mark.parametrize("strict", [False, True])
def test_graphs_that_exceed_pool_memory_are_dropped_and_captured_graphs_stay(strict):
    limited = CpuPlatform(max_pool_bytes=1 << 20)

    def forward(x):
        return (x.repeat(1, 1 << (4 + 14 * (x.shape[0] == 2))) + 1)[:, :4]

    captured = runner(forward, platform=limited, options=GraphOptions(strict=strict))
    told = (
        pytest.raises(ResourceExhaustedError, match="1048576")
        if strict
        else pytest.warns(GraphsDroppedWarning, match="1 of 2 graphs")
    )
    with told:
        captured.capture()
    assert [graph.descriptor.num_tokens for graph in captured.dispatcher.published] == [4]
    (dropped,) = captured.report().dropped
    assert (dropped.mode, dropped.descriptor.num_tokens) == (GraphMode.FULL, 2)
    assert "1048576" in dropped.reason
    assert torch.equal(captured(x=rows(3)), rows(3, 2.0))
    assert torch.equal(captured(x=rows(2)), rows(2, 2.0))


@pytest.mark.trust
@pytest.mark.parametrize("declared", [True, False])
def test_state_within_the_memory_limit_is_saved_and_restored_around_captures(declared):
    # A static cache of 16 rows: more than 64 MiB, of a device that has it many times over.
    cache = torch.zeros(2, 16, 16, 8, 144, 64, dtype=torch.bfloat16)

    def forward(x):
        cache.add_(1)
        return x + cache.view(-1)[0]

    large = runner(forward, host=Host(state=[cache] if declared else []))
    if GraphOptions().state_limit(large.pool.platform) < cache.nbytes:
        pytest.skip("this machine has less than 1.3 GB of free memory")
    large.capture()
    assert cache.count_nonzero() == 0
    for step in range(1, 4):
        assert torch.equal(large(x=rows(2)), rows(2, 1.0 + step))
        assert large.last_dispatch.reason is Reason.HIT
    assert (cache == 3).all()


def test_the_state_limit_is_the_hosts_option_or_a_share_of_free_memory():
    class Told(type(get_platform("cpu"))):
        figures = MemoryFigures(free_bytes=1 << 40, total_bytes=1 << 41)

        def memory_figures(self):
            return self.figures

    told, least = Told(), 64 << 20
    assert GraphOptions().state_limit(told) == 1 << 36
    assert GraphOptions(state_limit_bytes=5).state_limit(told) == 5
    for figures in (MemoryFigures(1 << 20, 1 << 41), None):
        told.figures = figures
        assert GraphOptions().state_limit(told) == least


def test_state_over_the_limit_is_refused_before_anything_is_captured():
    large = runner(host=Host(state=[torch.zeros(100)]), options=GraphOptions(state_limit_bytes=399))
    with pytest.raises(StateTooLargeError, match="state_limit_bytes"):
        large.capture()
    assert large.dispatcher.published == ()


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"mode": "HALF"}, InvalidModeError, "HALF"),
        ({"sizes": []}, InvalidOptionError, "empty|no "),
        ({"sizes": [4, 2]}, InvalidOptionError, "sorted"),
        ({"sizes": [2, 2]}, InvalidOptionError, "2"),
        ({"sizes": [-1, 2]}, InvalidOptionError, "-1"),
        ({"sizes": [0]}, InvalidOptionError, "0"),
        ({"sizes": None}, InvalidOptionError, "max_num_tokens"),
        ({"platform": "abacus"}, PlatformError, "abacus"),
        ({"pieces": "magic"}, GraphRTError, "magic"),
    ],
)
def test_bad_runner_configurations_raise_errors_that_name_the_value(options, error, text):
    with pytest.raises(error, match=text):
        runner(**options)


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"x": rows(2).double()}, InvalidInputError, "float64"),
        ({"x": torch.ones(2, 5)}, InvalidInputError, r"\(2, 5\)"),
        ({}, InvalidInputError, "missing \\['x'\\]"),
        ({"x": rows(2), "y": rows(2)}, InvalidInputError, "unknown \\['y'\\]"),
        ({"x": torch.ones(0, 4)}, InvalidBatchError, "0"),
    ],
)
def test_bad_inputs_of_a_step_raise_and_the_next_step_works(arguments, error, text):
    captured = runner()
    captured.capture()
    with pytest.raises(error, match=text):
        captured(**arguments)
    assert torch.equal(captured(x=rows(2)), rows(2, 2.0))


OWN = torch.Generator()


@pytest.mark.trust
@pytest.mark.parametrize(
    ("draw", "options", "may_draw"),
    [
        (lambda rows: 0, {}, False),
        # No generator of the forward's own is noted.
        (lambda rows: 0, {"check": "off"}, True),
        # Nothing has shown what it does.
        (lambda rows: 0, {"warmups": 0}, True),
        (lambda rows: torch.rand(()).item(), {}, True),
        (lambda rows: torch.rand(()).item(), {"check": "off"}, True),
        (lambda rows: torch.rand((), generator=OWN).item(), {}, True),
    ],
)
def test_a_capture_learns_from_its_warm_up_whether_the_forward_draws_random_numbers(
    draw, options, may_draw
):
    seen = []

    def forward(x):
        context = current_context()
        if context is not None and context.capture is not None:
            seen.append(context.capture.may_draw)
        elif context is not None:
            draw(x.shape[0])
        return x + 1

    captured = runner(forward, sizes=[2, 4], options=GraphOptions(**options))
    captured.capture()
    assert seen == [may_draw, may_draw]


@pytest.mark.trust
def test_a_forward_that_draws_only_at_the_smaller_size_is_known_to_draw():
    seen = []

    def forward(x):
        context = current_context()
        assert context is not None
        if context.capture is not None:
            seen.append((x.shape[0], context.capture.may_draw))
        elif x.shape[0] < 4:
            torch.rand(())
        return x + 1

    captured = runner(forward, sizes=[2, 4])
    captured.capture()
    assert seen == [(4, False), (2, True)]


def test_a_forward_that_caches_only_its_last_size_is_captured_in_both_modes():
    weight = torch.ones(4)

    # It keeps the last size alone, in C, where no look at Python finds that it has changed.
    @functools.lru_cache(maxsize=1)
    def factor(count):
        # No graph can read a number on the host.
        return weight.sum().item() * 0 + 2

    captured = runner(lambda x: x * factor(x.shape[0]), mode="FULL_AND_PIECEWISE", sizes=[2, 3, 4])
    captured.capture()
    assert len(captured.report().graphs) == 6
    assert torch.equal(captured(x=rows(3)), rows(3, 2.0))


@pytest.mark.trust
def test_state_written_at_only_one_size_is_restored_after_captures_of_both_modes():
    counts = {size: torch.zeros(1) for size in (2, 3, 4)}

    def forward(x):
        counts[x.shape[0]].add_(1)
        return x + 1

    captured = runner(forward, mode="FULL_AND_PIECEWISE", sizes=list(counts))
    captured.capture()
    assert len(captured.report().graphs) == 6
    assert [count.item() for count in counts.values()] == [0, 0, 0]


def test_a_budget_too_small_for_pieces_steps_the_mode_down_to_decode_only():
    cost = {GraphMode.FULL: GraphCost(streams=1), GraphMode.PIECEWISE: GraphCost(streams=5)}
    planned = runner(
        mode="FULL_AND_PIECEWISE",
        sizes=[1, 2, 4],
        budget=Budget(streams=7, cost=cost),
    )
    assert planned.mode is GraphMode.FULL_DECODE_ONLY
    assert planned.plan.resolution.steps[-1].rule == "budget"
    planned.capture()
    assert {graph.mode for graph in planned.report().graphs} == {GraphMode.FULL}
    assert len(planned.plan.left_out) == 3
    assert torch.equal(planned(x=rows(3)), rows(3, 2.0))


@pytest.mark.parametrize("warmups", [0, 1, 2])
@pytest.mark.parametrize("lazy", [False, True])
def test_a_capture_leaves_the_hosts_random_generator_state_unchanged(lazy, warmups):
    options = GraphOptions(lazy=lazy, warmups=warmups)
    drop = torch.nn.Dropout(0.5).train()
    captured = runner(lambda x: drop(x), options=options, sizes=[2])
    torch.manual_seed(1)
    if not lazy:
        captured.capture()
    outputs = [captured(x=rows(2)).clone() for _ in range(3)]
    torch.manual_seed(1)
    assert all(torch.equal(each, drop(rows(2))) for each in outputs)
    assert captured.last_dispatch.reason is Reason.HIT


@pytest.mark.trust
def test_the_printed_report_counts_no_padding_for_quarantined_eager_steps():
    mixing = runner(lambda x: x - x.mean(0))
    mixing.capture()
    with pytest.warns(GraphQuarantinedWarning):
        mixing(x=rows(3))
    mixing(x=rows(3))
    report = mixing.report()
    assert (report.live_tokens, report.padded_tokens, report.padding) == (0, 0, 0.0)
    assert repr(mixing) == f"GraphRunner(FULL, {len(report.graphs)} graphs, cpu)"
    first, _, titles, *lines = str(report).splitlines()
    assert first.startswith(f"FULL on cpu, {len(report.graphs)} graphs, captured in ")
    assert titles.split() == ["graph", "steps", "padding", "capture", "pool", "trial"]
    (row,) = [line for line in lines if line.startswith("FULL [4 tokens 4 reqs]")]
    assert "0 (+2 eager)" in row and row.endswith("quarantined")
    assert "Steps: 2: 2 QUARANTINED" in lines
    mixing(x=rows(9))
    mixing.release()
    assert "Steps: 3: 1 TOO_LARGE, 2 QUARANTINED" in str(mixing.report())


@pytest.mark.trust
def test_verify_sets_last_dispatch_to_the_verified_step():
    captured = runner()
    captured.capture()
    captured(x=rows(4))
    captured.verify(x=rows(2))
    assert captured.last_dispatch.descriptor.num_tokens == 2


def test_a_capture_that_raises_after_its_warm_up_is_not_retried():
    calls = []

    def forward(x: torch.Tensor) -> torch.Tensor:
        calls.append(current_capture() is not None)
        if calls.count(True) == 1 and calls[-1]:
            raise ValueError("once")
        return x + 1

    with pytest.raises(ValueError, match="once"):
        runner(forward, sizes=[4]).capture()
    assert calls.count(True) == 1
