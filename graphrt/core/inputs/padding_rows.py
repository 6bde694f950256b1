"""What the padding rows of inputs are, for checks: their addresses, and which inputs differ."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from graphrt.core.base import tree
from graphrt.core.base.torch_names import in_transform
from graphrt.core.inputs.declared import flat_of
from graphrt.core.inputs.layout import InputLayout
from graphrt.core.inputs.spec import InputSpec


class PaddingRows:
    """The padding rows of one runner's inputs."""

    def __init__(self, specs: Mapping[str, InputSpec]) -> None:
        self._specs = specs
        pads = {int(spec.pad_value.real) for spec in specs.values() if spec.index}
        self.addresses = sorted(pads)
        """The padding values of index inputs: rows in which padding may be written."""
        self.with_rows = frozenset(name for name, spec in specs.items() if spec.batch_axis()[0])
        """The inputs that have padding rows."""

    def unused_addresses(self, values: Mapping[str, Any]) -> list[int]:
        """The padding values of index inputs that no live row of theirs holds: what they address is
        nobody's. A block table may hold its own for what a request does not use, while a slot
        mapping says so. Waits for the device."""
        unused: set[int] = set()
        for name, value in flat_of(values):
            spec = self._specs.get(name)
            if spec is not None and spec.index and isinstance(value, torch.Tensor):
                pad = int(spec.pad_value.real)
                if pad >= 0 and not bool((value == pad).any()):
                    unused.add(pad)
        return sorted(unused)

    def differing(self, values: Mapping[str, Any]) -> frozenset[str]:
        """The inputs of which a live row is another than the padding rows: only these can show that
        rows are mixed. Waits for the device."""
        names = set()
        for name, value in flat_of(values):
            spec = self._specs.get(name)
            axis, dim = (None, 0) if spec is None else spec.batch_axis()
            if spec is None or axis is None or not isinstance(value, torch.Tensor):
                continue
            # What is no input at all, such as a sparse tensor, is named when it is written.
            if _is_plain(value) and value.dim() > dim and _differs(value, spec, dim):
                names.add(name)
        return frozenset(names)

    def disturb(self, layout: InputLayout, tokens: int, reqs: int) -> None:
        """Let padding rows hold what the first live row holds, but for indices: what they address
        would be written."""
        for name, spec in self._specs.items():
            if not spec.index:
                _spread(layout.views[name], spec, tokens, reqs)


def _is_plain(value: torch.Tensor) -> bool:
    plain = type(value) in (torch.Tensor, torch.nn.Parameter) and not value.is_nested
    dense = plain and value.layout is torch.strided and value.device.type != "meta"
    # Quantized rows are not compared, and what torch.func wraps has none: writing it names that.
    return dense and not value.is_quantized and value.numel() > 0 and not in_transform()


def _differs(value: torch.Tensor, spec: InputSpec, dim: int) -> bool:
    """Whether a live row is another than its padding."""
    if spec.pad == "repeat":
        row = value.narrow(dim, value.shape[dim] - 1, 1)
    else:
        row = torch.full((), spec.pad_value, dtype=value.dtype, device=value.device)
    # As bytes: 8-bit floats cannot be compared, and NaN is itself.
    row = row.expand_as(value)
    return not torch.equal(tree.octets(value), tree.octets(row))


def _spread(view: torch.Tensor, spec: InputSpec, tokens: int, reqs: int) -> None:
    """Let padding rows hold what the first live row holds."""
    axis, dim = spec.batch_axis()
    live = 0 if axis is None else axis.size(tokens, reqs)
    if 0 < live < view.shape[dim]:
        tail = view.narrow(dim, live, view.shape[dim] - live)
        tail.copy_(view.narrow(dim, 0, 1).expand_as(tail))
