"""Task update on an NPU: equal to eager at every step, in any order the device runs its streams."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import protocol
import pytest
import torch
from attention_models import Decoder, differing, eager_outputs, replay_all, replayed, runner, steps
from schedules import need_simulator, python

from graphrt import GraphOptions
from graphrt.ascend import AscendOptions, AscendPlatform
from graphrt.core.base.errors import InvalidUpdateError, MissingUpdateError

pytestmark = pytest.mark.npu


@pytest.mark.parametrize("way", protocol.WAYS, ids=lambda way: "-".join(way.values()))
@pytest.mark.parametrize(
    ("layers", "count"), [(4, 300), (64, 40), pytest.param(64, 300, marks=pytest.mark.long)]
)
def test_steps_with_new_attention_lengths_equal_eager(way, layers, count):
    protocol.equals_eager(layers, count, AscendPlatform(AscendOptions(**way)))


@pytest.mark.parametrize("way", protocol.WAYS, ids=lambda way: "-".join(way.values()))
@pytest.mark.parametrize("check", [protocol.two_graphs_in_one_pool, protocol.two_threads])
def test_several_graphs_and_runners_side_by_side_equal_eager(way, check):
    check(AscendPlatform(AscendOptions(**way)))


def test_an_invalid_update_is_refused_before_launch_and_the_next_step_is_right():
    with runner(Decoder(4)) as run:
        run.capture()
        (step,) = steps(1, most=8)
        good = step.updates["attention"]
        reqs = step.batch.num_reqs
        bad = {
            "unknown": ({**step.updates, "mlp": good}, InvalidUpdateError),
            "missing": ({"layers.1": good}, MissingUpdateError),
            "key": ({"attention": {**good, "lens": [1]}}, InvalidUpdateError),
            "long": (
                {"attention": {**good, "actual_seq_lengths_kv": [1] * 9}},
                InvalidUpdateError,
            ),
            "falling": (
                {"attention": {**good, "actual_seq_lengths": [9] * reqs}},
                InvalidUpdateError,
            ),
        }
        for updates, error in bad.values():
            with pytest.raises(error):
                replayed(run, step, updates)
        assert differing([replayed(run, step).cpu()], eager_outputs(run, [step])) == []


@pytest.mark.parametrize("order", ["replay_first", "update_first"])
def test_an_update_that_issues_another_operator_than_captured_is_refused(order):
    need_simulator()
    out = python(
        f"import protocol; protocol.another_operator({order!r}); print('served')",
        environment={"TASK_QUEUE_ENABLE": "0"},
    )
    assert out.splitlines()[-1] == "served"


@pytest.mark.parametrize("queue", ["0", "1"])
@pytest.mark.parametrize("count", [1, 3])
def test_an_update_with_another_number_of_kernels_is_a_named_error(count, queue):
    need_simulator()
    out = python(
        f"import protocol; protocol.another_number_of_kernels({count}, {queue!r}); print('named')",
        environment={"TASK_QUEUE_ENABLE": queue},
        hang_ms=500,
    )
    assert out.splitlines()[-1] == "named"


def test_a_failed_operator_in_the_launch_queue_raises_a_named_error():
    need_simulator()
    out = python("import protocol; protocol.ended_queue(); print('named')", hang_ms=500)
    assert out.splitlines()[-1] == "named"


def test_the_update_stream_is_neither_the_current_nor_the_capture_stream():
    """torch_npu's 33rd stream is its first."""
    with runner(Decoder(4)) as run:
        run.capture()
        todo = steps(70, most=8)
        expected = eager_outputs(run, todo)
        outputs = []
        for step in todo:
            with torch.npu.stream(torch.npu.Stream()):
                outputs.append(replayed(run, step).cpu())
                updating = run.platform._tasks._streams[run.pool.memory]
                assert updating.stream != torch.npu.current_stream()
                assert updating.stream != run.pool.stream
        assert differing(outputs, expected) == []


def test_more_pools_than_streams_share_update_streams():
    runs = [runner(Decoder(1, seed=seed), sizes=(4,)) for seed in range(40)]
    for run in runs:
        run.capture()
    todo = steps(2, most=4)
    for run in runs:
        assert differing(replay_all(run, todo), eager_outputs(run, todo)) == []
    for run in runs:
        run.close()


@pytest.mark.parametrize("hang_timeout_s", [None, 60])
@pytest.mark.parametrize("way", protocol.WAYS, ids=lambda way: "-".join(way.values()))
def test_the_host_never_synchronizes_in_steady_state(way, hang_timeout_s):
    need_simulator()
    import graphrt_ascend_sim as simulator

    platform = AscendPlatform(AscendOptions(hang_timeout_s=hang_timeout_s, **way))
    with runner(Decoder(4), platform=platform) as run:
        run.capture()
        todo = steps(40, most=8)
        for step in todo[:10]:
            replayed(run, step)
        before = simulator.synchronizations()
        for step in todo[10:]:
            replayed(run, step)
        assert simulator.synchronizations() == before


def test_releasing_memory_waits_for_an_update_in_another_thread():
    """torch_npu waits for the device there, and no other thread can run Python until it is done."""
    decoder = Decoder(2)
    with runner(decoder, options=GraphOptions(check="off")) as run:
        run.capture()
        step, other = steps(2, most=8)
        (right,) = eager_outputs(run, [step])
        updating, issue = threading.Event(), decoder.task.issue

        def slowly(*args: Any, **kwargs: Any) -> object:
            updating.set()
            time.sleep(0.1)
            return issue(*args, **kwargs)

        replayed(run, other)
        decoder.task.issue = slowly
        with ThreadPoolExecutor(1) as threads:
            out = threads.submit(replayed, run, step)
            assert updating.wait(10)
            run.platform.release_memory(run.platform.new_memory())
            assert torch.equal(out.result().cpu(), right)
