"""Flux's pipeline of diffusers whose transformer replays graphs, against the eager and the compiled
one.

    PYTHONPATH=SITE python3 -m benchmarks.gpu.diffusers_host [--sides 256 512] [--json FILE]

A transformer of 0.48B random weights in bf16. Without an autoencoder an image is its latents, and
prompts are embedded already. The contestants are the eager pipeline, its transformer under
`torch.compile(mode="reduce-overhead")`, `with_graphs`, and `with_graphs` after diffusers' own
`transformer.compile_repeated_blocks()`. For each side, of square images:

- "first": seconds of the first image, with all that is captured and compiled for it; "new": of the
  first one that is half as high again, and "second" of the second one there;
- "step": milliseconds of a call of the transformer, back to back, "host" the host's part of it,
  "latency" one call with a wait (medians over rounds in which all take turns);
- "image": seconds of a pipeline call of `--steps` steps, and the largest difference of its latents
  to the eager ones (0 is bit for bit);
- "MiB": what the allocator has reserved more since the pipeline was made.

SITE is a folder with diffusers, where it is not installed. For Python 3.12 on Linux:

    pip install --no-deps --only-binary=:all: --python-version 3.12 \\
        --platform manylinux_2_28_x86_64 --target SITE diffusers==0.42.1 importlib_metadata zipp \\
        pillow requests urllib3 charset_normalizer certifi

Pillow and charset_normalizer have compiled parts, the others are Python alone. torch, transformers,
regex, safetensors, huggingface_hub and numpy have to be there.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.common import (
    arguments,
    environment,
    finish,
    interleaved,
    left_out,
    show,
    synchronizer,
)

EAGER, COMPILED, GRAPHS = "eager", "torch.compile, reduce-overhead", "with_graphs"
BLOCKS = "compile_repeated_blocks, with_graphs"
SHAPES = {
    "0.5b": {"num_layers": 6, "num_single_layers": 16, "num_attention_heads": 16},
    "tiny": {"num_layers": 1, "num_single_layers": 1, "num_attention_heads": 2},
}
WORDS, TEXT, POOLED = 256, 1024, 768


def transformer_of(shape: str, device: str) -> Any:
    import diffusers

    with torch.device(device):
        model = diffusers.FluxTransformer2DModel(
            patch_size=1,
            in_channels=64,
            attention_head_dim=64,
            joint_attention_dim=TEXT,
            pooled_projection_dim=POOLED,
            guidance_embeds=True,
            axes_dims_rope=(8, 28, 28),
            **SHAPES[shape],
        )
    return model.to(torch.bfloat16 if device == "cuda" else torch.float32).eval()


def pipeline_of(transformer: Any) -> Any:
    import diffusers

    parts = ("text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2", "vae")
    pipe = diffusers.FluxPipeline(
        transformer=transformer,
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
        **dict.fromkeys(parts),
    )
    pipe.set_progress_bar_config(disable=True)
    return pipe


class Prompts:
    """The inputs of images and of single calls, which are the same for all contestants."""

    def __init__(self, model: Any, steps: int) -> None:
        self._device, self._dtype, self._steps = model.device, model.dtype, steps
        self._generator = torch.Generator().manual_seed(1)
        self._words, self._pooled = self._random(1, WORDS, TEXT), self._random(1, POOLED)

    def _random(self, *shape: int) -> Tensor:
        values = torch.randn(shape, generator=self._generator)
        return values.to(self._device, self._dtype)

    def image(self, pipe: Any, height: int, width: int) -> Tensor:
        latents: Tensor = pipe(
            prompt_embeds=self._words,
            pooled_prompt_embeds=self._pooled,
            height=height,
            width=width,
            num_inference_steps=self._steps,
            generator=torch.Generator().manual_seed(0),
            output_type="latent",
        )[0]
        return latents.clone()

    def call(self, height: int, width: int) -> dict[str, Any]:
        """The arguments by which the pipeline calls its transformer."""
        rows, columns = height // 16, width // 16
        places = torch.cartesian_prod(torch.arange(rows), torch.arange(columns))
        places = torch.nn.functional.pad(places, (1, 0)).to(self._device, self._dtype)
        return {
            "hidden_states": self._random(1, rows * columns, 64),
            "timestep": torch.full((1,), 0.5, device=self._device, dtype=self._dtype),
            "guidance": torch.full((1,), 3.5, device=self._device),
            "pooled_projections": self._pooled,
            "encoder_hidden_states": self._words,
            "txt_ids": torch.zeros_like(self._words[0, :, :3]),
            "img_ids": places,
            "joint_attention_kwargs": {},
            "return_dict": False,
        }


def contestants_of(model: Any, device: str) -> dict[str, Callable[[], Any]]:
    """What makes the pipeline of each."""
    from graphrt.hosts.diffusers import with_graphs

    made = {EAGER: lambda: pipeline_of(model)}
    if not left_out(device, [COMPILED]):
        compiled = torch.compile(model, mode="reduce-overhead", fullgraph=True, dynamic=False)
        made[COMPILED] = lambda: pipeline_of(compiled)
    made[GRAPHS] = lambda: with_graphs(pipeline_of(copy.deepcopy(model)))

    def blocks() -> Any:
        with_blocks = copy.deepcopy(model)
        with_blocks.compile_repeated_blocks(fullgraph=True, dynamic=True)
        return with_graphs(pipeline_of(with_blocks))

    if not left_out(device, [BLOCKS]):
        made[BLOCKS] = blocks
    return made


def seconds_of(call: Callable[[], Any], synchronize: Callable[[], None]) -> float:
    synchronize()
    began = time.perf_counter()
    call()
    synchronize()
    return time.perf_counter() - began


def reserved(device: str) -> int:
    return torch.cuda.memory_reserved() >> 20 if device == "cuda" else 0


def measured(model: Any, side: int, options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    synchronize = synchronizer(options.device)
    prompts = Prompts(model, options.steps)
    higher = side * 3 // 2
    found: dict[str, dict[str, Any]] = {}
    pipes = {}
    for name, make in contestants_of(model, options.device).items():
        pipe = pipes[name] = make()
        before = reserved(options.device)
        found[name] = {
            "first_s": seconds_of(partial(prompts.image, pipe, side, side), synchronize),
            "new_s": seconds_of(partial(prompts.image, pipe, higher, side), synchronize),
            "second_s": seconds_of(partial(prompts.image, pipe, higher, side), synchronize),
            "mib": reserved(options.device) - before,
        }
    call = prompts.call(side, side)
    with torch.no_grad():
        # The compiled one first: this call has other tensors, but no other shapes.
        for pipe in pipes.values():
            for _ in range(4):
                pipe.transformer(**call)
        steps = {name: partial(pipe.transformer, **call) for name, pipe in pipes.items()}
        times = interleaved(
            steps,
            rounds=options.rounds,
            steps=options.steps,
            singles=5,
            synchronize=synchronize,
        )
    images: dict[str, list[float]] = {name: [] for name in pipes}
    for turn in range(options.rounds):
        for name in list(pipes)[:: -1 if turn % 2 else 1]:
            taken = seconds_of(partial(prompts.image, pipes[name], side, side), synchronize)
            images[name].append(taken)
    eager = prompts.image(pipes[EAGER], side, side)
    for name, pipe in pipes.items():
        difference = (prompts.image(pipe, side, side) - eager).abs().max().item()
        image = {"image_s": statistics.median(images[name]), "difference": difference}
        found[name] |= {**times[name], **image}
    from graphrt.hosts.diffusers import report, without_graphs

    for contestant in (name for name in (GRAPHS, BLOCKS) if name in pipes):
        found[contestant]["report"] = {
            name: {**asdict(each), "eager": {reason.name: n for reason, n in each.eager.items()}}
            for name, each in report(pipes[contestant]).items()
        }
        without_graphs(pipes[contestant])
    torch.compiler.reset()
    return found


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--model", default="0.5b", choices=SHAPES)
    parser.add_argument("--sides", type=int, nargs="+", default=[256, 512, 1024])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    import diffusers

    torch.manual_seed(0)
    model = transformer_of(options.model, options.device)
    found = {}
    columns = ("first_s", "new_s", "second_s", "step", "enqueue", "latency", "image_s")
    heads = ["", "first s", "new s", "second s", "step ms", "host", "latency", "image s"]
    for side in options.sides:
        found[side] = measured(model, side, options)
        table = [
            [name, *(row[each] for each in columns), row["difference"], row["mib"]]
            for name, row in found[side].items()
        ]
        title = f"{side} x {side}, {options.steps} steps an image"
        show(title, [*heads, "difference", "MiB"], table)
    told = {**environment(options.device), "diffusers": diffusers.__version__}
    finish("gpu_diffusers_host", options, told, found)


if __name__ == "__main__":
    main()
