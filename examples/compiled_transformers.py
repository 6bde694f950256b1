"""A decoder of transformers, compiled into pieces around an attention operator of one's own.

    model = AutoModelForCausalLM.from_config(...)
    decode = Decode(model.eval(), rows=2, length=512)
    logits = decode.prefill(prompts, mask)
    runner = serve(decode, rows=2, mode="FULL_AND_PIECEWISE", device="cpu")
    logits = runner(input_ids=logits.argmax(-1))

Put your kernel in place of the body of `attend`, and let it raise for arguments that it does not
take. Register the mask function with the attention: without it there is no mask at all, and nothing
finds that later. Mixtures of experts need `experts_implementation="batched_mm"`, as their loop asks
the host. docs/how-to/compile.md says the rest; this file is run by
tests/compile/test_transformers_example.py.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import Cache, StaticLayer
from transformers.masking_utils import sdpa_mask

import graphrt
from graphrt import CompileOptions, GraphPool, GraphRunner, InputSpec


@graphrt.opaque("mine::attend", mutates=["out"])
def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    mask: Tensor | None,
    sinks: Tensor | None,
    bias: Tensor | None,
    scaling: float,
    softcap: float,
) -> None:
    groups = query.shape[1] // key.shape[1]
    scores = (query @ key.repeat_interleave(groups, 1).transpose(2, 3)).float() * scaling
    if softcap:
        scores = torch.tanh(scores / softcap) * softcap
    if bias is not None:
        scores = scores + bias
    if mask is not None and mask.dtype is not torch.bool:
        scores = scores + mask
    elif mask is not None:
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    if sinks is not None:  # one more place to look at, which has no value
        scores = torch.cat([scores, sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)], -1)
    weights = scores.softmax(-1)[..., : key.shape[2]].to(value.dtype)
    out.copy_((weights @ value.repeat_interleave(groups, 1)).transpose(1, 2))


def attention(
    module,
    query,
    key,
    value,
    attention_mask,
    *,
    scaling=None,
    softcap=None,
    s_aux=None,  # sinks
    position_bias=None,
    is_causal=None,
    dropout=0.0,
    output_attentions=None,
    sliding_window=None,  # the mask has it
    position_ids=None,  # query and key have them
    use_cache=None,  # these two are about the model
    output_router_logits=None,
):
    # No **more: a keyword of another model is a TypeError, and not left out in silence.
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if dropout or output_attentions or (attention_mask is None and causal and query.shape[2] > 1):
        raise ValueError("the operator drops nothing, returns no weights, and needs a mask")
    batch, heads, tokens, width = query.shape
    out = query.new_empty(batch, tokens, heads, value.shape[-1])
    scaling = width**-0.5 if scaling is None else scaling
    attend(query, key, value, out, attention_mask, s_aux, position_bias, scaling, softcap or 0.0)
    return out, None


def mask(*args, **more):
    return sdpa_mask(*args, **{**more, "allow_is_causal_skip": False})


AttentionInterface.register("mine", attention)
AttentionMaskInterface.register("mine", mask)  # without it `attention_mask` is None for ever


class Decode(nn.Module):
    """A token for each row. Prompts run eagerly; steps read and write the same tensors always."""

    def __init__(self, model, rows, length):
        super().__init__()
        model.set_attn_implementation("mine")
        layers = model.config.get_text_config().num_hidden_layers
        self.model = model
        # Layers that slide count in a Python number; these keep every token, and the mask slides.
        self.cache = Cache(layers=[StaticLayer(max_cache_len=length) for _ in range(layers)])
        self.register_buffer("visible", torch.ones(rows, length, dtype=torch.bool))
        self.register_buffer("positions", torch.zeros(rows, 1, dtype=torch.int64))

    @torch.no_grad()
    def prefill(self, prompts, mask):
        """Logits after prompts; `mask` is 0 where they are padded, on the left."""
        self.cache.reset()
        self.visible.fill_(True)[:, : mask.shape[1]] = mask
        self.positions.copy_(mask.sum(1, keepdim=True))
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        return self._logits(prompts, positions)

    def forward(self, input_ids):
        logits = self._logits(input_ids[:, None], self.positions)
        self.positions.add_(1)
        return logits

    def _logits(self, tokens, positions):
        outputs = self.model(
            tokens,
            attention_mask=self.visible,
            position_ids=positions,
            past_key_values=self.cache,
            use_cache=True,
        )
        return outputs.logits[:, -1]


def serve(decode, rows, mode, device, backend="eager"):
    """After the first `prefill`, which makes the tensors of the cache."""
    pool, vocabulary = GraphPool(device), decode.model.config.vocab_size
    options = CompileOptions(backend=backend)
    graphrt.compile(decode, dynamic_dims={}, pool=pool, options=options)
    runner = GraphRunner(
        decode,
        mode=mode,
        sizes=[rows],
        inputs={"input_ids": InputSpec(torch.int64, ("tokens",))},
        outputs=("tokens", vocabulary),
        pool=pool,
    )
    runner.capture()
    return runner
