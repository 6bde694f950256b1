"""Caches for transformers' decoders: its own, and those that a host may put in their place."""

from __future__ import annotations

from typing import Any

import torch

LENGTH = 48


def static_cache(config: Any) -> Any:
    """transformers' own, with a layer that slides where the model's layer does."""
    import transformers

    return transformers.StaticCache(config=config, max_cache_len=LENGTH)


def full_length_cache(config: Any) -> Any:
    """Layers that keep every token, also where the model looks back no further than its window:
    the mask is what hides the rest, and all that a step changes is in tensors."""
    from transformers.cache_utils import Cache, StaticLayer

    layers = [StaticLayer(max_cache_len=LENGTH) for _ in range(config.num_hidden_layers)]
    return Cache(layers=layers)


def ring_cache(config: Any) -> Any:
    """Layers that keep no more than the window, at places that a tensor says: the memory of
    transformers' sliding layer without its Python int. Prompts only go into an empty one."""
    from transformers.cache_utils import StaticLayer

    class RingLayer(StaticLayer):
        is_sliding = True

        def update(self, keys: torch.Tensor, values: torch.Tensor, *_: Any, **__: Any) -> Any:
            if not self.is_initialized:
                self.lazy_initialization(keys, values)
            new, size = keys.shape[-2], self.max_cache_len
            kept = min(new, size)
            at = (torch.arange(new - kept, new, device=self.device) + self.cumulative_length) % size
            self.cumulative_length.add_(new)
            self.keys.index_copy_(2, at, keys[:, :, -kept:])
            self.values.index_copy_(2, at, values[:, :, -kept:])
            return (self.keys, self.values) if new == 1 else (keys, values)

        def get_mask_sizes(self, query_length: int) -> tuple[int, Any]:
            # The ring is not in order, but of its places only unwritten ones are ever hidden.
            if query_length > 1:
                return query_length, 0
            size = self.max_cache_len
            return size, (self.cumulative_length - size + 1).clamp(min=0)

    cache = static_cache(config)
    cache.layers = [
        RingLayer(max_cache_len=layer.max_cache_len) if layer.is_sliding else layer
        for layer in cache.layers
    ]
    return cache


def growing_cache(config: Any) -> Any:
    """What transformers uses where none is given: every step puts longer tensors in the place of
    the ones before, so no graph can follow it."""
    import transformers

    return transformers.DynamicCache(config=config)
