"""What the device forbids and the simulator must see: workspaces, lengths, captures, failures."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable, Iterator
from functools import partial
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
from graphrt_ascend_sim import building  # noqa: E402
from test_simulator import captured, run  # noqa: E402
from update_orders import OPTIONS, Attention, close, graph_wait_then_update  # noqa: E402


@pytest.fixture(autouse=True)
def nothing_fails_later() -> Iterator[None]:
    yield
    simulator.fail_nothing()
    torch.npu.synchronize()


def message(action: Callable[[], object]) -> str:
    with pytest.raises(RuntimeError) as caught:
        action()
    return str(caught.value)


# Workspaces ---------------------------------------------------------------------------------------


def attend(length: int, keys: int = 64, **options: Any) -> torch.Tensor:
    query = torch.ones(1, 2, 1, 16, device="npu").half()
    cache = torch.ones(1, 2, keys, 16, device="npu").half()
    out = [torch.empty_like(query), torch.empty(1, device="npu")]
    torch_npu.npu_fused_infer_attention_score.out(
        query, cache, cache, actual_seq_lengths_kv=[length], out=out, **OPTIONS, **options
    )
    return out[0]


def test_the_required_workspace_size_grows_with_the_lengths() -> None:
    small = torch.empty(1060, dtype=torch.uint8, device="npu")
    attend(16, workspace=small)
    torch.npu.synchronize()
    attend(64, workspace=small)
    assert "1060 bytes is too small" in message(torch.npu.synchronize)


def test_attention_writes_into_its_workspace() -> None:
    workspace = torch.zeros(4096, dtype=torch.uint8, device="npu")
    attend(64, workspace=workspace)
    assert 1024 < workspace.cpu().count_nonzero() < 4096


def test_replaying_with_a_freed_workspace_raises() -> None:
    workspace = torch.zeros(64 << 20, dtype=torch.uint8, device="npu")
    graph, _ = captured(partial(attend, 64, workspace=workspace))
    del workspace
    torch.npu.empty_cache()
    graph.replay()
    assert "was given back" in message(torch.npu.synchronize)


def test_a_simulated_update_that_allocates_its_workspace_raises() -> None:
    model = Attention()
    kept, model.workspace = model.workspace, None
    assert "which the graph does not keep" in message(lambda: model.update(2))
    model.workspace = kept
    for site in model.sites[:1]:
        site[3].record(model.updates)
        site[3].wait(model.updates)
    graph_wait_then_update(model, 5)
    assert close(model.out, model.expected(5))


# Lengths and arguments ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lengths", "wrong"), [([33, 8], "33, which"), ([-1, 2], "-1, which"), ([], "missing")]
)
def test_lengths_beyond_the_block_table_are_refused_with_561002(
    lengths: list[int], wrong: str
) -> None:
    query = torch.ones(2, 2, 128, device="npu").bfloat16()
    cache = torch.ones(8, 16, 256, device="npu").bfloat16()
    table = torch.zeros(2, 2, dtype=torch.int32, device="npu")

    def call() -> None:
        torch_npu.npu_fused_infer_attention_score(
            query, cache, cache, num_heads=2, input_layout="TND", block_table=table, block_size=16,
            actual_seq_lengths=[1, 2], actual_seq_lengths_kv=lengths or None,
        )  # fmt: skip

    found = message(call)
    assert "561002" in found and wrong in found


def test_too_few_lengths_or_block_table_rows_are_refused() -> None:
    query = torch.ones(3, 2, 128, device="npu").bfloat16()
    cache = torch.ones(8, 16, 256, device="npu").bfloat16()

    def call(rows: int, lengths: list[int]) -> None:
        torch_npu.npu_fused_infer_attention_score(
            query, cache, cache, num_heads=2, input_layout="TND", block_size=16,
            block_table=torch.zeros(rows, 2, dtype=torch.int32, device="npu"),
            actual_seq_lengths=[1, 2, 3], actual_seq_lengths_kv=lengths,
        )  # fmt: skip

    assert "2 entries for 3 requests" in message(lambda: call(3, [1, 2]))
    assert "2 rows for 3 requests" in message(lambda: call(2, [1, 2, 3]))


def test_attention_computes_bias_and_sink_and_refuses_quantized_keys() -> None:
    draw = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(1, 2, count, 16, generator=draw).half().float() for count in (3, 5, 5)
    )
    bias = torch.randn(1, 2, 3, 5, generator=draw).half().float()
    sink = torch.randn(2, generator=draw).bfloat16().float()
    on_device = [each.half().npu() for each in (query, key, value)]
    near = partial(torch.testing.assert_close, rtol=2e-3, atol=2e-3)
    scores = query @ key.transpose(-1, -2) * 0.5
    out, _ = torch_npu.npu_fused_infer_attention_score(
        *on_device, pse_shift=bias.half().npu(), **OPTIONS
    )
    near(out.cpu().float(), (scores + bias).softmax(-1) @ value)
    out, _ = torch_npu.npu_fused_infer_attention_score_v2(
        *on_device, learnable_sink=sink.bfloat16().npu(),
        num_query_heads=2, softmax_scale=0.5, input_layout="BNSD",
    )  # fmt: skip
    with_sink = torch.cat([scores, sink.view(1, 2, 1, 1).expand(1, 2, 3, 1)], -1).softmax(-1)
    near(out.cpu().float(), with_sink[..., :-1] @ value)
    scale = torch.ones(2, 16, dtype=torch.float16, device="npu")
    refused = message(
        lambda: torch_npu.npu_fused_infer_attention_score(
            *on_device, antiquant_scale=scale, **OPTIONS
        )
    )
    assert "lacks antiquant_scale" in refused


def attend_with(
    layout: str = "TND", dtype: torch.dtype = torch.bfloat16, dim: int = 128, block: int = 128,
    heads: tuple[int, int] = (4, 2), table: torch.dtype = torch.int32,
    keys: torch.dtype | None = None, rope: int = 0, queries: int = 1, mask: Any = None,
    mode: int = 0, values: int | None = None, version: str = "", requests: int = 2,
    transposed: bool = False, told: int | None = None,
) -> None:  # fmt: skip
    shape = (requests, heads[0]) if layout == "TND" else (requests, queries, heads[0])
    if layout == "BNSD":
        shape = (requests, heads[0], queries)
    names = ("num_heads", "actual_seq_lengths", "actual_seq_lengths_kv")
    if version:
        names = ("num_query_heads", "actual_seq_qlen", "actual_seq_kvlen")
    ends = [*range(1, requests + 1)] if layout == "TND" else None
    options: dict[str, Any] = dict(
        zip(names, (told or heads[0], ends, [5] * requests), strict=True)
    )
    if rope:
        options["query_rope"] = torch.ones(*shape, rope, dtype=dtype, device="npu")
        options["key_rope"] = torch.ones(8, block, heads[1] * rope, dtype=dtype, device="npu")
    if isinstance(mask, tuple):
        mask = torch.ones(mask, dtype=torch.int8, device="npu").triu(1)
    query = torch.ones(*shape, dim, dtype=dtype, device="npu")
    if transposed:
        query = query.transpose(0, 1).contiguous().transpose(0, 1)
    cache = torch.ones(8, block, heads[1] * dim, dtype=keys or dtype, device="npu")
    other = torch.ones(8, block, heads[1] * (values or dim), dtype=keys or dtype, device="npu")
    getattr(torch_npu, f"npu_fused_infer_attention_score{version}")(
        query, cache, other, atten_mask=mask, sparse_mode=mode,
        block_table=torch.zeros(requests, 2, dtype=table, device="npu"), block_size=block,
        num_key_value_heads=heads[1], input_layout=layout, **options,
    )  # fmt: skip


@pytest.mark.parametrize(
    "taken",
    [
        {}, {"dtype": torch.float16}, {"block": 1024}, {"dim": 192}, {"dim": 64, "heads": (2, 2)},
        {"dim": 512, "rope": 64, "heads": (8, 1)}, {"rope": 64}, {"layout": "BSND", "dim": 96},
        {"layout": "BSND", "block": 16}, {"layout": "BSND", "queries": 3, "block": 256},
        {"mode": 3, "mask": (2048, 2048)}, {"mode": 2, "mask": (1, 2048, 2048)},
        {"mode": 4, "mask": (1, 1, 2048, 2048)}, {"layout": "BSND", "mode": 3},
        {"dim": 512, "rope": 64, "heads": (8, 1), "mode": 3, "mask": (2048, 2048)},
        {"dim": 192, "values": 128, "version": "_v2"}, {"heads": (256, 4)}, {"requests": 4096},
        {"layout": "BNSD"},
    ],
    ids=str,
)  # fmt: skip
def test_attention_takes_what_its_documents_allow(taken: dict[str, Any]) -> None:
    attend_with(**taken)
    torch.npu.synchronize()


@pytest.mark.parametrize(
    ("refused", "wrong"),
    [
        ({"dtype": torch.float32}, "query is not float16"),
        ({"keys": torch.float16}, "another data type"),
        ({"heads": (4, 3)}, "not a multiple of num_key_value_heads"),
        ({"heads": (130, 2)}, "more than 64 times"),
        ({"table": torch.int64}, "block_table is not int32"),
        ({"dim": 8}, "head sizes of layout TND"),
        ({"dim": 64}, "head sizes of layout TND"),
        ({"dim": 512}, "head sizes of layout TND"),
        ({"dim": 256, "rope": 64}, "beside a query_rope"),
        ({"dim": 512, "rope": 64}, "one key head"),
        ({"rope": 32}, "is not 64"),
        ({"block": 4}, "block_size"),
        ({"block": 2048}, "block_size"),
        ({"layout": "BSND", "dim": 100}, "multiples of 16 bytes"),
        ({"layout": "BSND", "dim": 640}, "up to 512"),
        ({"layout": "BSND", "queries": 3, "block": 16}, "block_size"),
        ({"layout": "BSND", "block": 1024}, "block_size"),
        ({"mask": torch.float32}, "atten_mask"),
        ({"mode": 3}, "atten_mask is missing"),
        ({"mode": 3, "version": "_v2"}, "atten_mask is missing"),
        ({"mode": 2}, "atten_mask is missing"),
        ({"mode": 4}, "atten_mask is missing"),
        ({"layout": "BSND", "queries": 3, "mode": 3}, "atten_mask is missing"),
        ({"dim": 512, "rope": 64, "heads": (8, 1), "mode": 3}, "atten_mask is missing"),
        ({"mode": 3, "mask": (512, 512)}, "atten_mask is (512, 512)"),
        ({"mode": 3, "mask": (2, 2048, 2048)}, "atten_mask is (2, 2048, 2048)"),
        (
            {"dim": 512, "rope": 64, "heads": (8, 1), "mode": 2, "mask": (2048, 2048)},
            "sparse_mode 0, 3 and 4",
        ),
        ({"dim": 192, "version": "_v2"}, "v2 takes no values of head size 192"),
        ({"dim": 128, "heads": (512, 512), "block": 16}, "more than 256"),
        ({"dim": 512, "layout": "BNSD", "heads": (128, 128), "block": 16}, "H above 65535: 65536"),
        ({"requests": 4097}, "at most 4096 requests"),
        ({"transposed": True}, "query is not contiguous"),
        ({"layout": "BNSD", "told": 8}, "num_heads is 8, and query has 4"),
    ],
    ids=str,
)
def test_attention_refuses_what_its_documents_do_not_allow(
    refused: dict[str, Any], wrong: str
) -> None:
    if isinstance(refused.get("mask"), torch.dtype):
        refused = {"mask": torch.zeros(1, 1, 256, dtype=refused["mask"], device="npu")}
    found = message(lambda: attend_with(**refused))
    assert "561002" in found and wrong in found


# Captures -----------------------------------------------------------------------------------------


def test_a_refused_call_in_a_capture_does_not_invalidate_the_capture() -> None:
    x, event = torch.ones(4, device="npu"), torch.npu.Event()
    found = list[str]()

    def body() -> torch.Tensor:
        stream = torch.npu.current_stream()
        event.record(stream)
        found.append(message(lambda: x[0].item()))
        found.append(message(stream.synchronize))
        found.append(message(torch.npu.synchronize))
        found.append(message(event.synchronize))
        return x + 1

    graph, out = captured(body)
    graph.replay()
    assert out.tolist() == [2.0] * 4
    codes = ("107027", "107027", "107027", "107028")
    assert all(code in text for code, text in zip(codes, found, strict=True))


@pytest.mark.parametrize("mode", ["global", "thread_local", "relaxed"])
def test_device_synchronization_by_any_thread_during_a_capture_is_refused(mode: str) -> None:
    x, found = torch.ones(4, device="npu"), list[str]()

    def wait() -> None:
        torch.npu.set_device(0)
        found.append(message(torch.npu.synchronize))

    def body() -> torch.Tensor:
        thread = threading.Thread(target=wait)
        thread.start()
        thread.join()
        return x + 1

    graph, out = captured(body, capture_error_mode=mode)
    graph.replay()
    assert out.tolist() == [2.0] * 4 and "107027" in found[0]


def test_updating_a_task_group_during_its_capture_is_refused() -> None:
    x, found = torch.ones(4, device="npu"), list[str]()

    def body() -> torch.Tensor:
        stream = torch.npu.current_stream()
        # torch has 32, which it gives out in turn.
        updates = next(each for each in iter(torch.npu.Stream, None) if each != stream)
        torch.npu.graph_task_group_begin(stream)
        out = x + 1
        group = torch.npu.graph_task_group_end(stream)
        found.append(message(lambda: torch.npu.graph_task_update_begin(updates, group)))
        return out

    graph, out = captured(body)
    graph.replay()
    assert out.tolist() == [2.0] * 4 and "107026" in found[0]


CONFLICT = """
first, second = torch.npu.Stream(), torch.npu.Stream()
graphs = [torch.npu.NPUGraph(), torch.npu.NPUGraph()]
event, elsewhere = torch.npu.Event(), torch.npu.Event()
elsewhere.record()
torch.npu.synchronize()

def code(action):
    try:
        action()
    except RuntimeError as error:
        return str(error).split("error code is ")[1][:6]

with torch.npu.stream(first):
    graphs[0].capture_begin(capture_error_mode="relaxed")
    print(code(lambda: first.wait_event(elsewhere)))
    event.record(first)
with torch.npu.stream(second):
    graphs[1].capture_begin(capture_error_mode="relaxed")
    print(code(lambda: second.wait_event(event)))
    print(code(graphs[1].capture_end))
with torch.npu.stream(first):
    print(code(graphs[0].capture_end))
"""


def test_waiting_on_an_event_of_another_capture_invalidates_both_captures(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # With a queue of launches their waits would fail in it, which ends it for the process.
    monkeypatch.setenv("TASK_QUEUE_ENABLE", "0")
    assert run(CONFLICT).split() == ["107024", "107032", "507903", "507903"]


# Failures that are asked for ----------------------------------------------------------------------


def test_only_the_chosen_runtime_call_is_made_to_fail() -> None:
    x = torch.ones(4, device="npu")
    graph, out = captured(lambda: x + 1)
    before = simulator.calls("aclmdlRIExecuteAsync")
    simulator.fail_call("aclmdlRIExecuteAsync", 2, code=207005)
    graph.replay()
    found = message(graph.replay)
    assert "error code is 207005" in found and "made to fail at call" in found
    graph.replay()
    assert out.tolist() == [2.0] * 4
    assert simulator.calls("aclmdlRIExecuteAsync") == before + 3


def test_a_chosen_operator_call_can_be_made_to_fail() -> None:
    x = torch.ones(4, device="npu")
    simulator.fail_call("aclnnMulGetWorkspaceSize", code=561002)
    assert "561002" in message(lambda: x * x)
    assert (x * x).tolist() == [1.0] * 4


def test_failures_of_unknown_functions_or_invalid_counts_are_refused() -> None:
    for function, nth, code in (("aclrtNothing", 1, 1), ("malloc", 1, 1), ("aclrtMalloc", 0, 1)):
        with pytest.raises(ValueError, match=r"nothing|malloc|nth"):
            simulator.fail_call(function.replace("Nothing", "nothing"), nth, code=code)


# Other devices ------------------------------------------------------------------------------------

ORDERS = """
import update_orders
for order in ORDERS:
    update_orders.main(order)
"""


def test_an_update_first_device_hangs_if_the_replay_comes_first() -> None:
    right = """
import update_orders
def ordered(model, length):
    model.updates.wait_stream(torch.npu.current_stream())
    model.update(length)
    torch.npu.current_stream().wait_stream(model.updates)
    model.replay()
print("wrong steps:", update_orders.wrong_steps(ordered))
"""
    assert run(right, schedule="random:1", update_first=1) == "wrong steps: []\n"
    found = run(f"ORDERS = ['graph_wait_then_replay']{ORDERS}", schedule="lazy", update_first=1)
    assert "507046" in found


def test_a_single_queue_device_hangs_if_the_replay_comes_first() -> None:
    assert "507046" in run(f"ORDERS = ['graph_wait_then_replay']{ORDERS}", schedule="single")
    found = run(f"ORDERS = ['graph_wait_then_update']{ORDERS}", schedule="single")
    assert found == "wrong steps: []\n"


SIGNALS = """
import graphrt_ascend_sim as simulator, update_orders
side, real = torch.npu.Stream(), torch.npu.ExternalEvent

def made():
    # There torch_npu makes the event when it is first recorded, and waits for none before that.
    event = real()
    event.record(side)
    event.reset(side)
    return event

torch.npu.ExternalEvent = made
model = update_orders.Attention()
torch.npu.synchronize()
update_orders.graph_wait_then_replay(model, 1)
torch.npu.synchronize()
simulator.set_schedule(f"slow:{simulator.stream_id(model.updates)}")
right = []
for length in (5, 8):
    update_orders.graph_wait_then_replay(model, length)
    torch.npu.synchronize()
    right.append(update_orders.close(model.out, model.expected(length)))
print(right)
"""


def test_on_an_older_cann_a_signal_lasts_until_its_reset(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # A process that is started from this one would run on the library of this one.
    older = building.build() / building.OLD_CANN
    monkeypatch.setenv("LD_LIBRARY_PATH", f"{older}:{os.environ['LD_LIBRARY_PATH']}")
    assert run(SIGNALS).split() == ["[True,", "True]"]
    forgotten = SIGNALS.replace("model = ", "real.reset = lambda *_: None\nmodel = ")
    assert run(forgotten).split() == ["[False,", "False]"]


def test_only_events_of_the_limited_kind_run_out_with_207007_and_only_they_are_reset() -> None:
    code = """
import ctypes
library = ctypes.CDLL("libascendcl.so")
events = [torch.npu.Event() for _ in range(200)]
for event in events:
    event.record()
made = [ctypes.c_void_p() for _ in range(102)]
found = [library.aclrtCreateEventWithFlag(ctypes.byref(event), 0x20) for event in made[:101]]
print(set(found[:100]), found[100])
print(library.aclrtCreateEventExWithFlag(ctypes.byref(made[101]), 1))
print([library.aclrtResetEvent(event, None) for event in (made[0], made[101])])
"""
    # torch_npu's own events are of the other kind.
    assert run(code, events=100).splitlines() == ["{0} 207007", "0", "[0, 207000]"]


def test_a_captured_graph_holds_no_stream_with_software_queues() -> None:
    code = """
import graphrt_ascend_sim as simulator
x = torch.ones(4, device='npu'); torch.npu.Stream(); graphs = []
torch.npu.synchronize()
before = simulator.available_streams()
for _ in range(8):
    graphs.append(torch.npu.NPUGraph())
    with torch.npu.graph(graphs[-1]):
        out = x + 1
    graphs[-1].replay()
print(before - simulator.available_streams(), out.tolist()[0])
"""
    assert run(code, software_queues=1).split() == ["0", "2.0"]


def test_wrong_time_outs_and_modes_and_destroyed_or_captured_streams_are_refused() -> None:
    library = ctypes.CDLL("libascendcl.so")
    pointer, made = ctypes.c_void_p(), ctypes.c_void_p()
    for time_out in (0, -2):
        assert library.aclrtSynchronizeStreamWithTimeout(None, time_out) == 107000
        assert library.aclrtSynchronizeDeviceWithTimeout(time_out) == 107000
    assert library.aclrtCreateStream(ctypes.byref(made)) == 0
    assert library.aclmdlRICaptureBegin(made, 7) == 107000
    assert library.aclmdlRICaptureThreadExchangeMode(ctypes.byref(ctypes.c_int(7))) == 107000
    assert library.aclmdlRICaptureBegin(made, 2) == 0
    assert library.aclrtDestroyStream(made) == 107027
    assert library.aclmdlRICaptureEnd(made, ctypes.byref(pointer)) == 0
    assert library.aclmdlRIDestroy(pointer) == 0
    assert library.aclrtDestroyStream(made) == 0
    assert library.aclrtDestroyStream(made) == 107000
    assert library.aclmdlRICaptureBegin(made, 2) == 107000
    assert library.aclrtSynchronizeStreamWithTimeout(made, -1) == 107000
    assert library.aclrtValueWrite(ctypes.byref(pointer), 1, 0, made) == 107000


def test_an_update_with_a_kernel_of_another_type_is_refused() -> None:
    # In a process of its own: torch_npu's launch queue ends with the error.
    code = """
import update_orders
model = update_orders.Attention()
x, stream = torch.ones(4, device="npu"), model.updates
torch.npu.synchronize()
try:
    with torch.npu.stream(stream):
        torch.npu.graph_task_update_begin(stream, model.sites[0][4])
        x.add_(1)
        torch.npu.graph_task_update_end(stream)
except RuntimeError as error:
    print("507000" in str(error), "kernel of another type" in str(error))
"""
    assert run(code).split() == ["True", "True"]
