"""Paged caches and batches for the attention benchmarks, and the time of kernels in a graph."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

import torch

from graphrt.attention import (
    AttentionShape,
    AttentionStep,
    GroupedShape,
    LatentShape,
)
from graphrt.attention.triton.launch import Tiles, Workspace, decode, schedule
from graphrt.attention.triton.work import Room, Splits

SHAPES: dict[str, AttentionShape] = {
    "MLA (DeepSeek-V2-Lite)": LatentShape(16, 512, 64, 64, 192**-0.5),
    "GQA (Llama-8B)": GroupedShape(32, 8, 128, 64),
}
L2_BYTES = 60 << 20
MOST_BYTES = 40 << 30


class Paged:
    """A batch of random pages: each layer has a cache of its own while memory lasts, and its own
    part of one where the caches are small."""

    def __init__(
        self,
        shape: AttentionShape,
        lengths: Sequence[int],
        query_len: int = 1,
        *,
        layers: int = 1,
        dtype: torch.dtype = torch.bfloat16,
        max_context: int | None = None,
        seed: int = 0,
    ) -> None:
        generator = torch.Generator(device="cuda").manual_seed(seed)
        self.shape, self.lengths, self.query_len = shape, list(lengths), query_len
        reqs = len(lengths)
        longest = max(max_context or 0, *lengths)
        blocks = -(-longest // shape.page_size)
        used = [-(-length // shape.page_size) for length in lengths]
        page_bytes = sum(torch.Size(each).numel() * dtype.itemsize for each in shape.cache_shapes)
        pages = max(sum(used), 1)
        layers = max(1, min(layers, MOST_BYTES // (pages * page_bytes)))
        total = min(pages, MOST_BYTES // page_bytes)
        order = torch.randperm(total, generator=generator, device="cuda")
        table = torch.zeros(reqs, blocks, dtype=torch.int32, device="cuda")
        start = 0
        for row, count in enumerate(used):
            places = torch.arange(start, start + count, device="cuda") % total
            table[row, :count] = order[places].int()
            start += count
        self._caches = []
        for _ in range(layers):
            self._caches.append(
                tuple(
                    torch.empty(total, *each, dtype=dtype, device="cuda").normal_(
                        generator=generator
                    )
                    for each in shape.cache_shapes
                )
            )
        tokens = reqs * query_len
        self.query = torch.randn(
            tokens, shape.num_heads, shape.query_dim, device="cuda", generator=generator
        ).to(dtype)
        self.out = torch.empty(tokens, shape.num_heads, shape.value_dim, dtype=dtype, device="cuda")
        lens = torch.tensor(list(lengths), dtype=torch.int32, device="cuda")
        self.step = AttentionStep(table, lens, query_len, None, longest)
        self.cache_bytes = sum(lengths) * page_bytes // shape.page_size
        self.make_workspace(Splits(reqs + 64, scheduled=True))
        self.outs = [self.out]

    def caches(self, layer: int) -> tuple[torch.Tensor, ...]:
        return self._caches[layer % len(self._caches)]

    def launches(
        self, splits: Splits, room: Room, longest: int, layers: int, tiles: Tiles | None = None
    ) -> Callable[[], None]:
        """The kernels of a step of so many layers, whose spans are scheduled once if they are at
        all, for contexts of up to `longest`."""

        def run() -> None:
            if splits.scheduled:
                schedule(self.step.context_lens, self.workspace.schedule, room, longest)
            for layer in range(layers):
                decode(
                    self.shape,
                    self.step,
                    self.query,
                    self.caches(layer),
                    self.out,
                    splits,
                    self.workspace,
                    tiles,
                )

        return run

    def make_workspace(self, splits: Splits) -> None:
        spans, rows = splits.grid(len(self.lengths)), self.query_len * self.shape.num_heads
        self.workspace = Workspace(
            torch.zeros(1 + len(self.lengths) + spans, dtype=torch.int32, device="cuda"),
            torch.empty(spans, rows, self.shape.value_dim, device="cuda"),
            torch.empty(spans, rows, device="cuda"),
        )


def graph_us(run: Callable[[], object], rounds: int = 9, repeats: int = 4) -> float:
    """Microseconds of device time of `run`, captured once: the median of `rounds`."""
    run()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        run()
    graph.replay()
    times = []
    for _ in range(rounds):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        for _ in range(repeats):
            graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / repeats)
    return statistics.median(times)
