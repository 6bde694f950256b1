"""Settings of the process that change what operators do, as they were at capture."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from graphrt.core.base import state_guard

_cudnn: Any = torch.backends.cudnn
_SETTINGS: dict[str, Callable[[str], object]] = {
    "autocast": torch.is_autocast_enabled,
    "autocast dtype": torch.get_autocast_dtype,
    "default dtype": lambda _: torch.get_default_dtype(),
    "default device": lambda _: torch.get_default_device(),
    "deterministic algorithms": lambda _: torch.are_deterministic_algorithms_enabled(),
    # `allow_tf32` raises where somebody has set `fp32_precision`, which knows of both.
    "TF32 in matmul": lambda _: torch.backends.cuda.matmul.fp32_precision == "tf32",
    "TF32 in cudnn": lambda _: _cudnn.conv.fp32_precision == "tf32",
    "TF32 in RNNs of cudnn": lambda _: _cudnn.rnn.fp32_precision == "tf32",
    "reduced precision sums of float16": lambda _: (
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction
    ),
    "reduced precision sums of bfloat16": lambda _: (
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction
    ),
}
# The dtype says nothing where autocast is off.
_ONLY_WITH = {"autocast dtype": "autocast"}


class Ambient:
    """The settings at capture. `holds` is one call of torch's where nothing at all has changed.

    Whether gradients are on, and how many threads there are, is not among them: no replay depends
    on the former, and on the latter no more than an eager step does.
    """

    def __init__(self, device_type: str) -> None:
        self._device_type = device_type
        self._captured = self._now()
        self.holds: Callable[[], bool] = self._accept()

    def differences(self) -> list[str]:
        """The settings that are not what they were at capture; where there are none, what made
        `holds` false is taken for harmless from now on."""
        now = self._now()
        found = [
            f"{name}: {value}, {self._captured[name]} at capture"
            for name, value in now.items()
            if value != self._captured[name]
        ]
        if not found:
            self.holds = self._accept()
        return found

    def _accept(self) -> Callable[[], bool]:
        if not state_guard:
            return lambda: self._now() == self._captured
        check: Callable[[], bool] = state_guard().check
        return check

    def _now(self) -> dict[str, Any]:
        now = {name: read(self._device_type) for name, read in _SETTINGS.items()}
        for name, switch in _ONLY_WITH.items():
            if not now[switch]:
                now[name] = None
        return now
