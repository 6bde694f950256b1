"""Models of transformers that compiled code refuses: the error says what to do, and that works."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import nn

from graphrt import GraphPool, GraphRunner, Reason
from graphrt.compile import CompileOptions, ReassignedStateError, TraceError, compile_module
from tests.draws import rest_long
from tests.models.caches import LENGTH, full_length_cache, growing_cache, static_cache
from tests.models.families import BATCH, INPUTS, VOCAB, Decoder, prompts_of

transformers = pytest.importorskip("transformers", reason="transformers is not installed")


class Step(nn.Module):
    """A token of each row, behind a prompt."""

    def __init__(self, name: str, new_cache: Callable[[Any], Any]) -> None:
        super().__init__()
        decoder = Decoder(name, "cpu", new_cache)
        self.model, self.cache = decoder.model, decoder.cache
        decoder.prefill(prompts_of(0, 5, "cpu"))

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        outputs = self.model(input_ids[:, None], past_key_values=self.cache, use_cache=True)
        return outputs.logits[:, -1]


class Opt(nn.Module):
    """OPT counts by its cache, unless it is given what it would make of the number."""

    def __init__(self, *, given: bool) -> None:
        super().__init__()
        config = transformers.OPTConfig(
            vocab_size=VOCAB,
            hidden_size=32,
            num_hidden_layers=2,
            ffn_dim=32,
            num_attention_heads=2,
            max_position_embeddings=64,
            word_embed_proj_dim=32,
            pad_token_id=None,
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.model = transformers.OPTForCausalLM(config).eval()
        self.cache, self.given = static_cache(config), given
        self.register_buffer("visible", torch.ones(BATCH, LENGTH))
        self.register_buffer("positions", torch.zeros(BATCH, 1, dtype=torch.int64))
        with torch.no_grad():
            self(torch.arange(BATCH))

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        more: Mapping[str, Any] = {}
        if self.given:
            more = {"attention_mask": self.visible, "position_ids": self.positions}
        outputs = self.model(input_ids[:, None], past_key_values=self.cache, **more)
        self.positions.add_(1)
        return outputs.logits[:, -1]


def serve(model: nn.Module, twin: nn.Module, pieces: bool) -> None:
    """Compile, capture and replay `model` beside its eager `twin`."""
    pool = GraphPool("cpu")
    options = CompileOptions(backend="eager", **({} if pieces else {"splitting_ops": ()}))
    compile_module(model, {}, pool=pool, options=options)
    with GraphRunner(
        model,
        mode="PIECEWISE" if pieces else "FULL",
        sizes=[BATCH],
        inputs=INPUTS,
        outputs=("tokens", VOCAB),
        pool=pool,
    ) as runner:
        runner.capture()
        for step in range(4):
            tokens = torch.arange(BATCH) * 3 + step
            with torch.no_grad():
                expected = twin(tokens)
            torch.testing.assert_close(runner(input_ids=tokens), expected)
            assert runner.last_dispatch.reason is Reason.HIT


KEYS, COUNT = (f"module.cache.layers[0].{name}" for name in ("keys", "cumulative_length_int"))
REFUSED = [
    ("llama", growing_cache, KEYS, False),
    ("llama", growing_cache, KEYS, True),
    ("mistral", growing_cache, KEYS, True),
    ("mistral", static_cache, COUNT, False),
    ("mistral", static_cache, COUNT, True),
    ("gemma3", static_cache, COUNT, True),
]


@pytest.mark.parametrize(
    ("name", "refused", "assigned", "pieces"), rest_long(REFUSED, REFUSED[0], REFUSED[4])
)
def test_a_cache_that_replaces_its_tensors_is_refused_with_advice_that_works(
    name, refused, assigned, pieces
):
    with pytest.raises(ReassignedStateError, match="StaticLayer") as caught:
        serve(Step(name, refused), Step(name, refused), pieces)
    assert assigned in caught.value.names
    serve(Step(name, full_length_cache), Step(name, full_length_cache), pieces)


@pytest.mark.parametrize("pieces", rest_long([False, True], True))
def test_a_model_that_counts_tokens_by_its_cache_is_refused_with_advice_that_works(pieces):
    with pytest.raises(TraceError) as caught:
        serve(Opt(given=False), Opt(given=False), pieces)
    said = str(caught.value)
    assert "attention_mask=" in said and "position_ids=" in said
    serve(Opt(given=True), Opt(given=False), pieces)
