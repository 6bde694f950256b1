"""Watches that see one thing of a run each, and cost it little: writes, operators, streams."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextvars import ContextVar
from functools import partial
from itertools import chain
from typing import Any, TypeVar

import torch

from graphrt.core.base import tree
from graphrt.core.base._undo import Undo, undoing
from graphrt.core.base.thread_mode import WATCH_KEY, ThreadMode, watch_key
from graphrt.core.base.torch_names import (
    in_transform,
    include_key,
    kernel_library,
    operator_names,
    schemas_named,
)
from graphrt.core.capture.guard import is_listed
from graphrt.core.capture.operators import (
    OperatorFacts,
    facts_of,
    indices_of,
    writes_of,
    written,
)
from graphrt.core.device.contract import GraphWork
from graphrt.core.replay.recording import active, counted, issued
from graphrt.core.trust.watching.writes import SavedWrites

T = TypeVar("T")

_COLLECTIVES = ("c10d", "_c10d_functional")


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
    for schema in chain.from_iterable(map(schemas_named, overloaded)):
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


class IssuedWatch(ThreadMode):
    """Notes the operators of a step that captures, in their order: some forwards take another way
    then. What graphs record, and their eager parts, is noted by their captures, which find the list
    in `issued`: a platform's own operators, which run below, are none of the forward's. As a mode
    it sees what runs between the graphs of a forward that has several."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operators: list[Any] = []

    @undoing
    def run(self, undo: Undo, function: Callable[[], T], *, in_one: bool) -> T:
        """Call `function`, which captures; `in_one` says that all of it is one capture."""
        undo.set(issued, self.operators)
        return function() if in_one else self.around(function)

    def handle(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if active.get() is None:
            self.operators.append(func)
        return func(*args, **kwargs)


class WorkCount(ThreadMode):
    """Counts what an eager run issues, from which a platform knows what a graph of it will take:
    operators by the stream that is current; those in `breaks` count as breaks too. Kernels outside
    of torch's operators are not seen, nor a stream that only they use."""

    supports_higher_order_operators = True

    def __init__(self, stream_id: Callable[[], int], breaks: frozenset[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.work = GraphWork()
        self._stream_id = stream_id
        self._breaks = breaks

    @undoing
    def run(self, undo: Undo, function: Callable[[], T]) -> T:
        """Call `function`, which issues what is counted."""
        undo.set(counted, self.work)
        return self.around(function)

    def handle(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.work.collectives |= getattr(func, "namespace", "") in _COLLECTIVES
        if is_listed(func, self._breaks):
            self.work.breaks += 1
        if not facts_of(func).is_view:
            stream, operators = self._stream_id(), self.work.operators
            operators[stream] = operators.get(stream, 0) + 1
        return func(*args, **kwargs)
