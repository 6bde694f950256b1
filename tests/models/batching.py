"""Small models for transformers' continuous batching, with graphs on a CPU too, and a stand-in for
the package flash-attn: without one there is no path of decode steps."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from graphrt.core.replay.recording import current_capture

_OF = "transformers.generation.continuous_batching"


def llama(device: str, **more: Any) -> Any:
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        eos_token_id=None,
        **more,
    )
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config).eval().to(device)


def configured(**more: Any) -> Any:
    """A small cache, and graphs of 8, 16, ... tokens."""
    import transformers

    options = {
        "num_blocks": 64,
        "max_batch_tokens": 64,
        "max_blocks_per_request": 2,
        "q_padding_interval_size": 8,
        "kv_padding_interval_size": 512,
        "use_cuda_graph": True,
        "use_async_batching": False,
    }
    return transformers.ContinuousBatchingConfig(**{**options, **more})


def generate(model: Any, prompts: list[list[int]], new: int = 12, **more: Any) -> list[list[int]]:
    """The tokens that `generate_batch` makes of each prompt; raises what a request ended with."""
    import transformers

    kept = {name: more.pop(name) for name in ("persistent_manager", "warmup") if name in more}
    outputs = model.generate_batch(
        prompts,
        generation_config=transformers.GenerationConfig(
            max_new_tokens=new, eos_token_id=-1, do_sample=False
        ),
        continuous_batching_config=configured(**more),
        **kept,
    )
    assert len(outputs) == len(prompts)
    for each in outputs.values():
        assert each.error is None, each.error
    return [list(each.generated_tokens) for each in outputs.values()]


def drawn(model: Any, prompts: list[list[int]], new: int = 12, **more: Any) -> list[list[int]]:
    """Sampled tokens of each prompt, whose batches do not depend on a thread: all are there before
    the first."""
    import transformers

    manager = model.init_continuous_batching(
        transformers.GenerationConfig(
            max_new_tokens=new, eos_token_id=-1, do_sample=True, temperature=2.0
        ),
        configured(**more),
    )
    manager.warmup()
    names = manager.add_requests(prompts, max_new_tokens=new)
    torch.manual_seed(7)
    manager.start()
    found = {}
    while len(found) < len(names):
        result = manager.get_result(timeout=30)
        assert result is not None and result.error is None, result
        if result.is_finished():
            found[result.request_id] = list(result.generated_tokens)
    manager.stop(block=True, timeout=30)
    return [found[name] for name in names]


def alone(model: Any, prompts: list[list[int]], new: int = 12) -> list[list[int]]:
    """The tokens of each prompt by itself, by `generate`."""
    found = []
    for prompt in prompts:
        tokens = torch.tensor([prompt], device=model.device)
        every = model.generate(
            tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=new, do_sample=False
        )
        found.append(every[0, len(prompt) :].tolist())
    return found


def allow_graphs(patch: pytest.MonkeyPatch) -> None:
    """transformers makes no graphs on a CPU: let it pad its batches and ask for graphs there. In a
    capture it takes the way of a GPU."""
    initialization, runner = (
        importlib.import_module(f"{_OF}.{name}") for name in ("initialization", "model_runner")
    )

    def decide(cb_config: Any, **unused: Any) -> None:
        cb_config.use_cuda_graph = cb_config.cuda_graph_booleans

    patch.setattr(initialization, "decide_use_cuda_graphs", decide)
    pools = "get_memory_pools" if hasattr(runner, "get_memory_pools") else "get_cuda_pools"
    patch.setattr(runner, pools, lambda: (None, None))
    masking = importlib.import_module("transformers.masking_utils")
    patch.setattr(masking, "is_tracing", lambda tensor=None: current_capture() is not None)


def after_inputs(patch: pytest.MonkeyPatch, then: Callable[[Any], object]) -> None:
    """Call `then` with transformers' static tensors on a GPU, whenever the present stream has been
    given what resets or fills them."""
    cls = importlib.import_module(f"{_OF}.input_outputs").ContinuousBatchingIOs

    def followed(original: Callable[..., Any]) -> Callable[..., Any]:
        def written(self: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(self, *args, **kwargs)
            if self.device.type == "cuda":
                then(self)
            return result

        return written

    for name in ("reset", "prepare_batch_tensors"):
        patch.setattr(cls, name, followed(getattr(cls, name)))


def wait(io: Any) -> None:
    """For transformers' own batches: without it they may run before their inputs are there."""
    torch.cuda.synchronize()


def be_late(io: Any) -> None:
    """As on a busy GPU: inputs are zero for 20 ms more."""
    given = io._bulk_input_tensor.clone()
    io._bulk_input_tensor.zero_()
    torch.cuda._sleep(40_000_000)
    io._bulk_input_tensor.copy_(given)


def flash(patch: pytest.MonkeyPatch, model: Any) -> None:
    """Give a model the attention `flash_attention_2`, by the functions below."""
    utils = importlib.import_module("transformers.modeling_flash_attention_utils")
    initialization = importlib.import_module(f"{_OF}.initialization")
    functions = None, flash_attn_varlen_func, flash_attn_with_kvcache, None, None
    patch.setattr(utils, "_lazy_imports", lambda *args, **kwargs: functions)
    patch.setattr(utils, "_loaded_implementation", None)
    if model.device.type == "cpu":
        patch.setattr(initialization, "ensure_decode_fast_path_is_available", lambda *args: None)
    asked = "_check_and_adjust_attn_implementation"
    patch.setattr(type(model), asked, lambda self, name, *args, **kwargs: name)
    model.set_attn_implementation("flash_attention_2")


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
) -> torch.Tensor:
    """Tokens of several requests, one behind the other; padding gets anything."""
    if q.device.type == "cuda" and q.dtype in (torch.bfloat16, torch.float16):
        return torch.ops.aten._flash_attention_forward(
            *(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, 0.0, causal, False),
            scale=softmax_scale,
        )[0]
    asks, gives = torch.arange(len(q), device=q.device), torch.arange(len(k), device=q.device)
    ends_q, ends_k = cu_seqlens_q[1:], cu_seqlens_k[1:]
    of_q = torch.searchsorted(ends_q, asks, right=True).clamp(max=len(ends_q) - 1)
    of_k = torch.searchsorted(ends_k, gives, right=True).clamp(max=len(ends_k) - 1)
    # Counted from the end of each request: its last query sees all of its keys.
    left_q, left_k = ends_q[of_q] - asks, ends_k[of_k] - gives
    mask = (of_q[:, None] == of_k) & (left_k >= left_q[:, None])
    # Memory that nobody has written may hold NaN, which no mask hides.
    k, v = (each.masked_fill((gives >= ends_k[-1])[:, None, None], 0) for each in (k, v))
    return _attend(q, k, v, mask, softmax_scale).nan_to_num()


def flash_attn_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    cache_seqlens: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
) -> torch.Tensor:
    """A token of each request, whose key and value are written to its pages first."""
    assert k is not None and v is not None
    assert cache_seqlens is not None and block_table is not None
    page, table, lengths = k_cache.shape[1], block_table.long().clamp(min=0), cache_seqlens.long()
    # A request of padding has the length -1: it writes once more what the first one writes.
    live = lengths >= 0
    pages = table.gather(1, (lengths.clamp(min=0) // page)[:, None])[:, 0]
    slots = pages * page + lengths.clamp(min=0) % page
    slots = torch.where(live, slots, slots[:1])
    for cache, new in ((k_cache, k), (v_cache, v)):
        values = torch.where(live[:, None, None], new[:, 0], new[:1, 0])
        cache.view(-1, *cache.shape[2:]).index_copy_(0, slots, values)
    keys, values = (cache[table].flatten(1, 2).transpose(1, 2) for cache in (k_cache, v_cache))
    mask = torch.arange(keys.shape[2], device=q.device) <= lengths[:, None]
    keys, values = (each.masked_fill(~mask[:, None, :, None], 0) for each in (keys, values))
    out = scaled_dot_product_attention(
        q.transpose(1, 2),
        keys,
        values,
        attn_mask=(mask | ~live[:, None])[:, None, None],
        scale=softmax_scale,
        enable_gqa=True,
    )
    return out.transpose(1, 2)


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, scale: float | None
) -> torch.Tensor:
    by_head = (each.transpose(0, 1)[None] for each in (q, k, v))
    out = scaled_dot_product_attention(*by_head, attn_mask=mask, scale=scale, enable_gqa=True)
    return out[0].transpose(0, 1)
