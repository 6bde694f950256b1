"""The workspace of a task: asked for the worst case at capture, and never taken by an update."""

from __future__ import annotations

from collections import Counter
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from attention_models import MAX_KV, Decoder, differing, eager_outputs, replayed, runner, steps
from protocol import WAYS

from graphrt import UNCHANGED, Batch, BatchDescriptor, GraphOptions, forward_context
from graphrt.ascend import AscendOptions, AscendPlatform, attention
from graphrt.ascend.attention import operators, workspaces
from graphrt.core.base.errors import InvalidUpdateError, TaskContractError
from graphrt.core.replay.recording import active
from graphrt.core.replay.tasks import UpdatableTask


class Bare(Decoder):
    """Leaves the workspace to torch_npu."""

    def attention(self) -> Any:
        return lambda *args, **kwargs: self.task(*args, **kwargs, workspace=None)


OURS = ("out", "workspace")


def tasks_of(run: Any) -> list[Any]:
    (wrapper,) = run.graphs.owners()
    return [task for entry in wrapper.entries.values() for task in entry.tasks]


@pytest.mark.npu
@pytest.mark.parametrize("way", WAYS, ids=lambda way: "-".join(way.values()))
def test_every_task_keeps_a_workspace_in_the_pool(way):
    with runner(Decoder(3), platform=AscendPlatform(AscendOptions(**way))) as run:
        run.capture()
        tasks = tasks_of(run)
        assert len(tasks) == 6
        asked = torch.ops.npu._npu_fused_infer_attention_score_get_max_workspace
        for task in tasks:
            workspace = task.kwargs["workspace"]
            assert run.platform.owns(run.pool.memory, workspace)
            keywords = {key: value for key, value in task.kwargs.items() if key not in OURS}
            assert workspace.nbytes == asked(*task.args, **keywords, **task.values).nbytes


@pytest.mark.npu
@pytest.mark.parametrize("way", WAYS, ids=lambda way: "-".join(way.values()))
def test_updates_allocate_nothing_and_survive_empty_cache_between_steps(way):
    with runner(Decoder(3), platform=AscendPlatform(AscendOptions(**way))) as run:
        run.capture()
        before = memory_by_stream()
        todo = steps(12, most=8)
        expected = eager_outputs(run, todo)
        outputs = []
        for place, step in enumerate(todo):
            outputs.append(replayed(run, step))
            if place % 3 == 2:
                torch.npu.empty_cache()
        assert differing([out.cpu() for out in outputs], expected) == []
        updating = run.platform._tasks._streams[run.pool.memory].stream.npu_stream
        assert memory_by_stream()[updating] <= before[updating]


def memory_by_stream() -> Counter[int]:
    totals: Counter[int] = Counter()
    for segment in torch.npu.memory_snapshot():
        totals[segment["stream"]] += segment["total_size"]
    return totals


@pytest.mark.npu
@pytest.mark.parametrize("way", WAYS, ids=lambda way: "-".join(way.values()))
def test_an_update_that_allocates_raises_and_names_its_task(way):
    run = runner(
        Bare(3),
        sizes=(8,),
        platform=AscendPlatform(AscendOptions(**way)),
        options=GraphOptions(check="off"),
    )
    run.capture()
    for step in steps(2, most=8):
        with pytest.raises(TaskContractError, match=r"(?s)layers\.0.*allocated"):
            replayed(run, step)
    torch.npu.synchronize()
    run.close()


@pytest.mark.npu
def test_checks_switched_off_never_inspect_update_allocations(monkeypatch):
    monkeypatch.setenv("GRAPHRT_CHECK", "off")
    with runner(Decoder(2), sizes=(8,), platform=AscendPlatform()) as run:
        run.capture()
        counts = count_looks(monkeypatch, run)
        for step in steps(2, most=8):
            replayed(run, step)
        assert counts == []


@pytest.mark.npu
@pytest.mark.parametrize(("level", "looks"), [("capture", 4), ("always", 12)])
def test_the_check_level_decides_how_many_updates_are_inspected(monkeypatch, level, looks):
    monkeypatch.setenv("GRAPHRT_CHECK", level)
    options = GraphOptions(check="off")
    with runner(Decoder(4), sizes=(8,), platform=AscendPlatform(), options=options) as run:
        run.capture()
        counts = count_looks(monkeypatch, run)
        monkeypatch.setattr(run.graphs.checks, "on", False)
        for step in steps(3, most=8):
            replayed(run, step)
        assert len(counts) == looks


def count_looks(monkeypatch: pytest.MonkeyPatch, run: Any) -> list[str]:
    watch, seen = run.platform._tasks._allocations, []
    check = watch.check

    def noted(task: str, *args: Any) -> bool:
        seen.append(task)
        return check(task, *args)

    monkeypatch.setattr(watch, "check", noted)
    return seen


class Asked:
    """Stands for torch_npu: needs the most in the middle, as one that splits keys among cores."""

    def __init__(self) -> None:
        self.issued: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        self.asked: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        self.atb = self

    def _ask(self, lengths: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        self.asked.append((args, kwargs))
        longest = max(map(int, lengths))
        return torch.empty(longest if longest <= 64 else 8, dtype=torch.uint8)

    def _npu_paged_attention_get_workspace(self, *args: Any) -> torch.Tensor:
        assert len(args) == 9
        return self._ask(args[7], *args)

    def _npu_multi_head_latent_attention_get_workspace(
        self, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        assert len(args) == 10
        return self._ask(args[5], *args, **kwargs)

    def _npu_paged_attention(self, *args: Any, **kwargs: Any) -> None:
        self.issued.append((args, kwargs))

    npu_multi_head_latent_attention = _npu_paged_attention


class Recording:
    """A capture that only notes."""

    segment_open = True

    def __init__(self) -> None:
        self.tasks: list[Any] = []

    def check_read(self, values: Any, what: str) -> None:
        pass

    def captured_ref(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def bracketed(self, issue: Any) -> None:
        issue()

    def add_task(self, task: Any) -> None:
        self.tasks.append(task)


@pytest.fixture
def npu(monkeypatch: pytest.MonkeyPatch) -> Asked:
    asked = Asked()
    monkeypatch.setattr(operators, "torch_npu", lambda: asked)
    monkeypatch.setattr(workspaces, "torch_npu", lambda: asked)
    return asked


def captured(task: UpdatableTask, updates: Any, *args: Any, **kwargs: Any) -> Any:
    """The task of one call under capture in a graph of four requests."""
    recording = Recording()
    token = active.set(recording)
    try:
        with forward_context("FULL", BatchDescriptor(4, 4, True, query_len=1), updates=updates):
            task(*args, **kwargs)
    finally:
        active.reset(token)
    (task_handle,) = recording.tasks
    return task_handle


def eagerly(task: UpdatableTask, updates: Any, *args: Any, **kwargs: Any) -> None:
    with forward_context("NONE", BatchDescriptor(4, 4), updates=updates):
        task(*args, **kwargs)


PAGED = {
    "query": torch.zeros(4, 2, 8),
    "key_cache": torch.zeros(2, 128, 2, 8),
    "value_cache": torch.zeros(2, 128, 2, 8),
    "num_kv_heads": 2,
    "num_heads": 2,
    "scale_value": 1.0,
    "block_table": torch.zeros(4, 4, dtype=torch.int32),
}


@pytest.mark.parametrize("by_name", [True, False])
def test_paged_attention_keeps_the_largest_workspace_of_all_lengths(npu, by_name):
    task = attention.paged_attention(max_kv_len=500)
    updates = {"attention": {"context_lens": [3, 4]}}
    keywords = PAGED if by_name else {}
    task_handle = captured(
        task, updates, *([] if by_name else PAGED.values()), **keywords, out=torch.zeros(4, 2, 8)
    )
    assert task_handle.kwargs["workspace"].numel() == 64
    assert npu.issued[0][1]["workspace"] is task_handle.kwargs["workspace"]
    # Asked for the worst case, not for what the first step happens to have.
    assert max(int(max(args[7])) for args, _ in npu.asked) == 500
    assert all(args[0] is PAGED["query"] for args, _ in npu.asked)
    asks = len(npu.asked)
    task_handle.issue()
    assert len(npu.asked) == asks


@pytest.mark.parametrize("lse", [None, torch.zeros(4, 2, 1)])
def test_mla_attention_uses_the_overload_with_a_workspace_argument(npu, lse):
    task = attention.mla_attention(max_kv_len=200, query_lens=lse is None)
    # ATB reads query lengths under one calc_type, and writes lse under another one.
    queries = {"qseqlen": [1, 1]} if lse is None else {}
    more = {} if lse is None else {"lse": lse, "calc_type": "calc_type_ring"}
    updates = {"attention": {"context_lens": [3, 4], **queries}}
    caches = torch.zeros(2, 128, 1, 8), torch.zeros(2, 128, 1, 4)
    ropes = torch.zeros(4, 2, 4, dtype=torch.float16)
    tensors = (torch.zeros(4, 2, 8), ropes, *caches, torch.zeros(4, 2))
    captured(task, updates, *tensors, 2, 1.0, 1, output=torch.zeros(4, 2, 8), mask=ropes, **more)
    ((args, kwargs),) = npu.issued
    assert args[5] == [3, 4, 0, 0]
    assert kwargs["workspace"].numel() == 64
    # Without it torch_npu 2.13 returns a reference to nothing, which ends the process.
    assert kwargs["return_lse"] is True
    assert kwargs["lse"] is lse if lse is not None else kwargs["lse"].numel() == 1
    assert kwargs["mask"] is ropes
    ask_args, ask_kwargs = npu.asked[0]
    assert ask_args[9] is (lse is not None)
    assert ask_kwargs.pop("mask") is ropes
    if lse is None:
        assert kwargs["qseqlen"] == [1, 1, 1, 1]
        assert ask_kwargs == {"calc_type": "calc_type_spec", "qseqlen": [1, 1, 1, 1]}
    else:
        assert ask_kwargs == {"calc_type": "calc_type_ring"}
    assert kwargs["calc_type"] == ask_kwargs["calc_type"]


def test_a_workspace_passed_by_the_caller_is_used_as_given(npu):
    task = attention.paged_attention(max_kv_len=500)
    updates = {"attention": {"context_lens": [3, 4]}}
    for own in (None, torch.zeros(1)):
        task_handle = captured(task, updates, **PAGED, out=torch.zeros(1), workspace=own)
        assert task_handle.kwargs["workspace"] is own
    assert npu.asked == []


def test_an_eager_paged_attention_call_asks_for_no_workspace(npu):
    task = attention.paged_attention(max_kv_len=500)
    updates = {"attention": {"context_lens": [3, 4]}}
    eagerly(task, updates, **PAGED, out=torch.zeros(1))
    assert npu.asked == [] and npu.issued[0][1] == {}


@pytest.mark.parametrize("name", ["fused_infer_attention", "fused_infer_attention_v2"])
@pytest.mark.parametrize("under_capture", [True, False])
def test_lengths_beyond_the_block_table_are_refused_before_anything_is_issued(
    monkeypatch, name, under_capture
):
    monkeypatch.setattr(operators, "torch_npu", lambda: pytest.fail("issued"))
    monkeypatch.setattr(workspaces, "torch_npu", lambda: pytest.fail("asked"))
    task = getattr(attention, name)(max_kv_len=100)
    table = torch.zeros(4, 4, dtype=torch.int32)
    # A capture is refused for what a later step may have, an eager step for what it has.
    updates = {"attention": task.lengths([3 if under_capture else 17], [1])}
    call = {"block_table": table, "block_size": 4, "out": []}
    run = partial(captured, task) if under_capture else partial(eagerly, task)
    with pytest.raises(InvalidUpdateError, match="beyond its block table"):
        run(updates, **call)


@pytest.mark.parametrize("name", ["fused_infer_attention", "fused_infer_attention_v2"])
@pytest.mark.parametrize("by_name", [True, False])
@pytest.mark.parametrize("shape", [(8, 128, 256), (8, 2, 128, 128), (8, 2, 8, 128, 16)])
def test_a_block_size_that_is_not_the_caches_is_refused_with_both(
    monkeypatch, name, by_name, shape
):
    issued = []
    fused = SimpleNamespace(out=lambda *args, **kwargs: issued.append(kwargs["block_size"]))
    monkeypatch.setattr(
        operators,
        "torch_npu",
        lambda: SimpleNamespace(
            npu_fused_infer_attention_score=fused, npu_fused_infer_attention_score_v2=fused
        ),
    )
    task = getattr(attention, name)(max_kv_len=512)
    query, cache = torch.zeros(1, 2, 128), torch.zeros(shape)
    args = () if by_name else (query, cache, cache)
    named = {"query": query, "key": cache, "value": cache} if by_name else {}
    call = partial(
        eagerly,
        task,
        {"attention": task.lengths([3], [1])},
        *args,
        **named,
        out=[],
        block_table=torch.zeros(1, 4, dtype=torch.int32),
    )
    for wrong in (64, 256):
        with pytest.raises(InvalidUpdateError, match=rf"block_size={wrong}[\s\S]*block_size=128"):
            call(block_size=wrong)
    call(block_size=128)
    assert issued == [128]


@pytest.mark.parametrize(
    ("shape", "width", "room"),
    [
        ((2, 128, 2, 8), 8, 512),
        ((2, 2, 64, 16), 8, 256),
        # Heads of 16: [blocks, block size, heads, 16], and format NZ.
        ((2, 128, 2, 16), 16, 512),
        ((2, 2, 128, 16), 16, 512),
        ((9,), 8, None),
    ],
)
def test_the_capacity_of_a_block_table_follows_the_cache_format(shape, width, room):
    task = attention.paged_attention(max_kv_len=9)
    query = torch.zeros(4, 2, width)
    arguments = {**PAGED, "query": query, "key_cache": torch.zeros(shape)}
    assert task.room is not None
    assert task.room((), arguments) == room
    assert task.room(tuple(arguments.values()), {}) == room
    assert task.room((), {**arguments, "block_table": None}) is None


@pytest.mark.npu
def test_lengths_that_do_not_fit_the_graph_are_refused_before_launch():
    with runner(Decoder(2)) as run:
        run.capture()
        todo = [step for step in steps(8, most=8) if 2 <= (step.batch.num_reqs or 0) <= 7][:3]
        expected = eager_outputs(run, todo)
        for step, right in zip(todo, expected, strict=True):
            good = step.updates["attention"]
            reqs = step.batch.num_reqs
            for key, wrong in (
                ("actual_seq_lengths_kv", [MAX_KV + 1] * reqs),
                ("actual_seq_lengths_kv", [-1] * reqs),
                ("actual_seq_lengths_kv", good["actual_seq_lengths_kv"][:-1]),
                ("actual_seq_lengths_kv", [1.5] * reqs),
                ("actual_seq_lengths_kv", None),
                ("actual_seq_lengths_kv", torch.ones(reqs, dtype=torch.int32, device="npu")),
                ("actual_seq_lengths", good["actual_seq_lengths"][:-1]),
                ("actual_seq_lengths", [2 * end for end in good["actual_seq_lengths"]]),
            ):
                with pytest.raises(InvalidUpdateError, match=key):
                    replayed(run, step, {"attention": {**good, key: wrong}})
            assert torch.equal(replayed(run, step).cpu(), right)


@pytest.mark.npu
def test_unchanged_lengths_of_fewer_requests_are_refused():
    with runner(Decoder(2), sizes=(8,)) as run:
        run.capture()
        few = next(step for step in steps(20, most=8) if step.batch.num_reqs == 3)
        many = next(step for step in steps(40, most=8) if step.batch.num_reqs == 6)
        for step in (few, many):
            replayed(run, step)
        replayed(run, few)
        with pytest.raises(InvalidUpdateError, match="leaves out live reqs"):
            run(Batch(6, 6, 1), updates=UNCHANGED, **many.values)
        assert differing([replayed(run, many).cpu()], eager_outputs(run, [many])) == []
