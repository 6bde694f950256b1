"""The options of the Ascend platform."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from graphrt.core.base.errors import DeviceHangError, InvalidOptionError
from graphrt.core.base.option_values import check_callable, count_of, shown

UpdateOrder = Literal["replay_first", "update_first"]
UpdateStrategy = Literal["groups", "auto_dispatch"]


@dataclass(frozen=True)
class AscendOptions:
    """How an `AscendPlatform` updates tasks and watches their replays.

    `update_order`: "replay_first" hides the host's part of the updates behind the beginning of the
    graph; "update_first" is for hardware on which a signal must be there before it is waited for
    (310P, virtualised NPUs). None chooses by the device. `update_strategy`: "groups" brackets and
    updates tasks itself; "auto_dispatch" leaves that to torch_npu's handlers and `NPUGraph.update`.

    With `hang_timeout_s` a replay of a graph with tasks that runs for longer is a
    `DeviceHangError`: see `graphrt.ascend.watchdog`, which calls `on_hang` with it at once.

    `reserve_streams` of the device stay free when graphs are captured, by default 48 or a tenth of
    what is free then, whichever is less.
    """

    update_order: UpdateOrder | None = None
    update_strategy: UpdateStrategy = "groups"
    hang_timeout_s: float | None = None
    on_hang: Callable[[DeviceHangError], object] | None = None
    reserve_streams: int | None = None

    def __post_init__(self) -> None:
        if self.reserve_streams is not None:
            count_of("reserve_streams", self.reserve_streams, least=0)
        if self.update_order is not None:
            _check("update_order", self.update_order, _CHOICES["update_order"])
        _check("update_strategy", self.update_strategy, _CHOICES["update_strategy"])
        timeout = self.hang_timeout_s
        if timeout is not None and (type(timeout) not in (int, float) or not timeout > 0):
            raise InvalidOptionError(
                "hang_timeout_s has a wrong value",
                got=shown(timeout),
                expected="seconds > 0, or None for no watchdog",
                advice="hang_timeout_s=60",
            )
        if self.on_hang is not None:
            check_callable("on_hang", self.on_hang, "on_hang=print")

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> AscendOptions:
        """Options from GRAPHRT_ASCEND_UPDATE_ORDER, GRAPHRT_ASCEND_UPDATE_STRATEGY,
        GRAPHRT_ASCEND_HANG_TIMEOUT_S and GRAPHRT_ASCEND_RESERVE_STREAMS; raises
        `InvalidOptionError`."""
        options: dict[str, Any] = {}
        for name in ("update_order", "update_strategy", "hang_timeout_s", "reserve_streams"):
            variable = f"GRAPHRT_ASCEND_{name.upper()}"
            text = environment.get(variable)
            if text:
                number, choices = _NUMBERS.get(name), _CHOICES.get(name)
                if choices is not None:
                    _check(variable, text, choices, advice=f"{variable}={choices[0]}")
                options[name] = text if number is None else _read(variable, number, text)
        return cls(**options)


def update_order_of(device: str, environment: Mapping[str, str] = os.environ) -> UpdateOrder:
    """Whether this device updates tasks before a replay or after it, as vllm-ascend does there.

    At its commit 182b75ea: `_310p/model_runner_310p.py` line 638 (updates before the replay) and
    `worker/model_runner_v1.py` line 449 (virtualised NPUs: ENPU_ENABLE is "true").
    """
    virtual = environment.get("ENPU_ENABLE", "").lower() == "true"
    return "update_first" if virtual or device.startswith("Ascend310P") else "replay_first"


def _check(name: str, value: object, choices: tuple[str, ...], advice: str | None = None) -> None:
    if value not in choices:
        raise InvalidOptionError(
            f"{name} has a wrong value",
            got=shown(value),
            expected=" or ".join(choices),
            advice=advice or f"{name}={choices[0]!r}",
        )


_CHOICES: dict[str, tuple[str, ...]] = {
    "update_order": get_args(UpdateOrder),
    "update_strategy": get_args(UpdateStrategy),
}
_NUMBERS: dict[str, type[int | float]] = {"hang_timeout_s": float, "reserve_streams": int}


def _read(variable: str, kind: type[int | float], text: str) -> int | float:
    try:
        return kind(text)
    except ValueError:
        expected = "seconds" if kind is float else "an integer >= 0"
        raise InvalidOptionError(
            f"{variable} is no number",
            got=shown(text),
            expected=expected,
            advice=f"{variable}=1, or leave it unset",
        ) from None
