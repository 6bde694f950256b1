"""Putting graphs into the denoisers of a pipeline, and taking them out again."""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Iterator, MutableMapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch

from graphrt.core.base.errors import warn_caller
from graphrt.core.base.option_values import count_of, shown
from graphrt.errors import UnsupportedHostError
from graphrt.hosts.diffusers.denoiser import (
    DenoiserForward,
    DenoiserReport,
    EagerDenoiserWarning,
    SharedPool,
)
from graphrt.hosts.diffusers.versions import check_names

T = TypeVar("T")

DENOISERS = ("unet", "transformer", "transformer_2")
DECODER = "vae.decoder"
SERVED_VAE = "AutoencoderKL"
"""Decoders of videos write into a list that they are given, which a replay would not."""


@dataclass
class _Installed:
    """A forward as `with_graphs` installed it; it lives no longer than its denoiser."""

    forward: weakref.ref[DenoiserForward]
    counts: DenoiserReport
    is_warned_of: bool = False


_installed: MutableMapping[Any, dict[str, _Installed]] = weakref.WeakKeyDictionary()
"""By pipeline: a denoiser that replaces a served one calls nothing of graphrt, so `report` looks
here for what was installed."""


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
    installed = {}
    for name, module in modules.items():
        forward = DenoiserForward(name, module, pool, max_batch, max_signatures)
        installed[name] = _Installed(weakref.ref(forward), forward.counts)
        module.forward = forward
    if _can_be_key(pipe):
        _installed[pipe] = installed
    return pipe


def without_graphs(pipe: T) -> T:
    """Give the denoisers of a pipeline their own forwards back, and destroy their graphs; returns
    the pipeline."""
    installed = (_installed.pop(pipe, None) if _can_be_key(pipe) else None) or {}
    forwards = [each.forward() for each in installed.values()]
    for served in [*_served(pipe).values(), *filter(None, forwards)]:
        served.close()
        if vars(served.module).get("forward") is served:
            # Not if hooks have wrapped it: once closed, it calls the denoiser's own forward.
            served.uninstall()
    return pipe


def capture(pipe: Any, *args: Any, **kwargs: Any) -> None:
    """Capture the graphs for calls of the pipeline with these arguments beforehand: their
    resolution, batch size, guidance and length of prompt.

    It is a call of two steps, without an image: the second one reaches `transformer_2` of Wan.

    Raises `UnsupportedHostError` if graphs serve no denoiser of the pipeline.
    """
    if not _reports(pipe, is_served=True):
        raise UnsupportedHostError(
            "graphs serve no denoiser of the pipeline",
            got=shown(type(pipe)),
            expected="a pipeline that with_graphs() returned, with the same denoisers",
            advice="call with_graphs(pipe) before capture(pipe, ...)",
        )
    short = {
        "num_inference_steps": 2,
        "output_type": "latent",
        # Not the process's generator: later images stay what they would have been.
        "generator": torch.Generator().manual_seed(0),
    }
    taken = inspect.signature(pipe.__call__).parameters
    pipe(*args, **{name: short[name] for name in short if name in taken} | kwargs)


def report(pipe: Any) -> dict[str, DenoiserReport]:
    """How the calls of each denoiser of a pipeline ran, by its name.

    Warns once of a denoiser, or a forward, that was replaced after `with_graphs`.
    """
    return _reports(pipe)


def _reports(pipe: Any, *, is_served: bool = False) -> dict[str, DenoiserReport]:
    """The report of each denoiser; with `is_served` only of those whose calls may reach graphs."""
    reports = {name: served.report() for name, served in _served(pipe).items()}
    modules = dict(_modules(pipe))
    for name, each in (_installed.get(pipe, {}) if _can_be_key(pipe) else {}).items():
        if name in reports or name not in modules:
            continue
        forward = each.forward()
        is_same = forward is not None and forward.module is modules[name]
        if is_same or not is_served:
            last = forward.report() if forward is not None else each.counts
            reports[name] = replace(last, replaced=True)
        if not each.is_warned_of:
            each.is_warned_of = True
            what = (
                f"the forward of pipe.{name} was replaced, and graphs serve only what still calls "
                "the one before"
                if is_same
                else f"pipe.{name} was replaced, and the new one runs eagerly"
            )
            advice = "call with_graphs(pipe) again"
            warn_caller(f"after with_graphs(): {what}; {advice}", EagerDenoiserWarning)
    return reports


def _can_be_key(pipe: Any) -> bool:
    """Whether a pipeline can be a key of `_installed`: a user's dataclass has no hash, say."""
    ask_hash: object = type(pipe).__hash__
    return ask_hash is object.__hash__ and type(pipe).__weakrefoffset__ != 0


def _modules(pipe: Any) -> Iterator[tuple[str, torch.nn.Module]]:
    for name in (*DENOISERS, DECODER):
        module = functools.reduce(lambda at, part: getattr(at, part, None), name.split("."), pipe)
        if isinstance(module, torch.nn.Module):
            yield name, module


def _served(pipe: Any) -> dict[str, DenoiserForward]:
    served = {}
    for name, module in _modules(pipe):
        forward = vars(module).get("forward")
        while forward is not None and not isinstance(forward, DenoiserForward):
            # Hooks of accelerate and of diffusers wrap a forward, and set `__wrapped__`.
            forward = getattr(forward, "__wrapped__", None)
        if forward is not None:
            served[name] = forward
    return served
