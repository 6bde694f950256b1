"""How a model's forward is called: the names of its arguments, and calls as `generate` makes them.

Decoders take `input_ids`, a mask and positions; decoders beside an encoder take the same with
`decoder_` before, and the encoder's outputs. Models of states alone call their cache
`cache_params`.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import DynamicCache, EncoderDecoderCache

from graphrt.errors import CaptureError

CACHES = ("cache", "cache_params", "past_key_values")
"""Names of a forward's cache. From transformers 5.24 on it is the first, and the others are older
names of it."""

TYPES_OF_TOKENS = frozenset({"mm_token_type_ids", "token_type_ids"})
"""Arguments of 0 and 1 for each token, which `generate` extends and passes in every step."""
GRIDS = ("image_grid_thw", "video_grid_thw")
"""Sizes of pictures, which `generate` passes to every step: M-RoPE counts a prompt's with them."""
DELTAS = "rope_deltas"
"""What the steps of M-RoPE return beside their logits, up to transformers 5.19."""

_FEATURES = "input_features"


@dataclass(frozen=True)
class Encoded:
    """The outputs of an encoder, and the mask of its inputs if there is one."""

    outputs: Any
    mask: torch.Tensor | None = None

    @property
    def length(self) -> int:
        return int(self.outputs[0].shape[1])


class Signature:
    """Names the arguments of one model's forward, and makes calls of it as `generate` does."""

    def __init__(self, model: Any, forward: Callable[..., Any]) -> None:
        self.model = model
        # All arguments of the forward; below, its names for tokens, mask, positions and cache. None
        # where it takes none.
        self.names = list(inspect.signature(forward).parameters)
        self.has_encoder = bool(model.config.is_encoder_decoder)
        prefix = "decoder_" if self.has_encoder else ""
        self.tokens = f"{prefix}input_ids"
        self.mask = self._known(f"{prefix}attention_mask")
        # Beside an encoder `generate` passes none: the model counts.
        self.positions = None if self.has_encoder else self._known("position_ids")
        self.cache = next((name for name in CACHES if name in self.names), CACHES[-1])
        # Sound has one length: models of it pass no mask to their decoder.
        self.masks_encoder = self.has_encoder and model.main_input_name == "input_ids"
        # Arguments that steps by graphs allow.
        served = {self.tokens, self.mask, self.positions, self.cache, "use_cache", "return_dict"}
        if self.has_encoder:
            served.add("encoder_outputs")
        if self.masks_encoder:
            served.add("attention_mask")
        self.served = frozenset(each for each in served if each is not None)

    @functools.cached_property
    def planes(self) -> int | None:
        """In how many planes `generate` passes positions; None: in none. Qwen's models of pictures
        have one for the text, and three for time, height and width."""
        inner = self.model.base_model
        if self.positions is None or not hasattr(inner, "rope_deltas"):
            return None
        deltas = inner.rope_deltas
        tokens = torch.zeros((1, 1), dtype=torch.int64, device=self.model.device)
        try:
            positions = self.model._prepare_position_ids_for_generation(tokens, {})
        finally:
            # The call above sets them; a sequence that was begun before still needs its own.
            inner.rope_deltas = deltas
        return positions.shape[0] if positions.dim() == 3 else None

    def _known(self, name: str) -> str | None:
        return name if name in self.names else None

    def checked(self) -> int:
        """How many tokens a step of assisted generation checks at most, if the model's own
        generation_config says so: the next one, and those that an assistant has proposed. 0: it
        does not."""
        config = self.model.generation_config
        proposed = max(config.prompt_lookup_num_tokens or 0, config.num_assistant_tokens or 0)
        return proposed + 1 if proposed and not self.has_encoder else 0

    def window(self, length: int) -> int | None:
        """How many positions sliding layers keep of sequences of this many tokens; None: all.

        A ring cannot give back what it has overwritten, so assisted generation leaves the memory.
        So a ring is only used if it at least halves the memory of a layer, and `checked()` is 0.

        A ring also needs the mask of padding. Chunks begin at a token of each row's own, which no
        ring has; decoders beside an encoder have few tokens.
        """
        config = self.model.config.get_text_config(decoder=True)
        window: int | None = getattr(config, "sliding_window", None)
        chunked = getattr(config, "attention_chunk_size", None) is not None
        if window is None or chunked or self.mask is None or self.has_encoder or self.checked():
            return None
        return window if 1 < window <= length // 2 else None

    def named(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """The arguments of a call by name, the cache by its newest name."""
        call = {**dict(zip(self.names, args, strict=False)), **kwargs} if args else kwargs
        if self.cache not in call:
            for name in CACHES:
                if name in call:
                    call = {**call, self.cache: call[name]}
                    del call[name]
        return call

    def call(
        self,
        tokens: torch.Tensor,
        mask: torch.Tensor | None,
        encoded: Encoded | None,
        cache: Any,
        *,
        masked: bool = True,
    ) -> dict[str, Any]:
        """The arguments that `generate` passes for these tokens, the last ones of the mask."""
        call = {self.tokens: tokens, self.cache: cache, "use_cache": True, "return_dict": True}
        if "logits_to_keep" in self.names:
            call["logits_to_keep"] = 1
        if encoded is not None:
            call["encoder_outputs"] = encoded.outputs
            if self.masks_encoder and encoded.mask is not None:
                call["attention_mask"] = encoded.mask
        if mask is None:
            return call
        if self.mask is not None and masked:
            call[self.mask] = mask
        if self.positions is not None:
            positions = positions_of(mask)[:, -tokens.shape[1] :]
            if self.planes is not None:
                positions = positions.expand(self.planes, -1, -1)
            call[self.positions] = positions
        return call

    def new_cache(self) -> Any:
        """A cache of transformers'."""
        config = self.model.config.get_text_config(decoder=True)
        if not self.has_encoder:
            return DynamicCache(config=config)
        return EncoderDecoderCache(DynamicCache(config=config), DynamicCache(config=config))

    def encode(self, rows: int, length: int, tokens: torch.Tensor) -> Encoded | None:
        """The encoder's outputs for some inputs of this length; sound has one length, whatever is
        asked for. None without an encoder."""
        if not self.has_encoder:
            return None
        config, name = self.model.config, self.model.main_input_name
        mask = None
        if name == "input_ids":
            inputs = tokens[:, :1].repeat(1, length)
            mask = torch.ones_like(inputs)
            mask[0, -1] = 0
        elif name == _FEATURES and hasattr(config, "num_mel_bins"):
            shape = rows, config.num_mel_bins, 2 * config.max_source_positions
            generator = torch.Generator("cpu").manual_seed(0)
            sound = torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")
            inputs = sound.to(tokens.device, self.model.dtype)
        else:
            raise CaptureError(
                "with_graphs() cannot make up an input of the model's encoder to capture with",
                got=name,
                expected="input_ids, or input_features of num_mel_bins",
                advice="leave with_graphs() out",
            )
        masked: Mapping[str, Any] = {} if mask is None else {"attention_mask": mask}
        return Encoded(self.model.get_encoder()(inputs, **masked, return_dict=True), mask)


def advice_for_outputs(config: Any) -> str:
    """What to try where a forward returns more than graphs give."""
    for name in ("output_hidden_states", "output_attentions"):
        if getattr(config, name, False):
            return f"model.config.{name} = False before with_graphs()"
    return "leave with_graphs() out for this model, which runs as before"


def positions_of(mask: torch.Tensor) -> torch.Tensor:
    """The positions of tokens, as `generate` counts them: not counting padding."""
    return (mask.cumsum(-1) - 1).masked_fill(mask == 0, 0)
