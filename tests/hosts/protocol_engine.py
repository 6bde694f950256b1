"""An engine that keeps its graphs as vllm-ascend does: the names, and the order of its calls."""

from __future__ import annotations

import logging
import random
import weakref
from collections.abc import Callable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from graphrt.hosts.vllm_ascend import ACLGraphWrapper, Engine, GraphParams, updated_by

HEADS, WIDTH, BLOCK, PAGES, BLOCKS = 2, 128, 128, 4, 40
MOST_KV = BLOCK * PAGES


class Mode(Enum):
    NONE = 0
    PIECEWISE = 1
    FULL = 2


class Key(NamedTuple):
    """What names a graph for the engine."""

    num_tokens: int
    lora: bool = False


@dataclass
class Options:
    gc_disable: bool = False
    weak_ref_output: bool = False
    debug_log_enable: bool = True


@dataclass
class Metadata:
    lens: list[int]
    table: torch.Tensor

    @property
    def ends(self) -> list[int]:
        return list(range(1, len(self.lens) + 1))


@dataclass
class Context:
    """One step of the engine."""

    batch_descriptor: Key
    cudagraph_runtime_mode: Mode
    attn_metadata: Mapping[str, Metadata]
    capturing: bool = False
    is_draft_model: bool = False
    is_draft_model_prefill: bool = False


class Host:
    """The engine's module of graphs, and the runner around it."""

    def __init__(self) -> None:
        self.current: Context | None = None
        self.capturing_enabled = True
        self.compilation_counter = SimpleNamespace(num_cudagraph_captured=0)
        self.current_platform = SimpleNamespace(get_global_graph_pool=lambda: ("pool", id(self)))
        self.envs = SimpleNamespace(VLLM_LOGGING_LEVEL="INFO")
        self.logger = logging.getLogger("engine")
        self.CUDAGraphOptions = Options
        self._acl_graph_wrappers: weakref.WeakSet[Any] = weakref.WeakSet()
        self._graph_params: GraphParams | None = None
        self._draft_graph_params: GraphParams | None = None
        self._draft_graph_prefill_params: GraphParams | None = None
        engine = self.engine = Engine(self)
        engine.hooks = lambda: None  # type: ignore[method-assign] - no offloader
        self.wrapper_class = type("ACLGraphWrapper", (ACLGraphWrapper,), {"engine": engine})
        self.update_full_graph_params = updated_by(engine, self.update_as_host)
        self.config = SimpleNamespace(compilation_config=SimpleNamespace())
        self.updates: list[str] = []

    def get_graph_params(self) -> Any:
        return self._select(self._graph_params)

    def get_draft_graph_params(self) -> Any:
        return self._select(self._draft_graph_params)

    def get_draft_graph_prefill_params(self) -> Any:
        return self._select(self._draft_graph_prefill_params)

    def _select(self, params: Any) -> Any:
        """As vllm-ascend 0.26, which has `GraphParams` with adapters and without."""
        if not isinstance(params, dict):
            return params
        return params[self.current is not None and self.current.batch_descriptor.lora]

    def get_forward_context(self) -> Any:
        return self.current

    def validate_cudagraph_capturing_enabled(self) -> None:
        if not self.capturing_enabled:
            raise RuntimeError("capturing is over")

    def params(self, sizes: tuple[int, ...]) -> GraphParams:
        return GraphParams(
            {size: [] for size in sizes},
            dict.fromkeys(sizes),
            {size: [] for size in sizes},
            {size: [] for size in sizes},
        )

    @contextmanager
    def step(self, context: Context) -> Any:
        self.current = context
        try:
            yield context
        finally:
            self.current = None

    def update_as_host(
        self, attention: Any, stream: Any, context: Context, tokens: int, *rest: Any
    ) -> None:
        attention.update(stream, context, tokens, self.engine.params_of(context))


def operator(
    query: Any, keys: Any, values: Any, metadata: Metadata, out: list[Any], workspace: Any
) -> None:
    import torch_npu

    torch_npu.npu_fused_infer_attention_score.out(
        query,
        keys,
        values,
        block_table=metadata.table,
        input_layout="TND",
        block_size=BLOCK,
        num_heads=HEADS,
        num_key_value_heads=HEADS,
        scale=0.5,
        actual_seq_lengths=metadata.ends,
        actual_seq_lengths_kv=metadata.lens,
        workspace=workspace,
        out=out,
    )


def paged_operator(
    query: Any, keys: Any, values: Any, metadata: Metadata, out: list[Any], workspace: Any
) -> None:
    """By position, with its lengths in a tensor on the host."""
    import torch_npu

    keys, values = (cache.view(BLOCKS, BLOCK, HEADS, WIDTH) for cache in (keys, values))
    torch_npu._npu_paged_attention(
        query,
        keys,
        values,
        HEADS,
        HEADS,
        0.5,
        metadata.table,
        torch.tensor(metadata.lens, dtype=torch.int32),
        out[0],
        **({} if workspace is None else {"workspace": workspace}),
    )


@dataclass
class Decoder:
    """Attention layers that note their sites at capture and update them as vllm-ascend's do.

    `asks_each_step` asks for scratch memory at every update; `gives_none` updates with none.
    """

    host: Host
    layers: int = 3
    seed: int = 0
    asks_each_step: bool = False
    gives_none: bool = False
    before_update: Callable[[int], object] = lambda layer: None
    operate: Callable[..., None] = operator
    only: int | None = None
    caches: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(self.seed)

        def cache() -> torch.Tensor:
            shape = (BLOCKS, BLOCK, HEADS * WIDTH)
            return torch.randn(shape, generator=generator).bfloat16().to("npu")

        self.caches = [(cache(), cache()) for _ in range(self.layers)]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        context = self.host.current
        assert context is not None
        for layer in range(self.layers):
            query, output = x + 0, torch.empty_like(x)
            lse = torch.empty(1, dtype=torch.float32, device=x.device)
            metadata = context.attn_metadata[f"layers.{layer}"]
            if context.capturing:
                self._site(layer, query, metadata, [output, lse])
            else:
                self.operate(query, *self.caches[layer], metadata, [output, lse], None)
            x = query + output
        return x

    def _site(self, layer: int, query: Any, metadata: Metadata, out: list[Any]) -> None:
        params: Any = self.host.engine.params_of(self.host.current)
        tokens, npu = metadata.ends[-1], torch.npu
        stream, event = npu.current_stream(), npu.ExternalEvent()
        workspace = params.workspaces.get(tokens)
        if workspace is None:
            workspace = params.workspaces[tokens] = scratch()
        event.wait(stream)
        event.reset(stream)
        params.events[tokens].append(event)
        params.attn_params[tokens].append((query, layer, metadata.table, out))
        npu.graph_task_group_begin(stream)
        self.operate(query, *self.caches[layer], metadata, out, workspace)
        params.handles[tokens].append(npu.graph_task_group_end(stream))

    def update(self, stream: Any, context: Context, tokens: int, params: Any) -> None:
        columns = (params.attn_params[tokens], params.handles[tokens], params.events[tokens])
        names = list(context.attn_metadata)[: self.only]
        with torch.npu.stream(stream):
            for name, noted, handle, event in zip(names, *columns, strict=False):
                query, layer, _, out = noted
                workspace = scratch() if self.asks_each_step else params.workspaces.get(tokens)
                torch.npu.graph_task_update_begin(stream, handle)
                self.before_update(layer)
                metadata = context.attn_metadata[name]
                passed = None if self.gives_none else workspace
                self.operate(query, *self.caches[layer], metadata, out, passed)
                torch.npu.graph_task_update_end(stream)
                event.record(stream)


def scratch() -> torch.Tensor:
    """More than the operator needs."""
    return torch.empty(1 << 16, dtype=torch.uint8, device="npu")


def contexts(
    layers: int, key: Key, mode: Mode, lens: list[int], table: Any, **kind: Any
) -> Context:
    metadata = Metadata(lens, table)
    return Context(key, mode, {f"layers.{i}": metadata for i in range(layers)}, **kind)


def random_lens(rng: random.Random, tokens: int) -> list[int]:
    return [rng.randint(1, MOST_KV) for _ in range(tokens)]
