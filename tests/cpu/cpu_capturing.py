"""Capture and replay without graphrt.core around them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from graphrt.cpu import Arena, TapeGraph


def capture(
    forward: Callable[..., Any], *args: Any, arena: Arena | None = None, inference: bool = False
) -> tuple[TapeGraph, Any]:
    """As core does it: no_grad (or inference_mode) around begin, forward, end; abort on error."""
    graph = TapeGraph()
    mode = torch.inference_mode() if inference else torch.no_grad()
    with mode:
        graph.capture_begin(Arena() if arena is None else arena)
        try:
            result = forward(*args)
            graph.capture_end()
        except BaseException:
            graph.capture_abort()
            raise
    return graph, result


def modes_left() -> int:
    return len(_get_current_dispatch_mode_stack()) + len(_get_current_function_mode_stack())


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Bit for bit, with layout; a NaN equals itself."""
    if a.dtype != b.dtype or a.size() != b.size() or a.stride() != b.stride():
        return False
    flat = [t.detach().resolve_conj().contiguous().reshape(-1).view(torch.uint8) for t in (a, b)]
    return torch.equal(*flat)
