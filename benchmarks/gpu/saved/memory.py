"""Memories by name, and the operators that kernels come from."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from graphrt.cuda.blocks import workspace_sizes
from graphrt.cuda.driver.api import captured_nodes

Range = tuple[int, int, str]
"""Start, end and name of a memory."""


def ranges(named: Mapping[str, Tensor], pool: tuple[int, int], stream: int) -> list[Range]:
    """Named tensors, the pool's segments for small and for large blocks, and cuBLAS's workspace.

    With expandable segments a pool has one range of addresses of each kind.
    """
    found: dict[int, Range] = {}
    for name, tensor in named.items():
        start, size = tensor.untyped_storage().data_ptr(), tensor.untyped_storage().nbytes()
        found.setdefault(start, (start, start + size, name))
    sizes, pools, workspaces = workspace_sizes(), {}, 0
    for segment in torch.cuda.memory_snapshot():
        at = segment["address"]
        if tuple(segment["segment_pool_id"]) == pool:
            low, high = pools.get(segment["segment_type"], (at, at))
            pools[segment["segment_type"]] = min(low, at), max(high, at + segment["total_size"])
            continue
        for block in segment["blocks"]:
            is_used = block["state"] == "active_allocated"
            may_be = is_used and block["requested_size"] in sizes and segment["stream"] == stream
            if may_be and at not in found:  # a weight may have the same size
                found[at] = at, at + block["size"], f"workspace {workspaces}"
                workspaces += 1
            at += block["size"]
    for kind, (low, high) in pools.items():
        found[low] = low, high, f"pool {kind}"
    return sorted(found.values())


def places(known: list[Range]) -> Callable[[int], tuple[int, int] | None]:
    """Word -> the number of the memory that it points into, and the offset."""
    starts = [start for start, *_ in known]

    def place(word: int) -> tuple[int, int] | None:
        index = bisect.bisect_right(starts, word) - 1
        if index < 0 or word >= known[index][1]:
            return None
        return index, word - starts[index]

    return place


def map_pool(pool: Any, sizes: Mapping[str, int]) -> None:
    """Have the allocator map so many bytes of a pool's ranges, which then stay mapped."""
    with torch.cuda.use_mem_pool(pool):
        large = torch.empty(
            max(sizes.get("pool large", 0), 2 << 20), dtype=torch.uint8, device="cuda"
        )
        small = [
            torch.empty(512 << 10, dtype=torch.uint8, device="cuda")
            for _ in range(-(-sizes.get("pool small", 0) // (512 << 10)))
        ]
        del large, small


class Operators(TorchDispatchMode):
    """Notes which nodes of a capture each operator made, and how it was called."""

    def __init__(self, stream: int) -> None:
        super().__init__()
        self._stream = stream
        self.calls: list[tuple[int, int, dict[str, Any]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = captured_nodes(self._stream) or 0
        result = func(*args, **(kwargs or {}))
        after = captured_nodes(self._stream) or 0
        if after > before:
            call = {"name": str(func), "args": _plain(args), "kwargs": _plain(kwargs or {})}
            self.calls.append((before, after, call))
        return result

    def of_nodes(self) -> Iterator[tuple[int, dict[str, Any]]]:
        for before, after, call in self.calls:
            for node in range(before, after):
                yield node, call


def _plain(value: Any) -> Any:
    def leaf(each: Any) -> Any:
        if isinstance(each, Tensor):
            dtype = str(each.dtype).removeprefix("torch.")
            return {"tensor": [list(each.shape), list(each.stride()), dtype]}
        if isinstance(each, torch.dtype):
            return {"dtype": str(each).removeprefix("torch.")}
        return each if isinstance(each, bool | int | float | str | None) else {"other": str(each)}

    return tree_map(leaf, value)


def prepared(operator: Mapping[str, Any]) -> Callable[[], Any]:
    """The call of a noted operator, on memory of any values. Raises `ValueError` if that cannot be
    done."""

    def made(value: Any) -> Any:
        if isinstance(value, list):
            return [made(each) for each in value]
        if isinstance(value, dict):
            if "tensor" in value:
                shape, stride, dtype = value["tensor"]
                options: Any = {"dtype": getattr(torch, dtype), "device": "cuda"}
                return torch.empty_strided(shape, stride, **options)
            if "dtype" in value:
                return getattr(torch, value["dtype"])
            if "other" in value:
                raise ValueError(value["other"])
            return {key: made(each) for key, each in value.items()}
        return value

    package, name, overload = str(operator["name"]).split(".")
    if package not in ("aten", "prims"):
        raise ValueError(operator["name"])
    function = getattr(getattr(getattr(torch.ops, package), name), overload)
    return partial(function, *made(operator["args"]), **made(operator["kwargs"]))
