"""Torch's settings that change what operators do: one row for each, and who compares it.

Graphs, eager parts and compiled code hold the settings of their capture. No step compares
`cudnn.benchmark`: with it on, time decides about the kernels of an eager step too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any, NamedTuple

import torch

from graphrt.core.base.thread_mode import ThreadMode
from graphrt.core.base.torch_names import (
    dispatch_modes,
    fp32_precision,
    function_modes,
    setting_getter,
)

GUARD, READ, TURN, ASKED = "guard", "read", "turn", "asked"
"""How a step compares a setting. GUARD: by torch's guard, or as a mode. READ: it is read, in 10 ns.
TURN: reading it takes 100 ns, so few steps do. ASKED: only if the forward asks for it."""

AUTOCAST = "autocast on "
"""The beginning of the name of a setting of autocast, before the kind of device."""


class Setting(NamedTuple):
    """A row. `step` is how a step compares it, "" for not at all. `part`: an eager part must have
    it as around its forward. `key`: it is in the key of compiled code."""

    name: str
    read: Callable[[], Any]
    step: str
    part: bool = True
    key: bool = True


def settings(*kinds: str) -> Iterator[Setting]:
    """All rows; autocast of these kinds of devices, or else of the CPU and the accelerator."""
    accelerator = torch.accelerator.current_accelerator()
    for kind in kinds or ("cpu", *(() if accelerator is None else (accelerator.type,))):
        yield Setting(f"{AUTOCAST}{kind}", partial(_autocast, kind), GUARD)
    yield from _ROWS


def around_part() -> dict[str, Any]:
    """The settings that an eager part must have as around its forward: graphs have no gradients,
    so those are not among them."""
    return {row.name: row.read() for row in _rows_of_parts()}


@cache
def _rows_of_parts() -> tuple[Setting, ...]:
    # Every eager part of a capture asks.
    return tuple(row for row in settings() if row.part)


def _autocast(kind: str) -> torch.dtype | None:
    """What autocast casts to; None where it is off."""
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None


def _precision(backend: str, of: str) -> str:
    """Not by `allow_tf32`: torch raises there once somebody has set `fp32_precision`."""
    found = fp32_precision(backend, of)
    return "ieee" if found == "none" else found  # the same kernels


def _dispatch_modes() -> tuple[object, ...]:
    return tuple([mode for mode in dispatch_modes() if not isinstance(mode, ThreadMode)])


def _rows() -> Iterator[Setting]:
    yield Setting("default device", torch.get_default_device, GUARD)
    # Without the mode of a default device; those of dispatch without graphrt's own.
    yield Setting("torch function modes", lambda: tuple(function_modes()), GUARD)
    yield Setting("torch dispatch modes", _dispatch_modes, GUARD, part=False, key=False)
    yield Setting("default dtype", torch.get_default_dtype, GUARD)
    yield Setting("deterministic algorithms", torch.get_deterministic_debug_mode, GUARD)
    for dtype in "fp16", "bf16":
        for more in "", "_split_k":
            name = f"allow_{dtype}_reduced_precision_reduction{more}"
            yield Setting(name, partial(getattr, torch.backends.cuda.matmul, name, None), GUARD)
    for backend in "cuda", "mkldnn":
        for of in "matmul", "conv", "rnn":
            name, read = f"{backend}.{of}.fp32_precision", partial(_precision, backend, of)
            yield Setting(name, read, GUARD if name.startswith("cuda.matmul") else TURN)
    # Without the order of attention kernels: torch itself changes it at the first call on a GPU.
    for step, names in (
        (READ, "cublas_allow_fp16_accumulation cudnn_enabled cudnn_deterministic mkldnn_enabled"),
        (READ, "cudnn_sdp_enabled flash_sdp_enabled math_sdp_enabled mem_efficient_sdp_enabled"),
        (TURN, "math_sdp_allow_fp16_bf16_reduction mkldnn_deterministic"),
        ("", "cudnn_benchmark"),
    ):
        for getter in filter(None, map(setting_getter, names.split())):
            yield Setting(getter.__name__.removeprefix("_get_"), getter, step)
    # With its cache on, autocast casts a tensor once and reuses the result.
    yield Setting("autocast cache", torch.is_autocast_cache_enabled, "", part=False)
    yield Setting("gradients", torch.is_grad_enabled, ASKED, part=False, key=False)
    yield Setting("inference mode", torch.is_inference_mode_enabled, ASKED, part=False)
    deterministic: Any = torch.utils.deterministic
    fills = partial(getattr, deterministic, "fill_uninitialized_memory")
    yield Setting("fill uninitialized memory", fills, "", part=False)


_ROWS = tuple(_rows())
