"""A decoder whose attention, metadata, graphs and updates are the published vllm-ascend's.

    python -m tests.hosts.published_decode STEPS [KIND] [--own]

Over the simulator; prints how many steps differ from the same model run eagerly. `--own` leaves
graphrt out, so that vllm-ascend's own wrapper serves. KIND is one of `KINDS`, else the first.
"""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

LAYERS, HEADS, WIDTH, BLOCK, BLOCKS, PAGES, WORDS = 3, 2, 128, 128, 64, 4, 50
MOST_KV, SIZES = BLOCK * PAGES, (4, 8)
DRAFTS = 2
"""Steps of the draft model in one graph."""

KINDS = {
    "plain": "all layers have the same lengths",
    "lora": "every other step has adapters, and a graph of its own",
    "layers": "each layer has lengths of its own, found by its name (Gemma 4)",
    "sinks": "FIA v2, with sinks",
    "paged": "paged attention",
    "mixed": "paged attention in every other layer, in one list with FIA (after 0.23)",
    "alone": "graphs captured without the wrapper, as the V2 model runner does",
    "ranks": "decode context parallelism, one rank's lengths of two (after 0.23)",
    "draft": "a merged draft: the graph holds all its steps, each with its own lengths",
}


class Engine:
    """What vllm-ascend's model runner does around a step, for a model of attention layers."""

    def __init__(self, kind: str) -> None:
        import vllm_ascend.attention.attention_v1 as attention
        import vllm_ascend.attention.utils as attention_utils
        from vllm.config import CUDAGraphMode
        from vllm_ascend.compilation import acl_graph

        self.attention, self.acl, self.modes = attention, acl_graph, CUDAGraphMode
        self.kind, self.drafts = kind, DRAFTS if kind == "draft" else 1
        self.own_lengths = kind in ("layers", "mixed", "draft")
        self.implementation = attention.AscendAttentionBackendImpl
        self.backend, self.metadata_class = (
            attention.AscendAttentionBackend,
            attention.AscendMetadata,
        )
        if kind == "ranks":
            self._take_ranks()
        # As little of vLLM's configuration as attention reads.
        self.config = SimpleNamespace(
            compilation_config=SimpleNamespace(cudagraph_mode=CUDAGraphMode.FULL),
            parallel_config=SimpleNamespace(
                prefill_context_parallel_size=1, decode_context_parallel_size=1
            ),
            kv_transfer_config=None,
            quant_config=None,
            model_config=SimpleNamespace(hf_text_config=SimpleNamespace(model_type="llama")),
            speculative_config=None,
        )
        for module in (attention, attention_utils):
            module.get_current_vllm_config = lambda: self.config  # type: ignore[attr-defined]
        attention.using_paged_attention = lambda *rest: kind == "paged"
        attention.needs_layer_aware_fia_graph_replay = lambda: kind in ("layers", "mixed")
        attention.is_enable_hamming_sparse = lambda: False
        generator = torch.Generator().manual_seed(0)

        def weight(*shape: int) -> torch.Tensor:
            return (torch.randn(*shape, generator=generator) * 0.3).bfloat16().npu()

        width = HEADS * WIDTH
        self.embedding, self.head = weight(WORDS, width), weight(width, WORDS)
        self.weights = [[weight(width, width) for _ in range(3)] for _ in range(LAYERS)]
        self.layers = [self._layer(index) for index in range(LAYERS)]
        self.ids = torch.zeros(max(SIZES), dtype=torch.int64).npu()
        self.slots = torch.zeros(max(SIZES), dtype=torch.int64).npu()
        pages = torch.randperm(BLOCKS, generator=generator)[: max(SIZES) * PAGES]
        self.pages = pages.view(max(SIZES), PAGES)
        self.table = self.pages.int().npu()
        self.mask = torch.triu(torch.ones(2048, 2048), 1).to(torch.int8).npu()
        self.update_stream = torch.npu.Stream()
        if kind == "alone":
            self.wrapper: Any = Alone(self)
        else:
            self.wrapper = acl_graph.ACLGraphWrapper(self.model, self.config, CUDAGraphMode.FULL)
        acl_graph.set_graph_params(list(SIZES))
        acl_graph.set_draft_graph_params(list(SIZES))

    def _take_ranks(self) -> None:
        """Attention of decode context parallelism, but for its communication with other ranks."""
        from vllm_ascend.attention.context_parallel import attention_cp, common_cp

        implementation = attention_cp.AscendAttentionDCPImpl
        group = SimpleNamespace(world_size=1, rank_in_group=1, device_group=None)
        common_cp.get_dcp_group = lambda: group  # type: ignore[attr-defined]
        implementation._merge_dcp_attention_output = lambda self, out, *rest: out
        implementation.forward_fused_infer_attention = (  # type: ignore[method-assign]
            lambda self, query, key, value, metadata, out: self._forward_decode_dcp(query, metadata)
        )
        self.implementation = implementation
        self.metadata_class = attention_cp.AscendAttentionDCPMetadata
        self.backend = SimpleNamespace(get_impl_cls=lambda: implementation)

    def _layer(self, index: int) -> Any:
        layer = self.implementation(
            HEADS, WIDTH, WIDTH**-0.5, HEADS, None, None, "auto", None, "decoder", None
        )
        if self.kind == "sinks":
            layer.sinks = torch.linspace(-1, 1, HEADS).bfloat16().npu()
        layer._layer_name = name(index)
        is_paged = self.kind == "paged" or (self.kind == "mixed" and index % 2)
        layer.is_paged = is_paged
        shape = (BLOCKS, BLOCK, HEADS, WIDTH)
        layer.key_cache = torch.zeros(shape, dtype=torch.bfloat16).npu()
        layer.value_cache = torch.zeros(shape, dtype=torch.bfloat16).npu()
        return layer

    def model(self, ids: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        from vllm.forward_context import get_forward_context

        context, tokens = get_forward_context(), ids.shape[0]
        x = self.embedding[ids]
        for metadata in context.of_drafts:
            for index, (layer, weights) in enumerate(zip(self.layers, self.weights, strict=True)):
                query, key, value = ((x @ each).view(tokens, HEADS, WIDTH) for each in weights)
                layer.key_cache.view(-1, HEADS, WIDTH)[slots] = key
                layer.value_cache.view(-1, HEADS, WIDTH)[slots] = value
                own, out = metadata[name(index)], torch.empty_like(query)
                if layer.is_paged:
                    out = layer.forward_paged_attention(query, own, out)
                else:
                    out = layer.forward_fused_infer_attention(query, key, value, own, out)
                x = x + out.view(tokens, HEADS * WIDTH)
        return x @ self.head

    def _metadata(self, tokens: int, lens: list[int], draft: int, layer: int) -> Any:
        if self.own_lengths:
            lens = [max(1, length - draft - 40 * layer) for length in lens]
        metadata = self.metadata_class(
            attn_mask=self.mask,
            attn_state=self.attention.AscendAttentionState.DecodeOnly,
            num_actual_tokens=tokens,
            seq_lens=torch.tensor(lens, dtype=torch.int32),
            seq_lens_list=lens,
            actual_seq_lengths_q=list(range(1, tokens + 1)),
            block_tables=self.table[:tokens],
            slot_mapping=self.slots,
        )
        if self.kind == "ranks":
            from vllm_ascend.attention.context_parallel.attention_cp import AscendMetadataForDecode

            by_rank = np.array([[0, length] for length in lens])
            metadata.num_decodes = tokens
            metadata.decode_meta = AscendMetadataForDecode(by_rank, self.table[:tokens])
        return metadata

    def context(self, tokens: int, lens: list[int], mode: Any, has_lora: bool) -> Any:
        from vllm.forward_context import BatchDescriptor, ForwardContext

        of_drafts = [
            {name(layer): self._metadata(tokens, lens, draft, layer) for layer in range(LAYERS)}
            for draft in range(self.drafts)
        ]
        # Where layers are found by name their order says nothing.
        items = list(of_drafts[0].items())
        is_named = self.kind in ("layers", "mixed")
        context = ForwardContext(
            no_compile_layers={},
            attn_metadata=dict(reversed(items) if is_named else items),
            slot_mapping={},
            cudagraph_runtime_mode=mode,
            batch_descriptor=BatchDescriptor(tokens, has_lora=has_lora),
        )
        extras = {"is_draft_model": self.kind == "draft", "of_drafts": of_drafts}
        extras["sinks"] = self.kind == "sinks"
        for extra in ("capturing", "is_draft_model_prefill"):
            extras[extra] = False
        for extra, value in extras.items():
            setattr(context, extra, value)
        return context

    def call(self, tokens: int, lens: list[int], mode: Any, has_lora: bool = False) -> torch.Tensor:
        from vllm.forward_context import override_forward_context

        context = self.context(tokens, lens, mode, has_lora)
        with override_forward_context(context):
            out: torch.Tensor = self.wrapper(self.ids[:tokens], self.slots[:tokens])
            if mode is self.modes.FULL and not context.capturing:
                self.acl.update_full_graph_params(
                    self.backend,
                    self.update_stream,
                    context,
                    tokens,
                    self.config,
                    None,
                    draft_attn_metadatas=context.of_drafts,
                )
        return out

    def caches(self) -> list[torch.Tensor]:
        return [cache for layer in self.layers for cache in (layer.key_cache, layer.value_cache)]


class Alone:
    """Captures and replays by itself, in the order of vllm-ascend's V2 model runner."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.graphs: dict[int, tuple[Any, torch.Tensor]] = {}

    def __call__(self, ids: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        from vllm.forward_context import get_forward_context

        context, tokens = get_forward_context(), ids.shape[0]
        if context.cudagraph_runtime_mode is self.engine.modes.NONE:
            return self.engine.model(ids, slots)
        context.batch_descriptor = None
        if tokens not in self.graphs:
            context.capturing, graph = True, torch.npu.NPUGraph()
            with torch.npu.graph(graph):
                self.graphs[tokens] = graph, self.engine.model(ids, slots)
        else:
            self.engine.update_stream.wait_stream(torch.npu.current_stream())
            self.graphs[tokens][0].replay()
        return self.graphs[tokens][1]


def name(index: int) -> str:
    return f"model.layers.{index}.self_attn.attn"


def decode(engine: Engine, steps: int) -> list[int]:
    """Greedy decoding of 1 to 8 requests that come and go; the steps that differ from eager."""
    rng = random.Random(1)
    full, none = engine.modes.FULL, engine.modes.NONE
    adapters = (False, True) if engine.kind == "lora" else (False,)
    for size in sorted(SIZES, reverse=True):
        for has_lora in adapters:
            engine.call(size, [MOST_KV] * size, full, has_lora)
    lens, tokens = [0] * max(SIZES), [rng.randrange(WORDS) for _ in range(max(SIZES))]
    wrong = []
    for step in range(steps):
        live = rng.randint(1, max(SIZES))
        size = min(size for size in SIZES if size >= live)
        for request in range(live):
            lens[request] = lens[request] % MOST_KV + 1
        padded = [max(1, length) for length in lens[:size]]
        last = [length - 1 for length in padded]
        at = [int(engine.pages[r, p // BLOCK]) * BLOCK + p % BLOCK for r, p in enumerate(last)]
        engine.ids[:size].copy_(torch.tensor(tokens[:size]))
        engine.slots[:size].copy_(torch.tensor(at))
        before = [cache.clone() for cache in engine.caches()]
        has_lora = adapters[step % len(adapters)]
        expected = engine.call(size, padded, none, has_lora).cpu()
        left = [cache.cpu() for cache in engine.caches()]
        for cache, old in zip(engine.caches(), before, strict=True):
            cache.copy_(old)
        output = engine.call(size, padded, full, has_lora).cpu()
        same = all(torch.equal(a.cpu(), b) for a, b in zip(engine.caches(), left, strict=True))
        if not (same and torch.equal(output, expected)):
            wrong.append(step)
        tokens[:live] = output[:live].float().argmax(-1).tolist()
    return wrong


def main(start: Callable[..., None]) -> None:
    start(own="--own" in sys.argv)
    steps, *kinds = (each for each in sys.argv[1:] if each != "--own")
    with torch.inference_mode():
        engine = Engine(kinds[0] if kinds else next(iter(KINDS)))
        wrong = decode(engine, int(steps))
    wrapper = type(engine.wrapper).__mro__[-2].__module__
    print(f"{wrapper} served {steps} steps of kind {engine.kind}; {wrong} differ")
    sys.stdout.flush()
    os._exit(bool(wrong))  # the simulator may crash when the process unloads it


if __name__ == "__main__":
    from tests.hosts.vllm_ascend_suite import start

    main(start)
