"""Decoders of transformers, compiled as they are: one graph, and pieces around their attention."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import graphrt
from graphrt import Batch, GraphPool, GraphRunner, InputSpec
from graphrt.compile import CompiledModule, CompileOptions, compile_module
from tests.draws import rest_long
from tests.models.families import FAMILIES, SHARED, VOCAB, Family

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

_EXPERTS = {"experts_implementation": "batched_mm"}
_GPT2 = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128, "vocab_size": VOCAB}
WANTED: dict[str, Family] = {
    name: FAMILIES[name]
    for name in ("llama", "qwen3", "mistral", "gemma2", "gemma3", "mixtral", "qwen3_moe")
}
WANTED["gpt2"] = Family("GPT2Config", "GPT2LMHeadModel", _GPT2)
LAYERS = 2
SIZES = (1, 2, 4, 12)  # past the windows of those that slide
NAME = "graphrt_families"


@graphrt.opaque("graphrt_families::attend", mutates=["out"])
def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    scaling: float,
    window: int,
    softcap: float,
) -> None:
    """Causal attention of `(batch, heads, tokens, width)`; 0 stands for no window, no cap."""
    groups = query.shape[1] // key.shape[1]
    scores = query @ key.repeat_interleave(groups, 1).transpose(2, 3) * scaling
    if softcap:
        scores = torch.tanh(scores / softcap) * softcap
    place = torch.arange(query.shape[2], device=query.device)
    apart = place[:, None] - place
    hidden = (apart < 0) | ((apart >= window) if window else False)
    weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
    out.copy_((weights @ value.repeat_interleave(groups, 1)).transpose(1, 2))


def as_interface(module: Any, query: Any, key: Any, value: Any, mask: Any, **more: Any) -> Any:
    """`attend` as transformers calls attention."""
    batch, heads, tokens, width = query.shape
    out = query.new_empty(batch, tokens, heads, width)
    scaling = more.get("scaling")
    attend(
        query,
        key,
        value,
        out,
        width**-0.5 if scaling is None else scaling,
        more.get("sliding_window") or 0,
        more.get("softcap") or 0.0,
    )
    return out, None


class Served(nn.Module):
    """Logits `(tokens, VOCAB)` of one sequence `(tokens,)`."""

    def __init__(self, name: str, attention: str | None = None) -> None:
        super().__init__()
        family = WANTED[name]
        config = getattr(transformers, family.config)(**{**SHARED, **family.extra})
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.model = getattr(transformers, family.model)(config)
        if attention is not None:
            self.model.set_attn_implementation(attention)
        self.eval()

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids.unsqueeze(0), use_cache=False).logits[0]


@pytest.fixture(scope="module", autouse=True)
def interface() -> None:
    transformers.AttentionInterface.register(NAME, as_interface)


def ids(count: int) -> torch.Tensor:
    return torch.arange(count) * 7 % VOCAB


def compiled_of(model: Served, **options: Any) -> CompiledModule:
    return compile_module(model, ["input_ids"], options=CompileOptions(**options), in_place=False)


def assert_as_eager(model: Served, compiled: CompiledModule, tolerance: float) -> None:
    with torch.no_grad():
        for size in (12, *SIZES):
            got, expected = compiled(ids(size)), model(ids(size))
            if tolerance:
                torch.testing.assert_close(got, expected, atol=tolerance, rtol=tolerance)
            else:
                assert torch.equal(got, expected), size


@pytest.mark.parametrize("name", rest_long(WANTED, "mixtral"))
def test_a_transformers_model_compiles_into_a_single_graph(name):
    model = Served(name)
    compiled = compiled_of(model, splitting_ops=[])
    assert_as_eager(model, compiled, 0.0)
    assert (compiled.figures.pieces, compiled.figures.splitting_pieces) == (1, 0)


@pytest.mark.parametrize("name", rest_long(WANTED, "gpt2"))
def test_a_transformers_model_is_split_into_pieces_around_attention(name):
    model = Served(name, NAME)
    with torch.no_grad():
        # The default one leaves a softcap out in some versions of transformers (5.17).
        plain = Served(name, "eager")(ids(12))
        torch.testing.assert_close(model(ids(12)), plain, atol=1e-4, rtol=1e-4)
    compiled = compiled_of(model)
    assert_as_eager(model, compiled, 0.0)
    figures = compiled.figures
    assert (figures.pieces, figures.splitting_pieces) == (LAYERS + 1, LAYERS)


@pytest.mark.long
@pytest.mark.parametrize("attention", [None, NAME])
@pytest.mark.parametrize("name", WANTED)
def test_a_transformers_model_compiled_by_inductor_is_near_eager(name, attention):
    model = Served(name, attention)
    ops = [] if attention is None else None
    compiled = compiled_of(model, backend="inductor", splitting_ops=ops)
    assert_as_eager(model, compiled, 1e-4)
    assert compiled.figures.pieces == (1 if attention is None else LAYERS + 1)


# Of Gemma 2 one layer slides, and scores are capped.
@pytest.mark.parametrize("name", rest_long(WANTED, "gemma2"))
def test_full_piecewise_and_eager_mode_share_the_same_compiled_pieces(name):
    model, pool = Served(name, NAME), GraphPool("cpu")
    with torch.no_grad():
        expected = {size: model(ids(size)) for size in SIZES}
    compiled = compile_module(
        model, ["input_ids"], pool=pool, options=CompileOptions(backend="eager")
    )
    for mode in ("FULL", "PIECEWISE", "NONE"):
        with GraphRunner(
            model,
            mode=mode,
            sizes=SIZES,
            inputs={"input_ids": InputSpec(torch.int64, ("tokens",))},
            outputs=("tokens", VOCAB),
            pool=pool,
        ) as runner:
            runner.capture()
            for size in SIZES:
                batch = Batch(size, 1, None) if size > 1 else Batch(1, 1, 1)
                output = runner(batch, input_ids=ids(size))
                assert torch.equal(output, expected[size]), (mode, size)
            hits = runner.report().reasons
            assert mode == "NONE" or hits[graphrt.Reason.HIT] == len(SIZES)
    assert compiled.figures.pieces == LAYERS + 1


class WithStaticCache(nn.Module):
    """A decode step of `ROWS` tokens with transformers' own cache: no other number goes through."""

    ROWS = 3

    def __init__(self) -> None:
        super().__init__()
        self.model = Served("llama").model
        config = self.model.config
        self.cache = transformers.StaticCache(config=config, max_cache_len=32)
        width = config.hidden_size // config.num_attention_heads
        self.cache.early_initialization(
            self.ROWS, config.num_key_value_heads, width, torch.float32, "cpu"
        )

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        outputs = self.model(input_ids[:, None], past_key_values=self.cache, use_cache=True)
        return outputs.logits[:, -1]


def test_a_static_cache_of_a_single_batch_size_is_served():
    model, original, pool = WithStaticCache(), WithStaticCache(), GraphPool("cpu")
    options = CompileOptions(backend="eager", splitting_ops=())
    compiled = compile_module(model, {}, pool=pool, options=options, in_place=False)
    with GraphRunner(
        compiled,
        mode="FULL",
        sizes=[WithStaticCache.ROWS],
        inputs={"input_ids": InputSpec(torch.int64, ("tokens",))},
        outputs=("tokens", VOCAB),
        pool=pool,
    ) as runner:
        runner.capture()
        for step in range(6):
            tokens = ids(WithStaticCache.ROWS) + step
            with torch.no_grad():
                expected = original(tokens)
            torch.testing.assert_close(runner(input_ids=tokens), expected)
            assert runner.last_dispatch.mode is graphrt.GraphMode.FULL
