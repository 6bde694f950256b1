"""Every graph mode on an NPU, over decode steps and mixed ones; inputs staged in pinned memory."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from attention_models import (
    HEADS,
    MAX_KV,
    PAGES,
    WIDTH,
    Decoder,
    Step,
    differing,
    eager_outputs,
    replayed,
)

from graphrt import (
    Batch,
    GraphMode,
    GraphPool,
    GraphRunner,
    InputSpec,
    Reason,
    eager_break,
    get_platform,
)
from graphrt.ascend import ACLGraphWrapper
from graphrt.ascend.attention import fused_infer_attention

pytestmark = pytest.mark.npu

TOKENS, REQS = 8, 4


class BreakingDecoder(Decoder):
    """In pieces its attention runs eagerly, with the lengths of the step; in one graph as tasks."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.task = fused_infer_attention(max_kv_len=MAX_KV, spare_request=True)
        self.breaking = eager_break(self.task)

    def attention(self) -> Callable[..., Any]:
        return self.breaking


def runner(mode: str, forward: Any = None, pool: GraphPool | None = None) -> GraphRunner:
    return GraphRunner(
        forward or BreakingDecoder(3),
        mode=mode,
        sizes=[2, 4, TOKENS],
        inputs={
            "x": InputSpec(torch.bfloat16, ("tokens", HEADS, WIDTH)),
            "block_table": InputSpec(torch.int32, ("reqs+1", PAGES), pad=0, index=True),
        },
        outputs=("tokens", HEADS, WIDTH),
        platform=None if pool is not None else "ascend",
        pool=pool,
        max_num_tokens=TOKENS,
        max_num_reqs=REQS,
    )


def steps(count: int, *, decode: bool, seed: int) -> list[Step]:
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    drawn = []
    for _ in range(count):
        reqs = rng.randint(1, REQS)
        tokens = reqs if decode else rng.randint(reqs, TOKENS)
        ends = [*sorted(rng.sample(range(1, tokens), reqs - 1)), tokens]
        values = {
            "x": torch.randn((tokens, HEADS, WIDTH), generator=generator).bfloat16(),
            "block_table": torch.randint(
                0, PAGES * 8, (reqs + 1, PAGES), generator=generator, dtype=torch.int32
            ),
        }
        lengths = {
            "actual_seq_lengths": ends,
            "actual_seq_lengths_kv": [rng.randint(1, MAX_KV) for _ in range(reqs)],
        }
        batch = Batch(tokens, reqs, 1 if decode else None)
        drawn.append(Step(batch, values, {"attention": lengths}))
    return drawn


@pytest.mark.parametrize("decode", [True, False])
@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE"])
def test_every_graph_mode_on_an_npu_equals_eager(mode, decode):
    wanted = GraphMode[mode].decode_mode if decode else GraphMode[mode].mixed_mode
    with runner(mode) as run:
        run.capture()
        todo = steps(40, decode=decode, seed=len(mode))
        if wanted is GraphMode.NONE:
            run(todo[0].batch, updates=todo[0].updates, **todo[0].values)
            assert run.last_dispatch.reason is not Reason.HIT
            return
        outputs = []
        for step in todo:
            outputs.append(replayed(run, step).cpu())
            assert run.last_dispatch.mode is wanted
        assert differing(outputs, eager_outputs(run, todo)) == []


@pytest.mark.parametrize("query_len", [1, 2])
def test_a_padded_uniform_batch_keeps_the_query_length_of_its_graph(
    query_len,
):
    """Operators choose their kernels by the longest query, which is the graph's at capture."""
    decoder, longest = Decoder(2), []
    issue = decoder.task.issue

    def noted(*args: Any, actual_seq_lengths: list[int], **kwargs: Any) -> None:
        ends = [0, *actual_seq_lengths]
        longest.append(max(b - a for a, b in pairwise(ends)))
        issue(*args, actual_seq_lengths=actual_seq_lengths, **kwargs)

    decoder.task.issue = noted
    with GraphRunner(
        decoder,
        mode="FULL_DECODE_ONLY",
        sizes=[16],
        query_lens=[query_len],
        inputs={
            "x": InputSpec(torch.bfloat16, ("tokens", HEADS, WIDTH)),
            "block_table": InputSpec(torch.int32, ("reqs", PAGES), pad=0, index=True),
        },
        outputs=("tokens", HEADS, WIDTH),
        platform="ascend",
        max_num_tokens=16,
        max_num_reqs=16 // query_len,
    ) as run:
        run.capture()
        outputs, expected = [], []
        for reqs in (1, 3, 16 // query_len):
            ends = [query_len * (place + 1) for place in range(reqs)]
            lengths = {"actual_seq_lengths": ends, "actual_seq_lengths_kv": [MAX_KV] * reqs}
            tokens = query_len * reqs
            values = {
                "x": torch.randn((tokens, HEADS, WIDTH)).bfloat16(),
                "block_table": torch.arange(PAGES * reqs, dtype=torch.int32).view(reqs, -1) % 32,
            }
            step = Step(Batch(tokens, reqs, query_len), values, {"attention": lengths})
            outputs.append(replayed(run, step).cpu())
            assert run.last_dispatch.descriptor.num_tokens == 16
            expected += eager_outputs(run, [step])
        assert differing(outputs, expected) == []
    assert set(longest) == {query_len}


def test_steps_filled_while_the_last_step_is_copied_equal_eager():
    with runner("FULL") as run:
        run.capture()
        todo = steps(60, decode=False, seed=1)
        expected = eager_outputs(run, todo)
        outputs = [replayed(run, step) for step in todo]
        assert differing([out.cpu() for out in outputs], expected) == []


def test_the_ascend_platform_has_pinned_buffers_events_and_driver_memory():
    platform = get_platform("ascend")
    buffer = platform.host_buffer(64)
    assert buffer.is_pinned() and buffer.dtype == torch.uint8 and buffer.shape == (64,)
    event = platform.new_event()
    event.record(torch.npu.current_stream())
    event.synchronize()
    assert event.query()
    assert platform.driver_bytes() >= 0


def test_the_wrapper_of_the_platform_is_the_acl_graph_wrapper():
    with runner("FULL") as run:
        assert all(isinstance(each, ACLGraphWrapper) for each in run.graphs.owners())
