"""Memories by name, and the operators that kernels come from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from graphrt.cuda.blocks import workspace_sizes
from graphrt.cuda.driver.api import captured_nodes


def ranges(named: Mapping[str, Tensor], pool: Any, stream: int) -> list[tuple[int, int, str]]:
    """Start, end and name of named tensors, of the pool's segments for small and for large blocks,
    and of cuBLAS's workspace.

    With expandable segments a pool has one range of addresses of each kind.
    """
    found: dict[int, tuple[int, int, str]] = {}
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


def map_pool(pool: Any, sizes: Mapping[str, int]) -> None:
    """Have the allocator map so many bytes of a pool's ranges, which then stay mapped."""
    small = 512 << 10
    with torch.cuda.use_mem_pool(pool):
        blocks = [max(sizes.get("pool large", 0), 2 << 20)]
        blocks += [small] * -(-sizes.get("pool small", 0) // small)
        # All at once; they are freed again before the context ends.
        tuple(torch.empty(size, dtype=torch.uint8, device="cuda") for size in blocks)


class Operators(TorchDispatchMode):
    """Notes which nodes of a capture each operator made, and how it was called."""

    def __init__(self, stream: int) -> None:
        super().__init__()
        self._stream = stream
        self.calls: list[tuple[slice, dict[str, Any]]] = []

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled code stays compiled under this mode, which sees the operators that it calls."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = captured_nodes(self._stream) or 0
        result = func(*args, **(kwargs or {}))
        after = captured_nodes(self._stream) or 0
        if after > before:
            call = {"name": str(func), "args": _plain(args), "kwargs": _plain(kwargs or {})}
            self.calls.append((slice(before, after), call))
        return result


def _plain(value: Any) -> Any:
    """Arguments as JSON has them; dtypes and their like by their names: "torch.bfloat16"."""

    def leaf(each: Any) -> Any:
        if isinstance(each, Tensor):
            return {"tensor": [list(each.shape), list(each.stride()), str(each.dtype)]}
        return each if isinstance(each, bool | int | float | None) else str(each)

    return tree_map(leaf, value)


def prepared(operator: Mapping[str, Any], new: Callable[..., Tensor]) -> Callable[[], Any]:
    """The call of a noted operator, on tensors of `new`."""

    def made(value: Any) -> Any:
        if isinstance(value, str) and value.startswith("torch."):
            return getattr(torch, value.removeprefix("torch."))
        if isinstance(value, list):
            return [made(each) for each in value]
        if not isinstance(value, dict):
            return value
        if "tensor" not in value:
            return {key: made(each) for key, each in value.items()}
        shape, strides, dtype = value["tensor"]
        size = 1 + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
        return new(max(size, 0), dtype=made(dtype), device="cuda").as_strided(shape, strides)

    package, name, overload = str(operator["name"]).split(".")
    function = getattr(getattr(getattr(torch.ops, package), name), overload)
    return partial(function, *made(operator["args"]), **made(operator["kwargs"]))
