"""The Llama that all engines run: its files, a LoRA adapter, and weights that matter."""

import json
from pathlib import Path
from typing import Any

VOCABULARY = 32000


def write_model(
    folder: Path, layers: int = 4, *, hidden: int = 1024, heads: int = 16, intermediate: int = 3072
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads // 4,
        "head_dim": 64,
        "intermediate_size": intermediate,
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


def write_adapter(folder: Path, rank: int = 8, seed: int = 7) -> None:
    """A LoRA adapter, for the model beside it, of random weights that are large enough to change
    tokens."""
    import torch
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    model = json.loads((folder.parent / "llama" / "config.json").read_text())
    hidden, head = model["hidden_size"], model["head_dim"]
    rows = {
        "q_proj": model["num_attention_heads"] * head,
        "v_proj": model["num_key_value_heads"] * head,
    }
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for layer in range(model["num_hidden_layers"]):
        for name, out in rows.items():
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            for part, shape in (("lora_A", (rank, hidden)), ("lora_B", (out, rank))):
                values = torch.randn(shape, generator=generator) * 200 / hidden
                weights[f"{prefix}.{part}.weight"] = values.to(torch.bfloat16)
    save_file(weights, str(folder / "adapter_model.safetensors"))
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": 2 * rank,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": ["q_proj", "v_proj"],
        "base_model_name_or_path": "llama",
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))


def randomise(model: Any) -> int:
    """Refill weights in place: with those of vLLM's dummy loader attention does not matter."""
    import torch

    generator = torch.Generator(device=next(model.parameters()).device).manual_seed(0)
    count = 0
    with torch.inference_mode():
        for name, weight in model.named_parameters():
            if "lora" in name:
                continue
            if "norm" in name:
                weight.fill_(1.0)
            else:
                weight.normal_(0.0, 0.05, generator=generator)
            count += 1
    return count
