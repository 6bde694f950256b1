"""Watching which operator a host issues for a task, at capture and at every update."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from graphrt.ascend.attention import room_in_blocks
from graphrt.core.base.errors import InvalidUpdateError
from graphrt.core.base.thread_mode import ThreadMode


class Issued(NamedTuple):
    """An operator that was called, and with what."""

    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def workspace(self) -> torch.Tensor | None:
        """The scratch memory that it was given."""
        workspace = self.kwargs.get("workspace")
        return workspace if isinstance(workspace, torch.Tensor) else None


class OperatorWatch(ThreadMode):
    """Records the operators, other than torch's own, that write to their arguments.

    An operator that takes a `workspace` and is given None gets ours: memory that it allocated
    itself would be freed, while the graph keeps the address. Raises `InvalidUpdateError` for
    lengths that no request can have.
    """

    takes_apart = False

    def __init__(self, workspace: torch.Tensor | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._workspace = workspace
        # Operators since the last `take`.
        self._seen: list[Issued] = []

    def handle(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        kwargs = dict(kwargs)
        if func.namespace not in ("aten", "prim", "prims") and _writes(func):
            if self._workspace is not None and kwargs.get("workspace") is None and _takes(func):
                kwargs["workspace"] = self._workspace
            issued = Issued(func, args, kwargs)
            _check_lengths(issued)
            self._seen.append(issued)
        return func(*args, **kwargs)

    def take(self) -> list[Issued]:
        """The operators called since the last `take`."""
        operators, self._seen = self._seen, []
        return operators


def _check_lengths(issued: Issued) -> None:
    """Raise `InvalidUpdateError` for bad lengths. torch_npu checks those of paged attention in its
    launch queue, where an error ends all work of the process on the device."""
    arguments = _by_name(issued)
    for name, value in arguments.items():
        lengths = _on_host(value)
        if lengths and min(lengths) < 0:
            raise InvalidUpdateError(
                f"argument {name!r} of {issued.function} holds a negative length",
                got=lengths,
                expected="0 or more for each request",
                advice="0 for a request that is padding",
            )
    lengths = _on_host(arguments.get("context_lens"))
    if not lengths:
        return
    keys, requests = _room(arguments)
    if keys is not None and max(lengths) > keys:
        raise InvalidUpdateError(
            f"argument 'context_lens' of {issued.function} is beyond its block table",
            got=lengths,
            expected=f"at most {keys} each, what one row of the table has room for",
            advice="pass this step's lengths in tokens, and a block table with room for them",
        )
    if requests is not None and len(lengths) < requests:
        raise InvalidUpdateError(
            f"argument 'context_lens' of {issued.function} leaves requests out",
            got=lengths,
            expected=f"one for each of {requests}",
            advice="pad the list with a length for each request of the graph",
        )


def _room(arguments: dict[str, Any]) -> tuple[int | None, int | None]:
    """How many keys one request may have, and how many requests there are; None: unknown."""
    if "key_cache" not in arguments:
        latents, heads = arguments.get("ctkv"), arguments.get("kv_headnum")
        return room_in_blocks(latents, arguments.get("block_tables"), heads), None
    # Paged attention has one token a request.
    table, heads = arguments.get("block_table"), arguments.get("num_kv_heads")
    return room_in_blocks(arguments["key_cache"], table, heads), len(arguments["query"])


def _by_name(issued: Issued) -> dict[str, Any]:
    arguments = issued.function._schema.arguments
    return {
        **{argument.name: value for argument, value in zip(arguments, issued.args, strict=False)},
        **issued.kwargs,
    }


def _on_host(value: Any) -> list[int]:
    """The whole numbers of a list, or of a tensor on the host; none for anything else."""
    if isinstance(value, torch.Tensor):
        is_host_integer = value.device.type == "cpu" and not value.is_floating_point()
        value = value.flatten().tolist() if is_host_integer else None
    return value if type(value) is list and value and type(value[0]) is int else []


def _writes(function: Any) -> bool:
    # torch_npu does not say of its attention operators that they write to `out`.
    return any(
        argument.name in ("out", "output")
        or (argument.alias_info is not None and argument.alias_info.is_write)
        for argument in function._schema.arguments
    )


def _takes(function: Any) -> bool:
    return any(argument.name == "workspace" for argument in function._schema.arguments)
