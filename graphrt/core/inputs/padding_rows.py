"""What the padding rows of inputs are, for checks: which addresses they hold, and what is kept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from graphrt.core.inputs.declared import flat_of
from graphrt.core.inputs.layout import InputLayout
from graphrt.core.inputs.single_address import FixedInput
from graphrt.core.inputs.spec import InputSpec


class PaddingRows:
    """The padding rows of one runner's inputs."""

    def __init__(self, specs: Mapping[str, InputSpec], fixed: Sequence[FixedInput]) -> None:
        self._specs = specs
        self._kept = [own for own in fixed if own.spec.pad == "keep"]
        self.are_kept = bool(self._kept)
        """Whether there are inputs whose padding rows are whatever was there."""

    @property
    def addresses(self) -> list[int]:
        """The padding values of index inputs: rows in which padding may be written."""
        return sorted({int(spec.pad_value.real) for spec in self._specs.values() if spec.index})

    def nobodys(self, values: Mapping[str, Any]) -> list[int]:
        """The padding values of index inputs that no live row of theirs holds: what they address is
        nobody's. A block table may hold its own for what a request does not use, while a slot
        mapping says so. Waits for the device."""
        found: set[int] = set()
        for name, value in flat_of(values):
            spec = self._specs.get(name)
            if spec is not None and spec.index and isinstance(value, torch.Tensor):
                pad = int(spec.pad_value.real)
                if pad >= 0 and not bool((value == pad).any()):
                    found.add(pad)
        return sorted(found)

    def kept(self) -> list[torch.Tensor]:
        """Copies of the buffers whose padding rows no step writes."""
        return [own.buffer.clone() for own in self._kept]

    def put_back(self, kept: Sequence[torch.Tensor]) -> None:
        """Put back what `kept` returned."""
        for own, values in zip(self._kept, kept, strict=True):
            own.buffer.copy_(values)

    def disturb(self, layout: InputLayout, tokens: int, reqs: int) -> None:
        """Let padding rows that are kept hold what the first live row holds: an earlier step may
        have left it there."""
        for own in self._kept:
            if own.axis is not None:
                view, live = layout.views[own.name], own.axis.size(tokens, reqs)
                if 0 < live < view.shape[own.dim]:
                    tail = view.narrow(own.dim, live, view.shape[own.dim] - live)
                    tail.copy_(view.narrow(own.dim, 0, 1).expand_as(tail))
