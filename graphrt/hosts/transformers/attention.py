"""The attention of steps: one token a row, whose heads share keys and values by groups. And masks
that are made without a look at their values, for encoders.

Where there is a mask, transformers repeats keys and values for each head. That copies the whole
memory in each layer of each step, four times where 32 heads share 8. Here the heads of a group take
the place of positions, which a step has one of, and nothing is repeated. SDPA turns a boolean mask
into numbers, by some kernels in each layer: a step's mask has numbers from the start.

Inside of `grouped` a config that says `sdpa` says `GROUPED`. A model whose attention does not come
from transformers' `AttentionInterface`, or whose code compares the name, stays as it is, and so
does any other attention. Meanwhile another thread's forward of the same model may use grouped
attention too, which rounds differently.
"""

from __future__ import annotations

import functools
import inspect
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from graphrt.errors import InvalidOptionError

GROUPED = "graphrt_grouped_sdpa"
_MASKED = "graphrt_masked_sdpa"
_PLAIN = "sdpa"


def attention_of(model: Any) -> Any:
    """The config to give to `grouped` for steps of this model; None if its attention stays."""
    config = model.config.get_text_config(decoder=True)
    heads = getattr(config, "num_attention_heads", None)
    if config._attn_implementation != _PLAIN or not _is_transformers_own():
        return None
    if getattr(config, "num_key_value_heads", heads) in (None, heads):
        return None
    if any(
        _asks_for_its_name(name) for name in {type(each).__module__ for each in model.modules()}
    ):
        return None
    _register()
    return config


def _is_transformers_own() -> bool:
    """Whether transformers' own functions are registered under the name of SDPA."""
    return (
        ALL_ATTENTION_FUNCTIONS.get(_PLAIN) is sdpa_attention_forward
        and ALL_MASK_ATTENTION_FUNCTIONS.get(_PLAIN) is sdpa_mask
    )


@functools.cache
def _asks_for_its_name(module: str) -> bool:
    """Whether a module's code depends on the name of the attention: MiniMax-M3 leaves its mask of
    blocks out if it does not know the name. True also if there is no source to read."""
    try:
        source = inspect.getsource(sys.modules[module])
    except (KeyError, OSError, TypeError):
        return True
    return re.search(r"_attn_implementation\s*(==|!=|in\b|not in\b)", source) is not None


@contextmanager
def grouped(config: Any) -> Iterator[None]:
    """Use grouped attention in the model of `config` inside of the `with`. Changes nothing if
    `config` is None, or inside of another `grouped`."""
    if config is None or config._attn_implementation_internal == GROUPED:
        yield
        return
    config._attn_implementation_internal = GROUPED
    try:
        yield
    finally:
        # Not the value from before: the second of two threads to leave would restore GROUPED.
        config._attn_implementation_internal = _PLAIN


def _attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    # A mask or bias of each head's own would have to be regrouped too.
    by_head = attention_mask is not None and attention_mask.shape[1] != 1
    if query.shape[2] != 1 or by_head or kwargs.get("position_bias") is not None:
        output: tuple[torch.Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
        return output
    if attention_mask is not None and attention_mask.dtype is not torch.bool:
        attention_mask = attention_mask.to(query.dtype)
    rows, heads, _, width = query.shape
    # The heads of a group are neighbours: transformers repeats keys in that order.
    by_group = query.reshape(rows, key.shape[1], heads // key.shape[1], width)
    attended = scaled_dot_product_attention(
        by_group, key, value, attn_mask=attention_mask, dropout_p=dropout, scale=scaling
    )
    return attended.reshape(rows, 1, heads, value.shape[-1]), None


def _mask(*args: Any, **kwargs: Any) -> torch.Tensor | None:
    mask: torch.Tensor | None = sdpa_mask(*args, **kwargs)
    dtype = kwargs.get("dtype")
    if mask is None or mask.shape[2] != 1 or dtype is None:
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask.logical_not(), -torch.inf)


def keep_masks(model: Any) -> None:
    """Let a model with SDPA make its mask of attention always. transformers leaves one out that
    hides nothing, and reads its values on the host for that.

    Raises `InvalidOptionError` for another attention, and where a model's code asks for its name.
    """
    modules = [each for each in model.modules() if isinstance(each, PreTrainedModel)]
    names = {each.config._attn_implementation for each in modules}
    asking = [name for name in {type(m).__module__ for m in modules} if _asks_for_its_name(name)]
    if not names <= {_PLAIN, _MASKED} or asking or not _is_transformers_own():
        raise InvalidOptionError(
            "masks_on_device() changes the attention `sdpa` of transformers alone",
            got=f"{', '.join(sorted(names))}{', asked for by name' if asking else ''}",
            expected=_PLAIN,
            advice="with_graphs(model, max_batch=4, max_len=64) of graphrt.hosts.transformers, or "
            "leave graphs out: the model runs as before",
        )
    AttentionInterface.register(_MASKED, sdpa_attention_forward)
    AttentionMaskInterface.register(_MASKED, _always_masked)
    model.set_attn_implementation(_MASKED)


def _always_masked(*args: Any, **kwargs: Any) -> torch.Tensor | None:
    kwargs |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    mask: torch.Tensor | None = sdpa_mask(*args, **kwargs)
    return mask


def _register() -> None:
    AttentionInterface.register(GROUPED, _attend)
    AttentionMaskInterface.register(GROUPED, _mask)
