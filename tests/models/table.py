"""Families of transformers through graphrt, as a table: what replays, what is refused.

    python -m tests.models.table [--device cuda] [--jobs 8] [--json FILE] [--columns C ...]
        [FAMILY ...]

Models are tiny and random. Decoders decode 14 tokens for two rows beside an eager twin, which is
fed the same tokens; encoders take batches of 1 to 4. Columns:

- full: one graph for a whole step, over a `StaticCache`;
- full length: the same with cache layers that keep every token, for families that slide;
- pieces: the model's own attention, in plain PyTorch, between two segments by `eager_break`;
- sdpa pieces: the same with PyTorch's SDPA and the mask that transformers makes for it;
- generate: calls of `generate` (greedy, padded, sampled, beams) on `with_graphs`, whose tokens are
  compared with those of the model before, and more families of decoders beside an encoder.

A cell says HIT if every step was replayed and equal, else what graphrt said. Each cell has its own
process, since a wrong graph may end the process on a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch

from graphrt import GraphRTError, GraphRunner, InputSpec, Reason, eager_break
from tests.models.caches import LENGTH, full_length_cache, static_cache
from tests.models.families import FAMILIES, SHARED, VOCAB, WINDOW, Family

ROWS = 2
STEPS = 14
COLUMNS = ("full", "full length", "pieces", "sdpa pieces", "generate")
BROKEN = "graphrt_table_break"

_HEADS = {"head_dim": 16}
_EXPERTS = {"experts_implementation": "batched_mm", "num_experts_per_tok": 2}
_SMALL_EXPERTS = {**_EXPERTS, "moe_intermediate_size": 32}
_ROUTED = {**_SMALL_EXPERTS, "n_routed_experts": 4, "n_group": 1, "topk_group": 1}
_SLIDING = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}

DECODERS = {
    **{name: FAMILIES[name] for name in ("llama", "qwen3", "phi3", "gpt_neox", "olmo2")},
    **{name: FAMILIES[name] for name in ("mixtral", "qwen3_moe", "mistral", "gemma2", "gemma3")},
    "qwen2": Family("Qwen2Config", "Qwen2ForCausalLM"),
    "granite": Family("GraniteConfig", "GraniteForCausalLM"),
    "glm4_moe": Family(
        "Glm4MoeConfig", "Glm4MoeForCausalLM", {**_HEADS, **_ROUTED, "first_k_dense_replace": 1}
    ),
    "deepseek_v3": Family(
        "DeepseekV3Config",
        "DeepseekV3ForCausalLM",
        {
            **_ROUTED,
            "first_k_dense_replace": 1,
            "q_lora_rank": 32,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 16,
            "num_key_value_heads": 4,
        },
    ),
    "qwen3_next": Family(
        "Qwen3NextConfig",
        "Qwen3NextForCausalLM",
        {
            **_HEADS,
            **_SMALL_EXPERTS,
            "num_experts": 4,
            "shared_expert_intermediate_size": 32,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
            "layer_types": ["linear_attention", "full_attention"],
        },
    ),
    "lfm2": Family(
        "Lfm2Config",
        "Lfm2ForCausalLM",
        {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False},
    ),
    "jamba": Family(
        "JambaConfig",
        "JambaForCausalLM",
        {
            **_EXPERTS,
            "num_experts_per_tok": 1,
            "num_experts": 2,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "mamba_d_state": 8,
            "use_mamba_kernels": False,
        },
    ),
    # Keys and states in one layer.
    "falcon_h1": Family(
        "FalconH1Config",
        "FalconH1ForCausalLM",
        {
            "mamba_d_ssm": 64,
            "mamba_n_heads": 4,
            "mamba_d_head": 16,
            "mamba_n_groups": 1,
            "mamba_d_state": 8,
            "mamba_chunk_size": 16,
        },
    ),
    "mamba": Family("MambaConfig", "MambaForCausalLM", {"state_size": 8}),
    "mamba2": Family(
        "Mamba2Config",
        "Mamba2ForCausalLM",
        {"num_heads": 8, "head_dim": 16, "state_size": 8, "n_groups": 1, "expand": 2},
    ),
    "cohere2": Family("Cohere2Config", "Cohere2ForCausalLM", _SLIDING),
    "gpt_oss": Family(
        "GptOssConfig",
        "GptOssForCausalLM",
        {**_HEADS, **_EXPERTS, **_SLIDING, "num_local_experts": 4},
    ),
    "gpt2": Family(
        "GPT2Config",
        "GPT2LMHeadModel",
        {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128, "pad_token_id": 0},
    ),
    "falcon": Family("FalconConfig", "FalconForCausalLM", {"multi_query": True}),
    "opt": Family("OPTConfig", "OPTForCausalLM", {"word_embed_proj_dim": 64, "ffn_dim": 128}),
    "bloom": Family("BloomConfig", "BloomForCausalLM", {"n_layer": 2, "n_head": 4}),
}
ENCODERS = {
    "bert": Family("BertConfig", "BertModel", {"pad_token_id": 0}),
    "modernbert": Family(
        "ModernBertConfig", "ModernBertModel", {"pad_token_id": 0, "local_attention": WINDOW}
    ),
    "vit": Family("ViTConfig", "ViTModel", {"image_size": 32, "patch_size": 8}),
    "clip": Family("CLIPVisionConfig", "CLIPVisionModel", {"image_size": 32, "patch_size": 8}),
}
SPEECH_AND_TEXT = {
    "t5": Family(
        "T5Config",
        "T5ForConditionalGeneration",
        {"d_model": 64, "d_ff": 128, "num_layers": 2, "num_heads": 4, "d_kv": 16}
        | {"pad_token_id": 0, "decoder_start_token_id": 0},
    ),
    "whisper": Family(
        "WhisperConfig",
        "WhisperForConditionalGeneration",
        {"d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "num_mel_bins": 16}
        | {"encoder_attention_heads": 4, "decoder_attention_heads": 4}
        | {"encoder_ffn_dim": 128, "decoder_ffn_dim": 128}
        | {"max_source_positions": 12, "max_target_positions": LENGTH}
        | {"pad_token_id": 0, "decoder_start_token_id": 1},
    ),
}
NAMES = (*DECODERS, *ENCODERS, *SPEECH_AND_TEXT)
SLIDING = ("mistral", "gemma2", "gemma3", "cohere2", "gpt_oss")


@dataclass
class Cell:
    """One family in one column."""

    steps: int = 0
    equal: int = 0
    worst: float = 0.0
    """The largest difference of an output from the eager twin's."""
    reasons: dict[str, int] = field(default_factory=dict)
    findings: list[str] = field(default_factory=list)
    """Errors and warnings of graphrt, or the model's own error."""

    @property
    def text(self) -> str:
        hits = self.reasons.get(Reason.HIT.name, 0)
        if self.steps and self.equal == self.steps == hits and not self.findings:
            return "HIT"
        said = " ".join(self.findings[0].split())[:110] if self.findings else "nothing said"
        wrong = "" if self.equal == self.steps else f"WRONG {self.steps - self.equal}, "
        return f"{wrong}{hits} of {self.steps} replayed: {said}"


def new_model(family: Family, device: str, column: str) -> Any:
    import transformers

    config = getattr(transformers, family.config)(**{**SHARED, **family.extra})
    torch.manual_seed(0)
    model = getattr(transformers, family.model)(config).eval().to(device)
    if column == "pieces":
        model.set_attn_implementation("eager")
        module = sys.modules[type(model).__module__]
        own = getattr(module, "eager_attention_forward", None)
        if own is not None and not hasattr(own, "__wrapped__"):
            module.eager_attention_forward = eager_break(own)
    elif column == "sdpa pieces":
        model.set_attn_implementation(BROKEN)
    return model


def register_break() -> None:
    """The attention `BROKEN`: transformers' own over PyTorch's SDPA, between two segments."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(BROKEN, eager_break(sdpa_attention_forward))
    AttentionMaskInterface.register(BROKEN, sdpa_mask)


Step = Callable[[torch.Tensor], torch.Tensor]


def decoder_step(name: str, device: str, column: str) -> Step:
    """A decode step of `ROWS` tokens, after an eager prompt."""
    model = new_model(DECODERS[name], device, column)
    prompt = _random((ROWS, 5), device)
    if name.startswith("mamba"):
        cache = model(prompt, use_cache=True).cache_params
        return lambda tokens: model(tokens[:, None], cache_params=cache).logits[:, -1]
    full_length = name in SLIDING and column != "full"
    cache = (full_length_cache if full_length else static_cache)(model.config)
    model(prompt, past_key_values=cache, use_cache=True)
    return lambda tokens: model(tokens[:, None], past_key_values=cache).logits[:, -1]


def speech_or_text_step(name: str, device: str, column: str) -> Step:
    """A step of the decoder beside an encoder that has run."""
    from transformers import EncoderDecoderCache, StaticCache

    model = new_model(SPEECH_AND_TEXT[name], device, column)
    if name == "t5":
        states = model.get_encoder()(_random((ROWS, 6), device)).last_hidden_state
    else:
        generator = torch.Generator().manual_seed(1)
        sound = torch.randn(ROWS, 16, 24, generator=generator).to(device)
        states = model.get_encoder()(sound).last_hidden_state
    length = states.shape[1]
    cache = EncoderDecoderCache(
        static_cache(model.config), StaticCache(config=model.config, max_cache_len=length)
    )
    call = {"encoder_outputs": (states,), "past_key_values": cache, "use_cache": True}
    model(decoder_input_ids=_random((ROWS, 3), device), **call)
    return lambda tokens: model(decoder_input_ids=tokens[:, None], **call).logits[:, -1]


def encoder_step(name: str, device: str, column: str) -> Step:
    model = new_model(ENCODERS[name], device, column)
    return lambda rows: model(rows).last_hidden_state


def _random(shape: tuple[int, ...], device: str, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCAB, shape, generator=generator).to(device)


def batches(name: str, device: str) -> Iterator[torch.Tensor]:
    """The inputs of an encoder's steps: tokens `(rows, 10)` or pictures."""
    for step in range(STEPS):
        rows = step % 4 + 1
        if name in ("vit", "clip"):
            generator = torch.Generator().manual_seed(step)
            yield torch.randn(rows, 3, 32, 32, generator=generator).to(device)
        else:
            yield _random((rows, 10), device, step)


@torch.no_grad()
def run(name: str, device: str, column: str) -> Cell:
    register_break()
    torch.backends.cuda.matmul.allow_tf32 = False
    cell = Cell()
    mode = "PIECEWISE" if column.endswith("pieces") else "FULL"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            if column == "generate":
                _generate(name, device, cell)
            elif name in ENCODERS:
                _encode(name, device, column, mode, cell)
            else:
                _decode(name, device, column, mode, cell)
        except GraphRTError as error:
            cell.findings.append(f"{type(error).__name__}: {error}")
        except Exception as error:
            cell.findings.append(f"the model's own {type(error).__name__}: {error}")
    cell.findings += [
        f"{each.category.__name__}: {each.message}"
        for each in caught
        if each.category.__module__.startswith("graphrt")
    ]
    return cell


def _encode(name: str, device: str, column: str, mode: str, cell: Cell) -> None:
    served, twin = encoder_step(name, device, column), encoder_step(name, device, column)
    first = next(batches(name, device))
    spec = InputSpec(first.dtype, ("tokens", *first.shape[1:]))
    # A name of its own: parameters of the models differ.
    with GraphRunner(
        lambda rows: served(rows),
        inputs={"rows": spec},
        mode=mode,
        sizes=[1, 2, 4],
        platform=torch.device(device).type,
    ) as runner:
        runner.capture()
        for rows in batches(name, device):
            _compare(cell, runner(rows=rows), twin(rows))
        _count(cell, runner)


def _decode(name: str, device: str, column: str, mode: str, cell: Cell) -> None:
    make = speech_or_text_step if name in SPEECH_AND_TEXT else decoder_step
    served, twin = make(name, device, column), make(name, device, column)
    with GraphRunner(
        lambda input_ids: served(input_ids),
        inputs={"input_ids": InputSpec(torch.int64, ("tokens",))},
        outputs=("tokens", VOCAB),
        mode=mode,
        sizes=[ROWS],
        platform=torch.device(device).type,
    ) as runner:
        runner.capture()
        tokens = _random((ROWS,), device, 3)
        for _ in range(STEPS):
            expected = twin(tokens)
            _compare(cell, runner(input_ids=tokens), expected)
            tokens = expected.argmax(-1)
        _count(cell, runner)


def _generate(name: str, device: str, cell: Cell) -> None:
    from graphrt.hosts.transformers import graphs_of, with_graphs
    from tests.models import generating

    model = generating.new_model(name, device)
    expected = {way: call(model, name, device) for way, call in generating.WAYS.items()}
    with_graphs(model, max_batch=4, max_len=32)
    for way, call in generating.WAYS.items():
        cell.steps += generating.STEPS[way]
        cell.equal += generating.STEPS[way] * torch.equal(call(model, name, device), expected[way])
    report = graphs_of(model).report()
    cell.reasons = {Reason.HIT.name: report.served, **report.eager}
    cell.findings += [] if report.refused is None else [report.refused]


def _compare(cell: Cell, got: torch.Tensor, expected: torch.Tensor) -> None:
    """Tokens for decoders, rounding for encoders: of other matrix shapes, kernels differ."""
    cell.steps += 1
    difference = (got - expected).abs().max().item()
    cell.worst = max(cell.worst, difference)
    same_tokens = expected.dim() == 2 and torch.equal(got.argmax(-1), expected.argmax(-1))
    cell.equal += same_tokens or difference < 5e-3


def _count(cell: Cell, runner: GraphRunner) -> None:
    reasons = runner.report().reasons
    cell.reasons = {reason.name: count for reason, count in reasons.items() if count}


def cell_in_process(name: str, device: str, column: str) -> Cell:
    """The cell, from a process of its own."""
    command = [sys.executable, "-m", "tests.models.table", "--device", device]
    command += ["--cell", column, name]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TRANSFORMERS_VERBOSITY": "error"}
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=240, env=environment, check=False
        )
    except subprocess.TimeoutExpired:
        return Cell(findings=["no answer in 240 s"])
    lines = done.stdout.splitlines()
    if done.returncode or not lines:
        return Cell(findings=[f"process ended with {done.returncode}: {done.stderr[-200:]}"])
    return Cell(**json.loads(lines[-1]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("families", nargs="*", metavar="FAMILY")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time")
    parser.add_argument("--json", help="file for the cells")
    parser.add_argument("--columns", nargs="+", choices=COLUMNS, default=COLUMNS)
    parser.add_argument("--cell", choices=COLUMNS, help="one cell, in this process, as JSON")
    arguments = parser.parse_args()
    if arguments.cell:
        cell = run(arguments.families[0], arguments.device, arguments.cell)
        print(json.dumps(cell.__dict__))
        return
    from tests.models.generating import GENERATING

    families = arguments.families or [*NAMES, *(name for name in GENERATING if name not in NAMES)]
    cells = [
        (name, column)
        for name in families
        for column in arguments.columns
        if (name in GENERATING if column == "generate" else name in NAMES)
        and (column != "full length" or name in SLIDING)
    ]
    with ThreadPoolExecutor(arguments.jobs) as pool:
        rows = zip(
            cells,
            pool.map(lambda cell: cell_in_process(cell[0], arguments.device, cell[1]), cells),
            strict=True,
        )
        shown = {}
        print(f"torch {torch.__version__}, {arguments.device}, {ROWS} rows, {STEPS} steps")
        for (name, column), cell in rows:
            shown[f"{name} {column}"] = cell.__dict__
            print(f"{name:<12} {column:<12} {cell.worst:>8.1e}  {cell.text}", flush=True)
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump(shown, file, indent=1)


if __name__ == "__main__":
    main()
