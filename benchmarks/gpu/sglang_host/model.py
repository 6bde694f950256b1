"""A Llama of four layers whose random weights are large enough that tokens depend on attention."""

import json
from pathlib import Path

VOCABULARY = 32000
HIDDEN, INTERMEDIATE, LAYERS, HEADS, KV_HEADS, HEAD = 1024, 3072, 4, 16, 4, 64


def write_model(folder: Path) -> None:
    """Its `config.json` and weights."""
    import torch
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD,
        "intermediate_size": INTERMEDIATE,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(11)

    def drawn(rows: int, columns: int) -> torch.Tensor:
        values = torch.randn((rows, columns), generator=generator) * columns**-0.5
        return values.to(torch.bfloat16)

    ones = torch.ones(HIDDEN, dtype=torch.bfloat16)
    weights = {
        "model.embed_tokens.weight": drawn(VOCABULARY, HIDDEN),
        "lm_head.weight": drawn(VOCABULARY, HIDDEN),
        "model.norm.weight": ones.clone(),
    }
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        weights |= {
            f"{prefix}input_layernorm.weight": ones.clone(),
            f"{prefix}post_attention_layernorm.weight": ones.clone(),
            f"{prefix}self_attn.q_proj.weight": drawn(HEADS * HEAD, HIDDEN),
            f"{prefix}self_attn.k_proj.weight": drawn(KV_HEADS * HEAD, HIDDEN),
            f"{prefix}self_attn.v_proj.weight": drawn(KV_HEADS * HEAD, HIDDEN),
            f"{prefix}self_attn.o_proj.weight": drawn(HIDDEN, HEADS * HEAD),
            f"{prefix}mlp.gate_proj.weight": drawn(INTERMEDIATE, HIDDEN),
            f"{prefix}mlp.up_proj.weight": drawn(INTERMEDIATE, HIDDEN),
            f"{prefix}mlp.down_proj.weight": drawn(HIDDEN, INTERMEDIATE),
        }
    save_file(weights, str(folder / "model.safetensors"), metadata={"format": "pt"})


def prompts(count: int) -> list[list[int]]:
    """Prompts of 5 to 41 tokens."""
    import random

    drawing = random.Random(count)
    return [
        [drawing.randrange(3, VOCABULARY) for _ in range(5 + (7 * index) % 37)]
        for index in range(count)
    ]


def long_prompts(count: int) -> list[list[int]]:
    """Prompts of 60 to 900 tokens, some of which begin alike: they are prefilled in chunks."""
    import random

    drawing = random.Random(count + 1)
    shared = [drawing.randrange(3, VOCABULARY) for _ in range(400)]
    made = []
    for index in range(count):
        begin = shared[: 100 * (index % 5)]
        length = 60 + (137 * index) % 500
        made.append(begin + [drawing.randrange(3, VOCABULARY) for _ in range(length)])
    return made
