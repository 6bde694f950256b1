"""Settings of torch that a forward enters around an eager part: replays call the part alone."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch

from graphrt.core.base.errors import CaptureError
from graphrt.core.base.torch_names import (
    attention_kernels,
    attention_order,
    function_modes,
    set_attention_kernels,
    set_attention_order,
)

_AUTOCAST = "autocast on "
_DEVICE = "default device"
_ATTENTION = "kernels of scaled_dot_product_attention"


def settings_now() -> dict[str, Any]:
    """What changes what operators do and can be entered around a part of a forward.

    Whether there are gradients is not among them: graphs have none.
    """
    backends: Any = torch.backends
    cuda, cudnn, mkldnn = backends.cuda, backends.cudnn, backends.mkldnn
    found: dict[str, Any] = {
        # What autocast casts to; None where it is off.
        f"{_AUTOCAST}{kind}": torch.get_autocast_dtype(kind)
        if torch.is_autocast_enabled(kind)
        else None
        for kind in _kinds()
    }
    found |= {
        _DEVICE: torch.get_default_device(),
        "torch function modes": tuple(function_modes()),
        "default dtype": torch.get_default_dtype(),
        "deterministic algorithms": (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        ),
        "precision of float32 in matmul": (
            cuda.matmul.fp32_precision,
            mkldnn.matmul.fp32_precision,
        ),
        "precision of float32 in convolutions": (
            cudnn.conv.fp32_precision,
            mkldnn.conv.fp32_precision,
        ),
        "precision of float32 in RNNs": (cudnn.rnn.fp32_precision, mkldnn.rnn.fp32_precision),
        "sums in matmul": (
            cuda.matmul.allow_fp16_reduced_precision_reduction,
            cuda.matmul.allow_bf16_reduced_precision_reduction,
            cuda.matmul.allow_fp16_accumulation,
        ),
        "cudnn": (cudnn.enabled, cudnn.benchmark, cudnn.deterministic),
        "mkldnn": mkldnn.enabled,
    }
    if attention_kernels and attention_order:
        found[_ATTENTION] = tuple(attention_kernels()), tuple(attention_order())
    return found


def under(
    function: Callable[..., Any], name: str, entered: Mapping[str, Any], around: Mapping[str, Any]
) -> Callable[..., Any]:
    """`function` under the settings `entered` where those `around` the forward are others.

    Raises `CaptureError` for one that a replay does not enter.
    """
    own = {each: value for each, value in entered.items() if value != around[each]}
    if not own:
        return function
    for each, value in own.items():
        if each not in (_DEVICE, _ATTENTION) and not each.startswith(_AUTOCAST):
            raise CaptureError(
                f"the forward enters another setting around eager break {name}, which a replay "
                "calls by itself",
                got=f"{each}: {_told(value)}",
                expected=f"{_told(around[each])}, as around the forward",
                advice="enter it inside of the eager part, or around the whole forward",
            )

    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        with ExitStack() as stack:
            for each, value in own.items():
                stack.enter_context(_entered(each, value))
            return function(*args, **kwargs)

    return called


def _kinds() -> list[str]:
    device = torch.accelerator.current_accelerator()
    return ["cpu"] if device is None else ["cpu", device.type]


def _entered(name: str, value: Any) -> AbstractContextManager[object]:
    if name == _ATTENTION:
        return _attention(*value)
    if name == _DEVICE:
        device: torch.device = value
        return device
    return torch.autocast(name.removeprefix(_AUTOCAST), value, enabled=value is not None)


@contextmanager
def _attention(kernels: tuple[Any, ...], order: tuple[int, ...]) -> Iterator[None]:
    before = attention_kernels(), attention_order()
    try:
        set_attention_kernels(kernels)
        set_attention_order(list(order))
        yield
    finally:
        set_attention_kernels(before[0])
        set_attention_order(before[1])


def _told(value: object) -> str:
    if isinstance(value, tuple):
        return ", ".join(map(_told, value)) or "none"
    return str(value) if isinstance(value, str | bool | torch.dtype) else type(value).__name__
