"""Tiny pipelines of random weights: a denoiser and a scheduler, for prompts that are embedded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import diffusers
import torch

VAE = {
    "block_out_channels": [4, 8],
    "down_block_types": ["DownEncoderBlock2D"] * 2,
    "up_block_types": ["UpDecoderBlock2D"] * 2,
    "latent_channels": 4,
    "norm_num_groups": 2,
    "shift_factor": 0.1,
}
UNET = {
    "block_out_channels": (4, 8),
    "layers_per_block": 1,
    "sample_size": 16,
    "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
    "mid_block_type": None,
    "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
    "cross_attention_dim": 8,
    "attention_head_dim": 2,
    "norm_num_groups": 2,
}


@dataclass
class Family:
    """One kind of pipeline, and its calls."""

    make: Callable[[], Any]
    call: dict[str, Any]
    """Arguments of every call."""
    plain: dict[str, Any]
    """Those of one without guidance, if the pipeline has any."""
    guided: dict[str, Any] = field(default_factory=dict)
    sizes: tuple[tuple[int, int], ...] = ((32, 32), (32, 48))
    """Heights and widths; one that is fixed has none."""
    calls_a_step: int = 1
    """With guidance; pipelines that double the batch have one."""

    def images(self, pipe: Any, size: int = 0, guided: bool = True, **more: Any) -> torch.Tensor:
        """The latents, or images, of one call with a seed."""
        arguments = {
            "num_inference_steps": 4,
            "generator": torch.Generator().manual_seed(3),
            "output_type": "np",
            **self.call,
            **(self.guided if guided else self.plain),
            **more,
        }
        if self.sizes:
            height, width = self.sizes[size]
            arguments = {"height": height, "width": width, **arguments}
        return torch.as_tensor(pipe(**arguments)[0])


def embedding(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def built(kind: type, **config: Any) -> Any:
    torch.manual_seed(0)
    module = kind(**config).eval()
    for parameter in module.parameters():
        # Random models that begin as the identity would hide what their blocks compute.
        if parameter.ndim < 2 or not parameter.any():
            torch.nn.init.normal_(parameter, std=0.2, generator=torch.Generator().manual_seed(5))
    return module


def quiet(pipe: Any) -> Any:
    pipe.set_progress_bar_config(disable=True)
    return pipe


def vae() -> Any:
    return built(diffusers.AutoencoderKL, **VAE)


def unet(**more: Any) -> Any:
    return built(
        diffusers.UNet2DConditionModel,
        **{**UNET, **more},
    )


def stable_diffusion() -> Any:
    return quiet(
        diffusers.StableDiffusionPipeline(
            unet=unet(),
            vae=vae(),
            scheduler=diffusers.DDIMScheduler(steps_offset=1, clip_sample=False),
            text_encoder=None,
            tokenizer=None,
            safety_checker=None,
            feature_extractor=None,
            requires_safety_checker=False,
        )
    )


def dit() -> Any:
    transformer = built(
        diffusers.DiTTransformer2DModel,
        sample_size=8,
        num_layers=2,
        patch_size=2,
        attention_head_dim=4,
        num_attention_heads=2,
        in_channels=4,
        out_channels=8,
        attention_bias=True,
        num_embeds_ada_norm=1000,
    )
    return quiet(
        diffusers.DiTPipeline(
            transformer=transformer,
            vae=vae(),
            scheduler=diffusers.DDIMScheduler(steps_offset=1, clip_sample=False),
        )
    )


def sd3() -> Any:
    transformer = built(
        diffusers.SD3Transformer2DModel,
        sample_size=16,
        patch_size=1,
        in_channels=4,
        out_channels=4,
        num_layers=2,
        attention_head_dim=4,
        num_attention_heads=2,
        joint_attention_dim=8,
        caption_projection_dim=8,
        pooled_projection_dim=16,
        pos_embed_max_size=32,
    )
    encoders = ("text_encoder", "text_encoder_2", "text_encoder_3")
    tokenizers = ("tokenizer", "tokenizer_2", "tokenizer_3")
    return quiet(
        diffusers.StableDiffusion3Pipeline(
            transformer=transformer,
            scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
            vae=vae(),
            **dict.fromkeys((*encoders, *tokenizers)),
        )
    )


def flux_transformer() -> Any:
    return built(
        diffusers.FluxTransformer2DModel,
        patch_size=1,
        in_channels=16,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=8,
        pooled_projection_dim=8,
        axes_dims_rope=(4, 4, 8),
        guidance_embeds=True,
    )


def flux() -> Any:
    parts = ("text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2")
    return quiet(
        diffusers.FluxPipeline(
            transformer=flux_transformer(),
            scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
            vae=vae(),
            **dict.fromkeys(parts),
        )
    )


def wan_transformer() -> Any:
    return built(
        diffusers.WanTransformer3DModel,
        patch_size=(1, 2, 2),
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=4,
        out_channels=4,
        text_dim=8,
        freq_dim=16,
        ffn_dim=16,
        num_layers=1,
        rope_max_seq_len=32,
    )


def wan() -> Any:
    return quiet(
        diffusers.WanPipeline(
            transformer=wan_transformer(),
            transformer_2=wan_transformer(),
            boundary_ratio=0.875,
            scheduler=diffusers.UniPCMultistepScheduler(
                prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0
            ),
            vae=None,
            text_encoder=None,
            tokenizer=None,
        )
    )


def qwen_image() -> Any:
    transformer = built(
        diffusers.QwenImageTransformer2DModel,
        patch_size=2,
        in_channels=16,
        out_channels=4,
        num_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=8,
        axes_dims_rope=(8, 4, 4),
    )
    return quiet(
        diffusers.QwenImagePipeline(
            transformer=transformer,
            scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
            vae=None,
            text_encoder=None,
            tokenizer=None,
        )
    )


PROMPT = {"prompt_embeds": embedding(1, 7, 8), "negative_prompt_embeds": embedding(1, 7, 8, seed=2)}

FAMILIES = {
    "UNet": Family(
        stable_diffusion, PROMPT, plain={"guidance_scale": 1.0}, guided={"guidance_scale": 5.0}
    ),
    "DiT": Family(
        dit,
        {"class_labels": [7]},
        plain={"guidance_scale": 1.0},
        guided={"guidance_scale": 4.0},
        sizes=(),
    ),
    "SD3": Family(
        sd3,
        {
            **PROMPT,
            "pooled_prompt_embeds": embedding(1, 16),
            "negative_pooled_prompt_embeds": embedding(1, 16, seed=2),
        },
        plain={"guidance_scale": 1.0},
        guided={"guidance_scale": 5.0},
    ),
    "Flux": Family(
        flux,
        {
            **PROMPT,
            "pooled_prompt_embeds": embedding(1, 8),
            "negative_pooled_prompt_embeds": embedding(1, 8, seed=2),
        },
        plain={"guidance_scale": 3.5},
        guided={"true_cfg_scale": 2.0},
        calls_a_step=2,
    ),
    "Wan": Family(
        wan,
        {**PROMPT, "num_frames": 5, "output_type": "latent"},
        plain={"guidance_scale": 1.0},
        guided={"guidance_scale": 5.0},
        calls_a_step=2,
    ),
    "QwenImage": Family(
        qwen_image,
        {
            **PROMPT,
            "prompt_embeds_mask": torch.tensor([[1] * 6 + [0]]),
            "negative_prompt_embeds_mask": torch.tensor([[1] * 7]),
            "output_type": "latent",
        },
        plain={"true_cfg_scale": 1.0},
        guided={"true_cfg_scale": 2.0},
        calls_a_step=2,
    ),
}
