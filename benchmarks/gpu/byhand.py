"""The same graphs captured by a loop of one's own, as a host without graphrt would write it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from benchmarks.llama import Llama, attention


class Buffers:
    """Static inputs at the largest size."""

    def __init__(self, model: Llama, tokens: int) -> None:
        device = model.embedding.device
        self.all = {
            name: torch.full((tokens,), spec.pad_value, dtype=spec.dtype, device=device)
            for name, spec in model.input_specs().items()
        }

    def views(self, tokens: int) -> dict[str, Tensor]:
        return {name: buffer[:tokens] for name, buffer in self.all.items()}

    def fill(self, values: dict[str, Tensor], tokens: int) -> None:
        """From pinned tensors, which the host does not write meanwhile."""
        for name, buffer in self.all.items():
            buffer[:tokens].copy_(values[name], non_blocking=True)


def captured(
    run: Callable[[int], None], sizes: Iterable[int], stream: torch.cuda.Stream
) -> list[torch.cuda.CUDAGraph]:
    """Graphs of a step over static tensors, in a pool of their own; each size is warmed up once."""
    pool, graphs = torch.cuda.graph_pool_handle(), []
    for size in sizes:
        run(size)
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1], pool=pool, stream=stream):
            run(size)
    return graphs


class FullGraphs:
    """One graph for each size."""

    def __init__(self, model: Llama, buffers: Buffers, pool: Any, *, warms_up: bool = True) -> None:
        self.model, self.buffers, self.pool = model, buffers, pool
        self.warms_up = warms_up
        self.graphs: dict[int, tuple[Any, Tensor]] = {}

    @torch.no_grad()
    def capture(self, sizes: Iterable[int]) -> None:
        """Largest first, so that the smaller ones find the memory of the larger."""
        for size in sorted(sizes, reverse=True):
            views = self.buffers.views(size)
            if self.warms_up or not self.graphs:
                self.model(**views)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self.pool):
                logits = self.model(**views)
            self.graphs[size] = graph, alias(logits)
            del logits

    def step(self, size: int, values: dict[str, Tensor]) -> Tensor:
        graph, logits = self.graphs[size]
        self.buffers.fill(values, size)
        graph.replay()
        return logits


class PieceGraphs:
    """A graph for every part between two attentions, each by `torch.cuda.graph`."""

    def __init__(self, model: Llama, buffers: Buffers, pool: Any) -> None:
        self.model, self.buffers, self.pool = model, buffers, pool
        self.graphs: dict[int, list[tuple[Any, Any]]] = {}
        config = model.config
        # One is enough: each attention is read before the next one is written.
        self.attended = torch.empty(
            len(next(iter(buffers.all.values()))),
            config.num_heads * config.head_dim,
            dtype=config.dtype,
            device=model.embedding.device,
        )

    @torch.no_grad()
    def capture(self, sizes: Iterable[int]) -> None:
        """Largest first. Each piece is replayed once captured: what follows reads its results."""
        for size in sorted(sizes, reverse=True):
            views = self.buffers.views(size)
            self.model(**views)
            stages = self.model.stages(**views)
            parts = self.graphs[size] = []
            sent: Tensor | None = None
            for _ in range(self.model.config.num_layers + 1):
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, pool=self.pool):
                    result = stages.send(sent)
                graph.replay()
                if isinstance(result, Tensor):
                    parts.append((graph, alias(result)))
                    continue
                sent = self.attended[:size]
                sent.copy_(attention(*result))
                parts.append((graph, tuple(alias(tensor) for tensor in result)))
            stages.close()
            del result

    @torch.no_grad()
    def step(self, size: int, values: dict[str, Tensor]) -> Tensor:
        self.buffers.fill(values, size)
        attended = self.attended[:size]
        for graph, result in self.graphs[size]:
            graph.replay()
            if isinstance(result, Tensor):
                return result
            attended.copy_(attention(*result))
        raise AssertionError("the last part has the logits")


def alias(tensor: Tensor) -> Tensor:
    """The same memory, which the next capture of the pool may use again all the same."""
    owner = tensor.untyped_storage()
    storage = torch._C._construct_storage_from_data_pointer(
        owner.data_ptr(), tensor.device, owner.nbytes()
    )
    empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return empty.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())
