"""An input with one address at every size, copied on its own."""

from __future__ import annotations

from typing import Any

import torch

from graphrt.core.inputs.spec import LOWEST_ADDRESS, InputSpec, check_other

_CACHED_TAILS = 4096
"""Views of padding rows that an input keeps; beyond so many they are made anew."""


class FixedInput:
    """One buffer at the largest size, with the views of it that steps have used."""

    def __init__(self, name: str, spec: InputSpec, tokens: int, reqs: int, device: Any) -> None:
        self.name = name
        self.spec = spec
        self.axis, self.dim = spec.batch_axis()
        # Steps write it, in inference mode and outside of it.
        with torch.inference_mode(False):
            self.buffer = torch.full(
                spec.sizes(tokens, reqs), spec.pad_value, dtype=spec.dtype, device=device
            )
        self._on_device = self.buffer.device.type != "cpu"
        # Where the host writes rows of a slot; the buffer itself where that is on the host.
        self._on_host: torch.Tensor | None = None if self._on_device else self.buffer
        self._views: dict[int, torch.Tensor] = {}
        self._tails: dict[tuple[int, int], torch.Tensor] = {}

    def view(self, tokens: int, reqs: int) -> torch.Tensor:
        """The rows that a batch of this size uses."""
        if self.axis is None:
            return self.buffer
        rows = self.axis.size(tokens, reqs)
        found = self._views.get(rows)
        if found is None:
            found = self._views[rows] = self.buffer.narrow(self.dim, 0, rows)
        return found

    def host_rows(self, tokens: int, reqs: int) -> torch.Tensor:
        """Host memory for the rows of a batch of this size, the same one at every step: a copy of
        it is over for the host when it is issued."""
        if self._on_host is None:
            self._on_host = torch.empty(self.buffer.shape, dtype=self.buffer.dtype, device="cpu")
        if self.axis is None:
            return self._on_host
        return self._on_host.narrow(self.dim, 0, self.axis.size(tokens, reqs))

    def check(self, value: object, tokens: int, reqs: int) -> None:
        """Raise `InvalidInputError` unless `value` can fill the live rows."""
        live = self.view(tokens, reqs).shape
        if (
            type(value) is not torch.Tensor
            or value.dtype is not self.spec.dtype
            or value.shape != live
            # To read there would end the process.
            or value.data_ptr() < LOWEST_ADDRESS
        ):
            check_other(self.name, self.spec, value, tuple(live))

    def fill(
        self, value: torch.Tensor, tokens: int, reqs: int, to_tokens: int, to_reqs: int
    ) -> None:
        """Copy the live rows in and pad up to the captured size."""
        live = self.view(tokens, reqs)
        if value.requires_grad:
            value = value.detach()
        if value.data_ptr() != live.data_ptr():
            # A pinned source may be written again by the host while a copy from it is under way.
            asynchronous = self._on_device and value.device.type == "cpu" and not value.is_pinned()
            live.copy_(value, non_blocking=asynchronous)
        elif value.stride() != live.stride():
            live.copy_(value.clone())
        if self.axis is not None:
            self._pad_rows(self.axis.size(tokens, reqs), self.axis.size(to_tokens, to_reqs))

    def reset(self) -> None:
        """Make every row a padding row."""
        self.buffer.fill_(self.spec.pad_value)

    def _pad_rows(self, live: int, padded: int) -> None:
        # At every step anew: the forward, or `bind`, may have written the padding rows.
        pad = self.spec.pad
        if padded <= live or pad == "keep":
            return
        rows = self._tails.get((live, padded))
        if rows is None:
            rows = self.buffer.narrow(self.dim, live, padded - live)
            if len(self._tails) < _CACHED_TAILS:
                self._tails[live, padded] = rows
        if pad == "repeat":
            rows.copy_(self.buffer.narrow(self.dim, live - 1, 1))
        else:
            rows.fill_(self.spec.pad_value)
