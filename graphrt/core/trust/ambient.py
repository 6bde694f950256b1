"""Settings of the process that change what operators do, as they were at capture."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from operator import gt
from typing import Any

import torch

from graphrt.core.base.thread_mode import ThreadMode, dispatch_modes
from graphrt.core.base.torch_names import (
    all_function_modes,
    count_dispatch_modes,
    function_mode_is_on,
    function_modes,
    state_guard,
)
from graphrt.core.trust.reads import each_call


class Ambient:
    """The settings at capture. `holds` is a few calls of torch's where nothing at all has changed.

    How many threads there are is not among them: a replay depends on it no more than an eager step
    does. Nor are gradients and inference mode, unless the forward `asks` for them.
    """

    def __init__(self, device_type: str) -> None:
        self._device_type = device_type
        self._asks = False
        self._captured = self._now()
        self._guard: Callable[[], bool]
        self._modes: list[object]
        # Graphs have no gradients, whatever was on around their capture.
        self._asked = {"gradients": False, "inference mode": torch.is_inference_mode_enabled()}
        self._accept()

    def differences(self) -> list[str]:
        """The settings that are not what they were at capture; where there are none, what made
        `holds` false is taken for harmless from now on."""
        now = self._now()
        differing = [
            f"{name}: {_told(value)}, {_told(self._captured[name])} at capture"
            for name, value in now.items()
            if value != self._captured[name]
        ]
        if not differing:
            self._accept()
        return differing

    def ask(self) -> None:
        """From now on compare gradients and inference mode too: the forward goes by them."""
        if not self._asks:
            self._asks = True
            self._captured |= self._asked

    def holds(self) -> bool:
        """Whether nothing at all has changed since the last look at what did."""
        if self._asks:
            return self._equal()
        return self._guard() and self._modes == self._modes_now()

    def looks(self) -> Iterator[bool]:
        """Whether `holds()`, without end. Put together of what runs in C, unless there are modes to
        be told from one another."""
        if self._asks or self._modes or not function_mode_is_on:
            return each_call(self.holds)
        settings = each_call(self._guard)
        # Where the one is 1 and the other 0, no mode is on.
        modeless = map(gt, settings, each_call(function_mode_is_on))
        return map(gt, modeless, each_call(count_dispatch_modes))

    def _accept(self) -> None:
        self._guard = self._equal if not state_guard else state_guard().check
        self._modes = self._modes_now()

    def _equal(self) -> bool:
        return self._now() == self._captured

    def _modes_now(self) -> list[object]:
        return [*all_function_modes(), *dispatch_modes()]

    def _now(self) -> dict[str, Any]:
        cudnn: Any = torch.backends.cudnn
        matmul, casts = torch.backends.cuda.matmul, torch.is_autocast_enabled(self._device_type)
        now: dict[str, object] = {
            "autocast": casts,
            # It says nothing where autocast is off.
            "autocast dtype": torch.get_autocast_dtype(self._device_type) if casts else None,
            "default dtype": torch.get_default_dtype(),
            "default device": torch.get_default_device(),
            # That of a default device is known by the device; graphrt's own change nothing.
            "torch function modes": tuple(function_modes()),
            "torch dispatch modes": tuple(
                [mode for mode in dispatch_modes() if not isinstance(mode, ThreadMode)]
            ),
            "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
            # `allow_tf32` raises where somebody has set `fp32_precision`, which knows of both.
            "TF32 in matmul": matmul.fp32_precision == "tf32",
            "TF32 in cudnn": cudnn.conv.fp32_precision == "tf32",
            "TF32 in RNNs of cudnn": cudnn.rnn.fp32_precision == "tf32",
            "reduced precision sums of float16": matmul.allow_fp16_reduced_precision_reduction,
            "reduced precision sums of bfloat16": matmul.allow_bf16_reduced_precision_reduction,
        }
        if self._asks:
            now["gradients"] = torch.is_grad_enabled()
            now["inference mode"] = torch.is_inference_mode_enabled()
        return now


def _told(value: object) -> object:
    """A setting in a text; of modes, outermost first, their classes."""
    if not isinstance(value, tuple):
        return value
    return ", ".join(type(each).__name__ for each in value) or "none"
