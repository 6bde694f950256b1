"""Decoders of transformers, tiny and seeded, decoding through a runner beside an eager twin.

`python -m tests.models.families --device cuda` decodes with all of them and prints a table.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch

from graphrt import GraphOptions, GraphRTError, GraphRunner, Host, InputSpec, Reason
from tests.models.caches import full_length_cache, growing_cache, ring_cache, static_cache

BATCH = 4
VOCAB = 256
WINDOW = 8
STEPS = 24
INPUTS = {"input_ids": InputSpec(torch.int64, ("tokens",))}


@dataclass(frozen=True)
class Family:
    """Names of classes in transformers, what its tiny config needs besides `SHARED`, and the
    attribute of its cache layers that a graph cannot follow, if there is one."""

    config: str
    model: str
    extra: Mapping[str, object] = field(default_factory=dict)
    moving: str | None = None

    @property
    def sliding(self) -> bool:
        return self.moving is not None


# Weights far from 0, so that a token depends on all that was said before.
SHARED = MappingProxyType(
    {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "initializer_range": 0.2,
        "tie_word_embeddings": False,
        "pad_token_id": None,
        "bos_token_id": None,
        "eos_token_id": None,
    }
)
_HEADS = {"head_dim": 16}
_GEMMA = {
    **_HEADS,
    "query_pre_attn_scalar": 16,
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention"],
}
# The loop over experts asks the host which of them were hit; this one does not, and `generate()`
# switches to it for decoding.
_EXPERTS = {"experts_implementation": "batched_mm"}
_LENGTH = "cumulative_length_int"

FAMILIES = {
    "llama": Family("LlamaConfig", "LlamaForCausalLM"),
    "qwen3": Family("Qwen3Config", "Qwen3ForCausalLM", _HEADS),
    "mixtral": Family("MixtralConfig", "MixtralForCausalLM", {**_EXPERTS, "num_local_experts": 4}),
    "qwen3_moe": Family(
        "Qwen3MoeConfig",
        "Qwen3MoeForCausalLM",
        {
            **_HEADS,
            **_EXPERTS,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
        },
    ),
    "gpt_neox": Family("GPTNeoXConfig", "GPTNeoXForCausalLM", {"num_key_value_heads": 4}),
    "phi3": Family("Phi3Config", "Phi3ForCausalLM"),
    "olmo2": Family("Olmo2Config", "Olmo2ForCausalLM"),
    "mistral": Family("MistralConfig", "MistralForCausalLM", {"sliding_window": WINDOW}, _LENGTH),
    "gemma2": Family("Gemma2Config", "Gemma2ForCausalLM", _GEMMA, _LENGTH),
    "gemma3": Family("Gemma3TextConfig", "Gemma3ForCausalLM", _GEMMA, _LENGTH),
}
_ROPE = {"factor": 2.0, "rope_theta": 1e4}
_LONG_ROPE = {
    **_ROPE,
    "rope_type": "longrope",
    "original_max_position_embeddings": 16,
    "short_factor": [1.0] * 8,
    "long_factor": [3.0] * 8,
}
# Frequencies that change when a sequence grows past 16 tokens: asked of the host, or in a tensor.
ROPES = {
    "llama, dynamic rope": Family(
        "LlamaConfig",
        "LlamaForCausalLM",
        {"rope_parameters": {**_ROPE, "rope_type": "dynamic"}, "max_position_embeddings": 16},
    ),
    "llama, longrope": Family("LlamaConfig", "LlamaForCausalLM", {"rope_parameters": _LONG_ROPE}),
}
CLEAN = tuple(name for name, family in FAMILIES.items() if not family.sliding)
SLIDING = tuple(name for name, family in FAMILIES.items() if family.sliding)


class Decoder:
    """A model of a family, its weights always the same, and its cache of `BATCH` rows."""

    def __init__(self, name: str, device: str, new_cache: Callable[[Any], Any] | None = None):
        """`new_cache(config)` makes the cache; by default it is transformers' `StaticCache`."""
        import transformers

        family = (FAMILIES | ROPES)[name]
        config = getattr(transformers, family.config)(**{**SHARED, **family.extra})
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.model = getattr(transformers, family.model)(config).eval().to(device)
        self.device = device
        self.cache = static_cache(config) if new_cache is None else new_cache(config)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Logits `(BATCH, VOCAB)` of the next tokens, of one token `(BATCH,)` of each row."""
        return self.prefill(input_ids.unsqueeze(1))

    def prefill(self, prompts: torch.Tensor) -> torch.Tensor:
        """Logits `(BATCH, VOCAB)` of the next tokens, of prompts `(BATCH, length)`."""
        with torch.no_grad():
            return self.model(prompts, past_key_values=self.cache, use_cache=True).logits[:, -1]


def make_tensors(decoder: Decoder) -> None:
    """What a host does that captures before the first prompt."""
    config = decoder.model.config
    heads, width = config.num_key_value_heads, config.hidden_size // config.num_attention_heads
    decoder.cache.early_initialization(BATCH, heads, width, torch.float32, decoder.device)


def prompts_of(seed: int, length: int, device: str) -> torch.Tensor:
    """`(BATCH, length)` random tokens."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(VOCAB, (BATCH, length), generator=generator).to(device)


@dataclass
class Outcome:
    """What decoding through a runner gave, step by step against the eager twin."""

    steps: int = 0
    equal: int = 0
    """Steps whose tokens were the twin's."""
    distinct: int = 0
    """Different tokens among all that the twin gave: a decode that repeats itself proves little."""
    worst: float = 0.0
    """The largest difference of a logit."""
    findings: list[str] = field(default_factory=list)
    """Warnings and errors of graphrt."""
    reasons: dict[Reason, int] = field(default_factory=dict)
    captured: int = 0

    def row(self, name: str) -> str:
        reasons = ", ".join(f"{reason.name} {count}" for reason, count in self.reasons.items())
        found = "; ".join(" ".join(finding.split())[:160] for finding in self.findings) or "none"
        return (
            f"{name:<24} {self.steps:>5} {self.equal:>5} {self.distinct:>8} {self.worst:>9.1e}  "
            f"{reasons or 'none':<24}  {found}"
        )


HEADER = f"{'family':<24} {'steps':>5} {'equal':>5} {'distinct':>8} {'worst':>9}  reasons, findings"


def decode(
    name: str,
    device: str,
    *,
    prompt_length: int = 5,
    capture_first: bool = False,
    new_cache: Callable[[Any], Any] | None = None,
    host: Callable[[Decoder], Host] | None = None,
    steps: int = STEPS,
    **options: Any,
) -> Outcome:
    """Decode twice `steps` tokens for `BATCH` rows: prompts eagerly, then step by step through one
    runner's graph, captured after the first prompt or before it; the cache is reset in between.

    The twin's tokens are fed to both, so that each step is judged by itself. `options` are those of
    `GraphOptions`.
    """
    served, twin = Decoder(name, device, new_cache), Decoder(name, device, new_cache)
    outcome = Outcome()
    runner = GraphRunner(
        served.forward,
        inputs=INPUTS,
        outputs=("tokens", VOCAB),
        mode="FULL",
        sizes=[BATCH],
        host=None if host is None else host(served),
        options=GraphOptions(**options),
        platform=torch.device(device).type,
    )
    with runner, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for seed in range(2):
            prompts = prompts_of(seed, prompt_length, device)
            tokens = twin.prefill(prompts).argmax(-1)
            try:
                if seed == 0 and capture_first:
                    make_tensors(served)
                    runner.capture()
                served.prefill(prompts)
                if seed == 0 and not capture_first:
                    runner.capture()
                _steps(runner, twin, tokens, outcome, steps)
            except GraphRTError as error:
                outcome.findings.append(f"{type(error).__name__}: {error}")
                break
            served.cache.reset()
            twin.cache.reset()
        report = runner.report()
    outcome.reasons = {reason: count for reason, count in report.reasons.items() if count}
    outcome.captured = len(report.graphs)
    outcome.findings += [
        f"{each.category.__name__}: {each.message}"
        for each in caught
        if each.category.__module__.startswith("graphrt")
    ]
    return outcome


def _steps(
    runner: GraphRunner, twin: Decoder, tokens: torch.Tensor, outcome: Outcome, steps: int
) -> None:
    seen = set()
    for _ in range(steps):
        expected = twin.forward(tokens)
        got = runner(input_ids=tokens)
        outcome.steps += 1
        outcome.worst = max(outcome.worst, (got - expected).abs().max().item())
        outcome.equal += torch.equal(got.argmax(-1), expected.argmax(-1))
        tokens = expected.argmax(-1)
        seen.update(tokens.tolist())
    outcome.distinct = max(outcome.distinct, len(seen))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--check", help="a level of GraphOptions(check=), where there is one")
    arguments = parser.parse_args()
    import transformers

    options = {} if arguments.check is None else {"check": arguments.check}
    print(f"torch {torch.__version__}, transformers {transformers.__version__}, {arguments.device}")
    print(HEADER)
    device = arguments.device
    for name in (*CLEAN, *ROPES):
        _show(name, "", device, **options)
    _show("llama", ", growing cache", device, new_cache=growing_cache, **options)
    for name in SLIDING:
        _show(name, ", full length", device, new_cache=full_length_cache, **options)
        _show(name, ", ring", device, new_cache=ring_cache, **options)
        _show(name, ", window full", device, prompt_length=WINDOW + 4, **options)
    # Last: a wrong graph of these writes out of bounds, after which no GPU answers any more.
    for name in SLIDING:
        _show(name, "", device, **options)


def _show(name: str, what: str, device: str, **more: Any) -> None:
    try:
        row = decode(name, device, **more).row(name + what)
    except (RuntimeError, IndexError) as error:
        # What a wrong graph may well end in: the other rows are still of interest.
        row = f"{name + what:<24} {type(error).__name__}: {' '.join(str(error).split())[:160]}"
    print(row, flush=True)


if __name__ == "__main__":
    main()
