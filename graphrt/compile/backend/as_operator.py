"""Compiled code as one operator, for captures and watches that see the dispatcher's calls."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch

from graphrt.core.base.thread_mode import is_watched
from graphrt.core.batch.context import current_context
from graphrt.core.replay.recording import current_capture, telling, warming_up

_library: Any = torch.library.Library("graphrt", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define(
    "compiled_piece(int piece, Tensor[] read, Tensor(a!)[] written, SymInt[] sizes, int[] order)"
    " -> Tensor[]"
)
_library.define("compiled_uses(Tensor[] read, Tensor(a!)[] written) -> ()")

_READ, _WRITTEN, _SIZE = range(3)
_numbers = itertools.count()
_pieces: weakref.WeakValueDictionary[int, AsOperator] = weakref.WeakValueDictionary()


class AsOperator:
    """Runs compiled code as one call of the operator `graphrt::compiled_piece`.

    Kernels of compiled code are no operators: a capture that records operators, or a watch of what
    they write, would miss them. The operator's schema tells what holds for every piece: it writes
    only the tensors with the indices `written`, and its results are new. Without `always`, `run` is
    called directly unless a watch is on.
    """

    def __init__(
        self,
        run: Callable[..., Any],
        returns: int | None,
        written: Collection[int],
        *,
        always: bool,
    ) -> None:
        self._run = run
        # How many tensors `run` returns; None for nothing.
        self._returns = returns
        self._written = frozenset(written)
        self._always = always
        # The operator's argument `piece`, by which its body finds this object.
        self._number = next(_numbers)
        _pieces[self._number] = self

    def __call__(self, *args: Any) -> Any:
        if not (self._always or is_watched()):
            return self._run(*args)
        kinds: tuple[list[Any], list[Any], list[Any]] = ([], [], [])
        order = []
        for index, each in enumerate(args):
            kind = _SIZE
            if isinstance(each, torch.Tensor):
                kind = _WRITTEN if index in self._written else _READ
            kinds[kind].append(each)
            order.append(kind)
        results = torch.ops.graphrt.compiled_piece.default(self._number, *kinds, order)
        if self._returns is None:
            return None
        return results[0] if self._returns == 1 else tuple(results)

    def run(self, kinds: Sequence[Sequence[Any]], order: Sequence[int]) -> list[torch.Tensor]:
        """The body of the operator. `kinds` are its arguments read, written and sizes; `order` has
        the kind of each argument of `run`, in order."""
        of_kind = [iter(each) for each in kinds]
        results = self._run(*(next(of_kind[kind]) for kind in order))
        if self._returns is None:
            return []
        return [results] if self._returns == 1 else list(results)


class TellingUses:
    """Calls `run`, after an operator that tells watches which arguments its kernels read and write:
    those with the indices `written`, and all that nothing writes. It is for code with splitting
    operators inside, which watches see too: they write the arguments `by_operators`, and of a cache
    watches save the rows that are written. A capture takes `captured` instead, if given."""

    def __init__(
        self,
        run: Callable[..., Any],
        written: Collection[int],
        captured: Callable[..., Any] | None = None,
        by_operators: Collection[int] = (),
    ) -> None:
        self._run = run
        self._written = sorted(written)
        self._not_read = {*written, *by_operators}
        self._captured = captured

    def __call__(self, *args: Any) -> Any:
        if self._captured is not None and current_capture() is not None:
            return self._captured(*args)
        if is_watched():
            torch.ops.graphrt.compiled_uses.default(
                [
                    each
                    for index, each in enumerate(args)
                    if isinstance(each, torch.Tensor) and index not in self._not_read
                ],
                [args[index] for index in self._written],
            )
        return self._run(*args)


class TellingRows:
    """Calls `run`; in a watched warm-up after `rows`, which writes the rows as they are that `run`
    writes by index: kernels of compiled code show no row numbers, and padding has an address."""

    def __init__(self, run: Callable[..., Any], rows: Callable[..., Any]) -> None:
        self._run = run
        self._rows = rows

    def __call__(self, *args: Any) -> Any:
        if warming_up.get() and is_watched():
            context = current_context()
            # Not in a trial, which has a live batch.
            if context is not None and context.live is None and context.capture is None:
                token = telling.set(True)
                try:
                    self._rows(*args)
                finally:
                    telling.reset(token)
        return self._run(*args)


def _compiled_piece(
    piece: int,
    read: list[torch.Tensor],
    written: list[torch.Tensor],
    sizes: list[int],
    order: list[int],
) -> list[torch.Tensor]:
    return _pieces[piece].run((read, written, sizes), order)


_library.impl("compiled_piece", _compiled_piece, "CompositeExplicitAutograd")
_library.impl("compiled_uses", lambda read, written: None, "CompositeExplicitAutograd")
