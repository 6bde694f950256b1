"""Results of eager parts that others hold too: graphs read a copy, and must not write it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from graphrt.core.base import BreakError, tree
from graphrt.core.capture.refusals.source import user_source


class Copies:
    """The copies that a capture reads in place of memory which an eager part returned and did not
    make: state, say. A write would reach the copy alone."""

    def __init__(self) -> None:
        self._parts: dict[StorageWeakRef, str] = {}

    def __bool__(self) -> bool:
        return bool(self._parts)

    def note(self, part: str, copy: torch.Tensor) -> None:
        """Note the copy of what an eager part of this name returned."""
        self._parts[StorageWeakRef(copy.untyped_storage())] = part  # type: ignore[no-untyped-call]

    def check(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Raise `BreakError` if an operator is about to write a copy."""
        schema = getattr(func, "_schema", None)
        if not self._parts or schema is None or not schema.is_mutable:
            return
        for place, argument in enumerate(schema.arguments):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            given = args[place] if place < len(args) else kwargs.get(argument.name)
            for tensor in tree.tensors(given):
                if tensor.layout is not torch.strided:
                    continue
                ref = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
                part = self._parts.get(ref)
                if part is not None:
                    _refuse(part, func, tensor)


def _refuse(part: str, func: Any, tensor: torch.Tensor) -> None:
    raise BreakError(
        f"what eager break {part} returned is written, and it is memory that others hold too: the "
        "write would reach a copy alone",
        got=f"{func} of {tensor.dtype} {tuple(tensor.shape)}, at {user_source() or 'some line'}",
        expected="a fresh tensor, or memory that is written where it is",
        advice="return a clone() from the eager part, or write into the tensor itself",
    )
