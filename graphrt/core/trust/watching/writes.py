"""What a forward writes, saved before it is written; of what is too large for that, which rows."""

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
from graphrt.core.base.thread_mode import WATCH_KEY, unseen, watch_key
from graphrt.core.base.torch_names import include_key
from graphrt.core.capture import operators
from graphrt.core.capture.operators import WHOLE, Index, OperatorFacts, Rows, facts_of
from graphrt.core.trust.compare import difference, listed

T = TypeVar("T")


def storage_of(ref: StorageWeakRef) -> torch.UntypedStorage | None:
    """The memory, if it is still there."""
    if ref.expired():  # type: ignore[no-untyped-call]
        return None
    return torch_names.storage_of_weak(ref.cdata)


class _Region:
    """What one operator was about to write, as it was: a tensor, or rows of it.

    Nobody keeps the memory for this: what compiled code allocates is no state, and is gone when the
    run is over. No operator has made it, so nothing else tells it from state.
    """

    def __init__(self, tensor: torch.Tensor, rows: Rows, use: object) -> None:
        self.rows = rows
        self.use = use
        """Of which memory it is, as its watch knows it."""
        # The weak reference also keeps the storage's name from being used again.
        self._ref = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
        self._like = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        self._place = tensor.storage_offset(), tensor.size(), tensor.stride()
        self.was = self.read()

    def read(self) -> torch.Tensor:
        """A copy of what is there now; an empty tensor once the memory is gone."""
        now = self._now()
        if now is None:
            return self._like.clone()
        return now[self.rows.at] if self.rows.at else now.clone()

    def write(self, value: torch.Tensor) -> None:
        """Write it, unless the memory is gone, or was when the value was read."""
        now = self._now()
        if now is not None and value.numel():
            now[self.rows.at] = value

    def but_padding(
        self, pads: Sequence[int], sizes: Sequence[tuple[int, int]]
    ) -> tuple[slice | torch.Tensor, ...]:
        """The index of what is read, without the rows that padding names: see `spoilt`."""
        value, indices = self.was, self.rows.chosen
        if not pads or not value.dim() or (self.rows.at and not indices):
            return ()
        if not self.rows.at:
            dim, named = _dim_of_rows(value), _named(value, pads)
            others = [row not in named for row in range(value.shape[dim])]
            return *[slice(None)] * dim, torch.tensor(others, device=value.device)
        padding = torch.zeros((), dtype=torch.bool, device=value.device)
        for index in indices:
            for pad in pads:
                padding = padding | (index == pad)
            for rows, live in sizes:
                if index.dim() and index.shape[0] == rows:
                    beyond = torch.arange(rows, device=index.device) >= live
                    padding = padding | beyond.view(-1, *[1] * (index.dim() - 1))
        return *[slice(None)] * self.rows.dim, ~padding

    def _now(self) -> torch.Tensor | None:
        storage = storage_of(self._ref)
        return None if storage is None else torch.empty_like(self._like).set_(storage, *self._place)


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
        # Of which rows of each tensor nothing more is to be saved: every run of a forward writes
        # the same ones.
        self._saved: dict[tuple[object, ...], list[Index]] = {}
        self._protected: list[Callable[[Sequence[int]], str]] = []

    def save(
        self, tensor: torch.Tensor, facts: OperatorFacts, args: Sequence[Any], use: object
    ) -> None:
        """Save what an operator is about to write into `tensor`; `use` is what errors call it."""
        key, place = tensor.untyped_storage()._cdata, (tensor.storage_offset(), tensor.dtype)
        saved = self._saved.setdefault((key, *place, tensor.size(), tensor.stride()), [])
        if tensor.numel() == 0 or WHOLE.at in saved:
            return
        rows = facts.rows if facts.rows and tensor is args[0] else None
        if rows is not None:
            self.row_writes.add((key, facts.name))
        unseen(lambda: self._save(tensor.detach(), rows and rows(args), use, saved))

    def _save(
        self, tensor: torch.Tensor, rows: Rows | None, use: object, saved: list[Index]
    ) -> None:
        if rows is not None and any(_are_equal(rows.at, each) for each in saved):
            return
        if rows is None and self.bytes + tensor.nbytes > self.limit:
            if self._sums:
                self._protected.append(protected(tensor, str(use)))
                saved.append(WHOLE.at)
            return
        region = _Region(tensor, rows or WHOLE, use)
        self.bytes += region.was.nbytes
        if self.bytes > self.limit:
            got = f"{self.bytes} bytes, the last of them {use}"
            raise too_large("the state that the forward writes", got, self.limit)
        self._regions.append(region)
        # Known only now: a run after one that had no memory for the copy would not save it.
        saved.append(region.rows.at)

    def take(self) -> list[torch.Tensor]:
        """Copies of what is there now."""
        regions = self._regions
        return unseen(lambda: [region.read() for region in regions]) if regions else []

    def restore(self, values: Sequence[torch.Tensor] | None = None) -> None:
        """Put everything back as it was, the last write first, or write what `take` returned; what
        was saved since then stays as it is then. Called again it does so again."""
        if not self._regions:
            return
        pairs = [(region, region.was) for region in reversed(self._regions)]
        if values is not None:
            pairs = [*zip(self._regions, values, strict=False)]

        def write() -> None:
            for region, value in pairs:
                region.write(value)

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
                is_there = ours.numel() and ours.shape == theirs.shape
                if not is_there or not getattr(region.use, "exposed", True):
                    continue
                others = region.but_padding(pads, sizes)
                apart = difference(ours[others], theirs[others])
                if apart is not None and apart.relative > rounding:
                    return region.use, apart.text
            return None

        return unseen(compare)

    def check_protected(self, pads: Sequence[int]) -> list[str]:
        """The memory that was too large to be saved, and which rows of it were written.

        Raises `StateTooLargeError` for rows that no padding of an index input, in `pads`, names.
        """
        return [unseen(partial(check, pads)) for check in self._protected]


def _are_equal(ours: Index, theirs: Index) -> bool:
    """Whether two indices are of the same rows."""
    return len(ours) == len(theirs) and all(
        a.dtype is b.dtype and a.device == b.device and torch.equal(a, b)
        if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)
        else type(a) is type(b) and a == b
        for a, b in zip(ours, theirs, strict=True)
    )


def too_large(state: str, got: str, limit_bytes: int) -> StateTooLargeError:
    """The error for state that takes more memory than it may."""
    return StateTooLargeError(
        f"saving {state} takes too much memory",
        got=got,
        expected=f"at most {limit_bytes} bytes",
        advice="pad the index inputs of a KV cache to a dummy page; or declare what changes, and "
        "no cache: Host(state=[State(tensor, rows=...)]) or State(save=..., restore=...); or "
        "raise state_limit_bytes",
    )


# Memory that is too large to be saved ------------------------------------------------------------


def protected(tensor: torch.Tensor, name: str) -> Callable[[Sequence[int]], str]:
    """What tells of a tensor that only padding protects which rows were written since, as text,
    given the values of padding.

    It raises `StateTooLargeError` if one of them is none that padding names: neither a padding
    value itself nor its page. Rows are known by sums of their bits. Sums of equal rows are equal;
    that two changes in one row cancel is not likely.
    """
    tensor = tensor if tensor.dim() else tensor[None]
    was = _sums(tensor)

    def check(pads: Sequence[int]) -> str:
        changed = torch.nonzero(_sums(tensor) != was).flatten().tolist()
        named = _named(tensor, pads)
        other = [row for row in changed if row not in named]
        if other:
            raise StateTooLargeError(
                f"the warm-up wrote rows of {name} that no padding names, and they are too "
                "much to be saved",
                got=f"rows {listed(other)}",
                expected=f"rows of the padding of index inputs ({sorted(set(pads)) or 'none'})",
                advice="give the inputs that address it InputSpec(index=True, pad=a dummy row), or "
                "declare it: Host(state=[State(tensor, rows=...)]); or raise state_limit_bytes",
            )
        return f"{name}: rows {listed(changed) if changed else 'none'} written by padding"

    return check


def _sums(tensor: torch.Tensor) -> torch.Tensor:
    """A sum of the bits of each row; those of keys and of values weigh differently."""
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


def _dim_of_rows(tensor: torch.Tensor) -> int:
    """The first, or the second where the first has at most two rows (keys and values)."""
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
    length, and one of a single token, may name any row. To save them too takes a capture 1.15 times
    as long (19 sizes, 16 layers with keys and values, H200).

    It is no dispatch mode, under which every operator takes several times as long. It includes a
    dispatch key of this thread that torch itself leaves free; there the operators that write have a
    kernel, and all others are passed by in C++. `note_operators` gives it to them.
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
        for tensor in operators.written(facts, args, kwargs):
            key = tree.storage_key(tensor)
            if key is None or key not in self._known:
                continue
            self.written.add(key)
            is_shown = facts.rows is not None and (key, facts.name) in self._shown
            if not is_shown or operators.indices_of(args) != self._tokens:
                use = f"{tensor.dtype} {tuple(tensor.shape)}"
                self._saves.save(tensor, facts, args, use)


_watch: ContextVar[WriteWatch | None] = ContextVar("graphrt_write_watch", default=None)

_settled: set[str] = set()
"""Names of operators that are done: torch's own, and those that have a kernel of ours."""


def note_operators() -> None:
    """Give the operators that write their kernel. To be called whenever new ones may have been
    defined: one that a run is the first to define is not seen by the watch of that run."""
    names = {*torch_names.operator_names()} - _settled
    # To ask for the schemas of all of torch's operators takes a capture 10 ms, twice a size.
    bases = {name.split(".")[0] for name in names}
    for schema in chain.from_iterable(map(torch_names.schemas_of_operator, bases)):
        name = ".".join(filter(None, (schema.name, schema.overload_name)))
        if name in _settled or not (schema.is_mutable or "batch_norm" in name):
            continue
        _settled.add(name)
        if not operators.writes_of(schema):
            continue
        namespace, _, short = name.partition("::")
        kernel = _kernel(namespace, short.partition(".")[0], schema.overload_name or "default")
        _library(namespace).impl(short, WATCH_KEY, kernel, True)
    _settled.update(name for name in names if name.startswith(("aten::", "prims::", "quantized::")))


@cache
def _library(namespace: str) -> Any:
    """That of our kernels, which go with it."""
    return torch_names.kernel_library("IMPL", namespace, WATCH_KEY)


def _kernel(namespace: str, name: str, overload: str) -> Callable[..., Any]:
    """The kernel of an operator that writes, which shows its arguments to the watch of the thread.

    It looks the operator up by its name at each call, as a name may be defined again later.
    """

    def kernel(keys: Any, *args: Any, **kwargs: Any) -> Any:
        func = getattr(getattr(getattr(torch.ops, namespace), name), overload)
        for at in _tensors_of(func):
            if at < len(args) and not isinstance(args[at], torch.Tensor):
                # Torch shows a tensor that it made of a number as the number, and takes none here.
                number = torch.tensor(args[at], device="cpu")
                args = (*args[:at], number, *args[at + 1 :])
        if torch_names.in_transform():
            # These are no tensors with memory. The transform issues the operator again on such.
            return func.redispatch(keys.remove(watch_key()), *args, **kwargs)
        watch, key = _watch.get(), watch_key()
        # An operator says all that it writes, so that what its kernel calls need not be seen.
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
    """The places of single tensors among the arguments of an operator."""
    kinds = [str(argument.type) for argument in func._schema.arguments]
    return tuple(at for at, kind in enumerate(kinds) if kind == "Tensor")
