"""Eager parts of a step: run at every replay, with their results where the graphs read them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch

from graphrt.core.base import tree
from graphrt.core.base.errors import BakedScalarError, BreakError, BreakShapeError, CaptureError
from graphrt.core.base.option_values import told
from graphrt.core.base.torch_names import (
    attention_kernels,
    attention_order,
    function_modes,
    set_attention_kernels,
    set_attention_order,
)

Call = tuple[tuple[Any, ...], dict[str, Any]]
"""What a function is called with."""


class EagerPart:
    """A function that runs eagerly at every replay and leaves its results where they are read.

    `aliased` holds the paths of results that were no new memory at capture.
    """

    def __init__(
        self, function: Callable[..., Any], call: Call, recorded: Any, aliased: frozenset[str]
    ) -> None:
        self._function = function
        self._args, self._kwargs = call
        self._recorded = recorded
        self._aliased = aliased

    def tensors(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """What it is called with, and where it leaves its results."""
        return tree.tensors((self._args, self._kwargs)), tree.tensors(self._recorded)

    def replay(self) -> None:
        result = self._function(*self._args, **self._kwargs)
        if result is None and self._recorded is None:
            return
        deliver(self._recorded, result, self._function, self._aliased)


def deliver(
    recorded: Any, result: Any, function: Callable[..., Any], aliased: frozenset[str]
) -> None:
    """Put an eager part's `result` where the captured readers look for it.

    Raises `BreakShapeError` for another structure, shape or dtype than recorded,
    `BakedScalarError` for another Python value, and `BreakError` for new memory where there was
    none at capture: copying it would overwrite an argument.
    """
    if isinstance(recorded, torch.Tensor) and isinstance(result, torch.Tensor):
        _deliver_tensor("", recorded, result, function, aliased)
        return
    old, new = list(tree.leaves(recorded)), list(tree.leaves(result))
    if [path for path, _ in old] != [path for path, _ in new]:
        raise BreakShapeError(
            f"eager break {name_of(function)} returned another structure than at capture",
            got=[path for path, _ in new],
            expected=[path for path, _ in old],
            advice="return the same containers at every step",
        )
    for (path, before), (_, now) in zip(old, new, strict=True):
        if isinstance(before, torch.Tensor) and isinstance(now, torch.Tensor):
            _deliver_tensor(path, before, now, function, aliased)
        elif type(before) is not type(now) or not _is_same_value(before, now):
            raise BakedScalarError(
                f"eager break {name_of(function)} returned another value than the graph holds"
                f"{' at ' + path if path else ''}",
                got=told(now),
                expected=told(before),
                advice="return it as a tensor, or read it from current_context() where it is used",
            )


def _is_same_value(before: Any, now: Any) -> bool:
    if isinstance(before, float):
        return repr(before) == repr(now)  # NaN is itself, and -0.0 is not 0.0
    same: Any = before is now or before == now
    # Of an array there is one answer for each element.
    return bool(same.all()) if hasattr(same, "all") else bool(same)


def _deliver_tensor(
    path: str,
    recorded: torch.Tensor,
    result: torch.Tensor,
    function: Callable[..., Any],
    aliased: frozenset[str],
) -> None:
    if (
        recorded.shape != result.shape
        or recorded.dtype != result.dtype
        or result.layout is not torch.strided
    ):
        raise BreakShapeError(
            f"eager break {name_of(function)} returned another tensor than at capture"
            f"{' at ' + path if path else ''}",
            got=f"{result.dtype} {tuple(result.shape)}"
            f"{'' if result.layout is torch.strided else f', {result.layout}'}",
            expected=f"{recorded.dtype} {tuple(recorded.shape)}",
            advice="return the padded shape; mask the padding rows instead of dropping them",
        )
    if recorded.data_ptr() == result.data_ptr() and recorded.stride() == result.stride():
        return
    if path in aliased and recorded.numel():
        raise BreakError(
            f"eager break {name_of(function)} returned memory of its own where it returned an "
            f"argument at capture{', at ' + path if path else ''}",
            got="a fresh tensor",
            expected="the argument, or a view of it",
            advice="write into the argument at every step, or return a fresh tensor at every step",
        )
    recorded.copy_(result)


def on_copies(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, called with copies of its containers: one that changes them would find at each
    step what the step before put there."""

    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = tree.copied((args, kwargs))
        return function(*args, **kwargs)

    return called


def name_of(function: Callable[..., Any]) -> str:
    return getattr(function, "__qualname__", None) or str(function)


_AUTOCAST = "autocast on "
_DEVICE = "default device"
_ATTENTION = "kernels of scaled_dot_product_attention"


def settings_now() -> dict[str, Any]:
    """What changes what operators do and can be entered around a part of a forward.

    Whether there are gradients is not among them: graphs have none.
    """
    backends: Any = torch.backends
    cuda, cudnn, mkldnn = backends.cuda, backends.cudnn, backends.mkldnn
    settings: dict[str, Any] = {
        # What autocast casts to; None where it is off.
        f"{_AUTOCAST}{kind}": torch.get_autocast_dtype(kind)
        if torch.is_autocast_enabled(kind)
        else None
        for kind in _kinds()
    }
    settings |= {
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
        settings[_ATTENTION] = tuple(attention_kernels()), tuple(attention_order())
    return settings


def under_settings(function: Callable[..., Any], around: Mapping[str, Any]) -> Callable[..., Any]:
    """`function` under the settings of now where those `around` the forward are others.

    Raises `CaptureError` for one that a replay does not enter.
    """
    name = name_of(function)
    differing = {each: value for each, value in settings_now().items() if value != around[each]}
    if not differing:
        return function
    for each, value in differing.items():
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
            for each, value in differing.items():
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
