"""What a call returned, as it was then, and how another result differs from it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from graphrt.core.base import tree


@dataclass(frozen=True)
class Seen:
    """A leaf of a result, kept as it was."""

    facts: tuple[object, ...]
    numbers: torch.Tensor | None

    @classmethod
    def of(cls, leaf: Any, places: list[int]) -> Seen:
        """`places` are those of the inputs: which of them the leaf shares memory with is kept."""
        if not isinstance(leaf, torch.Tensor):
            return cls((type(leaf), repr(leaf)), None)
        facts: tuple[object, ...] = (leaf.layout, leaf.device.type, leaf.dtype, tuple(leaf.size()))
        if leaf.is_meta:
            return cls(facts, None)
        tensor = leaf.detach()
        if leaf.layout is not torch.strided:
            return cls(facts, tensor.to_dense().clone())
        if leaf.is_quantized:
            return cls((*facts, leaf.qscheme()), tensor.int_repr().clone())
        place = leaf.untyped_storage().data_ptr()
        shared = places.index(place) if place in places else None
        # Whether a conjugation is put off is no part of what a tensor holds.
        facts = (*facts, leaf.stride(), shared)
        plain = tensor.resolve_conj().resolve_neg()
        return cls(facts, plain.clone(memory_format=torch.contiguous_format))

    def differs(self, other: Seen, *, numbers: bool = True) -> str | None:
        """How, in words; bit for bit, but any NaN equals any other."""
        if self.facts != other.facts:
            return f"{other.facts} in place of {self.facts}"
        if not numbers or self.numbers is None or other.numbers is None:
            return None
        a, b = parts(self.numbers), parts(other.numbers)
        if torch.equal(tree.octets(a), tree.octets(b)):
            return None
        if a.dtype.is_floating_point:
            a, b = (torch.where(t.isnan(), torch.full_like(t, torch.nan), t) for t in (a, b))
            if torch.equal(tree.octets(a), tree.octets(b)):
                return None
        wrong = (tree.octets(a) != tree.octets(b)).flatten().nonzero()[0].item()
        at = int(wrong) // a.element_size()
        return f"element {at} is {b.flatten()[at].item()!r}, not {a.flatten()[at].item()!r}"


def parts(tensor: torch.Tensor) -> torch.Tensor:
    """Real numbers in place of complex ones."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor
