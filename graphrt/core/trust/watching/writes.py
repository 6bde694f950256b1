"""What a forward writes, saved before it is written; of what is too large for that, which rows."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextvars import ContextVar
from functools import partial
from itertools import chain
from typing import Any, NamedTuple, TypeVar

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from graphrt.core.base import tree
from graphrt.core.base._undo import Undo, undoing
from graphrt.core.base.errors import StateTooLargeError
from graphrt.core.base.thread_mode import WATCH_KEY, unseen, watch_key
from graphrt.core.base.torch_names import (
    in_transform,
    include_key,
    inference_guard,
    kernel_library,
    operator_names,
    schemas_of_operator,
    storage_of_weak,
)
from graphrt.core.capture.operators import (
    OperatorFacts,
    RowAccess,
    facts_of,
    indices_of,
    writes_of,
    written,
)
from graphrt.core.trust.compare import difference, listed

T = TypeVar("T")


class _Region(NamedTuple):
    """What one operator was about to write, as it was, and how to read and write it; `key` names
    the storage."""

    key: int
    access: RowAccess
    was: torch.Tensor
    inference: bool
    use: object
    """Of which memory it is, as its watch knows it."""
    whole: bool


class _Whole:
    """A tensor whose memory nobody keeps for this: what compiled code allocates is no state, and is
    gone when the run is over. No operator has made it, so nothing else tells it from state."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.ref = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
        self._like = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        self._place = tensor.storage_offset(), tensor.size(), tensor.stride()

    def read(self) -> torch.Tensor:
        """What is there now, cloned; an empty tensor once the memory is gone."""
        now = self._now()
        return self._like.clone() if now is None else now.clone()

    def write(self, value: torch.Tensor) -> None:
        """Write it, unless the memory is gone, or was when the value was read."""
        now = self._now()
        if now is not None and value.numel() == now.numel():
            now.copy_(value)

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
        self.limit = limit_bytes
        self._regions: list[_Region] = []
        self._whole: dict[tuple[object, ...], _Whole] = {}
        # Which rows of a tensor are saved, by their indices: every run of a forward writes them.
        self._rows: dict[tuple[object, ...], list[tuple[torch.Tensor, ...]]] = {}
        self._protected: dict[tuple[object, ...], Protected] = {}

    def save(
        self, tensor: torch.Tensor, facts: OperatorFacts, args: Sequence[Any], use: object
    ) -> None:
        """Save what an operator is about to write into `tensor`; `use` is what errors call it."""
        view_key = (tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype)
        known = self._whole.get(view_key)
        if (known is not None and known.is_of(tensor)) or tensor.numel() == 0:
            return
        if view_key in self._protected:
            return
        unseen(lambda: self._save(tensor, facts, args, view_key, use))

    def _save(
        self,
        tensor: torch.Tensor,
        facts: OperatorFacts,
        args: Sequence[Any],
        view_key: tuple[object, ...],
        use: object,
    ) -> None:
        key = tensor.untyped_storage()._cdata
        whole = facts.rows is None or tensor is not args[0]
        held, rows = None, None
        if whole:
            view = tensor.detach()
            if self.bytes + view.numel() * view.element_size() > self.limit:
                if self._sums:
                    self._protected[view_key] = Protected(view, str(use))
                return
            held = _Whole(view)
            access = RowAccess(held.read, held.write)
        else:
            assert facts.rows is not None
            access = facts.rows(args)
            self.row_writes.add((key, facts.name))
            if access.chosen:
                rows = self._rows.setdefault((*view_key, access.dim, access.along), [])
                if any(_are_equal(access.chosen, each) for each in rows):
                    return
        region = _Region(key, access, access.read(), tensor.is_inference(), use, whole)
        self.bytes += region.was.numel() * region.was.element_size()
        if self.bytes > self.limit:
            raise StateTooLargeError(
                "saving the state that the forward writes takes too much memory",
                got=f"{self.bytes} bytes, the last of them {use}",
                expected=f"at most {self.limit} bytes",
                advice="pad the index inputs of a KV cache to a dummy page; or declare what "
                "changes: Host(state=[State(tensor, rows=...)]) or State(save=..., restore=...), "
                "or raise state_limit_bytes",
            )
        self._regions.append(region)
        # Known only now: a run after one that had no memory for the copy would not save it.
        if held is not None:
            self._whole[view_key] = held
        elif rows is not None:
            rows.append(access.chosen)

    def take(self) -> list[torch.Tensor]:
        """Copies of what is there now."""
        if not self._regions:
            return []
        return unseen(lambda: [region.access.read().clone() for region in self._regions])

    def restore(self, values: Sequence[torch.Tensor] | None = None) -> None:
        """Put everything back as it was, the last write first, or write what `take` returned; what
        was saved since then stays as it is then. Called again it does so again."""
        if not self._regions:
            return
        if values is None:
            pairs = [(region, region.was) for region in reversed(self._regions)]
        else:
            pairs = [*zip(self._regions, values, strict=False)]

        def write() -> None:
            for region, value in pairs:
                _write(region, value)

        unseen(write)

    def spoilt(
        self,
        padded: Sequence[torch.Tensor],
        alone: Sequence[torch.Tensor],
        pads: Sequence[int],
        sizes: Sequence[tuple[int, int]],
        rounding: float,
    ) -> tuple[object, str] | None:
        """The first memory in which a padded run left something else than one without padding, but
        for `rounding`, and what; `padded` and `alone` are what `take` returned after them.

        Some memory may differ. Rows that `pads` name: only padding addresses them. If there are
        any, also the rows that padding rows of the step write; an index has padding rows if it has
        as many entries as the first number of one of `sizes`, (padded, live). And memory that runs
        overwrite before they read it.
        """

        def compare() -> tuple[object, str] | None:
            for region, ours, theirs in zip(self._regions, padded, alone, strict=False):
                if not getattr(region.use, "exposed", True) or ours.shape != theirs.shape:
                    continue
                apart = difference(*_but_padding(region, ours, theirs, pads, sizes))
                if apart is not None and apart.relative > rounding:
                    return region.use, apart.text
            return None

        return unseen(compare)

    def check_protected(self, pads: Sequence[int]) -> list[str]:
        """The memory that was too large to be saved, and which rows of it were written.

        Raises `StateTooLargeError` for rows that no padding of an index input, in `pads`, names.
        """
        return [unseen(lambda each=each: each.check(pads)) for each in self._protected.values()]  # type: ignore[misc]


def _are_equal(ours: Sequence[torch.Tensor], theirs: Sequence[torch.Tensor]) -> bool:
    return all(
        a.dtype is b.dtype and a.device == b.device and torch.equal(a, b)
        for a, b in zip(ours, theirs, strict=True)
    )


def _write(region: _Region, value: torch.Tensor) -> None:
    if not region.inference:
        region.access.write(value)  # `unseen`, and so outside of inference mode already
        return
    with inference_guard(True):
        region.access.write(value)


def still_there(*values: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Of what `SavedWrites.take` returned at several times, memory that was there each time."""
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
    dim = region.access.dim
    padding = torch.zeros((), dtype=torch.bool, device=ours.device)
    for index in region.access.chosen:
        for pad in pads:
            padding = padding | (index == pad)
        for all_rows, live in sizes:
            if index.dim() and index.shape[0] == all_rows:
                beyond = torch.arange(all_rows, device=index.device) >= live
                padding = padding | beyond.view(-1, *[1] * (index.dim() - 1)).expand_as(index)
    if padding.dim() == 0:
        return ours, theirs
    if dim == -1:
        return ours[~padding], theirs[~padding]
    # The rows of an index of several dimensions lie in as many.
    ours, theirs = (each.flatten(dim, dim + padding.dim() - 1) for each in (ours, theirs))
    rows = torch.nonzero(~padding.flatten()).flatten()
    return ours.index_select(dim, rows), theirs.index_select(dim, rows)


# Memory that is too large to be saved ------------------------------------------------------------


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
                got=f"rows {listed(other)}",
                expected=f"rows of the padding of index inputs ({sorted(set(pads)) or 'none'})",
                advice="give the inputs that address it InputSpec(index=True, pad=a dummy row), or "
                "declare it: Host(state=[State(tensor, rows=...)]); or raise state_limit_bytes",
            )
        return f"{self._name}: rows {listed(changed) if changed else 'none'} written by padding"

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
    named = {pad for pad in pads if 0 <= pad < rows}
    # [pages, slots, ...], or [pages, heads, slots, width] where that gives a page that there is.
    per_page = tensor.shape[dim + 1 : dim + (3 if tensor.dim() == dim + 4 else 2)] or (1,)
    for pad in pads:
        pages = (pad // max(slots, 1) for slots in per_page if pad >= 0)
        named.update([page for page in pages if page < rows][:1])
    return named


# A watch that sees nothing but writes -------------------------------------------------------------


class WriteWatch:
    """Saves what a run of so many `tokens` writes of memory that is `known`, and looks at nothing
    else.

    Not the rows that each token of it writes where those of the largest run of the kind did: that
    run was of padding alone too, so its rows, which are in `shown`, are these. An index of another
    length, and one of a single token, may name any row.

    It is no dispatch mode, under which every operator takes several times as long. It includes a
    dispatch key of this thread that torch itself leaves free; there the operators that write have a
    kernel, `_Writer`, and all others are passed by in C++. `note_operators` gives it to them.
    """

    def __init__(
        self, known: Collection[int], saves: SavedWrites, shown: SavedWrites, tokens: int
    ) -> None:
        self._known = known
        self._saves = saves
        self._shown = shown.row_writes if tokens > 1 else ()
        self._tokens = tokens
        self.written: set[int] = set()
        """Those of the `known` that the run has written."""

    @undoing
    def around(self, undo: Undo, function: Callable[[], T]) -> T:
        """Call `function`, and save what it writes."""
        undo.set(_watch, self)
        undo.later(partial(include_key, watch_key(), False))
        include_key(watch_key(), True)
        return function()

    def look(self, facts: OperatorFacts, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """An operator is about to write."""
        for tensor in written(facts, args, kwargs):
            key = tree.storage_key(tensor)
            if key is None or key not in self._known:
                continue
            self.written.add(key)
            if not self._is_shown(key, facts, args):
                use = f"{tensor.dtype} {tuple(tensor.shape)}"
                self._saves.save(tensor, facts, args, use)

    def _is_shown(self, key: int | None, facts: OperatorFacts, args: Sequence[Any]) -> bool:
        if facts.rows is None or (key, facts.name) not in self._shown:
            return False
        return indices_of(args) == self._tokens


_watch: ContextVar[WriteWatch | None] = ContextVar("graphrt_write_watch", default=None)

_libraries: dict[str, Any] = {}
"""By namespace; a kernel goes with its library."""
_judged: set[tuple[str, str]] = set()
_settled: set[str] = set()
"""Operators of torch's own: nobody defines these again, by the same name, so that they write."""


def note_operators() -> None:
    """Give the operators that write their kernel. To be called whenever new ones may have been
    defined: one that a run is the first to define is not seen by the watch of that run."""
    names = {*operator_names()} - _settled
    _settled.update(name for name in names if name.startswith(("aten::", "prims::", "quantized::")))
    # To ask for the schemas of all of torch's operators takes a capture 10 ms, twice a size.
    overloaded = {name.partition(".")[0] for name in names}
    for schema in chain.from_iterable(map(schemas_of_operator, overloaded)):
        if not (schema.is_mutable or "batch_norm" in schema.name):
            continue
        name = schema.name, schema.overload_name
        if name in _judged:
            continue
        _judged.add(name)
        if not writes_of(schema):
            continue
        namespace, _, short = schema.name.partition("::")
        library = _libraries.get(namespace)
        if library is None:
            library = _libraries[namespace] = kernel_library("IMPL", namespace, WATCH_KEY)
        full = f"{short}.{schema.overload_name}" if schema.overload_name else short
        writer = _Writer(namespace, short, schema.overload_name or "default")
        library.impl(full, WATCH_KEY, writer, True)


class _Writer:
    """The kernel of an operator that writes, which shows its arguments to the watch of the thread.

    It goes by the name: what is defined again later is another operator.
    """

    def __init__(self, *path: str) -> None:
        self._path = path
        self._func: Any = None
        self._facts = facts_of(None)
        self._of_tensors: tuple[int, ...] = ()

    def __call__(self, keys: Any, *args: Any, **kwargs: Any) -> Any:
        namespace, name, overload = self._path
        func = getattr(getattr(getattr(torch.ops, namespace), name), overload)
        if func is not self._func:
            self._facts, kinds = facts_of(func), [str(a.type) for a in func._schema.arguments]
            self._of_tensors = tuple(at for at, kind in enumerate(kinds) if kind == "Tensor")
            self._func = func
        for at in self._of_tensors:
            if at < len(args) and not isinstance(args[at], torch.Tensor):
                # Torch shows a tensor that it made of a number as the number, and takes none here.
                number = torch.tensor(args[at], device="cpu")
                args = (*args[:at], number, *args[at + 1 :])
        if in_transform():
            # These are no tensors with memory. The transform issues the operator again on such.
            return func.redispatch(keys.remove(watch_key()), *args, **kwargs)
        watch, key = _watch.get(), watch_key()
        # An operator says all that it writes, so that what its kernel calls need not be seen.
        include_key(key, False)
        try:
            if watch is not None:
                watch.look(self._facts, args, kwargs)
            return func(*args, **kwargs)
        finally:
            include_key(key, True)
