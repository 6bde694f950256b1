"""Saves memory before a forward writes it; of memory too large for that, knows the written rows."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextvars import ContextVar
from functools import cache, partial
from itertools import chain
from typing import Any, TypeVar

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from graphrt.core.base import torch_names, tree
from graphrt.core.base._undo import Undo, undoing
from graphrt.core.base.errors import StateTooLargeError
from graphrt.core.base.texts import listed
from graphrt.core.base.thread_mode import WATCH_KEY, unseen, watch_key
from graphrt.core.base.torch_names import include_key
from graphrt.core.capture import operators
from graphrt.core.capture.operators import OperatorFacts, facts_of
from graphrt.core.capture.state import too_large
from graphrt.core.device.contract import FirstCallError
from graphrt.core.replay.recording import current_capture
from graphrt.trust.compare import difference
from graphrt.trust.watching.rows import ROWS, WHOLE, Index, Rows, indices_of

T = TypeVar("T")


def storage_of(ref: StorageWeakRef) -> torch.UntypedStorage | None:
    """The storage, if it is still alive."""
    if ref.expired():  # type: ignore[no-untyped-call]
        return None
    return torch_names.storage_of_weak(ref.cdata)


Extent = tuple[int, int, bool, object]
"""Of a tensor in its storage: first byte, end, whether it has gaps, and shape, strides, dtype."""


def extent_of(part: torch.Tensor) -> Extent:
    """Where a tensor is in its storage."""
    if part.is_nested:
        return 0, part.untyped_storage().nbytes(), True, id(part)
    length = 1
    for size, stride in zip(part.shape, part.stride(), strict=True):
        length += (int(size) - 1) * int(stride)
    bytes_each = part.element_size()
    start = int(part.storage_offset()) * bytes_each
    form = tuple(part.shape), part.stride(), part.dtype
    return start, start + length * bytes_each, length != part.numel(), form


class Region:
    """A copy of what one operator was about to write: a tensor, or rows of it.

    It does not keep the memory alive. Memory that compiled code allocates looks like state, as no
    operator has made it; but it is gone when the run is over, and is left out from then on.
    """

    def __init__(
        self, tensor: torch.Tensor, rows: Rows, use: object, source: tuple[int, ...] = ()
    ) -> None:
        self.rows = rows
        self.source = source
        """The addresses of the integer tensors that the operator was given."""
        self.use = use
        """Which memory it is: a `Use`, or a description."""
        # While there is the weak reference, no other storage gets this one's key.
        self._ref = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
        self.span = extent_of(tensor)[:2]
        # An empty tensor of its dtype and device, and where it is in the storage: from these `_now`
        # makes the tensor again.
        self._like = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        self.place = tensor.storage_offset(), tensor.size(), tensor.stride()
        self.was = self.read()

    def read(self) -> torch.Tensor:
        """A copy of the contents now; an empty tensor once the memory is gone."""
        now = self.tensor()
        if now is None:
            return self._like.clone()
        return now[self.rows.at] if self.rows.at else now.clone()

    def write(self, value: torch.Tensor) -> None:
        """Write a value that `read` returned, unless the memory is gone or was gone then."""
        now = self.tensor()
        if now is not None and value.numel():
            now[self.rows.at] = value

    def without_padding(
        self, pads: Sequence[int], sizes: Sequence[tuple[int, int]]
    ) -> tuple[slice | torch.Tensor, ...]:
        """An index into what is read that leaves out padding's rows: see `spoilt_by_padding`."""
        value, indices = self.was, self.rows.chosen
        if not pads or not value.dim() or (self.rows.at and not indices):
            return ()
        if not self.rows.at:
            dim, named = _dim_of_rows(value), _rows_of_padding(value, pads)
            kept_rows = [row not in named for row in range(value.shape[dim])]
            return *[slice(None)] * dim, torch.tensor(kept_rows, device=value.device)
        padding = torch.zeros((), dtype=torch.bool, device=value.device)
        for index in indices:
            for pad in pads:
                padding = padding | (index == pad)
            for rows, live in sizes:
                if index.dim() and index.shape[0] == rows:
                    beyond = torch.arange(rows, device=index.device) >= live
                    padding = padding | beyond.view(-1, *[1] * (index.dim() - 1))
        return *[slice(None)] * self.rows.dim, ~padding

    def addressed_by_padding(self) -> Rows | None:
        """After a run of padding alone: the rows that it wrote whatever the position in the batch;
        None if there are none. An index gives them several times. Of memory that was written
        without an index it is the only row that changed, and the only slot of that page."""
        if self.rows.chosen:
            linear, dims = torch.zeros((), dtype=torch.int64, device=self.was.device), []
            for dim, index in self._indexed(self.rows):
                size = self.place[1][dim]
                # Negative ones count from the end, as in `index_put_`.
                linear = linear * size + index.to(linear.device) % size
                dims.append((dim, size))
            # On the host: a few numbers, and not every device has the operator.
            numbers, counts = torch.unique(linear.to("cpu"), return_counts=True)
            numbers, at = numbers[counts > 1].to(linear.device), [*self.rows.at]
            for dim, size in reversed(dims):
                at[dim], numbers = numbers % size, numbers // size
            return Rows(tuple(at)) if len(numbers) else None
        if getattr(self.use, "is_scratch", False):
            return None  # filled by each run before it reads there: no live row uses it
        now = self.read()
        if self.rows.at or not now.dim() or now.shape != self.was.shape or not now.numel():
            return None
        places = _lone_rows(now, self.was)
        return Rows(tuple(places)) if places else None

    def numbers_of(self, rows: Rows) -> list[tuple[int, list[int]]]:
        """(size of the dimension, row numbers) of each index tensor of `rows`."""
        return [(self.place[1][dim], index.tolist()) for dim, index in self._indexed(rows)]

    @staticmethod
    def _indexed(rows: Rows) -> list[tuple[int, torch.Tensor]]:
        return [(d, each) for d, each in enumerate(rows.at) if isinstance(each, torch.Tensor)]

    @property
    def key(self) -> int:
        """The key of the storage."""
        return int(self._ref.cdata)

    def tensor(self) -> torch.Tensor | None:
        """The tensor over its memory; None once that is gone."""
        storage = storage_of(self._ref)
        return None if storage is None else torch.empty_like(self._like).set_(storage, *self.place)


class SavedWrites:
    """Saves memory from outside before runs write it, and puts it back. Of an index write it saves
    only the rows.

    Of a tensor beyond `limit_bytes` it keeps a sum of each row alone. Then only rows that padding
    addresses may be written, which `check_protected` checks.
    """

    def __init__(self, limit_bytes: int, *, sums: bool = True) -> None:
        """Without `sums` a tensor that is too large is not checked either."""
        self.bytes = 0
        """Bytes of all copies so far."""
        # (key of a storage of which an operator wrote rows, the operator's name).
        self.row_writes: set[tuple[int, str]] = set()
        self._sums = sums
        self.limit = limit_bytes
        # Keys of storages that are neither saved nor put back.
        self._left_out: Collection[int] = ()
        # The copies, in the order of the writes.
        self.regions: list[Region] = []
        # which tensor (storage, offset, dtype, shape, strides) -> the indices of its rows that are
        # saved already: every run of a forward writes the same ones.
        self._saved: dict[tuple[object, ...], list[Index]] = {}
        self.protected_rows: list[Region] = []
        """Of each tensor that was too large, the only row that `check_protected` found written."""
        # A `protection_check` of each tensor that was too large.
        self._protected: list[Callable[[Sequence[int]], str]] = []

    def save(
        self, tensor: torch.Tensor, facts: OperatorFacts, args: Sequence[Any], use: object
    ) -> None:
        """Save what an operator is about to write into `tensor`; `use` is what errors call it."""
        key, place = tensor.untyped_storage()._cdata, (tensor.storage_offset(), tensor.dtype)
        saved = self._saved.setdefault((key, *place, tensor.size(), tensor.stride()), [])
        if tensor.numel() == 0 or WHOLE.at in saved or key in self._left_out:
            return
        rows_of = ROWS.get(facts.name) if tensor is args[0] else None
        if rows_of is not None:
            self.row_writes.add((key, facts.name))
        source = tuple(
            each.data_ptr()
            for each in tree.tensors(args)
            if not each.is_floating_point() and each.layout is torch.strided
        )
        unseen(lambda: self._save(tensor.detach(), rows_of and rows_of(args), use, saved, source))

    def _save(
        self,
        tensor: torch.Tensor,
        rows: Rows | None,
        use: object,
        saved: list[Index],
        source: tuple[int, ...],
    ) -> None:
        """Copy `rows` of a tensor, None for all, unless they are among those `saved`."""
        if rows is not None and any(_same_rows(rows.at, each) for each in saved):
            return
        if rows is None and self.bytes + tensor.nbytes > self.limit:
            if self._sums:
                note = partial(self._note_protected, tensor, use, source)
                self._protected.append(protection_check(tensor, str(use), note))
                saved.append(WHOLE.at)
            return
        try:
            region = Region(tensor, rows or WHOLE, use, source)
        except IndexError:
            # A row that is not there: the operator's own error is to be raised, not ours.
            return self._save(tensor, None, use, saved, source)
        self.bytes += region.was.nbytes
        if self.bytes > self.limit:
            got = f"{self.bytes} bytes, the last of them {use}"
            raise too_large("the state that the forward writes", got, self.limit)
        self.regions.append(region)
        # After the copy: where there was no memory for it, the next run has to save these rows.
        saved.append(region.rows.at)

    def leave_out(self, keys: Collection[int]) -> None:
        """Neither save nor put back nor compare these storages."""
        self._left_out = keys
        self.regions = [each for each in self.regions if each.key not in keys]

    def take(self) -> list[torch.Tensor]:
        """Copies of the contents now, of everything that is saved."""
        regions = self.regions
        return unseen(lambda: [region.read() for region in regions]) if regions else []

    def restore(self, values: Sequence[torch.Tensor] | None = None) -> None:
        """Put everything back as it was, the last write first; or put back what `take` returned:
        then what was saved later is left alone. May be called again."""
        if not self.regions:
            return
        pairs = [(region, region.was) for region in reversed(self.regions)]
        if values is not None:
            pairs = [*zip(self.regions, values, strict=False)]

        def write() -> None:
            for region, value in pairs:
                region.write(value)

        unseen(write)

    def spoilt_by_padding(
        self,
        padded: Sequence[torch.Tensor],
        alone: Sequence[torch.Tensor],
        pads: Sequence[int],
        sizes: Sequence[tuple[int, int]],
        rounding: float,
    ) -> tuple[object, str] | None:
        """The first memory that differs, by more than `rounding`, after a padded run and after one
        without padding, and the difference; None if none does. `take` returned `padded` and
        `alone`.

        Some memory may differ. First, rows that `pads` name: only padding addresses them. If there
        are any, also rows that padding rows of the step write: an index with as many entries as the
        padded number of one of `sizes`, (padded, live), has its padding rows behind the live ones.
        And memory that runs overwrite before they read it.
        """

        def compare() -> tuple[object, str] | None:
            for region, ours, theirs in zip(self.regions, padded, alone, strict=False):
                is_there = ours.numel() and ours.shape == theirs.shape
                exposes = getattr(region.use, "exposes", None)
                if not is_there or not (exposes is None or exposes(*region.span)):
                    continue
                compared = region.without_padding(pads, sizes)
                apart = difference(ours[compared], theirs[compared])
                if apart is not None and apart.relative > rounding:
                    if not region.rows.at and _is_of_padding(ours, theirs, pads):
                        continue
                    return region.use, apart.text
            return None

        return unseen(compare)

    def check_protected(self, pads: Sequence[int]) -> list[str]:
        """The memory that was too large to be saved, and which rows of it were written.

        Raises `StateTooLargeError` for rows that no padding of an index input, in `pads`, names.
        """
        return [unseen(partial(check, pads)) for check in self._protected]

    def _note_protected(
        self, tensor: torch.Tensor, use: object, source: tuple[int, ...], rows: list[int]
    ) -> None:
        if len(rows) == 1 and tensor.dim():
            row: list[slice | torch.Tensor] = [torch.tensor(rows, device=tensor.device)]
            at = [*[slice(None)] * _dim_of_rows(tensor), *row]
            self.protected_rows.append(Region(tensor, Rows(tuple(at)), use, source))


def _same_rows(ours: Index, theirs: Index) -> bool:
    """Whether two indices choose the same rows."""
    return len(ours) == len(theirs) and all(
        a.dtype is b.dtype and a.device == b.device and torch.equal(a, b)
        if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)
        else type(a) is type(b) and a == b
        for a, b in zip(ours, theirs, strict=True)
    )


# Memory that is too large to be saved ------------------------------------------------------------


def protection_check(
    tensor: torch.Tensor, name: str, note: Callable[[list[int]], None] | None = None
) -> Callable[[Sequence[int]], str]:
    """A check of a tensor that is too large to be saved. Given the padding values, it returns as
    text which rows were written since this call, and tells them to `note`.

    It raises `StateTooLargeError` if no padding value names one of these rows, or its page. A row
    counts as written if the sum of its bits is another one. It is not likely that two changes of a
    row cancel.
    """
    tensor = tensor if tensor.dim() else tensor[None]
    was = _sums(tensor)

    def check(pads: Sequence[int]) -> str:
        changed = torch.nonzero(_sums(tensor) != was).flatten().tolist()
        padding_rows = _rows_of_padding(tensor, pads)
        not_padding = [row for row in changed if row not in padding_rows]
        if not_padding:
            raise StateTooLargeError(
                f"the warm-up wrote rows of {name} other than those of padding, and {name} is too "
                "large to be saved",
                got=f"rows {listed(not_padding)}",
                expected=f"rows of the padding of index inputs ({sorted(set(pads)) or 'none'})",
                advice="give the inputs that address it InputSpec(index=True, pad=a dummy row), or "
                "declare it: Host(state=[State(tensor, rows=...)]); or raise state_limit_bytes",
            )
        if note is not None:
            note(changed)
        return f"{name}: rows {listed(changed) if changed else 'none'} written by padding"

    return check


def _sums(tensor: torch.Tensor) -> torch.Tensor:
    """A sum of the bits of each row, in which keys and values have different weights."""
    dim = _dim_of_rows(tensor)
    sums = torch.zeros(tensor.shape[dim], dtype=torch.int64, device=tensor.device)
    for weight, part in enumerate(tensor if dim else [tensor], 1):
        bits = part.reshape(len(part), -1).contiguous().view(torch.uint8)
        whole = bits.shape[1] - bits.shape[1] % 8
        if whole and bits.stride(0) % 8 == 0 and bits.data_ptr() % 8 == 0:
            sums += bits[:, :whole].view(torch.int64).sum(1) * weight
            bits = bits[:, whole:]
        sums += bits.sum(1, dtype=torch.int64) * weight
    return sums


def _lone_rows(ours: torch.Tensor, theirs: torch.Tensor) -> list[slice | torch.Tensor]:
    """An index of the only row that differs, and of the only slot of that page; empty if several
    do. In front of it are dimensions of which all rows differ, such as layers."""
    unlike = (tree.octets(ours) != tree.octets(theirs)).view(*ours.shape, -1).any(-1)
    places: list[slice | torch.Tensor] = [slice(None)] * _dim_of_rows(ours)
    found = 0
    for dim in range(len(places), ours.dim()):
        others = [each for each in range(ours.dim()) if each != dim]
        rows = (unlike.any(others) if others else unlike).nonzero().flatten()
        is_one = len(rows) == 1 and ours.shape[dim] > 1
        if found == 2 or not (is_one or (not found and len(rows) == ours.shape[dim])):
            break
        places.append(rows if is_one else slice(None))
        found += is_one
    return places if found else []


def _is_of_padding(ours: torch.Tensor, theirs: torch.Tensor, pads: Sequence[int]) -> bool:
    """Whether the only row that differs is one that padding values name."""
    places = _lone_rows(ours, theirs)
    dim = next((at for at, each in enumerate(places) if isinstance(each, torch.Tensor)), None)
    return dim is not None and int(places[dim]) in _rows_of_padding(ours[(0,) * dim], pads)  # type: ignore[arg-type]


def _dim_of_rows(tensor: torch.Tensor) -> int:
    """The first dimension, or the second if the first has at most two entries (keys, values)."""
    return 1 if tensor.dim() > 1 and tensor.shape[0] <= 2 else 0


def _rows_of_padding(tensor: torch.Tensor, pads: Sequence[int]) -> set[int]:
    """The rows that padding values name: the row of that number, or the page with that slot."""
    dim = _dim_of_rows(tensor)
    rows = tensor.shape[dim]
    named = {pad for pad in pads if 0 <= pad < rows}
    # Of [pages, slots, ...]; else of [pages, heads, slots, width], if the first gives no such page.
    per_page = tensor.shape[dim + 1 : dim + (3 if tensor.dim() == dim + 4 else 2)] or (1,)
    for pad in pads:
        pages = (pad // max(slots, 1) for slots in per_page if pad >= 0)
        named.update([page for page in pages if page < rows][:1])
    return named


# A watch that sees nothing but writes -------------------------------------------------------------


class WriteWatch:
    """Saves `known` memory before a run of `tokens` tokens writes it, and looks at nothing else.

    Rows that an operator writes for each token are not saved if it did so in the largest run of the
    kind, whose writes are `shown`: both runs have nothing but padding, and so write the same rows.
    An index of another length, or of a single token, may name any row, and is saved. To save all
    takes a capture 1.15 times as long (19 sizes, 16 layers with keys and values, H200).

    It is no dispatch mode: under one every operator takes several times as long. For this thread it
    includes a dispatch key that torch leaves free. There the operators that write have a kernel of
    ours, from `note_operators`, and C++ passes by all others.
    """

    def __init__(
        self,
        known: Collection[int],
        saves: SavedWrites,
        shown: SavedWrites,
        tokens: int,
        *,
        records: bool = False,
    ) -> None:
        self._known = known
        self._saves = saves
        # (key of a storage, operator) whose rows need not be saved: see above.
        self._shown = shown.row_writes if tokens > 1 else ()
        self._tokens = tokens
        self.written: set[int] = set()
        """The keys of the `known` memory that the run has written."""
        self.is_inexact = False
        """Whether a graph has recorded an operator in another form than without this watch."""
        # Whether graphs record operators and run none: what they write is saved by `save_recorded`.
        self._records = records
        self._recorded: list[tuple[torch.Tensor, OperatorFacts, Sequence[Any], str]] = []

    @undoing
    def around(self, undo: Undo, function: Callable[[], T]) -> T:
        """Call `function`, and save what it writes."""
        undo.set(_watch, self)
        undo.later(partial(include_key, watch_key(), False))
        include_key(watch_key(), True)
        return function()

    def look(self, facts: OperatorFacts, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """Save what an operator is about to write."""
        for tensor in operators.written(facts, args, kwargs):
            key = tree.storage_key(tensor)
            if key is None or key not in self._known:
                continue
            self.written.add(key)
            is_shown = facts.name in ROWS and (key, facts.name) in self._shown
            if not is_shown or indices_of(args) != self._tokens:
                call = tensor, facts, args, f"{tensor.dtype} {tuple(tensor.shape)}"
                if self._records and current_capture() is not None:
                    self._recorded.append(call)
                else:
                    self._saves.save(*call)

    def save_recorded(self, owned: Callable[[torch.Tensor], bool]) -> None:
        """Before a graph is replayed that was recorded: save what it writes. Raises
        `FirstCallError` where row numbers are in memory of graphs, which is `owned`: they are known
        only by a run."""
        while self._recorded:
            tensor, facts, args, use = self._recorded.pop(0)
            if any(not each.is_floating_point() and owned(each) for each in tree.tensors(args)):
                raise FirstCallError(
                    "which rows this size writes is known only by a warm-up",
                    got=use,
                    advice="GraphOptions(warmups=1)",
                )
            self._saves.save(tensor, facts, args, use)


_watch: ContextVar[WriteWatch | None] = ContextVar("graphrt_write_watch", default=None)
"""The watch of this thread, to which `_kernel` shows operators that write."""

_done: set[str] = set()
"""Names of operators that need no look any more: torch's own, and those with a kernel of ours."""


def note_operators() -> None:
    """Give our kernel to the operators that write. To be called whenever new ones may have been
    defined: an operator that a run itself defines is not seen in that run."""
    names = {*torch_names.operator_names()} - _done
    # Of new ones alone: to ask for all schemas of torch takes a capture 10 ms, twice a size.
    bases = {name.split(".")[0] for name in names}
    for schema in chain.from_iterable(map(torch_names.schemas_of_operator, bases)):
        name = ".".join(filter(None, (schema.name, schema.overload_name)))
        if name in _done or not (schema.is_mutable or "batch_norm" in name):
            continue
        _done.add(name)
        # `set_` gives a tensor other memory, and writes none. Graphs' own aliases are made by it:
        # 105 of 147 looks at each size of a model with 17 pieces.
        if schema.name == "aten::set_" or not operators.writes_of(schema):
            continue
        namespace, _, short = name.partition("::")
        kernel = _kernel(namespace, short.partition(".")[0], schema.overload_name or "default")
        # True: torch hands the kernel the set of dispatch keys as its first argument.
        _library(namespace).impl(short, WATCH_KEY, kernel, True)
    _done.update(name for name in names if name.startswith(("aten::", "prims::", "quantized::")))


@cache
def _library(namespace: str) -> Any:
    """The library of our kernels for a namespace: they live as long as it does."""
    return torch_names.kernel_library("IMPL", namespace, WATCH_KEY)


def _kernel(namespace: str, name: str, overload: str) -> Callable[..., Any]:
    """The kernel of an operator that writes, which shows its arguments to the watch of the thread.

    It looks the operator up by its name at each call, as a name may be defined again later.
    """

    @torch_names.untraced
    def kernel(keys: Any, *args: Any, **kwargs: Any) -> Any:
        func = getattr(getattr(getattr(torch.ops, namespace), name), overload)
        watch, key = _watch.get(), watch_key()
        for at in _tensors_of(func):
            if at < len(args) and not isinstance(args[at], torch.Tensor):
                # A tensor that torch made of a number arrives as a number, which `func` refuses.
                # It is rounded otherwise beside tensors without dimensions, or of float64.
                if watch is not None and current_capture() is not None:
                    watch.is_inexact = True
                number = torch.tensor(args[at], device="cpu")
                args = (*args[:at], number, *args[at + 1 :])
        if torch_names.in_transform():
            # No tensors with memory: the transform issues the operator again on those that are.
            return func.redispatch(keys.remove(watch_key()), *args, **kwargs)
        # The schema says all that the operator writes: operators that it calls need no look.
        include_key(key, False)
        try:
            if watch is not None:
                watch.look(facts_of(func), args, kwargs)
            return func(*args, **kwargs)
        finally:
            include_key(key, True)

    return kernel


@cache
def _tensors_of(func: Any) -> tuple[int, ...]:
    """The positions of an operator's arguments that are single tensors."""
    kinds = [str(argument.type) for argument in func._schema.arguments]
    return tuple(at for at, kind in enumerate(kinds) if kind == "Tensor")
