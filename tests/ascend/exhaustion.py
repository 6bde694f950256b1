"""Running out of streams at any count: what fits serves, the rest runs eagerly and says why.

Run in processes of their own, whose device has the streams and the queue depth that they are given:
see `test_exhaustion`.
"""

from __future__ import annotations

import os
import random
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
from attention_models import HEADS, MAX_KV, PAGES, WIDTH, Decoder, Step
from dropped import hold_all_but

from graphrt import Batch, GraphRunner, InputSpec, eager_break, get_platform
from graphrt.ascend import AscendOptions, AscendPlatform
from graphrt.ascend.attention import fused_infer_attention
from graphrt.ascend.driver.library import available_streams
from graphrt.core.base.errors import GraphsDroppedWarning
from graphrt.platforms import GraphWork

MODES = ("FULL", "PIECEWISE", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE")
LAYERS, MOST = 8, 20
SIZES = tuple(range(1, MOST + 1))


@dataclass
class BreakingDecoder(Decoder):
    """In pieces its attention runs eagerly, with the lengths of the step; in one graph as tasks."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.task = fused_infer_attention(max_kv_len=MAX_KV, spare_request=True)
        self.breaking = eager_break(self.task)

    def attention(self) -> Callable[..., Any]:
        return self.breaking


class Row(NamedTuple):
    """What came of one count of free streams: graphs captured by mode and dropped, streams left,
    and how many of the batches graphs served."""

    mode: str
    free: int
    full: int
    piecewise: int
    dropped: int
    left: int
    served: int
    batches: int

    def __str__(self) -> str:
        return " | ".join(map(str, self))


def steps() -> list[Step]:
    """A decode step of every size, and a mixed one of every other."""
    rng, generator = random.Random(0), torch.Generator().manual_seed(0)
    drawn = []
    for tokens in (*SIZES, *SIZES[1::2]):
        decode = len(drawn) < MOST
        reqs = tokens if decode else rng.randint(1, tokens - 1)
        ends = [*sorted(rng.sample(range(1, tokens), reqs - 1)), tokens]
        table = torch.randint(0, PAGES * 8, (reqs + 1, PAGES), generator=generator)
        drawn.append(
            Step(
                Batch(tokens, reqs, 1 if decode else None),
                {
                    "x": torch.randn((tokens, HEADS, WIDTH), generator=generator).bfloat16(),
                    "block_table": table.to(torch.int32),
                },
                {
                    "attention": {
                        "actual_seq_lengths": ends,
                        "actual_seq_lengths_kv": [rng.randint(1, MAX_KV) for _ in range(reqs)],
                    }
                },
            )
        )
    return drawn


def runner(mode: str) -> GraphRunner:
    return GraphRunner(
        BreakingDecoder(LAYERS),
        mode=mode,
        sizes=SIZES,
        inputs={
            "x": InputSpec(torch.bfloat16, ("tokens", HEADS, WIDTH)),
            "block_table": InputSpec(torch.int32, ("reqs+1", PAGES), pad=0, index=True),
        },
        outputs=("tokens", HEADS, WIDTH),
        max_num_tokens=MOST,
        max_num_reqs=MOST,
        platform=os.environ.get("GRAPHRT_PLATFORM", "ascend"),
    )


@cache
def eager() -> list[torch.Tensor]:
    """What every step gives without any graph: no row of this model depends on its padding."""
    with runner("NONE") as run:
        return [run(step.batch, updates=step.updates, **step.values).cpu() for step in steps()]


def row(run: GraphRunner, mode: str, free: int) -> Row:
    """Capture with so many free streams, serve, and look that nothing is lost or left behind."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        run.capture()
    report = run.report()
    kinds = Counter(record.mode.name for record in report.graphs)
    assert len(report.graphs) + len(report.dropped) == len(run.plan.keys)
    assert any(each.category is GraphsDroppedWarning for each in told) is bool(report.dropped)
    for dropped in report.dropped:
        assert "free streams" in dropped.reason or "no stream left" in dropped.reason, dropped
    left = available_streams()
    assert left is not None
    held = sum(record.streams or 0 for record in report.graphs)
    assert held == free - left, f"{held} streams by the report, {free} - {left} by the device"
    assert torch.npu.current_stream() == torch.npu.default_stream()
    served, wrong = 0, []
    todo = steps()
    for step, expected in zip(todo, eager(), strict=True):
        out = run(step.batch, updates=step.updates, **step.values).cpu()
        served += run.last_dispatch is not None and run.last_dispatch.slot >= 0
        if not torch.equal(out, expected):
            wrong.append(step.batch)
    assert not wrong, f"{mode}, {free} free streams: {wrong} differ from eager"
    assert available_streams() == left, "steps hold streams"
    run.release()
    assert available_streams() == free, f"{available_streams()} of {free} streams came back"
    return Row(
        mode, free, kinds["FULL"], kinds["PIECEWISE"], len(report.dropped), left, served, len(todo)
    )


def rows(mode: str, counts: Iterable[int]) -> Iterator[Row]:
    """A row for each count of free streams, in one process and with one runner."""
    assert get_platform(os.environ.get("GRAPHRT_PLATFORM", "ascend")).availability().available
    torch.zeros(1, device="npu")
    with runner(mode) as run:
        eager()
        for free in counts:
            hold_all_but(free)
            yield row(run, mode, free)
        hold_all_but(None)


def cold(modes: Iterable[str] = MODES) -> Iterator[Row]:
    """A row for each mode on a device that has few streams from the start."""
    for mode in modes:
        with runner(mode) as run:
            free = available_streams()
            assert free is not None
            yield row(run, mode, free)


def modes(each: Iterable[str], counts: Sequence[int]) -> Iterator[Row]:
    """`rows` of one mode after the other."""
    for mode in each:
        yield from rows(mode, counts)


def overtaken(rounds: int) -> list[int]:
    """Rounds in which work on the stream that is captured on where streams are few did not come
    after what was issued before it, or before what was issued after it."""
    platform = AscendPlatform()
    torch.zeros(1, device="npu")
    stream = platform.new_stream()
    direct = platform.capture_stream(stream, GraphWork({0: 1}))
    assert direct != stream
    places = []
    x = torch.zeros(20_000, device="npu")
    for place in range(rounds):
        x.zero_()
        for _ in range(30):
            x.add_(1)
        with platform.on_stream(direct):
            y = x.clone().add_(1)
        if (y + 1)[0].item() != 32:
            places.append(place)
    return places


def chosen() -> None:
    """Who is captured on that stream: one-stream forwards, and only where streams are few."""
    platform = AscendPlatform()
    torch.zeros(1, device="npu")
    stream = platform.new_stream()
    one = GraphWork({0: 5})
    assert platform.capture_stream(stream, one) == stream, "streams are plenty"
    hold_all_but(100)
    assert platform.capture_stream(stream, one) != stream
    assert platform.capture_stream(stream, None) == stream, "nobody knows"
    assert platform.capture_stream(stream, GraphWork({0: 5, 7: 1})) == stream, "side streams"
    assert platform.capture_stream(stream, GraphWork({0: 5}, collectives=True)) == stream
    first = AscendPlatform(AscendOptions(update_order="update_first"))
    tasks = GraphWork({0: 5}, tasks=1)
    assert first.capture_stream(first.new_stream(), one) != stream
    assert first.capture_stream(stream, tasks) == stream, "waits for signals before it replays"
    assert platform.capture_stream(stream, tasks) != stream
