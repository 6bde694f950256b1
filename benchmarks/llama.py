"""A decode step of a Llama-shaped model, with seeded random weights made on the device.

One token for each request. The keys and values of a request lie in the row of its place in the
batch; what pads a batch writes to the last row, which no request has.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from graphrt import GraphRunner, InputSpec, eager_break, opaque
from graphrt.demo import DecoderConfig, attend_grouped, finish, project, rms_norm, rotations


@dataclass(frozen=True)
class Config(DecoderConfig):
    """The shape of a model, and what its weights are kept as."""

    dtype: torch.dtype = torch.bfloat16


def config(*shape: int, tied: bool, dtype: torch.dtype = torch.bfloat16) -> Config:
    """`shape` as the first fields of `DecoderConfig`; the rest as in Llama 3."""
    return Config(*shape, rope_theta=500_000.0, rms_eps=1e-5, tied_embeddings=tied, dtype=dtype)


CONFIGS = {
    "tiny": config(512, 64, 128, 3, 4, 2, 16, tied=True, dtype=torch.float32),
    "small": config(2048, 256, 512, 16, 8, 4, 32, tied=True, dtype=torch.float32),
    "1b": config(128256, 2048, 8192, 16, 32, 8, 64, tied=True),
    "8b": config(128256, 4096, 14336, 32, 32, 8, 128, tied=False),
}


class Shared(NamedTuple):
    """What all layers of a step read."""

    rows: Tensor
    columns: Tensor
    visible: Tensor
    cos: Tensor
    sin: Tensor


def attend(
    query: Tensor, key: Tensor, value: Tensor, keys: Tensor, values: Tensor,
    rows: Tensor, columns: Tensor, visible: Tensor,
) -> Tensor:  # fmt: skip
    """Write this step's key and value of every request, then attend: [tokens, heads * head_dim].

    `query` is [tokens, heads, head_dim], `key` and `value` [tokens, kv_heads, head_dim], the caches
    [requests + 1, kv_heads, context, head_dim], `visible` bool [tokens, 1, 1, context].
    """
    tokens = len(query)
    keys[rows, :, columns] = key
    values[rows, :, columns] = value
    return attend_grouped(query, keys[:tokens], values[:tokens], visible)


attention = eager_break(attend)


def flash(query: Tensor, key: Tensor, value: Tensor, *others: Tensor) -> Tensor:
    """FlashAttention over the whole context of each row: it takes no mask."""
    keys, values, rows, columns, _ = others
    keys[rows, :, columns] = key
    values[rows, :, columns] = value
    keys, values = keys[: len(query)], values[: len(query)]
    with nn.attention.sdpa_kernel(nn.attention.SDPBackend.FLASH_ATTENTION):
        out = F.scaled_dot_product_attention(query[:, :, None], keys, values, enable_gqa=True)
    return out.reshape(len(query), -1)


@opaque("graphrt_bench::attention", mutates=["keys", "values", "out"])
def attention_into(
    query: Tensor, key: Tensor, value: Tensor, keys: Tensor, values: Tensor,
    rows: Tensor, columns: Tensor, visible: Tensor, out: Tensor,
) -> None:  # fmt: skip
    """`attention` as one operator, whose result is written into `out`."""
    out.copy_(attend(query, key, value, keys, values, rows, columns, visible))


def opaque_attention(query: Tensor, *others: Tensor) -> Tensor:
    """`attention`, for a model that is compiled in pieces."""
    out = query.new_empty(len(query), query.shape[1] * query.shape[2])
    attention_into(query, *others, out)
    return out


class Layer(nn.Module):
    """The weights of one layer, named as `LayerWeights` names them, and its cache."""

    qkv_bias = out_bias = gate_up_bias = down_bias = q_norm = k_norm = None

    def __init__(self, config: Config, new: Any, cache_shape: tuple[int, ...]) -> None:
        super().__init__()
        width = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
        self.qkv = new(width, config.hidden_size)
        self.out = new(config.hidden_size, config.num_heads * config.head_dim)
        self.gate_up = new(2 * config.intermediate_size, config.hidden_size)
        self.down = new(config.hidden_size, config.intermediate_size)
        self.input_norm = new(config.hidden_size, ones=True)
        self.mlp_norm = new(config.hidden_size, ones=True)
        # Tensors of their own: a compiler sees that writing one leaves the others alone.
        self.register_buffer("keys", new(*cache_shape, std=0.5).data)
        self.register_buffer("values", new(*cache_shape, std=0.5).data)


class Llama(nn.Module):
    """Inference only. `forward` returns the logits [tokens, vocab]."""

    def __init__(self, config: Config, *, max_batch: int, context: int, device: str) -> None:
        super().__init__()
        self.config, self.max_batch, self.context = config, max_batch, context
        self.attention: Any = attention
        random = torch.Generator(device).manual_seed(0)

        def new(*shape: int, std: float = 0.02, ones: bool = False) -> nn.Parameter:
            tensor = torch.empty(shape, dtype=config.dtype, device=device)
            tensor.fill_(1) if ones else tensor.normal_(0, std, generator=random)
            return nn.Parameter(tensor, requires_grad=False)

        cache_shape = (max_batch + 1, config.num_kv_heads, context, config.head_dim)
        self.embedding = new(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            Layer(config, new, cache_shape) for _ in range(config.num_layers)
        )
        self.norm = new(config.hidden_size, ones=True)
        self.head = (
            self.embedding if config.tied_embeddings else new(config.vocab_size, config.hidden_size)
        )
        places = torch.arange(context, device=device)
        self.register_buffer("places", places)
        self.register_buffer("rope", rotations(config, places, config.dtype))

    def start(
        self, input_ids: Tensor, positions: Tensor, slot_mapping: Tensor, seq_lens: Tensor
    ) -> tuple[Tensor, Shared]:
        """The embedded tokens and what all layers read."""
        rows, columns = slot_mapping // self.context, slot_mapping % self.context
        visible = (self.places < seq_lens[:, None])[:, None, None]
        cos, sin = self.rope[:, positions, None]
        return self.embedding[input_ids], Shared(rows, columns, visible, cos, sin)

    def logits(self, hidden: Tensor) -> Tensor:
        return F.linear(rms_norm(hidden, self.norm, self.config.rms_eps), self.head)

    def forward(
        self, input_ids: Tensor, positions: Tensor, slot_mapping: Tensor, seq_lens: Tensor
    ) -> Tensor:
        """All inputs are [tokens]; `seq_lens` int32 counts this token, the others are int64."""
        hidden, shared = self.start(input_ids, positions, slot_mapping, seq_lens)
        for layer in self.layers:
            qkv = project(layer, self.config, hidden, shared.cos, shared.sin)
            attended = self.attention(*qkv, layer.keys, layer.values, *shared[:3])
            hidden = finish(layer, self.config, hidden, attended)
        return self.logits(hidden)

    def stages(self, **inputs: Tensor) -> Iterator[Any]:
        """The same step for who splits it by hand: yields the arguments of each `attention`, is
        sent its result, and yields the logits last."""
        hidden, shared = self.start(**inputs)
        for layer in self.layers:
            qkv = project(layer, self.config, hidden, shared.cos, shared.sin)
            attended = yield (*qkv, layer.keys, layer.values, *shared[:3])
            hidden = finish(layer, self.config, hidden, attended)
        yield self.logits(hidden)

    @property
    def dummy_slot(self) -> int:
        """Where padding writes."""
        return self.max_batch * self.context

    def input_specs(self) -> dict[str, InputSpec]:
        return {
            "input_ids": InputSpec(torch.int64, ("tokens",)),
            "positions": InputSpec(torch.int64, ("tokens",)),
            "slot_mapping": InputSpec(torch.int64, ("tokens",), pad=self.dummy_slot, index=True),
            "seq_lens": InputSpec(torch.int32, ("tokens",), pad=1),
        }

    def runner(self, mode: str, sizes: list[int], **options: Any) -> GraphRunner:
        """A `GraphRunner` of this model, or of what `forward` makes of it."""
        device = self.embedding.device.type
        return GraphRunner(
            options.pop("forward", self),
            mode=mode,
            sizes=sizes,
            inputs=self.input_specs(),
            outputs=("tokens", self.config.vocab_size),
            max_num_reqs=max(sizes),
            platform=options.pop("platform", device),
            **options,
        )

    def inputs(self, tokens: int) -> dict[str, Tensor]:
        """Seeded inputs of one step, on the host."""
        random = torch.Generator().manual_seed(tokens)
        positions = torch.randint(self.context // 2, self.context, (tokens,), generator=random)
        return {
            "input_ids": torch.randint(0, self.config.vocab_size, (tokens,), generator=random),
            "positions": positions,
            "slot_mapping": torch.arange(tokens) * self.context + positions,
            "seq_lens": (positions + 1).to(torch.int32),
        }

    def bytes_read(self, tokens: int) -> int:
        """What a step must read at least: every weight once (of the embedding table only the rows
        that it needs, unless it is the head too) and the whole context of every request."""
        config, size = self.config, self.config.dtype.itemsize
        weights = sum(weight.numel() for weight in self.parameters())
        if not config.tied_embeddings:
            weights -= self.embedding.numel()
        rows = tokens * config.hidden_size
        cache = (
            config.num_layers * 2 * tokens * config.num_kv_heads * self.context * config.head_dim
        )
        return (weights + rows + cache) * size
