"""The simulated device: orders, failures, limits, memory, schedules and its end."""

from __future__ import annotations

import ctypes
import gc
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.npu
if os.environ.get("GRAPHRT_PLATFORM") != "ascend-sim":
    reason = "needs graphrt-ascend-sim and GRAPHRT_PLATFORM=ascend-sim (make test-ascend)"
    pytest.skip(reason, allow_module_level=True)

import graphrt_ascend_sim as simulator  # noqa: E402

simulator.start()

import torch_npu  # noqa: E402
import update_orders  # noqa: E402
from update_orders import Attention  # noqa: E402

HERE = Path(__file__).parent
SCHEDULES = ["eager", "lazy", "random:1", "random:2", "lazy-random:3", "slow:0"]


@pytest.fixture(params=SCHEDULES)
def schedule(request: pytest.FixtureRequest) -> Iterator[None]:
    simulator.set_schedule(request.param)
    yield
    torch.npu.synchronize()
    simulator.set_schedule("eager")


def run(code: str, **settings: object) -> str:
    """What `code` prints in a process of its own, which must end well."""
    done = subprocess.run(
        [sys.executable, "-c", f"import torch, torch_npu\n{code}"],
        env=os.environ
        | {"PYTHONPATH": os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH")]))}
        | {"GRAPHRT_SIM_HANG_MS": "300"}
        | {f"GRAPHRT_SIM_{name.upper()}": str(value) for name, value in settings.items()},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    lines = done.stdout.splitlines(keepends=True)
    return "".join(line for line in lines if not line.startswith("Warning: ASCEND_HOME_PATH"))


def captured(body: Callable[[], Any], **options: Any) -> tuple[Any, Any]:
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph, **options):
        result = body()
    return graph, result


def side_stream() -> Any:
    """A stream that `captured` does not capture on: torch_npu hands out a few, in turn."""
    captured(lambda: None)  # torch_npu takes its own at the first capture
    stream = torch.npu.Stream()
    while stream == torch.npu.graph.default_capture_stream:
        stream = torch.npu.Stream()
    return stream


# Orders of update and replay ----------------------------------------------------------------------


def test_an_unknown_simulator_schedule_is_refused() -> None:
    for schedule in ("hasty", "random", "lazy:1", "slow"):
        with pytest.raises(ValueError, match=schedule):
            simulator.set_schedule(schedule)


def test_a_stream_scheduled_slow_runs_last() -> None:
    slow, fast = torch.npu.Stream(), torch.npu.Stream()
    x = torch.zeros(1, device="npu")
    torch.npu.synchronize()
    simulator.set_schedule("lazy")
    with torch.npu.stream(slow):
        x.add_(1)
    with torch.npu.stream(fast):
        out = [x.clone() for _ in range(3)]
    simulator.set_schedule(f"slow:{simulator.stream_id(slow)}")
    torch.npu.synchronize()
    simulator.set_schedule("eager")
    assert [each.item() for each in out] == [0, 0, 0]


@pytest.mark.usefixtures("schedule")
@pytest.mark.parametrize("order", update_orders.RIGHT, ids=lambda order: order.__name__)
def test_right_update_orders_give_right_results_under_every_schedule(order: Any) -> None:
    assert update_orders.wrong_steps(order) == []


@pytest.mark.parametrize("order", update_orders.WRONG, ids=lambda order: order.__name__)
def test_wrong_update_orders_hang_and_the_process_still_exits(order: Any) -> None:
    out = run(f"import update_orders; update_orders.main({order.__name__!r})", schedule="lazy")
    assert "507046" in out
    assert "value wait" in out


def test_a_failed_update_after_the_replay_hangs_unless_drained() -> None:
    code = """
from update_orders import Attention, close
model = Attention()
model.replay()
try:
    model.update(2, fail_at=1)
except RuntimeError as error:
    print(type(error.__context__).__name__)
try:
    torch.npu.synchronize()
except RuntimeError as error:
    print('hangs', '507046' in str(error))
for site in model.sites[1:]:
    site[3].record(model.updates)
torch.npu.synchronize()
model.fence(); model.replay(); model.update(3); torch.npu.synchronize()
print('right', close(model.out, model.expected(3)))
"""
    assert run(code).split() == ["ArithmeticError", "hangs", "True", "right", "True"]


def test_a_failed_update_before_the_replay_leaves_stale_signals() -> None:
    """Under a lazy schedule the next replay starts with the signal of the failed update."""
    code = """
from update_orders import Attention, close
model = Attention()
for length, fail_at in ((1, None), (2, 1), (3, None), (4, None)):
    model.fence()
    try:
        model.update(length, fail_at=fail_at)
    except RuntimeError:
        if REARM:
            model.sites[0][3].wait(model.updates)
        continue
    model.replay()
    out = model.out.clone()
    if length >= 3:
        torch.npu.synchronize()
        print(close(out, model.expected(length)))
"""
    assert run(f"REARM = True{code}", schedule="lazy").split() == ["True", "True"]


@pytest.mark.usefixtures("schedule")
def test_two_graphs_of_a_pool_give_right_results_in_any_order() -> None:
    pool = torch.npu.graph_pool_handle()
    models = [Attention(pool), Attention(pool)]
    models[1].updates = models[0].updates
    found = []
    for step, which in enumerate([0, 1, 1, 0, 0, 1, 0, 1, 1, 0]):
        model, length = models[which], step % 8 + 1
        update_orders.graph_wait_then_update(model, length)
        found.append((model.expected(length), model.out.clone()))
    torch.npu.synchronize()
    assert all(update_orders.close(out, expected) for expected, out in found)


# Errors -------------------------------------------------------------------------------------------


def first_line(action: Callable[[], Any]) -> str:
    stream = torch.npu.current_stream()
    with pytest.raises(RuntimeError) as caught:
        action()
    torch.npu.set_stream(stream)
    torch.npu.synchronize()
    return str(caught.value)


def test_calls_forbidden_in_a_capture_give_their_cann_error_codes() -> None:
    x = torch.ones(4, device="npu")
    side = side_stream()

    def unjoined() -> None:
        side.wait_stream(torch.npu.current_stream())
        with torch.npu.stream(side):
            x.add(1)

    def open_group() -> None:
        torch.npu.graph_task_group_begin(torch.npu.current_stream())
        x.add(1)

    assert "107025" in first_line(lambda: captured(unjoined))
    assert "107033" in first_line(lambda: captured(open_group))
    assert "107027" in first_line(lambda: captured(lambda: x.add(1)[0].item()))
    assert "non-default stream" in first_line(lambda: torch.npu.NPUGraph().capture_begin())
    assert "107029" in first_line(lambda: torch.npu.graph_task_group_begin(torch.npu.Stream()))
    assert "107033" in first_line(lambda: torch.npu.graph_task_update_end(torch.npu.Stream()))
    graph, out = captured(lambda: x.add(1))
    graph.replay()
    assert out.tolist() == [2] * 4


def test_a_simulated_update_with_too_few_tasks_raises_507000() -> None:
    x = torch.ones(4, device="npu")

    def two_tasks() -> Any:
        stream = torch.npu.current_stream()
        torch.npu.graph_task_group_begin(stream)
        x.add(1), x.add(2)
        return torch.npu.graph_task_group_end(stream)

    _, group = captured(two_tasks)
    stream = torch.npu.Stream()

    def update() -> None:
        with torch.npu.stream(stream):
            torch.npu.graph_task_update_begin(stream, group)
            x.add(1)
            torch.npu.graph_task_update_end(stream)

    assert "507000" in first_line(update)


def test_two_threads_updating_on_the_same_stream_get_107033() -> None:
    first, second = Attention(), Attention()
    stream, errors = first.updates, list[str]()
    torch.npu.graph_task_update_begin(stream, first.sites[0][4])

    def begin() -> None:
        torch.npu.set_device(0)
        try:
            torch.npu.graph_task_update_begin(stream, second.sites[0][4])
        except RuntimeError as error:
            errors.append(str(error))

    thread = threading.Thread(target=begin)
    thread.start()
    thread.join()
    assert len(errors) == 1 and "107033" in errors[0]
    with pytest.raises(RuntimeError, match="507000"):
        torch.npu.graph_task_update_end(stream)


def test_an_operator_the_simulator_lacks_is_named_by_the_error() -> None:
    x = torch.ones(2, 4, device="npu")
    assert "the simulator lacks the operator aclnnCdist" in first_line(lambda: torch.cdist(x, x))


def test_tnd_lengths_that_end_elsewhere_than_the_token_count_are_refused() -> None:
    query = torch.ones(4, 2, 128, dtype=torch.bfloat16, device="npu")

    def call() -> None:
        torch_npu.npu_fused_infer_attention_score(
            query, query, query, num_heads=2, input_layout="TND",
            actual_seq_lengths=[1, 3], actual_seq_lengths_kv=[1, 3],
        )  # fmt: skip

    assert "561002" in first_line(call)


# Limits and figures -------------------------------------------------------------------------------


def streams_of(kernels: int, sides: int = 0) -> int:
    x = torch.ones(4, device="npu")
    streams = [side_stream() for _ in range(sides)]
    torch.npu.synchronize()
    gc.collect()
    before = simulator.available_streams()

    def body() -> None:
        current = torch.npu.current_stream()
        for stream in streams:
            stream.wait_stream(current)
        for _ in range(kernels):
            x.add_(1)
        for stream in streams:
            with torch.npu.stream(stream):
                x.add(1)
            current.wait_stream(stream)

    graph, _ = captured(body)
    held = before - simulator.available_streams()
    graph.reset()
    assert simulator.available_streams() == before
    return held


@pytest.mark.parametrize(
    ("kernels", "sides", "streams"),
    [(1, 0, 1), (2016, 0, 1), (2017, 0, 2), (4032, 0, 2), (4033, 0, 3), (3, 1, 2), (3, 3, 4)],
)
def test_a_graph_holds_the_predicted_number_of_streams(
    kernels: int, sides: int, streams: int
) -> None:
    assert streams_of(kernels, sides) == streams


def test_captures_beyond_the_devices_streams_raise_207008() -> None:
    code = """
x = torch.ones(4, device='npu'); torch.npu.Stream(); graphs = []
try:
    while True:
        graph = torch.npu.NPUGraph()
        with torch.npu.graph(graph):
            x.add(1)
        graphs.append(graph)
except RuntimeError as error:
    print(len(graphs), 'error code is 207008' in str(error), 'EL0009' in str(error))
"""
    assert run(code, streams=40).split() == ["6", "True", "True"]


def test_a_full_task_queue_blocks_the_host_or_raises_207006() -> None:
    code = """
x = torch.zeros(4, device='npu')
for _ in range(200):
    x.add_(1)
print(x[0].item())
event = torch.npu.ExternalEvent()
event.wait(torch.npu.current_stream())
try:
    for _ in range(200):
        x.add_(1)
    torch.npu.synchronize()
except RuntimeError as error:
    print('full' if '207006' in str(error) else error)
"""
    assert run(code, queue_depth=64, schedule="lazy").split() == ["200.0", "full"]


def test_freed_device_memory_is_filled_with_nan() -> None:
    tensor = torch.zeros(64 << 20, dtype=torch.uint8, device="npu")
    address, before = tensor.data_ptr(), torch.npu.mem_get_info()[0]
    del tensor
    torch.npu.empty_cache()
    assert torch.npu.mem_get_info()[0] - before >= 64 << 20
    assert ctypes.string_at(address, 64) == b"\xff" * 64
    assert torch.empty(16 << 20, device="npu").isnan().all()


def test_allocating_beyond_device_memory_raises_out_of_memory() -> None:
    code = """
try:
    torch.empty(64 << 20, dtype=torch.uint8, device='npu')
except RuntimeError as error:
    print('out of memory' in str(error))
"""
    assert run(code, memory_mb=32).split() == ["True"]


def test_the_simulator_counts_host_synchronizations() -> None:
    event = torch.npu.Event()
    event.record()
    before = simulator.synchronizations()
    torch.ones(4, device="npu").add_(1)
    assert simulator.synchronizations() == before
    torch.npu.current_stream().synchronize()
    event.synchronize()
    torch.npu.synchronize()
    assert simulator.synchronizations() == before + 3


# The end ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("queue", ["0", "1", "2"])
def test_a_process_exits_cleanly_with_every_task_queue_setting(
    queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TASK_QUEUE_ENABLE", queue)
    code = "x = torch.ones(4, device='npu'); x.mul_(3).add_(x); print(x.sum().item())"
    assert run(code).split() == ["24.0"]


def test_a_process_exits_cleanly_with_work_in_flight() -> None:
    code = """
x = torch.ones(512, 512, device='npu')
for _ in range(50):
    x = x @ x * 1e-3
print('left')
"""
    assert run(code).split() == ["left"]


# Callbacks --------------------------------------------------------------------------


def test_stream_callbacks_run_in_the_subscribed_thread() -> None:
    library = ctypes.CDLL("libascendcl.so")
    stream = torch.npu.Stream()
    handle, seen = ctypes.c_void_p(stream.npu_stream), list[int]()
    callback = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(
        lambda data: seen.append(threading.get_ident())
    )
    ready, finish = threading.Event(), threading.Event()

    def process() -> None:
        library.aclrtSubscribeReport(ctypes.c_uint64(threading.get_ident()), handle)
        ready.set()
        while not finish.is_set():
            library.aclrtProcessReport(10)

    thread = threading.Thread(target=process)
    thread.start()
    ready.wait()
    assert library.aclrtLaunchCallback(callback, None, 1, handle) == 0
    stream.synchronize()
    assert seen == [thread.ident]
    finish.set()
    thread.join()
