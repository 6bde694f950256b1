"""Putting graphs into the denoisers of a pipeline, and taking them out again."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator
from typing import Any, TypeVar

import torch

from graphrt.core.base.option_values import count_of, shown
from graphrt.errors import UnsupportedHostError
from graphrt.hosts.diffusers.denoiser import DenoiserForward, DenoiserReport, SharedPool
from graphrt.hosts.diffusers.versions import check_names

T = TypeVar("T")

DENOISERS = ("unet", "transformer", "transformer_2")
DECODER = "vae.decoder"
SERVED_VAE = "AutoencoderKL"
"""Decoders of videos write into a list that they are given, which a replay would not."""


def with_graphs(
    pipe: T, *, max_batch: int = 2, max_signatures: int = 8, vae_decoder: bool = False
) -> T:
    """Let graphs serve the denoisers of a pipeline of diffusers from now on; returns the pipeline.

    Calls whose latents have more than `max_batch` rows run eagerly; guidance doubles the rows in
    many pipelines. Each denoiser keeps the graphs of `max_signatures` signatures: resolutions,
    batch sizes, lengths of prompts. With `vae_decoder` the decoder of an `AutoencoderKL` is served
    too. Called again, it begins anew.

    Raises `UnsupportedHostError` for a pipeline without a denoiser, or without that decoder, for a
    denoiser under `torch.compile`, and for a diffusers whose hooks are unknown; and
    `InvalidOptionError`.
    """
    max_batch = count_of("max_batch", max_batch, least=1)
    max_signatures = count_of("max_signatures", max_signatures, least=1)
    check_names()
    modules = dict(_modules(pipe))
    decoder = modules.pop(DECODER, None)
    if not modules:
        raise UnsupportedHostError(
            "the pipeline has no denoiser",
            got=shown(type(pipe)),
            expected=f"a pipeline of diffusers with one of {', '.join(DENOISERS)}",
            advice="with_graphs(pipe) of a pipeline whose models are loaded",
        )
    if vae_decoder:
        vae = type(getattr(pipe, "vae", None)).__name__
        if decoder is None or vae != SERVED_VAE:
            raise UnsupportedHostError(
                "graphs do not serve the decoder of this VAE",
                got=vae,
                expected=SERVED_VAE,
                advice="leave vae_decoder= out",
            )
        modules[DECODER] = decoder
    for name, module in modules.items():
        if hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None):
            raise UnsupportedHostError(
                "the denoiser is compiled as a whole, and its compiled code calls no forward",
                got=f"pipe.{name}, under torch.compile",
                expected="a denoiser as diffusers makes it",
                advice="leave one of the two out: mode='reduce-overhead' has graphs of its own",
            )
    without_graphs(pipe)
    pool = SharedPool()
    for name, module in modules.items():
        module.forward = DenoiserForward(name, module, pool, max_batch, max_signatures)
    return pipe


def without_graphs(pipe: T) -> T:
    """Give the denoisers of a pipeline their own forwards back, and destroy their graphs; returns
    the pipeline."""
    for module, served in _served(pipe).values():
        served.close()
        if vars(module).get("forward") is served:
            # Else hooks have wrapped it, and it calls the denoiser's own forward for them.
            served.uninstall()
    return pipe


def capture(pipe: Any, *args: Any, **kwargs: Any) -> None:
    """Capture ahead what a call of the pipeline with these arguments needs: its resolution, batch
    size, guidance and length of prompt.

    It is a call of two steps, without an image: the second one reaches `transformer_2` of Wan.
    """
    short = {
        "num_inference_steps": 2,
        "output_type": "latent",
        # Not the process's: later images stay what they would have been.
        "generator": torch.Generator().manual_seed(0),
    }
    known = inspect.signature(pipe.__call__).parameters
    pipe(*args, **{name: short[name] for name in short if name in known} | kwargs)


def report(pipe: Any) -> dict[str, DenoiserReport]:
    """How the calls of each denoiser of a pipeline ran, by its name."""
    return {name: served.report() for name, (_, served) in _served(pipe).items()}


def _modules(pipe: Any) -> Iterator[tuple[str, torch.nn.Module]]:
    for name in (*DENOISERS, DECODER):
        module = functools.reduce(lambda at, part: getattr(at, part, None), name.split("."), pipe)
        if isinstance(module, torch.nn.Module):
            yield name, module


def _served(pipe: Any) -> dict[str, tuple[torch.nn.Module, DenoiserForward]]:
    served = {}
    for name, module in _modules(pipe):
        forward = vars(module).get("forward")
        while forward is not None and not isinstance(forward, DenoiserForward):
            # Hooks of accelerate and of diffusers wrap a forward, and say so.
            forward = getattr(forward, "__wrapped__", None)
        if forward is not None:
            served[name] = module, forward
    return served
