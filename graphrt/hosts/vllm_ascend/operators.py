"""Watching which operator a host issues for a task, at capture and at every update."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from graphrt.core.base import InvalidUpdateError, ThreadMode


class Issued(NamedTuple):
    """An operator that was called, and with what."""

    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def workspace(self) -> torch.Tensor | None:
        """The scratch memory that it was given."""
        found = self.kwargs.get("workspace")
        return found if isinstance(found, torch.Tensor) else None


class OperatorWatch(ThreadMode):
    """Remembers operators that are no operators of torch itself and write to what they are given.

    One that has a `workspace` and gets None gets `workspace`: the memory that it would allocate is
    free again, and its graph would keep the address. Raises `InvalidUpdateError` for lengths that
    no request has.
    """

    def __init__(self, workspace: torch.Tensor | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._workspace = workspace
        self._seen: list[Issued] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func.namespace not in ("aten", "prim", "prims") and _writes(func):
            if self._workspace is not None and kwargs.get("workspace") is None and _takes(func):
                kwargs["workspace"] = self._workspace
            issued = Issued(func, args, kwargs)
            _check_lengths(issued)
            self._seen.append(issued)
        return func(*args, **kwargs)

    def take(self) -> list[Issued]:
        """What was called since this was asked for last."""
        seen, self._seen = self._seen, []
        return seen


def _check_lengths(issued: Issued) -> None:
    for name, value in issued.kwargs.items():
        if type(value) is list and value and type(value[0]) is int and min(value) < 0:
            raise InvalidUpdateError(
                f"argument {name!r} of {issued.function} holds a negative length",
                got=value,
                expected="0 or more for each request",
            )


def _writes(function: Any) -> bool:
    # torch_npu does not say of its attention operators that they write to `out`.
    return any(
        argument.name in ("out", "output")
        or (argument.alias_info is not None and argument.alias_info.is_write)
        for argument in function._schema.arguments
    )


def _takes(function: Any) -> bool:
    return any(argument.name == "workspace" for argument in function._schema.arguments)
