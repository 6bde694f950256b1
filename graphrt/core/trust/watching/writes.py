"""What a forward writes, saved before it is written."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from graphrt.core.base.errors import StateTooLargeError
from graphrt.core.base.thread_mode import unseen
from graphrt.core.base.torch_names import inference_guard, storage_of_weak
from graphrt.core.trust.watching.operators import OperatorFacts
from graphrt.core.trust.watching.rows import Protected, named_by_none


class _Region(NamedTuple):
    """What one operator was about to write, as it was, and how to read and write it."""

    read: Callable[[], torch.Tensor]
    write: Callable[[torch.Tensor], object]
    was: torch.Tensor
    inference: bool
    use: object = None
    """Of which memory it is, as its watch knows it."""
    chosen: tuple[torch.Tensor, ...] = ()
    """The indices of its rows, along `dim` of what is read; -1 for one index an element."""
    dim: int = 0
    whole: bool = True


class _Whole:
    """A tensor whose memory nobody keeps for this: what compiled code allocates is no state, and is
    gone when the run is over. No operator has made it, so nothing else tells it from state."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.ref = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
        self._like = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        self._place = tensor.storage_offset(), tensor.size(), tensor.stride()

    def read(self) -> torch.Tensor:
        """What is there now, cloned; an empty tensor once the memory is gone."""
        found = self._now()
        return self._like.clone() if found is None else found.clone()

    def write(self, value: torch.Tensor) -> None:
        """Write it, unless the memory is gone, or was when the value was read."""
        found = self._now()
        if found is not None and value.numel() == found.numel():
            found.copy_(value)

    def is_of(self, tensor: torch.Tensor) -> bool:
        """Whether this is memory of that tensor, and of none that lay there before it."""
        return bool(self.ref.cdata == tensor.untyped_storage()._cdata)

    def _now(self) -> torch.Tensor | None:
        if self.ref.expired():  # type: ignore[no-untyped-call]
            return None
        storage = storage_of_weak(self.ref.cdata)
        if storage is None:
            return None
        return torch.empty_like(self._like).set_(storage, *self._place)


class SavedWrites:
    """Memory from outside as it was before a run wrote it; index writes save only their rows.

    Of what would take more than `limit_bytes` only sums of its rows are kept: such memory has to be
    protected by padding, which `check_protected` looks at.
    """

    def __init__(self, limit_bytes: int, *, sums: bool = True) -> None:
        """Without `sums` what is too large is not looked at either."""
        self.bytes = 0
        # Which memory rows were written of, and by which operator.
        self.row_writes: set[tuple[int, str]] = set()
        self._sums = sums
        self._limit = limit_bytes
        self._regions: list[_Region] = []
        self._whole: dict[tuple[object, ...], _Whole] = {}
        self._protected: dict[tuple[object, ...], Protected] = {}

    def save(
        self,
        tensor: torch.Tensor,
        facts: OperatorFacts,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        use: object,
    ) -> None:
        """Save what an operator is about to write into `tensor`; `use` is what errors call it."""
        place = (tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype)
        known = self._whole.get(place)
        if (known is not None and known.is_of(tensor)) or tensor.numel() == 0:
            return
        if place in self._protected:
            return
        unseen(lambda: self._save(tensor, facts, args, place, use))

    def _save(
        self,
        tensor: torch.Tensor,
        facts: OperatorFacts,
        args: Sequence[Any],
        place: tuple[object, ...],
        use: object,
    ) -> None:
        whole = facts.rows is None or tensor is not args[0]
        chosen: tuple[torch.Tensor, ...] = ()
        dim = 0
        if whole:
            view = tensor.detach()
            if self.bytes + view.numel() * view.element_size() > self._limit:
                if self._sums:
                    self._protected[place] = Protected(view, str(use))
                return
            held = _Whole(view)
            read: Callable[[], torch.Tensor] = held.read
            write: Callable[[torch.Tensor], object] = held.write
        else:
            assert facts.rows is not None
            read, write, chosen, dim = facts.rows(args)
            self.row_writes.add((tensor.untyped_storage()._cdata, facts.name))
        was = read()
        self.bytes += was.numel() * was.element_size()
        if self.bytes > self._limit:
            raise too_large(self.bytes, self._limit, str(use))
        inference = tensor.is_inference()
        self._regions.append(_Region(read, write, was, inference, use, chosen, dim, whole))
        if whole:
            self._whole[place] = held

    def restore(self) -> None:
        """Put everything back as it was, the last write first; called again it does so again."""
        if self._regions:
            unseen(self._restore)

    def _restore(self) -> None:
        for region in reversed(self._regions):
            _write(region, region.was)

    def values(self) -> list[torch.Tensor]:
        """Copies of what is there now."""
        return unseen(lambda: [region.read().clone() for region in self._regions])

    def write(self, values: Sequence[torch.Tensor]) -> None:
        """Write what `values` returned earlier; what was saved since then stays as it is."""
        regions = self._regions

        def write() -> None:
            for region, value in zip(regions, values, strict=False):
                _write(region, value)

        unseen(write)

    def spoilt(
        self,
        padded: Sequence[torch.Tensor],
        alone: Sequence[torch.Tensor],
        pads: Sequence[int],
        sizes: Sequence[tuple[int, int]],
        differs: Callable[[torch.Tensor, torch.Tensor], str | None],
    ) -> tuple[object, str] | None:
        """The first memory in which a padded run left something else than one without padding, and
        what, by `differs`; `padded` and `alone` are what `values` returned after them.

        Rows that `pads` name may differ: they are nobody's. If there are any, so are the rows that
        padding rows of the step write, where an index has as many entries as the first of one of
        `sizes`, (padded, live), says. So may memory that runs overwrite before they read it.
        """

        def compare() -> tuple[object, str] | None:
            for region, ours, theirs in zip(self._regions, padded, alone, strict=False):
                if not getattr(region.use, "exposed", True) or ours.shape != theirs.shape:
                    continue
                found = differs(*_but_padding(region, ours, theirs, pads, sizes))
                if found is not None:
                    return region.use, found
            return None

        return unseen(compare)

    def check_protected(self, pads: Sequence[int]) -> list[str]:
        """The memory that was too large to be saved, and which rows of it were written.

        Raises `StateTooLargeError` for rows that no padding of an index input, in `pads`, names.
        """
        return [unseen(lambda own=own: own.check(pads)) for own in self._protected.values()]  # type: ignore[misc]


def _write(region: _Region, value: torch.Tensor) -> None:
    if not region.inference:
        region.write(value)  # `unseen`, and so outside of inference mode already
        return
    with inference_guard(True):
        region.write(value)


def still_there(*values: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Of what `SavedWrites.values` returned at several times, memory that was there each time."""
    kept = [each for each in zip(*values, strict=True) if len({t.shape for t in each}) == 1]
    return [[each[at] for each in kept] for at in range(len(values))]


def _but_padding(
    region: _Region,
    ours: torch.Tensor,
    theirs: torch.Tensor,
    pads: Sequence[int],
    sizes: Sequence[tuple[int, int]],
) -> tuple[torch.Tensor, torch.Tensor]:
    """What two runs left, without the rows that padding names."""
    if not pads:
        return ours, theirs
    if region.whole:
        keep = named_by_none(ours, pads)
        if keep is None:
            return ours, theirs
        dim, rows = keep
        return ours.index_select(dim, rows), theirs.index_select(dim, rows)
    padding = torch.zeros((), dtype=torch.bool, device=ours.device)
    for index in region.chosen:
        for pad in pads:
            padding = padding | (index == pad)
        for all_rows, live in sizes:
            if index.dim() and index.shape[0] == all_rows:
                beyond = torch.arange(all_rows, device=index.device) >= live
                padding = padding | beyond.view(-1, *[1] * (index.dim() - 1)).expand_as(index)
    if padding.dim() == 0:
        return ours, theirs
    if region.dim == -1:
        return ours[~padding], theirs[~padding]
    # The rows of an index of several dimensions lie in as many.
    ours, theirs = (
        each.flatten(region.dim, region.dim + padding.dim() - 1) for each in (ours, theirs)
    )
    rows = torch.nonzero(~padding.flatten()).flatten()
    return ours.index_select(region.dim, rows), theirs.index_select(region.dim, rows)


def too_large(needed: int, limit: int, name: str) -> StateTooLargeError:
    """The error for state that is written and cannot be saved."""
    return StateTooLargeError(
        "saving the state that the forward writes takes too much memory",
        got=f"{needed} bytes, the last of them {name}",
        expected=f"at most {limit} bytes",
        advice="pad the index inputs of a KV cache to a dummy page; or declare what changes: "
        "Host(state=[State(tensor, rows=...)]) or State(save=..., restore=...), or raise "
        "state_limit_bytes",
    )
