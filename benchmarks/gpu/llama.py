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


@dataclass(frozen=True)
class Config:
    """The shape of a model."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    vocab: int
    tied: bool
    dtype: torch.dtype = torch.bfloat16


CONFIGS = {
    "tiny": Config(64, 3, 4, 2, 16, 128, 512, True, torch.float32),
    "small": Config(256, 16, 8, 4, 32, 512, 2048, True, torch.float32),
    "1b": Config(2048, 16, 32, 8, 64, 8192, 128256, True),
    "8b": Config(4096, 32, 32, 8, 128, 14336, 128256, False),
}
EPS, THETA = 1e-5, 500_000.0


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
    tokens, heads, head_dim = query.shape
    kv_heads = key.shape[1]
    keys[rows, :, columns] = key
    values[rows, :, columns] = value
    # The heads of one group are the "sequence" here: grouped queries need no repeated keys.
    grouped = query.view(tokens, kv_heads, heads // kv_heads, head_dim)
    attended = F.scaled_dot_product_attention(
        grouped, keys[:tokens], values[:tokens], attn_mask=visible
    )
    return attended.reshape(tokens, heads * head_dim)


attention = eager_break(attend)


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
    """What stands before and after the attention of one layer, and the cache of it."""

    def __init__(self, config: Config, new: Any, cache_shape: tuple[int, ...]) -> None:
        super().__init__()
        self.config = config
        width = (config.heads + 2 * config.kv_heads) * config.head_dim
        self.qkv = new(width, config.hidden)
        self.out = new(config.hidden, config.heads * config.head_dim)
        self.gate_up = new(2 * config.inner, config.hidden)
        self.down = new(config.hidden, config.inner)
        self.norm = new(config.hidden, ones=True)
        self.mlp_norm = new(config.hidden, ones=True)
        # Tensors of their own: a compiler sees that writing one leaves the others alone.
        self.register_buffer("keys", new(*cache_shape, std=0.5).data)
        self.register_buffer("values", new(*cache_shape, std=0.5).data)

    def project(self, hidden: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value, rotated: [tokens, heads or kv_heads, head_dim]."""
        config = self.config
        qkv = F.linear(F.rms_norm(hidden, (config.hidden,), self.norm, EPS), self.qkv)
        sizes = [config.heads, config.kv_heads, config.kv_heads]
        query, key, value = qkv.view(len(hidden), -1, config.head_dim).split(sizes, dim=1)
        return rotate(query, cos, sin), rotate(key, cos, sin), value

    def finish(self, hidden: Tensor, attended: Tensor) -> Tensor:
        """`hidden` with the attention and the MLP added."""
        hidden = hidden + F.linear(attended, self.out)
        normed = F.rms_norm(hidden, (self.config.hidden,), self.mlp_norm, EPS)
        gate, up = F.linear(normed, self.gate_up).chunk(2, dim=-1)
        return hidden + F.linear(F.silu(gate) * up, self.down)


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = heads.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


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

        cache_shape = (max_batch + 1, config.kv_heads, context, config.head_dim)
        self.embedding = new(config.vocab, config.hidden)
        self.layers = nn.ModuleList(Layer(config, new, cache_shape) for _ in range(config.layers))
        self.norm = new(config.hidden, ones=True)
        self.head = self.embedding if config.tied else new(config.vocab, config.hidden)
        places = torch.arange(context, device=device)
        exponents = torch.arange(0, config.head_dim, 2, device=device) / config.head_dim
        angles = places[:, None] * THETA**-exponents
        self.register_buffer("places", places)
        self.register_buffer("rope", torch.stack((angles.cos(), angles.sin())).to(config.dtype))

    def start(
        self, input_ids: Tensor, positions: Tensor, slot_mapping: Tensor, seq_lens: Tensor
    ) -> tuple[Tensor, Shared]:
        """The embedded tokens and what all layers read."""
        rows, columns = slot_mapping // self.context, slot_mapping % self.context
        visible = (self.places < seq_lens[:, None])[:, None, None]
        cos, sin = self.rope[:, positions, None]
        return self.embedding[input_ids], Shared(rows, columns, visible, cos, sin)

    def logits(self, hidden: Tensor) -> Tensor:
        return F.linear(F.rms_norm(hidden, (self.config.hidden,), self.norm, EPS), self.head)

    def forward(
        self, input_ids: Tensor, positions: Tensor, slot_mapping: Tensor, seq_lens: Tensor
    ) -> Tensor:
        """All inputs are [tokens]; `seq_lens` int32 counts this token, the others are int64."""
        hidden, shared = self.start(input_ids, positions, slot_mapping, seq_lens)
        for layer in self.layers:
            qkv = layer.project(hidden, shared.cos, shared.sin)
            attended = self.attention(*qkv, layer.keys, layer.values, *shared[:3])
            hidden = layer.finish(hidden, attended)
        return self.logits(hidden)

    def stages(self, **inputs: Tensor) -> Iterator[Any]:
        """The same step for who splits it by hand: yields the arguments of each `attention`, is
        sent its result, and yields the logits last."""
        hidden, shared = self.start(**inputs)
        for layer in self.layers:
            qkv = layer.project(hidden, shared.cos, shared.sin)
            attended = yield (*qkv, layer.keys, layer.values, *shared[:3])
            hidden = layer.finish(hidden, attended)
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
            outputs=("tokens", self.config.vocab),
            max_num_reqs=max(sizes),
            platform=options.pop("platform", device),
            **options,
        )

    def inputs(self, tokens: int) -> dict[str, Tensor]:
        """Seeded inputs of one step, on the host."""
        random = torch.Generator().manual_seed(tokens)
        positions = torch.randint(self.context // 2, self.context, (tokens,), generator=random)
        return {
            "input_ids": torch.randint(0, self.config.vocab, (tokens,), generator=random),
            "positions": positions,
            "slot_mapping": torch.arange(tokens) * self.context + positions,
            "seq_lens": (positions + 1).to(torch.int32),
        }

    def bytes_read(self, tokens: int) -> int:
        """What a step must read at least: every weight once (of the embedding table only the rows
        that it needs, unless it is the head too) and the whole context of every request."""
        config, size = self.config, self.config.dtype.itemsize
        weights = sum(weight.numel() for weight in self.parameters())
        if not config.tied:
            weights -= self.embedding.numel()
        rows = tokens * config.hidden
        cache = config.layers * 2 * tokens * config.kv_heads * self.context * config.head_dim
        return (weights + rows + cache) * size
