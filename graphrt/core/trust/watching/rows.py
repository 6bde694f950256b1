"""Memory that is too large to be saved: which rows of it did a warm-up write?"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from graphrt.core.base.errors import StateTooLargeError

_SHOWN = 8


class Protected:
    """One tensor that only padding protects, known by a sum of the bits of each row.

    Rows are of the first dimension; of the second where the first has at most two (keys and
    values). Sums of equal rows are equal; that two changes in one row cancel is not likely.
    """

    def __init__(self, tensor: torch.Tensor, name: str) -> None:
        self._tensor = tensor if tensor.dim() else tensor[None]
        self._name = name
        self._dim = _dim_of_rows(self._tensor)
        self._sums = self._sum()

    def check(self, pads: Sequence[int]) -> str:
        """Which rows were written, as text.

        Raises `StateTooLargeError` if one of them is none that padding names: neither a padding
        value itself nor its page.
        """
        changed = torch.nonzero(self._sum() != self._sums).flatten().tolist()
        named = _named(self._tensor, pads)
        other = [row for row in changed if row not in named]
        if other:
            raise StateTooLargeError(
                f"the warm-up wrote rows of {self._name} that no padding names, and they are too "
                "much to be saved",
                got=f"rows {_shown(other)}",
                expected=f"rows of the padding of index inputs ({sorted(set(pads)) or 'none'})",
                advice="give the inputs that address it InputSpec(index=True, pad=a dummy row), or "
                "declare it: Host(state=[State(tensor, rows=...)])",
            )
        return f"{self._name}: rows {_shown(changed) if changed else 'none'} written by padding"

    def _sum(self) -> torch.Tensor:
        rows = self._tensor.transpose(0, self._dim)
        flat = torch.zeros(rows.shape[0], dtype=torch.int64, device=rows.device)
        for each in range(rows.shape[1] if self._dim else 1):
            part = rows[:, each] if self._dim else rows
            part = part.flatten(1) if part.dim() > 1 else part[:, None]
            bits = part.contiguous().view(torch.uint8)
            whole = bits.shape[1] - bits.shape[1] % 8
            if whole and bits.stride(0) % 8 == 0 and bits.data_ptr() % 8 == 0:
                flat += bits[:, :whole].view(torch.int64).sum(1) * (each + 1)
                bits = bits[:, whole:]
            flat += bits.sum(1, dtype=torch.int64) * (each + 1)
        return flat


def named_by_none(tensor: torch.Tensor, pads: Sequence[int]) -> tuple[int, torch.Tensor] | None:
    """The dimension of a tensor's rows, and those of them that no padding names; None for a tensor
    without rows."""
    if tensor.dim() == 0:
        return None
    dim, named = _dim_of_rows(tensor), _named(tensor, pads)
    rows = [row for row in range(tensor.shape[dim]) if row not in named]
    return dim, torch.tensor(rows, dtype=torch.int64, device=tensor.device)


def _dim_of_rows(tensor: torch.Tensor) -> int:
    return 1 if tensor.dim() > 1 and tensor.shape[0] <= 2 else 0


def _named(tensor: torch.Tensor, pads: Sequence[int]) -> set[int]:
    """The rows that padding names: a value itself, or its page."""
    dim = _dim_of_rows(tensor)
    rows = tensor.shape[dim]
    found = {pad for pad in pads if 0 <= pad < rows}
    # [pages, slots, ...], or [pages, heads, slots, width] where that gives a page that there is.
    per_page = tensor.shape[dim + 1 : dim + (3 if tensor.dim() == dim + 4 else 2)] or (1,)
    for pad in pads:
        pages = (pad // max(slots, 1) for slots in per_page if pad >= 0)
        found.update([page for page in pages if page < rows][:1])
    return found


def _shown(rows: Sequence[int]) -> str:
    more = f" and {len(rows) - _SHOWN} more" if len(rows) > _SHOWN else ""
    return ", ".join(map(str, rows[:_SHOWN])) + more
